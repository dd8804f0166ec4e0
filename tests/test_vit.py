"""The vision transformer: its sizes, its mathematics against NumPy, its layers."""

import dataclasses
import functools
import math
import operator

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import policy as policies
from coat_jax.models import vit
from tests.helpers import assert_reordered, assert_sqnr

pytestmark = pytest.mark.once

MICRO = vit.PRESETS["micro"]
# Compiling takes most of the time here, and no speed is wanted of what is compiled.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
CLS = dataclasses.replace(MICRO, pool="cls")
POOLS = {"mean": MICRO, "cls": CLS}


@pytest.fixture(scope="module")
def batch():
    """Images (3, 28, 28, 1) and their labels."""
    images = jax.random.normal(jax.random.key(1), (3, 28, 28, 1))
    return images, jnp.array([0, 3, 9])


@pytest.fixture(scope="module")
def vit_params():
    """Of the micro preset with a class token; without one, cls is left unread."""
    return quick_jit(functools.partial(vit.init_params, CLS))(jax.random.key(0))


def without_cls(params):
    """Those of the micro preset itself."""
    rows = {"position": params["position"][1:]}
    return {k: v for k, v in params.items() if k != "cls"} | rows


def count(c: vit.ViTConfig) -> int:
    """The sum of the shapes, written out."""
    maps = 4 * (c.hidden**2 + c.hidden) + 2 * c.hidden * c.ffn + c.ffn + c.hidden
    ends = (c.patch**2 * c.channels + 1) * c.hidden + (c.hidden + 1) * c.classes
    cls = c.hidden * (c.pool == "cls")
    norms = (2 * c.layers + 1) * 2 * c.hidden
    return c.layers * maps + ends + norms + c.tokens * c.hidden + cls


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def linear(x, p, axes=1):
    return np.tensordot(x, p["kernel"], axes) + p["bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, p):
    h = layer_norm(x, p["norm"])
    q, k, v = (linear(h, p[name]) for name in "qkv")
    score = np.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
    weight = np.exp(score)
    weight /= weight.sum(axis=-1, keepdims=True)
    return linear(np.einsum("bnts,bsnd->btnd", weight, v), p["out"], axes=2)


def forward(params, images, config):
    """The model in NumPy float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    side, p = config.side, config.patch
    cuts = [
        np.asarray(images, np.float64)[:, r : r + p, c : c + p].reshape(len(images), -1)
        for r in range(0, side, p)
        for c in range(0, side, p)
    ]
    x = linear(np.stack(cuts, axis=1), params["embed"])
    if config.pool == "cls":
        first = np.broadcast_to(params["cls"], (len(x), 1, x.shape[-1]))
        x = np.concatenate([first, x], axis=1)
    x = x + params["position"]
    for layer in range(config.layers):
        here = jax.tree.map(operator.itemgetter(layer), params["blocks"])
        x = x + attention(x, here["attention"])
        m = here["mlp"]
        x = x + linear(gelu(linear(layer_norm(x, m["norm"]), m["up"])), m["down"])
    x = layer_norm(x, params["norm"])
    x = x[:, 0] if config.pool == "cls" else x.mean(axis=1)
    return linear(x, params["head"])


@pytest.mark.parametrize("preset", vit.PRESETS)
def test_parameter_counts(preset):
    config = vit.PRESETS[preset]
    assert vit.count_params(config) == count(config)


def test_published_parameter_counts():
    assert count(vit.PRESETS["s16"]) == 22_050_664
    assert count(vit.PRESETS["b16"]) == 86_567_656


@pytest.mark.parametrize("config", POOLS.values(), ids=POOLS)
def test_logits_are_those_of_numpy(config, vit_params, batch):
    params = vit_params if config.pool == "cls" else without_cls(vit_params)
    # Norms and biases start as ones and zeros, which many a mistake would hide behind.
    noise = lambda path, x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)
    params = jax.tree_util.tree_map_with_path(noise, params)
    want = forward(params, batch[0], config)
    terms = config.layers * (5 * config.hidden + config.ffn) + config.patch**2
    got = quick_jit(vit.make_apply(config))(params, batch[0])
    assert_reordered(got, want, terms, np.abs(want).max())


def test_compressed_layers_take_the_same_parameters(vit_params, batch):
    params = without_cls(vit_params)
    grad = lambda layers: jax.value_and_grad(vit.make_loss(MICRO, layers=layers))
    traced = lambda layers: str(jax.make_jaxpr(grad(layers))(params, batch))
    assert traced(vit.fp8_layers(policies.BF16)) == traced(None)
    want = quick_jit(grad(None))(params, batch)
    value, grads = quick_jit(grad(vit.fp8_layers()))(params, batch)
    assert_sqnr(value, want[0], 40)
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    assert assert_sqnr(flat(grads), flat(want[1]), 15) < 60  # it did round
    assert abs(float(want[0]) - math.log(MICRO.classes)) < 0.2  # as of guessing


def kept_bytes(config, layers, batch):
    """What the loss hands to its backward, float32 of the batch's size apart."""
    loss = vit.make_loss(config, layers=layers)
    params = jax.eval_shape(lambda: vit.init_params(config, jax.random.key(0)))
    pull = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, batch), p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def test_compressed_layers_keep_less(batch):
    config = dataclasses.replace(MICRO, layers=8, dtype=jnp.bfloat16)
    many = tuple(jnp.concatenate([x] * 16) for x in batch)
    plain, fp8 = (kept_bytes(config, x, many) for x in (None, vit.fp8_layers()))
    assert fp8 < plain / 3


def test_recomputing_is_asked_for_where_it_is_wanted(vit_params, batch):
    trace = lambda c: str(jax.make_jaxpr(jax.grad(vit.make_loss(c)))(vit_params, batch))
    is_asked = lambda text: "remat" in text or "checkpoint" in text
    assert not is_asked(trace(CLS))
    assert is_asked(trace(dataclasses.replace(CLS, remat=True)))


def test_bfloat16_computes_with_float32_parameters(batch):
    config = dataclasses.replace(CLS, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: vit.init_params(config, jax.random.key(0)))
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
    logits = jax.eval_shape(vit.make_apply(config), shapes, batch[0])
    assert logits.dtype == jnp.bfloat16
    grads = jax.eval_shape(jax.grad(vit.make_loss(config)), shapes, batch)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"patch": 5}, "side must be a multiple of patch, got 28 and 5"),
        ({"heads": 3}, "hidden must be a multiple of heads, got 32 and 3"),
        ({"pool": "max"}, "pool must be mean or cls, got 'max'"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MICRO, **change)
