"""Random bits that are a function of seed and global index; stochastic rounding."""

import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32: each input bit flips every output bit half the time.

    Two multiply-xorshift rounds with the constants of Wellons' search for low bias.
    About 8 integer operations: `jax.random.bits` (threefry) costs some 100 an element,
    which would make an optimizer step on a GPU bound by integer arithmetic.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def fold(*words) -> jax.Array:
    """One uint32 seed from integers, in order, modulo 2^32; scalars, traced or not."""
    seed = jnp.uint32(0x9E3779B9)
    for word in words:
        if isinstance(word, int):  # jnp.asarray refuses those of 2^31 and above
            word = np.uint32(word & 0xFFFFFFFF)
        seed = mix(seed ^ jnp.asarray(word).astype(jnp.uint32)) + jnp.uint32(0x85EBCA6B)
    return seed


def random_bits(seed: jax.Array, shape: tuple[int, ...], start: Any = 0) -> jax.Array:
    """Random uint32 of `shape`; element i depends on `seed` and on start + i alone.

    i is the row-major index in the global shape (modulo 2^32), so the bits do not
    depend on how an array is sharded, and no generator state is kept. `start`, an
    integer or a uint32, is the index of the first element, as of a part of an array.
    """
    index = jnp.broadcast_to(jnp.asarray(start, jnp.uint32), shape)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) & 0xFFFFFFFF)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return hashed(index, seed)


def hashed(index: jax.Array, seed: jax.Array) -> jax.Array:
    """The random bits at `index`, a function of the seed and of it; both uint32.

    One multiplication by a number of the seed's keeps two seeds from giving the same
    words in another order, as index + seed would; 9 integer operations in all.
    """
    odd = (seed * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    return mix(index * odd + seed)


def uniform(seed: jax.Array, shape: tuple[int, ...], start: Any = 0) -> jax.Array:
    """Float32 in [0, 1) of `shape`, multiples of 2^-24, from `random_bits`."""
    bits = random_bits(seed, shape, start) >> 8
    return bits.astype(jnp.float32) * jnp.float32(2.0**-24)


def stochastic_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds float32 to one of its two bfloat16 neighbours, on average to x itself.

    P(up) = (x - below) / (above - below), exactly; NaN and Inf stay what they are. The
    neighbour above the largest bfloat16 is Inf, as it is when rounding to nearest.

    Args:
      x: float32, any shape.
      bits: uint32 of x's shape; the low 16 bits are used.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.full(4096, 1 + 2**-9)
      >>> r = stochastic_bfloat16(x, random_bits(fold(0), x.shape))
      >>> bool(abs(r.astype(jnp.float32).mean() - x[0]) < 2e-4)
      True
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # Adding 0..2^16-1 carries into the kept half with the wanted probability.
    raw = (raw + (bits & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(raw, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
