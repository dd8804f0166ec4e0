"""Sizes, objective and optimizer of the diagonals: what counts, and what survives."""

import dataclasses

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import fp8_adamw
from coat_jax.factorize import tt_shape, ttm_shape
from coat_jax.nn.tensor_train import TTLinear
from coat_jax.rank_control import (
    Objective,
    Targets,
    core_norm,
    labels,
    mean_diagonal,
    modes,
    rank_control,
    ranks,
    size_exact,
    size_relaxed,
    trains_of,
)
from coat_jax.tensor_train import TAU, size
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]
# The paper's FFN1 and word embedding at rank 30, and their parameters.
FFN1 = tt_shape(768, 3072, rank=30, in_dims=(12, 8, 8), out_dims=(12, 16, 16))
WORDS = ttm_shape(30522, 768, rank=32, row_dims=(16, 20, 10, 10), col_dims=(4, 4, 8, 6))


def filled(shape, fill=0.1):
    """A train with all core entries the same: no program is compiled for it."""
    cores = [jnp.asarray(np.full(s, fill, np.float32)) for s in shape.core_shapes]
    vs = [jnp.asarray(np.ones(s[-1], np.float32)) for s in shape.core_shapes[:-1]]
    return {"cores": cores, "diagonals": vs}


def small():
    return {
        "fc": filled(tt_shape(4, 4, rank=2, in_dims=(2, 2), out_dims=(2, 2)))
        | {"bias": jnp.zeros(4)},
        "embed": filled(ttm_shape(8, 4, rank=2, row_dims=(2, 4), col_dims=(2, 2))),
        "head": jnp.ones((2, 2)),
    }


# Trees and sizes ---------------------------------------------------------------------


