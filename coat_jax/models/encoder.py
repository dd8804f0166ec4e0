"""A BERT-like encoder of sentences and sentence pairs, dense or of tensor trains.

Shape letters: B sentences, T tokens, H hidden, F ffn, N heads, D head size, K classes.

    x = norm(word + position + segment)
    x = norm(x + attention(x));  x = norm(x + down(gelu(up(x))))     a block
    logits = head(tanh(pool(x of the first token)))

Norms stand after the residual is added, dropout after every sub-block. The "mnli"
preset is the six-encoder model of CoMERA: with `tensor_train_layers()` its word
embedding is a TTM and its other matrices but the head's are TT, 1,026,528 numbers in
place of 66,498,048. Blocks are a list, not one scanned block, so that the ranks of each
layer may shrink on their own. Unlike there, attention probabilities have no dropout:
fused attention keeps them to itself.

Source: Yang et al., arXiv 2405.14377; Devlin et al., arXiv 1810.04805.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
import optax

from coat_jax import nn
from coat_jax.attention import Implementation
from coat_jax.policy import BF16, DEFAULT, Policy

# How the original folds its sizes: inputs largest factor first, outputs mirrored.
_FOLDED = {768: (12, 8, 8), 3072: (16, 16, 12)}
_ROWS, _COLUMNS = {30522: (16, 20, 10, 10)}, {768: (4, 4, 8, 6)}
_STD = 0.02  # of embeddings, as in BERT


class Tokens(NamedTuple):
    """ids, segments: int32 (B, T). mask: bool (B, T), False where there is padding."""

    ids: Any
    segments: Any
    mask: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The sizes of an encoder. `dtype` computes, `param_dtype` is stored."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    classes: int
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    norm_eps: float = 1e-9
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        sizes = ("vocab", "hidden", "ffn", "layers", "heads", "classes", "positions")
        for name in (*sizes, "segments"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"EncoderConfig: {name} must be at least 1, got "
                    f"{getattr(self, name)}; give a positive size"
                )
        if self.hidden % self.heads:
            raise ValueError(
                "EncoderConfig: hidden must be a multiple of heads, got "
                f"{self.hidden} and {self.heads}; change either"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"EncoderConfig: dropout must be from 0 to below 1, got {self.dropout}"
            )


PRESETS = {
    "micro": EncoderConfig(
        vocab=96, hidden=32, ffn=64, layers=2, heads=2, classes=3, positions=32
    ),
    "mnli": EncoderConfig(
        vocab=30522, hidden=768, ffn=3072, layers=6, heads=12, classes=3
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the encoder is made of: NNX classes that take their default's arguments.

    linear makes the blocks and the pooling, norm the blocks' norms, embed the words'
    table; positions, segments, the first norm and the head are always dense.
    implementation is that of `coat_jax.attention.dot_product_attention`.
    """

    linear: Callable[..., Any] = nnx.Linear
    norm: Callable[..., Any] = nnx.LayerNorm
    embed: Callable[..., Any] = nnx.Embed
    policy: Policy = BF16
    implementation: Implementation | None = None


def fp8_layers(
    policy: Policy = DEFAULT, *, implementation: Implementation | None = None
) -> Layers:
    """Dense layers whose blocks follow `policy`; embeddings and head stay as they are.

    Under the BF16 policy the model is that of `Layers()`, bit for bit.
    """
    return Layers(
        linear=functools.partial(nn.Linear, policy=policy),
        norm=functools.partial(nn.LayerNorm, policy=policy),
        policy=policy,
        implementation=implementation,
    )


