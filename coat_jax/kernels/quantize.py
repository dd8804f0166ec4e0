"""Group quantisation along the last axis: codes, and one float32 scale a group.

Letters: N columns of x, G groups of S in a row of it; R groups in all, r in a tile.

XLA reads x twice, once for the maxima and once for the codes. A kernel holds whole
groups, so that x is read once. As they lie in memory one after the other whatever x's
shape, a kernel sees R rows of S.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
import numpy as np

from coat_jax import formats, groups
from coat_jax.formats import Format
from coat_jax.kernels import dispatch, partition, tiles
from coat_jax.kernels.dispatch import Implementation

NAME = "coat_quantize"
TINY = float(jnp.finfo(jnp.float32).tiny)  # below it XLA may flush to zero
_GROUPS = (16, 32, 64, 128, 256)


def quantize(
    x: jax.Array,
    *,
    format: Format,
    group: int,
    implementation: Implementation = None,
    refusal: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Codes of `x` and the scale of each group along its last axis.

        scale_g = max|x_g| / format.max, but 2^-126 at least
        codes_g = cast(x_g (1 / scale_g))

    NaN or Inf in a group makes its scale and codes NaN.

    Args:
      x: (..., N), N > 0, float32, bfloat16 or float16; read as float32.
      format: of the codes.
      group: elements per scale; the last group of a row may be short.
      implementation: as `dispatch.run` takes it.
      refusal: why the caller wants no kernel, in words.

    Returns:
      (codes, scale): (..., N) and (..., ceil(N / group)) in float32. All
      implementations give the same bits on one device: they divide and round alike, and
      a maximum does not depend on order.

    Raises:
      ValueError: if the kernel that was named cannot take these.
      NotImplementedError: if this JAX lacks the backend that was named.

    Example:
      >>> codes, scale = quantize(jnp.ones((2, 32)), format=formats.E4M3, group=16)
      >>> codes.astype(jnp.float32).max().item(), scale.shape
      (448.0, (2, 2))
    """
    how = {"format": format, "group": group}
    kernels = {"triton": triton} | ({"mosaic": mosaic} if tiles.HAS_MOSAIC else {})
    return dispatch.run(
        "quantize",
        implementation,
        refusal or refuses(x, group),
        {name: functools.partial(_sharded, k, **how) for name, k in kernels.items()},
        functools.partial(reference, **how),
        x,
    )


def refuses(x, group: int) -> str | None:
    """Why no kernel takes groups of `group` along the last axis of `x`, or None."""
    if reason := tiles.refuses(x.shape, x.dtype):
        return reason
    if group not in _GROUPS:
        return f"the group is none of {', '.join(map(str, _GROUPS))} but {group}"
    if not x.ndim or x.shape[-1] % group:
        return f"x's shape {tuple(x.shape)} has no whole groups of {group} in a row"
    if partition.row_length(x) % group:
        return f"x's sharding {jax.typeof(x).sharding.spec} cuts groups of {group}"
    return None


def reference(x, *, format: Format, group: int):
    """The definition, for XLA."""
    x = x.astype(jnp.float32)
    blocks = groups.blocks_of(x.shape[-1], group)
    x_BC = groups.split(x, blocks)
    amax_G = groups.reduce(jnp.abs(x_BC), blocks, op=jnp.max, neutral=0.0)
    scale_G = scale_of(amax_G, format)
    codes = formats.cast(x_BC * groups.spread(1.0 / scale_G, blocks), format)
    return groups.merge(codes), scale_G


def scale_of(amax: jax.Array, format: Format) -> jax.Array:
    """amax / format.max, but 2^-126 at least; NaN where amax is Inf or NaN.

    The quotient is a product with the rounded reciprocal, as XLA makes of a division by
    a constant: so eager calls and kernels have the same bits.
    """
    # Inf would give scale Inf and codes 0: a finite wrong value. NaN is visible.
    scale = jnp.maximum(amax * np.float32(1 / format.max), TINY)
    return jnp.where(amax < jnp.inf, scale, jnp.nan)