def test_trains_are_found_in_dicts_states_and_models():
    model = nnx.Dict(first=TTLinear(8, 8, rank=2, order=2, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    linen = {"params": {"first": {"cores": {"0": 1, "1": 2}, "diagonals": {"0": 3}}}}
    for tree in (model, state, nnx.to_pure_dict(state)):
        assert list(trains_of(tree)) == [("first",)]
        assert ranks(tree) == {"first": (1, 2, 2, 2, 1)}
        assert modes(tree) == {"first": (4, 2, 2, 4)} or len(modes(tree)["first"]) == 4
    assert trains_of(linen) == {("params", "first"): ((1, 2), (3,))}


def test_ten_cores_and_more_are_in_their_order():
    numbered = {str(i): i for i in range(12)}
    tree = {"cores": numbered, "diagonals": {str(i): i for i in range(11)}}
    (train,) = trains_of(tree).values()
    assert train.cores == tuple(range(12))


def test_labels_tell_cores_diagonals_and_the_rest():
    found = labels(small())
    assert found["fc"]["cores"] == ["core"] * 4
    assert found["embed"]["diagonals"] == ["diagonal"]
    assert found["fc"]["bias"] == found["head"] == "rest"
    assert labels({"cores": jnp.ones(2), "diagonals": {"a": 1}}) == {
        "cores": "rest",
        "diagonals": {"a": "rest"},
    }


def test_a_train_with_a_diagonal_missing_is_refused():
    tree = small()
    tree["fc"]["diagonals"] = tree["fc"]["diagonals"][:2]
    with pytest.raises(ValueError, match="'fc' has 4 and 2"):
        trains_of(tree)


@pytest.mark.parametrize(("shape", "count"), [(FFN1, 28960), (WORDS, 167808)])
def test_the_relaxed_size_equals_the_exact_one_at_the_start(shape, count):
    params = {"a": filled(shape)}
    (train,) = trains_of(params).values()
    assert size(train) == count
    assert int(size_exact(params)) == count
    assert float(size_relaxed(params)) == count
    assert float(mean_diagonal(params)) == 1.0
    assert_reordered(core_norm(params), 0.01 * count, count, 0.01 * count)


def test_sums_over_diagonals_of_16_bits_are_in_float32():
    v = np.linspace(0.011, 0.039, 31, dtype=np.float32)
    v = jnp.asarray(v, jnp.bfloat16)
    params = {"cores": [jnp.ones((1, 2, 31)), jnp.ones((31, 2, 1))], "diagonals": [v]}
    exact = np.asarray(v, np.float64)
    assert_reordered(mean_diagonal(params), exact.mean(), 31, exact.mean())
    assert_reordered(size_relaxed(params), 4 * exact.sum(), 31, 4 * exact.sum())


def test_the_slopes_of_the_relaxed_size_are_the_papers():
    grads = jax.grad(lambda p: size_relaxed(p))(filled(FFN1))
    assert [float(v[0]) for v in grads["diagonals"]] == [252, 336, 600, 616, 496]


def test_the_dead_count_nothing_and_an_empty_bond_takes_the_layer():
    params = filled(FFN1)
    params["diagonals"][2] = params["diagonals"][2].at[10:].set(TAU)
    want = 28960 - 20 * (8 * 30 + 12 * 30)
    assert int(size_exact(params)) == float(size_relaxed(params)) == want
    params["diagonals"][0] = jnp.zeros(12)
    assert int(size_exact(params)) == 0
    everything = jax.tree.map(jnp.zeros_like, params)
    for f in (size_relaxed, mean_diagonal, core_norm):
        value, grads = jax.value_and_grad(f)(everything)
        assert float(value) == 0.0
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


# Objective ---------------------------------------------------------------------------


def total_of(objective, params, state, loss=2.0):
    return objective(jnp.float32(loss), params, state)


def test_the_early_stage_adds_size_and_norm():
    params, objective = filled(FFN1), Objective(gamma=0.5, beta=0.001)
    total, (figures, _) = total_of(objective, params, objective.init(params))
    want = 2.0 + 0.5 + 0.001 * 289.6
    assert_reordered(total, want, 28960, want)
    assert float(figures["size"]) == 28960
    assert float(figures["size_ratio"]) == 1.0


def test_the_code_objective_is_the_mean_of_the_diagonals():
    params, objective = filled(FFN1), Objective(kind="code")
    total, _ = total_of(objective, params, objective.init(params))
    assert float(total) == np.float32(2.01)


@pytest.mark.parametrize(
    ("kind", "loss", "c_loss", "c_size"),
    [
        ("paper", 0.0, 0.25, 3.25),  # the loss is below its target: shrink
        ("paper", 2.9, 2.25, 0.25),  # 2 (2.9 - 1) > 3 (1 - 0.5) ...
        ("paper", 1.7, 0.25, 3.25),  # ... > 2 (1.7 - 1)
        ("code", 1.9, 0.25, 3.01),  # (1.9 - 1) / 1.9 < (1 - 0.5) / 1
        ("code", 2.1, 2.25, 0.01),
    ],
)
def test_the_late_stage_works_on_what_is_further_from_its_target(
    kind, loss, c_loss, c_size
):
    params, objective = filled(FFN1), Objective(kind=kind, beta=0.0)
    targets = Targets(loss=1.0, size=14480, w_loss=2.0, w_size=3.0, rho=0.25)
    state = objective.late(objective.init(params), targets)
    total, (figures, _) = total_of(objective, params, state, loss)
    found = float(figures["c_loss"]), float(figures["c_size"])
    assert found == pytest.approx((c_loss, c_size))
    assert float(total) == pytest.approx(c_loss * loss + c_size)


def test_the_smoothed_loss_decides_and_starts_unbiased():
    params, objective = filled(FFN1), Objective(decay=0.9)
    state = objective.init(params)
    losses, averages = [4.0, 1.0, float("nan"), 2.0], []
    for loss in losses:
        _, (figures, state) = total_of(objective, params, state, loss)
        averages.append(float(figures["loss_average"]))
    want = [4.0, (0.9 * 4 + 1) / 1.9]
    want += [want[1], (0.81 * 4 + 0.9 + 2) / 2.71]
    assert averages == pytest.approx(want)
    assert int(state.count) == 3


def test_one_program_serves_both_stages_and_all_weights():
    params, objective, traces = filled(FFN1), Objective(), []

    @jax.jit
    def step(params, state):
        traces.append(1)
        loss_fn = lambda p: objective(jnp.sum(p["cores"][0]), p, state)
        (_, (figures, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return figures, new, grads

    state = objective.init(params)
    _, state, early = step(params, state)
    _, state, _ = step(params, objective.late(state, Targets(loss=9.0, size=100)))
    _, state, _ = step(params, objective.late(state, Targets(1.0, 7, 2.0, 3.0, 0.5)))
    state = state._replace(gamma=jnp.float32(0.3))
    figures, _, again = step(params, objective.early(state))
    assert len(traces) == 1
    assert float(figures["c_size"]) == np.float32(0.3)
    for a, b in zip(early["diagonals"], again["diagonals"], strict=True):
        assert_reordered(b, 3 * a, 30, float(jnp.abs(b).max()))


def test_the_delay_and_the_decoupled_kind_leave_the_size_out():
    params = filled(FFN1)
    later = Objective(delay=1, gamma=0.5, beta=0.0)
    total, (figures, state) = total_of(later, params, later.init(params))
    assert (float(total), float(figures["pressure"])) == (2.0, 0.0)
    total, (figures, _) = total_of(later, params, state)
    assert (float(total), float(figures["pressure"])) == (2.5, 1.0)
    apart = Objective(kind="decoupled", beta=0.0)
    state = apart.late(apart.init(params), Targets(loss=3.0, size=0, rho=0.25))
    total, (figures, _) = total_of(apart, params, state)
    assert (float(total), float(figures["pressure"])) == (0.5, 1.25)


def test_wrong_options_are_refused_in_words():
    with pytest.raises(ValueError, match="kind must be"):
        Objective(kind="late")
    with pytest.raises(ValueError, match="gamma must be"):
        Objective(gamma=-1.0)
    with pytest.raises(ValueError, match="decay must be"):
        Objective(decay=1.0)
    with pytest.raises(ValueError, match="delay must be at least 0"):
        Objective(delay=-5)
    with pytest.raises(ValueError, match="tau must be a finite number"):
        Objective(tau=float("nan"))
    with pytest.raises(ValueError, match="must hold a train"):
        Objective().init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="learning_rate must be"):
        rank_control(-1.0)
    assert dataclasses.is_dataclass(Objective)


# Optimizer ---------------------------------------------------------------------------


def drive(tx, params, gradient, steps=1, **extra):
    """`steps` updates with a gradient that is a function of the parameters."""
    state = tx.init(params)
    step = jax.jit(lambda p, s: tx.update(gradient(p), s, p, **extra))
    for _ in range(steps):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    return params, state


def bond(*entries):
    v = jnp.array(entries)
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    n = len(entries)
    return {"cores": [ones(1, 2, n), ones(n, 2, 1)], "diagonals": [v]}


def push(p):
    """Every diagonal's entries are pushed down, every core's are left."""
    zero = jax.tree.map(jnp.zeros_like, p)
    return zero | {"diagonals": [jnp.ones_like(v) for v in p["diagonals"]]}


def test_far_from_tau_it_is_adam():
    params, gradient = bond(1.0, 2.0, 1.5), jax.grad(lambda p: size_relaxed(p) ** 2)
    got, state = drive(rank_control(1e-3), params, gradient, steps=3)
    want, adam = drive(optax.adam(1e-3), params, gradient, steps=3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(a, b, 3, 2.0)
    assert_reordered(state.nu["diagonals"][0], adam[0].nu["diagonals"][0], 3, 10.0)


def test_the_dead_stay_where_they_are_whatever_the_momentum():
    params = bond(1.0, 0.0105, 0.005)
    tx = rank_control(1e-3)
    params, state = drive(tx, params, push)
    v = params["diagonals"][0]
    assert float(v[1]) == pytest.approx(0.0095)
    assert float(v[2]) == np.float32(0.005)
    assert state.mu["diagonals"][0][1:].tolist() == [0.0, 0.0]
    up = jax.tree.map(lambda g: -g, push(params))
    updates, _ = tx.update(up, state, params)
    assert updates["diagonals"][0][1:].tolist() == [0.0, 0.0]


def test_one_rank_of_a_bond_is_kept_and_its_layer_lives():
    """With all entries falling below tau at once, the largest is kept above it."""
    params, _ = drive(rank_control(1.0), bond(0.5, 0.7, 0.6), push)
    v = params["diagonals"][0]
    assert (v > TAU).tolist() == [False, True, False]
    assert int(size_exact(params)) == 4
    grads = jax.grad(lambda p: size_relaxed(p))(params)
    assert float(grads["diagonals"][0][1]) == 4.0


def test_many_diagonals_step_as_each_would_alone():
    """Of one length they are rows of one array; the last of 30 are fewer than a row."""
    random = np.random.default_rng(0)
    entries = lambda n: jnp.asarray(random.uniform(0, 0.05, n), jnp.float32)
    vs = [entries(n) for n in (2, 3) * 15]
    alone = lambda v: {"cores": [jnp.ones((1, 2, 1))], "diagonals": [v]}
    params = {f"{k:02}": alone(v) for k, v in enumerate(vs)}
    gradient = lambda p: jax.tree.map(lambda v: jnp.sin(100 * v), p)
    got, state = drive(rank_control(4e-3), params, gradient, steps=4)
    for name, one in params.items():
        want, single = drive(rank_control(4e-3), {name: one}, gradient, steps=4)
        assert_same_bits(got[name], want[name])
        assert_same_bits(state.nu[name], single.nu[name])
    dead = jnp.concatenate([one["diagonals"][0] <= TAU for one in got.values()])
    assert 0 < int(dead.sum()) < dead.size


def test_what_was_dead_before_is_not_rescued():
    params, _ = drive(rank_control(1.0), bond(0.001, 0.002), push)
    assert (
        params["diagonals"][0].tolist() == bond(0.001, 0.002)["diagonals"][0].tolist()
    )


def test_the_threshold_pulls_by_the_slope_of_the_size():
    """No gradient: v falls by lr gamma w, with w of mean 1 over the bonds."""
    params = filled(FFN1)
    still = lambda p: jax.tree.map(jnp.zeros_like, p)
    tx = rank_control(0.1, threshold=0.5)
    got, _ = drive(tx, params, still)
    slopes = np.array([252, 336, 600, 616, 496])
    fell = [1 - float(v[0]) for v in got["diagonals"]]
    assert fell == pytest.approx(list(0.05 * slopes / slopes.mean()))
    half, _ = drive(tx, params, still, pressure=jnp.float32(0.5))
    assert 1 - float(half["diagonals"][0][0]) == pytest.approx(fell[0] / 2)


def test_the_threshold_needs_modes_where_the_cores_are_hidden():
    params = small()
    parts = {"core": optax.adam(1e-3), "rest": optax.sgd(0.1)}
    still = lambda p: jax.tree.map(jnp.zeros_like, p)
    hidden = rank_control(0.1, threshold=0.5)
    with pytest.raises(ValueError, match="pass modes="):
        drive(optax.partition(parts | {"diagonal": hidden}, labels), params, still)
    given = rank_control(0.1, threshold=0.5, modes=modes(params))
    got, _ = drive(optax.partition(parts | {"diagonal": given}, labels), params, still)
    want, _ = drive(rank_control(0.1, threshold=0.5), params, still)
    assert_same_bits(got, want)


def test_a_gradient_revives_the_dead_in_soft_mode():
    """An entry that the threshold holds at 0 rises once its gradient outweighs it."""
    params = bond(1.0, 0.0)
    down = lambda p: jax.tree.map(lambda g: -g, push(p))
    soft = rank_control(0.1, threshold=0.3, revive=True)
    params, _ = drive(soft, params, down)
    assert float(params["diagonals"][0][1]) == pytest.approx(0.07, abs=1e-5)
    held, _ = drive(soft, bond(1.0, 0.01), lambda p: jax.tree.map(jnp.zeros_like, p))
    assert float(held["diagonals"][0][1]) == 0.0
    frozen, _ = drive(rank_control(0.1, threshold=0.3), bond(1.0, 0.0), down)
    assert float(frozen["diagonals"][0][1]) == 0.0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation(),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.inject_hyperparams(lambda lr: tx)(0.1),
    ],
    ids="chain MultiSteps apply_if_finite inject".split(),
)
def test_it_works_inside_optax(wrap):
    params = small()
    parts = {"core": optax.adam(1e-3), "rest": fp8_adamw(1e-3)}
    control = rank_control(
        optax.constant_schedule(0.1), threshold=0.1, modes=modes(params)
    )
    tx = wrap(optax.partition(parts | {"diagonal": control}, labels))
    got, state = drive(tx, params, jax.grad(size_relaxed), 2, pressure=1.0)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    for new, old in zip(got["fc"]["diagonals"], params["fc"]["diagonals"], strict=True):
        assert bool((new < old).all())
        assert new.dtype == jnp.float32


def test_a_learning_rate_can_be_injected():
    tx = optax.inject_hyperparams(rank_control, hyperparam_dtype=jnp.float32)(0.1)
    params, state = drive(tx, bond(1.0, 2.0), push)
    assert float(state.hyperparams["learning_rate"]) == np.float32(0.1)
    assert params["diagonals"][0].tolist() == pytest.approx([0.9, 1.9])


def test_without_parameters_it_says_what_to_pass():
    tx = rank_control(0.1)
    with pytest.raises(ValueError, match="must be given the parameters"):
        tx.update(bond(1.0), tx.init(bond(1.0)))


def test_a_nan_is_seen_and_can_be_skipped():
    nans = lambda p: jax.tree.map(lambda x: x * jnp.nan, p)
    spoiled, _ = drive(rank_control(0.1), bond(1.0, 2.0), nans)
    assert bool(jnp.isnan(spoiled["diagonals"][0]).all())
    kept, _ = drive(optax.apply_if_finite(rank_control(0.1), 2), bond(1.0, 2.0), nans)
    assert_same_bits(kept, bond(1.0, 2.0))


# B49: a public bug -------------------------------------------------------------------


@pytest.mark.parametrize("rank", [3, (4, 3, 4)])
def test_evaluation_never_prunes(rank):
    """Rank as a number or a list, one entry dead; two runs leave parameters equal."""
    layer = TTLinear(16, 16, rank=rank, order=2, rngs=nnx.Rngs(0))
    v = layer.diagonals[1]
    v[...] = v[...].at[0].set(0.002)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(layer)))
    x = jnp.ones((2, 16))
    first, second = layer(x), layer(x)
    assert_same_bits(first, second)
    assert_same_bits(nnx.to_pure_dict(nnx.state(layer)), before)


