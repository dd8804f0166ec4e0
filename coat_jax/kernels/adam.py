"""One step of Adam in one pass over memory: moments decoded, used and encoded again.

Letters: S elements of a group, G groups of an array's last axis.

Against the definition (`expand`) in float32, with logarithms and exponentials right to
2^-22 at worst: from equal moments at most 1e-6 of the groups have another power (2e-6
in E5M2, whose powers are twice as large). Where the powers agree at most 1e-4 of the
codes differ, each by one step. From equal states the moments differ by a few 2^-22
before they are encoded, as XLA's do from exact ones. Where the two terms of a group's
smallest m cancel, that moves its power: in at most 5e-4 of m's groups and 2e-5 of v's,
whose codes then are those of another, equally good stretch; elsewhere an m that two
such terms leave may be a few steps off (three were seen).
"""

import functools
import inspect
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
import numpy as np

from coat_jax.kernels import dispatch, partition
from coat_jax.kernels.adam_tile import SEEDS, tile_step, unpacked
from coat_jax.kernels.adam_tile import How as How
from coat_jax.kernels.adam_tile import Scalars as Scalars
from coat_jax.kernels.adam_tile import packed as packed
from coat_jax.kernels.approximate import EXACT, mosaic_functions, triton_functions

NAME = "coat_adam"
_TILE = 512  # elements of a program of one warp, so 16 a thread


def refuses(
    shape,
    p_dtype,
    g_dtype,
    group: int,
    *,
    elements: int | None = None,
    backend: str | None = None,
) -> str | None:
    """Why a kernel does not take a parameter, or None.

    Args:
      shape: of the gradient.
      p_dtype: of the parameter.
      g_dtype: of the gradient.
      group: elements that share amax and power.
      elements: of the whole array, where the gradient is one layer's.
      backend: whose kernel; None: the one that is preferred.
    """
    for name, dtype in (("parameters", p_dtype), ("gradients", g_dtype)):
        if jnp.dtype(dtype).name not in ("float32", "bfloat16"):
            return f"{name} are neither float32 nor bfloat16 but {jnp.dtype(dtype)}"
    if not shape or not math.prod(shape):
        return f"there are no groups in the shape {tuple(shape)}"
    if group & (group - 1) or not 16 <= group <= 1024:
        return f"the group is no power of two from 16 to 1024 but {group}"
    if shape[-1] % group:
        return f"the last axis, {shape[-1]}, is no multiple of the group, {group}"
    elements = math.prod(shape) if elements is None else elements
    if 2**31 <= elements <= 2**32:  # of one byte: 32 bits with a sign are too few
        return f"Pallas cannot count {elements} elements, from 2^31 to 2^32; split them"
    if backend != "mosaic" and dispatch.has_triton():
        return None
    return _mosaic_refuses(math.prod(shape) // group, p_dtype, g_dtype, group)


# Triton ------------------------------------------------------------------------------


def triton(
    words,
    p,
    g,
    m,
    v,
    start,
    *,
    how: How,
    interpret: bool,
    tile: int | None = None,
    warps: int = 1,
    step=None,
    functions=None,
):
    """One program a tile of whole groups, which lie one after the other in memory.

    Args:
      words: what `packed` made.
      p: (..., N) parameters, or (L, ..., N) of which the step is that of one layer,
        in place. m and v are then likewise.
      g: (..., N) gradients.
      m: codes (..., N), amax and power (..., G) of the first moment.
      v: of the second.
      start: None, or the indices in the whole array at which rows (...) and columns
        of groups (G,) start, uint32.
      how: what is fixed.
      interpret: whether to run in Pallas's interpret mode.
      tile: groups of a program, a power of two; None: 512 elements.
      warps: of a program.
      step: what is done on a tile instead, as `tile_step` without its functions.
      functions: makes the special functions, as `triton_functions` does.

    Returns:
      New p, m and v, in the buffers of the old ones where these are donated.
    """
    from jax.experimental.pallas import triton as plt

    S, groups = how.group, p.shape[-1] // how.group
    arrays, tree = jax.tree.flatten((p, g, m, v))
    flat = [_as_groups(a, (p.shape, g.shape), S) for a in arrays]
    starts = [] if start is None else [start[0].reshape(-1), start[1]]
    count = flat[1].shape[0]
    tile = tile or max(1, _TILE // S)
    stacked = p.ndim > g.ndim
    if stacked:  # a tile beyond the last layer would be beyond the arrays
        tile = math.gcd(tile, count)
    step = step or functools.partial(
        tile_step, (functions or triton_functions)() if not interpret else EXACT
    )
    body = functools.partial(_triton_tile, how=how, tree=tree, step=step)
    spec = lambda a: pl.BlockSpec(
        (tile, S) if a.ndim == 2 else (tile,), lambda i: (i, 0)[: a.ndim]
    )
    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0,) * a.ndim)
    of_leaf = whole if stacked else spec
    outs = [flat[0], *flat[2:]]
    ins = [of_leaf(flat[0]), spec(flat[1]), *map(of_leaf, flat[2:])]
    made = pl.pallas_call(
        functools.partial(body, count=count, groups=groups),
        grid=(pl.cdiv(count, tile),),
        in_specs=[whole(words), *map(whole, starts), *ins],
        out_specs=list(map(of_leaf, outs)),
        out_shape=[partition.out_struct(a.shape, a.dtype, *flat) for a in outs],
        input_output_aliases=_in_place(1 + len(starts)),
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=NAME,
    )(words, *starts, *flat)
    old = (p, *jax.tree.leaves((m, v)))
    new = [a.reshape(b.shape) for a, b in zip(made, old, strict=True)]
    return new[0], tuple(new[1:4]), tuple(new[4:7])


