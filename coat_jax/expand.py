"""Range expansion: groups stretched by a power function before the cast to FP8.

Letters: N the last axis in G groups, laid out as B blocks of C (see groups.py).
"""

import math
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp

from coat_jax import groups
from coat_jax.formats import E4M3, Format, cast, neighbours
from coat_jax.quantize import (
    TINY,
    as_float32,
    check_codes,
    check_format,
    check_group,
    group_shape,
)
from coat_jax.typing import Array, Float, Float32

STEPS = 16  # powers are whole sixteenths
MAX_POWER = 255  # in sixteenths, what uint8 holds


class Expanded(NamedTuple):
    """A float array as 8-bit codes of sign(x) (|x| / amax)^k, with amax and k a group.

    Invariants: codes has x's shape; amax is float32, the group's largest magnitude (0
    for an all-zero group, NaN for one that held NaN or Inf); power is uint8, 16 k.
    amax and power have x's shape but ceil(n / group) along the grouped axis. In an
    optimizer's state the three fields are trees with the parameters' structure.
    """

    codes: Any
    amax: Any
    power: Any


def expand_quantize(
    x: Float[Array, "..."],
    *,
    format: Format = E4M3,
    group: int = 128,
    axis: int = -1,
    expand: bool = True,
    uniform: Float32[Array, "..."] | None = None,
) -> Expanded:
    """Stores `x` in `format` after stretching each group to the format's range.

    For each group, with M = max|x| and mu = min|x| over its non-zeros,

        k = clip(floor(16 log2 R / log2(M / mu)) / 16, 1/16, 255/16),  R = max^2 / 2
        codes = cast(max * sign(x) * (|x| / M)^k)

    so that the smallest non-zero lands above two subnormal steps. COAT (arXiv
    2410.19313) section 4.1 with the constants of its kernel, whose three scalars a
    group collapse to (M, k). Unlike COAT: mu is the minimum over the non-zeros
    wherever zeros stand, and k is capped (a constant group has k = 255/16).

    Args:
      x: any shape, float32, bfloat16 or float16; read as float32. Magnitudes below
        the smallest normal float32 (1.18e-38) are zero by definition.
      format: storage format of the codes.
      group: elements per (M, k) along `axis`, tails allowed.
      axis: the grouped axis. A scalar counts as one group of one.
      expand: False keeps k = 1, the plain scaled cast: small values may become zero.
      uniform: None rounds to nearest. An array of x's shape in [0, 1) rounds to one of
        the two codes around x so that the decoded value is x on average.

    Returns:
      Expanded, of x.size + 5 * amax.size bytes. In y = max (|x| / M)^k, decoding moves
      y by at most max(relative y, absolute)(1 + 2^-12) with rounding to nearest, if
      M / mu < 2^252 (above it the decoder's first factor may underflow); no non-zero
      decodes to zero unless `expand` is False, zeros stay zero, and the result does
      not depend on the order within a group. NaN or Inf in a group makes it all NaN.

    Raises:
      TypeError: if x is not a real floating-point array.
      ValueError: if group < 1, axis is out of range, or uniform has another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> e = expand_quantize(jnp.array([1e-9, 0.0, -1e-8, 1e-7]), group=4)
      >>> int(e.power[0]), [f"{float(v):.1e}" for v in expand_dequantize(e, group=4)]
      (40, ['9.5e-10', '0.0e+00', '-9.9e-09', '1.0e-07'])
    """
    x = as_float32(x, "expand_quantize")
    check_format("expand_quantize", format)
    if group is None:
        raise ValueError(
            "expand_quantize: group must be a whole number of at least 1, got None; "
            f"pass the length of axis {axis} of x's shape {x.shape} for one group"
        )
    axis = check_group("expand_quantize", x.shape, group, axis)
    if uniform is not None and uniform.shape != x.shape:
        raise ValueError(
            f"expand_quantize: uniform must have x's shape {x.shape}, got "
            f"{uniform.shape}; draw one number an element"
        )
    if x.size == 0:
        shape = group_shape(x.shape, group, axis)
        power = jnp.full(shape, STEPS, jnp.uint8)
        return Expanded(cast(x, format), jnp.zeros(shape, jnp.float32), power)
    if x.ndim == 0:
        uniform = None if uniform is None else uniform[None]
        encoded = _encode(x[None], format, group, expand, uniform)
        return Expanded(*(leaf[0] for leaf in encoded))
    to_last = lambda a: None if a is None else jnp.moveaxis(a, axis, -1)
    encoded = _encode(to_last(x), format, group, expand, to_last(uniform))
    return Expanded(*(jnp.moveaxis(leaf, -1, axis) for leaf in encoded))


