"""Random bits by seed and index: their statistics; stochastic bfloat16, exactly.

Bounds on statistics are five deviations of the null hypothesis; seeds are fixed, so a
test passes always or never.
"""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import rounding
from tests import helpers

pytestmark = pytest.mark.once

N = 1 << 18
SIGMAS = 5


@functools.cache
def _draw(*words, shape=(N,)):
    draw = jax.jit(lambda *w: rounding.uniform(rounding.fold(*w), shape))
    return np.asarray(draw(*(jnp.uint32(w) for w in words))).astype(np.float64)


def _correlation(a, b):
    """In deviations of independent samples."""
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_uniform_has_the_moments_and_histogram_of_a_uniform(seed):
    u = _draw(seed)
    assert 0 <= u.min()
    assert u.max() < 1
    np.testing.assert_array_equal(u * 2**24, np.floor(u * 2**24))
    assert abs(u.mean() - 1 / 2) < SIGMAS * np.sqrt(1 / 12 / N)
    assert abs(u.var() - 1 / 12) < SIGMAS * np.sqrt(1 / 180 / N)
    counts, _ = np.histogram(u, bins=256, range=(0, 1))
    chi2 = np.sum((counts - N / 256) ** 2) / (N / 256)
    assert abs(chi2 - 255) < SIGMAS * np.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 127, 128, 129, 1024, 4096, 1 << 17])
def test_neighbouring_elements_are_uncorrelated(lag):
    u = _draw(7)
    assert abs(_correlation(u[:-lag], u[lag:])) < SIGMAS
    # Squares and products may be correlated where values are not.
    v = (u - 0.5) ** 2
    assert abs(_correlation(v[:-lag], v[lag:])) < SIGMAS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 99), (2, 99)),
        ((1000, 99), (1001, 99)),
        ((0, 99), (2**16, 99)),
        ((0, 99), (2**31, 99)),
        ((5, 99), (5, 100)),
        ((5, 99), (5, 99 ^ 2**31)),
        ((1, 2), (2, 1)),
        ((3,), (4,)),
    ],
    ids=str,
)
def test_steps_and_leaves_are_uncorrelated(one, other):
    """Of the same element, and of elements one apart."""
    a, b = _draw(*one), _draw(*other)
    assert abs(_correlation(a, b)) < SIGMAS
    assert abs(_correlation(a[1:], b[:-1])) < SIGMAS
    assert abs(_correlation(a[:-1], b[1:])) < SIGMAS
    assert (a == b).mean() < 1e-4


def test_close_seeds_do_not_permute_the_same_words():
    """As they would if seed and index met only once, in an exclusive or."""
    draw = lambda seed: np.asarray(rounding.random_bits(jnp.uint32(seed), (256,)))
    for seed in (0, 4, 1 << 20):
        assert len(np.intersect1d(draw(seed), draw(seed + 1))) < 3


def test_the_mean_over_steps_of_one_element_is_a_half():
    """What keeps a second moment's rounding unbiased over time."""
    steps = 4096
    draw = jax.jit(
        jax.vmap(lambda s: rounding.uniform(rounding.fold(s, 2**32 - 5), (4, 64)))
    )
    mean = np.asarray(draw(jnp.arange(steps))).astype(np.float64).mean(0)
    deviation = np.sqrt(1 / 12 / steps)
    assert np.abs(mean - 0.5).max() < SIGMAS * deviation
    assert abs(mean.std() / deviation - 1) < SIGMAS / np.sqrt(2 * mean.size)


def test_each_bit_of_the_words_is_fair():
    bits = np.asarray(rounding.random_bits(rounding.fold(3), (N,)))
    for bit in range(32):
        ones = np.mean((bits >> bit) & 1)
        assert abs(ones - 0.5) < SIGMAS * 0.5 / np.sqrt(N), f"bit {bit}"


