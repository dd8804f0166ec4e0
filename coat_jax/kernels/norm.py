"""A norm's backward, each row read once; and its result again, as transposed codes.

    x   = codes * scale              what was kept, or x itself
    dy  = dy_1 + dy_2 + dy_3         of the products that follow, in float32
    dx  = dnorm/dx (x) * dy + residual's gradient, rounded once
    h_T = cast(norm(x) / h_scale)    transposed: what dw = h^T g wants

Letters: T rows of N, t of a program; N is G groups of S that share a kept scale.

XLA reads a row twice, for its sums and then for dx, and writes h's codes as they lie,
to transpose them in another pass.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from coat_jax import groups
from coat_jax.formats import Format, unpinned
from coat_jax.kernels import dispatch, partition, tiles
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.prologue import Rowwise

NAMES = ("coat_norm_backward", "coat_norm_again")
_WIDEST = 8192  # elements of a row: 16 warps of 16 a thread
_GROUPS = (16, 32, 64, 128, 256)
_ROWS = 4, 128  # fewest and most of a program
_AGAIN = (64, 128, 8)  # rows and columns of a tile, warps
_LEAD = "abcdef"  # names of the axes before the last


@dataclasses.dataclass(frozen=True)
class Norm(Rowwise):
    """RMSNorm ("rms") or LayerNorm ("layer") over rows, of columns [scale, bias]."""

    kind: str
    epsilon: Any


def refuses(function: Any, stored, dys: Sequence[Any], dtype) -> str | None:
    """Why no kernel makes the gradient of x, in `dtype`, or None."""
    number = int, float
    if not isinstance(function, Norm) or not isinstance(function.epsilon, number):
        return "the function is no norm with a number for epsilon"
    shape = dys[0].shape
    for array_dtype in (dtype, *(dy.dtype for dy in dys)):
        if reason := tiles.refuses(shape, array_dtype):
            return reason
    if len(shape) < 2 or shape[-1] > _WIDEST:
        return f"rows must be in two axes or more, of up to {_WIDEST}; x is {shape}"
    if (group := _group_of(stored)) not in _GROUPS or shape[-1] % group:
        return f"rows of {shape[-1]} are not whole groups of 16 to 256, but of {group}"
    if partition.row_length(dys[0]) != shape[-1]:
        return f"the sharding of x, of shape {tuple(shape)}, cuts rows"
    if not _rows_of(shape):
        return f"{shape[-2]} rows have no divisor from {_ROWS[0]} to {_ROWS[1]}"
    return None


def _group_of(stored) -> int:
    """S: of the scales that are kept, or of x itself any that divides it."""
    if isinstance(stored, tuple):
        return stored[0].shape[-1] // max(stored[1].shape[-1], 1)
    return math.gcd(stored.shape[-1], 128)


def _warps(N: int) -> int:
    """Of a program, whose threads have 8 elements of a row each, 16 of the widest."""
    return min(max(tiles.power_of_two(N, _WIDEST) // 256, 1), 16)


def _rows_of(shape) -> int:
    """t: a divisor of the axis before the last, or 0 where none fits.

    For 128 programs of 16 warps, of which each of 132 multiprocessors holds one, or as
    many more as they are smaller.
    """
    fewest, most = _ROWS
    fitting = [t for t in range(fewest, most + 1) if shape[-2] % t == 0]
    wanted = max(math.prod(shape[:-1]) * _warps(shape[-1]) // 2048, 8)
    return max((t for t in fitting if t <= wanted), default=min(fitting, default=0))


def backward(
    function: Rowwise,
    columns: Sequence[Any],
    stored: Any,
    dys: Sequence[jax.Array],
    residual: jax.Array | None = None,
    *,
    dtype,
    implementation: Implementation = None,
) -> tuple[jax.Array, list[jax.Array], list[Any]]:
    """The gradients of x and of the columns; and the norm's statistics of each row.

    Args:
      function: a `Norm`.
      columns: scale and bias, (N,) or None each.
      stored: FP8 codes (..., N) and float32 scales (..., G) of x, or x itself.
      dys: gradients (..., N) of the norm's result, added in their order in float32.
      residual: (..., N), another gradient of x, added before the one rounding; or None.
      dtype: of x.
      implementation: as `dispatch.run` takes it.

    Returns:
      (dx, rows, dcolumns): (..., N) in `dtype`, what `function.statistics` gives, and
      (N,) in each column's dtype. Each term is XLA's; sums over rows and columns are in
      another order, so that dx differs from XLA's as they do. A NaN or Inf in a row of
      x or dy comes to that row of dx, and to the columns' sums, as in XLA.

    Raises:
      ValueError: if the kernel that was named cannot take these.
      NotImplementedError: if this JAX lacks the backend that was named.
    """
    how = {"dtype": jnp.dtype(dtype)}
    return dispatch.run(
        "norm_backward",
        implementation,
        refuses(function, stored, dys, dtype),
        {"triton": functools.partial(_backward, function, **how)},
        functools.partial(_backward_reference, function, **how),
        list(columns),
        stored,
        list(dys),
        residual,
    )


def again(
    function: Rowwise,
    columns: Sequence[Any],
    rows: Sequence[jax.Array],
    stored: tuple[jax.Array, jax.Array],
    scale: jax.Array,
    *,
    format: Format,
    implementation: Implementation = None,
) -> jax.Array:
    """Codes of the norm's result, transposed: (N, ...), with the bits of XLA's.

    Args:
      function: any, of one x.
      columns: (N,) or None each.
      rows: (..., 1) each, as `backward` returns them.
      stored: FP8 codes (..., N) and float32 scales (..., G) of x.
      scale: of the codes, one element, a power of two; what is beyond it is clipped.
      format: of the codes.
      implementation: as `dispatch.run` takes it.

    Raises:
      ValueError: if the kernel that was named cannot take these.
      NotImplementedError: if this JAX lacks the backend that was named.
    """
    how = {"format": format}
    return dispatch.run(
        "norm_again",
        implementation,
        refuses_again(stored),
        {"triton": functools.partial(_again, function, **how)},
        functools.partial(_again_reference, function, **how),
        list(columns),
        list(rows),
        stored,
        scale.reshape(1),
    )


def refuses_again(stored) -> str | None:
    """Why no kernel makes the codes of what `stored` holds, or None."""
    if not isinstance(stored, tuple):
        return "x is not kept as codes"
    shape, group = stored[0].shape, _group_of(stored)
    if reason := tiles.refuses(shape, jnp.float32):
        return reason
    if not 2 <= len(shape) <= len(_LEAD) + 1:
        return f"x must have 2 to {len(_LEAD) + 1} axes, its shape being {shape}"
    if group not in _GROUPS or shape[-1] % group:
        return f"rows of {shape[-1]} are not whole groups of 16 to 256, but of {group}"
    if partition.row_length(stored[0]) % group:
        return f"the sharding of x, of shape {tuple(shape)}, cuts groups of {group}"
    return None


# The definition, for XLA --------------------------------------------------------------


def decoded(stored):
    """x in float32."""
    if not isinstance(stored, tuple):
        return stored.astype(jnp.float32)
    codes, scale = stored
    blocks = groups.blocks_of(codes.shape[-1], _group_of(stored))
    x = groups.split(codes.astype(jnp.float32), blocks) * groups.spread(scale, blocks)
    return groups.merge(x)


def _backward_reference(function, columns, stored, dys, residual, *, dtype):
    def run(columns, x):
        rows = function.statistics(x)
        return function.apply(columns, rows, x), rows

    x = decoded(stored)
    _, pull, rows = jax.vjp(run, columns, x, has_aux=True)
    dcolumns, dx = pull(functools.reduce(jnp.add, [_wide(dy) for dy in dys]))
    dx = dx + 0.0 * x  # NaN where x is
    dx = dx if residual is None else dx + _wide(residual)
    return dx.astype(dtype), rows, dcolumns


def _again_reference(function, columns, rows, stored, scale, *, format):
    h = function.apply(columns, rows, decoded(stored))
    codes = lax.optimization_barrier(unpinned(h * (1.0 / scale.reshape(())), format))
    return jnp.moveaxis(codes, -1, 0)


def _wide(x):
    return x.astype(jnp.float32)


# On shards ---------------------------------------------------------------------------


def _backward(function, columns, stored, dys, residual, *, dtype, interpret):
    """The kernel on each device's rows; the columns' sums are XLA's from there."""
    given: Any = stored if isinstance(stored, tuple) else (stored,)
    scale, bias = columns
    t, S, count = _rows_of(dys[0].shape), _group_of(stored), len(dys)
    sums = [column is not None for column in columns]
    row, column = "... (b t) n", "n"
    operands = [row] * (count + 1) + ["... (b t) g"] * (len(given) - 1)
    operands += [row] * (residual is not None) + [column] * sums[0]
    results = [row] + ["... (b t) o"] * (1 + (function.kind == "layer"))
    results += ["... b n"] * sum(sums)
    how = {"t": t, "S": S, "count": count, "kept": len(given), "sums": sums}
    how |= {"residual": residual is not None, "dtype": dtype, "interpret": interpret}
    local = functools.partial(_local, function, how=how)
    call = partition.shard_local(
        local,
        f"{', '.join(operands)} -> {', '.join(results)}",
        sizes={"t": t},
        whole=("n", "g", "o"),
    )
    extra = [x for x in (residual, scale) if x is not None]
    dx, *made = call(*dys, *given, *extra)
    rows = made[: len(made) - sum(sums)]
    partial = iter(made[len(rows) :])
    total = lambda c: jnp.sum(next(partial), range(dx.ndim - 1)).astype(c.dtype)
    return dx, rows, [c if c is None else total(c) for c in (scale, bias)]


