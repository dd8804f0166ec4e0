"""A vision transformer: patches, learned positions, pre-norm encoder blocks, one head.

Shape letters: B images, S side, C channels, P patches, T tokens (the patches, and one
more where a class token pools), H hidden, F ffn, N heads, D head size, K classes.

The blocks are written once, for any layers: `coat_jax.nn`'s norm_linear, act_linear and
attention_linear compose the modules that `Layers` names, and are the fused FP8 blocks
where those modules have an FP8 policy. The two ends have fields of their own, as they
stay in the compute dtype in COAT.

The blocks are all of one shape, so they are one block with stacked parameters, run by
`lax.scan`: compile time doesn't grow with depth.

Source: Dosovitskiy et al., arXiv 2010.11929; mean pooling as in Beyer et al., arXiv
2205.01580.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp

from coat_jax import nn
from coat_jax.attention import Implementation
from coat_jax.models.classification import classification_loss
from coat_jax.policy import DEFAULT, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The sizes of an encoder. `dtype` computes, `param_dtype` is stored."""

    side: int
    patch: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    classes: int
    channels: int = 3
    pool: str = "mean"  # or "cls", a class token
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: bool = False

    def __post_init__(self):
        for name in ("side", "patch", "hidden", "ffn", "layers", "heads", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ViTConfig: {name} must be at least 1, got "
                    f"{getattr(self, name)}; give a positive size"
                )
        for whole, part in (("side", "patch"), ("hidden", "heads")):
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                raise ValueError(
                    f"ViTConfig: {whole} must be a multiple of {part}, got {a} and "
                    f"{b}; change either"
                )
        if self.pool not in ("mean", "cls"):
            raise ValueError(f"ViTConfig: pool must be mean or cls, got {self.pool!r}")

    @property
    def head_size(self) -> int:
        """D, elements of one head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """T, the patches and the class token if there is one."""
        return (self.side // self.patch) ** 2 + (self.pool == "cls")


def _preset(side, patch, hidden, layers, heads, **rest) -> ViTConfig:
    sizes = {"side": side, "patch": patch, "hidden": hidden, "ffn": 4 * hidden}
    return ViTConfig(**sizes, layers=layers, heads=heads, **rest)


_GREY = {"channels": 1, "classes": 10}
PRESETS = {
    "micro": _preset(28, 7, 32, 2, 2, **_GREY),
    "tiny": _preset(28, 4, 192, 6, 3, **_GREY),
    "s16": _preset(224, 16, 384, 12, 6, classes=1000, pool="cls"),
    "b16": _preset(224, 16, 768, 12, 12, classes=1000, pool="cls"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the encoder is made of: NNX classes that take their default's arguments.

    linear and norm make the blocks. embed maps a patch to a token, final_norm and head
    the last tokens to logits. implementation is that of
    `coat_jax.attention.dot_product_attention`.
    """

    linear: Callable[..., Any] = nnx.LinearGeneral
    norm: Callable[..., Any] = nnx.LayerNorm
    embed: Callable[..., Any] = nnx.Linear
    head: Callable[..., Any] = nnx.Linear
    final_norm: Callable[..., Any] = nnx.LayerNorm
    implementation: Implementation | None = None


def fp8_layers(
    policy: Policy = DEFAULT, *, implementation: Implementation | None = None
) -> Layers:
    """The layers of an encoder whose blocks follow `policy`.

    The patch embedding, the last norm and the logits stay as they are, as in COAT.
    Under the BF16 policy the model is that of `Layers()`, bit for bit.

    Example:
      >>> layers = fp8_layers()
      >>> params = init_params(PRESETS["micro"], jax.random.key(0), layers=layers)
      >>> params["blocks"]["attention"]["q"]["kernel"].shape
      (2, 32, 2, 16)
    """
    return Layers(
        linear=functools.partial(nn.LinearGeneral, policy=policy),
        norm=functools.partial(nn.LayerNorm, policy=policy),
        implementation=implementation,
    )


def patches(images_BSSC, patch: int):
    """(B, S, S, C) to (B, P, patch * patch * C): rows of patches, rows within each.

    Example:
      >>> patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
      [2, 3, 6, 7]
    """
    B, S, _, C = images_BSSC.shape
    rows = S // patch
    cut = images_BSSC.reshape(B, rows, patch, rows, patch, C)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * rows, patch * patch * C)


def _types(config) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _linear(config, make, rngs, features, out, *, std, **options):
    normal = nnx.initializers.normal(std)
    options = {"kernel_init": normal, **_types(config), **options}
    return make(features, out, rngs=rngs, **options)


def _norm(config, make, rngs):
    how = {"epsilon": config.norm_eps, **_types(config)}
    return make(config.hidden, rngs=rngs, **how)


def _std(fan_in: int, *, adding: int = 1) -> float:
    # Outputs of unit variance. What `adding` sub-blocks put on the residual stream has
    # it together.
    return (adding * fan_in) ** -0.5


