"""The encoder: the paper's sizes, its mathematics against NumPy, its layers."""

import dataclasses
import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import tensor_train, truncation
from coat_jax.models import encoder
from coat_jax.policy import BF16, DEFAULT
from coat_jax.train_tree import ranks, trains_of
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

MNLI, MICRO = encoder.PRESETS["mnli"], encoder.PRESETS["micro"]
QUIET = dataclasses.replace(MICRO, dropout=0.0)
TRAINS = encoder.tensor_train_layers(rank=4, embed_rank=4)


def tokens(B=3, T=9, seed=0, vocab=MICRO.vocab):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(T // 2, T + 1, (B, 1))
    ids = rng.integers(0, vocab, (B, T)).astype(np.int32)
    segments = (np.arange(T)[None] >= lengths // 2).astype(np.int32)
    return encoder.Tokens(*map(jnp.asarray, (ids, segments, np.arange(T) < lengths)))


@functools.cache
def made(layers=None, seed=0):
    make = lambda key: encoder.init_params(MICRO, key, layers=layers)
    return jax.jit(make)(jax.random.key(seed))


@functools.cache
def applied(layers=None):
    return jax.jit(encoder.make_apply(MICRO, layers=layers))


def shapes_of(layers):
    make = lambda: encoder.init_params(MNLI, jax.random.key(0), layers=layers)
    return jax.eval_shape(make)


# Sizes -------------------------------------------------------------------------------


def test_the_papers_counts():
    params = shapes_of(encoder.tensor_train_layers())
    trains = trains_of(params)
    sizes = {path: tensor_train.size(train) for path, train in trains.items()}
    block = {
        path[2:]: size for path, size in sizes.items() if path[:2] == ("blocks", 5)
    }
    assert block == {
        ("attention", "q"): 20_448,
        ("attention", "k"): 20_448,
        ("attention", "v"): 20_448,
        ("attention", "out"): 20_448,
        ("up",): 28_960,
        ("down",): 28_960,
    }
    assert (sizes["embed",], sizes["pool",]) == (167_808, 20_448)
    assert sum(sizes.values()) == 1_026_528
    diagonals = sum(v.size for train in trains.values() for v in train.diagonals)
    every = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert every - diagonals - 1_026_528 == 459_267
    assert encoder.count_params(MNLI) - 459_267 == 66_498_048


def test_the_papers_ranks():
    found = ranks(shapes_of(encoder.tensor_train_layers()))
    assert found["embed"] == (1, 32, 32, 32, 1)
    assert found["pool"] == (1, 12, 30, 30, 30, 12, 1)
    assert found["blocks/0/up"] == (1, 12, 30, 30, 30, 16, 1)
    assert found["blocks/0/down"] == (1, 16, 30, 30, 30, 12, 1)


def test_a_dense_table_is_an_option():
    params = shapes_of(encoder.tensor_train_layers(embed_rank=None))
    assert params["embed"]["embedding"].shape == (30522, 768)
    assert len(trains_of(params)) == 37


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"segments": 0}, "segments must be at least 1, got 0"),
        ({"heads": 3}, "hidden must be a multiple of heads, got 32 and 3"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
    ],
)
def test_wrong_sizes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MICRO, **change)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="at most 32 tokens, got 33"):
        encoder.make_apply(MICRO)(made(), tokens(T=33))


# Mathematics -------------------------------------------------------------------------


def numpy_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    std = np.sqrt((centred**2).mean(-1, keepdims=True) + MICRO.norm_eps)
    return centred / std * p["scale"] + p["bias"]


def numpy_linear(x, p):
    return x @ p["kernel"] + p["bias"]


