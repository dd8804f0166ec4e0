"""The formats' numbers and the one cast, against every code enumerated in float64."""

import re

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import formats
from tests import helpers

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x.reshape(16, -1)).reshape(-1),
    "scan": lambda f: (
        lambda x: lax.scan(lambda c, r: (c, f(r)), 0, x.reshape(16, -1))[1].reshape(-1)
    ),
}


def _grid(format):
    """Every non-negative finite value, by its code."""
    values = np.arange(128, dtype=np.uint8).view(format.dtype).astype(np.float64)
    return values[np.isfinite(values)]


def _rounded(x, format):
    """What `cast` must return, as float64: enumeration, ties to even codes."""
    grid = _grid(format)
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = x.astype(np.float64)
    finite = np.isfinite(x)
    size = np.where(finite, np.minimum(np.abs(x), grid[-1]), 0)
    above = np.searchsorted(grid, size).clip(1, len(grid) - 1)
    down, up = size - grid[above - 1], grid[above] - size
    even = np.where(above % 2 == 0, above, above - 1)
    code = np.where(down < up, above - 1, np.where(up < down, above, even))
    return np.where(finite, np.copysign(grid[code], x), np.nan)


def _all_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)


def _all_float16():
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def _edges(format):
    """All midpoints between codes, the codes, and their float32 neighbours, signed."""
    grid = _grid(format)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    around = [points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)]
    points = np.concatenate([*around, *(-p for p in around)]).astype(np.float32)
    return np.pad(points, (0, -points.size % 16))


@pytest.mark.parametrize(
    ("format", "numbers"),
    [
        (formats.E4M3, ("e4m3", 448.0, 2.0**-4, 2.0**-10, 100352.0)),
        (formats.E5M2, ("e5m2", 57344.0, 2.0**-3, 2.0**-17, 2.0**-1 * 57344.0**2)),
    ],
    ids=FORMATS,
)
def test_the_numbers_of_a_format(format, numbers):
    name, largest, relative, absolute, reach = numbers
    assert format.name == name
    assert format.max == largest == _grid(format)[-1]
    assert format.relative == relative
    assert format.absolute == absolute == _grid(format)[1] / 2
    assert format.range == reach
    # The smallest of a stretched group is 16/7 subnormal steps: it cannot become zero.
    assert format.max / format.range == pytest.approx(16 / 7 * _grid(format)[1])


@each_format
def test_a_format_is_found_by_its_dtype_and_name(format):
    assert formats.of_dtype(format.dtype) is format
    assert formats.FORMATS[format.name] is format
    assert formats.of_dtype(jnp.float32) is None
    assert formats.of_dtype(jnp.uint8) is None
    assert len({formats.E4M3, formats.E5M2, format}) == 2  # hashable, by value


@each_format
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("draw", ["bfloat16", "float16", "edges"])
def test_the_cast_rounds_as_the_enumeration_says(format, way, draw):
    x = {
        "bfloat16": _all_bfloat16,
        "float16": _all_float16,
        "edges": lambda: _edges(format),
    }[draw]()
    got = way(lambda x: formats.cast(x, format))(jnp.asarray(x))
    assert got.dtype == format.dtype
    want = _rounded(x, format)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)
    finite = np.isfinite(want)
    helpers.assert_within_format(
        np.asarray(got).astype(np.float64)[finite],
        np.clip(x[finite].astype(np.float64), -format.max, format.max),
        format,
    )


