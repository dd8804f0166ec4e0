"""Flax NNX's layers with an FP8 policy: the same classes, arguments and parameters.

Each derives from Flax's own and adds `policy`. What Flax's constructor takes, ours
takes, and initialises to the same bits. With a policy that is `plain` it is Flax's
computation, bit for bit; otherwise it calls the function of the same name in this
library: inputs are brought to the compute dtype as Flax does, parameters are read in
the dtype they are stored in, and a bias is added in float32 before the one rounding.

A `promote_dtype` of your own is called in place of that. Hooks that would make the
product themselves (`dot_general`, `einsum_op`, `conv_general_dilated`) and `precision`
contradict an FP8 policy, and are refused beside one.
"""

from typing import Any

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
import jax
from jax import lax
from jax import numpy as jnp

from coat_jax import convolution, norms
from coat_jax.einsum import bias_shape, fp8_einsum, parse
from coat_jax.linear import finish, fp8_dot_general, last_axes
from coat_jax.policy import DEFAULT, Policy, check_policy

# One of Flax's classes, or ours; no base of theirs has what all of them have.
Layer = Any
# What each hook of Flax's layers holds where nobody has set it.
_UNSET = {
    "dot_general": (None, lax.dot_general),
    "dot_general_cls": (None,),
    "einsum_op": (jnp.einsum,),
    "conv_general_dilated": (lax.conv_general_dilated,),
    "precision": (None, "default", lax.Precision.DEFAULT),
    "axis_name": (None,),
    "axis_index_groups": (None,),
    "use_fast_variance": (True,),
    "reduction_axes": (-1, (-1,), [-1]),
    "feature_axes": (-1, (-1,), [-1]),
}


class Linear(nnx.Linear):
    """`nnx.Linear` with an FP8 product: x kernel + bias over the last axis.

    Args:
      *args: as `nnx.Linear` takes them.
      policy: formats, scaling and accumulation of the product.
      **options: as `nnx.Linear` takes them.

    Raises:
      NotImplementedError: for a hook or precision beside an FP8 policy.

    Example:
      >>> layer = Linear(16, 32, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16))).shape, isinstance(layer, nnx.Linear)
      ((2, 32), True)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, inputs, out_sharding=None):
        """(..., in_features) to (..., out_features)."""
        if self.policy.plain:
            return super().__call__(inputs, out_sharding)
        numbers = last_axes(inputs.ndim, 1)
        shape = (1,) * (inputs.ndim - 1) + (-1,)
        return _product(self, inputs, numbers, shape, out_sharding)


class LinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` with an FP8 product over any axes.

    Arguments and errors as in `Linear`.

    Example:
      >>> layer = LinearGeneral(16, (4, 8), rngs=nnx.Rngs(0))
      >>> jax.eval_shape(layer, jnp.ones((2, 3, 16))).shape
      (2, 3, 4, 8)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, inputs, out_sharding=None):
        """The axes `axis` replaced by `out_features`, at the end."""
        if self.policy.plain:
            return super().__call__(inputs, out_sharding)
        axes = sorted(axis % inputs.ndim for axis in self.axis)
        batch = sorted(axis % inputs.ndim for axis in self.batch_axis)
        ours = range(len(batch), len(batch) + len(axes))
        numbers = ((axes, [*ours]), (batch, [*range(len(batch))]))
        rest = [axis for axis in range(inputs.ndim) if axis not in axes]
        shape = [inputs.shape[axis] if axis in batch else 1 for axis in rest]
        shape = (*shape, *self.out_features)
        return _product(self, inputs, numbers, shape, out_sharding)


class Einsum(nnx.Einsum):
    """`nnx.Einsum` with an FP8 product.

    Arguments and errors as in `Linear`; an operand may name an axis once.

    Example:
      >>> layer = Einsum("bth,hnd->btnd", (16, 4, 8), rngs=nnx.Rngs(0))
      >>> jax.eval_shape(layer, jnp.ones((2, 3, 16))).shape
      (2, 3, 4, 8)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, inputs, einsum_str=None, out_sharding=None):
        """The einsum of inputs and kernel; einsum_str here or in the constructor."""
        if self.policy.plain or (einsum_str is None) == (self.einsum_str is None):
            return super().__call__(inputs, einsum_str, out_sharding)
        text = einsum_str or self.einsum_str
        x, kernel, bias = enter(self, inputs, self.kernel, self.bias)
        y = fp8_einsum(
            text,
            x,
            kernel,
            preferred_element_type=jnp.float32,
            policy=self.policy,
            out_sharding=out_sharding,
        )
        if bias is not None:
            bias = bias.reshape(bias_shape(parse(text, x, kernel), kernel.shape))
        return finish(y, bias, None, self.preferred_element_type or x.dtype)


