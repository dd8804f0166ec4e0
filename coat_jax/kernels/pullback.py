"""What an activation's backward makes, in one pass: codes of h and of each gradient.

    x  = codes * scale              what was kept of gate and up, or of one input
    h  = f(*xs)                     the product that followed wants it: dw = h^T g
    dx = df/dx (*xs) * dh           the products before want it: dx w^T, and x^T dx

Letters: T rows and N columns, t and n of a tile, S columns that share a kept scale.

XLA writes each gradient to memory in two bytes, reads it for its maximum, again for its
codes, and transposes those. Here it is never there but as codes. The one scale of each
gradient takes a pass of its own, `largest`.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from coat_jax import groups
from coat_jax.formats import Format, saturated, unpinned
from coat_jax.kernels import dispatch, partition, prologue, tiles
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.prologue import Rowwise

NAMES = ("coat_pullback", "coat_pullback_largest")
_WIDE, _LARGEST = (32, 128, 8), (8, 256, 4)  # rows and columns of a tile, warps
_LEAD = "abcdef"  # names of the axes before the last


def refuses(function: Rowwise, stored, dh, group: int) -> str | None:
    """Why no kernel takes these, or None."""
    xs = [jax.ShapeDtypeStruct(codes.shape, jnp.float32) for codes, _ in stored]
    if jax.eval_shape(function.statistics, *xs):
        return "the function needs statistics of its rows"
    if dh.ndim > len(_LEAD) + 1:
        return f"dh has more than {len(_LEAD) + 1} axes, its shape being {dh.shape}"
    refusal = prologue.refuses(function, [], xs, group)
    return refusal or prologue.refuses(function, [], [dh] * len(xs), group)


def largest(
    function: Rowwise,
    stored: Sequence[tuple[jax.Array, jax.Array]],
    dh: jax.Array,
    *,
    group: int,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """max|dx| of each gradient, float32 of shape (); NaN where there is one in it."""
    how = {"group": group}
    made = dispatch.run(
        "pullback",
        implementation,
        refuses(function, stored, dh, group),
        {"triton": functools.partial(_largest, function, **how)},
        functools.partial(_largest_reference, function, **how),
        [tuple(x) for x in stored],
        dh,
    )
    return list(made)


def encode(
    function: Rowwise,
    stored: Sequence[tuple[jax.Array, jax.Array]],
    dh: jax.Array,
    scales: Sequence[jax.Array],
    *,
    h_format: Format,
    g_format: Format,
    group: int,
    implementation: Implementation = None,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Codes of h, transposed, and of each gradient, as they lie and transposed.

    Args:
      function: element by element, without statistics.
      stored: FP8 codes (..., N) and float32 scales (..., N / group) of each input.
      dh: (..., N), float32, bfloat16 or float16.
      scales: of h and of each gradient, float32 of one element, powers of two.
      h_format: of h's codes.
      g_format: of the gradients'.
      group: elements of a kept scale.
      implementation: as `dispatch.run` takes it.

    Returns:
      h's codes (N, ...), and of each gradient those of (..., N) and of (N, ...). At
      most 1e-4 of a kernel's codes differ from XLA's, each by one step, as its
      exponentials do.

    Raises:
      ValueError: if the kernel that was named cannot take these.
      NotImplementedError: if this JAX lacks the backend that was named.
    """
    how = {"group": group, "formats": (h_format, g_format)}
    h_T, *pairs = dispatch.run(
        "pullback",
        implementation,
        refuses(function, stored, dh, group),
        {"triton": functools.partial(_encode, function, **how)},
        functools.partial(_encode_reference, function, **how),
        [tuple(x) for x in stored],
        dh,
        jnp.stack([scale.reshape(()) for scale in scales]),
    )
    return h_T, list(zip(pairs[::2], pairs[1::2], strict=True))


