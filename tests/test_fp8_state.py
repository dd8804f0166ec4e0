"""fp8_state: its agreement with fp8_adamw, `select`, refusals, and composition."""

from typing import NamedTuple

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from coat_jax.expand import Expanded
from coat_jax.fp8_state import Fp8State, fp8_state
from coat_jax.moments import Storage, decode_moments
from coat_jax.optimizer import ScaleByFp8AdamState, fp8_adamw
from tests import optax_cases
from tests.helpers import assert_same_bits, assert_sqnr, assert_within_format

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

SMALL = Storage(min_size=1024)  # the cases' matrices are small
CLOSE = 20.0  # dB, as in test_fp8_state_table


@pytest.mark.parametrize("nesterov", [False, True], ids=["adamw", "nadamw"])
@pytest.mark.parametrize("rounding", ["nearest", None])
def test_adamw_is_fp8_adamw_bit_for_bit(nesterov, rounding):
    storage = Storage(min_size=1024, v_rounding=rounding)
    a = fp8_adamw(1e-2, storage=storage, nesterov=nesterov)
    b = fp8_state(optax.adamw(1e-2, nesterov=nesterov), storage=storage)

    @jax.jit
    def both(sa, sb, pa, pb, grads):
        (ua, sa), (ub, sb) = a.update(grads, sa, pa), b.update(grads, sb, pb)
        return sa, sb, optax.apply_updates(pa, ua), optax.apply_updates(pb, ub)

    pa = pb = optax_cases.params()
    sa, sb = a.init(pa), b.init(pb)
    for seed in range(5):
        sa, sb, pa, pb = both(sa, sb, pa, pb, optax_cases.gradients(seed))
    assert_same_bits(pb, pa)
    inner = sb.inner_state[0]
    assert_same_bits((inner.count, inner.mu, inner.nu), tuple(sa[0]))


def test_bfloat16_parameters_have_the_moments_of_fp8_adamw():
    p = optax.tree.cast(optax_cases.params(), jnp.bfloat16)
    grads = optax.tree.cast(optax_cases.gradients(0), jnp.bfloat16)
    a, b = fp8_adamw(1e-2, storage=SMALL), fp8_state(optax.adamw(1e-2), storage=SMALL)
    (_, sa), (out, sb) = (jax.jit(t.update)(grads, t.init(p), p) for t in (a, b))
    assert_same_bits(tuple(sb.inner_state[0])[1:], tuple(sa[0])[1:])
    assert jax.tree.map(lambda x: x.dtype, out) == {k: jnp.bfloat16 for k in p}
    dtypes = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)
    assert dtypes(b.init(p)) == dtypes(b.init(optax_cases.params())) == dtypes(sb)


@pytest.mark.parametrize("make", [optax.lion, optax.adan, optax.adabelief])
def test_with_every_leaf_kept_it_is_the_inner_transformation(make):
    tx = fp8_state(make(1e-2), storage=Storage(keep=("*",)))

    @jax.jit
    def both(s, ps, p, grads):
        (u, s), (v, ps) = tx.update(grads, s, p), make(1e-2).update(grads, ps, p)
        return u, v, s, ps

    p = optax_cases.params()
    s, ps = tx.init(p), make(1e-2).init(p)
    for seed in range(3):
        u, v, s, ps = both(s, ps, p, optax_cases.gradients(seed))
        assert_same_bits(u, v)


def test_one_step_of_momentum_is_the_gradient_within_the_format():
    tx = fp8_state(optax.sgd(1.0, momentum=0.9), storage=SMALL)
    p, grads = optax_cases.params(), optax_cases.gradients(0)
    _, state = tx.update(grads, tx.init(p), p)
    trace = state.inner_state[0].trace
    got = np.asarray(decode_moments(trace, SMALL, "m")["w"], np.float64)
    x = np.asarray(grads["w"], np.float64)
    amax = np.abs(x).max(axis=1, keepdims=True)
    power = np.asarray(trace.power["w"], np.float64) / 16
    y = lambda v: SMALL.m_format.max * np.sign(v) * (np.abs(v) / amax) ** power
    assert (got != x).any()
    np.testing.assert_array_equal(np.sign(got), np.sign(x))
    # The codes, read back from the decoded values, sit where y rounds to.
    slack = 1 + 2.0**-12
    assert_within_format(y(got) / slack, y(x) / slack, SMALL.m_format, scale=1 / slack)


