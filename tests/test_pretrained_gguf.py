"""GGUF files: bits, the order of rows against a decoder in NumPy, blocks, faults."""

import dataclasses
import math
import sys

import gguf
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.models import llama, pretrained
from coat_jax.models.pretrained import gguf_file
from tests.helpers import assert_reordered, assert_same_bits
from tests.test_pretrained import CONFIGS, GQA, make_params, settings, without

pytestmark = pytest.mark.once


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_gives_back_every_bit(tmp_path, name, dtype):
    config, params = CONFIGS[name], make_params(CONFIGS[name], dtype)
    pretrained.save_gguf(tmp_path / "m.gguf", params, config)
    read, got, tokenizer = pretrained.load_gguf(tmp_path / "m.gguf", dtype=dtype)
    assert_same_bits(got, params)
    assert settings(read) == settings(config)
    assert tokenizer == {}


def test_a_tokenizer_travels_with_its_model(tmp_path):
    pieces = {
        "ggml.model": "gpt2",
        "ggml.tokens": ["a", "é", "ab"],
        "ggml.token_type": [1, 3, 1],
        "ggml.scores": [0.5, -1.0, 0.0],
        "ggml.eos_token_id": 2,
        "ggml.add_bos_token": False,
    }
    path = tmp_path / "m.gguf"
    pretrained.save_gguf(path, make_params(GQA), GQA, tokenizer=pieces)
    assert pretrained.load_gguf(path)[2] == pieces
    with pytest.raises(TypeError, match=r"tokenizer's ggml.eos must be .* got tuple"):
        pretrained.save_gguf(
            path, make_params(GQA), GQA, tokenizer={"ggml.eos": (1, 2)}
        )


# --- the order of rows: a decoder in NumPy float64, of GGUF's tensors as they are