def numpy_attention(x, p, mask, heads):
    split = lambda y: y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)
    q, k, v = (split(numpy_linear(x, p[name])) for name in "qkv")
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    logits = np.where(mask[:, None, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return numpy_linear(y, p["out"])


def numpy_encoder(params, batch):
    """The logits in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    ids, segments, mask = map(np.asarray, batch)
    gelu = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)
    x = p["embed"]["embedding"][ids] + p["segment"]["embedding"][segments]
    x = numpy_norm(x + p["position"]["embedding"][: ids.shape[1]], p["norm"])
    for block in p["blocks"].values():
        y = numpy_attention(x, block["attention"], mask, MICRO.heads)
        x = numpy_norm(x + y, block["attention_norm"])
        y = numpy_linear(gelu(numpy_linear(x, block["up"])), block["down"])
        x = numpy_norm(x + y, block["ffn_norm"])
    return numpy_linear(np.tanh(numpy_linear(x[:, 0], p["pool"])), p["head"])


def test_logits_and_loss_are_those_of_numpy():
    batch, labels = tokens(), jnp.array([0, 2, 1])
    want = numpy_encoder(made(), batch)
    assert_reordered(applied()(made(), batch), want, 200, 4)
    chosen = want[np.arange(3), np.asarray(labels)]
    nats = np.log(np.exp(want).sum(-1)) - chosen
    loss = jax.jit(encoder.make_loss(MICRO))(made(), (batch, labels))
    assert_reordered(loss, nats.mean(), 200, 4)


def test_padding_changes_nothing():
    batch, apply = tokens(), applied()
    pad = lambda x, value: jnp.pad(x, ((0, 0), (0, 5)), constant_values=value)
    wide = encoder.Tokens(pad(batch.ids, 7), pad(batch.segments, 1), pad(batch.mask, 0))
    assert_reordered(apply(made(), wide), apply(made(), batch), 200, 4)


@pytest.mark.parametrize("change", ["segments", "ids", "order"])
def test_what_should_matter_does(change):
    batch, apply = tokens(), applied()
    changed = {
        "segments": lambda: batch._replace(segments=1 - batch.segments),
        "ids": lambda: batch._replace(ids=batch.ids.at[:, 2].set(5)),
        "order": lambda: batch._replace(
            ids=batch.ids.at[:, 1:4].set(batch.ids[:, 3:0:-1])
        ),
    }[change]()
    moved = apply(made(), changed) - apply(made(), batch)
    assert float(jnp.abs(moved).max(axis=1).min()) > 1e-3


def test_dropout_is_of_the_key_alone():
    loss = jax.jit(encoder.make_loss(MICRO))
    batch = tokens(), jnp.array([0, 2, 1])
    run = lambda seed: loss(made(), batch, jax.random.key(seed))
    assert_same_bits(run(1), run(1))
    assert (
        len({float(run(seed)) for seed in range(3)} | {float(loss(made(), batch))}) == 4
    )
    quiet = jax.jit(encoder.make_loss(QUIET))
    assert_same_bits(quiet(made(), batch, jax.random.key(0)), quiet(made(), batch))


# Layers ------------------------------------------------------------------------------


def dense_of(params):
    """Dense parameters of the matrices that a model's trains are."""
    if not isinstance(params, dict):
        return params
    if "cores" not in params:
        return {name: dense_of(part) for name, part in params.items()}
    (train,) = trains_of(params).values()
    if train.cores[0].ndim == 4:
        return {"embedding": tensor_train.to_dense(train)[: MICRO.vocab]}
    inputs = len(train.cores) // 2
    kernel = tensor_train.to_dense(train, inputs=inputs)
    return {"kernel": kernel, "bias": params["bias"]}


def test_a_model_of_trains_is_the_model_of_their_matrices():
    params, batch = made(TRAINS), tokens()
    want = applied()(dense_of(params), batch)
    assert_reordered(applied(TRAINS)(params, batch), want, 400, 4)


def test_truncated_trains_go_through_the_same_model():
    dull = lambda path, p: p.at[1:].set(0.001) if path[-2].key == "diagonals" else p
    params = jax.tree_util.tree_map_with_path(dull, made(TRAINS))
    small = truncation.truncate(params).params
    assert ranks(small)["blocks/1/up"] == (1,) * 7
    got, want = (applied(TRAINS)(p, tokens()) for p in (small, params))
    assert_reordered(got, want, 400, 4)


def test_a_plain_policy_is_flax_bit_for_bit():
    batch, plain = tokens(), encoder.fp8_layers(BF16)
    assert_same_bits(made(plain), made())
    assert_same_bits(applied(plain)(made(), batch), applied()(made(), batch))


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "db"),
    [
        (encoder.fp8_layers, 20),
        (functools.partial(encoder.tensor_train_layers, rank=4, embed_rank=4), 17),
    ],
    ids=["dense", "trains"],
)
def test_fp8_layers_stay_near_and_have_gradients(make, db):
    plain, fp8 = make(policy=BF16), make(policy=DEFAULT)
    one = dataclasses.replace(QUIET, layers=1)
    params = encoder.init_params(one, jax.random.key(0), layers=plain)
    batch, key = (tokens(B=4), jnp.array([0, 2, 1, 0])), jax.random.key(3)
    grad = lambda layers: jax.jit(jax.grad(encoder.make_loss(one, layers=layers)))
    got, want = (grad(layers)(params, batch, key) for layers in (fp8, plain))
    assert_sqnr(got["pool"]["bias"], want["pool"]["bias"], db)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(got))
    assert any(not np.array_equal(*pair) for pair in zip(
        jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ))  # fmt: skip


def test_bfloat16_logits():
    half = dataclasses.replace(MICRO, dtype=jnp.bfloat16)
    got = jax.jit(encoder.make_apply(half))(made(), tokens())
    assert got.dtype == jnp.bfloat16
    assert_sqnr(got.astype(jnp.float32), numpy_encoder(made(), tokens()), 30)