def _encode(x_N, format: Format, group: int, expand: bool, uniform_N) -> Expanded:
    blocks = groups.blocks_of(x_N.shape[-1], group)
    x_BC = groups.split(x_N, blocks)
    size_BC = jnp.abs(x_BC)
    size_BC = jnp.where(size_BC < TINY, 0.0, size_BC)
    amax_G = groups.reduce(size_BC, blocks, op=jnp.max, neutral=0.0)
    amax_G = jnp.where(jnp.isinf(amax_G), jnp.nan, amax_G)
    if expand:
        nonzero_BC = jnp.where(size_BC == 0, jnp.inf, size_BC)
        amin_G = groups.reduce(nonzero_BC, blocks, op=jnp.min, neutral=jnp.inf)
        power_G = _power(amax_G, amin_G, format)
    else:
        power_G = jnp.full(amax_G.shape, STEPS, jnp.uint8)
    amax_BC, power_BC = groups.spread(amax_G, blocks), groups.spread(power_G, blocks)
    y_BC = _stretch(size_BC, amax_BC, power_BC, format)
    if uniform_N is None:
        code_BC = cast(jnp.where(x_BC < 0, -y_BC, y_BC), format)
    else:
        u_BC = groups.split(uniform_N, blocks)
        code_BC = _stochastic(x_BC, size_BC, y_BC, u_BC, amax_BC, power_BC, format)
    return Expanded(groups.merge(code_BC), amax_G, power_G)


def _log2(x):
    """Exponent and log2 of the mantissa of normal x > 0: exact apart, in float32.

    log2(x) - log2(y) of values near 1e-30 cancels all but 16 bits of the difference;
    subtracting the two parts on their own keeps 24.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((bits >> 23) & 0xFF) - 127
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    return exponent.astype(jnp.float32), jnp.log2(mantissa)


def _log2_ratio(x, y):
    """log2(x / y) of positive normals; never through the quotient."""
    (ex, fx), (ey, fy) = _log2(x), _log2(y)
    return (ex - ey) + (fx - fy)


def _power(amax_G, amin_G, format: Format):
    """16 k, as uint8; 16 for a group that is all zero or not finite."""
    reach = jnp.float32(math.log2(format.range) * STEPS)
    # Contracted to a fused multiply-add, the ratio of equals may come out below zero.
    octaves = jnp.maximum(_log2_ratio(amax_G, amin_G), 2.0**-20)
    power = jnp.clip(jnp.floor(reach / octaves), 1, MAX_POWER)
    ordinary = jnp.isfinite(amax_G) & (amax_G > 0)
    return jnp.where(ordinary, power, STEPS).astype(jnp.uint8)


def _stretch(size_BC, amax_BC, power_BC, format: Format):
    """max (|x| / M)^k, NaN where M is, 0 where x is."""
    k = power_BC.astype(jnp.float32) / STEPS
    y = format.max * jnp.exp2(k * _log2_ratio(size_BC, amax_BC))
    y = jnp.where(size_BC == 0, 0.0, y)
    return jnp.where(jnp.isnan(amax_BC), jnp.nan, y)


def _stochastic(x_BC, size_BC, y_BC, u_BC, amax_BC, power_BC, format: Format):
    """One of the codes around y; up if u < (|x| - below) / (above - below)."""
    below, above = neighbours(y_BC, format)
    low, high = (
        _decode(c.astype(jnp.float32), amax_BC, power_BC, format)
        for c in (below, above)
    )
    up = u_BC * (high - low) < size_BC - low  # never at low == high: the top code
    code = jnp.where(up, above.astype(jnp.float32), below.astype(jnp.float32))
    code = jnp.where(jnp.isnan(amax_BC), jnp.nan, code)
    return cast(jnp.where(x_BC < 0, -code, code), format)


def _decode(code, amax, power, format: Format):
    """sign(q) M (|q| / max)^(1/k), in two factors around M so that none underflows."""
    size = jnp.abs(code)
    k = power.astype(jnp.float32) / STEPS
    half = jnp.exp2((jnp.log2(size) - jnp.log2(format.max)) / (2 * k))
    # XLA flushes subnormals: the floor keeps a value just below them from becoming 0.
    x = jnp.maximum(half * amax * half, TINY)
    x = jnp.where(size == 0, 0.0, jnp.where(code < 0, -x, x))
    return jnp.where(jnp.isnan(amax), jnp.nan, x)


def expand_dequantize(
    e: Expanded, *, group: int = 128, axis: int = -1
) -> Float32[Array, "..."]:
    """Decodes what `expand_quantize` made, as float32.

    With h = (|q| / max)^(1 / 2k),  x = sign(q) h M h;  zero where q is.

    Gradients do not flow through what is stored: they are zero.

    Args:
      e: what `expand_quantize` returned, with or without `expand`.
      group: as given to `expand_quantize`. Another one that makes as many groups cannot
        be told from it (100 elements are two groups of 64 or of 99).
      axis: as given to `expand_quantize`.

    Raises:
      TypeError: if `e` is not what `expand_quantize` returns.
      ValueError: if amax or power have not the shape of `group` along `axis`.
    """
    if not isinstance(e, Expanded):
        raise TypeError(
            "expand_dequantize: e must be what expand_quantize returned, got "
            f"{type(e).__name__}"
        )
    stats = [("amax", e.amax), ("power", e.power)]
    format = check_codes("expand_dequantize", e.codes, stats, group, axis)
    e = lax.stop_gradient(e)
    code = e.codes.astype(jnp.float32)
    if code.ndim == 0 or code.size == 0:
        return _decode(code, e.amax, e.power, format) if code.size else code
    code_N, amax_G, power_G = (
        jnp.moveaxis(a, axis, -1) for a in (code, e.amax, e.power)
    )
    blocks = groups.blocks_of(code_N.shape[-1], group)
    x_BC = _decode(
        groups.split(code_N, blocks),
        groups.spread(amax_G, blocks),
        groups.spread(power_G, blocks),
        format,
    )
    return jnp.moveaxis(groups.merge(x_BC), -1, axis)
