"""The fused step's kernel against optax's chain on the same state.

Their sums and logarithms round differently, so codes may lie on either side of an edge;
what a GPU's approximate functions may do more is in test_kernel_adam_tile.py.
"""

import functools
import re

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax import apply_fused, fp8_adamw
from coat_jax.kernels import adam
from tests.helpers import assert_reordered, assert_same_bits, assert_same_codes

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPES = {"w": (9, 384), "norm": (384,)}
# Sums of few terms, and the logarithm under a root, whose error counts once.
TERMS = 16


def draw(seed, dtype=jnp.float32, scale=1.0, shapes=SHAPES):
    """Gradients of groups that differ in size and spread."""
    rng = np.random.default_rng(seed)
    leaf = lambda shape: jnp.asarray(
        scale
        * rng.standard_normal(shape).astype(np.float32)
        * np.exp(rng.standard_normal((*shape[:-1], 1)).astype(np.float32)),
        dtype,
    )
    return {name: leaf(shape) for name, shape in shapes.items()}


@functools.cache
def step(tx, implementation, keyed=False):
    """Compiled once for all tests with its shapes."""
    key = jax.random.key(0) if keyed else None
    how = {"key": key, "implementation": implementation}
    return jax.jit(functools.partial(apply_fused, tx, **how))


@functools.cache
def initial(tx):
    return jax.jit(tx.init)


def assert_same_step(got, want, terms=TERMS):
    """Parameters and states of one step made twice."""
    (params, state), (want_params, want_state) = got, want
    for name, p in params.items():
        assert p.dtype == want_params[name].dtype
        scale = np.abs(np.asarray(want_params[name], np.float32)).max() + 1e-2
        assert_reordered(p, want_params[name], n=terms, scale=scale)
    (first, *tail), (want_first, *want_tail) = state, want_state
    assert_same_bits(tail, want_tail)
    assert_same_bits(first.count, want_first.count)
    for moment, other in zip(first[1:], want_first[1:], strict=True):
        assert_same_moment(moment, other)


def assert_same_moment(got, want):
    """Equal powers, amax to rounding, and codes that differ by few single steps."""
    assert_same_bits(got.power, want.power)
    for name, codes in got.codes.items():
        amax = np.asarray(want.amax[name])
        assert_reordered(got.amax[name], amax, n=TERMS, scale=np.abs(amax))
        if codes.dtype == jnp.float32:
            want_codes = np.asarray(want.codes[name])
            scale = np.abs(want_codes).max()
            assert_reordered(codes, want_codes, n=TERMS, scale=scale)
        else:
            assert_same_codes(codes, want.codes[name])


def both(
    tx, dtype=jnp.float32, keyed=False, scale=1e-3, kernel="triton", shapes=SHAPES
):
    """A step by XLA and then one by XLA and by the kernel in interpret mode."""
    params = draw(0, dtype, shapes=shapes)
    by_xla, by_kernel = step(tx, "xla", keyed), step(tx, kernel, keyed)
    state = initial(tx)(params)
    params, state = by_xla(draw(1, dtype, scale, shapes), state, params)
    grads = draw(2, dtype, scale, shapes)
    return by_kernel(grads, state, params), by_xla(grads, state, params)


storage = functools.partial(coat_jax.Storage, min_size=512)
adamw = functools.partial(fp8_adamw, 1e-2, weight_decay=0.1)
CASES = {
    "defaults": adamw(storage=storage()),
    "E5M2 and nesterov": adamw(
        nesterov=True,
        storage=storage(m_format=coat_jax.E5M2, v_format=coat_jax.E5M2, group=64),
    ),
    "nearest, masked decay": adamw(
        b2=0.95,
        mask={"w": False, "norm": True},
        storage=storage(v_rounding="nearest", group=32),
    ),
    "plain, schedules, eps_root": fp8_adamw(
        optax.linear_schedule(1e-2, 0.0, 9),
        eps_root=1e-9,
        weight_decay=optax.constant_schedule(0.1),
        storage=storage(expand=False),
    ),
    "injected": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(fp8_adamw, hyperparam_dtype=jnp.float32)(
            learning_rate=1e-2, storage=storage()
        ),
    ),
}