def test_mix_is_a_bijection_that_changes_half_of_the_bits():
    x = np.arange(N, dtype=np.uint32)
    mixed = np.asarray(jax.jit(rounding.mix)(x))
    assert len(np.unique(mixed)) == N
    for bit in range(32):
        flipped = np.asarray(jax.jit(rounding.mix)(x ^ np.uint32(1 << bit)))
        share = np.unpackbits((mixed ^ flipped).view(np.uint8)).mean()
        # A mixer is no random function: the search that chose it promises a bias of
        # at most a few thousandths, not that of independent draws.
        assert abs(share - 0.5) < 0.01, f"bit {bit}"


@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (3, 0), (24,), (2, 12), (2, 3, 4), (1, 24, 1)], ids=str
)
def test_an_element_depends_on_its_row_major_index_alone(shape):
    seed = rounding.fold(11)
    flat = np.asarray(rounding.random_bits(seed, (24,)))
    got = np.asarray(jax.jit(lambda s: rounding.random_bits(s, shape))(seed))
    assert got.shape == shape
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(got.ravel(), flat[: got.size])


def test_strides_beyond_32_bits_wrap():
    """The index of a huge array is taken modulo 2^32; tracing it must not fail."""
    shape = (3, 1 << 17, 1 << 16)
    traced = jax.eval_shape(lambda s: rounding.random_bits(s, shape), rounding.fold(0))
    assert traced.shape == shape


def test_fold_takes_any_integers_traced_or_not():
    words = (0, 7, 2**31, 2**32 - 1)  # CRCs of paths are of 2^31 and more half the time
    eager = rounding.fold(*words)
    assert (eager.dtype, eager.shape) == (jnp.uint32, ())
    traced = jax.jit(rounding.fold)(*(jnp.uint32(w) for w in words))
    helpers.assert_same_bits(traced, eager)
    helpers.assert_same_bits(rounding.fold(np.uint32(7)), rounding.fold(7))
    helpers.assert_same_bits(rounding.fold(jnp.int32(-1)), rounding.fold(2**32 - 1))
    helpers.assert_same_bits(rounding.fold(-1), rounding.fold(2**32 - 1))
    helpers.assert_same_bits(rounding.fold(2**32 + 5), rounding.fold(5))


def test_fold_tells_words_and_their_order_apart():
    tuples = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 2), (2, 1), (3, 3), (2**31,)]
    assert len({int(rounding.fold(*words)) for words in tuples}) == len(tuples)


def _both_uses(step, n=1 << 20):
    """What v's and a parameter's rounding read of one hash, as numbers in [0, 1)."""
    path = 0x5EED5EED
    bits = rounding.random_bits(rounding.fold(step, path), (n,))
    low = (bits ^ rounding.fold(step, 99, path)) & jnp.uint32(0xFFFF)
    return np.asarray(bits >> 8) * 2.0**-24, np.asarray(low) * 2.0**-16


def test_one_hash_serves_a_moment_and_its_parameter():
    """The high bits round one and the low ones the other, fairly and independently."""
    (u, p), (next_u, next_p) = _both_uses(5), _both_uses(6)
    deviation = np.sqrt(1 / 12 / u.size)
    for x in (u, p + 2.0**-17):
        assert abs(x.mean() - 0.5) < SIGMAS * deviation
        # Sums over a group of 128 are as wide as those of independent numbers.
        ratio = x.reshape(-1, 128).sum(1).var() / (128 / 12)
        assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / (u.size / 128))
    for a, b in [(u, p), (u, next_p), (p, next_u), (p, next_p), (u, next_u)]:
        assert abs(_correlation(a, b)) < SIGMAS
        assert abs(_correlation((a - 0.5) ** 2, (b - 0.5) ** 2)) < SIGMAS
    for lag in (1, 2, 128, 4096):
        for a, b in [(u, p), (p, u), (p, p)]:
            assert abs(_correlation(a[lag:], b[:-lag])) < SIGMAS
    cells = np.floor(u * 16) * 16 + np.floor(p * 16)
    expected = u.size / 256
    counts = np.bincount(cells.astype(int), minlength=256)
    chi2 = np.sum((counts - expected) ** 2) / expected
    assert abs(chi2 - 255) < SIGMAS * np.sqrt(2 * 255)


# Stochastic bfloat16 -----------------------------------------------------------------
ALL_BITS = np.arange(1 << 16, dtype=np.uint32)


