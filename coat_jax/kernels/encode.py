"""Codes of an array under scales that are known: as it lies, transposed, or both.

Letters: x as a matrix has M rows and N columns, a tile of it m and n; B matrices under
`jax.vmap`.

A product of FP8 operands wants the axes that it sums over innermost, and x is summed
over some of its axes in the forward and over the others in the backward. Here one
reading of x gives the codes for both.
"""

import functools
import math
import string
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from coat_jax import formats
from coat_jax.formats import Format
from coat_jax.kernels import dispatch, partition, tiles
from coat_jax.kernels.dispatch import Implementation

NAME = "coat_encode"


def encode(
    x: jax.Array,
    scale: jax.Array,
    *,
    format: Format,
    rows: int | None = None,
    codes: bool = True,
    transposed: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Codes of `x` under `scale`, and the same with its first axes behind the others.

        codes = cast(x / scale),   codes_T[*c, *r] = codes[*r, *c]

    Where a scale is NaN, all codes under it are.

    Args:
      x: (*R, *C), float32, bfloat16 or float16; read as float32.
      scale: float32, of one element, or of x's rank and 1 or x's size along each axis.
      format: of the codes.
      rows: how many axes are R; all but the last if None.
      codes: whether to make the codes as x lies.
      transposed: whether to make the transposed ones.
      implementation: as `dispatch.run` takes it.

    Returns:
      (codes or None, codes_T or None), of shapes (*R, *C) and (*C, *R). All
      implementations give the same bits on one device, as they divide, clip and round
      alike.

    Raises:
      ValueError: if neither is asked for, if x, scale and rows don't fit, or if the
        kernel that was named cannot take them.
      NotImplementedError: if this JAX lacks the backend that was named.

    Example:
      >>> x, scale = jnp.array([[1.0, 2.0]]), jnp.array([[0.5]])
      >>> codes, codes_T = encode(x, scale, format=formats.E4M3, transposed=True)
      >>> codes.astype(jnp.float32).tolist(), codes_T.shape
      ([[2.0, 4.0]], (2, 1))
    """
    rows = max(x.ndim - 1, 0) if rows is None else rows
    _check(x, scale, rows, codes, transposed)
    scale = scale.reshape((1,) * x.ndim) if scale.size == 1 else scale
    outputs = (codes, transposed)
    how = {"format": format, "rows": rows, "outputs": outputs}
    kernels = {"triton": triton} | ({"mosaic": mosaic} if tiles.HAS_MOSAIC else {})
    made = dispatch.run(
        "encode",
        implementation,
        refuses(x.shape, x.dtype, scale.shape, rows),
        {name: functools.partial(_sharded, k, **how) for name, k in kernels.items()},
        functools.partial(reference, **how),
        x,
        scale,
    )
    each: Any = iter(made if all(outputs) else (made,))
    return (next(each) if codes else None), (next(each) if transposed else None)


def _check(x, scale, rows: int, codes: bool, transposed: bool) -> None:
    """Raises unless there is something to make, of a scale and rows that fit."""
    if not (codes or transposed):
        raise ValueError(
            "encode: codes or transposed must be true, got neither; leave the call out"
        )
    if not 0 <= rows <= x.ndim:
        raise ValueError(
            f"encode: rows must be a number of x's {x.ndim} axes, got {rows} for shape "
            f"{x.shape}"
        )
    fits = scale.ndim == x.ndim and all(
        s in (1, n) for s, n in zip(scale.shape, x.shape, strict=True)
    )
    if not fits and scale.size != 1:
        raise ValueError(
            "encode: scale must have one element, or x's rank and 1 or x's size along "
            f"each axis, got shape {scale.shape} for x of shape {x.shape}; keep the "
            "axes that were reduced"
        )


def refuses(shape, dtype, scale_shape, rows: int) -> str | None:
    """Why no kernel takes an x of `shape` and `dtype` under scales of `scale_shape`."""
    if reason := tiles.refuses(shape, dtype):
        return reason
    if math.prod(scale_shape[:rows]) > 1 and math.prod(scale_shape[rows:]) > 1:
        return (
            f"the scale, of shape {tuple(scale_shape)}, varies along x's first {rows} "
            "axes and along its others"
        )
    return None


def reference(x, scale, *, format: Format, rows: int, outputs):
    """The definition, for XLA."""
    codes = formats.cast(x.astype(jnp.float32) / scale, format)
    return _chosen((codes, codes.transpose(_exchanged(range(x.ndim), rows))), outputs)


def codes_of(x: jax.Array, scale: jax.Array, format: Format) -> jax.Array:
    """The codes of a tile, in every kernel."""
    return formats.unpinned(x.astype(jnp.float32) / scale, format)


def _exchanged(axes, rows: int) -> tuple:
    """The axes (*R, *C) as (*C, *R)."""
    return (*axes[rows:], *axes[:rows])


def _chosen(pair, outputs):
    """Those of a pair that are wanted; one alone is in no tuple."""
    chosen = [each for each, wanted in zip(pair, outputs, strict=True) if wanted]
    return tuple(chosen) if len(chosen) > 1 else chosen[0]


def _sharded(kernel, x, scale, *, format: Format, rows: int, outputs, interpret: bool):
    """`kernel`, run on each device's shard of x: it needs nothing of the others."""
    ndim = x.ndim
    names = string.ascii_lowercase[:ndim]
    own = [
        name if s > 1 else f"{name}1"
        for name, s in zip(names, scale.shape, strict=True)
    ]
    results = [" ".join(("...", *axes)) for axes in (names, _exchanged(names, rows))]
    chosen = [axes for axes, wanted in zip(results, outputs, strict=True) if wanted]
    rule = f"... {' '.join(names)}, ... {' '.join(own)} -> {', '.join(chosen)}"

    def local(x, scale):
        lead = x.shape[: x.ndim - ndim]
        made = kernel(
            *_as_matrices(x, scale, x.ndim - ndim, rows, outputs),
            format=format,
            outputs=outputs,
            interpret=interpret,
        )
        own = x.shape[x.ndim - ndim :]
        shapes = _chosen(((*lead, *own), (*lead, *_exchanged(own, rows))), outputs)
        if not all(outputs):
            return made.reshape(shapes)
        return tuple(c.reshape(s) for c, s in zip(made, shapes, strict=True))

    if interpret and kernel is mosaic:
        return local(x, scale)  # it calls back to Python, which no partitioned op may
    whole = tuple(name for name in own if len(name) > 1)
    return partition.shard_local(local, rule, whole=whole)(x, scale)


def _as_matrices(x, scale, lead: int, rows: int, outputs):
    """x as (B, M, N), and scale as (B, M or 1, N or 1) in the cheapest such view."""
    B = math.prod(x.shape[:lead])
    R, C = x.shape[lead : lead + rows], x.shape[lead + rows :]
    own_R, own_C = scale.shape[lead : lead + rows], scale.shape[lead + rows :]
    whole_R = R if math.prod(own_R) > 1 else own_R
    whole_C = C if math.prod(own_C) > 1 else own_C
    scale = jnp.broadcast_to(scale, (*x.shape[:lead], *whole_R, *whole_C))
    M, N, m, n = map(math.prod, (R, C, whole_R, whole_C))
    if not outputs[1] and m == n == 1:  # as it lies, whatever its shape
        M, N = 1, M * N
    return x.reshape(B, M, N), scale.reshape(B, m, n)


# Triton ------------------------------------------------------------------------------


def triton(x, scale, *, format, outputs, interpret, tile=None, warps=8, down=False):
    """One program a tile. The transposed codes go through shared memory.

    Args:
      x: (B, M, N).
      scale: (B, M or 1, N or 1).
      format: of the codes.
      outputs: which of codes and transposed codes are wanted.
      interpret: whether to run in Pallas's interpret mode.
      tile: (m, n), powers of two.
      warps: of a program.
      down: whether the programs that run together are tiles of one column.
    """
    from jax.experimental.pallas import triton as plt

    B, M, N = x.shape
    m, n = tile or _tile(M, N, outputs, x.dtype.itemsize)
    grid, turned = (pl.cdiv(N, n), pl.cdiv(M, m)), lambda j, i: (i, j)
    if down:
        grid, turned = grid[::-1], lambda i, j: (i, j)
    place = lambda block, at: pl.BlockSpec(
        (None, *block), lambda k, l, b: (b, *at(k, l))
    )
    as_it_lies = place((m, n), turned)
    exchanged = place((n, m), lambda k, l: turned(k, l)[::-1])
    shapes = [
        partition.out_struct(s, format.dtype, x, scale) for s in ((B, M, N), (B, N, M))
    ]
    body = functools.partial(
        _triton_tile, format=format, outputs=outputs, shape=(M, N), axes=turned(0, 1)
    )
    return pl.pallas_call(
        body,
        grid=(*grid, B),
        in_specs=[as_it_lies, _scale_spec(scale.shape, m, n, place, turned)],
        out_specs=_chosen((as_it_lies, exchanged), outputs),
        out_shape=_chosen(shapes, outputs),
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=NAME,
    )(x, scale)


def _tile(M: int, N: int, outputs, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: as measured fastest on an H200 (16384 x 11008)."""
    if outputs[1]:
        # What jax 0.10 makes of 128 rows and both outputs, ptxas 12.9 dies of.
        tall = outputs[0] and jax.__version_info__ >= (0, 11)
        m, n = (32, 256) if itemsize == 4 else (128 if tall else 64, 128)
        return tiles.power_of_two(M, m), tiles.power_of_two(N, n)
    n = tiles.power_of_two(N, 4096 if M == 1 else 512)
    return tiles.power_of_two(M, 4096 // n), n


def _scale_spec(shape, m: int, n: int, place, turned):
    """The scales of a tile: (m or 1, n or 1)."""
    _, rows, columns = shape
    block = m if rows > 1 else 1, n if columns > 1 else 1

    def at(k, l):
        i, j = turned(k, l)
        return i if rows > 1 else 0, j if columns > 1 else 0

    return place(block, at)


def _triton_tile(x_ref, scale_ref, *out_refs, format, outputs, shape, axes):
    """A tile; `axes` are those of the grid that go with x's rows and columns."""
    from jax.experimental.pallas import triton as plt

    m, n = x_ref.shape
    rows = tiles.inside(axes[0], m, shape[0])[:, None]
    columns = tiles.inside(axes[1], n, shape[1])[None, :]
    x = plt.load(x_ref.at[...], mask=rows & columns, other=0)
    masks = {(m, 1): rows, (1, n): columns, (1, 1): None}
    scale = plt.load(scale_ref.at[...], mask=masks[scale_ref.shape])
    codes = codes_of(x, scale, format)
    refs = iter(out_refs)
    if outputs[0]:
        plt.store(next(refs).at[...], codes, mask=rows & columns)
    if outputs[1]:
        plt.store(next(refs).at[...], codes.T, mask=rows.T & columns.T)


# Mosaic GPU --------------------------------------------------------------------------


def mosaic(x, scale, *, format, outputs, interpret, tile=None):
    """One warpgroup a tile of 128 columns; arguments are those of `triton`.

    As it lies a tile goes from registers to memory, transposed through shared memory.
    """
    given, flat = x.shape, x.shape[1] == 1 and not outputs[1]
    if flat:  # the scale is one, so the elements may be in rows of 128
        x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 128)])
        x = x.reshape(x.shape[0], -1, 128)
    m, n = tile or (64 if outputs[1] else 32, 128)
    _, M, N = x.shape
    # A transposed tile begins at a multiple of (8, 64), in which its memory is tiled;
    # codes as they lie are written eight by eight.
    M, N = max(M + (-M % 64 if outputs[1] else 0), m), max(N + -N % 8, n)
    how = {"format": format, "outputs": outputs, "interpret": interpret}
    made = _mosaic_call(*_padded(x, scale, M, N), tile=(m, n), **how)
    if flat:
        return made.reshape(made.shape[0], 1, -1)[:, :, : given[2]]
    cut = lambda codes, shape: codes[:, : shape[0], : shape[1]]
    if not all(outputs):
        return cut(made, _chosen((given[1:], given[:0:-1]), outputs))
    return cut(made[0], given[1:]), cut(made[1], given[:0:-1])


