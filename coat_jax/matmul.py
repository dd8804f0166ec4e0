"""FP8 matrix products: encode the operands, multiply the codes, scale the product.

A product is described by `lax.dot_general`'s dimension numbers. Operands stay in the
shape they came in, so that a sharded axis is never merged with another.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from coat_jax.formats import Format, cast
from coat_jax.kernels import dispatch
from coat_jax.kernels import encode as encoding
from coat_jax.policy import Accumulation, Operand
from coat_jax.quantize import TINY, largest

_STAGE = 16  # neighbours under one maximum in the first stage of Group Scaling
_PRECISION = {"fast": lax.Precision.DEFAULT, "promoted": lax.Precision.HIGHEST}


class Encoded(NamedTuple):
    """An operand: values = codes * scale.

    codes: FP8, or the values themselves (then scale is None). scale: float32, of the
    codes' rank, 1 along every axis that shares a scale; a power of two where
    `Operand.exact`.
    """

    codes: Any
    scale: Any


class Dims(NamedTuple):
    """`lax.dot_general`'s dimension numbers, with what they leave free."""

    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_free: tuple[int, ...]
    rhs_free: tuple[int, ...]

    @property
    def numbers(self):
        """As `lax.dot_general` takes them."""
        contract = (self.lhs_contract, self.rhs_contract)
        return contract, (self.lhs_batch, self.rhs_batch)


def dims_of(lhs_ndim: int, rhs_ndim: int, dimension_numbers) -> Dims:
    """Dimension numbers in full, with non-negative axes."""
    (lc, rc), (lb, rb) = dimension_numbers
    whole = lambda axes, ndim: tuple(_axis(axis, ndim) for axis in axes)
    lc, lb = whole(lc, lhs_ndim), whole(lb, lhs_ndim)
    rc, rb = whole(rc, rhs_ndim), whole(rb, rhs_ndim)
    rest = lambda ndim, *used: tuple(a for a in range(ndim) if a not in sum(used, ()))
    return Dims(lc, rc, lb, rb, rest(lhs_ndim, lc, lb), rest(rhs_ndim, rc, rb))


