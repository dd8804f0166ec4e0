"""What comes before a product, in one pass: its codes, and the codes to keep.

    h = apply(columns, rows, *xs)     a norm, an activation, a gated product
    codes = cast(h / scale)           what is multiplied
    kept  = quantize(x)               for each of xs: what is kept

Letters: T rows and N columns, t and n of a tile, S columns that share a kept scale.

XLA makes three to five passes of this, some of them through float32 arrays in memory.
The one scale of h takes a pass over xs of its own, `largest`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from coat_jax.formats import Format, unpinned, within
from coat_jax.kernels import dispatch, partition, tiles
from coat_jax.kernels import quantize as group_quantize
from coat_jax.kernels.dispatch import Implementation
from coat_jax.typing import Array, Float, Float32

NAMES = ("coat_prologue", "coat_largest")
_MOST = 2**31 - 1  # elements that 32 bits count
_LACKING = {"erfc", "erf_inv", "lgamma", "digamma"}
_TILE, _WARPS = 2048, 4


@dataclasses.dataclass(frozen=True)
class Rowwise:
    """A function of arrays (..., N) that needs of a row, beside elements, a few sums.

    statistics: (*xs) -> a list of (..., 1).
    apply: (columns, rows, *xs) -> (..., N), element by element: columns are the
      parameters, (N,) or None each, rows the statistics; all are float32.
    """

    statistics: Callable[..., list[jax.Array]]
    apply: Callable[..., jax.Array]

    def __call__(self, columns, *xs):
        """The function itself."""
        return self.apply(columns, self.statistics(*xs), *xs)


def refuses(
    function: Rowwise, columns: Sequence[Any], xs: Sequence[Any], group: int | None
) -> str | None:
    """Why no kernel takes `xs`, kept in groups of `group` (None: not kept), or None."""
    x = xs[0]
    if lacking := _lacking(function, columns, xs):
        return f"Pallas's Triton backend has no {', '.join(sorted(lacking))}"
    if any(x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) for x in xs):
        return f"xs are none of float32, bfloat16 and float16, but {x.dtype}"
    group = 16 if group is None else group
    if group & (group - 1) or group > _TILE:
        return f"the group must be a power of two up to {_TILE}, got {group}"
    if not x.ndim or not x.size or x.shape[-1] % group:
        return f"x's shape {tuple(x.shape)} has no whole groups of {group} in a row"
    if x.size > _MOST:
        return f"x has {x.size} elements, more than 32 bits can count"
    if partition.row_length(x) % group:
        return f"the sharding of x, of shape {x.shape}, cuts groups of {group}"
    return None


def _lacking(function: Rowwise, columns, xs) -> set[str]:
    """Primitives that the function needs and Triton kernels cannot have."""
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    wide = [struct(x) for x in xs]
    columns = [c if c is None else struct(c) for c in columns]
    rows = jax.eval_shape(function.statistics, *wide)
    program = str(jax.make_jaxpr(function.apply)(columns, rows, *wide))
    return {name for name in _LACKING if f" {name} " in program}


def largest(
    function: Rowwise,
    columns: Sequence[Any],
    rows: Sequence[jax.Array],
    xs: Sequence[jax.Array],
    *,
    implementation: Implementation = None,
) -> Float32[Array, ""]:
    """max|h|, float32 of shape (); NaN where there is one in h."""
    return dispatch.run(
        "prologue",
        implementation,
        refuses(function, columns, xs, None),
        {"triton": functools.partial(_largest, function)},
        functools.partial(_largest_reference, function),
        list(columns),
        list(rows),
        list(xs),
    )


def encode(
    function: Rowwise,
    columns: Sequence[Any],
    rows: Sequence[jax.Array],
    xs: Sequence[Float[Array, "..."]],
    scale: Float32[Array, "..."],
    *,
    format: Format,
    kept: tuple[Format, int] | None,
    implementation: Implementation = None,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The codes of h under `scale`, and the codes and scales of each of xs.

    Args:
      function: h of columns, rows and xs.
      columns: (N,) or None each.
      rows: what `function.statistics` gave.
      xs: (..., N) each, float32, bfloat16 or float16.
      scale: one element, a power of two.
      format: of h's codes.
      kept: format and group in which xs are kept; None: they are not.
      implementation: as `dispatch.run` takes it.

    Returns:
      (codes, [(codes, scale) of each of xs]). What is kept has the same bits whatever
      the implementation; at most 1e-4 of h's codes differ, each by one step, where a
      kernel's exponentials and reciprocals differ from XLA's.

    Raises:
      ValueError: if the kernel that was named cannot take these.
      NotImplementedError: if this JAX lacks the backend that was named.
    """
    how = {"format": format, "kept": kept}
    made = dispatch.run(
        "prologue",
        implementation,
        refuses(function, columns, xs, kept and kept[1]),
        {"triton": functools.partial(_encode, function, **how)},
        functools.partial(_encode_reference, function, **how),
        list(columns),
        list(rows),
        list(xs),
        scale,
    )
    codes, *stored = made
    return codes, list(zip(stored[::2], stored[1::2], strict=True))