class Conv(nnx.Conv):
    """`nnx.Conv` that keeps the FP8 codes of its input; windows of 1 are FP8 products.

    Arguments and errors as in `Linear`. A `mask` multiplies the kernel, as in Flax.

    Example:
      >>> layer = Conv(8, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> jax.eval_shape(layer, jnp.ones((2, 8, 8, 8))).shape
      (2, 4, 4, 16)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, inputs, out_sharding=None):
        """(*batch, *space, in_features) to (*batch, *space, out_features)."""
        if self.policy.plain:
            return super().__call__(inputs, out_sharding)
        x, kernel, bias = enter(self, inputs, self.kernel, self.bias)
        if self.mask is not None:
            if self.mask.shape != self.kernel_shape:
                raise ValueError(
                    f"Conv: mask must have the kernel's shape {self.kernel_shape}, got "
                    f"{self.mask.shape}"
                )
            kernel = kernel * self.mask.astype(kernel.dtype)
        y = convolution.conv(
            x,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            policy=self.policy,
            out_sharding=out_sharding,
        )
        return y.astype(self.preferred_element_type or y.dtype)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` that keeps its input as FP8 codes.

    Arguments as `nnx.RMSNorm` takes them, and `policy`. Norms over other axes than the
    last, or over devices, are refused beside an FP8 policy. A call with a `mask` is
    Flax's computation and keeps what Flax keeps.

    Example:
      >>> RMSNorm(16, rngs=nnx.Rngs(0))(jnp.ones((2, 16))).shape
      (2, 16)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, x, mask=None):
        """x / sqrt(mean(x^2) + epsilon) * scale."""
        if self.policy.plain or mask is not None:
            return super().__call__(x, mask=mask)
        x, scale = enter(self, x, self.scale)
        return norms.rms_norm(x, scale, epsilon=self.epsilon, policy=self.policy)


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` that keeps its input as FP8 codes.

    Arguments as `nnx.LayerNorm` takes them, and `policy`; what is refused, and what a
    `mask` does, as in `RMSNorm`. So is `use_fast_variance=False`.

    Example:
      >>> LayerNorm(16, rngs=nnx.Rngs(0))(jnp.ones((2, 16))).shape
      (2, 16)
    """

    policy: Policy

    def __init__(self, *args, policy: Policy = DEFAULT, **options):
        super().__init__(*args, **options)
        set_policy(self, policy)

    def __call__(self, x, *, mask=None):
        """(x - mean) / sqrt(var + epsilon) * scale + bias."""
        if self.policy.plain or mask is not None:
            return super().__call__(x, mask=mask)
        x, scale, bias = enter(self, x, self.scale, self.bias)
        how = {"epsilon": self.epsilon, "policy": self.policy}
        return norms.layer_norm(x, scale, bias, **how)


# Flax's class of each of ours.
OURS: dict[type, Any] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.Conv: Conv,
    nnx.RMSNorm: RMSNorm,
    nnx.LayerNorm: LayerNorm,
}


def refuses(layer: Layer, policy: Policy) -> str | None:
    """Why a layer, Flax's or ours, can't have this policy, or None."""
    if policy.plain:
        return None
    for name, unset in _UNSET.items():
        value = getattr(layer, name, unset[0])
        if name == "use_fast_variance" and isinstance(layer, nnx.RMSNorm):
            continue  # without a mean both ways of it are one
        if value not in unset:
            return f"its {name} is {value!r}, which an FP8 policy has no place for"
    return None


def set_policy(layer: Layer, policy: Policy) -> None:
    """Gives one of our layers its policy, or raises what `refuses` says."""
    check_policy(type(layer).__name__, policy)
    reason = refuses(layer, policy)
    if reason is not None:
        raise NotImplementedError(
            f"{type(layer).__name__}: {reason}; leave it out or take policy BF16"
        )
    layer.policy = policy


def adopt(layer: Layer, policy: Policy) -> None:
    """Turns one of Flax's layers into ours: the same object, the same Variables."""
    ours = OURS[type(layer)]
    set_policy(layer, policy)
    layer.__class__ = ours


def value_of(param) -> Any:
    """The array of a parameter that a layer may lack."""
    return None if param is None else param[...]


def enter(layer: Layer, x, *params):
    """x in the compute dtype, and the arrays of the parameters in their own.

    A bfloat16 copy of a float32 kernel would be kept until the backward.
    """
    arrays = [value_of(param) for param in params]
    if layer.promote_dtype is not promote_dtype:
        return layer.promote_dtype((x, *arrays), dtype=layer.dtype)
    x = jnp.asarray(x)
    return (x.astype(compute_dtype(layer, x.dtype)), *arrays)


def compute_dtype(layer: Layer, dtype) -> jnp.dtype:
    """What `layer` computes in, as Flax has it, when its input is of `dtype`."""
    if layer.dtype is not None:
        return jnp.dtype(layer.dtype)
    params = [getattr(layer, name, None) for name in ("kernel", "scale", "bias")]
    dtypes = [dtype, *(param.dtype for param in params if param is not None)]
    found = jnp.result_type(*dtypes)
    is_float = jnp.issubdtype(found, jnp.inexact)
    return found if is_float else jnp.promote_types(found, jnp.float32)


def _product(layer, inputs, numbers, shape, out_sharding) -> jax.Array:
    """The product, and a bias of `shape` in float32, rounded once."""
    x, kernel, bias = enter(layer, inputs, layer.kernel, layer.bias)
    y = fp8_dot_general(
        x,
        kernel,
        numbers,
        preferred_element_type=jnp.float32,
        policy=layer.policy,
        out_sharding=out_sharding,
    )
    bias = bias if bias is None else bias.reshape(shape)
    return finish(y, bias, None, layer.preferred_element_type or x.dtype)
