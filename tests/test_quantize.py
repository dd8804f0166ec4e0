"""Group-scaled FP8 against its definition in NumPy float64."""

import functools
import inspect

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import formats
from coat_jax.expand import expand_dequantize, expand_quantize
from coat_jax.quantize import Quantized, check_group, dequantize, group_shape, quantize
from tests import expand_judge as judge
from tests import helpers

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


@functools.cache
def _round_trip(format, group=128, axis=-1):
    @jax.jit
    def run(x):
        q = quantize(x, format=format, group=group, axis=axis)
        return q, dequantize(q, group=group, axis=axis)

    return run


def _scale(x, format, group, axis):
    """max |x| / max of each group in float64, and its shape beside each element."""
    if group is None:
        return np.maximum(np.abs(x).max(initial=0) / format.max, judge.TINY)
    amax = judge.grouped(np.abs(x), group, axis).max(-1)
    return np.moveaxis(np.maximum(amax / format.max, judge.TINY), -1, axis)


def _spread(scale, x, group, axis):
    if group is None:
        return scale
    wide = np.repeat(scale, group, axis=axis)
    return np.take(wide, np.arange(x.shape[axis]), axis=axis)


def _check(x, q, decoded, format, *, group=128, axis=-1):
    """The bound, the scales, and signs; magnitudes below normal float32 are zero."""
    x = np.asarray(x).astype(np.float64)
    assert q.codes.dtype == format.dtype
    assert (q.scale.dtype, decoded.dtype) == (jnp.float32, jnp.float32)
    assert q.codes.shape == decoded.shape == x.shape
    x, decoded = np.atleast_1d(x), np.atleast_1d(np.asarray(decoded, np.float64))
    x = np.where(np.abs(x) < judge.TINY, 0, x)
    scale = _scale(x, format, group, axis)
    got = np.atleast_1d(np.asarray(q.scale, np.float64))
    helpers.assert_reordered(got, np.broadcast_to(scale, got.shape), 1, scale)
    wide = np.broadcast_to(_spread(scale, x, group, axis), x.shape)
    # Multiplying by a rounded reciprocal may move a tie between two subnormal codes, at
    # most eight steps from zero, by three roundings: 16 half steps of 3 * 2**-24 each.
    wide = wide * (1 + 2.0**-18)
    # A product below normal float32 may be flushed.
    flushed = (decoded == 0) & (np.abs(x) < judge.TINY * (1 + format.relative))
    helpers.assert_within_format(decoded[~flushed], x[~flushed], format, wide[~flushed])
    assert np.all((np.sign(decoded) == np.sign(x)) | (decoded == 0))


CASES = [
    *(((3, 130), group, 1, "e4m3") for group in (1, 2, 16, 100, 127, 128, 129, 256)),
    *(((2, 1000), group, 1, "e4m3") for group in (1, 16, 100, 127, 128, None)),
    *(((n,), group, 0, "e4m3") for n in (1, 5, 128) for group in (1, 16, None)),
    *(((2, 3, 5, 7), group, axis, "e4m3") for group in (2, 128) for axis in range(4)),
    *(((3, 130), group, axis, "e5m2") for group in (16, 100) for axis in (0, 1)),
    ((3, 130), None, 0, "e5m2"),
]


