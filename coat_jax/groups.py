"""Statistics of groups along the last axis, on any sharding, without moving the data.

Letters: N the last axis, S a group's size, G = ceil(N / S) groups, B blocks of C.

Groups are the consecutive runs of S elements of the last axis; the last one may be
short. Reshaping to (G, S) would be enough on one device, but when a shard boundary
cuts a group it makes the compiler gather the whole array. So the axis is cut in two
steps: blocks of C elements, which shards do not cut, are reduced where they lie, and
only their statistics (N / C values) travel and are folded into groups. A block meets
one group, or two when C does not divide S; then it yields two partial statistics.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np

_SHARDS = 16  # shards of the last axis that a block is chosen to divide evenly


class Blocks(NamedTuple):
    """How an axis of B * C elements is cut into blocks, and the blocks into groups."""

    count: int  # B
    size: int  # C
    group: int  # S
    groups: int  # G
    whole: bool  # no block meets two groups


@functools.cache
def blocks_of(n: int, group: int) -> Blocks:
    """Blocks for an axis of n elements in groups of `group`.

    The block size divides n / gcd(n, 16), so that up to 16 shards cut no block: the
    largest such divisor of the group if that is 16 or more, else the largest divisor
    that is at most the group. If there is none but 1, blocks are single elements.
    """
    local = n // math.gcd(n, _SHARDS) if n else 0
    sizes = [c for c in range(1, min(group, local) + 1) if local % c == 0]
    aligned = max((c for c in sizes if group % c == 0), default=1)
    size = aligned if aligned >= min(16, group) else max(sizes, default=1)
    return Blocks(n // size, size, group, -(-n // group), group % size == 0)


@functools.cache
def _tables(blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For blocks that meet two groups: first group and cut (B,), fold table (G, W)."""
    start = np.arange(blocks.count) * blocks.size
    first = start // blocks.group
    cut = np.minimum((first + 1) * blocks.group - start, blocks.size)
    rows = []
    for g in range(blocks.groups):
        head = np.flatnonzero(first == g)
        tail = np.flatnonzero((first == g - 1) & (cut < blocks.size)) + blocks.count
        rows.append(np.concatenate([head, tail]))
    width = max(map(len, rows))
    table = np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
    return first, cut, table


def split(x: jax.Array, blocks: Blocks) -> jax.Array:
    """(..., N) as (..., B, C)."""
    return x.reshape(*x.shape[:-1], blocks.count, blocks.size)


def merge(x: jax.Array) -> jax.Array:
    """(..., B, C) as (..., N)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def reduce(x_BC: jax.Array, blocks: Blocks, *, op, neutral: float) -> jax.Array:
    """op over each group: (..., B, C) to (..., G); op is jnp.max or jnp.min."""
    if blocks.whole:
        return _fold_whole(op(x_BC, axis=-1), blocks, op=op, neutral=neutral)
    _, cut, table = _tables(blocks)
    head = np.arange(blocks.size) < cut[:, None]
    parts = [
        _unsharded(op(jnp.where(_like(part, x_BC), x_BC, neutral), axis=-1))
        for part in (head, ~head)
    ]
    return op(jnp.take(jnp.concatenate(parts, -1), table, axis=-1), axis=-1)


def _fold_whole(stat_B: jax.Array, blocks: Blocks, *, op, neutral: float) -> jax.Array:
    per_group = blocks.group // blocks.size
    missing = blocks.groups * per_group - blocks.count
    if missing or _cuts_groups(stat_B, per_group):
        stat_B = _unsharded(stat_B)
    if missing:
        widths = [(0, 0)] * (stat_B.ndim - 1) + [(0, missing)]
        stat_B = jnp.pad(stat_B, widths, constant_values=neutral)
    return op(stat_B.reshape(*stat_B.shape[:-1], blocks.groups, per_group), axis=-1)


def spread(stat_G: jax.Array, blocks: Blocks) -> jax.Array:
    """A group's statistic beside each of its elements: (..., G) to (..., B, C or 1)."""
    if blocks.whole:
        per_group = blocks.group // blocks.size
        wide = jnp.broadcast_to(stat_G[..., None], (*stat_G.shape, per_group))
        return merge(wide)[..., : blocks.count, None]
    first, cut, _ = _tables(blocks)
    last = np.minimum(first + 1, blocks.groups - 1)
    head, tail = (jnp.take(stat_G, i, axis=-1)[..., None] for i in (first, last))
    in_head = np.arange(blocks.size) < cut[:, None]
    return jnp.where(_like(in_head, head), head, tail)


def stat_spec(spec, shape, mesh, group: int):
    """The spec of one statistic per group, given the spec of the array it is of.

    The last axis keeps its mesh axes unless a shard boundary cuts a group; then the
    statistics are replicated over them.
    """
    spec = tuple(spec) + (None,) * (len(shape) - len(spec))
    if not shape:
        return P()
    names = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    shards = math.prod(mesh.shape[name] for name in names if name is not None)
    cut = shape[-1] % (shards * group)
    return P(*spec[:-1], None if cut else spec[-1])


def as_statistic(stat_G: jax.Array, x, group: int) -> jax.Array:
    """stat_G with the sharding in its type that `reduce` gives statistics of x."""
    if not isinstance(x, jax.Array) or (spec := _spec(x)) is None:
        return stat_G
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(stat_G, stat_spec(spec, x.shape, mesh, group))


def _like(mask_BC: np.ndarray, x: jax.Array) -> jax.Array:
    """The constant mask with x's rank (rank promotion may be set to raise)."""
    return jnp.asarray(mask_BC.reshape((1,) * (x.ndim - 2) + mask_BC.shape))


def _spec(x: jax.Array):
    """x's spec if its mesh has Explicit axes, where resharding is ours to say."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if explicit else None


def _cuts_groups(stat_B: jax.Array, per_group: int) -> bool:
    spec = _spec(stat_B)
    if spec is None or spec[-1] is None:
        return False
    shards = stat_B.shape[-1] // jax.typeof(stat_B).sharding.shard_shape(stat_B.shape)[-1]
    return bool(stat_B.shape[-1] // shards % per_group)


def _unsharded(stat_B: jax.Array) -> jax.Array:
    """Replicates the last axis where axes are Explicit; elsewhere the compiler does."""
    spec = _spec(stat_B)
    if spec is None or spec[-1] is None:
        return stat_B
    return jax.sharding.reshard(stat_B, P(*spec[:-1], None))