@each_format
def test_every_way_gives_the_same_bits(format):
    """And NaN in the same places, though XLA's emitters write it as different codes."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.concatenate([_all_bfloat16().astype(np.float32), _edges(format)])
    cast = lambda x: formats.cast(x, format)
    want = np.asarray(cast(jnp.asarray(x)))
    for way in WAYS.values():
        got = np.asarray(way(cast)(jnp.asarray(x)))
        helpers.assert_same_bits(got[np.isfinite(x)], want[np.isfinite(x)])
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~np.isfinite(x))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("format", "x", "want"),
    [
        ("e4m3", 449.0, 448.0),
        ("e4m3", 464.0, 448.0),
        ("e4m3", 464.1, 448.0),
        ("e4m3", -1e9, -448.0),
        ("e4m3", 3e38, 448.0),
        ("e5m2", 61440.0, 57344.0),
        ("e5m2", -3e38, -57344.0),
        ("e4m3", np.inf, np.nan),
        ("e4m3", -np.inf, np.nan),
        ("e5m2", np.inf, np.nan),
        ("e5m2", -np.inf, np.nan),
        ("e4m3", np.nan, np.nan),
        ("e5m2", np.nan, np.nan),
        ("e4m3", 1e-45, 0.0),
        ("e5m2", -1e-40, 0.0),
    ],
)
def test_overflow_saturates_and_inf_becomes_nan(format, x, want, way):
    """B05: no stale or rounded-down scale may turn a finite value into NaN or Inf."""
    x = np.full(16, x, np.float32)
    got = way(lambda x: formats.cast(x, FORMATS[format]))(jnp.asarray(x))
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float32), np.full(16, want, np.float32)
    )


@each_format
@hypothesis.given(
    st.lists(
        st.floats(
            width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False
        ),
        min_size=16,
        max_size=16,
    )
)
def test_a_drawn_finite_value_never_becomes_nan(format, values):
    x = np.array(values, np.float32)
    got = np.asarray(formats.cast(jnp.asarray(x), format)).astype(np.float64)
    np.testing.assert_array_equal(got, _rounded(x, format))


@each_format
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_neighbours_enclose_their_value(format, wrap):
    grid = _grid(format)
    x = np.abs(_edges(format))
    below, above = (
        np.asarray(code).astype(np.float64)
        for code in wrap(lambda x: formats.neighbours(x, format))(jnp.asarray(x))
    )
    flushed = np.where(x < np.finfo(np.float32).tiny, 0, x).astype(np.float64)
    at = np.searchsorted(grid, np.minimum(flushed, format.max), side="right") - 1
    np.testing.assert_array_equal(below, grid[at])
    np.testing.assert_array_equal(above, grid[np.minimum(at + 1, len(grid) - 1)])


@each_format
@pytest.mark.parametrize("x", [np.nan, np.inf])
def test_nan_and_inf_have_nan_on_both_sides(format, x):
    for code in formats.neighbours(jnp.full(3, x, jnp.float32), format):
        assert np.isnan(np.asarray(code).astype(np.float32)).all()


@each_format
def test_an_8_bit_value_is_not_kept_wide(format):
    """B40: code that rounds and reads back at once must still show the rounding."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1024, np.float32))
    round_trip = lambda x: formats.cast(x, format).astype(jnp.float32)
    helpers.assert_same_bits(jax.jit(round_trip)(x), round_trip(x))
    assert (np.asarray(jax.jit(round_trip)(x)) != np.asarray(x)).mean() > 0.9


HLO_NAME = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2"}


def _definition(text, name):
    """The instruction of optimised HLO that defines %name, and its operands' names."""
    line = re.search(rf"%{re.escape(name)} = (.*)", text).group(1)
    operation, inside = re.search(r"\S+ ([\w-]+)\(([^)]*)\)", line).groups()
    return operation, line, re.findall(r"%([\w.-]+)", inside)


@each_format
@pytest.mark.parametrize("consumer", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_program_for_the_h200_clips_before_it_converts(
    h200_compile, format, consumer
):
    """The same policy there: convert(clamp(-max, x, max) + 0 x).

    And B40: the 8-bit array is written to memory, though all that follows is wider.
    """
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    text = h200_compile(lambda x: formats.cast(x, format).astype(consumer), x).as_text()
    dtype = HLO_NAME[format.name]
    (convert,) = re.findall(rf"%([\w.-]+) = {dtype}\S* convert\(", text)
    _, _, (operand,) = _definition(text, convert)
    operation, _, (clipped, product) = _definition(text, operand)
    assert operation == "add"
    constant = lambda name: _definition(text, _definition(text, name)[2][0])[1]
    operation, _, factors = _definition(text, product)
    assert operation == "multiply"
    (zero,) = (f for f in factors if _definition(text, f)[0] == "broadcast")
    assert "constant(0)" in constant(zero)
    operation, _, (low, _, high) = _definition(text, clipped)
    assert operation == "clamp"
    assert f"constant({-format.max:g})" in constant(low)
    assert f"constant({format.max:g})" in constant(high)
    entry = text[text.index("ENTRY") :]
    assert re.search(rf"= {dtype}\[4096\]", entry), "the codes never reach memory"
