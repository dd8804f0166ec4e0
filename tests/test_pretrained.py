"""Hugging Face's tensors and safetensors files: bits, names, settings, faults."""

import dataclasses
import functools
import json
import sys

import jax
from jax import numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from coat_jax.models import llama, pretrained
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.once

GQA = llama.LlamaConfig(
    vocab=32, hidden=48, ffn=40, layers=3, heads=6, kv_heads=2, rope_base=100.0
)  # untied, three query heads to each of k and v
MICRO = dataclasses.replace(llama.PRESETS["micro"], norm_eps=1e-6)
CONFIGS = {"tied": MICRO, "untied": GQA}


@functools.cache
def shapes(config):
    """Of the parameters, from the model itself."""
    return jax.eval_shape(lambda: llama.init_params(config, jax.random.key(0)))


def make_params(config, dtype=jnp.float32):
    """Random values in every leaf, norms too: a leaf in another's place is seen."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(dtype)
    return jax.tree.map(draw, shapes(config))


def settings(config):
    """The fields that a file carries: dtypes and remat are the caller's."""
    names = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads", "tied")
    return [getattr(config, name) for name in (*names, "rope_base", "norm_eps")]


@pytest.fixture(scope="module")
def tensors():
    return pretrained.to_huggingface(make_params(GQA), GQA)


# --- round trips


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_safetensors_give_back_every_bit(tmp_path, name, dtype):
    config, params = CONFIGS[name], make_params(CONFIGS[name], dtype)
    pretrained.save_safetensors(tmp_path / "new", params, config)
    read, got = pretrained.load_safetensors(tmp_path / "new", dtype=dtype)
    assert_same_bits(got, params)
    assert settings(read) == settings(config)
    assert read.param_dtype == jnp.dtype(dtype)


def test_arrays_of_jax_are_taken_as_they_are(tensors):
    params = jax.tree.map(jnp.asarray, make_params(GQA))
    assert_same_bits(pretrained.to_huggingface(params, GQA), tensors)


def test_shards_are_one_model(tmp_path, tensors):
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors_numpy.save_file({n: tensors[n] for n in part}, tmp_path / file)
    where = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert_same_bits(pretrained.load_safetensors(tmp_path)[1], make_params(GQA))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b.safetensors must be a safetensors file"):
        pretrained.load_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../a.safetensors"}}))
    with pytest.raises(ValueError, match=r"own folder only, got \.\./a.safetensors"):
        pretrained.load_safetensors(tmp_path)


def test_one_file_is_enough(tmp_path, tensors):
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
    path = (tmp_path / "model.safetensors").rename(tmp_path / "w.safetensors")
    assert_same_bits(pretrained.load_safetensors(path)[1], make_params(GQA))


# --- what others read and write


def test_a_published_model_would_be_read_so(tmp_path):
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA, context=99)
    values = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 32,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 99,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    assert {name: values.get(name) for name in wanted} == wanted
    stored = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    block = {
        "input_layernorm": (48,),
        "self_attn.q_proj": (48, 48),
        "self_attn.k_proj": (16, 48),
        "self_attn.v_proj": (16, 48),
        "self_attn.o_proj": (48, 48),
        "post_attention_layernorm": (48,),
        "mlp.gate_proj": (40, 48),
        "mlp.up_proj": (40, 48),
        "mlp.down_proj": (48, 40),
    }
    wanted = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(3)
        for name, shape in block.items()
    }
    wanted |= {"model.embed_tokens.weight": (32, 48), "model.norm.weight": (48,)}
    wanted |= {"lm_head.weight": (32, 48)}
    assert {name: x.shape for name, x in stored.items()} == wanted


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    """The file is written here, byte by byte, from 16-bit integers."""
    bits = np.random.default_rng(1).integers(0, 0x7F80, 10_000).astype("<u2")
    pretrained.save_safetensors(tmp_path, make_params(GQA, jnp.bfloat16), GQA)
    path, header, data = tmp_path / "model.safetensors", {}, b""
    for name, x in pretrained.to_huggingface(make_params(GQA), GQA).items():
        part = bits[: x.size].tobytes()
        span = [len(data), len(data) + len(part)]
        header[name] = {"dtype": "BF16", "shape": x.shape, "data_offsets": span}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    _, params = pretrained.load_safetensors(path)
    wide = bits.astype(np.uint32) << 16
    table = params["embed"]["embedding"]
    assert_same_bits(table, wide[: table.size].view(np.float32).reshape(table.shape))