def inner(result):
    """What fp8_adamw itself returned."""
    params, state = result
    state = state[-1] if len(state) == 2 else state
    return params, getattr(state, "inner_state", state)


@pytest.mark.parametrize("tx", CASES.values(), ids=CASES)
def test_the_kernel_takes_the_step_that_optax_takes(tx):
    got, want = map(inner, both(tx))
    assert_same_step(got, want)


def test_gradients_of_any_size():
    """Of 1e-15 and of 1e10, in one leaf."""
    tx, params = CASES["defaults"], draw(0)
    sizes = np.float32(10.0) ** np.linspace(-15, 10, 9, dtype=np.float32)[:, None]
    state, grads = initial(tx)(params), draw(1)
    grads["w"] = grads["w"] * sizes
    args = grads, state, params
    assert_same_step(step(tx, "triton")(*args), step(tx, "xla")(*args))


def test_bfloat16_parameters_are_rounded_by_the_same_bits():
    got, want = both(CASES["defaults"], jnp.bfloat16, keyed=True)
    for name, p in got[0].items():
        assert p.dtype == jnp.bfloat16
        differ = np.asarray(p) != np.asarray(want[0][name])
        assert differ.mean() <= 2e-3  # the sums before differ in their last bits
    assert_same_moment(got[1][0].mu, want[1][0].mu)
    assert_same_moment(got[1][0].nu, want[1][0].nu)


def test_bfloat16_without_a_key_is_the_float32_step_rounded_once():
    tx, params = CASES["defaults"], draw(0, jnp.bfloat16)
    grads, state = draw(1, jnp.bfloat16), initial(tx)(params)
    got, _ = step(tx, "triton")(grads, state, params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (grads, params))
    want, _ = step(tx, "xla")(wide[0], state, wide[1])
    differ = np.asarray(got["w"]) != np.asarray(want["w"]).astype(jnp.bfloat16)
    assert differ.mean() <= 2e-3


BAD = {"NaN": np.nan, "Inf": np.inf, "overflowing square": 3e38}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_what_is_not_finite_spoils_its_group_alone(value):
    tx, params = CASES["defaults"], draw(0)
    grads, state = draw(1, scale=1e-3), initial(tx)(params)
    grads["w"] = grads["w"].at[2, 200].set(value)
    args = grads, state, params
    got, got_state = step(tx, "triton")(*args)
    want, want_state = step(tx, "xla")(*args)
    bad = np.zeros((9, 3), bool)
    bad[2, 1] = not np.isfinite(np.float32(value))
    for moment, other in zip(got_state[0][1:], want_state[0][1:], strict=True):
        np.testing.assert_array_equal(np.isnan(moment.amax["w"]), bad)
        good = ~bad
        assert_same_bits(
            np.asarray(moment.power["w"])[good], np.asarray(other.power["w"])[good]
        )
        codes = np.asarray(moment.codes["w"]).astype(np.float32)
        np.testing.assert_array_equal(np.isnan(codes), np.repeat(bad, 128, 1))
    np.testing.assert_array_equal(np.isnan(got["w"]), np.isnan(want["w"]))


def test_all_zero_and_negative_zero_gradients():
    tx, params = CASES["defaults"], draw(0)
    zeros = jax.tree.map(lambda x: jnp.where(x > 0, 0.0, -0.0), params)
    args = zeros, initial(tx)(params), params
    assert_same_step(step(tx, "triton")(*args), step(tx, "xla")(*args))


@pytest.mark.skipif(
    "mosaic" not in adam.KERNELS, reason="this jax cannot partition Mosaic's kernel"
)
def test_mosaic_takes_the_leaves_it_can():
    """The other, of a group too many, takes XLA's step."""
    shapes = {"w": (2, 512), "odd": (5, 128)}
    got, want = both(CASES["defaults"], kernel="mosaic", shapes=shapes)
    assert_same_step(got, want)
    first, other = got[1][0], want[1][0]
    assert_same_bits(first.nu.codes["odd"], other.nu.codes["odd"])
    why = adam.refuses((5, 128), "float32", "float32", 128, backend="mosaic")
    assert "takes a multiple of 4 groups, not 5" in why