def _values(function: Rowwise, xs, dh):
    """h and the gradients, in float32."""
    f = functools.partial(function.apply, [], [])
    h, pull = jax.vjp(f, *xs)
    return [h, *pull(dh)]


def _gradients(function: Rowwise, xs, dh):
    """Gradients that are NaN where an x is, which relu'(NaN) = 0 would hide.

    From here it comes to all codes, by their scale.
    """
    _, *dxs = _values(function, xs, dh)
    hidden = sum(0.0 * x for x in xs)
    return [dx + hidden for dx in dxs]


def _decoded(codes, scale, group: int):
    blocks = groups.blocks_of(codes.shape[-1], group)
    x = groups.split(codes.astype(jnp.float32), blocks) * groups.spread(scale, blocks)
    return groups.merge(x)


def _largest_reference(function, stored, dh, *, group):
    xs = [_decoded(codes, scale, group) for codes, scale in stored]
    dxs = _gradients(function, xs, dh.astype(jnp.float32))
    return tuple(prologue.most(dx) for dx in dxs)


def _encode_reference(function, stored, dh, scales, *, group, formats):
    xs = [_decoded(codes, scale, group) for codes, scale in stored]
    values = _values(function, xs, dh.astype(jnp.float32))
    codes = [
        unpinned(value / scales[i], formats[min(i, 1)])
        for i, value in enumerate(values)
    ]
    codes = lax.optimization_barrier(codes)
    turned = lambda x: jnp.moveaxis(x, -1, 0)
    made = [turned(codes[0])]
    for each in codes[1:]:
        made += [each, turned(each)]
    return tuple(made)


# On shards ---------------------------------------------------------------------------


