"""Convolutions that keep the FP8 codes of their input.    Channels are the last axis.

XLA has no FP8 convolution for training, so the convolution itself runs in the input's
dtype, and its backward reads the decoded input. A convolution that sees one pixel at a
time (a window of 1) is a matrix product, and that is FP8.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp

from coat_jax import activations, linear, norms, recompute
from coat_jax.activations import Activation
from coat_jax.norms import Norm
from coat_jax.policy import DEFAULT, Policy
from coat_jax.typing import Array, Float

Sizes = int | Sequence[int] | None
Padding = str | int | Sequence[int | tuple[int, int]]
_MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


class Window(NamedTuple):
    """How a kernel moves over the pixels; fields but groups have one entry an axis."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Any  # pairs, or a name
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    groups: int

    @property
    def pointwise(self) -> bool:
        """Whether each pixel of the result is made from one pixel of the input."""
        named = isinstance(self.padding, str)
        still = named or not any(edge for pair in self.padding for edge in pair)
        ones = set(self.size + self.input_dilation) == {1}
        return ones and still and self.groups == 1


def conv(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, " out"] | None = None,
    *,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    input_dilation: Sizes = 1,
    kernel_dilation: Sizes = 1,
    feature_group_count: int = 1,
    policy: Policy = DEFAULT,
    residual: Float[Array, "..."] | None = None,
    out_sharding=None,
) -> Float[Array, "..."]:
    """residual + conv(x, kernel) + bias: `norm_act_conv` without either.

    Example:
      >>> x, w = jnp.ones((1, 4, 4, 8)), jnp.ones((3, 3, 8, 16))
      >>> y = conv(x, w, padding="VALID")
      >>> y.shape, float(y[0, 0, 0, 0])
      ((1, 2, 2, 16), 72.0)
    """
    return norm_act_conv(
        x,
        kernel,
        bias,
        strides=strides,
        padding=padding,
        input_dilation=input_dilation,
        kernel_dilation=kernel_dilation,
        feature_group_count=feature_group_count,
        policy=policy,
        residual=residual,
        out_sharding=out_sharding,
    )


def norm_act_conv(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, " out"] | None = None,
    *,
    norm: Norm | None = None,
    scale: Float[Array, " features"] | None = None,
    norm_bias: Float[Array, " features"] | None = None,
    epsilon: float = 1e-6,
    activation: Activation | None = None,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    input_dilation: Sizes = 1,
    kernel_dilation: Sizes = 1,
    feature_group_count: int = 1,
    policy: Policy = DEFAULT,
    residual: Float[Array, "..."] | None = None,
    out_sharding=None,
) -> Float[Array, "..."]:
    """residual + conv(activation(norm(x)), kernel) + bias: keeps the codes of x alone.

    The kernel is referred to. The forward convolves in x's dtype; the backward decodes
    x, normalises and activates it again, and is the gradient at that stored value,
    |stored - x| <= max(u |x|, a s) with u and a the format's unit roundoff and half
    subnormal step, and s the scale of x's group of channels. Where the window is one
    pixel, the product is FP8 and has `fp8_dot_general`'s bound; strides then drop
    pixels before anything is kept.

    Args:
      x: (*batch, *space, channels), bfloat16, float16 or float32.
      kernel: (*window, channels / feature_group_count, out).
      bias: (out,), or None.
      norm: "rms" or "layer" over the channels, or None.
      scale: the norm's, (channels,), or None.
      norm_bias: the norm's, (channels,), or None.
      epsilon: the norm's.
      activation: as in `coat_jax.activations.activate`, or None.
      strides: of the window, one number or one an axis.
      padding: SAME, VALID, SAME_LOWER, CIRCULAR, REFLECT, CAUSAL (one axis), a number,
        or for each axis a number or a pair.
      input_dilation: of the pixels.
      kernel_dilation: of the window.
      feature_group_count: groups of channels that are convolved apart.
      policy: `kept` says how x is kept; the operands' records serve windows of 1.
      residual: like the result, added before the one rounding, or None.
      out_sharding: of the result, where axes are Explicit.

    Returns:
      (*batch, *space, out) in x's dtype.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if sizes, padding or names don't fit.

    Example:
      >>> x, w = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 16)) / 36
      >>> norm_act_conv(x, w, norm="rms", activation="relu", strides=2).shape
      (2, 4, 4, 16)
    """
    axes = kernel.ndim - 2
    window = Window(
        size=kernel.shape[:axes],
        strides=_per_axis("strides", strides, axes),
        padding=_padding(padding, axes),
        input_dilation=_per_axis("input_dilation", input_dilation, axes),
        kernel_dilation=_per_axis("kernel_dilation", kernel_dilation, axes),
        groups=feature_group_count,
    )
    _check(x, kernel, bias, window)
    norms.check_norm("norm_act_conv", x, scale, norm_bias)
    before = functools.partial(
        _before, norm=norm, epsilon=epsilon, activation=activation
    )
    params = [scale, norm_bias]
    how = {"policy": policy, "out_sharding": out_sharding}
    if window.pointwise and not policy.plain:
        y = _pointwise(before, params, x, kernel, window, **how)
    else:
        y = _convolved(before, params, x, kernel, window, **how)
    if policy.plain:
        y = y if bias is None else y + bias.astype(y.dtype).reshape(_row(y))
        return y if residual is None else residual + y
    return linear.finish(y, bias, residual, x.dtype)


