"""Group-scaled FP8 arrays: one float32 scale beside each group of codes."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from coat_jax import groups
from coat_jax.formats import E4M3, Format, cast, of_dtype
from coat_jax.kernels import dispatch
from coat_jax.kernels import encode as encoding
from coat_jax.kernels import quantize as grouped
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.quantize import TINY as TINY
from coat_jax.kernels.quantize import scale_of
from coat_jax.typing import Array, Float, Float32


class Quantized(NamedTuple):
    """A float array stored as 8-bit codes with one scale per group; x = codes * scale.

    Invariants: codes has x's shape; scale is float32, positive and normal (NaN for a
    group that held NaN or Inf), of x's shape but ceil(n / group) along the grouped
    axis. Leaves may also be ShapeDtypeStructs or shardings.
    """

    codes: Any
    scale: Any


def quantize(
    x: Float[Array, "..."],
    *,
    format: Format = E4M3,
    group: int | None = 128,
    axis: int = -1,
    implementation: Implementation = None,
) -> Quantized:
    """Stores `x` in `format`, each group of `group` elements along `axis` with a scale.

    For each group g,

        scale_g = max|x_g| / format.max,  codes_g = cast(x_g (1 / scale_g)).

    COAT (arXiv 2410.19313) section 3, without expansion. Unlike COAT, the scale is
    kept in float32 as it was used, and has a floor (the smallest normal float32)
    instead of an added epsilon: an all-zero group stays zero, no other value moves.

    Args:
      x: any shape, float32, bfloat16 or float16; read as float32.
      format: storage format of the codes.
      group: elements per scale along `axis`, the last group being short where `axis`
        is no multiple; None: one scale for the whole array.
      axis: the grouped axis. A scalar counts as one group of one.
      implementation: None: on CUDA a kernel, for large arrays in groups of 16, 32, 64,
        128 or 256 that fill the last axis, or under one scale, and XLA elsewhere.
        "xla", "triton" or "mosaic": that one, on a CPU in Pallas's interpret mode;
        "pallas": the better of the two that this JAX has. All give the same bits.

    Returns:
      Quantized, x.size + 4 * scale.size bytes. With s the scale of x's group,
      |dequantize(q) - x| <= max(format.relative * |x|, format.absolute * s)(1 + 2^-18),
      but magnitudes below 1.18e-38, the smallest normal float32, count as zero.
      NaN or Inf anywhere in a group makes the whole group NaN.

    Raises:
      TypeError: if x is not a real floating-point array.
      ValueError: if group < 1 or axis is out of range, or if `implementation` names a
        kernel that can't take these arguments; it says why.
      NotImplementedError: if this JAX lacks the backend that it names.

    Example:
      >>> import jax.numpy as jnp
      >>> q = quantize(jnp.array([0.1, -3.0, 448.0]), group=4)
      >>> [float(v) for v in dequantize(q, group=4)]
      [0.1015625, -3.0, 448.0]
    """
    x = _as_float(x, "quantize")
    check_format("quantize", format)
    axis = check_group("quantize", x.shape, group, axis)
    if implementation is None and not dispatch.worthwhile(x):
        implementation = "xla"
    how = {"format": format, "implementation": implementation}
    if group is None:
        scale = scale_of(largest(x, tuple(range(x.ndim))), format)
        return Quantized(encoding.encode(x, scale, **how)[0], scale)
    if x.ndim == 0 or x.size == 0:
        return Quantized(*_edge(x.astype(jnp.float32), format, group, axis))
    last = axis == x.ndim - 1
    codes_N, scale_G = grouped.quantize(
        jnp.moveaxis(x, axis, -1),
        group=int(group),
        refusal=None if last else "kernels group the last axis alone",
        **how,
    )
    return Quantized(jnp.moveaxis(codes_N, -1, axis), jnp.moveaxis(scale_G, -1, axis))


def largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """max|x| over `axes` in float32; NaN where there is one among them.

    The axes stay, with size 1. x is a float of 16 or 32 bits; 0 where there is nothing.
    """
    # Magnitudes are ordered as their bits, NaN above all. XLA:CPU drops NaN from the
    # maximum of many floats. Selecting by isnan would give XLA a mask of x's shape to
    # keep, where both a forward and its backward ask for the maximum of one x; and
    # taking x in float32 a copy of it, for whoever else reads it so.
    integer = {2: jnp.int16, 4: jnp.int32}[x.dtype.itemsize]
    sign = jnp.asarray(jnp.iinfo(integer).max, integer)
    bits = lax.bitcast_convert_type(x, integer) & sign
    most = jnp.max(bits, axes, initial=0, keepdims=True)
    return lax.bitcast_convert_type(most, x.dtype).astype(jnp.float32)


def _edge(x, format, group, axis):
    """A scalar is one group of one; an empty array has codes and scales to match."""
    if x.ndim == 0:
        scale = scale_of(jnp.abs(x), format)
        return cast(x / scale, format), scale
    shape = group_shape(x.shape, group, axis)
    return cast(x, format), jnp.ones(shape, jnp.float32)


def dequantize(
    q: Quantized, *, group: int | None = 128, axis: int = -1
) -> Float32[Array, "..."]:
    """codes * scale: the inverse of `quantize` up to its bound, as float32.

    Gradients do not flow through what is stored: they are zero.

    Args:
      q: what `quantize` returned.
      group: as given to `quantize`. Another one that makes as many groups cannot be
        told from it (100 elements are two groups of 64 or of 99).
      axis: as given to `quantize`.

    Raises:
      TypeError: if `q` is not what `quantize` returns.
      ValueError: if the scales' shape is not that of `group` along `axis`.
    """
    if not isinstance(q, Quantized):
        raise TypeError(
            f"dequantize: q must be what quantize returned, got {type(q).__name__}"
        )
    check_codes("dequantize", q.codes, [("scale", q.scale)], group, axis)
    q = lax.stop_gradient(q)
    codes = q.codes.astype(jnp.float32)
    if group is None or codes.ndim == 0 or codes.size == 0:
        return codes * q.scale if codes.size else codes
    codes_N, scale_G = (jnp.moveaxis(a, axis, -1) for a in (codes, q.scale))
    blocks = groups.blocks_of(codes_N.shape[-1], group)
    x_BC = groups.split(codes_N, blocks) * groups.spread(scale_G, blocks)
    return jnp.moveaxis(groups.merge(x_BC), -1, axis)


def as_float32(x, who: str) -> jax.Array:
    """x in float32, or a TypeError that says what `who` takes."""
    return _as_float(x, who).astype(jnp.float32)


def _as_float(x, who: str) -> jax.Array:
    """x, in float32 unless it has 16 bits, or a TypeError."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{who}: x must be a real floating-point array, got dtype {x.dtype} and "
            f"shape {x.shape}; cast it, or split complex values into two arrays"
        )
    return x if x.dtype.itemsize == 2 else x.astype(jnp.float32)


