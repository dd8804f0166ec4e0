"""A Llama decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, in Flax NNX.

Shape letters: B batch, T tokens, H hidden, F ffn, N query heads, K key/value heads,
D head size, L layers, V vocabulary.

Nothing here owns arithmetic that another file could want to replace. `Layers` says
what a linear map, a norm, an embedding, the attention product and the two sub-blocks
are; a compressed layer is put in by naming it there, so that the plain and the
compressed model are the same lines of code.

The L blocks are one block with stacked parameters, (L, in, out), run by `lax.scan`:
compile time doesn't grow with depth, and an optimizer sees a dozen large leaves
instead of hundreds of small ones.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp
import optax

from coat_jax import nn
from coat_jax.attention import Implementation
from coat_jax.layerwise import Parts
from coat_jax.losses import chunked_cross_entropy
from coat_jax.policy import DEFAULT, Policy
from coat_jax.rope import rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a decoder. `dtype` computes, `param_dtype` is stored."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: bool = False

    def __post_init__(self):
        sizes = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LlamaConfig: {name} must be at least 1, got "
                    f"{getattr(self, name)}; give a positive size"
                )
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"LlamaConfig: hidden / heads must be an even whole number (RoPE "
                f"rotates pairs), got {self.hidden} / {self.heads}; change either"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: heads must be a multiple of kv_heads, got heads="
                f"{self.heads}, kv_heads={self.kv_heads}; change either"
            )

    @property
    def head_size(self) -> int:
        """D, elements of one head."""
        return self.hidden // self.heads


def _preset(vocab, hidden, ffn, layers, heads, kv_heads, **rest) -> LlamaConfig:
    sizes = {"vocab": vocab, "hidden": hidden, "ffn": ffn, "layers": layers}
    return LlamaConfig(**sizes, heads=heads, kv_heads=kv_heads, **rest)


PRESETS = {
    "micro": _preset(512, 64, 128, 2, 2, 1, tied=True),
    "tiny": _preset(2048, 128, 384, 2, 4, 2, tied=True),
    "small": _preset(8192, 512, 1408, 6, 8, 4, tied=True),
    "125m": _preset(50304, 768, 2048, 12, 12, 12, tied=True),
    "1b": _preset(128256, 2048, 8192, 16, 32, 8, tied=True, rope_base=500_000.0),
    "llama2-7b": _preset(32000, 4096, 11008, 32, 32, 32),
    "llama2-13b": _preset(32000, 5120, 13824, 40, 40, 40),
    "llama-30b": _preset(32000, 6656, 17920, 60, 52, 52, norm_eps=1e-6),
    "llama3-8b": _preset(128256, 4096, 14336, 32, 32, 8, rope_base=500_000.0),
    "llama3-70b": _preset(128256, 8192, 28672, 80, 64, 8, rope_base=500_000.0),
}


class AttentionBlock(nnx.Module):
    """norm, q k v projections, RoPE, causal attention, output projection: (B, T, H)."""

    def __init__(self, config: LlamaConfig, layers: "Layers", *, rngs: nnx.Rngs):
        self.config, self.layers = config, layers
        linear = functools.partial(_linear, config, layers.linear, rngs)
        width_ND = config.heads * config.head_size
        width_KD = config.kv_heads * config.head_size
        self.norm = _norm(config, layers.norm, rngs)
        self.q = linear(config.hidden, width_ND)
        self.k = linear(config.hidden, width_KD)
        self.v = linear(config.hidden, width_KD)
        self.out = linear(width_ND, config.hidden, depth=config.layers)

    def __call__(self, x_BTH):
        """The residual stream after attention."""
        heads = (*x_BTH.shape[:2], -1, self.config.head_size)
        q, k, v = nn.norm_linear(self.norm, [self.q, self.k, self.v], x_BTH)
        turn = functools.partial(rope, base=self.config.rope_base)
        return nn.attention_linear(
            self.out,
            turn(q.reshape(heads)),
            turn(k.reshape(heads)),
            v.reshape(heads),
            x_BTH,
            is_causal=True,
            implementation=self.layers.implementation,
        )


class MlpBlock(nnx.Module):
    """norm, then down(silu(gate(x)) * up(x)): (B, T, H)."""

    def __init__(self, config: LlamaConfig, layers: "Layers", *, rngs: nnx.Rngs):
        linear = functools.partial(_linear, config, layers.linear, rngs)
        self.norm = _norm(config, layers.norm, rngs)
        self.gate = linear(config.hidden, config.ffn)
        self.up = linear(config.hidden, config.ffn)
        self.down = linear(config.ffn, config.hidden, depth=config.layers)

    def __call__(self, x_BTH):
        """The residual stream after the MLP."""
        into = [self.gate, self.up]
        return nn.mlp(self.norm, into, "silu", self.down, x_BTH, x_BTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the decoder is made of; each field takes the default's arguments.

    linear, norm and embed are NNX classes, head and final_norm those of the last norm
    and of the logits. attention and mlp are the two sub-blocks, norm and residual
    included. implementation is that of `coat_jax.attention.dot_product_attention`.
    """

    linear: Callable[..., Any] = nnx.Linear
    norm: Callable[..., Any] = nnx.RMSNorm
    embed: Callable[..., Any] = nnx.Embed
    head: Callable[..., Any] = nnx.Linear
    final_norm: Callable[..., Any] = nnx.RMSNorm
    attention: Callable[..., Any] = AttentionBlock
    mlp: Callable[..., Any] = MlpBlock
    implementation: Implementation | None = None