def tensor_train_layers(
    *,
    rank: int = 30,
    embed_rank: int | None = 32,
    policy: Policy = BF16,
    implementation: Implementation | None = None,
) -> Layers:
    """Layers in which matrices are TT and the words' table is TTM.

    Sizes of the original (768, 3072 and 30,522) are folded as there, others by the
    library's own rule.

    Args:
      rank: of the matrices' inner bonds.
      embed_rank: of the table's bonds; None keeps a dense table.
      policy: of the products with merged halves, and of the blocks' norms.
      implementation: of attention.
    """
    embed = nnx.Embed
    if embed_rank is not None:
        embed = functools.partial(_ttm, rank=embed_rank)
    return Layers(
        linear=functools.partial(_tt, rank=rank, policy=policy),
        norm=functools.partial(nn.LayerNorm, policy=policy),
        embed=embed,
        policy=policy,
        implementation=implementation,
    )


def _tt(in_features: int, out_features: int, *, kernel_init=None, **options):
    """A TTLinear, whose own initialisation has the variance that is asked for here."""
    del kernel_init
    ins, outs = _FOLDED.get(in_features), _FOLDED.get(out_features)
    if ins is not None and outs is not None:
        options |= {"in_dims": ins, "out_dims": outs[::-1]}
    return nn.TTLinear(in_features, out_features, **options)


def _ttm(num_embeddings: int, features: int, *, embedding_init=None, **options):
    del embedding_init
    dims = (_ROWS.get(num_embeddings), _COLUMNS.get(features))
    if None not in dims:
        options |= {"row_dims": dims[0], "col_dims": dims[1]}
    return nn.TTMEmbedding(num_embeddings, features, std=_STD, **options)


def _types(config) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _linear(config, make, rngs, features: int, out: int):
    normal = nnx.initializers.normal((features + out) ** -0.5)  # as tensor trains have
    return make(features, out, kernel_init=normal, rngs=rngs, **_types(config))


def _norm(config, make, rngs):
    how = {"epsilon": config.norm_eps, **_types(config)}
    return make(config.hidden, rngs=rngs, **how)


class SelfAttention(nnx.Module):
    """out(attention(q(x), k(x), v(x))): (B, T, H), a mask (B, T) hiding keys."""

    def __init__(self, config: EncoderConfig, layers: Layers, *, rngs: nnx.Rngs):
        H = config.hidden
        make = lambda: _linear(config, layers.linear, rngs, H, H)
        self.q, self.k, self.v, self.out = make(), make(), make(), make()
        self.heads, self.policy = config.heads, layers.policy
        self.implementation = layers.implementation

    def __call__(self, x_BTH, mask_BT):
        """(B, T, H) to (B, T, H)."""
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
        qkv_BTH = nn.norm_linear(None, [self.q, self.k, self.v], x_BTH)
        return nn.attention_linear(
            self.out,
            *map(split, qkv_BTH),
            mask=mask_BT[:, None, None],
            policy=self.policy,
            implementation=self.implementation,
        )


class EncoderBlock(nnx.Module):
    """Attention, then the feed-forward part, each added, dropped out and normalised."""

    def __init__(self, config: EncoderConfig, layers: Layers, *, rngs: nnx.Rngs):
        linear = functools.partial(_linear, config, layers.linear, rngs)
        self.attention = SelfAttention(config, layers, rngs=rngs)
        self.attention_norm = _norm(config, layers.norm, rngs)
        self.up = linear(config.hidden, config.ffn)
        self.down = linear(config.ffn, config.hidden)
        self.ffn_norm = _norm(config, layers.norm, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTH, mask_BT, keys):
        """(B, T, H) to (B, T, H); `keys` are two for dropout, or None."""
        drop = functools.partial(_dropped, self.dropout, keys)
        x_BTH = self.attention_norm(x_BTH + drop(0, self.attention(x_BTH, mask_BT)))
        y_BTH = nn.mlp(None, [self.up], "gelu", self.down, x_BTH)
        return self.ffn_norm(x_BTH + drop(1, y_BTH))


def _dropped(dropout: nnx.Dropout, keys, place: int, x):
    """x, after dropout if there are keys."""
    key = None if keys is None else keys[place]
    return dropout(x, deterministic=key is None, rngs=key)