def _as_groups(a, shapes, S: int):
    """An array of elements as (groups, S), one of statistics as (groups,)."""
    return a.reshape(-1, S) if a.shape in shapes else a.reshape(-1)


def _in_place(before: int) -> dict[int, int]:
    """Which operand's buffer each result takes: all of p, m and v, and none of g."""
    return {before: 0} | {before + 2 + i: 1 + i for i in range(6)}


def _triton_tile(words_ref, *refs, how: How, tree, step, count: int, groups: int):
    from jax.experimental.pallas import triton as plt

    *starts, outs = refs[: -8 - 7], refs[-7:]
    ins = refs[-8 - 7 : -7]
    T = ins[1].shape[0]  # of the gradients
    group = pl.program_id(0) * T + jnp.arange(T, dtype=jnp.int32)
    first = words_ref[len(Scalars._fields)].astype(jnp.int32) * count
    mine = pl.ds(first + pl.program_id(0) * T, T)
    of_tile = lambda ref: ref.at[...] if ref.shape[0] == T else ref.at[mine]
    inside = group < count if count % T else None
    wide = None if inside is None else inside[:, None]
    mask = lambda ref: wide if len(ref.shape) == 2 else inside
    p, g, m, v = jax.tree.unflatten(
        tree, [plt.load(of_tile(r), mask=mask(r)) for r in ins]
    )
    scalars = unpacked(lambda i: words_ref[i])
    start = _starts(group, inside, starts[0], groups, how.group)
    made = jax.tree.leaves(step(how, scalars, p, g, m, v, start))
    for ref, x in zip(outs, made, strict=True):
        plt.store(of_tile(ref), x, mask=mask(ref))


def _starts(group, inside, starts, groups: int, S: int):
    """The index in the whole array of each group's first element."""
    from jax.experimental.pallas import triton as plt

    if not starts:
        return group.astype(jnp.uint32) * np.uint32(S)
    rows_ref, columns_ref = starts
    row = lax.div(group, np.int32(groups))
    column = group - row * np.int32(groups)
    return plt.load(rows_ref.at[row], mask=inside) + plt.load(
        columns_ref.at[column], mask=inside
    )


# Mosaic GPU --------------------------------------------------------------------------


