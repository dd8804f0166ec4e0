"""What optax promises of a transformation, held by each of ours."""

import functools
import warnings

from flax import nnx, serialization
from flax.core import FrozenDict
from flax.training.train_state import TrainState
import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax.expand import Expanded
from coat_jax.fp8_state import fp8_state
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.usefixtures("optax_promotion")

RATE = 1e-3
inject = optax.inject_hyperparams(coat_jax.fp8_adamw)
TXS = {
    "scale_by_fp8_adam": coat_jax.scale_by_fp8_adam(),
    "fp8_adam": coat_jax.fp8_adam(RATE),
    "fp8_adamw": coat_jax.fp8_adamw(RATE),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), coat_jax.fp8_adamw(RATE)),
    "inject_hyperparams": inject(learning_rate=RATE),
    "fp8_state": fp8_state(optax.lion(RATE)),
}
each = pytest.mark.parametrize("tx", TXS.values(), ids=TXS)
SHAPES = {"w": (64, 128), "norm": {"scale": (128,)}}  # one in FP8, one too small


def draw(seed, dtype=jnp.float32):
    """A tree of normal values in the shapes above."""
    rng = np.random.default_rng(seed)
    leaf = lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def step_of(tx):
    """One jitted step of `tx`: (grads, state, params) to (params, state)."""
    return jax.jit(functools.partial(step, tx))


def step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def types(tree):
    """Every leaf's shape, dtype and weakness, as a jitted function sees them."""
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


def assert_close(got, want, steps=1):
    """Equal as functions compiled apart may be: in the order of their sums.

    Codes are compared through the parameters that they move. 16 operations a step.
    """
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = np.abs(np.asarray(w, np.float64)).max()
        assert_reordered(g, w, n=16 * steps, scale=size)


def assert_moved(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.asarray(g, np.float32)).all()
        assert (np.asarray(g) != np.asarray(w)).any()


@each
def test_the_second_step_does_not_retrace_and_types_are_stable(tx):
    params, counted = draw(0), []

    @jax.jit
    def counting(grads, state, params):
        counted.append(1)
        return step(tx, grads, state, params)

    state = tx.init(params)
    want = types((params, state))
    assert types(jax.eval_shape(counting, draw(1), state, params)) == want
    for seed in (1, 2, 3):
        params, state = counting(draw(seed), state, params)
        assert types((params, state)) == want
    assert (counting._cache_size(), len(counted)) == (1, 1)
    assert_moved(params, draw(0))


@each
@pytest.mark.parametrize("grads", [jnp.float32, jnp.bfloat16], ids=["g32", "g16"])
@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16], ids=["p32", "p16"])
def test_state_types_depend_on_no_dtype(tx, params, grads):
    injected = tx is TXS["inject_hyperparams"]
    tx = INJECTED_FLOAT32 if injected else tx
    p = draw(0, params)
    state = jax.eval_shape(tx.init, p)
    updates, new = jax.eval_shape(tx.update, draw(1, grads), state, p)
    assert types(new) == types(state) == types(jax.eval_shape(tx.init, draw(0)))
    got = {leaf.dtype for leaf in jax.tree.leaves(updates)}
    # weight decay, optax's own, adds parameters (and its traced self) to an update
    widest = jnp.float32 if injected else jnp.promote_types(params, grads)
    assert got <= {jnp.dtype(grads), jnp.dtype(widest)}


INJECTED_FLOAT32 = optax.inject_hyperparams(
    coat_jax.fp8_adamw, hyperparam_dtype=jnp.float32
)(learning_rate=RATE)


@each
def test_init_of_shapes_and_under_eval_shape(tx):
    if tx is TXS["inject_hyperparams"]:
        tx = INJECTED_FLOAT32  # else optax reads the dtype off arrays
    params = draw(0)
    shapes = jax.eval_shape(lambda: params)
    state = tx.init(params)
    assert types(tx.init(shapes)) == types(state)
    assert types(jax.eval_shape(tx.init, params)) == types(state)
    assert types(jax.eval_shape(tx.init, shapes)) == types(state)
    assert all(leaf.size for leaf in jax.tree.leaves(state))


@each
def test_scan_equals_a_loop(tx):
    params, grads = draw(0), [draw(seed) for seed in (1, 2)]
    want, state = params, tx.init(params)
    for g in grads:
        want, state = step_of(tx)(g, state, want)

    @jax.jit
    def scan(params, grads):
        body = lambda carry, g: (step(tx, g, *carry[::-1]), None)
        return lax.scan(body, (params, tx.init(params)), grads)[0][0]

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    assert_close(scan(params, stacked), want, steps=2)