def _wide(xs):
    return [x.astype(jnp.float32) for x in xs]


def _largest_reference(function, columns, rows, xs):
    return most(function.apply(columns, rows, *_wide(xs)))


def most(x, axis=None):
    """max|x|, float32, by bits, as which magnitudes are ordered, NaN above all.

    XLA:CPU and Triton drop NaN from the maximum of floats.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis), jnp.float32)


def _encode_reference(function, columns, rows, xs, scale, *, format: Format, kept):
    h = function.apply(columns, rows, *_wide(xs))
    made = [unpinned(h / scale.reshape(()), format)]
    for x in xs if kept else ():
        made += group_quantize.reference(x, format=kept[0], group=kept[1])
    return tuple(lax.optimization_barrier(made))


# On shards ---------------------------------------------------------------------------


def _local(function, columns, rows, xs, scale, call, results, *, group):
    """`call` on each device's shard, as arrays (T, N)."""
    axis = "(g s)"
    there = [column is not None for column in columns]
    columns = [c.astype(jnp.float32) for c in columns if c is not None]
    operands = [axis] * len(columns) + ["... r"] * len(rows) + [f"... {axis}"] * len(xs)
    rule = f"{', '.join([*operands, 'k'])} -> {', '.join(results)}"
    counts = len(columns), len(columns) + len(rows)

    def local(*arrays):
        *arrays, scale = arrays
        columns, rows, xs = (
            arrays[: counts[0]],
            arrays[counts[0] : counts[1]],
            arrays[counts[1] :],
        )
        *lead, N = xs[0].shape
        T = math.prod(lead)
        made = call(
            functools.partial(_apply, function, there),
            [c.reshape(1, N) for c in columns],
            [r.reshape(T, 1) for r in rows],
            [x.reshape(T, N) for x in xs],
            scale,
        )
        shaped = [m.reshape(*lead, m.shape[-1]) for m in made]
        return tuple(shaped) if len(shaped) > 1 else shaped[0]

    sharded = partition.shard_local(local, rule, sizes={"s": group}, whole=("r", "k"))
    return sharded(*columns, *rows, *xs, scale.reshape(1))


def _apply(function, there, columns, rows, *xs):
    """`function.apply` of the columns that are there."""
    columns = iter(columns)
    whole = [next(columns) if t else None for t in there]
    return function.apply(whole, rows, *xs)


def _largest(function, columns, rows, xs, *, interpret):
    group = _divisor(xs[0], 128)
    call = functools.partial(
        _call, outputs=_MaximaOut(group), name=NAMES[1], interpret=interpret
    )
    one = jnp.ones((1,), jnp.float32)
    each = _local(function, columns, rows, xs, one, call, ["... g"], group=group)
    return most(each)


def _encode(function, columns, rows, xs, scale, *, format, kept, interpret):
    group = kept[1] if kept else _divisor(xs[0], 128)
    outputs = _CodesOut(format, kept, group)
    results = ["... (g s)"] + ["... (g s)", "... g"] * (len(xs) if kept else 0)
    call = functools.partial(_call, outputs=outputs, name=NAMES[0], interpret=interpret)
    made = _local(function, columns, rows, xs, scale, call, results, group=group)
    return made if isinstance(made, tuple) else (made,)