def _mosaic_gpu() -> Any:
    """Pallas's module, untyped: its functions are others in each version of JAX."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def mosaic(words, p, g, m, v, start, *, how: How, interpret: bool, tile: int = 16):
    """One warpgroup a tile of whole groups; arguments as `triton` has them.

    Raises:
      NotImplementedError: if a thread's loads of 16 bytes do not divide the groups
        among a warp, or the groups of a step are too few to fill a warpgroup.
    """
    plgpu = _mosaic_gpu()
    S = how.group
    flat = [_as_groups(a, (p.shape, g.shape), S) for a in jax.tree.leaves((p, g, m, v))]
    count = flat[1].shape[0]
    if refusal := _mosaic_refuses(count, p.dtype, g.dtype, S):
        raise NotImplementedError(f"adam.mosaic: {refusal}; give 'triton' or 'xla'")
    layout = _layout(S, _vector(p.dtype, g.dtype))
    tile = math.gcd(tile, count)
    index = _first_indices(start, count, S)
    refs = [jax.new_ref(a) for a in (flat[0], *flat[2:])]
    body = functools.partial(
        _mosaic_tile, how=how, tile=tile, layout=layout, interpret=interpret
    )
    plgpu.kernel(
        functools.partial(body, count=count),
        out_type=(),
        grid=(count // tile,),
        grid_names=("tile",),
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(words, lax.bitcast_convert_type(words, jnp.float32), index, flat[1], *refs)
    old = (p, *jax.tree.leaves((m, v)))
    new = [r[...].reshape(a.shape) for r, a in zip(refs, old, strict=True)]
    return new[0], tuple(new[1:4]), tuple(new[4:7])


def _vector(*dtypes) -> int:
    """Elements that a thread loads at once: 16 bytes of the widest."""
    return 16 // max(jnp.dtype(dtype).itemsize for dtype in dtypes)


def _mosaic_refuses(count: int, p_dtype, g_dtype, S: int) -> str | None:
    """Why Mosaic's kernel does not take `count` groups of S, or None."""
    vector = _vector(p_dtype, g_dtype)
    if not 2 * vector <= S <= 32 * vector:
        return f"Mosaic's kernel takes groups of {2 * vector} to {32 * vector}, not {S}"
    rows = 4 * (32 * vector // S)
    if math.gcd(16, count) % rows:
        return f"Mosaic's kernel takes a multiple of {rows} groups, not {count}"
    return None


def _layout(S: int, vector: int):
    """How a warpgroup holds rows of S elements, each row in one warp."""
    plgpu = _mosaic_gpu()
    rows = 32 * vector // S
    if rows == 1:  # layouts may not have axes of size 1
        tiling, axes = ((4, S), (vector,)), {"warp_dims": (-3,), "lane_dims": (-2,)}
    else:
        tiling = ((4 * rows, S), (rows, S), (vector,))
        axes = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
    return plgpu.Layout.TILED(plgpu.Tiling(tiling), **axes, vector_dim=-1)


def _first_indices(start, count: int, S: int):
    """The index in the whole array of each group's first element, (groups,)."""
    if start is None:
        return lax.iota(jnp.uint32, count) * np.uint32(S)
    rows, columns = start
    return (rows.reshape(-1, 1) + columns.reshape(1, -1)).reshape(-1)


def _mosaic_tile(
    words_ref, floats_ref, *refs, how: How, tile: int, layout, interpret, count: int
):
    plgpu = _mosaic_gpu()
    index_ref, g_ref, *held = refs
    first = lax.axis_index("tile") * tile
    layer = words_ref[len(Scalars._fields)].astype(jnp.int32)
    of_leaf, of_step = pl.ds(layer * count + first, tile), pl.ds(first, tile)

    def load(ref, rows):
        own = layout if len(ref.shape) == 2 else layout.reduce(1)
        if "idx" in inspect.signature(plgpu.load).parameters:  # jax 0.10 and 0.11
            return plgpu.load(ref, (rows,), layout=own, optimized=False)
        return plgpu.load(ref.at[rows], layout=own, optimized=False)

    def store(ref, x):
        if hasattr(plgpu, "store"):  # since 0.12, whose other stores fill sectors
            plgpu.store(ref.at[of_leaf], x, optimized=False)
        else:
            ref[of_leaf] = x

    wide = lambda stat, shape: plgpu.layout_cast(
        lax.broadcast_in_dim(stat, shape, (0,)), layout
    )
    scalars = Scalars(
        *(
            (words_ref if name in SEEDS else floats_ref)[i]
            for i, name in enumerate(Scalars._fields)
        )
    )
    p, *moments = (load(ref, of_leaf) for ref in held)
    g, index = load(g_ref, of_step), load(index_ref, of_step)
    m, v = tuple(moments[:3]), tuple(moments[3:])
    # A CPU flushes the subnormal numbers that the fast functions use.
    functions = EXACT._replace(wide=wide) if interpret else mosaic_functions(wide)
    made = tile_step(functions, how, scalars, p, g, m, v, index)
    for ref, x in zip(held, jax.tree.leaves(made), strict=True):
        store(ref, x)


# With jax 0.10, references that a kernel changes do not pass `custom_partitioning`.
_OF_MOSAIC = {"mosaic": mosaic} if jax.__version_info__ >= (0, 11) else {}
KERNELS = {"triton": triton, **_OF_MOSAIC}
