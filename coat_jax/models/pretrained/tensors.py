"""The parameters of `models.llama` as Hugging Face's tensors, and back.

Two things differ, and nothing else: a kernel here is (in, out) where PyTorch's weight
is (out, in), and the L blocks here are stacked, (L, in, out). RoPE is the same.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
from typing import Any

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np

from coat_jax.models import llama

DTYPES = {jnp.dtype(name): name for name in ("float32", "bfloat16", "float16")}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 4  # names in an error; the rest are counted

# The tensor of a leaf, in a block or outside of them, without its .weight.
_TOP: dict[tuple[str, ...], str] = {
    ("embed", "embedding"): "model.embed_tokens",
    ("norm", "scale"): "model.norm",
    ("head", "kernel"): "lm_head",
}
_BLOCK: dict[tuple[str, ...], str] = {
    ("attention", "norm", "scale"): "input_layernorm",
    ("attention", "q", "kernel"): "self_attn.q_proj",
    ("attention", "k", "kernel"): "self_attn.k_proj",
    ("attention", "v", "kernel"): "self_attn.v_proj",
    ("attention", "out", "kernel"): "self_attn.o_proj",
    ("mlp", "norm", "scale"): "post_attention_layernorm",
    ("mlp", "gate", "kernel"): "mlp.gate_proj",
    ("mlp", "up", "kernel"): "mlp.up_proj",
    ("mlp", "down", "kernel"): "mlp.down_proj",
}


def _flat(tree) -> dict[tuple[str, ...], Any]:
    """Leaves of a nested dict by path."""
    return dict(traverse_util.flatten_dict(dict(tree)))


@functools.cache  # tracing the model takes longer than reading a small one
def _leaves(config: llama.LlamaConfig) -> dict[tuple[str, ...], Any]:
    """Shape of every leaf of the parameters, by path."""
    init = functools.partial(llama.init_params, config)
    return _flat(jax.eval_shape(init, jax.random.key(0)))


def _names(path: tuple[str, ...], config: llama.LlamaConfig) -> list[str]:
    """The tensors that a leaf holds, in Hugging Face's names and the leaf's order."""
    if path[0] != "blocks":
        return [f"{_TOP[path]}.weight"]
    return [f"model.layers.{i}.{_BLOCK[path[1:]]}.weight" for i in range(config.layers)]


def shown(names) -> str:
    """A few names for an error, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _refuse_names(who: str, missing, unexpected) -> None:
    parts = [("lacking", missing), ("unexpected", unexpected)]
    wrong = [f"{what}: {shown(names)}" for what, names in parts if names]
    if wrong:
        raise ValueError(
            f"{who}: the tensors must be those of a Llama decoder of the config's "
            f"depth; {'; '.join(wrong)}; give the whole model and its own config"
        )


def require_dtype(who: str, dtype) -> np.dtype:
    """The dtype, if weights may have it."""
    if jnp.dtype(dtype) not in DTYPES:
        raise TypeError(
            f"{who}: dtype must be float32, bfloat16 or float16, got {dtype}; weights "
            "are converted, not quantised"
        )
    return jnp.dtype(dtype)


