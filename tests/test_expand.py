"""Range expansion against its definition in NumPy float64, group by group.

The drawn cases: 10 combinations of width and format x 5 examples x 256 groups or more
(12,800) in the ordinary run, 10 x 200 x 256 (512,000) in the soak run.
"""

import functools
import inspect

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import expand, formats, rounding
from tests import expand_judge as judge
from tests import helpers

pytestmark = pytest.mark.once

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
SAME_STATE = 1e-5  # share of codes that two programs may put on the other side of a tie


@functools.cache
def _round_trip(format, group=128, axis=-1, expanded=True):
    @jax.jit
    def run(x):
        e = expand.expand_quantize(
            x, format=format, group=group, axis=axis, expand=expanded
        )
        return e, expand.expand_dequantize(e, group=group, axis=axis)

    return run


each_width = pytest.mark.parametrize("width", [1, 2, 127, 128, 129])


def _check_drawn(seed, width, format):
    x = judge.rows(seed, width)
    e, decoded = _round_trip(format)(x)
    judge.check(x, e, decoded, format)
    order = np.random.default_rng(seed).permutation(min(width, 128))
    order = np.concatenate([order, np.arange(len(order), width)])
    f, permuted = _round_trip(format)(x[:, order])
    helpers.assert_same_bits((f.amax, f.power), (e.amax, e.power))
    _assert_same_state(f.codes, np.asarray(e.codes)[:, order])
    same = np.asarray(f.codes) == np.asarray(e.codes)[:, order]
    np.testing.assert_array_equal(
        np.asarray(permuted)[same], np.asarray(decoded)[:, order][same]
    )


def _assert_same_state(got, want):
    """Codes equal but for a few at a tie, which are one step apart."""
    got, want = (np.asarray(codes).view(np.uint8).astype(int) for codes in (got, want))
    assert np.abs(got - want).max(initial=0) <= 1
    assert (got != want).sum() <= np.ceil(SAME_STATE * got.size)


@each_format
@each_width
@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_drawn_groups_round_trip(seed, width, format):
    _check_drawn(seed, width, format)


@pytest.mark.soak
@each_format
@each_width
@hypothesis.settings(max_examples=200)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_many_drawn_groups_round_trip(seed, width, format):
    _check_drawn(seed, width, format)


@each_width
@pytest.mark.parametrize(
    ("format", "wrap"),
    [
        (formats.E4M3, lambda f: f),
        (formats.E4M3, jax.jit),
        (formats.E5M2, jax.jit),
    ],
    ids=["e4m3 eager", "e4m3 jit", "e5m2 jit"],
)
def test_a_constant_group_takes_the_largest_power(format, width, wrap):
    """B01: k is finite, and the round trip of a constant is nearly exact.

    Under jit log2(M) - log2(mu) is contracted and may be a little below zero.
    """
    rng = np.random.default_rng(width)
    constants = (judge.magnitude(rng, 200) * rng.choice([-1, 1], 200)).astype(
        np.float32
    )
    x = np.repeat(constants[:, None], width, axis=1)
    e = wrap(lambda x: expand.expand_quantize(x, format=format))(jnp.asarray(x))
    assert (np.asarray(e.power) == 255).all()
    np.testing.assert_array_equal(e.codes.astype(jnp.float32), np.sign(x) * format.max)
    helpers.assert_reordered(expand.expand_dequantize(e), x, 1, np.abs(x))


@pytest.mark.parametrize("place", [0, 5, 32, 127])
def test_a_zero_changes_nothing_wherever_it_stands(place):
    """B02: the minimum is over the non-zeros."""
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    without, _ = _round_trip(formats.E4M3)(np.delete(x, place))
    x[place] = 0
    e, decoded = _round_trip(formats.E4M3)(x)
    assert e.power == without.power
    np.testing.assert_array_equal(np.delete(e.codes, place), without.codes)
    np.testing.assert_array_equal(decoded == 0, x == 0)