@pytest.mark.parametrize(
    ("make", "bound"),
    [(optax.lion, 1.05), (optax.adamw, 2.09), (optax.adabelief, 2.09)],
)
def test_bytes_of_a_large_leaf(make, bound):
    p = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
    state = jax.eval_shape(fp8_state(make(1e-3)).init, p)
    assert optax_cases.size(state) <= bound * 4096 * 4096


def test_muon_keeps_its_coefficients_and_nadamw_its_count():
    tx = fp8_state(optax.contrib.muon(1e-2), storage=SMALL)
    state = tx.init(optax_cases.params())
    muon = state.inner_state.inner_states["muon"].inner_state[0]
    plain = optax.contrib.muon(1e-2).init(optax_cases.params())
    want = plain.inner_states["muon"].inner_state[0]
    assert_same_bits(muon.ns_coeffs, want.ns_coeffs)
    assert isinstance(muon.mu, Expanded)


class CustomState(NamedTuple):
    """A state that no table knows."""

    count: jax.Array
    average: dict


def custom():
    def init(params):
        return CustomState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        mix = lambda a, g: 0.9 * a + 0.1 * g
        average = jax.tree.map(mix, state.average, updates)
        return average, CustomState(state.count + 1, average)

    return optax.GradientTransformation(init, update)


def test_an_unknown_field_is_refused_by_name():
    tx = fp8_state(optax.chain(optax.clip(1.0), custom()))
    expected = r"CustomState\.average at '1/average/b', float32 of shape \(64,\)"
    with pytest.raises(ValueError, match=expected):
        tx.init(optax_cases.params())


def test_a_class_of_a_known_name_from_elsewhere_is_unknown():
    class ScaleByLionState(NamedTuple):
        mu: dict

    inner = optax.GradientTransformation(
        lambda p: ScaleByLionState(p), lambda u, s, p=None: (u, s)
    )
    with pytest.raises(ValueError, match="ScaleByLionState.mu at 'mu/b'"):
        fp8_state(inner).init(optax_cases.params())


def test_select_decides_what_is_unknown():
    seen = []

    def select(path, leaf):
        seen.append((path, leaf.shape, leaf.dtype))
        return "m" if path.startswith("1/average/") else None

    tx = fp8_state(optax.chain(optax.adam(1.0), custom()), storage=SMALL, select=select)
    p = optax_cases.params()
    state = tx.init(p)
    assert ("1/average/w", (64, 64), jnp.float32) in seen
    assert ("0/0/mu/w", (64, 64), jnp.float32) in seen
    before = jax.tree.structure(state)
    want = optax.chain(optax.adam(1.0), custom())
    plain = want.init(p)
    for seed in range(3):
        grads = optax_cases.gradients(seed)
        out, state = jax.jit(tx.update)(grads, state)
        ref, plain = want.update(grads, plain)
    assert_sqnr(optax_cases.flat(out), optax_cases.flat(ref), CLOSE)
    assert jax.tree.structure(state) == before
    average = state.inner_state[1].average
    assert average.codes["w"].dtype == SMALL.m_format.dtype
    assert average.codes["b"].dtype == jnp.float32  # a small leaf


def test_select_overrides_the_table_leaf_by_leaf():
    p = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
    select = lambda path, leaf: "keep" if path.endswith("mu/a") else None
    tx = fp8_state(optax.adam(1e-2), select=select)
    _, state = tx.update(p, tx.init(p))
    adam = state.inner_state[0]
    assert adam.mu.codes["a"].dtype == jnp.float32
    assert adam.mu.codes["b"].dtype == adam.nu.codes["a"].dtype == jnp.float8_e4m3fn


@pytest.mark.soak
def test_select_stores_the_momentum_of_adafactor():
    select = lambda path, leaf: "m" if "/ema/" in path else None
    tx = fp8_state(optax.adafactor(1e-2, momentum=0.9), storage=SMALL, select=select)
    _, state = optax_cases.run("adafactor", tx)
    assert isinstance(optax.tree_utils.tree_get(state, "ema"), Expanded)


