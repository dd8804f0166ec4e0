"""OLMo: the decoder of `llama.py` with LayerNorm that has no parameters, and its sizes.

What differs from Llama is the norm (mean and variance, no scale, no bias, epsilon 1e-5)
and that every query head has its own key and value head. RoPE, SwiGLU, no biases, the
scan over stacked blocks and the injected layers are Llama's, so they are not here.

Source: Groeneveld et al., arXiv 2402.00838, section 2.1 and table 1.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax

from coat_jax import nn
from coat_jax.attention import Implementation
from coat_jax.models import llama
from coat_jax.models.llama import LlamaConfig
from coat_jax.policy import DEFAULT, Policy


def plain_norm(norm: Callable[..., Any] = nnx.LayerNorm) -> Callable[..., Any]:
    """A LayerNorm class as OLMo has it: (x - mean) / sqrt(var + epsilon), no more."""
    return functools.partial(norm, use_scale=False, use_bias=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers(llama.Layers):
    """`llama.Layers` whose norms are OLMo's."""

    norm: Callable[..., Any] = plain_norm()
    final_norm: Callable[..., Any] = plain_norm()


def fp8_layers(
    policy: Policy = DEFAULT, *, implementation: Implementation | None = None
) -> Layers:
    """The layers of a decoder whose blocks follow `policy`, as `llama.fp8_layers`.

    Example:
      >>> layers = fp8_layers()
      >>> params = init_params(PRESETS["micro"], jax.random.key(0), layers=layers)
      >>> sorted(params["blocks"]["mlp"])
      ['down', 'gate', 'up']
    """
    return Layers(
        linear=functools.partial(nn.Linear, policy=policy),
        norm=plain_norm(functools.partial(nn.LayerNorm, policy=policy)),
        implementation=implementation,
    )


def _preset(vocab, hidden, ffn, layers, heads, **rest) -> LlamaConfig:
    sizes = {"vocab": vocab, "hidden": hidden, "ffn": ffn, "layers": layers}
    return LlamaConfig(**sizes, heads=heads, kv_heads=heads, norm_eps=1e-5, **rest)


# OLMo names the width of gate and up together: mlp_ratio 8 at hidden 2048 is 2 * 8192,
# mlp_hidden_size 22016 is 2 * 11008. Its vocabulary of 50280 fills a table of 50304.
PRESETS = {
    "micro": _preset(512, 64, 128, 2, 2, tied=True),
    "1b": _preset(50304, 2048, 8192, 16, 16, tied=True),
    "7b": _preset(50304, 4096, 11008, 32, 32),
}


def _or_default(layers: llama.Layers | None) -> Layers:
    if layers is None:
        return Layers()
    if not isinstance(layers, Layers):
        raise TypeError(
            "olmo: layers must be olmo.Layers, whose norms have no parameters, got "
            f"{type(layers).__module__}.{type(layers).__qualname__}; use olmo.Layers "
            "or olmo.fp8_layers"
        )
    return layers


def init_params(config: LlamaConfig, key, *, layers: llama.Layers | None = None):
    """A nested dict of arrays: `llama.init_params` without the norms' entries.

    Example:
      >>> sorted(init_params(PRESETS["micro"], jax.random.key(0)))
      ['blocks', 'embed']
    """
    return llama.init_params(config, key, layers=_or_default(layers))


def make_apply(config: LlamaConfig, *, layers: llama.Layers | None = None):
    """The model as a function: apply(params, tokens) -> logits."""
    return llama.make_apply(config, layers=_or_default(layers))


def make_loss(config: LlamaConfig, *, layers: llama.Layers | None = None):
    """loss(params, windows, key), as `llama.make_loss`."""
    return llama.make_loss(config, layers=_or_default(layers))


def count_params(config: LlamaConfig) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["7b"])
      6888095744
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