def _padded(x, scale, M: int, N: int):
    """x as (B, M, N), and its scales, which are 1 for what is added."""
    _, m, n = scale.shape
    M_scale, N_scale = M if m > 1 else 1, N if n > 1 else 1
    widths = [(0, 0), (0, M_scale - m), (0, N_scale - n)]
    scale = jnp.pad(scale, widths, constant_values=1)
    return jnp.pad(x, [(0, 0), (0, M - x.shape[1]), (0, N - x.shape[2])]), scale


def _mosaic_call(x, scale, *, format, outputs, interpret, tile):
    plgpu = tiles.mosaic_gpu()

    (B, M, N), (m, n) = x.shape, tile
    shapes = [
        partition.out_struct(s, format.dtype, x, scale) for s in ((B, M, N), (B, N, M))
    ]
    # Swizzled, so that the bytes of a column do not all meet one bank.
    swizzle = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64)
    scratch = plgpu.SMEM((n, m), shapes[1].dtype, transforms=swizzle)
    read = functools.partial(_read, interpret=interpret, layout=_layout(outputs))

    def body(x_ref, scale_ref, *refs):
        b = lax.axis_index("matrix")
        rows = pl.ds(tiles.begin("row", m, M), m)
        columns = pl.ds(tiles.begin("column", n, N), n)
        x = read(x_ref.at[b, rows, columns])
        codes = codes_of(x, _scale_of(scale_ref.at[b], rows, columns, read), format)
        refs = iter(refs)
        if outputs[0]:
            tiles.store(next(refs).at[b, rows, columns], codes)
        if outputs[1]:
            codes_T_ref, shared = refs
            tiles.store(shared.transpose((1, 0)), codes)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared, codes_T_ref.at[b, columns, rows])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=_chosen(shapes, outputs),
        scratch_types=[scratch] if outputs[1] else [],
        grid=(pl.cdiv(N, n), pl.cdiv(M, m), B),
        grid_names=("column", "row", "matrix"),
        kernel_name=NAME,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, scale)


def _layout(outputs):
    """Rows of 128, or for transposing lanes of single elements, 2 rows of 16."""
    plgpu = tiles.mosaic_gpu()

    if not outputs[1]:
        return tiles.rows_layout(128)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 16), (2, 16), (1,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _read(ref, *, layout, interpret, shape=None, reduced: int = 0):
    """An array in registers; with `shape`, one that lacks the axis `reduced` of it."""
    plgpu = tiles.mosaic_gpu()

    if shape is None:
        return (
            ref[...] if interpret else plgpu.load(ref, layout=layout, optimized=False)
        )
    if interpret:
        return jnp.broadcast_to(jnp.expand_dims(ref[...], reduced), shape)
    part = plgpu.load(ref, layout=layout.reduce(reduced), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(part, shape, (1 - reduced,)), layout)


def _scale_of(scale_ref, rows, columns, read):
    """The scales of a tile: one, or as many as it has elements."""
    M, N = scale_ref.shape
    shape = rows.size, columns.size
    if M > 1:
        return read(scale_ref.at[rows, 0], shape=shape, reduced=1)
    if N > 1:
        return read(scale_ref.at[0, columns], shape=shape, reduced=0)
    return scale_ref[0, 0]
