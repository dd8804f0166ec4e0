"""Rotary position embedding: pairs of a head's elements turn with the position."""

import jax
from jax import numpy as jnp

from coat_jax.typing import Array, Float, Int


def rope(
    x: Float[Array, "... T N D"],
    positions: Int[Array, "... T"] | None = None,
    *,
    base: float = 10_000.0,
) -> Float[Array, "... T N D"]:
    """Rotates the pair (x_i, x_{i + D/2}) of position t by the angle t base^(-2i/D).

    Angles and products are float32 whatever x is: at position 4000 a bfloat16 angle is
    wrong by several radians.

    Args:
      x: queries or keys, T positions, N heads of D elements; any float dtype.
      positions: of each row, (..., T); 0 .. T - 1 if None.
      base: of the frequencies.

    Returns:
      An array like x.

    Raises:
      ValueError: if D is odd.

    Source: Su et al. (arXiv 2104.09864), equation 34, in the half-split layout of the
    published Llama weights.

    Example:
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> [round(float(v), 4) for v in rope(x, base=10.0)[0, 1, 0]]
      [-0.3012, 1.3818]
    """
    T, D = x.shape[-3], x.shape[-1]
    if D % 2:
        raise ValueError(
            f"rope: heads must have an even size, to be turned in pairs, got {D} for x "
            f"of shape {x.shape}"
        )
    if positions is None:
        positions = jnp.arange(T, dtype=jnp.int32)
    frequency = base ** (-jnp.arange(0, D, 2, dtype=jnp.float32) / D)
    return _turn(x, positions, frequency)


def _turn(x, positions, frequency) -> jax.Array:
    """Each half of x's last axis, turned by position times frequency."""
    angle = positions.astype(jnp.float32)[..., :, None, None] * frequency.reshape(
        (1,) * (positions.ndim + 1) + frequency.shape
    )
    angle = angle.reshape((1,) * (x.ndim - angle.ndim) + angle.shape)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
