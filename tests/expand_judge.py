"""What a range-expanded array must be, in NumPy float64, and groups to try it on."""

import numpy as np

TINY = np.finfo(np.float32).tiny
SLACK = 1 + 2.0**-12  # what the float32 logarithms of the codec may add, in y
ROWS = 256


def grouped(x, group, axis=-1):
    """(..., G, group) of a NumPy array, the tail padded; a scalar counts as (1,)."""
    x = np.moveaxis(np.atleast_1d(x), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])
    return x.reshape(*x.shape[:-1], -1, group)


def statistic(stat, axis=-1):
    """One value a group, shaped to broadcast against `grouped`."""
    return np.moveaxis(np.atleast_1d(np.asarray(stat)), axis, -1)[..., None]


def magnitudes(x):
    """|x| in float64, what float32 holds only as a subnormal counting as zero."""
    size = np.abs(np.asarray(x).astype(np.float64))
    return np.where(size < TINY, 0, size)


def stretched(size, amax, k, format):
    """y = max (|x| / M)^k in float64, zero for zeros."""
    with np.errstate(divide="ignore", invalid="ignore"):
        y = format.max * np.exp2(k * (np.log2(size) - np.log2(amax)))
    return np.where(size == 0, 0, y)


def check_power(size_GS, power_G1, format):
    """k as defined; off by a sixteenth only where the quotient is at a whole number."""
    amax = size_GS.max(-1, keepdims=True)
    amin = np.where(size_GS == 0, np.inf, size_GS).min(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = 16 * np.log2(format.max**2 / 2) / (np.log2(amax) - np.log2(amin))
    exact = np.where(amax == amin, np.inf, exact)
    want = np.where(amax == 0, 16, np.clip(np.floor(exact), 1, 255))
    off = power_G1.astype(int) != want
    assert np.all(np.abs(power_G1.astype(int) - want) <= 1)
    assert np.all(np.abs(exact[off] - np.round(exact[off])) < 1e-5 * exact[off])


def check(x, e, decoded, format, *, group=128, axis=-1, expanded=True):
    """Everything that is promised of a round trip with rounding to nearest."""
    x, decoded = np.asarray(x).astype(np.float64), np.asarray(decoded)
    assert decoded.dtype == np.float32
    assert decoded.shape == x.shape == e.codes.shape
    assert np.isfinite(decoded).all()
    size = grouped(magnitudes(x), group, axis)
    back = grouped(np.abs(decoded.astype(np.float64)), group, axis)
    amax, power = statistic(e.amax, axis), statistic(e.power, axis)
    np.testing.assert_array_equal(amax, size.max(-1, keepdims=True))
    if expanded:
        check_power(size, power, format)
        np.testing.assert_array_equal(back == 0, size == 0)
    else:
        assert (power == 16).all()
    y, y_back = (stretched(s, amax, power / 16, format) for s in (size, back))
    bound = np.maximum(format.relative * y, format.absolute) * SLACK
    worst = np.abs(y_back - y) / bound
    assert worst.max(initial=0) <= 1, (x.ravel()[worst.argmax() % x.size], worst.max())
    signs = np.sign(decoded) == np.sign(x)
    assert np.all(signs | (decoded == 0))
    assert not np.any(decoded[magnitudes(x) == 0])


def magnitude(rng, shape):
    return 10.0 ** rng.uniform(-30, 30, shape)


def keep(rng, n, count):
    """Zeros everywhere but at `count` positions of n."""
    return rng.permutation(np.arange(n) < count)


# Each draws a row of n values; rows are groups, or a group and a tail.
KINDS = {
    "constant": lambda rng, n: np.full(n, magnitude(rng, ())),
    "negative constant": lambda rng, n: np.full(n, -magnitude(rng, ())),
    "signs of a constant": lambda rng, n: magnitude(rng, ()) * rng.choice([-1, 1], n),
    "normal": lambda rng, n: magnitude(rng, ()) * rng.standard_normal(n),
    "second moment": lambda rng, n: magnitude(rng, ()) * np.exp(rng.normal(0, 0.35, n)),
    "60 decades": lambda rng, n: magnitude(rng, n) * rng.choice([-1, 1], n),
    "few ulp": lambda rng, n: (
        magnitude(rng, ()) * (1 + 2.0**-23 * rng.integers(4, size=n))
    ),
    "octaves": lambda rng, n: 2.0 ** rng.integers(-40, 40, n),
    "zeros": lambda rng, n: np.zeros(n),
    "one non-zero": lambda rng, n: keep(rng, n, 1) * -magnitude(rng, ()),
    "some zeros": lambda rng, n: (
        rng.standard_normal(n) * keep(rng, n, rng.integers(n + 1))
    ),
    "constant, zeros": lambda rng, n: magnitude(rng, ()) * keep(rng, n, (n + 1) // 2),
    "subnormal": lambda rng, n: np.where(
        keep(rng, n, n // 2), 1e-40, rng.normal(size=n)
    ),
    "all subnormal": lambda rng, n: rng.uniform(-1, 1, n) * 1e-38,
}


def rows(seed, n):
    """ROWS rows of n float32 values, all kinds in turn."""
    rng = np.random.default_rng(seed)
    kinds = list(KINDS.values())
    drawn = [kinds[i % len(kinds)](rng, n) for i in range(ROWS)]
    return np.stack(drawn).astype(np.float32)
