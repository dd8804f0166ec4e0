"""The arithmetic of one step of Adam on a tile of groups, for every kernel.

Letters: T groups of a tile, S elements of a group.

An element costs some 14 special functions (log2, exp2 and a reciprocal), nearly as much
time as its bytes cost. So everything is done in logarithms to base 2, by the hardware's
approximate functions where a backend has them, and what a group needs is done once a
group.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from coat_jax.formats import Format
from coat_jax.kernels.approximate import Functions
from coat_jax.rounding import hashed

STEPS = 16  # powers are whole sixteenths
MAX_POWER = 255
_LARGEST = np.float32(np.finfo(np.float32).max).view(np.int32)
_INFINITE = np.int32(0x7F800000)
_NORMAL = np.int32(0x00800000)  # the smallest normal number
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MANTISSA = np.int32(0x007FFFFF)
_ONE = np.int32(0x3F800000)
# _FLIP - bits orders the bits of normal magnitudes the other way round, and puts all
# below them last: one signed maximum finds the smallest normal number.
_FLIP = np.uint32(0x807FFFFF).view(np.int32)


class How(NamedTuple):
    """What is fixed when a step is traced.

    Attributes:
      m_format: of the first moment's codes.
      v_format: of the second moment's.
      group: elements that share amax and power.
      expand: False keeps the power 1.
      stochastic_v: whether v is rounded stochastically.
      stochastic_p: whether bfloat16 parameters are.
      eps_root: whether eps_root may be other than 0.
      nesterov: whether g_scale may be.
      clipped: whether g_factor may be other than 1.
    """

    m_format: Format
    v_format: Format
    group: int
    expand: bool
    stochastic_v: bool
    stochastic_p: bool
    eps_root: bool = False
    nesterov: bool = False
    clipped: bool = False


class Scalars(NamedTuple):
    """What changes from step to step: float32, seeds uint32, shape ().

    With g that of the gradient times g_factor, the step is
    m = b1 m + b1_rest g,  v = b2 v + b2_rest g^2,
    u = (m_scale m + g_scale g) / (sqrt(v_scale v + eps_root) + eps),
    p = p + u_factor u + p_factor p.  The random bits are those of `seed`, and for
    rounding parameters their exclusive or with p_word.
    """

    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any
    m_scale: Any
    g_scale: Any
    v_scale: Any
    half_log2_v_scale: Any
    eps_root: Any
    eps: Any
    u_factor: Any
    p_factor: Any
    seed: Any
    p_word: Any
    g_factor: Any = 1.0


SEEDS = ("seed", "p_word")


def packed(scalars: Scalars, layer: Any = None) -> jax.Array:
    """The scalars as one array of words: one operand, whatever changes.

    The word behind them is the index of a layer.
    """
    as_word = lambda x: lax.bitcast_convert_type(
        jnp.asarray(x, jnp.float32), jnp.uint32
    )
    words = [
        jnp.asarray(x, jnp.uint32) if name in SEEDS else as_word(x)
        for name, x in scalars._asdict().items()
    ]
    layer = jnp.asarray(0 if layer is None else layer, jnp.uint32)
    return jnp.stack([*words, layer, *[jnp.uint32(0)] * (15 - len(words))])


def unpacked(words) -> Scalars:
    """Scalars from what reads one word."""
    as_float = lambda x: lax.bitcast_convert_type(x, jnp.float32)
    return Scalars(
        *(
            words(i) if name in SEEDS else as_float(words(i))
            for i, name in enumerate(Scalars._fields)
        )
    )


# The mathematics of a tile -----------------------------------------------------------


def tile_step(f: Functions, how: How, s: Scalars, p, g, m, v, start):
    """The step on a tile.

    Args:
      f: log2 and its like.
      how: what is fixed.
      s: what changes.
      p: (T, S) parameters.
      g: (T, S) gradients.
      m: codes (T, S), amax (T,) and power (T,) of the first moment.
      v: of the second.
      start: (T,) uint32, the index in the whole array of each group's first element.

    Returns:
      New p, m and v.
    """
    p_dtype = p.dtype
    p, g = p.astype(jnp.float32), g.astype(jnp.float32)
    g = g * s.g_factor if how.clipped else g
    # + 0 makes -0 to 0, whose code has no sign.
    m = f.fma(s.b1, _decode(f, how.m_format, *m, signed=True), f.fma(s.b1_rest, g, 0.0))
    v = f.fma(s.b2, _decode(f, how.v_format, *v, signed=False), s.b2_rest * (g * g))
    bits = None
    if how.stochastic_v or how.stochastic_p:
        lane = lax.broadcasted_iota(jnp.uint32, p.shape, 1)
        bits = hashed(f.wide(start, p.shape) + lane, s.seed)
    new_m, diverged = _encode_m(f, how, m)
    new_v, log_v, scale_T = _encode_v(
        f, how, v, diverged, bits if how.stochastic_v else None
    )
    if how.eps_root:
        root = f.exp2(0.5 * f.log2(f.fma(s.v_scale, v, s.eps_root)))
    else:  # the logarithm that v's code needs does for the root too
        rest_T = s.half_log2_v_scale - 0.5 * _log2_of_power(scale_T)
        root = f.exp2(f.fma(log_v, 0.5, f.wide(rest_T, p.shape)))
    u = f.fma(s.m_scale, m, s.g_scale * g) if how.nesterov else s.m_scale * m
    u = u * f.reciprocal(root + s.eps)
    p = f.fma(s.u_factor, u, f.fma(s.p_factor, p, p))
    if how.stochastic_p:
        p = _stochastic(p, bits ^ s.p_word)
    return p.astype(p_dtype), new_m, new_v


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def _log2_of_power(x):
    """log2 of a power of two, from its bits."""
    exponent = lax.shift_right_logical(_bits(x), np.int32(23))
    return (exponent - 127).astype(jnp.float32)


def _stochastic(x, bits):
    """As `rounding.stochastic_bfloat16`, still in float32."""
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    raw = (raw + (bits & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)
    # Infinity stays what it is; NaN could overflow to another number.
    return jnp.where(x == x, lax.bitcast_convert_type(raw, jnp.float32), x)


def _decode(f: Functions, format: Format, codes, amax_T, power_T, *, signed: bool):
    """sign(q) h M h with h = (|q| / max)^(1 / 2k), of log2 |q| = -inf where q is 0."""
    q = codes.astype(jnp.float32)
    half_T = f.reciprocal(power_T.astype(jnp.float32)) * (STEPS / 2)
    top_T = half_T * np.float32(-np.log2(format.max))
    h = f.exp2(f.fma(f.log2(q), f.wide(half_T, q.shape), f.wide(top_T, q.shape)))
    x = h * f.wide(amax_T, q.shape) * h
    return _float(_bits(x) | (_bits(q) & ~_MAGNITUDE)) if signed else x


class _Stretch(NamedTuple):
    """How the elements of each group are stretched: log2 y = k log2(s |x|) + shift.

    amax and power are what is stored; s is a power of two that brings M near 1 from
    below, so that log2 is exact to 2^-22; shift is log2 max - k log2(s M), NaN where M
    is.
    """

    amax: Any
    power: Any
    k: Any
    scale: Any
    shift: Any


def _stretch(f: Functions, how: How, format: Format, size, most_T) -> _Stretch:
    """From the magnitudes' bits and the largest of each group."""
    bad = most_T >= _INFINITE
    zero = most_T < _NORMAL
    exponent = lax.shift_right_logical(most_T, np.int32(23))
    log_most = f.log2(_mantissa(most_T))
    if how.expand:
        least_T = _FLIP - jnp.max(_FLIP - size, axis=1)
        power = _power(f, format, most_T, least_T)
        power = jnp.where(bad | zero, np.float32(STEPS), power)
    else:
        power = jnp.full(most_T.shape, STEPS, jnp.float32)
    above = jnp.maximum(exponent - 127, 0)
    top = log_most + above.astype(jnp.float32)
    scale = (254 - jnp.minimum(exponent, 127)) << 23
    amax = jnp.where(bad, np.float32(np.nan), _float(jnp.where(zero, 0, most_T)))
    k = power * np.float32(1 / STEPS)
    start = np.float32(np.log2(format.max)) - k * jnp.where(
        bad, np.float32(np.nan), top
    )
    return _Stretch(amax, power, k, _float(scale), start)