def _axis(axis, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(
            "fp8_dot_general: dimension numbers must name axes of their operand, which "
            f"has {ndim}; got axis {axis}"
        )
    return int(axis) % ndim


def encode(
    x: jax.Array,
    operand: Operand,
    contract: tuple[int, ...],
    *,
    after=None,
    scale=None,
    fused: bool = False,
) -> Encoded:
    """`x` as an operand of a product that sums over its axes `contract`.

    codes = cast(x / scale),  scale = max(max|x| / format.max, 2^-126), the maximum
    over what shares the scale, and rounded up to a power of two where `operand.exact`:
    then neither dividing by it nor multiplying the product by it rounds. NaN or Inf
    there makes the scale and all under it NaN. `scale` itself may be given instead.

    With `after`, an array, the codes cannot exist before it (`tied`). A backward that
    encodes what its forward had encoded needs that: XLA would see one value computed
    twice and keep the forward's codes, for weights a byte a parameter in every layer.

    `fused` says that x isn't in memory, but is made by what XLA can fuse with this.
    """
    if operand.format is None:
        return Encoded(x, None)
    scale = _scale_for(x, operand, contract, after, scale)
    if fused:
        return Encoded(_rounded(x, scale, operand), scale)
    codes, codes_T = _codes(x, scale, operand, contract, both=False)
    return Encoded(codes if codes_T is None else codes_T, scale)


def _scale_for(x, operand: Operand, contract, after, scale):
    """The scale, given or found, tied to `after` if that is given."""
    if scale is None:
        scale = scale_of(x, operand, contract)
    if after is None:
        return scale
    # Codes and scale both change sign then, and the values stay what they are.
    return tied(scale, after, instead=-scale)


def encode_twice(
    x: jax.Array,
    operand: Operand,
    contract: tuple[int, ...],
    leading: tuple[int, ...],
) -> tuple[Encoded, Encoded]:
    """`x` as an operand of two products: sums over `contract`, and over `leading`."""
    if operand.format is None or operand.scaling == "vector":
        return encode(x, operand, contract), encode(x, operand, leading)
    # One scale for all is the same encoding whichever axes are summed over.
    scale = scale_of(x, operand, contract)
    codes, codes_T = _codes(x, scale, operand, leading, both=True)
    return Encoded(codes, scale), Encoded(codes if codes_T is None else codes_T, scale)


def _codes(x, scale, operand: Operand, contract, *, both: bool):
    """Codes for a sum over the last axes, or any, and for one over the first axes.

    A product wants the axis that it sums over innermost. A kernel writes the codes that
    way at once; XLA would make them as x lies, and transpose them in another pass.
    """
    rows = len(contract)
    first = 0 < rows < x.ndim and tuple(contract) == tuple(range(rows))
    if not (first and operand.exact and scale.size == 1 and dispatch.worthwhile(x)):
        return _rounded(x, scale, operand), None
    made: Any = encoding.encode(
        x, scale, format=_format_of(operand), rows=rows, codes=both, transposed=True
    )
    codes, codes_T = made
    return codes, jnp.moveaxis(codes_T, range(-rows, 0), range(rows))


def _format_of(operand: Operand) -> Format:
    if operand.format is None:
        raise ValueError(
            f"matmul: an operand must have a format to be encoded in, got {operand}"
        )
    return operand.format


def _rounded(x, scale, operand: Operand):
    """x / scale in the operand's format."""
    x = x.astype(jnp.float32)
    # The reciprocal of a power of two is exact, and a division an element takes XLA's
    # loops on a GPU longer than memory does.
    x = x * (1.0 / scale) if operand.exact else x / scale
    return cast(x, _format_of(operand))


def scale_of(x: jax.Array, operand: Operand, contract: tuple[int, ...]) -> jax.Array:
    """The scale with which `encode` encodes `x`."""
    axes = contract if operand.scaling == "vector" else tuple(range(x.ndim))
    if operand.scaling == "group" and x.size:
        scale = _group_scaling(x, _format_of(operand))
    else:
        return scale_from(largest(x, axes), operand)
    return jnp.maximum(jnp.where(jnp.isfinite(scale), scale, jnp.nan), TINY)


def scale_from(amax: jax.Array, operand: Operand) -> jax.Array:
    """The scale for values up to `amax`, float32, of one tensor or its rows."""
    scale = amax / _format_of(operand).max
    scale = power_of_two(scale) if operand.exact else scale
    return jnp.maximum(jnp.where(jnp.isfinite(scale), scale, jnp.nan), TINY)


def power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two at or above x >= 0, float32; Inf and NaN stay.

    Example:
      >>> power_of_two(jnp.array([0.3, 4.0, 5.0])).tolist()
      [0.5, 4.0, 8.0]
    """
    mantissa = jnp.int32(0x7FFFFF)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    up = lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)
    return jnp.where(jnp.isfinite(x), up, x)


def encode_weight(
    kernel: jax.Array,
    operand: Operand,
    contract: tuple[int, ...],
    *,
    after,
    scale=None,
) -> Encoded:
    """`encode` for a parameter, whose codes lie in memory as the parameter does.

    The product wants its contracted axis innermost. Left to itself, XLA carries that
    wish back to the parameter, and where layers are scanned copies the parameters of
    all of them into that order before the loop. So the codes are transposed instead.
    """
    if operand.format is None:
        return Encoded(kernel, None)
    scale = _scale_for(kernel, operand, contract, after, scale)
    codes = _rounded(kernel, scale, operand)
    order = Layout(major_to_minor=tuple(range(codes.ndim)))
    return Encoded(with_layout_constraint(codes, order), scale)


def tied(
    x: jax.Array, after: jax.Array, *, instead: jax.Array | float = jnp.nan
) -> jax.Array:
    """`x`, but not before `after` exists; `instead` where that holds NaN.

    A barrier would not do: XLA:GPU removes barriers before it fuses and schedules.
    """
    if not after.size:
        return x  # nothing to wait for
    found = jnp.isnan(jnp.min(after))
    return jnp.where(found, jnp.asarray(instead, x.dtype), x)


def _group_scaling(x, format: Format):
    """COAT's two stages: bfloat16 scales of neighbours, then the largest of them."""
    rows = jnp.atleast_1d(x)
    tail = -rows.shape[-1] % _STAGE
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, tail)])
    rows = rows.reshape(*rows.shape[:-1], -1, _STAGE)
    each = (largest(rows, (rows.ndim - 1,)) / format.max).astype(jnp.bfloat16)
    # The pin keeps the rounding, which XLA:GPU would drop as excess precision.
    each = lax.optimization_barrier(each).astype(jnp.float32)
    return largest(each, tuple(range(each.ndim))).reshape((1,) * x.ndim)