@each
def test_vmap_equals_a_loop(tx):
    params, grads = ([draw(seed + i) for i in range(2)] for seed in (0, 5))
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    state = jax.vmap(tx.init)(stack(params))
    got, state = jax.jit(jax.vmap(functools.partial(step, tx)))(
        stack(grads), state, stack(params)
    )
    want = [step_of(tx)(g, tx.init(p), p) for p, g in zip(params, grads, strict=True)]
    assert_close(got, stack([p for p, _ in want]))
    assert types(state) == types(stack([s for _, s in want]))


@each
def test_multi_steps_is_one_step_on_the_mean_gradient(tx):
    params, first, second = draw(0), draw(1), draw(2)
    multi = optax.MultiSteps(tx, 2).gradient_transformation()
    state = multi.init(params)
    held, state = step_of(multi)(first, state, params)
    assert_same_bits(held, params)
    got, state = step_of(multi)(second, state, held)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    want, _ = step_of(tx)(mean, tx.init(params), params)
    assert_close(got, want)


@each
def test_masked_and_partition_freeze_what_they_should(tx):
    params = draw(0)
    labels = {"w": "train", "norm": {"scale": "freeze"}}
    mask = jax.tree.map(lambda label: label == "train", labels)
    frozen = jax.tree.map(lambda keep: not keep, mask)
    wrapped = {
        "masked": optax.chain(
            optax.masked(tx, mask), optax.masked(optax.set_to_zero(), frozen)
        ),
        "partition": optax.partition(
            {"train": tx, "freeze": optax.set_to_zero()}, labels
        ),
    }
    got = {}
    for name, outer in wrapped.items():
        got[name], state = step_of(outer)(draw(1), outer.init(params), params)
        assert_same_bits(got[name]["norm"], params["norm"])
        assert_moved(got[name]["w"], params["w"])
        assert any(leaf.dtype == coat_jax.E4M3.dtype for leaf in jax.tree.leaves(state))
    assert_close(got["masked"], got["partition"])


@each
def test_apply_if_finite_leaves_the_state_alone_on_nan(tx):
    params = draw(0)
    guarded = optax.apply_if_finite(tx, 5)
    params, state = step_of(guarded)(draw(1), guarded.init(params), params)
    bad = draw(2)
    bad["w"] = bad["w"].at[3, 7].set(jnp.nan)
    got, after = step_of(guarded)(bad, state, params)
    assert_same_bits(got, params)
    assert_same_bits(after.inner_state, state.inner_state)
    assert int(after.notfinite_count) == 1
    got, after = step_of(guarded)(draw(3), after, params)
    assert_moved(got, params)


@each
def test_schedule_free_trains(tx):
    params = draw(0)
    free = optax.contrib.schedule_free(tx, RATE)
    state, current = free.init(params), params
    for seed in (1, 2):
        current, state = step_of(free)(draw(seed), state, current)
    assert_moved(optax.contrib.schedule_free_eval_params(state, current), params)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(draw(0)["w"])
        self.scale = nnx.Param(draw(0)["norm"]["scale"])


@each
def test_nnx_optimizer_takes_three_steps(tx):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    want, state = draw(0), tx.init(draw(0))

    @nnx.jit
    def train(model, optimizer, grads):
        optimizer.update(model, grads)

    before = types(nnx.to_pure_dict(nnx.state(optimizer)))
    for seed in (1, 2, 3):
        g = {"w": draw(seed)["w"], "scale": draw(seed)["norm"]["scale"]}
        train(model, optimizer, nnx.State(jax.tree.map(nnx.Param, g)))
        want, state = step_of(tx)(draw(seed), state, want)
    assert types(nnx.to_pure_dict(nnx.state(optimizer))) == before
    got = {"w": model.w[...], "norm": {"scale": model.scale[...]}}
    assert_close(got, want, steps=3)


def test_nnx_variables_are_named_alike_by_init_and_update():
    """`init` is shown variables and `update` the arrays in them; "w" is both."""
    tx = coat_jax.fp8_adamw(RATE, storage=coat_jax.Storage(keep=("w",)))
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.State({name: nnx.Param(x[...]) for name, x in vars_of(model)})
    for _ in range(2):
        optimizer.update(model, grads)
        assert optimizer.opt_state[0].mu.codes["w"].dtype == jnp.float32


def vars_of(model):
    return [("w", model.w), ("scale", model.scale)]


@each
def test_flax_train_state_takes_steps(tx):
    state = TrainState.create(apply_fn=None, params=draw(0), tx=tx)
    state = state.replace(step=jnp.zeros([], jnp.int32))  # flax's own int would retrace
    apply = jax.jit(lambda state, g: state.apply_gradients(grads=g))
    before = types(state.opt_state)
    for seed in (1, 2):
        state = apply(state, draw(seed))
    assert (int(state.step), apply._cache_size()) == (2, 1)
    assert types(state.opt_state) == before
    assert_moved(state.params, draw(0))