def neighbours_turned(x):
    """RoPE of (T, heads, D): neighbours as real and imaginary parts."""
    T, _, D = x.shape
    rate = GQA.rope_base ** (-np.arange(D // 2) / (D // 2))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(
        1j * np.arange(T)[:, None] * rate
    )[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + GQA.norm_eps) * scale


def attend(q, k, v):
    """(T, heads, D), each key and value head for three query heads, causal."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    score = np.einsum("tnd,snd->nts", q, k) / math.sqrt(q.shape[2])
    score[:, *np.triu_indices(len(q), 1)] = -np.inf
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    return np.einsum("nts,snd->tnd", weight, v).reshape(len(q), -1)


def forward(w, tokens):
    x = w["token_embd.weight"][tokens]
    heads = lambda y: y.reshape(len(tokens), -1, 8)
    for i in range(GQA.layers):
        at = lambda name, i=i: w[f"blk.{i}.{name}.weight"]
        h = rms_norm(x, at("attn_norm"))
        q, k, v = (heads(h @ at(f"attn_{name}").T) for name in "qkv")
        o = attend(neighbours_turned(q), neighbours_turned(k), v)
        x = x + o @ at("attn_output").T
        h = rms_norm(x, at("ffn_norm"))
        gate, up = h @ at("ffn_gate").T, h @ at("ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at("ffn_down").T
    return rms_norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def gguf_tensors(config, scale=0.2):
    """Tensors under GGUF's names, made here: nothing of the library had its hand in."""
    rng, H, F, K = np.random.default_rng(2), config.hidden, config.ffn, 16
    block = {
        "attn_norm": (H,), "attn_q": (H, H), "attn_k": (K, H), "attn_v": (K, H),
        "attn_output": (H, H), "ffn_norm": (H,), "ffn_gate": (F, H), "ffn_up": (F, H),
        "ffn_down": (H, F),
    }  # fmt: skip
    shapes = {f"blk.{i}.{n}": s for i in range(config.layers) for n, s in block.items()}
    shapes |= {"token_embd": (config.vocab, H), "output_norm": (H,)}
    shapes |= {"output": (config.vocab, H)}
    return {
        f"{name}.weight": (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path, tensors, *, config=GQA, architecture="llama", quantized=(), **more
):
    """A file by the gguf package alone; `more` are further settings, "_" for "."."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, value in more.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    for name, x in tensors.items():
        kind = dict(quantized).get(name)
        data = x if kind is None else gguf.quantize(x, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rows_of_q_and_k_come_in_our_order(tmp_path):
    tensors = gguf_tensors(GQA)
    write_gguf(tmp_path / "m.gguf", tensors)
    config, params, _ = pretrained.load_gguf(tmp_path / "m.gguf")
    tokens = np.random.default_rng(3).integers(0, GQA.vocab, 11)
    want = forward({k: v.astype(np.float64) for k, v in tensors.items()}, tokens)
    apply = jax.jit(llama.make_apply(config))
    # The longest chain of sums: every product of all layers and of the head.
    terms = GQA.layers * (5 * GQA.hidden + GQA.ffn) + GQA.hidden
    bound = {"n": terms, "scale": np.abs(want).max()}
    assert_reordered(apply(params, tokens[None])[0], want, **bound)
    forgotten = jax.tree.map(np.copy, params)
    for name, heads in (("q", GQA.heads), ("k", GQA.kv_heads)):
        kernels = forgotten["blocks"]["attention"][name]["kernel"]
        for i, kernel in enumerate(kernels):
            kernels[i] = gguf_file.neighbours_from_halves(kernel.T, heads).T
    with pytest.raises(AssertionError, match="off by more than their bound"):
        assert_reordered(apply(forgotten, tokens[None])[0], want, **bound)


def test_rows_go_back_to_their_order(tmp_path):
    tensors = gguf_tensors(GQA)
    write_gguf(tmp_path / "a.gguf", tensors)
    config, params, _ = pretrained.load_gguf(tmp_path / "a.gguf")
    pretrained.save_gguf(tmp_path / "b.gguf", params, config)
    found = {
        t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "b.gguf").tensors
    }
    assert_same_bits(found, tensors)


def test_quantised_blocks_are_read_as_their_format_says(tmp_path):
    """Q4_1: a scale and a minimum in float16, then 32 values of 4 bits, low ones first.

    Q8_0: a scale in float16, then 32 int8.
    """
    config = dataclasses.replace(GQA, hidden=96, heads=12)
    tensors = gguf_tensors(config)
    kinds = gguf.GGMLQuantizationType
    quantized = {
        "blk.2.attn_output.weight": kinds.Q4_1, "output.weight": kinds.Q8_0,
    }  # fmt: skip
    raw = {k: gguf.quantize(tensors[k], q).reshape(-1) for k, q in quantized.items()}
    write_gguf(tmp_path / "m.gguf", tensors, config=config, quantized=quantized)
    _, params, _ = pretrained.load_gguf(tmp_path / "m.gguf")
    blocks = raw["blk.2.attn_output.weight"].reshape(-1, 20)
    scale, low = (blocks[:, i : i + 2].copy().view("<f2") for i in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    want = scale.astype(np.float32) * codes.astype(np.float32) + low.astype(np.float32)
    got = params["blocks"]["attention"]["out"]["kernel"][2].T
    assert_same_bits(got, want.reshape(96, 96))
    blocks = raw["output.weight"].reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    want = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    assert_same_bits(params["head"]["kernel"].T, want.reshape(32, 96))


# --- what is refused, in a sentence


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"architecture": "gemma"}, NotImplementedError, "must be 'llama'"),
        ({"llama__rope__scaling__type": "yarn"}, NotImplementedError, "got 'yarn'"),
        ({"llama__rope__dimension_count": 4}, NotImplementedError, "must be 8 .* 4"),
        ({"llama__expert_count": 8}, NotImplementedError, "expert_count must be 0"),
    ],
)
def test_other_models_in_gguf_are_refused(tmp_path, more, error, words):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(GQA), **more)
    with pytest.raises(error, match=words):
        pretrained.load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: without(t, "blk.1.ffn_up.weight"),
         "lacking: model.layers.1.mlp.up_proj.weight"),
        (lambda t: without(t, "token_embd.weight"), "must hold token_embd.weight"),
        (lambda t: t | {"rope_freqs.weight": np.ones(4, np.float32)},
         "unexpected: rope_freqs.weight"),
        (lambda t: t | {"blk.0.attn_q.weight": np.ones((46, 48), np.float32)},
         r"6 heads of an even size, got a weight of shape \(46, 48\)"),
    ],
)  # fmt: skip
def test_wrong_tensors_in_gguf_are_named(tmp_path, change, words):
    write_gguf(tmp_path / "m.gguf", change(gguf_tensors(GQA)))
    with pytest.raises(ValueError, match=words):
        pretrained.load_gguf(tmp_path / "m.gguf")


def test_damaged_gguf_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"m.gguf must be a whole GGUF file"):
        pretrained.load_gguf(path)
    write_gguf(path, gguf_tensors(GQA))
    whole = path.read_bytes()
    for part in (whole[:100], whole[: len(whole) // 2], b"PK" + whole[2:]):
        path.write_bytes(part)
        with pytest.raises(ValueError, match=r"m.gguf must be a whole GGUF file"):
            pretrained.load_gguf(path)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    words = r"needs the package gguf; .*coat-jax\[pretrained\]"
    with pytest.raises(ImportError, match="load_gguf " + words):
        pretrained.load_gguf(tmp_path / "m.gguf")
    with pytest.raises(ImportError, match="save_gguf " + words):
        pretrained.save_gguf(tmp_path / "m.gguf", make_params(GQA), GQA)
