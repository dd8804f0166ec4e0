"""What the sharded optimizer step sends, holds and writes, compiled for eight H200s."""

import functools

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

from coat_jax import groups
from coat_jax.optimizer import fp8_adamw
from coat_jax.sharding import state_shardings
from tests.collectives import assert_only_statistics_travel, collectives

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPES = [(4096, 11008), (64, 1000), (64, 712)]


def _step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _compile(h200_compile, mesh, shape, spec):
    tx = fp8_adamw(1e-3)
    split = NamedSharding(mesh, spec)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)}
    shardings = state_shardings(tx, params)
    place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    state = jax.tree.map(place, jax.eval_shape(tx.init, params), shardings)
    return h200_compile(
        functools.partial(_step, tx),
        params,
        state,
        params,
        on=mesh,
        donate=(1, 2),
        out_shardings=({"w": split}, shardings),
    )


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_B14_only_statistics_travel(shape, explicit, h200_compile, h200_mesh):
    program = _compile(
        h200_compile, h200_mesh(8, explicit=explicit), shape, P(None, "x")
    )
    blocks = groups.blocks_of(shape[-1], 128)
    most = blocks.count if blocks.whole else 2 * blocks.chunks * blocks.runs
    assert most <= max(-(-shape[-1] // 16), 2 * groups.MAX_SHARDS)
    assert collectives(program.as_text()) != []  # groups are cut, so something must
    assert_only_statistics_travel(program.as_text(), shape[0], most)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_whole_groups_and_rows_send_nothing(explicit, h200_compile, h200_mesh):
    mesh = h200_mesh(8, explicit=explicit)
    for shape, spec in (((64, 2048), P(None, "x")), ((64, 1000), P("x", None))):
        program = _compile(h200_compile, mesh, shape, spec)
        assert collectives(program.as_text()) == []


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P(None, "x"), P("x", None)], ids=["last", "first"])
def test_a_llama_leaf_is_updated_in_place_and_locally(
    spec, explicit, h200_compile, h200_mesh
):
    """4096 x 11008 on eight devices; gathered moments would be 172 MiB each."""
    shape = (4096, 11008)
    local = shape[0] * shape[1] // 8
    memory = _compile(
        h200_compile, h200_mesh(8, explicit=explicit), shape, spec
    ).memory_analysis()
    statistics = 5 * shape[0] * (shape[1] // 128)  # amax and power of one moment
    # Where groups are cut the statistics are replicated.
    kept = 2 * (statistics if spec == P(None, "x") else statistics // 8)
    written = 6 * local + kept + 4
    assert written <= memory.output_size_in_bytes < written + 1024
    assert memory.alias_size_in_bytes >= written
    # Both moments in float32 and masks: 12.5 bytes an element by rows; statistics of
    # blocks come on top where groups are cut (14 to 16.4; jax 0.10.2).
    assert memory.temp_size_in_bytes < 17.5 * local