def test_keep_patterns_see_the_parameters_path():
    storage = Storage(min_size=1024, keep=("w",))
    state = fp8_state(optax.chain(optax.lion(1e-2)), storage=storage).init(
        optax_cases.params()
    )
    assert optax_cases.in_fp8(state) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(inner=optax.adamw), "inner must be an optax transformation"),
        # The checked annotation speaks first where annotations are checked.
        (dict(inner=optax.lion(1.0), storage=128), "storage"),
        (dict(inner=optax.lion(1.0), select="m"), "must be a function"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        fp8_state(**arguments)


def test_a_wrong_answer_of_select_is_refused():
    with pytest.raises(
        ValueError, match="'m', 'v', 'keep' or None, got True for '0/mu/b'"
    ):
        fp8_state(optax.lion(1.0), select=lambda path, leaf: True).init(
            optax_cases.params()
        )


def test_a_select_that_changes_its_mind_is_refused():
    answers = {}
    select = lambda path, leaf: answers.get(path)
    tx = fp8_state(optax.lion(1.0), storage=SMALL, select=select)
    p = optax_cases.params()
    state = tx.init(p)
    answers["0/mu/w"] = "keep"
    with pytest.raises(
        ValueError, match="0/mu/w is stored in FP8, but select now says"
    ):
        tx.update(optax_cases.gradients(0), state, p)


def test_complex_moments_are_refused_and_split_ones_stored():
    p = {"w": jnp.ones((64, 64), jnp.complex64)}
    with pytest.raises(TypeError, match="complex64 at 0/mu/w"):
        fp8_state(optax.adam(1.0)).init(p)
    split = optax.contrib.split_real_and_imaginary(optax.adam(1.0))
    assert optax_cases.in_fp8(fp8_state(split).init(p)) == 4


def test_states_from_elsewhere_are_refused():
    p = optax_cases.params()
    grads = optax_cases.gradients(0)
    tx = fp8_state(optax.lion(1e-2), storage=SMALL)
    plain = optax.lion(1e-2).init(p)
    with pytest.raises(ValueError, match="must be the Fp8State that init"):
        tx.update(grads, plain, p)
    with pytest.raises(ValueError, match=r"ScaleByLionState.mu at '0/mu' must hold"):
        tx.update(grads, Fp8State(jnp.int32(0), plain), p)
    other = fp8_state(optax.lion(1e-2), storage=Storage(min_size=1024, group=32))
    with pytest.raises(ValueError, match="storage says group=128"):
        tx.update(grads, other.init(p), p)


def test_a_skipped_step_inside_leaves_the_codes_as_they_are():
    tx = fp8_state(optax.MultiSteps(optax.adamw(1e-2), 3), storage=SMALL)
    p = optax_cases.params()
    update, state = jax.jit(tx.update), tx.init(p)
    for seed in range(6):
        before = optax_cases.expanded(state)
        _, state = update(optax_cases.gradients(seed), state, p)
        if seed % 3 < 2:
            assert_same_bits(optax_cases.expanded(state), before)
    different = [
        (np.asarray(a.codes["w"]) != np.asarray(b.codes["w"])).any()
        for a, b in zip(optax_cases.expanded(state), before, strict=True)
    ]
    assert all(different)


def test_multisteps_outside_equals_steps_on_mean_gradients():
    tx = fp8_state(optax.lion(1e-2), storage=SMALL)
    p = optax_cases.params()
    multi = optax.MultiSteps(tx, 2)
    state, plain = multi.init(p), tx.init(p)
    for seed in range(2):
        grads = optax_cases.gradients(seed)
        for _ in range(2):
            out, state = jax.jit(multi.update)(grads, state, p)
        want, plain = jax.jit(tx.update)(grads, plain, p)
        assert_same_bits(out, want)


def test_scan_and_vmap():
    tx = fp8_state(optax.chain(optax.lion(1e-2)), storage=SMALL)
    p = optax_cases.params()
    grads = [optax_cases.gradients(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)

    def body(state, g):
        out, state = tx.update(g, state, p)
        return state, out

    scanned, outs = jax.lax.scan(body, tx.init(p), stacked)
    state = tx.init(p)
    for g in grads:
        out, state = jax.jit(tx.update)(g, state, p)
    assert_sqnr(
        optax_cases.flat(jax.tree.map(lambda x: x[-1], outs)),
        optax_cases.flat(out),
        CLOSE,
    )
    assert jax.tree.structure(scanned) == jax.tree.structure(state)
    many = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * 3), p))
    outs, many = jax.vmap(lambda g, s: tx.update(g, s, p))(stacked, many)
    first, _ = tx.update(grads[0], tx.init(p), p)
    assert_sqnr(
        optax_cases.flat(jax.tree.map(lambda x: x[0], outs)),
        optax_cases.flat(first),
        CLOSE,
    )


