"""What an 8-bit float can hold, and the one door through which values enter it."""

import dataclasses

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format, described by its worst rounding of a value x with |x| <= max.

    Storing x to nearest yields x' with  |x' - x| <= max(relative * |x|, absolute).

    Attributes:
      name: "e4m3" or "e5m2", as command lines and checkpoints spell it.
      dtype: the JAX dtype of the codes.
      max: largest finite value.
      relative: unit roundoff of normal numbers, dimensionless.
      absolute: half the subnormal spacing, in units of the stored value.
    """

    name: str
    dtype: np.dtype
    max: float
    relative: float
    absolute: float

    @property
    def range(self) -> float:
        """R, what the largest over the smallest non-zero of a group is expanded to.

        R = max^2 / 2 puts the smallest non-zero at max / R = 2 / max, which is 16/7
        subnormal steps for both formats: it never rounds to zero. COAT's kernel has
        the same number (448^2 / 2); the paper writes R as max over the subnormal step.
        """
        return self.max**2 / 2


def from_dtype(dtype, name: str) -> Format:
    """Reads a format's limits from `jnp.finfo`, assuming round to nearest even."""
    info = jnp.finfo(dtype)
    return Format(
        name=name,
        dtype=jnp.dtype(dtype),
        max=float(info.max),
        relative=2.0 ** -(info.nmant + 1),
        absolute=float(info.smallest_subnormal) / 2,
    )


E4M3 = from_dtype(jnp.float8_e4m3fn, "e4m3")
E5M2 = from_dtype(jnp.float8_e5m2, "e5m2")
FORMATS = {format.name: format for format in (E4M3, E5M2)}


def of_dtype(dtype) -> Format | None:
    """The format whose codes have `dtype`, or None if they are not 8-bit floats."""
    return next((f for f in FORMATS.values() if f.dtype == jnp.dtype(dtype)), None)


def cast(x: jax.Array, format: Format) -> jax.Array:
    """Rounds `x` to nearest even in `format`: the only cast to FP8 in the library.

    |x| above `format.max` becomes `format.max` with the sign of x (a bare `astype`
    gives NaN or Inf there, or saturates, depending on the compiler's choice of
    emitter). Inf becomes NaN on purpose, so that a diverged value stays visible; NaN
    stays NaN. The result is pinned by `optimization_barrier`: without it XLA:GPU
    treats FP8 -> wider casts as removable excess precision and keeps the wide value.

    Args:
      x: any shape and float dtype; read as float32.
      format: where to round to.

    Returns:
      Codes of x's shape, |codes - x| <= max(relative * |x|, absolute) for |x| <= max.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.3, 1e9, -1e9, jnp.inf])
      >>> [float(v) for v in cast(x, E4M3)]
      [0.3125, 448.0, -448.0, nan]
    """
    return lax.optimization_barrier(unpinned(x, format))


def unpinned(x: jax.Array, format: Format) -> jax.Array:
    """`cast` without the pin: for bodies of kernels, into which XLA does not see.

    Triton knows no barrier.
    """
    x = x.astype(jnp.float32)
    # 0 x is NaN for Inf and NaN. Selecting a constant NaN instead would give `lax.scan`
    # an array of them, of x's shape and in float32, to make before the loop and keep.
    clipped = jnp.clip(x, -format.max, format.max) + 0.0 * x
    return clipped.astype(format.dtype)


def within(x: jax.Array, format: Format) -> jax.Array:
    """`unpinned` of values that are NaN or at most half a step above `format.max`.

    That is below 464 for E4M3 and 61440 for E5M2. They round to the maximum by
    themselves, so that a kernel need not spend operations on clipping them.
    """
    return x.astype(jnp.float32).astype(format.dtype)


def saturated(x: jax.Array, format: Format) -> jax.Array:
    """`unpinned` of values among which Inf cannot be, or else NaN is beside it.

    Inf becomes `format.max`. Where a scale is NaN if one of its values is Inf, as in
    kernels, all of x is NaN then, and this saves operations of each element.
    """
    x = x.astype(jnp.float32)
    # Comparisons, since Triton's minimum and maximum, and so its clip, drop NaN.
    x = jnp.where(x > format.max, format.max, x)
    return jnp.where(x < -format.max, -format.max, x).astype(format.dtype)


def neighbours(x: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """The codes around x >= 0: largest below or at x, and the next one above it.

    The upper neighbour of `format.max` is itself, and larger values are clipped to it.
    NaN and Inf have NaN on both sides, as in `cast`.

    Example:
      >>> import jax.numpy as jnp
      >>> [float(v[0]) for v in neighbours(jnp.array([0.3]), E4M3)]
      [0.28125, 0.3125]
    """
    nearest = cast(x, format)
    # Codes of non-negative values are ordered as their bits, so +-1 is a neighbour.
    bits = lax.bitcast_convert_type(nearest, jnp.uint8)
    over = nearest.astype(jnp.float32) > x.astype(jnp.float32)
    below = jnp.where(over, bits - jnp.uint8(1), bits)
    top = np.asarray(format.max, format.dtype).view(np.uint8)
    above = jnp.where(below < top, below + jnp.uint8(1), below)
    as_code = lambda b: lax.bitcast_convert_type(b, format.dtype)
    return as_code(below), as_code(above)
