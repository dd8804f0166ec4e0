"""apply_fused: the same bits as update and apply, what it refuses, and its rounding."""

import functools

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax import apply_fused, fp8_adamw
from coat_jax.fp8_state import fp8_state
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

FP8 = coat_jax.Storage(min_size=1024)  # w in FP8, the scale in float32
SHAPES = {"w": (8, 128), "norm": {"scale": (128,)}}


def draw(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    leaf = lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


adamw = functools.partial(fp8_adamw, 1e-2, weight_decay=0.1, storage=FP8)
clip = optax.clip_by_global_norm
inject = optax.inject_hyperparams(fp8_adamw, hyperparam_dtype=jnp.float32)
FUSABLE = {
    "alone": adamw(),
    "nesterov, masked decay": adamw(nesterov=True, mask=coat_jax.decay_mask),
    "schedules": fp8_adamw(
        optax.linear_schedule(1e-2, 0.0, 9),
        weight_decay=optax.constant_schedule(0.1),
        storage=FP8,
    ),
    "chain": optax.chain(clip(1.0), adamw()),
    "nested chain": optax.chain(clip(1.0), optax.chain(optax.identity(), adamw())),
    "injected": inject(learning_rate=1e-2, storage=FP8),
    "injected in a chain": optax.chain(
        clip(1.0), inject(learning_rate=1e-2, storage=FP8)
    ),
    "behind scale_by_fp8_adam": optax.chain(
        coat_jax.scale_by_fp8_adam(storage=FP8), adamw()
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tx", FUSABLE.values(), ids=FUSABLE)
def test_it_is_update_and_apply_updates_bit_for_bit(tx, dtype):
    @jax.jit
    def fused(grads, state, params):
        return apply_fused(tx, grads, state, params)

    @jax.jit
    def apart(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, first, second = draw(0, dtype), draw(1, dtype), draw(2, dtype)
    params, state = apart(first, tx.init(params), params)
    assert_same_bits(fused(second, state, params), apart(second, state, params))


def test_the_second_step_does_not_retrace():
    tx, params = adamw(), draw(0)
    fused = jax.jit(functools.partial(apply_fused, tx))
    params, state = fused(draw(1), tx.init(params), params)
    fused(draw(2), state, params)
    assert fused._cache_size() == 1


def test_none_leaves_and_other_links_extra_arguments_pass():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, extra["other"]))
        return updates, state

    link = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = optax.chain(link, adamw())
    params = draw(0) | {"none": None}
    grads = draw(1) | {"none": None}
    call = functools.partial(apply_fused, tx, value=3.0, other="text")
    got, _ = jax.eval_shape(call, grads, tx.init(params), params)
    assert seen == [(3.0, "text")]
    assert got["none"] is None


MASK = {"w": True, "norm": {"scale": True}}
LABELS = {"w": "a", "norm": {"scale": "a"}}
REFUSED = {
    "scale_by_fp8_adam": coat_jax.scale_by_fp8_adam(storage=FP8),
    "fp8_adam": coat_jax.fp8_adam(1e-2, storage=FP8),
    "its own parts": optax.chain(
        coat_jax.scale_by_fp8_adam(storage=FP8),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-2),
    ),
    "optax.adamw": optax.adamw(1e-2),
    "fp8_state(adamw)": fp8_state(optax.adamw(1e-2), storage=FP8),
    "fp8_state(lion)": fp8_state(optax.lion(1e-2), storage=FP8),
    "a link behind": optax.chain(adamw(), optax.scale(0.5)),
    "identity behind": optax.chain(adamw(), optax.identity()),
    "a nested link behind": optax.chain(optax.chain(adamw()), optax.scale(0.5)),
    "a chain behind": optax.chain(adamw(), optax.chain(optax.scale(0.5))),
    "between two others": optax.chain(
        coat_jax.scale_by_fp8_adam(storage=FP8), adamw(), optax.scale(0.5)
    ),
    "masked": optax.masked(adamw(), MASK),
    "masked at the end": optax.chain(
        coat_jax.scale_by_fp8_adam(storage=FP8), optax.masked(adamw(), MASK)
    ),
    "partition": optax.partition({"a": adamw()}, LABELS),
    "MultiSteps": optax.MultiSteps(adamw(), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(adamw(), 3),
    "schedule_free": optax.contrib.schedule_free(adamw(), 1e-2),
    "named_chain": optax.named_chain(("a", adamw())),
    "flatten": optax.flatten(adamw()),
    "without extra arguments": optax.GradientTransformation(
        adamw().init, lambda g, s, p=None: adamw().update(g, s, p)
    ),
    "empty chain": optax.identity(),
    "injected parts": optax.inject_hyperparams(coat_jax.fp8_adam)(
        learning_rate=1e-2, storage=FP8
    ),
    "chain of masked": optax.chain(clip(1.0), optax.masked(adamw(), MASK)),
}


@pytest.mark.parametrize("tx", REFUSED.values(), ids=REFUSED)
def test_everything_else_is_refused_in_a_sentence(tx):
    params = draw(0)
    state = jax.eval_shape(tx.init, params)
    want = (
        r"apply_fused: tx must be fp8_adamw\(\.\.\.\), alone or as the last link of "
        r"optax.chain.*this state \(\w+\).*Use tx.update and optax.apply_updates"
    )
    with pytest.raises(ValueError, match=want):
        jax.eval_shape(functools.partial(apply_fused, tx), params, state, params)


def test_missing_parameters_are_refused():
    tx, params = adamw(), draw(0)
    with pytest.raises(ValueError, match="apply_fused: params must be .* got None"):
        apply_fused(tx, params, tx.init(params), None)


# Stochastic rounding of bfloat16 parameters


@functools.partial(jax.jit, static_argnames=("tx", "steps", "rounded"))
def train(params, grads, tx, steps, rounded):
    """Parameters after `steps` with constant gradients, with or without keys."""

    def body(carry, t):
        params, state = carry
        key = jax.random.fold_in(jax.random.key(7), t) if rounded else None
        return apply_fused(tx, grads, state, params, key=key), None

    return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(steps))[0][0]


MOVES = {
    "gradient": (fp8_adamw(5e-4, weight_decay=0.0, storage=FP8), 1.0),
    "weight decay only": (fp8_adamw(1e-3, weight_decay=0.1, storage=FP8), 0.0),
}


@pytest.mark.parametrize(("tx", "gradient"), MOVES.values(), ids=MOVES)
def test_B09_small_updates_of_bfloat16_parameters_are_right_on_average(tx, gradient):
    """1000 steps from 1.0, each below half the spacing of bfloat16 near it."""
    ones = {"w": jnp.ones((8, 128))}
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ones)
    grads = jax.tree.map(lambda x: gradient * x, ones)
    moved = lambda params: 1 - float(np.mean(np.asarray(params["w"], np.float64)))
    want = moved(train(ones, grads, tx, 1000, rounded=False))
    got = moved(train(narrow, grads, tx, 1000, rounded=True))
    assert want > 0.09
    assert abs(got - want) <= 0.1 * want
    assert moved(train(narrow, grads, tx, 1000, rounded=False)) < 0.1 * want