@pytest.mark.parametrize("spec", [P("d", None), P(None, "d"), P()], ids=str)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shards_are_stepped_where_they_lie(spec, kind):
    """The random bits are those of the whole array, whatever part a device has."""
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    shapes, tx = {"w": (8, 1024)}, CASES["defaults"]
    params, grads = draw(0, shapes=shapes), draw(1, shapes=shapes)
    want = step(tx, "triton")(grads, initial(tx)(params), params)
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        args = put(grads), tx.init(put(params)), put(params)
        got = step(tx, "triton")(*args)
    assert got[0]["w"].sharding.spec == spec or spec == P()
    assert_same_step(got, want)
    assert_same_bits(
        jax.tree.leaves(got[1][0].nu.codes), jax.tree.leaves(want[1][0].nu.codes)
    )


def test_vmap_steps_each():
    tx, shapes = CASES["defaults"], {"w": (8, 1024)}
    params, grads = draw(0, shapes=shapes), draw(1, shapes=shapes)
    pair = lambda tree: jax.tree.map(lambda x: jnp.stack([x, -x]), tree)
    state, one = initial(tx)(params), step(tx, "triton")
    mapped = jax.jit(jax.vmap(one, (0, None, 0)))(pair(grads), state, pair(params))
    assert_same_step(jax.tree.map(lambda x: x[0], mapped), one(grads, state, params))


# What is refused


REFUSED = {
    "float16": ((4, 256), "float16", 128, "parameters are neither float32 nor"),
    "group 100": ((4, 200), "float32", 100, "the group is no power of two"),
    "tail": ((4, 200), "float32", 128, "the last axis, 200, is no multiple"),
    "empty": ((0, 128), "float32", 128, "there are no groups"),
    "scalar": ((), "float32", 128, "there are no groups"),
    "2^31 codes": ((2**24, 128), "float32", 128, "cannot count 2147483648 elements"),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "group", "why"), REFUSED.values(), ids=REFUSED
)
def test_refuses_says_why(shape, dtype, group, why):
    assert why in adam.refuses(shape, dtype, "float32", group)


def test_a_named_kernel_does_not_give_way():
    tx, params = CASES["defaults"], {"w": jnp.ones((8, 200))}
    state = tx.init(params)
    with pytest.raises(ValueError, match="apply_fused: .*'w': the last axis, 200"):
        apply_fused(tx, params, state, params, implementation="triton")
    step = functools.partial(apply_fused, tx)
    new, _ = jax.eval_shape(step, params, state, params)
    assert new["w"].shape == (8, 200)


# What is compiled


def described(dtype, shape=(512, 1024)):
    params = {"w": jax.ShapeDtypeStruct(shape, dtype)}
    return params, jax.eval_shape(CASES["defaults"].init, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_it_is_one_kernel_in_place(h200_compile, dtype):
    tx = CASES["defaults"]
    params, state = described(jnp.dtype(dtype))
    key = jax.random.key(0)
    step = lambda grads, state, params: apply_fused(tx, grads, state, params, key=key)
    compiled = h200_compile(step, params, state, params, donate=(1, 2))
    text = compiled.as_text()
    assert len(re.findall(r"custom-call\(.*coat_adam", text)) == 1
    assert " copy(" not in text
    assert " reduce(" not in text  # nothing of the step is left to XLA
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=str)
def test_over_eight_gpus_nothing_travels(h200_compile, h200_mesh, spec):
    tx, on = CASES["defaults"], h200_mesh(8)
    params, state = described(jnp.float32)
    put = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, spec if x.ndim else P())
        ),
        tree,
    )
    step = lambda grads, state, params: apply_fused(tx, grads, state, params)
    compiled = h200_compile(step, put(params), put(state), put(params), on=on)
    text = compiled.as_text()
    assert "coat_adam" in text
    for travels in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert travels not in text
