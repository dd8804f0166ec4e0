"""Flax Linen's layers with an FP8 policy: the same classes, fields and parameters.

Each derives from Flax's own and adds the field `policy`, so that parameters move both
ways; initial values are Flax's, bit for bit. With a policy that is `plain` a layer is
Flax's computation, bit for bit; otherwise it calls the function of the same name in
this library, with parameters in the dtype they are stored in and a bias added in
float32. Fields that would make the product themselves are refused beside an FP8 policy.
"""

from collections.abc import Sequence
import math
from typing import no_type_check

from flax import linen as nn
from flax.core import meta
from flax.linen.dtypes import canonicalize_dtype, promote_dtype
import jax
from jax import lax
from jax import numpy as jnp

from coat_jax import convolution, linear, norms
from coat_jax.einsum import bias_shape, fp8_einsum, parse
from coat_jax.policy import DEFAULT, Policy

# What each field that an FP8 policy has no place for holds where nobody has set it.
_UNSET = {
    "dot_general": (None,),
    "dot_general_cls": (None,),
    "qkv_dot_general": (None,),
    "qkv_dot_general_cls": (None,),
    "out_dot_general": (None,),
    "out_dot_general_cls": (None,),
    "qk_attn_weights_einsum_cls": (None,),
    "attn_weights_value_einsum_cls": (None,),
    "conv_general_dilated": (None,),
    "conv_general_dilated_cls": (None,),
    "precision": (None, "default", lax.Precision.DEFAULT),
    "preferred_element_type": (None,),
    "promote_dtype": (promote_dtype,),
    "reduction_axes": (-1, (-1,)),
    "feature_axes": (-1, (-1,)),
    "axis_name": (None,),
    "axis_index_groups": (None,),
    "use_fast_variance": (True,),
    "force_float32_reductions": (True,),
    "attention_fn": (nn.dot_product_attention,),
    "decode": (False,),
}


@no_type_check
class Dense(nn.Dense):
    """`nn.Dense` with an FP8 product.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> layer = Dense(32)
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 32)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, inputs):
        """(..., features of the input) to (..., features)."""
        if self.policy.plain:
            return super().__call__(inputs)
        require_unset(self)
        shape = (inputs.shape[-1], self.features)
        kernel, bias = declare(self, shape, shape[1:], self.use_bias)
        x = enter(self.dtype, inputs, kernel, bias)
        return linear.linear(x, kernel, bias, policy=self.policy)


@no_type_check
class DenseGeneral(nn.DenseGeneral):
    """`nn.DenseGeneral` with an FP8 product over any axes.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> layer = DenseGeneral((4, 8))
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 4, 8)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, inputs):
        """The axes `axis` replaced by `features`, at the end."""
        if self.policy.plain:
            return super().__call__(inputs)
        require_unset(self)
        many = lambda value: (value,) if isinstance(value, int) else tuple(value)
        axes = sorted(axis % inputs.ndim for axis in many(self.axis))
        batch = sorted(axis % inputs.ndim for axis in many(self.batch_dims))
        sizes = lambda some: tuple(inputs.shape[axis] for axis in some)
        features = many(self.features)
        shape = sizes(batch) + sizes(axes) + features
        flat = (len(batch), len(batch + axes))
        bias_of = sizes(batch) + features
        kernel, bias = declare(self, shape, bias_of, self.use_bias, flat=flat)
        x = enter(self.dtype, inputs, kernel, bias)
        numbers = ((axes, [*range(*flat)]), (batch, [*range(len(batch))]))
        y = linear.fp8_dot_general(
            x, kernel, numbers, None, jnp.float32, policy=self.policy
        )
        if bias is not None:
            free = inputs.ndim - len(axes) - len(batch)
            bias = bias.reshape(*sizes(batch), *(1,) * free, *features)
        return linear.finish(y, bias, None, x.dtype)


