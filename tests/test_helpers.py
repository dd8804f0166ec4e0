"""Each tolerance class accepts what it should and refuses what it should."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import formats
from tests import helpers

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}


def _refuses(match):
    return pytest.raises(AssertionError, match=match)


def _tree():
    return {
        "f8": jnp.array([1.0, -0.0, jnp.nan]).astype(jnp.float8_e4m3fn),
        "scalar": jnp.int32(3),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(0),
    }


def test_same_bits_accepts_equal_trees_nan_and_all():
    helpers.assert_same_bits(_tree(), _tree())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scalar": jnp.int32(4)}, "scalar.*1 of 1 elements differ"),
        ({"scalar": jnp.uint32(3)}, "dtype uint32, want int32"),
        ({"empty": jnp.zeros((0, 4))}, r"shape \(0, 4\), want \(0, 3\)"),
        ({"key": jax.random.key(1)}, "key"),
        ({"more": jnp.int32(0)}, "the structures differ"),
    ],
    ids=["value", "dtype", "shape", "key", "structure"],
)
def test_same_bits_refuses_any_difference(change, match):
    with _refuses(match):
        helpers.assert_same_bits({**_tree(), **change}, _tree())


def test_same_bits_tells_minus_zero_from_zero_and_one_nan_from_another():
    with _refuses(r"the first at \(1,\)"):
        helpers.assert_same_bits(jnp.array([0.0, -0.0]), jnp.array([0.0, 0.0]))
    bits = np.array([0x7FC00000, 0x7FC00001], np.uint32)
    with _refuses("elements differ"):
        helpers.assert_same_bits(bits[:1].view(np.float32), bits[1:].view(np.float32))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_within_format_accepts_its_worst_roundings_and_nothing_beyond(format):
    normal, tiny = 1 + format.relative, format.absolute
    helpers.assert_within_format(np.array([1.0, 0.0]), np.array([normal, tiny]), format)
    far = 1.01 * format.relative
    with _refuses(r"1 of 2 .* the first at \(0,\)"):
        helpers.assert_within_format(
            np.array([1 + far, 0.0]), np.array([1.0, tiny]), format
        )
    with _refuses(r"the first at \(1,\)"):
        helpers.assert_within_format(
            np.array([1.0, 0.0]), np.array([1.0, 1.01 * tiny]), format
        )


def test_within_format_scales_the_absolute_part_and_refuses_nan_and_other_shapes():
    format, x = formats.E4M3, np.full(2, formats.E4M3.absolute * 8)
    helpers.assert_within_format(np.zeros(2), x, format, scale=np.array([8.0, 9.0]))
    with _refuses(r"the first at \(1,\)"):
        helpers.assert_within_format(np.zeros(2), x, format, scale=np.array([8.0, 7.0]))
    with _refuses("nan"):
        helpers.assert_within_format(np.array([np.nan, 0]), x, format, scale=8.0)
    with _refuses("shape"):
        helpers.assert_within_format(np.zeros(3), x, format)


def test_reordered_accepts_another_order_and_refuses_a_lost_term():
    terms = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    pairwise, in_turn = np.sum(terms), np.cumsum(terms[::-1])[-1]
    assert pairwise != in_turn
    helpers.assert_reordered(in_turn, pairwise, n=terms.size, scale=np.abs(terms).max())
    with _refuses("off by more than their bound"):
        helpers.assert_reordered(
            in_turn - terms[7], pairwise, n=terms.size, scale=np.abs(terms).max()
        )


def test_reordered_scales_with_n_and_refuses_nan():
    unit = helpers.ORDER_CONSTANT * 2.0**-24
    helpers.assert_reordered(np.float64(3.9 * unit), np.float64(0), n=16, scale=1.0)
    with _refuses("off by more"):
        helpers.assert_reordered(np.float64(3.9 * unit), np.float64(0), n=15, scale=1.0)
    with _refuses("off by more"):
        helpers.assert_reordered(np.float64(np.nan), np.float64(0), n=16, scale=1.0)


def test_sqnr_measures_and_refuses_less():
    want = np.ones(100)
    found = helpers.assert_sqnr(want + 0.1, want, db=19.99)
    assert found == pytest.approx(20.0)
    with _refuses("SQNR 20.00 dB, want at least 20.01"):
        helpers.assert_sqnr(want + 0.1, want, db=20.01)


def test_sqnr_of_equal_values_is_infinite_and_of_nothing_a_failure():
    assert helpers.assert_sqnr(np.zeros(3), np.zeros(3), db=100) == np.inf
    with _refuses("every wanted value is zero"):
        helpers.assert_sqnr(np.ones(3), np.zeros(3), db=0)
    with _refuses("1 values are not finite"):
        helpers.assert_sqnr(np.array([np.nan, 1]), np.ones(2), db=0)


def test_same_codes_allows_few_single_steps_and_no_lost_nan():
    want = np.linspace(-4, 4, 40_000).astype(formats.E4M3.dtype)
    step = lambda at, by=1: (want.view(np.uint8) + by * at).view(want.dtype)
    rare = np.arange(want.size) % 10_000 == 5
    helpers.assert_same_codes(step(rare.astype(np.uint8)), want)
    zeros = np.zeros(4, np.uint8).view(want.dtype)
    helpers.assert_same_codes(-zeros, zeros)
    with _refuses("5 of 40000 differ"):
        helpers.assert_same_codes(
            step((rare | (np.arange(want.size) == 6)).astype(np.uint8)), want
        )
    with _refuses("within one step"):
        helpers.assert_same_codes(step(rare.astype(np.uint8), 2), want)
    nan = np.where(rare, np.nan, want.astype(np.float32)).astype(want.dtype)
    for pair in ((nan, want), (want, nan)):
        with _refuses(r"at \(5,\)"):
            helpers.assert_same_codes(*pair)
    with _refuses("dtype"):
        helpers.assert_same_codes(want, want.astype(formats.E5M2.dtype))
    with _refuses("shape"):
        helpers.assert_same_codes(want[:2], want)