def fp8_layers(
    policy: Policy = DEFAULT, *, implementation: Implementation | None = None
) -> Layers:
    """The layers of a decoder whose blocks follow `policy`.

    The embedding, the last norm and the logits stay as they are, as in COAT. Under the
    BF16 policy the model is that of `Layers()`, bit for bit.

    Example:
      >>> layers = fp8_layers()
      >>> params = init_params(PRESETS["micro"], jax.random.key(0), layers=layers)
      >>> params["blocks"]["mlp"]["gate"]["kernel"].shape
      (2, 64, 128)
    """
    return Layers(
        linear=functools.partial(nn.Linear, policy=policy),
        norm=functools.partial(nn.RMSNorm, policy=policy),
        implementation=implementation,
    )


def _linear(config, linear, rngs, fan_in, fan_out, *, depth=0):
    # Outputs of unit variance; what 2 * depth blocks add to the residual stream is
    # scaled so that the sum has unit variance too.
    std = fan_in**-0.5 * (2 * depth) ** -0.5 if depth else fan_in**-0.5
    return linear(
        fan_in,
        fan_out,
        use_bias=False,
        kernel_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _norm(config, norm, rngs):
    return norm(
        config.hidden,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


class DecoderBlock(nnx.Module):
    """x + attention(x), then x + mlp(x)."""

    def __init__(self, config: LlamaConfig, layers: Layers, *, rngs: nnx.Rngs):
        self.attention = layers.attention(config, layers, rngs=rngs)
        self.mlp = layers.mlp(config, layers, rngs=rngs)

    def __call__(self, x_BTH):
        """(B, T, H) to (B, T, H)."""
        return self.mlp(self.attention(x_BTH))


class Llama(nnx.Module):
    """Token ids (B, T) int32 to logits (B, T, V) in the compute dtype.

    The first logits are small (a quarter of a unit), so that the first loss is
    ln(V) + 0.03: a table with unit logits starts half a nat higher.
    """

    def __init__(
        self, config: LlamaConfig, layers: Layers | None = None, *, rngs: nnx.Rngs
    ):
        layers = layers or Layers()
        self.config = config
        std = 0.25 * config.hidden**-0.5
        self.embed = layers.embed(
            config.vocab,
            config.hidden,
            embedding_init=nnx.initializers.normal(std if config.tied else 1.0),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        make = lambda key: DecoderBlock(config, layers, rngs=nnx.Rngs(key))
        self.blocks = nnx.vmap(make)(jax.random.split(rngs.params(), config.layers))
        self.norm = _norm(config, layers.final_norm, rngs)
        if not config.tied:
            self.head = layers.head(
                config.hidden,
                config.vocab,
                use_bias=False,
                kernel_init=nnx.initializers.normal(std),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

    def __call__(self, tokens_BT):
        """Logits (B, T, V) of the next token at each position."""
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bf16 and f32
            return self._logits(tokens_BT)

    def _logits(self, tokens_BT):
        graph, stacked = nnx.split(self.blocks)
        block = lambda x_BTH, params: (nnx.merge(graph, params)(x_BTH), None)
        if self.config.remat:
            block = jax.checkpoint(block)
        x_BTH, _ = jax.lax.scan(block, self.embed(tokens_BT), stacked)
        x_BTH = self.norm(x_BTH)
        return self.embed.attend(x_BTH) if self.config.tied else self.head(x_BTH)


def init_params(config: LlamaConfig, key, *, layers: Layers | None = None):
    """A nested dict of arrays: the parameters of `Llama`. Works under `eval_shape`."""
    return nnx.to_pure_dict(nnx.state(Llama(config, layers, rngs=nnx.Rngs(key))))


def make_apply(config: LlamaConfig, *, layers: Layers | None = None):
    """The model as a function: apply(params, tokens) -> logits."""
    build = lambda: Llama(config, layers, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(nnx.eval_shape(build))
    return lambda params, tokens: nnx.merge(graph, params)(tokens)


def make_loss(config: LlamaConfig, *, layers: Layers | None = None):
    """loss(params, windows, key): mean cross-entropy of tokens 1.. given those before.

    windows is int32 (B, T + 1); the logits are read as float32. The key is there for
    layers that draw; these don't.
    """
    apply = make_apply(config, layers=layers)

    def loss(params, windows, key=None):
        del key
        return _mean_cross_entropy(apply(params, windows[:, :-1]), windows[:, 1:])

    return loss


def make_parts(
    config: LlamaConfig, *, layers: Layers | None = None, chunk: int = 1024
) -> Parts:
    """The model for `layerwise.layerwise_step`: embedding, blocks, and all behind them.

    `make_parts(...).loss` is `make_loss`'s with the cross-entropy made for `chunk`
    tokens at a time, of logits that are not rounded to the compute dtype. A head that
    is not Flax's own linear map without bias, or an embedding that is not Flax's, has
    its logits whole.

    Example:
      >>> config = PRESETS["micro"]
      >>> params = init_params(config, jax.random.key(0))
      >>> windows = jnp.zeros((1, 9), jnp.int32)
      >>> whole, chunked = make_loss(config), make_parts(config).loss
      >>> abs(float(whole(params, windows) - chunked(params, windows))) < 0.01
      True
    """
    model = nnx.eval_shape(lambda: Llama(config, layers, rngs=nnx.Rngs(0)))
    head_name = "embed" if config.tied else "head"
    names = {"embed", "norm", head_name}
    graphs = {name: nnx.split(getattr(model, name))[0] for name in names}
    graph, _ = nnx.split(model.blocks)
    part = lambda rest, name: nnx.merge(graphs[name], rest.get(name, {}))

    @_standard_promotion
    def first(rest, windows):
        return part(rest, "embed")(windows[:, :-1])

    @_standard_promotion
    def block(params, x_BTH):
        return nnx.merge(graph, params)(x_BTH)

    @_standard_promotion
    def last(rest, x_BTH, windows):
        x_BTH, head = part(rest, "norm")(x_BTH), part(rest, head_name)
        return _cross_entropy(config, head, x_BTH, windows[:, 1:], chunk)

    block = jax.checkpoint(block) if config.remat else block
    return Parts(first=first, block=block, last=last)


def _standard_promotion(f):
    """f, traced so that Flax's norms may mix bfloat16 and float32."""

    @functools.wraps(f)
    def call(*args):
        with jax.numpy_dtype_promotion("standard"):
            return f(*args)

    return call


def _cross_entropy(config: LlamaConfig, head: Any, x_BTH, labels_BT, chunk: int):
    if config.tied and type(head) is nnx.Embed:
        kernel = head.embedding[...]
    elif type(head) is nnx.Linear and not head.use_bias:
        kernel = head.kernel[...]
    else:
        whole: Any = head
        logits = whole.attend(x_BTH) if config.tied else whole(x_BTH)
        return _mean_cross_entropy(logits, labels_BT)
    return chunked_cross_entropy(
        x_BTH.astype(config.dtype),
        kernel.astype(config.dtype),
        labels_BT,
        chunk=chunk,
        vocab_first=config.tied,
    )


def _mean_cross_entropy(logits, labels):
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return jnp.mean(each)


def count_params(config: LlamaConfig) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["llama2-7b"])
      6738415616
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