class AttentionBlock(nnx.Module):
    """x + out(attention(q(h), k(h), v(h))), h = norm(x): (B, T, H)."""

    def __init__(self, config: ViTConfig, layers: Layers, *, rngs: nnx.Rngs):
        linear = functools.partial(_linear, config, layers.linear, rngs)
        heads_ND, H = (config.heads, config.head_size), config.hidden
        self.implementation = layers.implementation
        self.norm = _norm(config, layers.norm, rngs)
        self.q = linear(H, heads_ND, std=_std(H))
        self.k = linear(H, heads_ND, std=_std(H))
        self.v = linear(H, heads_ND, std=_std(H))
        std = _std(H, adding=2 * config.layers)
        self.out = linear(heads_ND, H, std=std, axis=(-2, -1))

    def __call__(self, x_BTH):
        """The residual stream, with attention added."""
        qkv_BTND = nn.norm_linear(self.norm, [self.q, self.k, self.v], x_BTH)
        how = {"residual": x_BTH, "implementation": self.implementation}
        return nn.attention_linear(self.out, *qkv_BTND, **how)


class MlpBlock(nnx.Module):
    """x + down(gelu(up(norm(x)))): (B, T, H)."""

    def __init__(self, config: ViTConfig, layers: Layers, *, rngs: nnx.Rngs):
        linear = functools.partial(_linear, config, layers.linear, rngs)
        H, F = config.hidden, config.ffn
        self.norm = _norm(config, layers.norm, rngs)
        self.up = linear(H, F, std=_std(H))
        self.down = linear(F, H, std=_std(F, adding=2 * config.layers))

    def __call__(self, x_BTH):
        """The residual stream, with the MLP's result added."""
        return nn.mlp(self.norm, [self.up], "gelu_tanh", self.down, x_BTH, x_BTH)


class EncoderBlock(nnx.Module):
    """Attention, then the MLP."""

    def __init__(self, config: ViTConfig, layers: Layers, *, rngs: nnx.Rngs):
        self.attention = AttentionBlock(config, layers, rngs=rngs)
        self.mlp = MlpBlock(config, layers, rngs=rngs)

    def __call__(self, x_BTH):
        """(B, T, H) to (B, T, H)."""
        return self.mlp(self.attention(x_BTH))


class ViT(nnx.Module):
    """Images (B, S, S, C) of about unit variance to logits (B, K), compute dtype.

    The first logits are small (a quarter of a unit), so that the first loss is
    ln(K) + 0.03.
    """

    def __init__(
        self, config: ViTConfig, layers: Layers | None = None, *, rngs: nnx.Rngs
    ):
        layers = layers or Layers()
        self.config = config
        linear = functools.partial(_linear, config)
        hidden, pixels = config.hidden, config.patch**2 * config.channels
        self.embed = linear(layers.embed, rngs, pixels, hidden, std=_std(pixels))
        make_rows = nnx.initializers.normal(0.02)
        draw = lambda shape: make_rows(rngs.params(), shape, config.param_dtype)
        self.position = nnx.Param(draw((config.tokens, hidden)))
        if config.pool == "cls":
            self.cls = nnx.Param(draw((1, hidden)))
        make = lambda key: EncoderBlock(config, layers, rngs=nnx.Rngs(key))
        self.blocks = nnx.vmap(make)(jax.random.split(rngs.params(), config.layers))
        self.norm = _norm(config, layers.final_norm, rngs)
        small = 0.25 * _std(hidden)
        self.head = linear(layers.head, rngs, hidden, config.classes, std=small)

    def __call__(self, images_BSSC):
        """Logits (B, K) of each image's class."""
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bf16 and f32
            return self.head(self._pooled(images_BSSC.astype(self.config.dtype)))

    def _pooled(self, images_BSSC):
        graph, stacked = nnx.split(self.blocks)
        block = lambda x_BTH, params: (nnx.merge(graph, params)(x_BTH), None)
        if self.config.remat:
            block = jax.checkpoint(block)
        x_BTH, _ = jax.lax.scan(block, self._tokens(images_BSSC), stacked)
        if self.config.pool == "cls":
            return self.norm(x_BTH[:, 0])
        return jnp.mean(self.norm(x_BTH), axis=1)

    def _tokens(self, images_BSSC):
        x_BPH = self.embed(patches(images_BSSC, self.config.patch))
        B, _, H = x_BPH.shape
        if self.config.pool == "cls":
            cls_11H = self.cls[...].astype(x_BPH.dtype)[None]
            first_B1H = jnp.broadcast_to(cls_11H, (B, 1, H))
            x_BPH = jnp.concatenate([first_B1H, x_BPH], axis=1)
        return x_BPH + self.position[...].astype(x_BPH.dtype)[None]


def init_params(config: ViTConfig, key, *, layers: Layers | None = None):
    """A nested dict of arrays: the parameters of `ViT`. Works under `eval_shape`."""
    return nnx.to_pure_dict(nnx.state(ViT(config, layers, rngs=nnx.Rngs(key))))


def make_apply(config: ViTConfig, *, layers: Layers | None = None):
    """The model as a function: apply(params, images) -> logits."""
    build = lambda: ViT(config, layers, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(nnx.eval_shape(build))
    return lambda params, images: nnx.merge(graph, params)(images)


def make_loss(config: ViTConfig, *, layers: Layers | None = None):
    """loss(params, (images, labels), key), as `classification_loss` has it."""
    return classification_loss(make_apply(config, layers=layers))


def count_params(config: ViTConfig) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["b16"])
      86567656
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
