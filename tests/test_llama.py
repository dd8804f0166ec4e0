"""The decoder: its sizes, its mathematics against NumPy, and its injected layers."""

import dataclasses
import functools
import math
import operator

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

import coat_jax
from coat_jax import training
from coat_jax.models import llama
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.once

MICRO = llama.PRESETS["micro"]
# Published counts, or (micro to 125m) the sum of the shapes written out.
COUNTS = {
    "micro": 512 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 128) + 64,
    "tiny": 2048 * 128 + 2 * (2 * 128 * 192 + 3 * 128 * 384 + 256) + 128,
    "small": 8192 * 512 + 6 * (2 * 512 * 768 + 3 * 512 * 1408 + 1024) + 512,
    "125m": 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 1536) + 768,
    "1b": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


@pytest.fixture(scope="module")
def micro():
    """Parameters, tokens (2, 9) and float64 logits of the definition."""
    init = jax.jit(functools.partial(llama.init_params, MICRO))
    params = init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, MICRO.vocab)
    return params, tokens


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + MICRO.norm_eps) * scale


def turn(x):
    """RoPE as a product of complex numbers: pairs (i, i + D/2) as real, imaginary."""
    half = x.shape[-1] // 2
    rate = MICRO.rope_base ** (-np.arange(half) / half)
    angle = np.exp(1j * np.arange(x.shape[1])[:, None] * rate)[None, :, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * angle
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(q, k, v):
    """Causal attention, one query at a time."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeat, axis=2) for x in (k, v))
    out = np.zeros_like(q)
    for t in range(q.shape[1]):
        score = np.einsum("bnd,bsnd->bns", q[:, t], k[:, : t + 1])
        weight = np.exp(score / math.sqrt(q.shape[3]))
        weight /= weight.sum(axis=-1, keepdims=True)
        out[:, t] = np.einsum("bns,bsnd->bnd", weight, v[:, : t + 1])
    return out


def forward(params, tokens):
    """The model in NumPy float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table, blocks = params["embed"]["embedding"], params["blocks"]
    x = table[np.asarray(tokens)]
    heads = lambda y: y.reshape(*y.shape[:2], -1, MICRO.head_size)
    for layer in range(MICRO.layers):
        here = jax.tree.map(operator.itemgetter(layer), blocks)
        a, m = here["attention"], here["mlp"]
        h = rms_norm(x, a["norm"]["scale"])
        q, k, v = (heads(h @ a[name]["kernel"]) for name in "qkv")
        x = x + attend(turn(q), turn(k), v).reshape(x.shape) @ a["out"]["kernel"]
        h = rms_norm(x, m["norm"]["scale"])
        gate, up = h @ m["gate"]["kernel"], h @ m["up"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ m["down"]["kernel"]
    return rms_norm(x, params["norm"]["scale"]) @ table.T


@pytest.mark.parametrize("preset", llama.PRESETS)
def test_parameter_counts(preset):
    assert llama.count_params(llama.PRESETS[preset]) == COUNTS[preset]


def test_logits_are_those_of_numpy(micro):
    params, tokens = micro
    want = forward(params, tokens)
    # The longest chain of sums: every product of both layers and of the head.
    terms = MICRO.layers * (5 * MICRO.hidden + MICRO.ffn) + MICRO.hidden
    got = jax.jit(llama.make_apply(MICRO))(params, tokens)
    assert_reordered(got, want, terms, np.abs(want).max())


def test_loss_is_the_mean_cross_entropy_of_the_next_token(micro):
    params, tokens = micro
    logits = forward(params, tokens)[:, :-1]
    top = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)) + top
    chosen = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], axis=-1)
    got = jax.jit(llama.make_loss(MICRO))(params, tokens)
    assert got.dtype == np.float32
    want = (log_sum - chosen).mean()
    assert_reordered(got, want, MICRO.vocab, np.abs(log_sum).max())


def test_no_position_sees_a_later_one(micro):
    params, tokens = micro
    apply = jax.jit(llama.make_apply(MICRO))
    changed = tokens.at[:, 5].add(1)
    before, after = apply(params, tokens), apply(params, changed)
    assert_same_bits(after[:, :5], before[:, :5])
    assert np.all(np.any(after[:, 5:] != before[:, 5:], axis=-1))


def test_the_module_and_the_function_are_one_model(micro):
    _, tokens = micro
    model = llama.Llama(MICRO, rngs=nnx.Rngs(jax.random.key(0)))
    params = nnx.to_pure_dict(nnx.state(model))
    call = nnx.jit(lambda model, tokens: model(tokens))
    got = jax.jit(llama.make_apply(MICRO))(params, tokens)
    assert_same_bits(got, call(model, tokens))


