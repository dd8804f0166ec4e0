"""The classes of tolerance, each an assertion: bits, codes, format, order, model."""

import jax
import numpy as np

# Summing n terms in float32 in another order moves the sum by about sqrt(n) * 2**-24 of
# the terms' scale: a random walk of roundings. Four deviations of it are allowed.
ORDER_CONSTANT = 4.0
# What the assertion's own arithmetic may add to a format's bound.
FORMAT_SLACK = 1 + 2.0**-20
# Of codes made by a kernel, whose exponentials and sums round otherwise than XLA's, the
# share that may lie on the other side of an edge; of a small array one code.
OTHER_CODES = 1e-4


def assert_same_bits(got, want):
    """Trees of equal structure whose leaves agree in dtype, shape and every byte."""
    got_leaves, got_structure = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_structure = jax.tree_util.tree_flatten_with_path(want)
    assert got_structure == want_structure, "the structures differ"
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        g, w = _plain(g), _plain(w)
        assert g.dtype == w.dtype, f"{name}: dtype {g.dtype}, want {w.dtype}"
        assert g.shape == w.shape, f"{name}: shape {g.shape}, want {w.shape}"
        differs = _differs(g, w)
        first = _first(differs)
        assert not differs.any(), (
            f"{name}: {differs.sum()} of {g.size} elements differ, the first at "
            f"{first}: {g[first]!r}, want {w[first]!r}"
        )


def assert_within_format(got, x, format, scale=1.0):
    """|got - x| <= max(relative |x|, absolute scale): the worst rounding of `format`.

    `scale` is what one unit of the stored value stands for; it broadcasts against x.
    """
    got, x, scale = _float64(got), _float64(x), _float64(scale)
    assert got.shape == x.shape, f"shape {got.shape}, want {x.shape}"
    bound = np.maximum(format.relative * np.abs(x), format.absolute * scale)
    _assert_below(np.abs(got - x), bound * FORMAT_SLACK, got, x)


def assert_same_codes(got, want):
    """FP8 codes of which at most OTHER_CODES differ, each by one step; NaN is NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    missed = _first(np.isnan(_float64(got)) != np.isnan(_float64(want)))
    assert not missed, f"at {missed}: {got[missed]}, want {want[missed]}"
    steps = np.where(np.isnan(_float64(want)), 0, abs(_ordinal(got) - _ordinal(want)))
    far = _first(steps > 1)
    assert not far, f"at {far}: {got[far]}, want {want[far]} within one step"
    count = int((steps > 0).sum())
    assert count <= max(OTHER_CODES * steps.size, 1), f"{count} of {steps.size} differ"


def _ordinal(codes):
    """FP8 codes numbered by value: neighbours differ by one, both zeros by none."""
    bits = codes.view(np.uint8).astype(int)
    return np.where(bits < 128, bits, 128 - bits)


def assert_reordered(got, want, n, scale):
    """|got - want| <= c sqrt(n) 2**-24 scale: the same sum of n terms, another order.

    `scale` is the size of the terms or partial sums; it broadcasts against want.
    """
    got, want, scale = _float64(got), _float64(want), _float64(scale)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    bound = ORDER_CONSTANT * np.sqrt(n) * 2.0**-24 * scale
    _assert_below(np.abs(got - want), np.broadcast_to(bound, want.shape), got, want)


def assert_sqnr(got, want, db):
    """10 log10(sum want**2 / sum (got - want)**2) >= db. Returns the ratio in dB."""
    got, want = _float64(got), _float64(want)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    signal, noise = np.sum(want**2), np.sum((got - want) ** 2)
    assert np.isfinite(signal), "the wanted values are not finite"
    assert np.isfinite(noise), f"{np.sum(~np.isfinite(got))} values are not finite"
    if noise == 0:
        return np.inf
    assert signal > 0, "every wanted value is zero and some given are not"
    found = 10 * np.log10(signal / noise)
    assert found >= db, f"SQNR {found:.2f} dB, want at least {db} dB"
    return found


def _assert_below(error, bound, got, want):
    wrong = ~(error <= bound)  # so that a NaN is wrong
    first = _first(wrong)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements are off by more than their bound, "
        f"the first at {first}: {got[first]}, want {want[first]} within {bound[first]}"
    )


def _plain(leaf):
    """A leaf as a NumPy array; a typed random key as its words."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _differs(g, w):
    """Where the bytes of two arrays of one dtype and shape differ."""
    rows = [np.ascontiguousarray(a).reshape(-1, 1).view(np.uint8) for a in (g, w)]
    return (rows[0] != rows[1]).any(axis=1).reshape(g.shape)


def _float64(x):
    """The values as NumPy float64, so that the judge's arithmetic is exact enough."""
    return np.asarray(x).astype(np.float64)


def _first(mask):
    """The index of the first true element."""
    return tuple(int(i) for i in np.argwhere(mask)[0]) if mask.any() else ()