def test_inject_hyperparams_outside_and_inside_traces_once():
    p = optax_cases.params()
    make = lambda learning_rate: fp8_state(optax.lion(learning_rate), storage=SMALL)
    inside = fp8_state(optax.inject_hyperparams(optax.adamw)(1e-2), storage=SMALL)
    for tx in (optax.inject_hyperparams(make)(learning_rate=1e-2), inside):
        traces = []

        @jax.jit
        def step(state, grads, tx=tx, traces=traces):
            traces.append(1)
            return tx.update(grads, state, p)

        state = tx.init(p)
        for seed in range(3):
            holder = state if hasattr(state, "hyperparams") else state.inner_state
            holder.hyperparams["learning_rate"] = jnp.float32(0.1 * seed)
            out, state = step(state, optax_cases.gradients(seed))
        assert len(traces) == 1
        assert optax_cases.in_fp8(state) > 0


def test_bfloat16_does_not_reach_injected_hyperparameters():
    tx = fp8_state(optax.inject_hyperparams(optax.adamw)(1e-2))
    state = tx.init(optax.tree.cast(optax_cases.params(), jnp.bfloat16))
    assert float(state.inner_state.hyperparams["b2"]) < 1


def test_masked_none_and_empty_leaves():
    p = optax_cases.params() | {"none": None, "empty": jnp.zeros((0, 4))}
    mask = {"w": True, "b": False, "none": None, "empty": True}
    tx = fp8_state(optax.masked(optax.adam(1e-2), mask), storage=SMALL)
    state = tx.init(p)
    assert all(x.size for x in jax.tree.leaves(state))
    structure = jax.tree.structure(state)
    for _ in range(2):
        grads = jax.tree.map(jnp.ones_like, p)
        out, state = jax.jit(tx.update)(grads, state)
        assert out["empty"].shape == (0, 4)
        assert_same_bits(out["b"], grads["b"])
    assert jax.tree.structure(state) == structure


def test_galore_has_no_empty_leaves_here():
    tx = fp8_state(optax.contrib.galore(1e-2, rank=16), storage=SMALL)
    p = optax_cases.params()
    assert any(not x.size for x in jax.tree.leaves(optax.contrib.galore(1e-2).init(p)))
    assert all(x.size for x in jax.tree.leaves(tx.init(p)))


def test_fp8_transformations_inside_are_left_alone():
    inner = optax.chain(fp8_adamw(1e-2, storage=SMALL), optax.trace(0.9))
    tx = fp8_state(inner, storage=SMALL)
    state = tx.init(optax_cases.params())
    assert isinstance(state.inner_state[0][0], ScaleByFp8AdamState)
    out, state = jax.jit(tx.update)(
        optax_cases.gradients(0), state, optax_cases.params()
    )
    assert len(optax_cases.expanded(state)) == 3
    assert np.isfinite(optax_cases.flat(out)).all()


def test_eval_shape_and_abstract_parameters():
    tx = fp8_state(optax.adamw(1e-2), storage=SMALL)
    p = optax_cases.params()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
    same = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)
    want = same(tx.init(p))
    assert same(jax.eval_shape(tx.init, p)) == want
    assert same(tx.init(shapes)) == want


def test_tree_map_params_reaches_codes_and_statistics():
    tx = fp8_state(optax.chain(optax.adamw(1e-2), optax.trace(0.9)), storage=SMALL)
    state = tx.init(optax_cases.params())
    marked = optax.tree_map_params(tx, lambda _: "p", state)
    for moments in optax_cases.expanded(marked):
        assert set(jax.tree.leaves(moments)) == {"p"}
    assert marked.inner_state[0][0].count == 0


def test_donation_takes_every_buffer_of_moments():
    tx = fp8_state(optax.adamw(1e-2), storage=SMALL)
    p = optax_cases.params()
    step = jax.jit(lambda s, g: tx.update(g, s, p), donate_argnums=0)
    state = tx.init(p)
    _, new = step(state, optax_cases.gradients(0))
    # Placeholders of one element are not read, so there is nothing to take.
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.size > 1)
    assert_same_bits(new.count, jnp.int32(1))


def test_nnx_optimizer_trains_three_steps():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = fp8_state(optax.lion(1e-3), storage=SMALL)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
    losses = []
    for _ in range(3):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    assert optax_cases.in_fp8(nnx.state(optimizer)) > 0


def test_orbax_saves_and_restores_the_bits(tmp_path):
    tx = fp8_state(optax.adan(1e-2), storage=SMALL)
    _, state = optax_cases.run("adan", tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(tx.init, optax_cases.params())
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_same_bits(restored, state)
