"""OLMo: its published sizes, its mathematics against NumPy, its layers."""

import dataclasses
import functools
import math
import operator

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import policy as policies
from coat_jax.models import llama, olmo
from tests.helpers import assert_reordered, assert_sqnr

pytestmark = pytest.mark.once

MICRO = olmo.PRESETS["micro"]
# Compiling takes most of the time here, and no speed is wanted of what is compiled.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
# Published counts, or the sum of the shapes written out.
COUNTS = {
    "micro": 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128),
    "1b": 1_176_764_416,
    "7b": 6_888_095_744,
}


@pytest.fixture(scope="module")
def micro():
    """Parameters and tokens (2, 9)."""
    init = quick_jit(functools.partial(olmo.init_params, MICRO))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, MICRO.vocab)
    return init(jax.random.key(0)), tokens


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def turn(x):
    """RoPE as a product of complex numbers: pairs (i, i + D/2) as real, imaginary."""
    half = x.shape[-1] // 2
    rate = 1e4 ** (-np.arange(half) / half)
    angle = np.exp(1j * np.arange(x.shape[1])[:, None] * rate)[None, :, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * angle
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(q, k, v):
    score = np.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
    score += np.where(np.tri(q.shape[1], dtype=bool), 0, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnd->btnd", weight, v)


def forward(params, tokens):
    """The model in NumPy float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table = params["embed"]["embedding"]
    x = table[np.asarray(tokens)]
    heads = lambda y: y.reshape(*y.shape[:2], MICRO.heads, -1)
    for layer in range(MICRO.layers):
        here = jax.tree.map(operator.itemgetter(layer), params["blocks"])
        a, m = here["attention"], here["mlp"]
        h = layer_norm(x)
        q, k, v = (heads(h @ a[name]["kernel"]) for name in "qkv")
        o = attend(turn(q), turn(k), v)
        x = x + o.reshape(x.shape) @ a["out"]["kernel"]
        h = layer_norm(x)
        gate, up = h @ m["gate"]["kernel"], h @ m["up"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ m["down"]["kernel"]
    return layer_norm(x) @ table.T


@pytest.mark.parametrize("preset", olmo.PRESETS)
def test_parameter_counts(preset):
    assert olmo.count_params(olmo.PRESETS[preset]) == COUNTS[preset]


def test_logits_are_those_of_numpy(micro):
    params, tokens = micro
    want = forward(params, tokens)
    terms = MICRO.layers * (5 * MICRO.hidden + MICRO.ffn) + MICRO.hidden
    got = quick_jit(olmo.make_apply(MICRO))(params, tokens)
    assert_reordered(got, want, terms, np.abs(want).max())


def test_no_norm_has_a_parameter_and_no_map_a_bias(micro):
    params, _ = micro
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)]
    assert not [p for p in paths if "norm" in p or "bias" in p]
    untied = dataclasses.replace(MICRO, tied=False)
    shapes = jax.eval_shape(lambda: olmo.init_params(untied, jax.random.key(0)))
    assert jax.tree.leaves(shapes["head"])[0].shape == (MICRO.hidden, MICRO.vocab)


def test_compressed_layers_take_the_same_parameters(micro):
    grad = lambda layers: jax.value_and_grad(olmo.make_loss(MICRO, layers=layers))
    traced = lambda layers: str(jax.make_jaxpr(grad(layers))(*micro))
    assert traced(olmo.fp8_layers(policies.BF16)) == traced(None)
    want = quick_jit(grad(None))(*micro)
    value, grads = quick_jit(grad(olmo.fp8_layers()))(*micro)
    assert_sqnr(value, want[0], 40)
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    assert assert_sqnr(flat(grads), flat(want[1]), 15) < 60  # it did round
    assert abs(float(want[0]) - math.log(MICRO.vocab)) < 0.2  # as of guessing


def test_layers_of_llama_are_refused(micro):
    with pytest.raises(TypeError, match=r"olmo.Layers, .* got .*llama.Layers; use"):
        olmo.make_loss(MICRO, layers=llama.Layers())
