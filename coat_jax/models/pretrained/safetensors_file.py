"""Llama models as Hugging Face publishes them: config.json and safetensors files.

Names are checked before any value is read, and values are read one tensor at a time
into the stacked leaf that keeps them. Pickles are never opened.
"""

from collections.abc import Callable, Mapping
import functools
import json
import pathlib
from typing import Any

from jax import numpy as jnp
import numpy as np

from coat_jax.models import llama
from coat_jax.models.pretrained.tensors import (
    DTYPES,
    TABLE,
    Lazy,
    from_huggingface,
    missing_package,
    require_dtype,
    require_plain,
    shown,
    sizes_of,
    to_huggingface,
)

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_STORED = ("BF16", "F16", "F32")  # safetensors' names of what weights may be


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"load_safetensors: {path} must be a file of JSON that can be read, got "
            f"{type(error).__name__}: {error}"
        ) from None


def _config_of_json(values: Mapping[str, Any], dtype) -> llama.LlamaConfig:
    """LlamaConfig of a config.json; refuses what would make another model."""
    who = "load_safetensors"
    names = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "ffn": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
    }
    # Newer files gather what concerns RoPE in one place.
    rope = values.get("rope_parameters") or values
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    checks = {
        "model_type": (values.get("model_type"), ("llama",)),
        "hidden_act": (values.get("hidden_act", "silu"), ("silu", "swish")),
        "attention_bias": (values.get("attention_bias", False), (False,)),
        "mlp_bias": (values.get("mlp_bias", False), (False,)),
        "the kind of RoPE": (kind, ("default",)),
    }
    require_plain(who, checks)
    sizes = sizes_of(who, values, names)
    config = llama.LlamaConfig(
        **sizes,
        kv_heads=int(values.get("num_key_value_heads") or sizes["heads"]),
        tied=bool(values.get("tie_word_embeddings", False)),
        rope_base=float(rope.get("rope_theta", 10_000.0)),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        param_dtype=dtype,
    )
    size = config.head_size
    require_plain(who, {"head_dim": (values.get("head_dim") or size, (size,))})
    return config


def _json_of_config(config: llama.LlamaConfig, dtype, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "max_position_embeddings": context,
        "mlp_bias": False,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tied,
        "torch_dtype": DTYPES[dtype],
        "vocab_size": config.vocab,
    }


def _shards(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold a model: one, or those that its index names."""
    if path.is_file():
        return [path]
    if (path / INDEX).exists():
        names = sorted(set(_read_json(path / INDEX).get("weight_map", {}).values()))
        outside = [n for n in names if pathlib.PurePath(n).name != n]
        if outside:
            raise ValueError(
                f"load_safetensors: {path / INDEX} may name files of its own folder "
                f"only, got {shown(outside)}"
            )
        return [path / name for name in names]
    return [path / WEIGHTS]


def _readers(path: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
    """A reader of each tensor of one safetensors file, which stays mapped, not read."""
    try:
        import safetensors
    except ImportError:
        raise missing_package("load_safetensors", "safetensors") from None
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"load_safetensors: {path} must be a safetensors file (pickles, *.bin, "
            f"aren't read), got {type(error).__name__}: {error}"
        ) from None
    names = list(file.keys())
    found = {name: file.get_slice(name).get_dtype() for name in names}
    wrong = {name for name, dtype in found.items() if dtype not in _STORED}
    if wrong:
        raise TypeError(
            f"load_safetensors: tensors must be {', '.join(_STORED)}, got "
            f"{found[min(wrong)]} for {shown(wrong)} in {path}; dequantise them first"
        )
    return {name: functools.partial(file.get_tensor, name) for name in names}


def load_safetensors(
    path: str | pathlib.Path, *, dtype=jnp.float32
) -> tuple[llama.LlamaConfig, dict[str, Any]]:
    """A Llama model as Hugging Face publishes it: its config and its parameters.

    Args:
      path: a folder with config.json and model.safetensors, or shards with their
        index; or one *.safetensors file with config.json beside it.
      dtype: of the parameters: float32, bfloat16 or float16; rounds to nearest.

    Returns:
      (config, params): NumPy arrays, for `jax.device_put` with any sharding. The
      config computes in float32; `dataclasses.replace` it for another dtype or remat.

    Raises:
      ValueError: a file that lacks or is damaged; what `from_huggingface` refuses.
      TypeError: quantised or integer tensors.
      NotImplementedError: biases, another activation, scaled RoPE, other head sizes.
      ImportError: without the package safetensors.
    """
    path, dtype = pathlib.Path(path), require_dtype("load_safetensors", dtype)
    folder = path.parent if path.is_file() else path
    config = _config_of_json(_read_json(folder / "config.json"), dtype)
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for shard in _shards(path):
        readers |= _readers(shard)
    return config, from_huggingface(Lazy(readers), config)


def save_safetensors(
    folder: str | pathlib.Path,
    params: Mapping[str, Any],
    config: llama.LlamaConfig,
    *,
    context: int = 2048,
) -> None:
    """Writes config.json and model.safetensors, as LlamaForCausalLM loads them.

    Exact: `load_safetensors` with the parameters' dtype gives back every bit. The
    tokenizer's files aren't parameters; copy them beside.

    Args:
      folder: made if it isn't there.
      params: as `llama.init_params` gives them, arrays of JAX or NumPy.
      config: the sizes they were made with.
      context: the longest sequence that the model is meant for; RoPE doesn't need it.

    Raises:
      ValueError, TypeError: as `to_huggingface`.
      ImportError: without the package safetensors.
    """
    try:
        from safetensors import numpy as safetensors_numpy
    except ImportError:
        raise missing_package("save_safetensors", "safetensors") from None
    folder, tensors = pathlib.Path(folder), to_huggingface(params, config)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = tensors[TABLE].dtype
    text = json.dumps(_json_of_config(config, dtype, context), indent=2)
    # transformers refuses a file that doesn't say which framework's layout it has.
    safetensors_numpy.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(text + "\n")
