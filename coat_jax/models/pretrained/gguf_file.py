"""Llama models as llama.cpp keeps them: one GGUF file, with its tokenizer inside.

GGUF has names of its own and one more difference: its RoPE turns neighbours (2i, 2i+1)
where ours turns halves (i, i + D/2), so the rows of q and k lie in another order inside
each head. An import that forgets it fits every shape, runs, and is only worse.
"""

from collections.abc import Callable, Mapping
import functools
import pathlib
from typing import Any

from jax import numpy as jnp
import numpy as np

from coat_jax.models import llama
from coat_jax.models.pretrained.tensors import (
    Lazy,
    from_huggingface,
    missing_package,
    require_dtype,
    require_plain,
    sizes_of,
    to_huggingface,
)

# Parts of a tensor's name here, and in Hugging Face's checkpoints.
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "hidden": "llama.embedding_length",
    "ffn": "llama.feed_forward_length",
    "layers": "llama.block_count",
    "heads": "llama.attention.head_count",
}
_TOKENIZER = "tokenizer."


def _names(config: llama.LlamaConfig) -> dict[str, str]:
    """Hugging Face's name of a tensor by its name in GGUF."""
    names = {f"{here}.weight": f"{there}.weight" for here, there in _TOP.items()}
    for i in range(config.layers):
        for here, there in _BLOCK.items():
            names[f"blk.{i}.{here}.weight"] = f"model.layers.{i}.{there}.weight"
    return names


def _heads(name: str, config: llama.LlamaConfig) -> int | None:
    """How many heads the rows of a tensor belong to, if RoPE turns them."""
    if "self_attn.q_proj" in name:
        return config.heads
    return config.kv_heads if "self_attn.k_proj" in name else None


def _turned_rows(weight: np.ndarray, heads: int) -> tuple[int, ...]:
    """The shape of a weight whose rows are `heads` heads of an even size."""
    if weight.ndim != 2 or weight.shape[0] % (2 * heads):
        raise ValueError(
            f"the rows of q or k must be {heads} heads of an even size, got a weight "
            f"of shape {weight.shape}; check the file's numbers of heads"
        )
    return weight.shape