def _local(stored, dh, scales, call, results, *, group):
    """`call` on each device's shard, as arrays (T, N)."""
    lead = " ".join(_LEAD[: dh.ndim - 1])
    axes = f"{lead} (g s)".strip()
    operands = [axes, f"{lead} g".strip()] * len(stored) + [axes, "k"]
    names = {"as it lies": axes, "turned": f"(g s) {lead}".strip(), "groups": "g"}
    names["groups"] = f"{lead} g".strip()
    rule = f"{', '.join(operands)} -> {', '.join(names[r] for r in results)}"

    def local(*arrays):
        *arrays, dh, scales = arrays
        *lead, N = dh.shape
        T = math.prod(lead)
        flat = [x.reshape(T, x.shape[-1]) for x in arrays]
        made = call(flat, dh.reshape(T, N), scales)
        shapes = {"as it lies": (*lead, N), "turned": (N, *lead)}
        shapes["groups"] = (*lead, N // group)
        shaped = [m.reshape(shapes[r]) for m, r in zip(made, results, strict=True)]
        return tuple(shaped)

    flat = [array for x in stored for array in x]
    sharded = partition.shard_local(local, rule, sizes={"s": group}, whole=("k",))
    return sharded(*flat, dh, scales)


def _largest(function, stored, dh, *, group, interpret):
    call = functools.partial(
        _call_largest, function=function, group=group, interpret=interpret
    )
    one = jnp.ones((1,), jnp.float32)
    made = _local(stored, dh, one, call, ["groups"] * len(stored), group=group)
    return tuple(prologue.most(each) for each in made)


def _encode(function, stored, dh, scales, *, group, formats, interpret):
    call = functools.partial(
        _call_encode,
        function=function,
        group=group,
        formats=formats,
        interpret=interpret,
    )
    results = ["turned"] + ["as it lies", "turned"] * len(stored)
    return _local(stored, dh, scales, call, results, group=group)


# Triton ------------------------------------------------------------------------------


def _call_largest(flat, dh, scales, *, function, group, interpret):
    T, N = dh.shape
    t, n, warps = _tile_of(_LARGEST, T, N, group)
    spec = pl.BlockSpec((t, n // group), lambda j, i: (i, j))
    shape = partition.out_struct((T, N // group), jnp.float32, *flat, dh)

    def outputs(function, xs, dh, scales):
        del scales
        dxs = _gradients(function, xs, dh)
        grouped = [dx.reshape(dx.shape[0], -1, group) for dx in dxs]
        return [(prologue.most(v, axis=-1), False) for v in grouped]

    return _call(
        flat,
        dh,
        scales,
        specs=[spec] * (len(flat) // 2),
        shapes=[shape] * (len(flat) // 2),
        how=(t, n, warps, group, function, outputs),
        name=NAMES[1],
        interpret=interpret,
    )


def _call_encode(flat, dh, scales, *, function, group, formats, interpret):
    T, N = dh.shape
    t, n, warps = _tile_of(_WIDE, T, N, group)
    lying = pl.BlockSpec((t, n), lambda j, i: (i, j))
    turned = pl.BlockSpec((n, t), lambda j, i: (j, i))
    struct = lambda shape, format: partition.out_struct(shape, format.dtype, *flat, dh)
    specs, shapes = [turned], [struct((N, T), formats[0])]
    for _ in range(len(flat) // 2):
        specs += [lying, turned]
        shapes += [struct((T, N), formats[1]), struct((N, T), formats[1])]

    def outputs(function, xs, dh, scales):
        made = []
        for i, value in enumerate(_values(function, xs, dh)):
            # h's scale is the forward's, so that Inf may be under it.
            narrow = saturated if i else unpinned
            codes = narrow(value * (1.0 / scales[i]), formats[min(i, 1)])  # exact
            made += [(codes, False)] * (i > 0) + [(codes.T, True)]
        return made

    return _call(
        flat,
        dh,
        scales,
        specs=specs,
        shapes=shapes,
        how=(t, n, warps, group, function, outputs),
        name=NAMES[0],
        interpret=interpret,
    )


def _tile_of(tile, T: int, N: int, group: int) -> tuple[int, int, int]:
    t, n, warps = tile
    t = min(t, max(16, 1 << (T - 1).bit_length()))
    return t, max(group, math.gcd(N, n)), warps


def _call(flat, dh, scales, *, specs, shapes, how, name, interpret):
    from jax.experimental.pallas import triton as plt

    t, n, warps, group, function, outputs = how
    T, N = dh.shape
    place = lambda j, i: (i, j)
    pair = [pl.BlockSpec((t, n), place), pl.BlockSpec((t, n // group), place)]
    inputs = [*pair * (len(flat) // 2), pair[0]]
    inputs += [pl.BlockSpec(scales.shape, lambda j, i: (0,))]
    body = functools.partial(
        _tile, count=len(flat), group=group, function=function, outputs=outputs, T=T
    )
    # Neighbouring programs share rows of what is transposed.
    return pl.pallas_call(
        body,
        grid=(N // n, pl.cdiv(T, t)),
        in_specs=inputs,
        out_specs=specs,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=name,
    )(*flat, dh, scales)


def _tile(*refs, count, group, function, outputs, T):
    from jax.experimental.pallas import triton as plt

    t = refs[0].shape[0]
    inside = tiles.inside(1, t, T)[:, None]

    def load(ref) -> Any:
        # Rows outside hold anything: none of theirs is stored, or enters another's.
        mask = jnp.broadcast_to(inside, ref.shape)
        return plt.load(ref.at[...], mask=mask).astype(jnp.float32)

    xs = []
    for i in range(0, count, 2):
        codes, scale = load(refs[i]), load(refs[i + 1])
        grouped = codes.reshape(t, -1, group) * scale[..., None]
        xs.append(grouped.reshape(codes.shape))
    scales = refs[count + 1]
    scales = [scales[i] for i in range(scales.shape[0])]
    made = outputs(function, xs, load(refs[count]), scales)
    for ref, (value, turned) in zip(refs[count + 2 :], made, strict=True):
        mask = jnp.broadcast_to(inside.T if turned else inside, ref.shape)
        plt.store(ref.at[...], value, mask=mask)