@each_format
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-36, 1e-30])
def test_zeros_and_tiny_constants_stay_finite(format, size):
    """B03: no scale divides by zero; what is below normal float32 is zero."""
    x = np.full((3, 128), size, np.float32)
    x[1] = np.linspace(1, 2, 128)
    x[2, 1:] = 0
    e, decoded = _round_trip(format)(x)
    judge.check(x, e, decoded, format)
    assert (np.asarray(decoded) >= 0).all()
    if size < judge.TINY:
        assert e.amax[0] == 0
        assert e.power[0] == 16
        assert not np.asarray(decoded)[0].any()


@each_format
def test_the_whole_float32_range_in_one_group_loses_no_value(format):
    top = np.finfo(np.float32).max
    x = np.geomspace(judge.TINY, top, 128).astype(np.float32) * np.resize([1, -1], 128)
    _, decoded = _round_trip(format)(x)
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(np.sign(decoded), np.sign(x))


CASES = [
    *(((3, 130), group, 1, "e4m3") for group in (1, 2, 16, 100, 127, 128, 129, 256)),
    *(((2, 1000), group, 1, "e4m3") for group in (1, 2, 16, 100, 127, 128, 129, 256)),
    *(((4, 320), group, 1, "e4m3") for group in (1, 16, 128)),
    *(((n,), group, 0, "e4m3") for n in (1, 5, 128) for group in (1, 16, 128)),
    *(((2, 3, 5, 7), group, axis, "e4m3") for group in (2, 128) for axis in range(4)),
    *(((3, 130), group, axis, "e5m2") for group in (16, 100) for axis in (0, 1)),
]


@pytest.mark.parametrize(("shape", "group", "axis", "format"), CASES, ids=str)
def test_shapes_group_sizes_and_axes(shape, group, axis, format):
    format = FORMATS[format]
    rng = np.random.default_rng(group)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, shape)
    x = x.astype(np.float32)
    e, decoded = _round_trip(format, group, axis)(x)
    want = list(shape)
    want[axis] = -(-shape[axis] // group)
    assert e.amax.shape == e.power.shape == tuple(want)
    assert e.codes.dtype == format.dtype
    assert (e.amax.dtype, e.power.dtype) == (jnp.float32, jnp.uint8)
    judge.check(x, e, decoded, format, group=group, axis=axis)


def test_an_axis_counts_from_the_end_too():
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    run = lambda axis: _round_trip(formats.E4M3, 2, axis)(x)
    helpers.assert_same_bits(run(-3), run(1))


@pytest.mark.parametrize(
    ("shape", "axis", "stat"),
    [
        ((), -1, ()),
        ((), 0, ()),
        ((0,), 0, (0,)),
        ((0, 4), 1, (0, 1)),
        ((0, 4), 0, (0, 4)),
        ((3, 0), 1, (3, 0)),
        ((3, 0), 0, (1, 0)),
    ],
)
@each_format
def test_scalars_and_empty_arrays(format, shape, axis, stat):
    x = jnp.full(shape, -3.0)
    e, decoded = _round_trip(format, 128, axis)(x)
    assert e.codes.shape == shape
    assert e.amax.shape == e.power.shape == stat
    assert (e.codes.dtype, e.amax.dtype, e.power.dtype) == (
        format.dtype,
        jnp.float32,
        jnp.uint8,
    )
    assert (decoded.dtype, decoded.shape) == (jnp.float32, shape)
    if x.size:
        assert e.power == 255
        helpers.assert_reordered(decoded, x, 1, 3.0)


@each_format
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_narrow_floats_are_read_as_float32(format, dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 130)), dtype)
    run = _round_trip(format)
    helpers.assert_same_bits(run(x), run(x.astype(jnp.float32)))


@each_format
def test_without_expansion_the_power_is_one(format):
    x = np.concatenate([judge.rows(0, 129), judge.rows(1, 129)])
    e, decoded = _round_trip(format, expanded=False)(x)
    judge.check(x, e, decoded, format, expanded=False)
    lost = (np.asarray(decoded) == 0) & (judge.magnitudes(x) > 0)
    assert lost.any()  # which is what expansion is for


def test_negating_negates():
    x = judge.rows(2, 128)
    (e, decoded), (f, negated) = (_round_trip(formats.E4M3)(s * x) for s in (1, -1))
    helpers.assert_same_bits((f.amax, f.power), (e.amax, e.power))
    np.testing.assert_array_equal(negated, -np.asarray(decoded))