@pytest.mark.parametrize(("shape", "group", "axis", "format"), CASES, ids=str)
def test_shapes_group_sizes_and_axes(shape, group, axis, format):
    format = FORMATS[format]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, shape)
    x = x.astype(np.float32)
    q, decoded = _round_trip(format, group, axis)(x)
    want = list(shape)
    want[axis] = None if group is None else -(-shape[axis] // group)
    assert q.scale.shape == ((1,) * len(shape) if group is None else tuple(want))
    assert q.scale.shape == group_shape(shape, group, axis)
    _check(x, q, decoded, format, group=group, axis=axis)
    assert (np.asarray(decoded) != x).mean() > 0.5 or x.size < 8 or group == 1


@pytest.mark.parametrize("width", [1, 128, 129])
@each_format
@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_drawn_groups_are_within_the_bound(seed, width, format):
    x = judge.rows(seed, width)
    q, decoded = _round_trip(format)(x)
    _check(x, q, decoded, format)


@each_format
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-36, 1e-30, 1e30, 3.4e38])
def test_constants_of_any_size_stay_finite(format, size):
    """B03: the scale has a floor, so nothing is divided by zero or by a subnormal."""
    x = np.full((3, 128), size, np.float32)
    x[2, 1:] = 0
    for group in (128, None):
        q, decoded = _round_trip(format, group)(x)
        _check(x, q, decoded, format, group=group)
        assert np.isfinite(decoded).all()
        assert (np.asarray(q.scale) >= judge.TINY).all()
        np.testing.assert_array_equal(
            decoded == 0, judge.magnitudes(x) == 0, err_msg=f"group {group}"
        )


@each_format
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize(
    ("shape", "axis"), [((), 0), ((0,), 0), ((0, 4), 1), ((3, 0), 1), ((3, 0), 0)]
)
def test_scalars_and_empty_arrays(format, group, shape, axis):
    x = jnp.full(shape, -3.0)
    q, decoded = _round_trip(format, group, axis)(x)
    assert q.scale.shape == group_shape(shape, group, axis)
    assert (q.codes.dtype, q.scale.dtype) == (format.dtype, jnp.float32)
    assert (decoded.dtype, decoded.shape) == (jnp.float32, shape)
    assert np.isfinite(q.scale).all()
    helpers.assert_reordered(decoded, x, 1, 3.0)


@pytest.mark.parametrize(
    ("shape", "group", "axis", "want"),
    [
        ((), 128, -1, ()),
        ((), None, -1, ()),
        ((0, 4), 128, 1, (0, 1)),
        ((3, 0), 128, 1, (3, 0)),
        ((3, 0), None, 1, (1, 1)),
        ((2, 129, 3), 128, -2, (2, 2, 3)),
    ],
)
def test_the_shape_of_one_statistic_a_group(shape, group, axis, want):
    assert group_shape(shape, group, axis) == want


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_narrow_floats_are_read_as_float32(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 130)), dtype)
    run = _round_trip(formats.E4M3)
    helpers.assert_same_bits(run(x), run(x.astype(jnp.float32)))


def test_the_largest_of_a_group_is_exact_up_to_its_scale():
    x = judge.rows(5, 128)
    q, _ = _round_trip(formats.E4M3)(x)
    top = np.abs(np.asarray(q.codes).astype(np.float32)).max(1)
    large = np.abs(x).max(1) > judge.TINY * 448
    np.testing.assert_array_equal(top[large], 448)


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x)[1],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nan_and_inf_spoil_their_group_and_no_other(way):
    x = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    clean = x.copy()
    bad = np.zeros(x.shape, bool)
    for row, column, value in ((0, 5, np.nan), (1, 130, np.inf), (2, 299, -np.inf)):
        x[row, column] = value
        bad[row, column // 128 * 128 : column // 128 * 128 + 128] = True
    run = lambda x: (lambda q: (q, dequantize(q)))(quantize(x))
    (q, decoded), (want, _) = way(run)(jnp.asarray(x)), way(run)(jnp.asarray(clean))
    np.testing.assert_array_equal(np.isnan(q.codes.astype(jnp.float32)), bad)
    np.testing.assert_array_equal(np.isnan(decoded), bad)
    np.testing.assert_array_equal(np.isnan(q.scale), bad[:, ::128])
    helpers.assert_same_bits(np.asarray(q.codes)[~bad], np.asarray(want.codes)[~bad])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(), (3, 130), (8, 4096)], ids=str)
def test_nan_and_inf_spoil_a_whole_tensor_of_one_scale(value, shape):
    x = np.ones(shape, np.float32)
    x[(0,) * x.ndim] = value
    q, decoded = _round_trip(formats.E4M3, None)(x)
    assert np.isnan(q.scale).all()
    assert np.isnan(decoded).all()