def check_format(who: str, format) -> None:
    """Raises a TypeError unless `format` is one whose codes can be decoded."""
    if not isinstance(format, Format) or of_dtype(format.dtype) is None:
        raise TypeError(
            f"{who}: format must be coat_jax.E4M3 or coat_jax.E5M2, got {format!r}"
        )


def check_group(who: str, shape, group: Any, axis: Any) -> int:
    """The axis as a non-negative number, or an error."""
    whole = lambda n: isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    if not whole(axis):
        raise TypeError(f"{who}: axis must be one whole number, got {axis!r}")
    if group is not None and not (whole(group) and group >= 1):
        raise ValueError(
            f"{who}: group must be a whole number of at least 1, got {group!r} for x "
            f"of shape {tuple(shape)}"
        )
    if not -max(len(shape), 1) <= axis < max(len(shape), 1):
        raise ValueError(
            f"{who}: axis must lie in x's {len(shape)} axes, got {axis} for x of "
            f"shape {tuple(shape)}"
        )
    return axis % max(len(shape), 1)


def group_shape(shape, group: int | None, axis: int = -1) -> tuple[int, ...]:
    """The shape of one statistic per group: ceil(n / group) along `axis`."""
    shape = list(shape)
    if group is None:
        return (1,) * len(shape)
    if shape:
        shape[axis] = -(-shape[axis] // group)
    return tuple(shape)


def check_codes(who: str, codes, stats, group: int | None, axis: int) -> Format:
    """The codes' format; raises unless every statistic has the shape of `group`."""
    for name, array in [("codes", codes), *stats]:
        if not hasattr(array, "shape"):
            raise TypeError(
                f"{who}: {name} must be an array, got {type(array).__name__}; pass "
                "what the quantiser returned"
            )
    format = of_dtype(codes.dtype)
    if format is None:
        raise TypeError(
            f"{who}: codes must be float8_e4m3fn or float8_e5m2, got {codes.dtype} of "
            f"shape {codes.shape}; pass what the quantiser returned"
        )
    axis = check_group(who, codes.shape, group, axis)
    want = group_shape(codes.shape, group, axis)
    for name, stat in stats:
        if tuple(stat.shape) != want:
            raise ValueError(
                f"{who}: with group={group} along axis {axis}, codes of shape "
                f"{tuple(codes.shape)} need {name} of shape {want}, got "
                f"{tuple(stat.shape)}; pass the group and axis it was made with"
            )
    return format
