"""A residual convolutional network: stages of pre-activation blocks, pooling, one head.

Shape letters: B images, R rows, Q columns, C channels, K classes. Images are channels
last, (B, R, Q, C).

A block is two times norm, activation, convolution, and a shortcut around them:

    x + conv(act(norm(conv(act(norm(x))))))

The norm is over the channels of each pixel, not over the batch as in ResNet. Batch norm
has running statistics, which would make the loss a function of state that changes, and
its statistics couple the images of a batch; the channels' norm needs nothing but x, so
that the FP8 codes of x are all that a block's half has to keep for its backward.

The blocks run in a Python loop: their shapes change from stage to stage, and there are
too few of one shape for a scan to pay.

Source: He et al., arXiv 1603.05027 (pre-activation residual blocks).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp

from coat_jax import convolution, nn
from coat_jax.activations import FUNCTIONS
from coat_jax.models.classification import classification_loss
from coat_jax.policy import DEFAULT, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """Sizes of the network. Stage i has blocks[i] blocks of widths[i] channels.

    Every stage but the first halves rows and columns; the stem divides them by
    stem_stride. `dtype` computes, `param_dtype` is stored.
    """

    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    classes: int
    channels: int = 3
    stem_kernel: int = 3
    stem_stride: int = 1
    activation: str = "relu"
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        sizes = (*self.widths, *self.blocks, self.classes, self.channels)
        if not self.widths or len(self.widths) != len(self.blocks) or min(sizes) < 1:
            raise ValueError(
                "CnnConfig: widths and blocks must have one positive number a stage, "
                "classes and channels be positive, got "
                f"{self.widths}, {self.blocks}, {self.classes}, {self.channels}"
            )
        if self.activation not in FUNCTIONS:
            raise ValueError(
                f"CnnConfig: activation must be one of {', '.join(FUNCTIONS)}, got "
                f"{self.activation!r}"
            )


PRESETS = {
    "micro": CnnConfig(widths=(8, 16), blocks=(1, 1), classes=10, channels=1),
    "small": CnnConfig(widths=(48, 96, 192), blocks=(2, 2, 2), classes=10, channels=1),
    # Widths and depths of ResNet-18. Its stem of stride 2 and its max pooling, of
    # stride 2 again, are one stride of 4 here.
    "resnet18": CnnConfig(
        widths=(64, 128, 256, 512),
        blocks=(2, 2, 2, 2),
        classes=1000,
        stem_kernel=7,
        stem_stride=4,
    ),
}


def _types(config) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _norm(config, make, rngs, width: int):
    how = {"epsilon": config.norm_eps, **_types(config)}
    return make(width, rngs=rngs, **how)


def _conv(config, make, rngs, width_in, width, *, kernel, strides=1, adding=1):
    # He et al., arXiv 1502.01852: unit variance after a ReLU. What `adding` blocks put
    # on the residual stream has it together.
    std = (2 / (adding * kernel * kernel * width_in)) ** 0.5
    return make(
        width_in,
        width,
        kernel_size=(kernel, kernel),
        strides=(strides, strides),
        use_bias=False,
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
        **_types(config),
    )


def _linear(config, make, std: float):
    normal = nnx.initializers.normal(std)
    return functools.partial(make, kernel_init=normal, **_types(config))


class NormActConv(nnx.Module):
    """conv(activation(norm(x))), plus a residual: (B, R, Q, C) to (B, R', Q', C')."""

    def __init__(self, config, layers, width_in, width, *, rngs, strides=1, adding=1):
        self.activation = config.activation
        self.norm = _norm(config, layers.norm, rngs, width_in)
        how = {"kernel": 3, "strides": strides, "adding": adding}
        self.conv = _conv(config, layers.conv, rngs, width_in, width, **how)

    def __call__(self, x_BRQC, residual=None):
        """The convolution, added to `residual` where there is one."""
        y = self.conv(FUNCTIONS[self.activation](self.norm(x_BRQC)))
        return y if residual is None else residual + y


class Fp8NormActConv(NormActConv):
    """The same, keeping the FP8 codes of x and nothing else of its size.

    The norm, a LayerNorm with scale and bias, and the convolution own the parameters.
    """

    def __init__(self, *args, policy: Policy, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = policy

    def __call__(self, x_BRQC, residual=None):
        """The convolution, added to `residual` where there is one."""
        return convolution.norm_act_conv(
            x_BRQC,
            self.conv.kernel[...],
            norm="layer",
            scale=self.norm.scale[...],
            norm_bias=self.norm.bias[...],
            epsilon=self.norm.epsilon,
            activation=self.activation,
            strides=self.conv.strides,
            policy=self.policy,
            residual=residual,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the network is made of; each field takes its default's arguments.

    unit is norm, activation and convolution together, the unit at which activations are
    compressed; conv and norm are what it is made of, and linear the shortcut where the
    shape changes. stem, final_norm and head are the ends.
    """

    unit: Callable[..., Any] = NormActConv
    conv: Callable[..., Any] = nnx.Conv
    norm: Callable[..., Any] = nnx.LayerNorm
    linear: Callable[..., Any] = nnx.Linear
    stem: Callable[..., Any] = nnx.Conv
    final_norm: Callable[..., Any] = nnx.LayerNorm
    head: Callable[..., Any] = nnx.Linear


def fp8_layers(policy: Policy = DEFAULT) -> Layers:
    """The layers of a network whose blocks follow `policy`.

    Blocks keep codes; of their products only the shortcuts' are FP8, as XLA has no FP8
    convolution. The ends stay as they are. Under the BF16 policy the model is that of
    `Layers()`, bit for bit.

    Example:
      >>> layers = fp8_layers()
      >>> params = init_params(PRESETS["micro"], jax.random.key(0), layers=layers)
      >>> params["blocks"]["stage1_block0"]["first"]["conv"]["kernel"].shape
      (3, 3, 8, 16)
    """
    return Layers(
        unit=functools.partial(Fp8NormActConv, policy=policy),
        linear=functools.partial(nn.Linear, policy=policy),
    )


class Block(nnx.Module):
    """Two units and a shortcut: (B, R, Q, C) to (B, R / strides, Q / strides, C')."""

    def __init__(self, config, layers, width_in, width, *, rngs, strides=1):
        self.strides = strides
        unit = functools.partial(layers.unit, config, layers, rngs=rngs)
        self.first = unit(width_in, width, strides=strides)
        self.second = unit(width, width, adding=sum(config.blocks))
        same = strides == 1 and width_in == width
        project = _linear(config, layers.linear, width_in**-0.5)
        options = {"use_bias": False, "rngs": rngs}
        self.shortcut = None if same else project(width_in, width, **options)

    def __call__(self, x_BRQC):
        """The residual stream of the next block."""
        around = x_BRQC
        if self.shortcut is not None:
            # A 1 x 1 convolution with strides, as the product of the pixels it reads.
            step = self.strides
            around = self.shortcut(x_BRQC[:, ::step, ::step])
        return self.second(self.first(x_BRQC), residual=around)


class Cnn(nnx.Module):
    """Images (B, R, Q, C) of about unit variance to logits (B, K), compute dtype.

    The first logits are small (a quarter of a unit at most), so that the first loss is
    about ln(K).
    """

    def __init__(
        self, config: CnnConfig, layers: Layers | None = None, *, rngs: nnx.Rngs
    ):
        layers = layers or Layers()
        self.config = config
        first, last = config.widths[0], config.widths[-1]
        ends = {"kernel": config.stem_kernel, "strides": config.stem_stride}
        self.stem = _conv(config, layers.stem, rngs, config.channels, first, **ends)
        self.blocks = nnx.Dict(_blocks(config, layers, rngs))
        self.norm = _norm(config, layers.final_norm, rngs, last)
        small = _linear(config, layers.head, 0.25 * last**-0.5)
        self.head = small(last, config.classes, rngs=rngs)

    def __call__(self, images_BRQC):
        """Logits (B, K) of each image's class."""
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bf16 and f32
            x_BRQC = self.stem(images_BRQC.astype(self.config.dtype))
            for block in self.blocks.values():
                x_BRQC = block(x_BRQC)
            h_BRQC = FUNCTIONS[self.config.activation](self.norm(x_BRQC))
            return self.head(jnp.mean(h_BRQC, axis=(1, 2)))


def _blocks(config: CnnConfig, layers: Layers, rngs) -> dict[str, Block]:
    """Named by stage and place: "stage0_block1"."""
    made, width_in = {}, config.widths[0]
    for stage, width in enumerate(config.widths):
        for place in range(config.blocks[stage]):
            how = {"rngs": rngs, "strides": 2 if stage and not place else 1}
            name = f"stage{stage}_block{place}"
            made[name] = Block(config, layers, width_in, width, **how)
            width_in = width
    return made


def init_params(config: CnnConfig, key, *, layers: Layers | None = None):
    """A nested dict of arrays: the parameters of `Cnn`. Works under `eval_shape`."""
    return nnx.to_pure_dict(nnx.state(Cnn(config, layers, rngs=nnx.Rngs(key))))


def make_apply(config: CnnConfig, *, layers: Layers | None = None):
    """The model as a function: apply(params, images) -> logits."""
    build = lambda: Cnn(config, layers, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(nnx.eval_shape(build))
    return lambda params, images: nnx.merge(graph, params)(images)


def make_loss(config: CnnConfig, *, layers: Layers | None = None):
    """loss(params, (images, labels), key), as `classification_loss` has it."""
    return classification_loss(make_apply(config, layers=layers))


def count_params(config: CnnConfig) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["resnet18"])
      11687720
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