def test_a_layer_of_nnx_keeps_an_output_when_everything_is_pushed_down():
    """The quick start with nnx, every bond pushed below tau by one large step."""
    model = nnx.Dict(fc=TTLinear(16, 16, rank=3, order=2, rngs=nnx.Rngs(0)))
    parts = {"core": optax.adam(1e-3), "rest": optax.adam(1e-3)}
    tx = optax.partition(parts | {"diagonal": rank_control(5.0)}, labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    objective = Objective(gamma=100.0)
    state = objective.init(model)

    @nnx.jit
    def step(model, optimizer, state):
        def loss_fn(model):
            loss = jnp.mean(model.fc(jnp.ones((2, 16))) ** 2)
            return objective(loss, model, state)

        found = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        (_, (figures, new)), grads = found
        optimizer.update(model, grads, pressure=figures["pressure"])
        return figures, new

    step(model, optimizer, state)
    assert [int((v[...] > TAU).sum()) for v in model.fc.diagonals] == [1, 1, 1]
    assert float(jnp.abs(model.fc(jnp.ones((2, 16)))).max()) > 0


def test_states_are_saved_and_sharded(tmp_path):
    import orbax.checkpoint as ocp

    mesh = jax.make_mesh((1,), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(bond(1.0, 2.0, 0.02), everywhere)
    tx = rank_control(1e-2)
    params, state = drive(tx, params, push)
    tree = {"params": params, "state": state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
        checkpointer.wait_until_finished()
        assert_same_bits(checkpointer.restore(tmp_path / "c", tree), tree)