def decode(x: Encoded) -> jax.Array:
    """codes * scale, as float32."""
    values = x.codes.astype(jnp.float32)
    return values if x.scale is None else values * x.scale


def multiply(
    lhs: Encoded,
    rhs: Encoded,
    dims: Dims,
    *,
    dtype,
    accumulation: Accumulation,
    exact: bool = False,
    narrow: bool = False,
    out_sharding=None,
) -> jax.Array:
    """The product in float32: axes batch, lhs free, rhs free, as `lax.dot_general`.

    Codes are multiplied to bfloat16 where `dtype`, the caller's, is bfloat16 (cuBLASLt
    is a fifth slower with float32 output), else to float32.

    With `exact`, both operands' scales are powers of two. If there is one of each, the
    product is multiplied by theirs as it is: cuBLASLt does that before it rounds, and
    no pass over the result is left. Products below 2^-126 of all codes' are zero then.
    Other scales are applied in float32, one after the other. With `narrow` the result
    stays in the dtype that all its values have, bfloat16 where it can.
    """
    precision = _PRECISION[accumulation]
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    if lhs.scale is None or rhs.scale is None:
        lhs, rhs = (Encoded(decode(x).astype(dtype), None) for x in (lhs, rhs))
        precision, wide = None, dtype
    elif too_small(lhs.codes.shape, rhs.codes.shape, dims):
        # Exact, and so small that the format's speed is beside the point.
        lhs, rhs = (x._replace(codes=x.codes.astype(jnp.float32)) for x in (lhs, rhs))
        precision, wide = lax.Precision.HIGHEST, jnp.float32
    y = lax.dot_general(
        lhs.codes,
        rhs.codes,
        dims.numbers,
        precision=precision,
        preferred_element_type=wide,
        out_sharding=out_sharding,
    )
    if lhs.scale is None or rhs.scale is None:
        return y if narrow else y.astype(jnp.float32)
    scales = _lhs_scale(lhs.scale, dims, y.ndim), _rhs_scale(rhs.scale, dims, y.ndim)
    if exact and not any(scale.ndim for scale in scales):
        y = y * (scales[0] * scales[1]).astype(wide)
        return y if narrow else y.astype(jnp.float32)
    return y.astype(jnp.float32) * scales[0] * scales[1]


def too_small(lhs_shape, rhs_shape, dims: Dims) -> bool:
    """Whether cuBLASLt has no FP8 product of this size: a vector, or a few elements.

    XLA pads every other size to multiples of 16 by itself.
    """
    size = lambda shape, axes: math.prod(shape[axis] for axis in axes)
    M, N = size(lhs_shape, dims.lhs_free), size(rhs_shape, dims.rhs_free)
    K = size(lhs_shape, dims.lhs_contract)
    return M == 1 or N == 1 or min(M * K, K * N, M * N) < 100


def _lhs_scale(scale, dims: Dims, ndim: int):
    if scale.size == 1:
        return scale.reshape(())
    scale = scale.transpose(*dims.lhs_batch, *dims.lhs_free, *dims.lhs_contract)
    shape = scale.shape[: len(dims.lhs_batch + dims.lhs_free)]
    return scale.reshape(*shape, *(1,) * (ndim - len(shape)))


