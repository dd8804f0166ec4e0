"""Statistics of groups along the last axis, on any sharding, without moving the data.

Letters: N the last axis, S a group's size, G = ceil(N / S) groups; B units of C
elements; K chunks of the units, each in M runs of W units.

Groups are the consecutive runs of S elements of the last axis; the last one may be
short. Reshaping to (G, S) would be enough on one device, but where a shard boundary
cuts a group it makes the compiler gather the whole array. So the axis is first reduced
to units of C elements that neither a shard boundary nor a group boundary cuts, and only
the units' statistics travel and are folded into groups. Where such units are so short
that this would be many, the units of a chunk (no shard boundary cuts a chunk either)
are first reduced in runs. A run meets at most two groups and so yields two partial
statistics; then only these, 2 K M of them, travel.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

MAX_SHARDS = 16  # 2, 4, 8 or 16 shards of the last axis cut no chunk
# Units of a group that are folded without runs. Where two or more shards hold whole
# groups the units are an eighth of a group at least, so the fold stays on its shard.
_FOLDED = 8


class Blocks(NamedTuple):
    """How an axis of N = B C elements is cut into units, and the units into groups."""

    count: int  # B
    size: int  # C
    chunks: int  # K, divides B
    per_group: int  # units of a whole group
    groups: int  # G
    whole: bool  # units are folded into groups at once, without runs

    @property
    def runs(self) -> int:
        """M, the least number of runs of at most a group's length in a chunk."""
        return -(-self.count // (self.chunks * self.per_group))

    @property
    def width(self) -> int:
        """W, units in a run; the last run of a chunk may be short."""
        return -(-self.count // (self.chunks * self.runs))


def blocks_of(n: int, group: int) -> Blocks:
    """How an axis of n elements in groups of `group` is cut.

    The chunks number gcd(n, MAX_SHARDS), so that 2, 4, 8 or 16 shards, whichever
    divide n, cut none of them.
    """
    chunks = math.gcd(n, MAX_SHARDS) if n else 1
    if n <= group:  # one group, met by every unit
        return Blocks(chunks, n // chunks, chunks, chunks, 1, True)
    size = math.gcd(n // chunks, group)
    whole = chunks == 1 or group <= _FOLDED * size
    return Blocks(n // size, size, chunks, group // size, -(-n // group), whole)


class _Runs(NamedTuple):
    """Where the runs of chunks meet the groups (arrays of NumPy)."""

    first: np.ndarray  # (K M,) the group in which a run begins
    cut: np.ndarray  # (K M,) its units in that group; those behind are the next one's
    begin: np.ndarray  # (G, some) runs that begin in a group, repeated to equal length
    begins: np.ndarray  # (G,) whether there are any
    enter: np.ndarray  # (G,) the run that enters a group from the one before
    enters: np.ndarray  # (G,) whether there is one


@functools.cache
def _runs_of(blocks: Blocks) -> _Runs:
    chunk, run = np.divmod(np.arange(blocks.chunks * blocks.runs), blocks.runs)
    local = blocks.count // blocks.chunks
    start = chunk * local + run * blocks.width
    length = np.minimum(blocks.width, local - run * blocks.width)
    first = start // blocks.per_group
    cut = np.minimum((first + 1) * blocks.per_group - start, length)
    begin = [np.flatnonzero(first == g) for g in range(blocks.groups)]
    enter = [
        np.flatnonzero((first == g - 1) & (cut < length)) for g in range(len(begin))
    ]
    most = max(map(len, begin))
    fill = lambda runs: np.resize(runs if len(runs) else [0], most)
    return _Runs(
        first=first,
        cut=cut,
        begin=np.stack([fill(runs) for runs in begin]),
        begins=np.array([len(runs) > 0 for runs in begin]),
        enter=np.array([runs[0] if len(runs) else 0 for runs in enter]),
        enters=np.array([len(runs) > 0 for runs in enter]),
    )


def split(x: jax.Array, blocks: Blocks) -> jax.Array:
    """(..., N) as (..., B, C)."""
    _check_shards(x, blocks)
    return x.reshape(*x.shape[:-1], blocks.count, blocks.size)


def merge(x: jax.Array) -> jax.Array:
    """(..., B, C) as (..., N)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def reduce(x_BC: jax.Array, blocks: Blocks, *, op, neutral: float) -> jax.Array:
    """op over each group: (..., B, C) to (..., G); op is jnp.max or jnp.min.

    NaN counts as Inf: XLA:CPU drops NaN in the maximum of more than some 2000 elements.
    """
    stat_B = op(jnp.where(jnp.isnan(x_BC), jnp.inf, x_BC), axis=-1)
    if blocks.whole:
        return _fold_whole(stat_B, blocks, op=op, neutral=neutral)
    runs = _runs_of(blocks)
    stat_KMW = _in_runs(stat_B, blocks, neutral)
    in_first = _masks(blocks, stat_KMW.ndim)
    partial = lambda mask: _unsharded_runs(
        op(jnp.where(mask, stat_KMW, neutral), axis=-1)
    )
    begin = op(jnp.take(partial(in_first), runs.begin, axis=-1), axis=-1)
    enter = jnp.take(partial(~in_first), runs.enter, axis=-1)
    return _either(begin, runs.begins, enter, runs.enters, op, neutral)


def _either(begin_G, begins, enter_G, enters, op, neutral):
    """op of the two partial statistics of a group, where there are any."""
    rank = lambda mask: mask.reshape((1,) * (begin_G.ndim - 1) + mask.shape)
    begin_G = jnp.where(rank(begins), begin_G, neutral)
    enter_G = jnp.where(rank(enters), enter_G, neutral)
    return op(jnp.stack([begin_G, enter_G]), axis=0)


def _fold_whole(stat_B: jax.Array, blocks: Blocks, *, op, neutral: float) -> jax.Array:
    missing = blocks.groups * blocks.per_group - blocks.count
    if missing or _cuts_groups(stat_B, blocks.per_group):
        stat_B = _unsharded(stat_B)
    if missing:
        widths = [(0, 0)] * (stat_B.ndim - 1) + [(0, missing)]
        stat_B = jnp.pad(stat_B, widths, constant_values=neutral)
    shape = (*stat_B.shape[:-1], blocks.groups, blocks.per_group)
    return op(stat_B.reshape(shape), axis=-1)


def _in_runs(stat_B: jax.Array, blocks: Blocks, neutral: float) -> jax.Array:
    """(..., B) as (..., K, M, W), the short last runs filled with `neutral`."""
    local = blocks.count // blocks.chunks
    stat = stat_B.reshape(*stat_B.shape[:-1], blocks.chunks, local)
    missing = blocks.runs * blocks.width - local
    if missing:
        widths = [(0, 0)] * (stat.ndim - 1) + [(0, missing)]
        stat = jnp.pad(stat, widths, constant_values=neutral)
    return stat.reshape(*stat.shape[:-1], blocks.runs, blocks.width)


def _masks(blocks: Blocks, ndim: int) -> np.ndarray:
    """Which units lie in the group in which their run begins: (1..., K, M, W)."""
    cut = _runs_of(blocks).cut.reshape(blocks.chunks, blocks.runs, 1)
    mask = np.arange(blocks.width) < cut
    return mask.reshape((1,) * (ndim - 3) + mask.shape)


def spread(stat_G: jax.Array, blocks: Blocks) -> jax.Array:
    """A group's statistic beside each of its units: (..., G) to (..., B, 1)."""
    if blocks.whole:
        wide = jnp.broadcast_to(stat_G[..., None], (*stat_G.shape, blocks.per_group))
        return merge(wide)[..., : blocks.count, None]
    first = _runs_of(blocks).first
    groups_of = (first, np.minimum(first + 1, blocks.groups - 1))
    lead = stat_G.shape[:-1]
    begun, entered = (
        jnp.take(stat_G, g, axis=-1).reshape(*lead, blocks.chunks, blocks.runs, 1)
        for g in groups_of
    )
    wide = merge(jnp.where(_masks(blocks, begun.ndim), begun, entered))
    local = blocks.count // blocks.chunks
    return merge(wide[..., :local])[..., None]


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
    return _reshard(stat_G, x, stat_spec(spec, x.shape, mesh, group))


def _reshard(stat: jax.Array, x: jax.Array, spec) -> jax.Array:
    """stat over x's mesh, which need not be the one that `jax.set_mesh` has set."""
    sharding = x.sharding if not isinstance(x, Tracer) else None
    named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if named else jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(stat, NamedSharding(mesh, spec))


def _spec(x: jax.Array):
    """x's spec if its mesh has Explicit axes, where resharding is ours to say."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if explicit else None


def _shards(x: jax.Array) -> int:
    """Into how many parts the type of x says that its last axis is cut."""
    return x.shape[-1] // jax.typeof(x).sharding.shard_shape(x.shape)[-1]


def _check_shards(x: jax.Array, blocks: Blocks):
    uncut = blocks.count if blocks.per_group <= _FOLDED else blocks.chunks
    if x.size and _spec(x) is not None and uncut % _shards(x):
        raise NotImplementedError(
            "coat_jax: over Explicit mesh axes the grouped axis may be sharded over 2, "
            f"4, 8 or {MAX_SHARDS} devices, got {_shards(x)} for shape {x.shape}; "
            "shard another axis, or make the mesh with AxisType.Auto"
        )


def _cuts_groups(stat_B: jax.Array, per_group: int) -> bool:
    spec = _spec(stat_B)
    if spec is None or spec[-1] is None:
        return False
    return bool(stat_B.shape[-1] // _shards(stat_B) % per_group)


def _unsharded(stat_B: jax.Array) -> jax.Array:
    """Replicates the last axis where axes are Explicit; elsewhere the compiler does."""
    spec = _spec(stat_B)
    if spec is None or spec[-1] is None:
        return stat_B
    return _reshard(stat_B, stat_B, P(*spec[:-1], None))


def _unsharded_runs(stat_KM: jax.Array) -> jax.Array:
    """(..., K, M) as (..., K M), replicated where axes are Explicit."""
    spec = _spec(stat_KM)
    if spec is not None and spec[-2] is not None:
        stat_KM = _reshard(stat_KM, stat_KM, P(*spec[:-2], None, None))
    return merge(stat_KM)
