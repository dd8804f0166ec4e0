"""The special functions of kernels: exact ones, and each GPU backend's fast ones."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from coat_jax.formats import Format, unpinned

_TINY = np.finfo(np.float32).tiny


class Functions(NamedTuple):
    """What a kernel's mathematics is written in; float32 in and out.

    Codes of non-negative values are numbered in order from 0: a number is a code's
    bits without its sign, as int32.

    Attributes:
      log2: of |x|; -inf where that is below the smallest normal float32.
      exp2: of any x, 0 at -inf.
      reciprocal: 1 / x.
      divide: x / y, as rounded; of normal numbers.
      fma: x y + z.
      flushed_times: x y, with an x below the smallest normal float32 taken as 0.
      around: of y >= 0 in a format, the number of the largest value that is no larger,
        and log2 of that value and of the next one. The number is beyond that of the
        format's maximum for an Inf or a NaN.
      negative: 1 where x < 0, else 0, int32.
      wide: of a statistic (T,) and a shape (T, S), the statistic beside its elements.
      cast: to a format's codes, as `formats.cast` for |y| <= max (1 + 2^-20) and NaN.
    """

    log2: Callable
    exp2: Callable
    reciprocal: Callable
    divide: Callable
    fma: Callable
    flushed_times: Callable
    around: Callable
    negative: Callable
    wide: Callable
    cast: Callable


def _flushed(x):
    return jnp.where(x < _TINY, 0.0, x)


def _wide(stat_T, shape):
    return lax.broadcast_in_dim(stat_T, shape, (0,))


def _sign_bit(x):
    """Of a NaN that an instruction made it is 0."""
    return lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.int32), np.int32(31))


def _layout(format: Format) -> tuple[int, int]:
    """Mantissa bits, and what a float32's exponent field has more than a code's."""
    info = jnp.finfo(format.dtype)
    return info.nmant, 126 + int(info.minexp)


def _around(y, format: Format):
    """Subnormal codes are read off y + the smallest normal: no subnormal float32."""
    mantissa, shift = _layout(format)
    normal = np.float32(2.0 ** (shift - 126))
    top = lambda x: lax.shift_right_logical(
        lax.bitcast_convert_type(x, jnp.int32), np.int32(23 - mantissa)
    )
    number = jnp.maximum(
        top(y) - (shift << mantissa), top(y + normal) - ((shift + 1) << mantissa)
    )

    def log2(n):
        value = lambda n: lax.bitcast_convert_type(n << (23 - mantissa), jnp.float32)
        small = value(n + ((shift + 1) << mantissa)) - normal
        large = value(n + (shift << mantissa))
        return jnp.log2(jnp.where(n < (1 << mantissa), small, large))

    return number, log2(number), log2(number + 1)


EXACT = Functions(
    log2=lambda x: jnp.log2(_flushed(jnp.abs(x))),
    exp2=jnp.exp2,
    reciprocal=lambda x: 1.0 / x,
    divide=lambda x, y: x / y,
    fma=lambda x, y, z: x * y + z,
    flushed_times=lambda x, y: _flushed(x) * y,
    around=_around,
    negative=lambda x: (x < 0).astype(jnp.int32),
    wide=_wide,
    cast=unpinned,
)


# Triton ------------------------------------------------------------------------------


def triton_functions(*, table: bool = False) -> Functions:
    """PTX's approximate instructions; each is one operation of the special units.

    lg2 and ex2 are right to 2^-22, absolute and relative, rcp to one unit in the last
    place. They flush subnormal numbers to zero.

    Args:
      table: whether the logarithms of codes come from a table in the registers of a
        warp, by shuffles, instead of from lg2: more instructions, fewer special ones.
    """
    return Functions(
        log2=_log2,
        exp2=lambda x: _asm("ex2.approx.ftz.f32 $0, $1;", x),
        reciprocal=lambda x: _asm("rcp.approx.ftz.f32 $0, $1;", x),
        divide=_divide,
        # Triton rounds products before it adds.
        fma=_fma,
        flushed_times=lambda x, y: _asm("mul.ftz.f32 $0, $1, $2;", x, y),
        around=functools.partial(_around_by_subnormals, log2=_log2, table=table),
        negative=_sign_bit,
        wide=_wide,
        cast=_cast,
    )


def _fma(x, y, z):
    return _asm("fma.rn.f32 $0, $1, $2, $3;", x, y, z)


def _divide(x, y):
    """What the approximate reciprocal leaves as a remainder is divided again."""
    inverse = _asm("rcp.approx.ftz.f32 $0, $1;", y)
    quotient = x * inverse
    return _fma(_fma(-quotient, y, x), inverse, quotient)


def _log2(x):
    return _asm("{ .reg .f32 a; abs.f32 a, $1; lg2.approx.ftz.f32 $0, a; }", x)


def _asm(text: str, *args, constraints: str = "", dtype=jnp.float32, pack: int = 1):
    """PTX for each element, or each `pack` of them; float32 unless told otherwise."""
    from jax.experimental.pallas import triton as plt

    shape = jnp.broadcast_shapes(*map(jnp.shape, args))
    wide = lambda x: jnp.broadcast_to(x, shape)
    args = [wide(np.float32(x) if isinstance(x, float) else x) for x in args]
    [result] = plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints or "=f" + ",f" * len(args),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return result


def _around_by_subnormals(y, format: Format, *, log2, table: bool):
    """A float32 that is 2^-shift as large has a code's bits at its top.

    The format's subnormal numbers are float32's then. GPUs multiply these as others.
    """
    mantissa, shift = _layout(format)
    small = lax.bitcast_convert_type(y * np.float32(2.0**-shift), jnp.int32)
    step = np.int32(1 << (23 - mantissa))
    below = small & -step
    value = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)
    log = lambda bits: log2(value(bits) * np.float32(2.0**shift))
    number = lax.shift_right_logical(small, np.int32(23 - mantissa))
    if table:
        return number, _tabulated(number, format), _tabulated(number + 1, format)
    return number, log(below), log(below + step)


def _tabulated(number, format: Format):
    """number / 2^mantissa - bias, which is right where the mantissa is 0, and a table.

    Lane i of a warp holds the correction of the subnormal number i, or of the mantissa
    i - 2^mantissa from there on: log2 r + 1 - r with r = i / 2^mantissa in both cases.
    """
    mantissa, shift = _layout(format)
    half = 1 << mantissa
    table = _asm(
        "{ .reg .b32 i; .reg .f32 r, l; mov.u32 i, %laneid; "
        f"and.b32 i, i, {2 * half - 1}; cvt.rn.f32.u32 r, i; "
        f"mul.f32 r, r, {_ptx(1 / half)}; lg2.approx.ftz.f32 l, r; "
        f"sub.f32 l, l, r; add.f32 $0, l, {_ptx(1.0 - (127 - shift))}; }}",
        jnp.zeros(number.shape, jnp.float32),
    )
    return _asm(
        f"{{ .reg .b32 i; .reg .f32 n, t; and.b32 i, $1, {half - 1}; "
        f"or.b32 i, i, {half}; min.s32 i, i, $1; "
        "shfl.sync.idx.b32 t, $2, i, 0x1f, 0xffffffff; cvt.rn.f32.s32 n, $1; "
        f"fma.rn.f32 $0, n, {_ptx(1 / half)}, t; }}",
        number,
        table,
        constraints="=f,r,f",
    )


def _ptx(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"


def _cast(y, format: Format):
    """To nearest even, clipped; NaN is NaN."""
    pair = f"cvt.rn.satfinite.{format.name}x2.f32"
    codes = _asm(
        f"{{ .reg .b16 a, b; {pair} a, $2, $1; {pair} b, $4, $3; "
        "mov.b32 $0, {a, b}; }",
        y,
        constraints="=r,f,f,f,f",
        dtype=jnp.int8,
        pack=4,
    )
    return lax.bitcast_convert_type(codes, format.dtype)


# Mosaic GPU --------------------------------------------------------------------------


def mosaic_functions(wide: Callable) -> Functions:
    """JAX's own functions, which `approx_math=True` makes the approximate ones.

    Args:
      wide: as in `Functions`; it knows the layout of a tile.
    """
    log2 = lambda x: jnp.log2(jnp.abs(x))
    return EXACT._replace(
        log2=log2,
        around=functools.partial(_around_by_subnormals, log2=log2, table=False),
        negative=_sign_bit,
        wide=wide,
    )
