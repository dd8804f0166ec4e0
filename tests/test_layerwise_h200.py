"""A step a layer at a time, compiled for the H200: its bytes, and what is copied."""

import dataclasses
import re

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from coat_jax import fp8_adamw, state_shardings
from coat_jax.layerwise import layerwise_step
from coat_jax.models import llama
from coat_jax.policy import LEAN
from tests.collectives import collectives

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

GIB, TOKENS = 2**30, 2048
SMALL = llama.LlamaConfig(
    vocab=1024, hidden=1024, ffn=2816, layers=4, heads=8, kv_heads=8
)

TX = fp8_adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def parts_of(config, attention="cudnn"):
    narrow = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    config = dataclasses.replace(config, **narrow)
    layers = llama.fp8_layers(LEAN, implementation=attention)
    make = lambda: llama.init_params(config, jax.random.key(0), layers=layers)
    return llama.make_parts(config, layers=layers), jax.eval_shape(make)


def compiled(compile_for, parts, params, state, *, batch=1, split=None, **how):
    def step(params, state, windows):
        key = jax.random.fold_in(jax.random.key(1), state[0].count)
        return layerwise_step(parts, TX, windows, state, params, key=key)[::-1]

    shape = batch, TOKENS + 1
    windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
    return compile_for(step, params, state, windows, donate=(0, 1), **how)


def test_a_7B_step_fits_where_its_gradients_would_not(h200_compile):
    """One sequence of 2048 tokens: below 36 GiB, of which 25.6 are the state."""
    parts, params = parts_of(llama.PRESETS["llama2-7b"])
    program = compiled(h200_compile, parts, params, jax.eval_shape(TX.init, params))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 25.5 * GIB
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 30 * GIB


@pytest.fixture(scope="module")
def small(h200_compile):
    """Two programs, of 4 and of 8 layers."""
    with jax.numpy_dtype_promotion("standard"):
        found = []
        for layers in (4, 8):
            parts, params = parts_of(dataclasses.replace(SMALL, layers=layers))
            state = jax.eval_shape(TX.init, params)
            found.append((compiled(h200_compile, parts, params, state), params))
        return found


def test_another_layer_costs_what_it_keeps_and_no_gradient(small):
    (less, params), (more, _) = small
    grew = [m.memory_analysis().temp_size_in_bytes for m in (more, less)]
    a_layer = (grew[0] - grew[1]) / 4
    leaves = jax.tree.leaves(params["blocks"])
    gradient = sum(x.size // x.shape[0] * x.dtype.itemsize for x in leaves)
    # Codes: two norm inputs, q, k, v, gate and up, a byte an element, and their scales.
    codes = TOKENS * (5 * SMALL.hidden + 2 * SMALL.ffn)
    assert codes <= a_layer <= 1.1 * codes
    assert a_layer < gradient


def test_stacked_leaves_are_updated_where_they_are(small):
    program, params = small[0]
    text = program.as_text()
    kernels = re.findall(r"custom-call.*coat_adam", text)
    assert len(kernels) >= len(jax.tree.leaves(params["blocks"]))
    stacked = {p.shape for p in jax.tree.leaves(params["blocks"])}
    shapes = {",".join(map(str, shape)) for shape in stacked}
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert not shapes & {*copied}
    assert not shapes & {*re.findall(r"= \w+\[([\d,]+)\]\S* dynamic-update", text)}


@pytest.mark.soak
def test_over_devices_what_is_stacked_stays_where_it_is(h200_compile, h200_mesh):
    """FSDP: parameters and moments by rows, sequences by devices."""
    mesh = h200_mesh(8)
    parts, params = parts_of(SMALL, attention="xla")
    rows, whole, split = (
        NamedSharding(mesh, spec) for spec in (P(None, "x"), P(), P("x"))
    )
    put = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    place = lambda tree, to: jax.tree.map(lambda a: put(a, to), tree)
    params = {k: place(p, rows if k == "blocks" else whole) for k, p in params.items()}
    shardings = state_shardings(TX, params)
    state = jax.tree.map(put, jax.eval_shape(TX.init, params), shardings)
    how = {"batch": 8, "split": split, "on": mesh}
    text = compiled(h200_compile, parts, params, state, **how).as_text()
    travels = [found.shape for found in collectives(text)]
    assert travels
    assert not [s for s in travels if len(s) > 1 and s[0] == SMALL.layers]
    matrices = [p.shape for p in jax.tree.leaves(params["blocks"]) if p.ndim > 2]
    shards = {f"{L},{K // 8},{N}" for L, K, N in matrices}
    assert not shards & {
        *re.findall(r"= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    }