def _local(function, *arrays, how):
    """`_call` on a device's rows, in whatever axes they are."""
    lead, N = arrays[0].shape[:-1], arrays[0].shape[-1]
    T, S = math.prod(lead), how["S"]
    grouped = lambda a: a.reshape(-1, N // S, S) if a.shape[-1] == N else a
    flat = [grouped(a) for a in arrays[: how["count"] + 1]]
    rest = [*arrays[how["count"] + 1 :]]
    if how["kept"] > 1:
        flat.append(rest.pop(0).reshape(T, N // S))
    if how["residual"]:
        flat.append(grouped(rest.pop(0)))
    flat += [column.reshape(N // S, S) for column in rest]
    dx, *made = _call(function, flat, T, N, how)
    stats = len(made) - sum(how["sums"])
    rows = [r.reshape(*lead, 1) for r in made[:stats]]
    blocks = *lead[:-1], lead[-1] // how["t"], N
    return dx.reshape(*lead, N), *rows, *(p.reshape(blocks) for p in made[stats:])


def _again(function, columns, rows, stored, scale, *, format, interpret):
    """The kernel on each device's tiles: the rows' statistics are all that it lacks."""
    there = [column is not None for column in columns]
    lead, S = " ".join(_LEAD[: stored[0].ndim - 1]), _group_of(stored)
    operands = [f"{lead} (g s)", f"{lead} g", *[f"{lead} r"] * len(rows)]
    operands += [*["(g s)"] * sum(there), "k"]

    def local(codes, scale, *rest):
        *given, h_scale = rest
        *lead, N = codes.shape
        T = math.prod(lead)
        stats = [r.reshape(T, 1) for r in given[: len(rows)]]
        flat = [c.reshape(1, N) for c in given[len(rows) :]]
        made = _call_again(
            functools.partial(_apply, function, there),
            codes.reshape(T, N),
            scale.reshape(T, N // S),
            stats,
            flat,
            h_scale,
            format=format,
            interpret=interpret,
        )
        return made.reshape(N, *lead)

    rule = f"{', '.join(operands)} -> (g s) {lead}"
    sharded = partition.shard_local(local, rule, sizes={"s": S}, whole=("r", "k"))
    columns = [_wide(c) for c in columns if c is not None]
    return sharded(*stored, *rows, *columns, scale)


def _apply(function, there, columns, rows, x):
    """`function.apply` of the columns that are there."""
    columns = iter(columns)
    whole = [next(columns) if t else None for t in there]
    return function.apply(whole, rows, x)


# Triton ------------------------------------------------------------------------------


def _call(function, flat, T: int, N: int, how):
    """dx (T, G, S), the statistics (T,), and each column's sums of t rows (T/t, G, S).

    dx takes the place of the first gradient, which nothing else wants.

    flat: the gradients, codes or x, the codes' scales, the residual's gradient, scale.
    """
    from jax.experimental.pallas import triton as plt

    t, S, sums = how["t"], how["S"], how["sums"]
    groups, wide = N // S, tiles.power_of_two(N // S, _WIDEST)
    whole = pl.BlockSpec((t, wide, S), lambda i: (i, 0, 0))
    specs = {
        (T, groups, S): whole,
        (T, groups): pl.BlockSpec((t, wide), lambda i: (i, 0)),
        (groups, S): pl.BlockSpec((wide, S), lambda i: (0, 0)),
    }
    struct = functools.partial(partition.out_struct)
    stats = 1 + (function.kind == "layer")
    shapes = [struct((T, groups, S), how["dtype"], *flat)]
    shapes += [struct((T,), jnp.float32, *flat)] * stats
    shapes += [struct((T // t, groups, S), jnp.float32, *flat)] * sum(sums)
    outs = [whole, *[pl.BlockSpec((t,), lambda i: (i,))] * stats]
    outs += [pl.BlockSpec((None, wide, S), lambda i: (i, 0, 0))] * sum(sums)
    return pl.pallas_call(
        functools.partial(_program, function=function, N=N, how=how),
        grid=(T // t,),
        in_specs=[specs[a.shape] for a in flat],
        out_specs=outs,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=_warps(N)),
        input_output_aliases={0: 0} if flat[0].dtype == how["dtype"] else {},
        interpret=how["interpret"],
        name=NAMES[0],
    )(*flat)


def _program(*refs, function, N: int, how):
    """t rows, one after the other: the next is being read while one is computed."""
    from jax.experimental.pallas import triton as plt

    t, count, sums = how["t"], how["count"], how["sums"]
    ins = count + how["kept"] + how["residual"]
    dx_ref, *outs = refs[ins + sums[0] :]
    stats, partials = outs[: len(outs) - sum(sums)], outs[len(outs) - sum(sums) :]
    wide, S = dx_ref.shape[1:]
    late = refs[ins - how["residual"] : ins]  # needed after the sums
    inside = jnp.arange(wide, dtype=jnp.int32) < N // S if wide * S > N else None

    def mask(shape) -> Any:
        if inside is None or len(shape) == 1:
            return inside
        return jnp.broadcast_to(inside[:, None], shape)

    def read(ref, shape):
        return plt.load(ref, mask=mask(shape))

    def wide_of(a):
        """In float32, and zeros beyond the row, where anything may have been read."""
        a = _wide(a)
        return a if inside is None else jnp.where(mask(a.shape), a, 0.0)

    ahead = lambda j: [read(r.at[j], r.shape[1:]) for r in refs[: ins - len(late)]]

    def step(j, carry):
        row, totals = carry
        following = ahead(jnp.minimum(j + 1, t - 1))
        residual = [_wide(read(ref.at[j], ref.shape[1:])) for ref in late]
        # Read again for each row, from the nearest cache: registers are too few.
        scale = wide_of(read(refs[ins].at[...], refs[ins].shape)) if sums[0] else None
        dy = functools.reduce(jnp.add, [wide_of(a) for a in row[:count]])
        x = wide_of(row[count])
        if how["kept"] > 1:
            x = x * wide_of(row[count + 1])[:, None]
        dx, rows, terms = row_gradient(function, N, x, dy, scale)
        dx = functools.reduce(jnp.add, residual, dx)
        plt.store(dx_ref.at[j], dx.astype(dx_ref.dtype), mask=mask(dx.shape))
        for ref, value in zip(stats, rows, strict=True):
            plt.store(ref.at[j], value)
        wanted = [term for term, want in zip(terms, sums, strict=True) if want]
        return following, [a + b for a, b in zip(totals, wanted, strict=True)]

    zero = [jnp.zeros((wide, S), jnp.float32) for _ in partials]
    _, totals = lax.fori_loop(0, t, step, (ahead(jnp.int32(0)), zero))
    for ref, value in zip(partials, totals, strict=True):
        plt.store(ref.at[...], value, mask=mask(value.shape))


def row_gradient(function: Norm, N: int, x, dy, scale):
    """dx, the statistics, and what the row adds to the gradients of scale and bias.

    x, dy and scale (or None) are the N elements of a row, in any two axes; beyond them
    zeros.
    """
    total = lambda a: jnp.sum(jnp.sum(a, axis=1), axis=0)
    mean, centred = None, x
    spread = square = total(x * x) / N
    if function.kind == "layer":
        mean = total(x) / N
        centred, spread = x - mean, square - mean * mean
        # At least zero, and NaN as it is, which Triton's maximum drops.
        spread = jnp.where(spread > 0, spread, 0.0 * spread)
    factor = lax.rsqrt(spread + function.epsilon)
    term = dy * centred
    of_factor = total(term if scale is None else term * scale)
    dy_in = dy * factor if scale is None else dy * (factor * scale)
    of_spread = of_factor * (-0.5 * (factor / (spread + function.epsilon)))
    if mean is None:
        dx = dy_in + (of_spread / N) * (2.0 * x)
        return dx, [factor], [term * factor, dy]
    # As jnp.maximum has it: half the gradient where the two are equal.
    below = jnp.where(square == mean * mean, 0.5 * of_spread, 0.0 * of_spread)
    of_spread = jnp.where(square > mean * mean, of_spread, below)
    of_mean = -total(dy_in) - of_spread * (2.0 * mean)
    dx = dy_in + (of_spread / N) * (2.0 * x) + of_mean / N
    return dx, [factor, mean], [term * factor, dy]


def _call_again(apply, codes, scale, rows, columns, h_scale, *, format, interpret):
    from jax.experimental.pallas import triton as plt

    T, N = codes.shape
    S = N // scale.shape[1]
    t = tiles.power_of_two(T, _AGAIN[0])
    n = max(S, math.gcd(N, _AGAIN[1]))
    place = lambda j, i: (i, j)
    ins = [pl.BlockSpec((t, n), place), pl.BlockSpec((t, n // S), place)]
    ins += [pl.BlockSpec((t, 1), lambda j, i: (i, 0)) for _ in rows]
    ins += [pl.BlockSpec((1, n), lambda j, i: (0, j)) for _ in columns]
    ins += [pl.BlockSpec((1,), lambda j, i: (0,))]
    operands = (codes, scale, *rows, *columns, h_scale)
    # Neighbouring programs share rows of what is transposed.
    return pl.pallas_call(
        functools.partial(
            _tile_again, apply=apply, format=format, count=len(rows), S=S, T=T
        ),
        grid=(N // n, pl.cdiv(T, t)),
        in_specs=ins,
        out_specs=pl.BlockSpec((n, t), place_turned),
        out_shape=partition.out_struct((N, T), format.dtype, *operands),
        compiler_params=plt.CompilerParams(num_warps=_AGAIN[2]),
        interpret=interpret,
        name=NAMES[1],
    )(*operands)


def place_turned(j, i):
    """Where a tile's transpose lies."""
    return j, i


def _tile_again(codes_ref, scale_ref, *refs, apply, format, count: int, S: int, T: int):
    from jax.experimental.pallas import triton as plt

    *refs, h_scale_ref, out_ref = refs
    t = codes_ref.shape[0]
    inside = tiles.inside(1, t, T)[:, None]

    def load(ref):
        mask = jnp.broadcast_to(inside, ref.shape)
        return plt.load(ref.at[...], mask=mask).astype(jnp.float32)

    codes, scale = load(codes_ref), load(scale_ref)
    x = (codes.reshape(t, -1, S) * scale[..., None]).reshape(codes.shape)
    rows = [load(ref) for ref in refs[:count]]
    columns = [ref[...] for ref in refs[count:]]
    h = apply(columns, rows, x)
    made = unpinned(h * (1.0 / h_scale_ref[0]), format)
    plt.store(out_ref.at[...], made.T, mask=jnp.broadcast_to(inside.T, out_ref.shape))