def _divisor(x, limit: int) -> int:
    """The largest power of two up to `limit` that divides a row of a shard of x."""
    return math.gcd(partition.row_length(x), limit)


# Triton ------------------------------------------------------------------------------


class _MaximaOut(NamedTuple):
    """The largest |h| of each group."""

    group: int

    def shapes(self, T, N, xs):
        del xs
        return [((T, N // self.group), jnp.float32, self.group)]

    def compute(self, h, xs, scale):
        del scale
        # 0 x makes NaN of what is NaN in x: Triton's maxima, as of relu, drop it.
        h = h + sum(0.0 * x for x in xs)
        return [most(h.reshape(h.shape[0], -1, self.group), axis=-1)]


class _CodesOut(NamedTuple):
    """Codes of h, and codes and scales of each of xs."""

    format: Format
    kept: tuple[Format, int] | None
    group: int

    def shapes(self, T, N, xs):
        shapes = [((T, N), self.format.dtype, 1)]
        if self.kept is None:
            return shapes
        codes = ((T, N), self.kept[0].dtype, 1)
        scales = ((T, N // self.group), jnp.float32, self.group)
        return [*shapes, *[codes, scales] * len(xs)]

    def compute(self, h, xs, scale):
        # Exact, as a power of two; NaN in all codes if one was NaN in `largest`.
        made = [within(h * (1.0 / scale), self.format)]
        if self.kept is None:
            return made
        for x in xs:
            grouped = x.reshape(x.shape[0], -1, self.group)
            codes, scales = group_quantize.quantized(
                grouped, self.kept[0], wide=lambda s: s[..., None]
            )
            made += [codes.reshape(x.shape), scales]
        return made


def _call(apply, columns, rows, xs, scale, *, outputs, name, interpret):
    from jax.experimental.pallas import triton as plt

    T, N = xs[0].shape
    n = min(max(outputs.group, 256), math.gcd(N, _TILE))
    t = min(_TILE // n, 1 << (T - 1).bit_length())
    shapes = outputs.shapes(T, N, xs)
    place = lambda i, j: (i, j)
    in_specs = [pl.BlockSpec((1, n), lambda i, j: (0, j)) for _ in columns]
    in_specs += [pl.BlockSpec((t, 1), lambda i, j: (i, 0)) for _ in rows]
    in_specs += [pl.BlockSpec((t, n), place) for _ in xs]
    in_specs += [pl.BlockSpec((1,), lambda i, j: (0,))]
    body = functools.partial(
        _tile,
        counts=(len(columns), len(rows), len(xs)),
        apply=apply,
        outputs=outputs,
        T=T,
    )
    operands = (*columns, *rows, *xs, scale)
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(T, t), N // n),
        in_specs=in_specs,
        out_specs=[pl.BlockSpec((t, n // per), place) for _, _, per in shapes],
        out_shape=[
            partition.out_struct(shape, dtype, *operands) for shape, dtype, _ in shapes
        ],
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name=name,
    )(*operands)


def _tile(*refs, counts, apply, outputs, T):
    from jax.experimental.pallas import triton as plt

    refs, count = list(refs), sum(counts)
    columns = [refs.pop(0)[...] for _ in range(counts[0])]
    t = refs[counts[1]].shape[0]
    inside = tiles.inside(0, t, T)[:, None]
    load = lambda ref: plt.load(
        ref.at[...], mask=jnp.broadcast_to(inside, ref.shape), other=0
    ).astype(jnp.float32)
    rows = [load(refs.pop(0)) for _ in range(counts[1])]
    xs = [load(refs.pop(0)) for _ in range(count - counts[0] - counts[1])]
    scale = refs.pop(0)[0]
    h = apply(columns, rows, *xs)
    for ref, value in zip(refs, outputs.compute(h, xs, scale), strict=True):
        plt.store(ref.at[...], value, mask=jnp.broadcast_to(inside, ref.shape))