# NaN, Inf, and the ways of calling ---------------------------------------------------

WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x)[1],
}


@pytest.mark.parametrize(
    ("format", "way", "expanded"),
    [
        *((formats.E4M3, way, True) for way in WAYS.values()),
        (formats.E5M2, jax.jit, True),
        (formats.E4M3, jax.jit, False),
    ],
    ids=[*WAYS, "e5m2", "without expansion"],
)
def test_nan_and_inf_spoil_their_group_and_no_other(format, way, expanded):
    x = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    clean = x.copy()
    bad = np.zeros(x.shape, bool)
    for row, column, value in ((0, 5, np.nan), (1, 130, np.inf), (2, 299, -np.inf)):
        x[row, column] = value
        bad[row, column // 128 * 128 : column // 128 * 128 + 128] = True

    def run(x):
        e = expand.expand_quantize(x, format=format, expand=expanded)
        return e, expand.expand_dequantize(e)

    (e, decoded), (want, _) = way(run)(jnp.asarray(x)), way(run)(jnp.asarray(clean))
    np.testing.assert_array_equal(np.isnan(e.codes.astype(jnp.float32)), bad)
    np.testing.assert_array_equal(np.isnan(decoded), bad)
    np.testing.assert_array_equal(np.isnan(e.amax), bad[:, ::128])
    assert (np.asarray(e.power)[bad[:, ::128]] == 16).all()
    helpers.assert_same_bits(np.asarray(e.codes)[~bad], np.asarray(want.codes)[~bad])
    assert not np.isinf(decoded).any()


def test_every_way_makes_the_same_codes():
    x = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    encode = lambda x: expand.expand_quantize(x)
    want = encode(jnp.asarray(x))
    for way in WAYS.values():
        got = way(encode)(jnp.asarray(x))
        helpers.assert_same_bits((got.amax, got.power), (want.amax, want.power))
        _assert_same_state(got.codes, want.codes)


# Stochastic rounding -----------------------------------------------------------------


def _grid(format):
    values = np.arange(128, dtype=np.uint8).view(format.dtype).astype(np.float64)
    return values[np.isfinite(values)]


@functools.cache
def _stochastic(format, expanded, count):
    """Codes and decoded values of `count` seeds."""

    @jax.jit
    def run(x):
        def one(seed):
            u = rounding.uniform(rounding.fold(seed), x.shape)
            e = expand.expand_quantize(x, format=format, expand=expanded, uniform=u)
            return e, expand.expand_dequantize(e)

        return jax.vmap(one)(jnp.arange(count))

    return run


@each_format
@pytest.mark.parametrize("expanded", [True, False])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(
    format, expanded
):
    count = 2048
    rng = np.random.default_rng(0)
    x = np.stack([rng.standard_normal(128), np.exp(rng.normal(0, 0.35, 128))])
    x = x.astype(np.float32)
    e, decoded = _stochastic(format, expanded, count)(x)
    nearest, _ = _round_trip(format, expanded=expanded)(x)
    helpers.assert_same_bits(np.asarray(e.amax)[0], np.asarray(nearest.amax))
    helpers.assert_same_bits(np.asarray(e.power)[7], np.asarray(nearest.power))

    amax, k = np.asarray(e.amax)[0].astype(np.float64), np.asarray(e.power)[0] / 16
    grid = _grid(format)
    y = judge.stretched(np.abs(x).astype(np.float64), amax, k, format)
    # A code within the codec's own rounding of y is a neighbour on either side.
    low = grid[np.searchsorted(grid, y * (2 - judge.SLACK), side="right") - 1]
    high = grid[np.minimum(np.searchsorted(grid, y * judge.SLACK), len(grid) - 1)]
    codes = np.abs(np.asarray(e.codes).astype(np.float64))
    assert ((codes >= low) & (codes <= high)).all()
    assert np.all(np.sign(decoded) == np.sign(x), where=np.asarray(decoded) != 0)

    value = lambda y: amax * (y / format.max) ** (1 / k)
    gap = value(high) - value(low)
    error = np.asarray(decoded).astype(np.float64).mean(0) - x
    noise = gap / 2 / np.sqrt(count)  # the deviation of a fair coin is the largest
    rounding_of_x = 2.0**-20 * np.abs(x)
    assert np.all(np.abs(error) <= 5 * noise + rounding_of_x)
    both = np.sort(np.asarray(e.codes).astype(np.float32), axis=0)
    assert (both[0] != both[-1]).mean() > 0.9  # it does round both ways
    share = np.mean(error / gap, where=gap > 0)
    assert abs(share) <= 5 / 2 / np.sqrt(count * x.size) + 2.0**-12


@each_format
def test_stochastic_rounding_keeps_zeros_and_loses_no_value(format):
    x = judge.rows(3, 128)
    decoded = np.asarray(_stochastic(format, True, 4)(x)[1])
    np.testing.assert_array_equal(
        decoded == 0, np.resize(judge.magnitudes(x) == 0, decoded.shape)
    )
    assert np.isfinite(decoded).all()


def test_uniform_follows_the_axis_and_reaches_scalars():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((130, 3)).astype(np.float32)
    u = rng.uniform(size=x.shape).astype(np.float32)
    encode = jax.jit(expand.expand_quantize, static_argnames="axis")
    first = encode(x, axis=0, uniform=jnp.asarray(u))
    last = encode(x.T, axis=-1, uniform=jnp.asarray(u.T))
    helpers.assert_same_bits(jax.tree.map(np.transpose, first), last)
    scalar = encode(jnp.float32(-2.5), uniform=jnp.float32(0.7))
    assert float(expand.expand_dequantize(scalar)) == pytest.approx(-2.5)


# Errors ------------------------------------------------------------------------------
# The tests' own type checks would speak first: these are the sentences a user reads.
encode = inspect.unwrap(expand.expand_quantize)
decode = inspect.unwrap(expand.expand_dequantize)


@pytest.mark.parametrize("x", [np.arange(4), np.ones(3, np.complex64), True, None])
def test_what_is_no_real_float_is_refused(x):
    x = x if x is not None else jnp.ones(4, jnp.int32)
    with pytest.raises(
        TypeError,
        match=r"^expand_quantize: x must be .* got dtype \w+ .*shape.*; cast it",
    ):
        encode(x)


@pytest.mark.parametrize("group", [0, -128, True, None])
def test_a_group_that_is_no_positive_number_is_refused(group):
    with pytest.raises(
        ValueError, match=f"group must be a whole .* got {group}.*"
    ) as e:
        encode(jnp.ones((3, 130)), group=group)
    assert "(3, 130)" in str(e.value)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_is_refused(axis):
    with pytest.raises(ValueError, match=f"axis must lie in x's 2 axes, got {axis}.*"):
        encode(jnp.ones((3, 130)), axis=axis)


def test_a_uniform_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"uniform .*\(3, 130\), got \(130,\); draw one"
    ):
        encode(jnp.ones((3, 130)), uniform=jnp.ones(130))


