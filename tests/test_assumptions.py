"""What the design takes for granted about JAX, optax and NumPy, for each new backend.

A failure here is not a fault of the library but says which of its reasons has gone.
"""

import io

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from tests import helpers

FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
each_format = pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
each_way = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def _all_codes(dtype):
    return np.arange(256, dtype=np.uint8).view(dtype)


def _cast(dtype):
    return lambda x: x.astype(dtype)


@each_way
@pytest.mark.parametrize(
    ("dtype", "x", "want"),
    [
        ("e4m3", 448.0, 448.0),
        ("e4m3", 464.0, 448.0),  # half a step above: to even
        ("e4m3", 464.1, np.nan),
        ("e4m3", np.inf, np.nan),
        ("e5m2", 57344.0, 57344.0),
        ("e5m2", 61439.0, 57344.0),
        ("e5m2", 61440.0, np.inf),
        ("e5m2", 1e6, np.inf),
    ],
)
def test_a_bare_cast_does_not_saturate(dtype, x, want, wrap):
    got = wrap(_cast(FP8[dtype]))(jnp.float32(x))
    np.testing.assert_array_equal(np.float32(got), np.float32(want))


@each_way
@each_format
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_casts_below_overflow_have_the_bits_of_ml_dtypes(dtype, source, wrap):
    limit = float(jnp.finfo(dtype).max)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 1 << 17) * 2.0 ** rng.uniform(-20, 9, 1 << 17)
    x = np.clip(x, -limit, limit).astype(source)
    got = wrap(_cast(dtype))(jnp.asarray(x))
    # ml_dtypes rounds through float32, which holds every bfloat16.
    helpers.assert_same_bits(got, x.astype(np.float32).astype(dtype))


@each_format
def test_fp8_is_read_back_exactly(dtype):
    codes = _all_codes(dtype)
    got = jax.jit(_cast(jnp.float32))(jnp.asarray(codes))
    np.testing.assert_array_equal(got, codes.astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest", "mantissa"),
    [("e4m3", 448.0, 2.0**-9, 3), ("e5m2", 57344.0, 2.0**-16, 2)],
)
def test_finfo_knows_the_formats(dtype, largest, smallest, mantissa):
    info = jnp.finfo(FP8[dtype])
    assert float(info.max) == largest
    assert float(info.smallest_subnormal) == smallest
    assert info.nmant == mantissa


@each_format
def test_a_barrier_keeps_bits_under_jit_vmap_and_grad(dtype):
    codes = jnp.asarray(_all_codes(dtype))
    helpers.assert_same_bits(jax.jit(lax.optimization_barrier)(codes), codes)
    rows = codes.reshape(16, 16)
    helpers.assert_same_bits(jax.vmap(lax.optimization_barrier)(rows), rows)
    assert jax.grad(lambda x: lax.optimization_barrier(x) ** 2)(3.0) == 6.0


@each_format
def test_a_bitcast_keeps_every_code(dtype):
    there = lambda codes: lax.bitcast_convert_type(codes, jnp.uint8)
    back = lambda bits: lax.bitcast_convert_type(bits, dtype)
    codes = jnp.asarray(_all_codes(dtype))
    helpers.assert_same_bits(jax.jit(lambda c: back(there(c)))(codes), codes)


def test_reduce_precision_spoils_e4m3_on_a_cpu_and_spares_e5m2():
    """`jax.checkpoint` inserts this op, so no E4M3 residual may meet it unwrapped."""
    if jax.default_backend() != "cpu":
        pytest.skip(f"XLA drops the op on backend {jax.default_backend()!r}")
    codes = _all_codes(FP8["e4m3"])
    codes = codes[np.isfinite(codes.astype(np.float32))]
    reduced = jax.jit(lambda c: lax.reduce_precision(c, 4, 3))(jnp.asarray(codes))
    wrong = np.asarray(reduced).astype(np.float32) != codes.astype(np.float32)
    assert wrong.sum() == 28
    codes = _all_codes(FP8["e5m2"])
    reduced = jax.jit(lambda c: lax.reduce_precision(c, 5, 2))(jnp.asarray(codes))
    np.testing.assert_array_equal(
        np.asarray(reduced).astype(np.float32), codes.astype(np.float32)
    )


def test_differentiating_a_cast_casts_the_cotangent_too():
    f = lambda x: jnp.sum(x.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 0.3)
    assert jax.grad(f)(jnp.ones(1))[0] == np.float32(0.3125)


def test_fp8_does_not_mix_with_wider_floats_even_under_standard_promotion():
    code, wide = jnp.ones(1, jnp.float8_e4m3fn), jnp.ones(1)
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match="promotion"):
            code * wide
    assert (code * 2.0).dtype == code.dtype  # a Python scalar, though, stays in FP8
    assert jnp.sum(code).dtype == code.dtype


def test_optax_bias_correction_needs_standard_promotion():
    moments, count = {"w": jnp.ones(2)}, jnp.int32(1)
    with pytest.raises(ValueError, match="promotion"):
        optax.tree.bias_correction(moments, 0.9, count)
    with jax.numpy_dtype_promotion("standard"):
        optax.tree.bias_correction(moments, 0.9, count)


def test_optax_keeps_bfloat16_moments_for_bfloat16_parameters(optax_promotion):
    state = optax.scale_by_adam().init({"w": jnp.ones(2, jnp.bfloat16)})
    assert state.nu["w"].dtype == jnp.bfloat16


def test_optax_cannot_keep_fp8_moments_itself(optax_promotion):
    tx = optax.adamw(1e-3, mu_dtype=jnp.float8_e4m3fn)
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="promotion"):
        tx.update(params, tx.init(params), params)


def test_a_new_mesh_has_explicit_axes_which_refuse_to_merge_a_split_axis():
    mesh = jax.make_mesh((8,), ("x",))
    assert mesh.axis_types == (AxisType.Explicit,)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 1024)), P(None, "x"))
        with pytest.raises(Exception, match="sharding"):
            x.reshape(-1, 128)
        groups = x.reshape(4, 8, 128)
        assert jax.typeof(groups).sharding.spec == P(None, "x", None)


def test_a_jitted_init_forgets_the_shardings_of_its_arguments():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("x")))
    assert len(x.sharding.device_set) == 8
    zeros = jax.jit(lambda x: jnp.zeros(x.shape))(x)
    assert zeros.sharding.is_fully_replicated


def test_cpu_flushes_subnormals_so_a_scale_may_not_be_one():
    if jax.default_backend() != "cpu":
        pytest.skip(f"backend {jax.default_backend()!r} has its own policy")
    tiny = jnp.finfo(jnp.float32).tiny
    assert jax.jit(lambda x: x * 0.5)(tiny) == 0


def _through_a_file(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    buffer.seek(0)
    return np.load(buffer)


def test_numpy_files_lose_e4m3_and_cannot_be_read_with_e5m2():
    """So arrays of codes are written as uint8, with the format's name beside them."""
    assert _through_a_file(_all_codes(FP8["e4m3"])).dtype == np.dtype("V1")
    with pytest.raises(ValueError, match="not a valid dtype descriptor"):
        _through_a_file(_all_codes(FP8["e5m2"]))