def test_rounding_depends_on_the_key_alone():
    tx, params = adamw(), draw(0, jnp.bfloat16)
    fused = jax.jit(functools.partial(apply_fused, tx))
    run = lambda seed: fused(
        draw(1, jnp.bfloat16), tx.init(params), params, key=jax.random.key(seed)
    )
    assert_same_bits(run(0), run(0))
    (first, first_state), (other, other_state) = run(0), run(1)
    assert_same_bits(first_state, other_state)
    assert (first["w"] != other["w"]).mean() > 0.1
    assert (first["norm"]["scale"] != other["norm"]["scale"]).mean() > 0.1


def test_leaves_of_one_shape_are_rounded_independently():
    ones = jnp.ones((8, 128), jnp.bfloat16)
    params, grads = {"a": ones, "b": ones}, {"a": ones, "b": ones}
    tx = fp8_adamw(1e-3, storage=FP8)
    fused = jax.jit(functools.partial(apply_fused, tx, key=jax.random.key(0)))
    new, _ = fused(grads, tx.init(params), params)
    assert 0.1 < (new["a"] != new["b"]).mean() < 0.9


def test_with_a_key_float32_parameters_and_float16_ones_are_rounded_to_nearest():
    tx, params = adamw(), draw(0)
    params["norm"]["scale"] = params["norm"]["scale"].astype(jnp.float16)
    step = lambda **key: jax.jit(functools.partial(apply_fused, tx))(
        draw(1), tx.init(params), params, **key
    )
    (got, _), (want, _) = step(key=jax.random.key(0)), step()
    assert_reordered(got["w"], want["w"], n=16, scale=np.abs(want["w"]).max())
    assert got["norm"]["scale"].dtype == jnp.float16


@pytest.mark.parametrize("spec", [P("d", None), P(None, "d"), P()], ids=str)
def test_rounding_does_not_depend_on_the_sharding(spec):
    """The random bits are equal; the sums before them may differ in their last bit."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tx, key = adamw(), jax.random.key(3)
    params = {"w": draw(0, jnp.bfloat16)["w"]}
    grads = {"w": draw(1, jnp.bfloat16)["w"]}
    fused = jax.jit(lambda g, p: apply_fused(tx, g, tx.init(p), p, key=key)[0]["w"])
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
    got, want = fused(put(grads), put(params)), fused(grads, params)
    assert len(got.sharding.device_set) == 8
    assert (np.asarray(got) != np.asarray(want)).mean() <= 1e-3