class Encoder(nnx.Module):
    """Tokens to logits (B, K), compute dtype."""

    def __init__(
        self, config: EncoderConfig, layers: Layers | None = None, *, rngs: nnx.Rngs
    ):
        layers, self.config = layers or Layers(), config
        H, types = config.hidden, _types(config)
        normal = {"embedding_init": nnx.initializers.normal(_STD), "rngs": rngs}
        # A row's gradient is a sum over many tokens: read, and so summed, in float32.
        # XLA's scatter adds bfloat16 by compare-and-swap, where tokens share a row.
        rows = normal | types | {"dtype": jnp.float32}
        self.embed = layers.embed(config.vocab, H, **rows)
        self.position = nnx.Embed(config.positions, H, **rows)
        self.segment = nnx.Embed(config.segments, H, **rows)
        self.norm = _norm(config, nnx.LayerNorm, rngs)
        self.blocks = nnx.List(
            [EncoderBlock(config, layers, rngs=rngs) for _ in range(config.layers)]
        )
        self.pool = _linear(config, layers.linear, rngs, H, H)
        self.head = _linear(config, nnx.Linear, rngs, H, config.classes)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Tokens, key=None):
        """Logits (B, K) of each sentence's class; `key` turns dropout on."""
        keys = None
        if key is not None:
            keys = jax.random.split(key, (len(self.blocks) + 1, 2))
        ends = None if keys is None else keys[-1]
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bf16 and f32
            x_BTH = _dropped(self.dropout, ends, 0, self.norm(self._words(tokens)))
            for place, block in enumerate(self.blocks):
                x_BTH = block(x_BTH, tokens.mask, None if keys is None else keys[place])
            pooled_BH = jnp.tanh(self.pool(x_BTH[:, 0]))
            return self.head(_dropped(self.dropout, ends, 1, pooled_BH))

    def _words(self, tokens: Tokens):
        T = tokens.ids.shape[1]
        if T > self.config.positions:
            raise ValueError(
                f"Encoder: at most {self.config.positions} tokens, got {T}; cut them, "
                "or raise EncoderConfig.positions"
            )
        # A product instead of a lookup: all tokens share two rows.
        hot_BTS = jax.nn.one_hot(tokens.segments, self.config.segments)
        table_SH = self.segment.embedding[...].astype(jnp.float32)
        segment_BTH = jnp.matmul(hot_BTS, table_SH, precision=lax.Precision.HIGHEST)
        x_BTH = self.embed(tokens.ids) + segment_BTH
        x_BTH = x_BTH + self.position(jnp.arange(T))[None]
        return x_BTH.astype(self.config.dtype)


def init_params(config: EncoderConfig, key, *, layers: Layers | None = None):
    """A nested dict of arrays: the parameters of `Encoder`. Works under `eval_shape`.

    Example:
      >>> params = init_params(PRESETS["micro"], jax.random.key(0))
      >>> params["blocks"][1]["attention"]["q"]["kernel"].shape
      (32, 32)
    """
    return nnx.to_pure_dict(nnx.state(Encoder(config, layers, rngs=nnx.Rngs(key))))


def make_apply(config: EncoderConfig, *, layers: Layers | None = None):
    """The model as a function: apply(params, tokens, key=None) -> logits.

    Trains are merged first, those of one shape together.

    Parameters may be of other ranks than the model was made with: see
    `coat_jax.truncation`.
    """
    build = lambda: Encoder(config, layers, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(nnx.eval_shape(build))
    merged = lambda params: nn.merge(nnx.merge(graph, params))
    return lambda params, tokens, key=None: merged(params)(tokens, key)


def make_loss(config: EncoderConfig, *, layers: Layers | None = None):
    """loss(params, (tokens, labels), key): mean cross-entropy, logits read as float32.

    labels are int32 (B,); a key turns dropout on.
    """
    apply = make_apply(config, layers=layers)

    def loss(params, batch, key=None):
        tokens, labels = batch
        logits = apply(params, tokens, key).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(each)

    return loss


def count_params(config: EncoderConfig, *, layers: Layers | None = None) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["mnli"])
      66957315
    """
    make = lambda: init_params(config, jax.random.key(0), layers=layers)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make)))