def test_every_parameter_moves_the_loss(micro):
    params, tokens = micro
    grads = jax.jit(jax.grad(llama.make_loss(MICRO)))(params, tokens)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        layers = grad.reshape(MICRO.layers, -1) if "blocks" in str(path[0]) else grad
        moved = np.any(np.asarray(layers) != 0, axis=-1)
        assert np.all(moved), path


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_near_ln_vocab(tied):
    config = dataclasses.replace(llama.PRESETS["tiny"], tied=tied)
    params = jax.jit(lambda key: llama.init_params(config, key))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 65), 0, config.vocab)
    loss = jax.jit(llama.make_loss(config))(params, tokens)
    # Logits of spread 1/4 add (1/4)^2 / 2 = 0.03; a tenth of a nat leaves room for
    # 256 tokens.
    assert abs(float(loss) - math.log(config.vocab)) < 0.1


def test_rematerialising_changes_memory_only(micro):
    params, tokens = micro
    loss = llama.make_loss(dataclasses.replace(MICRO, remat=True))
    got = jax.jit(loss)(params, tokens)
    assert_same_bits(got, jax.jit(llama.make_loss(MICRO))(params, tokens))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, tokens))
    assert "remat" in jaxpr or "checkpoint" in jaxpr


def test_bfloat16_computes_with_float32_parameters(optax_promotion, micro):
    params, tokens = micro
    config = dataclasses.replace(MICRO, dtype=jnp.bfloat16)
    logits = jax.jit(llama.make_apply(config))(params, tokens)
    assert logits.dtype == jnp.bfloat16
    grads = jax.jit(jax.grad(llama.make_loss(config)))(params, tokens)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_bfloat16_parameters_are_stored_so():
    config = dataclasses.replace(MICRO, param_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: llama.init_params(config, jax.random.key(0)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"bfloat16"}


class DoubledLinear(nnx.Linear):
    """A replacement that can be told from the original."""

    def __call__(self, inputs, *args, **kwargs):
        return 2 * super().__call__(inputs, *args, **kwargs)


class NoMlp(llama.MlpBlock):
    """A block with the parameters of the original that adds nothing."""

    def __call__(self, x_BTH):
        return x_BTH


def test_injected_layers_are_the_ones_that_run(micro):
    params, tokens = micro
    doubled = llama.Layers(linear=DoubledLinear)
    kernels = lambda path, x: 2 * x if "kernel" in str(path[-1]) else x
    want = jax.tree_util.tree_map_with_path(kernels, params)
    got = jax.jit(llama.make_apply(MICRO, layers=doubled))(params, tokens)
    # Doubling is exact, so doubled kernels and doubled outputs are the same bits.
    assert_same_bits(got, jax.jit(llama.make_apply(MICRO))(want, tokens))


def test_an_injected_block_replaces_norm_and_all(micro):
    params, tokens = micro
    layers = llama.Layers(mlp=NoMlp)
    got = jax.jit(llama.make_apply(MICRO, layers=layers))(params, tokens)
    silent = jax.tree.map(jnp.zeros_like, params["blocks"]["mlp"])
    blocks = {**params["blocks"], "mlp": silent}
    silenced = {**params, "blocks": blocks}
    want = jax.jit(llama.make_apply(MICRO))(silenced, tokens)
    assert_reordered(got, want, MICRO.hidden, np.abs(want).max())


def test_compiling_does_not_grow_with_depth(micro):
    _, tokens = micro
    lines = []
    for layers in (2, 16):
        config = dataclasses.replace(MICRO, layers=layers)
        init = functools.partial(llama.init_params, config)
        params = jax.eval_shape(init, jax.random.key(0))
        lowered = jax.jit(jax.grad(llama.make_loss(config))).lower(params, tokens)
        lines.append(len(lowered.as_text().splitlines()))
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": 0}, "vocab must be at least 1, got 0"),
        ({"heads": 3}, "must be an even whole number .* got 64 / 3"),
        ({"hidden": 2, "heads": 2}, "must be an even whole number .* got 2 / 2"),
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads, got heads=4, kv_heads=3"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MICRO, **change)


def test_the_second_step_of_full_coat_compiles_nothing(optax_promotion):
    layers = llama.fp8_layers()
    loss, traces = llama.make_loss(MICRO, layers=layers), []

    def counted(params, batch, key):
        traces.append(None)
        return loss(params, batch, key)

    tx = coat_jax.fp8_adamw(1e-2)
    params = llama.init_params(MICRO, jax.random.key(0), layers=layers)
    state = training.init_state(params, tx, jax.random.key(1))
    step = training.make_train_step(counted, tx)
    windows = jax.random.randint(jax.random.key(2), (2, 17), 0, MICRO.vocab, jnp.int32)
    losses = []
    for _ in range(3):
        state, metrics = step(state, windows)
        losses.append(float(metrics["loss"]))
    assert len(traces) == 1
    assert losses[2] < losses[1] < losses[0]