def _all_roundings(x):
    """Each bfloat16 that one of the 2^16 draws makes of the scalar x, as float64."""
    many = jnp.full(ALL_BITS.shape, x, jnp.float32)
    # The high half of the bits must not matter.
    bits = jnp.asarray(ALL_BITS | np.uint32(0xABCD0000))
    return np.asarray(jax.jit(rounding.stochastic_bfloat16)(many, bits))


def _from_bits(word):
    return np.array(word, np.uint32).view(np.float32)[()]


@pytest.mark.parametrize(
    "word",
    [
        0x3F808000,  # half way
        0x3F800001,  # a hair above one
        0x3F80FFFF,  # a hair below the next
        0xBF804321,  # negative
        0x3F7FC000,  # the upper neighbour has another exponent
        0x00801234,  # near the smallest normal
        0x7F7E8000,  # near the largest
    ],
    ids=hex,
)
def test_over_all_draws_the_mean_is_the_value_itself(word):
    """Exactly: the count of draws that round up is the kept-out half of the word."""
    x = _from_bits(word)
    got = _all_roundings(x).astype(np.float64)
    down = np.float64(_from_bits(word & 0xFFFF0000))
    up = np.float64(_from_bits((word & 0xFFFF0000) + 0x10000))
    assert set(np.unique(got)) == {down, up}
    assert np.sum(got == up) == word & 0xFFFF
    assert got.mean() == np.float64(x)


@pytest.mark.parametrize("word", [0x00000001, 0x00004000, 0x80018001], ids=hex)
def test_subnormals_round_to_their_bits_neighbours(word):
    """By integer arithmetic, so that no backend's flushing to zero can bias it."""
    x = jnp.full(ALL_BITS.shape, word, jnp.uint32).view(jnp.float32)
    got = jax.jit(rounding.stochastic_bfloat16)(x, jnp.asarray(ALL_BITS))
    codes = np.asarray(got).view(np.uint16)
    assert set(codes) <= {word >> 16, (word >> 16) + 1}
    assert np.sum(codes == (word >> 16) + 1) == word & 0xFFFF


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -2.5, 2.0**-126, 3.3895314e38, np.inf])
def test_what_bfloat16_holds_never_moves(x):
    got = _all_roundings(x)
    want = np.full(got.shape, x, np.float32).astype(got.dtype)
    helpers.assert_same_bits(got, want)
    helpers.assert_same_bits(_all_roundings(-x), -want)


@pytest.mark.parametrize("word", [0x7FC00000, 0x7F800001, 0xFFFFFFFF], ids=hex)
def test_nan_stays_nan(word):
    x = jnp.full(ALL_BITS.shape, word, jnp.uint32).view(jnp.float32)
    got = jax.jit(rounding.stochastic_bfloat16)(x, jnp.asarray(ALL_BITS))
    assert np.isnan(np.asarray(got).astype(np.float32)).all()


def test_above_the_largest_bfloat16_the_neighbour_is_inf():
    top, over = _from_bits(0x7F7F0000), _from_bits(0x7F7F4000)
    got = _all_roundings(over).astype(np.float32)
    assert set(np.unique(got)) == {top, np.inf}
    assert np.mean(np.isinf(got)) == 1 / 4


def test_small_steps_are_not_lost():
    """A bfloat16 sum of steps below half its spacing moves as the float32 sum does."""
    steps, rate = 2048, jnp.float32(2.0**-12)

    def step(p, i):
        bits = rounding.random_bits(rounding.fold(i), p.shape)
        p = rounding.stochastic_bfloat16(p.astype(jnp.float32) + rate, bits)
        return p, None

    start = jnp.ones(512, jnp.bfloat16)
    end, _ = jax.jit(lambda p: jax.lax.scan(step, p, jnp.arange(steps)))(start)
    moved = np.asarray(end).astype(np.float64) - 1
    assert abs(moved.mean() / (steps * 2.0**-12) - 1) < 0.05
    assert (start + rate.astype(jnp.bfloat16) == start).all()  # nearest loses them all