def test_old_buffers_and_a_tied_head_are_passed_over():
    tensors = pretrained.to_huggingface(make_params(MICRO), MICRO)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    got = pretrained.from_huggingface(tensors | more, MICRO)
    assert_same_bits(got, make_params(MICRO))
    more["lm_head.weight"][3, 5] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding"):
        pretrained.from_huggingface(tensors | more, MICRO)


# --- what is refused, in a sentence


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: without(t, "model.norm.weight"), ValueError,
         "from_huggingface: .* lacking: model.norm.weight; give"),
        (lambda t: t | {"model.norm.bias": t["model.norm.weight"]}, ValueError,
         "unexpected: model.norm.bias"),
        (lambda t: {}, ValueError, "lacking: lm_head.weight, .* and 26 more"),
        (lambda t: t | {"model.norm.weight": np.ones(47, np.float32)}, ValueError,
         r"model.norm.weight must have the shape \(48,\) .* got \(47,\)"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"].T}, ValueError,
         r"lm_head.weight must have the shape \(32, 48\) .* got \(48, 32\)"),
        (lambda t: t | {"model.norm.weight": np.ones(48, np.int8)}, TypeError,
         "model.norm.weight must be float32, bfloat16 or float16, got int8"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(tensors, change, error, words):
    with pytest.raises(error, match=words):
        pretrained.from_huggingface(change(tensors), GQA)


def test_weights_are_never_quantised_on_the_way(tensors):
    with pytest.raises(TypeError, match="from_huggingface: dtype must be float32"):
        pretrained.from_huggingface(tensors, GQA, dtype=jnp.int8)


def test_parameters_of_another_model_are_not_written(tmp_path):
    other = dataclasses.replace(GQA, ffn=41)
    with pytest.raises(
        ValueError, match=r"blocks/mlp/down/kernel has the shape \(3, 40"
    ):
        pretrained.save_safetensors(tmp_path, make_params(GQA), other)
    tied = dataclasses.replace(GQA, tied=True)
    with pytest.raises(ValueError, match=r"head/kernel has .* want None \(1 such\)"):
        pretrained.to_huggingface(make_params(GQA), tied)
    whole = jax.tree.map(lambda x: x.astype(np.int32), make_params(GQA))
    with pytest.raises(TypeError, match=r"to_huggingface: dtype must be .* got int32"):
        pretrained.to_huggingface(whole, GQA)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "gemma"}, NotImplementedError, "model_type must be 'llama'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias must be False"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act must be 'silu'"),
        ({"head_dim": 16}, NotImplementedError, "head_dim must be 8 .* got 16"),
        ({"rope_scaling": {"rope_type": "llama3"}}, NotImplementedError,
         "kind of RoPE must be 'default' .* got 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, NotImplementedError, "got 'linear'"),
        ({"vocab_size": None}, ValueError, "settings must give .* lack vocab_size"),
        ({"num_hidden_layers": 2}, ValueError, "unexpected: model.layers.2"),
    ],
)  # fmt: skip
def test_other_models_are_refused(tmp_path, change, error, words):
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(error, match=words):
        pretrained.load_safetensors(tmp_path)


def test_newer_and_older_settings_are_read(tmp_path):
    pretrained.save_safetensors(tmp_path, make_params(MICRO), MICRO)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    theta = values.pop("rope_theta")
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 5 * theta}
    values |= {"rope_scaling": None, "head_dim": 32}
    path.write_text(json.dumps(values))
    assert pretrained.load_safetensors(tmp_path)[0].rope_base == 5 * theta
    # Before grouped-query attention there was no such field, nor a base other than 1e4.
    old = {"rope_parameters", "rope_scaling", "head_dim", "num_key_value_heads"}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in old}))
    with pytest.raises(ValueError, match=r"k_proj.weight must have the shape \(64, 64"):
        pretrained.load_safetensors(tmp_path)


def test_damaged_and_quantised_files_are_named(tmp_path, tensors):
    with pytest.raises(ValueError, match=r"config.json must be a file of JSON"):
        pretrained.load_safetensors(tmp_path)
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors"):
        pretrained.load_safetensors(tmp_path)
    path.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    with pytest.raises(TypeError, match="must be BF16, F16, F32, got I32 for lm_head"):
        pretrained.load_safetensors(tmp_path)
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pickles, \*.bin, aren't read"):
        pretrained.load_safetensors(tmp_path)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    words = r"needs the package safetensors; .*coat-jax\[pretrained\]"
    with pytest.raises(ImportError, match="load_safetensors " + words):
        pretrained.load_safetensors(tmp_path)
    with pytest.raises(ImportError, match="save_safetensors " + words):
        pretrained.save_safetensors(tmp_path, make_params(GQA), GQA)
