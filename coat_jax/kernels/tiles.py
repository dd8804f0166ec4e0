"""What the kernels' tiles have in common: dtypes, sizes, and layouts in registers."""

import importlib
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

FLOATS = ("float32", "bfloat16", "float16")
# Pallas counts offsets into arrays of up to 2^32 bytes in 32 bits, with a sign.
MOST = 2**31 - 1
# Pallas's Mosaic GPU has an interpret mode since then.
HAS_MOSAIC = jax.__version_info__ >= (0, 11)


def refuses(shape, dtype) -> str | None:
    """Why no kernel reads an array of `shape` and `dtype`, or None."""
    size = 1
    for length in shape:
        size *= length
    if jnp.dtype(dtype).name not in FLOATS:
        return f"x is none of {', '.join(FLOATS)} but {jnp.dtype(dtype).name}"
    if not size:
        return f"x has no element, its shape being {tuple(shape)}"
    if size > MOST:
        return f"x has {size} elements, more than 32 bits can count"
    return None


def power_of_two(size: int, limit: int) -> int:
    """The least power of two that is `size` or more, but `limit` at most."""
    return min(limit, 1 << (size - 1).bit_length())


def inside(axis: int, size: int, limit: int) -> jax.Array:
    """Which of a tile's `size` rows the array of `limit` has, along a grid's axis."""
    return pl.program_id(axis) * size + jnp.arange(size, dtype=jnp.int32) < limit


def begin(name: str, size: int, limit: int) -> jax.Array:
    """Where a tile of `size` rows begins in Mosaic's kernels, `limit` >= `size`.

    Mosaic has no masks. Where tiles don't divide the array the last one reaches back:
    it makes again what the one before made, and writes the same.
    """
    return jnp.minimum(lax.axis_index(name) * size, limit - size)


def mosaic_gpu() -> Any:
    """Pallas's Mosaic GPU: imported where it is used, and not alike in all of JAX."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def rows_layout(width: int):
    """Rows of 16 to 256: a warp holds 256 elements at a time, a lane 8 neighbours.

    The lanes that share a row are of one warp, so that its maximum stays there.
    """
    plgpu = mosaic_gpu()

    if width == 256:  # a row is a warp's own; layouts may not have axes of size 1
        tiling, axes = ((4, 256), (8,)), {"warp_dims": (-3,), "lane_dims": (-2,)}
    else:
        rows = 256 // width
        tiling = ((4 * rows, width), (rows, width), (8,))
        axes = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
    return plgpu.Layout.TILED(plgpu.Tiling(tiling), **axes, vector_dim=-1)


def store(ref, value) -> None:
    """Writes `value`, even where it fills no whole sectors of memory."""
    plgpu = mosaic_gpu()

    if hasattr(plgpu, "store"):  # since 0.12, whose plain stores refuse that
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