def _tensor(tensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, once its shape and dtype are right."""
    tensor = np.asarray(tensors[name])
    if tensor.shape != shape:
        raise ValueError(
            f"from_huggingface: {name} must have the shape {shape} that the config "
            f"implies, got {tensor.shape}; check the config's sizes"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"from_huggingface: {name} must be float32, bfloat16 or float16, got "
            f"{tensor.dtype}; dequantise it first"
        )
    return tensor


def _stacked(tensors, path, leaf, config, dtype) -> np.ndarray:
    """One leaf, filled a tensor at a time: never two copies of it."""
    out = np.empty(leaf.shape, dtype)
    rows = out if path[0] == "blocks" else out[None]
    kernel = path[-1] == "kernel"
    shape = rows.shape[:0:-1] if kernel else rows.shape[1:]
    for i, name in enumerate(_names(path, config)):
        tensor = _tensor(tensors, name, shape)
        rows[i] = tensor.T if kernel else tensor
    return out


def from_huggingface(
    tensors: Mapping[str, Any], config: llama.LlamaConfig, *, dtype=None
) -> dict[str, Any]:
    """Parameters of `llama.Llama` from tensors by their Hugging Face names.

    kernel_l = weight_l^T, stacked over the layers l; norms and the embedding as they
    are. Exact, but for the conversion to `dtype`, which rounds to nearest.

    Args:
      tensors: name to array of float32, bfloat16 or float16; PyTorch's (out, in). A
        lazy mapping is read once a name. Buffers named *.rotary_emb.inv_freq, which
        old files hold, are passed over; so is a tied lm_head equal to the embedding.
      config: the sizes; its rope_base and norm_eps aren't in tensors.
      dtype: of the parameters; None is config.param_dtype.

    Returns:
      A nested dict of NumPy arrays, structured as `llama.init_params` gives it.

    Raises:
      ValueError: tensors that lack, that no such model has, of other shapes, or a tied
        lm_head that isn't the embedding.
      TypeError: a dtype other than those three, wanted or found.

    Example:
      >>> config = llama.PRESETS["micro"]
      >>> params = llama.init_params(config, jax.random.key(0))
      >>> tensors = to_huggingface(params, config)
      >>> tensors["model.layers.1.mlp.up_proj.weight"].shape
      (128, 64)
      >>> from_huggingface(tensors, config)["blocks"]["mlp"]["up"]["kernel"].shape
      (2, 64, 128)
    """
    who = "from_huggingface"
    dtype = require_dtype(who, config.param_dtype if dtype is None else dtype)
    leaves = _leaves(config)
    wanted = {name for path in leaves for name in _names(path, config)}
    given = {n for n in tensors if not n.endswith(".rotary_emb.inv_freq")}
    tied_head = config.tied and HEAD in given
    given -= {HEAD} if tied_head else set()
    _refuse_names(who, wanted - given, given - wanted)
    params = {
        path: _stacked(tensors, path, leaf, config, dtype)
        for path, leaf in leaves.items()
    }
    if tied_head:
        _require_same_head(tensors)
    return traverse_util.unflatten_dict(params)


def _require_same_head(tensors) -> None:
    if not np.array_equal(tensors[HEAD], tensors[TABLE]):
        raise ValueError(
            f"from_huggingface: {HEAD} differs from the embedding, though the config "
            "ties them; give a config with tied=False"
        )


def to_huggingface(
    params: Mapping[str, Any], config: llama.LlamaConfig
) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names: the inverse of `from_huggingface`, exactly.

    Args:
      params: as `llama.init_params` gives them, arrays of JAX or NumPy.
      config: the sizes they were made with.

    Returns:
      Contiguous NumPy arrays in the parameters' dtypes, matrices (out, in). A tied
      model has no lm_head.

    Raises:
      ValueError: parameters that aren't those of the config.
      TypeError: parameters that aren't float32, bfloat16 or float16.
    """
    given, leaves = _flat(params), _leaves(config)
    shape = lambda tree: {"/".join(map(str, k)): v.shape for k, v in tree.items()}
    have, want = shape(given), shape(leaves)
    wrong = {n for n in have.keys() | want.keys() if have.get(n) != want.get(n)}
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"to_huggingface: params must have the leaves that the config implies; "
            f"{name} has the shape {have.get(name)}, want {want.get(name)} "
            f"({len(wrong)} such); give the config that they were made with"
        )
    tensors = {}
    for path, leaf in given.items():
        require_dtype("to_huggingface", leaf.dtype)
        rows = np.asarray(leaf) if path[0] == "blocks" else np.asarray(leaf)[None]
        for name, row in zip(_names(path, config), rows, strict=True):
            turned = row.T if path[-1] == "kernel" else row
            tensors[name] = np.ascontiguousarray(turned)
    return tensors


class Lazy(Mapping):
    """Tensors that are read when they are asked for."""

    def __init__(self, readers: dict[str, Callable[[], np.ndarray]]):
        self._readers = readers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def missing_package(who: str, name: str) -> ImportError:
    """What is raised where an optional package is missing."""
    return ImportError(
        f"{who} needs the package {name}; install it with pip install "
        "'coat-jax[pretrained]'"
    )


def require_plain(who: str, checks: dict[str, tuple[Any, tuple]]) -> None:
    """Raises for the first setting whose value is none of those that llama.py has."""
    for name, (value, allowed) in checks.items():
        if value not in allowed:
            raise NotImplementedError(
                f"{who}: {name} must be {allowed[0]!r} for coat_jax.models.llama, got "
                f"{value!r}; this model isn't a plain Llama decoder"
            )


def sizes_of(
    who: str, values: Mapping[str, Any], names: dict[str, str]
) -> dict[str, Any]:
    """Fields of LlamaConfig by their names in a file's settings; all must be there."""
    lacking = {there for there in names.values() if there not in values}
    if lacking:
        raise ValueError(
            f"{who}: the file's settings must give the sizes of the model, but lack "
            f"{shown(lacking)}; give a Llama model's own file"
        )
    return {here: int(values[there]) for here, there in names.items()}