@no_type_check
class Einsum(nn.Einsum):
    """`nn.Einsum` with an FP8 product.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> layer = Einsum((16, 4, 8), "bh,hnd->bnd")
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 4, 8)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, inputs, einsum_str=None):
        """The einsum of inputs and kernel."""
        if self.policy.plain:
            return super().__call__(inputs, einsum_str)
        require_unset(self)
        text = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        labels = parse(text, inputs, jax.ShapeDtypeStruct(self.shape, jnp.float32))
        wide = bias_shape(labels, self.shape)
        both = zip(labels.result, wide, strict=True)
        own = tuple(size for label, size in both if label in labels.kernel)
        kernel, bias = declare(self, self.shape, own, self.use_bias)
        x = enter(self.dtype, inputs, kernel, bias)
        how = {"preferred_element_type": jnp.float32, "policy": self.policy}
        y = fp8_einsum(text, x, kernel, **how)
        bias = bias if bias is None else bias.reshape(wide)
        return linear.finish(y, bias, None, x.dtype)


@no_type_check
class Conv(nn.Conv):
    """`nn.Conv` that keeps the FP8 codes of its input; windows of 1 are FP8 products.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
      >>> layer = Conv(16, (3, 3))
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 8, 8, 16)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, inputs):
        """(*batch, *space, channels) to (*batch, *space, features)."""
        if self.policy.plain:
            return super().__call__(inputs)
        require_unset(self)
        size = self.kernel_size
        size = (size,) if isinstance(size, int) else tuple(size)
        channels = inputs.shape[-1] // self.feature_group_count
        shape = (*size, channels, self.features)
        kernel, bias = declare(self, shape, shape[-1:], self.use_bias)
        x = enter(self.dtype, inputs, kernel, bias)
        if self.mask is not None:
            kernel = kernel * self.mask.astype(kernel.dtype)
        return convolution.conv(
            x,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            policy=self.policy,
        )


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that keeps its input as FP8 codes; with a mask it is Flax's.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> layer = RMSNorm()
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 16)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, x, *, mask=None):
        """x / sqrt(mean(x^2) + epsilon) * scale."""
        if self.policy.plain or mask is not None:
            return super().__call__(x, mask=mask)
        scale, _ = norm_parameters(self, x.shape[-1:])
        y = norms.rms_norm(x, scale, epsilon=self.epsilon, policy=self.policy)
        return y.astype(compute_dtype(self.dtype, x, scale))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that keeps its input as FP8 codes; with a mask it is Flax's.

    Example:
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> layer = LayerNorm()
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 16)
    """

    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, x, *, mask=None):
        """(x - mean) / sqrt(var + epsilon) * scale + bias."""
        if self.policy.plain or mask is not None:
            return super().__call__(x, mask=mask)
        scale, bias = norm_parameters(self, x.shape[-1:])
        how = {"epsilon": self.epsilon, "policy": self.policy}
        y = norms.layer_norm(x, scale, bias, **how)
        return y.astype(compute_dtype(self.dtype, x, scale, bias))


def require_unset(module: nn.Module) -> None:
    """Raises where a field contradicts an FP8 policy."""
    for name, unset in _UNSET.items():
        value = getattr(module, name, unset[0])
        variance = name == "use_fast_variance" and isinstance(module, nn.RMSNorm)
        if value not in unset and not variance:
            raise NotImplementedError(
                f"{type(module).__name__}: its {name} is {value!r}, which an FP8 "
                "policy has no place for; leave it out or take policy BF16"
            )


def declare(
    module: nn.Module,
    shape: Sequence[int],
    bias_shape: Sequence[int],
    use_bias: bool,
    *,
    flat: tuple[int, int] | None = None,
):
    """Kernel and bias (or None) of a module, drawn as Flax draws them.

    Args:
      module: has kernel_init, bias_init and param_dtype; it is in its compact method.
      shape: of the kernel.
      bias_shape: of the bias.
      use_bias: whether there is one.
      flat: where the initialisers see the kernel as a matrix and the bias as a vector:
        how many axes are batch axes, and how many the matrix's rows stand for.
    """
    draw, draw_bias = module.kernel_init, module.bias_init
    if flat is not None:
        rows = math.prod(shape[: flat[1]])
        matrix = (rows, math.prod(shape[flat[1] :]))
        draw = _reshaped(draw, matrix)
        draw_bias = _reshaped(draw_bias, (math.prod(bias_shape),))
    dtype = module.param_dtype
    kernel = module.param("kernel", draw, tuple(shape), dtype)
    bias = (
        module.param("bias", draw_bias, tuple(bias_shape), dtype) if use_bias else None
    )
    return kernel, bias


def _reshaped(init, drawn):
    """An initialiser that draws an array of shape `drawn`, and reshapes it."""

    def draw(rng, shape, dtype):
        values = init(rng, drawn, dtype)
        if isinstance(values, meta.AxisMetadata):
            return meta.replace_boxed(values, values.unbox().reshape(shape))
        return values.reshape(shape)

    return draw


def norm_parameters(norm: nn.Module, shape: tuple[int, ...]):
    """Scale and bias of a norm, None for each that it hasn't."""
    require_unset(norm)
    scale, bias, dtype = None, None, norm.param_dtype
    if norm.use_scale:
        scale = norm.param("scale", norm.scale_init, shape, dtype)
    if getattr(norm, "use_bias", False):
        bias = norm.param("bias", norm.bias_init, shape, dtype)
    return scale, bias


def enter(dtype, x, *params) -> jax.Array:
    """x in the compute dtype. Parameters stay: a copy of them would be kept."""
    x = jnp.asarray(x)
    return x.astype(compute_dtype(dtype, x, *params))


def compute_dtype(dtype, x, *params) -> jnp.dtype:
    """`dtype`, or what Flax infers from x and the parameters."""
    arrays = [array for array in (x, *params) if array is not None]
    return jnp.dtype(canonicalize_dtype(*arrays, dtype=dtype))