def _rhs_scale(scale, dims: Dims, ndim: int):
    if scale.size == 1:
        return scale.reshape(())
    scale = scale.transpose(*dims.rhs_batch, *dims.rhs_free, *dims.rhs_contract)
    shape = scale.shape[: len(dims.rhs_batch + dims.rhs_free)]
    batch, free = shape[: len(dims.rhs_batch)], shape[len(dims.rhs_batch) :]
    return scale.reshape(*batch, *(1,) * (ndim - len(shape)), *free)


def lhs_gradient(dims: Dims) -> tuple[Dims, tuple[int, ...]]:
    """The product g . rhs, the gradient of lhs, and the lhs axis that each axis is."""
    free = len(dims.lhs_batch) + len(dims.lhs_free)
    ndim = free + len(dims.rhs_free)
    batch = tuple(range(len(dims.lhs_batch)))
    numbers = ((tuple(range(free, ndim)), dims.rhs_free), (batch, dims.rhs_batch))
    rhs_ndim = len(dims.rhs_batch + dims.rhs_free + dims.rhs_contract)
    by_rhs = sorted(range(len(dims.rhs_contract)), key=lambda i: dims.rhs_contract[i])
    order = (*dims.lhs_batch, *dims.lhs_free, *(dims.lhs_contract[i] for i in by_rhs))
    return dims_of(ndim, rhs_ndim, numbers), order


def rhs_gradient(dims: Dims) -> tuple[Dims, tuple[int, ...]]:
    """The product lhs . g, the gradient of rhs, and the rhs axis that each axis is."""
    batch = tuple(range(len(dims.lhs_batch)))
    free = tuple(range(len(batch), len(batch) + len(dims.lhs_free)))
    ndim = len(batch) + len(free) + len(dims.rhs_free)
    numbers = ((dims.lhs_free, free), (dims.lhs_batch, batch))
    lhs_ndim = len(dims.lhs_batch + dims.lhs_free + dims.lhs_contract)
    by_lhs = sorted(range(len(dims.lhs_contract)), key=lambda i: dims.lhs_contract[i])
    order = (*dims.rhs_batch, *(dims.rhs_contract[i] for i in by_lhs), *dims.rhs_free)
    return dims_of(lhs_ndim, ndim, numbers), order


def summed(cotangent: jax.Array, primal) -> jax.Array:
    """A gradient, added up over the axes of a `shard_map` that its primal is whole on.

    Args:
      cotangent: what one device has of it.
      primal: the type (`jax.typeof`) of what it is the gradient of.
    """
    extra = varying(jax.typeof(cotangent)) - varying(primal)
    return lax.psum(cotangent, tuple(sorted(extra))) if extra else cotangent


def varying(typed) -> frozenset[str]:
    """The axes of a `shard_map` over which devices hold different values."""
    manual = getattr(typed, "mat", None)  # as jax 0.12 has it; it was `vma` before
    return getattr(typed, "vma", frozenset()) if manual is None else manual.varying


def gradient(lhs: Encoded, rhs: Encoded, dims: Dims, order, primal, **how) -> jax.Array:
    """The product of `lhs_gradient` or `rhs_gradient`, laid out as the array `primal`.

    Args:
      lhs: as `multiply` takes it.
      rhs: as `multiply` takes it.
      dims: as `multiply` takes them.
      order: which axis of `primal` each axis of the product is.
      primal: the type (`jax.typeof`) of what it is the gradient of.
      **how: dtype, accumulation, exact and narrow, as `multiply` takes them.
    """
    sharding = primal.sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        spec = (*sharding.spec, *(None,) * (primal.ndim - len(sharding.spec)))
        how["out_sharding"] = sharding.update(spec=P(*(spec[axis] for axis in order)))
    y = multiply(lhs, rhs, dims, **how)
    return y.transpose(*(order.index(axis) for axis in range(len(order))))
