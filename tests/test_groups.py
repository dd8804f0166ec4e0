"""Group statistics agree with NumPy for every cut, and no unit crosses a boundary."""

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import groups
from coat_jax.expand import expand_dequantize, expand_quantize
from coat_jax.quantize import dequantize, quantize
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.once

# One per way of cutting: a single group, whole groups, folded units, runs with and
# without short ends, odd lengths.
LENGTHS = [1, 2, 31, 96, 100, 127, 128, 129, 200, 320, 712, 1000, 1001, 1376, 2880]
GROUPS = [1, 3, 16, 100, 128]


def _slow(x, group, op):
    starts = range(0, x.shape[-1], group)
    return np.stack([op(x[..., s : s + group], axis=-1) for s in starts], axis=-1)


@pytest.mark.parametrize("n", LENGTHS)
def test_statistics_are_numpys(n):
    x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)

    @jax.jit
    def fast(x):
        out = {}
        for group in GROUPS:
            blocks = groups.blocks_of(n, group)
            x_BC = groups.split(x, blocks)
            most = groups.reduce(x_BC, blocks, op=jnp.max, neutral=-jnp.inf)
            least = groups.reduce(x_BC, blocks, op=jnp.min, neutral=jnp.inf)
            beside = groups.merge(
                jnp.broadcast_to(groups.spread(most, blocks), x_BC.shape)
            )
            out[group] = most, least, beside, groups.merge(x_BC)
        return out

    slow = {}
    for group in GROUPS:
        most = _slow(x, group, np.max)
        beside = np.repeat(most, group, axis=-1)[..., :n]
        slow[group] = most, _slow(x, group, np.min), beside, x
    assert_same_bits(fast(jnp.asarray(x)), slow)


@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 3, 4, 1000)], ids=str)
def test_any_rank_and_empty_rows(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    blocks = groups.blocks_of(shape[-1], 128)
    x_BC = groups.split(jnp.asarray(x), blocks)
    most = groups.reduce(x_BC, blocks, op=jnp.max, neutral=-jnp.inf)
    assert_same_bits(most, _slow(x, 128, np.max))


@pytest.mark.parametrize("n", [1000, 1376, 4096])
def test_a_nan_counts_as_infinite_in_its_group(n):
    """At every size: XLA:CPU loses the NaN if it is left to the maximum."""
    x = np.ones((4, n), np.float32)
    x[1, 130] = np.nan
    blocks = groups.blocks_of(n, 128)
    x_BC = groups.split(jnp.asarray(x), blocks)
    most = np.asarray(groups.reduce(x_BC, blocks, op=jnp.max, neutral=0.0))
    least = np.asarray(groups.reduce(x_BC, blocks, op=jnp.min, neutral=np.inf))
    want = np.ones_like(most)
    assert_same_bits(least, want)
    want[1, 1] = np.inf
    assert_same_bits(most, want)


@pytest.mark.parametrize("n", [1000, 4096])
def test_a_nan_makes_its_whole_group_nan(n):
    x = np.ones((4, n), np.float32)
    x[1, 130] = np.nan
    for encode, decode in (
        (quantize, dequantize),
        (expand_quantize, expand_dequantize),
    ):
        back = np.asarray(jax.jit(lambda x, e=encode, d=decode: d(e(x)))(x))
        want = np.zeros((4, n), bool)
        want[1, 128:256] = True
        np.testing.assert_array_equal(np.isnan(back), want)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 16, 64, 100, 128, 1024])
def test_no_unit_and_no_run_is_cut(group):
    for n in [*range(1, 700), 896, 1000, 2880, 11002, 11008, 50257, 50304, 151936]:
        blocks = groups.blocks_of(n, group)
        assert blocks.count * blocks.size == n
        assert blocks.groups == -(-n // group)
        assert blocks.count % blocks.chunks == 0
        assert n // blocks.chunks * blocks.chunks == n
        if n > group:
            assert group == blocks.size * blocks.per_group
        if not blocks.whole:
            _check_runs(blocks)


def _check_runs(blocks):
    """Every unit is counted once, in the group that NumPy finds it in."""
    runs = groups._runs_of(blocks)
    local = blocks.count // blocks.chunks
    seen = np.full((blocks.chunks, blocks.runs * blocks.width), -1)
    seen[:, :local] = np.arange(blocks.count).reshape(blocks.chunks, local)
    unit = seen.reshape(-1, blocks.width)  # (K M, W), -1 where filled up
    entered = np.arange(blocks.width) >= runs.cut[:, None]
    want = np.where(unit < 0, -1, unit // blocks.per_group)
    got = np.where(unit < 0, -1, runs.first[:, None] + entered)
    np.testing.assert_array_equal(got, want)
    for g in range(blocks.groups):
        begin = set(runs.begin[g].tolist()) if runs.begins[g] else set()
        enter = {int(runs.enter[g])} if runs.enters[g] else set()
        assert begin == set(np.flatnonzero(runs.first == g).tolist())
        assert enter == set(np.flatnonzero(((want == g) & entered).any(1)).tolist())


@pytest.mark.parametrize("n", [200, 320, 712, 896, 1000, 2880, 11002, 11008, 50304])
def test_few_statistics_travel(n):
    blocks = groups.blocks_of(n, 128)
    travelling = blocks.count if blocks.whole else 2 * blocks.chunks * blocks.runs
    most = 2 * groups.MAX_SHARDS * -(-n // (groups.MAX_SHARDS * 128))
    assert travelling <= max(-(-n // 16), most)
    assert travelling < n / 4


@pytest.mark.parametrize("n", [256, 1024, 1536, 11008, 28672])
@pytest.mark.parametrize("group", [16, 64, 100, 128])
def test_whole_groups_of_a_shard_are_folded_on_it(n, group):
    for shards in (2, 4, 8, 16):
        if n % (shards * group) == 0:
            blocks = groups.blocks_of(n, group)
            assert blocks.whole
            assert blocks.count % shards == 0


@pytest.mark.parametrize(
    ("spec", "shape", "want"),
    [
        (P(), (64, 1024), P(None, None)),
        (P("x"), (64, 1000), P("x", None)),
        (P("x", "y"), (64, 1024), P("x", "y")),
        (P(None, "x"), (64, 1024), P(None, "x")),
        (P(None, "x"), (64, 1000), P(None, None)),  # 500 a shard
        (P(None, ("x", "y")), (64, 1024), P(None, ("x", "y"))),
        (P(None, ("x", "y")), (64, 512), P(None, None)),  # 64 a shard
        (P(), (), P()),
    ],
)
def test_statistics_keep_the_last_axis_where_no_group_is_cut(spec, shape, want):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert groups.stat_spec(spec, shape, mesh, 128) == want


def test_explicit_shards_that_would_cut_chunks_are_refused():
    mesh = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.ones((2, 999), np.float32), NamedSharding(mesh, P(None, "x")))
    with pytest.raises(NotImplementedError, match=r"got 3 for shape \(2, 999\)"):
        groups.split(x, groups.blocks_of(999, 128))