def test_what_was_not_quantised_is_refused():
    e, _ = _round_trip(formats.E4M3)(jnp.ones((3, 130)))
    with pytest.raises(
        TypeError, match="codes must be float8_e4m3fn .* got float32 of"
    ):
        decode(e._replace(codes=jnp.ones((3, 130))))
    for kwargs in ({"group": 64}, {"axis": 0}):
        with pytest.raises(
            ValueError, match=r"need amax of shape .*, got \(3, 2\); pass"
        ):
            decode(e, **kwargs)
    with pytest.raises(ValueError, match=r"need power of shape \(3, 2\), got \(3, 1\)"):
        decode(e._replace(power=e.power[:, :1]))
    with pytest.raises(ValueError, match="group must be a whole number"):
        decode(e, group=0)


def test_the_judge_can_fail():
    """A code moved by one step is outside the bound of a value near its middle."""
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    e, _ = _round_trip(formats.E4M3)(x)
    moved = np.asarray(e.codes).view(np.uint8) + np.uint8(1)
    wrong = e._replace(codes=jnp.asarray(moved.view(np.asarray(e.codes).dtype)))
    top = np.asarray(e.codes).astype(np.float32) == formats.E4M3.max
    x[top] = 0  # the code above the largest is NaN
    with pytest.raises(AssertionError):
        judge.check(x, wrong, expand.expand_dequantize(wrong), formats.E4M3)