def _mantissa(bits):
    """From 1 to 2, as the number it is."""
    return _float((bits & _MANTISSA) | _ONE)


def _power(f: Functions, format: Format, most_T, least_T):
    """16 k of the bits of M and mu.

    What is floored must be as right as the definition's, or it is another number: an
    approximate logarithm or quotient moves one floor in 10^5. Exponents and mantissas
    are compared apart, as they cancel.
    """
    reach = np.float32(math.log2(format.range) * STEPS)
    of = lambda bits: lax.shift_right_logical(bits, np.int32(23))
    steps = (of(most_T) - of(least_T)).astype(jnp.float32)
    octaves = steps + _log2_ratio(f, _mantissa(most_T), _mantissa(least_T))
    octaves = jnp.maximum(octaves, np.float32(2.0**-20))
    power = f.divide(jnp.full_like(octaves, reach), octaves)
    power = jnp.clip(power, np.float32(1), np.float32(MAX_POWER))
    return power.astype(jnp.int32).astype(jnp.float32)


# log2((1 + t) / (1 - t)) = t P(t^2) for |t| <= 1/3: interpolated at Chebyshev's points.
_RATIO = (0.406230867, 0.403451949, 0.577432871, 0.961791694, 2.88539004)


def _log2_ratio(f: Functions, x, y):
    """log2(x / y) for x and y from 1 to 2."""
    t = (x - y) * f.reciprocal(x + y)
    square, series = t * t, jnp.full_like(t, _RATIO[0])
    for coefficient in _RATIO[1:]:
        series = f.fma(series, square, coefficient)
    return t * series