def halves_from_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered: 2i to i, and 2i + 1 to i + D/2.

    Args:
      weight: (heads * D, in).
      heads: how many heads the rows belong to.

    Returns:
      The same rows, as our RoPE expects them.

    Example:
      >>> halves_from_neighbours(np.arange(4)[:, None], 1)[:, 0].tolist()
      [0, 2, 1, 3]
    """
    rows, columns = _turned_rows(weight, heads)
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def neighbours_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of `halves_from_neighbours`.

    Example:
      >>> neighbours_from_halves(np.arange(6)[:, None], 1)[:, 0].tolist()
      [0, 3, 1, 4, 2, 5]
    """
    rows, columns = _turned_rows(weight, heads)
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _open(path: pathlib.Path):
    """The reader of a file, which stays mapped, not read."""
    try:
        import gguf
    except ImportError:
        raise missing_package("load_gguf", "gguf") from None
    try:
        return gguf.GGUFReader(path)
    # The reader indexes into the file as it finds it: a short one is an IndexError.
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"load_gguf: {path} must be a whole GGUF file, got "
            f"{type(error).__name__}: {error}"
        ) from None


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _config_of(fields: Mapping[str, Any], shapes, dtype) -> llama.LlamaConfig:
    """LlamaConfig of the file's settings; refuses what would make another model."""
    who = "load_gguf"
    architecture = fields.get("general.architecture")
    require_plain(who, {"general.architecture": (architecture, ("llama",))})
    sizes, table = sizes_of(who, fields, _SIZES), "token_embd.weight"
    if table not in shapes:
        raise ValueError(f"{who}: the file must hold {table}; give a whole model")
    config = llama.LlamaConfig(
        **sizes,
        vocab=int(shapes[table][0]),
        kv_heads=int(fields.get("llama.attention.head_count_kv", sizes["heads"])),
        tied="output.weight" not in shapes,
        rope_base=_decimal(fields.get("llama.rope.freq_base", 10_000.0)),
        norm_eps=_decimal(fields.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        param_dtype=dtype,
    )
    checks = {
        "llama.rope.scaling.type": ("none", ("none",)),
        "llama.expert_count": (0, (0,)),
        "split.count": (0, (0, 1)),
    }
    checks |= {
        f"llama.{name}": (config.head_size, (config.head_size,))
        for name in ("rope.dimension_count", "attention.key_length")
    }
    given = {k: (fields.get(k, usual), right) for k, (usual, right) in checks.items()}
    require_plain(who, given)
    return config


def _read(tensor, heads: int | None) -> np.ndarray:
    """One tensor, dequantised, in our order of rows."""
    import gguf

    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return values if heads is None else halves_from_neighbours(values, heads)


def load_gguf(
    path: str | pathlib.Path, *, dtype=jnp.float32
) -> tuple[llama.LlamaConfig, dict[str, Any], dict[str, Any]]:
    """A Llama model in GGUF: its config, its parameters, and its tokenizer's pieces.

    Quantised tensors are dequantised exactly to float32, then rounded to `dtype`: what
    their rounding lost stays lost, so say so of the model.

    Args:
      path: the file.
      dtype: of the parameters: float32, bfloat16 or float16.

    Returns:
      (config, params, tokenizer). params are NumPy arrays. tokenizer is what the file
      says under "tokenizer.", as strings, numbers and lists: ggml.model, ggml.tokens,
      ggml.merges, ggml.bos_token_id and so on.

    Raises:
      ValueError: not a GGUF file, or damaged; what `from_huggingface` refuses.
      NotImplementedError: another architecture, scaled RoPE, experts, split files.
      ImportError: without the package gguf.
    """
    dtype = require_dtype("load_gguf", dtype)
    reader = _open(pathlib.Path(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {tensor.name: tensor.shape[::-1] for tensor in reader.tensors}
    config = _config_of(fields, shapes, dtype)
    names = _names(config)
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name, tensor.name)
        readers[name] = functools.partial(_read, tensor, _heads(name, config))
    tokenizer = {
        name.removeprefix(_TOKENIZER): value
        for name, value in fields.items()
        if name.startswith(_TOKENIZER)
    }
    return config, from_huggingface(Lazy(readers), config), tokenizer


def _add_settings(writer, config: llama.LlamaConfig, context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab)


def _add_tokenizer(writer, tokenizer: Mapping[str, Any]) -> None:
    """Each piece in the type that GGUF gives it: flags, ids, texts, and lists."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    kinds |= {float: writer.add_float32, list: writer.add_array}
    for name, value in tokenizer.items():
        if type(value) not in kinds:
            raise TypeError(
                f"save_gguf: tokenizer's {name} must be a bool, int, float, str or "
                f"list, got {type(value).__name__}; give what load_gguf returned"
            )
        kinds[type(value)](_TOKENIZER + name, value)


def _add_tensor(writer, name: str, tensor: np.ndarray) -> None:
    import gguf

    if tensor.ndim == 1:  # llama.cpp computes norms in float32 whatever the rest is
        tensor = tensor.astype(np.float32)
    if tensor.dtype == jnp.bfloat16:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor)


def save_gguf(
    path: str | pathlib.Path,
    params: Mapping[str, Any],
    config: llama.LlamaConfig,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    context: int = 2048,
) -> None:
    """Writes one GGUF file: the inverse of `load_gguf`.

    Exact: `load_gguf` with the parameters' dtype gives back every bit. rope_base and
    norm_eps are kept as float32.

    Args:
      path: the file to write.
      params: as `llama.init_params` gives them, arrays of JAX or NumPy.
      config: the sizes they were made with.
      tokenizer: what `load_gguf` gave; without it llama.cpp can't read text.
      context: the longest sequence that the model is meant for; RoPE doesn't need it.

    Raises:
      ValueError, TypeError: as `to_huggingface`.
      ImportError: without the package gguf.
    """
    try:
        import gguf
    except ImportError:
        raise missing_package("save_gguf", "gguf") from None
    tensors = to_huggingface(params, config)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        _add_settings(writer, config, context)
        _add_tokenizer(writer, tokenizer or {})
        for here, there in _names(config).items():
            if there in tensors:
                tensor, heads = tensors[there], _heads(there, config)
                turned = neighbours_from_halves(tensor, heads) if heads else tensor
                _add_tensor(writer, here, turned)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