def _row(y):
    return (1,) * (y.ndim - 1) + y.shape[-1:]


def _before(params, x, *, norm, epsilon, activation, dtype=None):
    """activation(norm(x)), each rounded to `dtype` where x is an ordinary array."""
    plain = dtype is None
    if norm is not None:
        if plain:
            params = [p if p is None else p.astype(x.dtype) for p in params]
        x = norms.function_of(norm, epsilon)(params, x).astype(x.dtype)
    if activation is not None:
        x = activations.function(activation)(x)
    return x if plain else x.astype(dtype)


def _pointwise(before, params, x, kernel, window: Window, *, policy, out_sharding):
    """A product of pixels and a matrix; x's skipped pixels are dropped first."""
    axes = len(window.size)
    steps = [slice(None, None, step) for step in window.strides]
    if any(step > 1 for step in window.strides):
        x = x[(..., *steps, slice(None))]
    matrix = kernel.reshape(kernel.shape[axes:])
    unchanged = before.keywords["norm"] is before.keywords["activation"] is None
    if unchanged or out_sharding is not None:
        numbers = linear.last_axes(x.ndim, 1)
        if not unchanged:
            (h,) = recompute.recompute(before, params, [x], policy=policy)
            x = h.astype(x.dtype)
        how = {"out_sharding": out_sharding}
        return linear.project(x, [matrix], numbers, policy, **how)[0]
    return recompute.recompute(before, params, [x], [matrix], policy=policy)[0]


def _convolved(before, params, x, kernel, window: Window, *, policy, out_sharding):
    """XLA's convolution in x's dtype, of one batch axis."""
    dtype, axes = x.dtype, len(window.size)
    batch = x.shape[: x.ndim - axes - 1]
    if len(batch) != 1:
        x = x.reshape(-1, *x.shape[len(batch) :])
    if policy.plain:
        y = _lax_conv(before(params, x), kernel.astype(dtype), window, out_sharding)
    else:

        def prologue(params, x):
            *norm, kernel = params
            h = before(norm, x, dtype=dtype)
            return _lax_conv(h, kernel.astype(dtype), window, out_sharding)

        params = [*params, kernel]
        (y,) = recompute.recompute(prologue, params, [x], policy=policy)
    return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])


def _lax_conv(x, kernel, window: Window, out_sharding):
    n, padding = len(window.size), window.padding
    spread = zip(window.size, window.kernel_dilation, strict=True)
    reach = [(size - 1) * dilation for size, dilation in spread]
    if padding in _MODES:
        pads = [(0, 0), *((r // 2, r - r // 2) for r in reach), (0, 0)]
        x, padding = jnp.pad(x, pads, mode=_MODES[padding]), "VALID"
    elif padding == "CAUSAL":
        padding = [(reach[0], 0)]
    last, space = (0, n + 1, *range(1, n + 1)), range(n)
    return lax.conv_general_dilated(
        x,
        kernel,
        window.strides,
        padding,
        lhs_dilation=window.input_dilation,
        rhs_dilation=window.kernel_dilation,
        dimension_numbers=lax.ConvDimensionNumbers(last, (n + 1, n, *space), last),
        feature_group_count=window.groups,
        out_sharding=out_sharding,
    )


def _per_axis(name: str, value: Sizes, axes: int) -> tuple[int, ...]:
    value = 1 if value is None else value
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes or any(size < 1 for size in sizes):
        raise ValueError(
            f"conv: {name} must be a positive number or one for each of the kernel's "
            f"{axes} window axes, got {value!r}"
        )
    return sizes


def _padding(padding: Padding, axes: int):
    names = ("SAME", "VALID", "SAME_LOWER", *_MODES, "CAUSAL")
    if isinstance(padding, str):
        if padding in names and (padding != "CAUSAL" or axes == 1):
            return padding
    else:
        each = (padding,) * axes if isinstance(padding, int) else tuple(padding)
        pairs = tuple((p, p) if isinstance(p, int) else tuple(p) for p in each)
        if len(pairs) == axes and all(len(pair) == 2 for pair in pairs):
            return pairs
    raise ValueError(
        f"conv: padding must be one of {', '.join(names)} (CAUSAL only for one axis), "
        f"a number, or a number or pair for each of {axes} axes, got {padding!r}"
    )


def _check(x, kernel, bias, window: Window) -> None:
    arrays = [a for a in (x, kernel, bias) if a is not None]
    for array in arrays:
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise TypeError(
                "conv: arrays must be bfloat16, float16 or float32, got "
                f"{array.dtype} of shape {array.shape}; cast it"
            )
    fits = x.ndim >= kernel.ndim - 1 and len(window.size) > 0
    if not fits or x.shape[-1] != kernel.shape[-2] * window.groups:
        raise ValueError(
            "conv: x must be (*batch, *space, channels) and kernel (*window, channels "
            f"/ feature_group_count, out), got shapes {x.shape} and {kernel.shape} "
            f"with feature_group_count {window.groups}"
        )
    if bias is not None and bias.shape != kernel.shape[-1:]:
        raise ValueError(
            f"conv: bias must have shape {kernel.shape[-1:]}, got {bias.shape}"
        )