def _encode_m(f: Functions, how: How, x):
    """Codes, amax and power, rounded to nearest; and which groups are not finite."""
    size = _bits(x) & _MAGNITUDE
    most_T = jnp.max(size, axis=1)
    to = _stretch(f, how, how.m_format, size, most_T)
    log = _log2_near_one(f, _float(size), to)
    y = f.exp2(_log_y(f, log, to))
    y = _float(_bits(y) | (_bits(x) & ~_MAGNITUDE))
    return _stored(f.cast(y, how.m_format), to), most_T >= _INFINITE


def _encode_v(f: Functions, how: How, x, diverged_T, bits):
    """Codes, amax and power of x >= 0, rounded to nearest or by random bits."""
    size = _bits(x)
    most_T = jnp.max(size, axis=1)
    # The square of a finite gradient may overflow. Inf is the largest number then, and
    # diverged where the first moment did.
    most_T = jnp.where(most_T == _INFINITE, _LARGEST, most_T)
    most_T = jnp.where(diverged_T, _INFINITE, most_T)
    format = how.v_format
    to = _stretch(f, how, format, size, most_T)
    log = _log2_near_one(f, _float(size), to)
    log_y = _log_y(f, log, to)
    if bits is None:
        codes = f.cast(f.exp2(log_y), format)
    else:
        codes = _between(f, format, log_y, to, bits)
    return _stored(codes, to), log, to.scale


def _stored(codes, to: _Stretch):
    return codes, to.amax, to.power.astype(jnp.uint8)


def _log2_near_one(f: Functions, size, to: _Stretch):
    """log2(s |x|); -inf where x is zero."""
    return f.log2(f.flushed_times(size, f.wide(to.scale, size.shape)))


def _log_y(f: Functions, log, to: _Stretch):
    """log2 of what is rounded."""
    return f.fma(log, f.wide(to.k, log.shape), f.wide(to.shift, log.shape))


def _between(f: Functions, format: Format, log_y, to: _Stretch, bits):
    """One of the codes around y; up if u < (|x| - below) / (above - below).

    All three are decoded relative to x: 2^((log2 code - log2 y) / k).
    """
    number, below, above = f.around(f.exp2(log_y), format)
    inverse = f.wide(f.reciprocal(to.power) * np.float32(STEPS), log_y.shape)
    away = -log_y * inverse
    low = f.exp2(f.fma(below, inverse, away))
    high = f.exp2(f.fma(above, inverse, away))
    # 1 + u, of 23 of the 24 bits of `rounding.uniform`: so no integer is converted.
    word = lax.shift_right_logical(bits, np.uint32(9)) | np.uint32(_ONE)
    above_one = lax.bitcast_convert_type(word, jnp.float32)
    gap = high - low
    up = f.negative(f.fma(above_one, gap, (low - 1.0) - gap))  # u gap < 1 - low
    # The largest code is the last; of a group that is not finite all are NaN, which is
    # 0x7F in both formats.
    largest = int(np.asarray(jnp.finfo(format.dtype).max).view(np.uint8))
    last_T = jnp.where(to.amax == to.amax, largest, 0x7F)
    codes = jnp.minimum(number + up, f.wide(last_T, number.shape)).astype(jnp.uint8)
    return lax.bitcast_convert_type(codes, format.dtype)