def test_codes_are_narrow_in_a_jitted_round_trip():
    """B40, B41: explicit casts, under strict promotion; the rounding is not undone."""
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    q, decoded = _round_trip(formats.E4M3)(x)
    helpers.assert_same_bits(decoded, dequantize(q))
    assert (np.asarray(decoded) != x).mean() > 0.9
    assert isinstance(q, Quantized)


# Errors ------------------------------------------------------------------------------
# The tests' own type checks would speak first: these are the sentences a user reads.
encode = inspect.unwrap(quantize)
decode = inspect.unwrap(dequantize)


@pytest.mark.parametrize(
    ("x", "dtype"), [(np.arange(4), "int32"), (np.ones(3, np.complex64), "complex64")]
)
def test_what_is_no_real_float_is_refused(x, dtype):
    sentence = (
        f"^quantize: x must be a real .*, got dtype {dtype} and shape .*; cast it"
    )
    with pytest.raises(TypeError, match=sentence):
        encode(jnp.asarray(x))


@pytest.mark.parametrize("group", [0, -1, True])
def test_a_group_that_is_no_positive_number_is_refused(group):
    sentence = f"^quantize: group must be a whole number of at least 1, got {group} for"
    with pytest.raises(ValueError, match=sentence) as error:
        encode(jnp.ones((3, 130)), group=group)
    assert "(3, 130)" in str(error.value)


def test_a_fractional_group_is_refused():
    with pytest.raises(ValueError, match=r"group must be a whole .* got 1\.5"):
        inspect.unwrap(check_group)("quantize", (4,), 1.5, 0)


@pytest.mark.parametrize(("shape", "axis"), [((3, 4), 2), ((3, 4), -3), ((), 1)])
def test_an_axis_that_is_not_there_is_refused(shape, axis):
    sentence = f"^quantize: axis must lie in x's {len(shape)} axes, got {axis} for x of"
    with pytest.raises(ValueError, match=sentence):
        encode(jnp.ones(shape), axis=axis)


def test_what_was_not_quantised_is_refused():
    q, _ = _round_trip(formats.E4M3)(jnp.ones((3, 130)))
    with pytest.raises(
        TypeError, match="codes must be float8_e4m3fn .* got float32 of"
    ):
        decode(q._replace(codes=jnp.ones((3, 130))))
    for kwargs in ({"group": 64}, {"axis": 0}, {"group": None}):
        with pytest.raises(
            ValueError,
            match=r"^dequantize: .* need scale of shape .*, got \(3, 2\); pass",
        ):
            decode(q, **kwargs)
    with pytest.raises(ValueError, match="group must be a whole number"):
        decode(q, group=0)


@pytest.mark.parametrize("what", [quantize, expand_quantize])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"format": "e4m3"},
            "format must be coat_jax.E4M3 or .* got 'e4m3'",
        ),
        ({"axis": None}, "axis must be one whole number, got None"),
        ({"axis": (0, 1)}, r"axis must be one whole number, got \(0, 1\)"),
        ({"axis": 1.0}, "axis must be one whole number, got 1.0"),
    ],
    ids=str,
)
def test_formats_and_axes_of_another_kind_are_refused(what, options, words):
    with pytest.raises(TypeError, match=words):
        inspect.unwrap(what)(jnp.ones((2, 4)), **options)


def test_a_numpy_number_is_a_group():
    q = inspect.unwrap(quantize)(jnp.ones(4), group=np.int64(2))
    assert q.scale.shape == (2,)


def test_gradients_through_what_is_stored_are_zero():
    x = jnp.linspace(-1, 1, 128)
    there_and_back = [
        lambda x: dequantize(quantize(x)),
        lambda x: expand_dequantize(expand_quantize(x)),
    ]
    for f in there_and_back:
        np.testing.assert_array_equal(jax.grad(lambda x, f=f: f(x).sum())(x), 0)