def quantized(x_rS: jax.Array, format: Format, *, wide) -> tuple[jax.Array, jax.Array]:
    """Codes (r, S) and scales (r,) of a tile's groups, in every kernel.

    Args:
      x_rS: the groups.
      format: of the codes.
      wide: what makes (r, S) of (r,).
    """
    x_rS = x_rS.astype(jnp.float32)
    # Magnitudes are ordered as their bits, NaN above all; float maxima may drop it.
    bits = lax.bitcast_convert_type(x_rS, jnp.int32) & jnp.int32(0x7FFFFFFF)
    amax_r = lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)
    scale_r = scale_of(amax_r, format)
    # One division a group: an element each makes a kernel slower than memory.
    return formats.within(x_rS * wide(1.0 / scale_r), format), scale_r


def _sharded(kernel, x, *, format: Format, group: int, interpret: bool):
    """`kernel`, run on each device's shard of x, which holds whole groups."""

    def local(x):
        x_RS = x.reshape(x.size // group, group)
        codes, scale = kernel(x_RS, format=format, interpret=interpret)
        *lead, N = x.shape
        return codes.reshape(x.shape), scale.reshape(*lead, N // group)

    if interpret and kernel is mosaic:
        return local(x)  # it calls back to Python, which a partitioned op may not
    rule = "... (g s) -> ... (g s), ... g"
    return partition.shard_local(local, rule, sizes={"s": group})(x)


def _outputs(x_RS, format: Format):
    codes = partition.out_struct(x_RS.shape, format.dtype, x_RS)
    return codes, partition.out_struct(x_RS.shape[:1], jnp.float32, x_RS)


# Triton ------------------------------------------------------------------------------


def triton(x_RS, *, format, interpret, tile=4096, warps=8):
    """One program for `tile` elements, a power of two, of whole groups."""
    from jax.experimental.pallas import triton as plt

    R, S = x_RS.shape
    r = tile // S
    groups_rS = pl.BlockSpec((r, S), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(_triton_tile, format=format, R=R),
        grid=(pl.cdiv(R, r),),
        in_specs=[groups_rS],
        out_specs=(groups_rS, pl.BlockSpec((r,), lambda i: (i,))),
        out_shape=_outputs(x_RS, format),
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=NAME,
    )(x_RS)


def _triton_tile(x_ref, codes_ref, scale_ref, *, format, R):
    from jax.experimental.pallas import triton as plt

    (r,) = scale_ref.shape
    inside = tiles.inside(0, r, R)
    mask = jnp.broadcast_to(inside[:, None], x_ref.shape)
    x = plt.load(x_ref.at[...], mask=mask, other=0)
    codes, scale = quantized(x, format, wide=lambda s: s[:, None])
    plt.store(codes_ref.at[...], codes, mask=mask)
    plt.store(scale_ref.at[...], scale, mask=inside)


# Mosaic GPU --------------------------------------------------------------------------


def mosaic(x_RS, *, format, interpret, tile=2048):
    """One warpgroup for `tile` elements of whole groups, from registers to memory."""
    plgpu = tiles.mosaic_gpu()

    given, S = x_RS.shape
    r = tile // S
    R = max(given, r)
    x_RS = jnp.pad(x_RS, [(0, R - given), (0, 0)])
    layout = tiles.rows_layout(S)

    def body(x_ref, codes_ref, scale_ref):
        rows = pl.ds(tiles.begin("tile", r, R), r)
        if interpret:
            x, wide = x_ref[rows], lambda s: jnp.broadcast_to(s[:, None], (r, S))
        else:
            x = plgpu.load(x_ref.at[rows], layout=layout, optimized=False)
            wide = lambda s: plgpu.layout_cast(
                lax.broadcast_in_dim(s, (r, S), (0,)), layout
            )
        codes, scale = quantized(x, format, wide=wide)
        codes_ref[rows] = codes
        tiles.store(scale_ref.at[rows], scale)

    codes, scale = plgpu.kernel(
        body,
        out_type=_outputs(x_RS, format),
        grid=(pl.cdiv(R, r),),
        grid_names=("tile",),
        kernel_name=NAME,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x_RS)
    return codes[:given], scale[:given]