@each
def test_tree_map_params_gives_each_part_of_a_moment_the_parameters_spec(tx):
    specs = {"w": P("data", None), "norm": {"scale": P("model")}}
    state = tx.init(draw(0))
    got = optax.tree_map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )
    moments = [
        x for x in jax.tree.leaves(got, is_leaf=is_expanded) if isinstance(x, Expanded)
    ]
    assert moments
    assert all(moment == Expanded(specs, specs, specs) for moment in moments)
    assert jax.tree.structure(got) == jax.tree.structure(state)


def is_expanded(x):
    return isinstance(x, Expanded)


@each
def test_flax_serialization_keeps_every_bit(tx):
    params = draw(0)
    _, state = step_of(tx)(draw(1), tx.init(params), params)
    raw = serialization.to_bytes(state)
    assert_same_bits(serialization.from_bytes(tx.init(params), raw), state)


@each
@pytest.mark.parametrize("jit", [False, True], ids=["eager init", "jitted init"])
def test_donation_copies_nothing_and_warns_of_nothing(tx, jit):
    params = draw(0)
    state = (jax.jit(tx.init) if jit else tx.init)(params)
    used = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path((state, params))
        if not is_placeholder(path)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        donating = donating_of(tx)
        donating(draw(1), state, params)
    aliased = donating.memory_analysis().alias_size_in_bytes
    assert aliased == sum(leaf.nbytes for leaf in used)
    assert all(leaf.is_deleted() for leaf in used)


def is_placeholder(path):
    """The amax or power of a moment in float32: one element, read by nothing."""
    names = jax.tree_util.keystr(path)
    return ("amax" in names or "power" in names) and "scale" in names


@functools.cache
def donating_of(tx):
    """The compiled step that may overwrite its state and parameters."""
    donating = jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))
    params = draw(0)
    return donating.lower(draw(1), tx.init(params), params).compile()


HOLES = {"None": None, "MaskedNode": optax.MaskedNode()}


@each
@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_leaves_that_are_absent_stay_so(tx, hole):
    params = draw(0) | {"absent": hole}
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert types(new) == types(state)


CONTAINERS = {
    "FrozenDict": FrozenDict,
    "nnx.State": lambda p: nnx.State(jax.tree.map(nnx.Param, p)),
    "nnx.State of arrays": nnx.State,
    "list": lambda p: [p["norm"], (p["w"],)],
}


@each
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_any_container_of_parameters_will_do(tx, container):
    params = container(draw(0))
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert shapes(new) == shapes(state) == shapes(tx.init(draw(0)))


@each
def test_a_state_passes_through_cond(tx):
    params = draw(0)
    state = tx.init(params)
    update = lambda s: tx.update(params, s, params)[1]
    got = jax.eval_shape(lambda s: lax.cond(True, update, lambda s: s, s), state)
    assert types(got) == types(state)


FACTORIES = {
    "scale_by_fp8_adam": (coat_jax.scale_by_fp8_adam, {"b1": 0.9}),
    "fp8_adam": (coat_jax.fp8_adam, {"learning_rate": RATE}),
    "fp8_adamw": (coat_jax.fp8_adamw, {"learning_rate": RATE}),
    "fp8_adamw, schedule": (
        coat_jax.fp8_adamw,
        {"learning_rate": optax.constant_schedule(RATE), "storage": coat_jax.Storage()},
    ),
}
every_factory = pytest.mark.parametrize(
    ("factory", "options"), FACTORIES.values(), ids=FACTORIES
)


@every_factory
def test_inject_hyperparams_needs_no_static_args(factory, options):
    params = draw(0)
    injected = optax.inject_hyperparams(factory)(**options)
    state = injected.init(params)
    got, state = step_of(injected)(draw(1), state, params)
    plain = factory(**options | state.hyperparams)  # the same float32 scalars
    want, _ = step_of(plain)(draw(1), plain.init(params), params)
    assert_close(got, want)
    assert set(state.hyperparams) >= {"b1", "b2", "eps", "eps_root"}


@every_factory
def test_injected_hyperparameters_in_bfloat16_are_refused(factory, options):
    params = draw(0, jnp.bfloat16)
    with pytest.raises(TypeError, match="hyperparam_dtype=jnp.float32"):
        optax.inject_hyperparams(factory)(**options).init(params)
    tx = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(**options)
    got, _ = step_of(tx)(draw(1, jnp.bfloat16), tx.init(params), params)
    assert_moved(got, params)
    assert got["w"].dtype == jnp.bfloat16
