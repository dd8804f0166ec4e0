"""RMSNorm and LayerNorm over the last axis that keep their input in FP8."""

import functools
from typing import Literal

from jax import lax
from jax import numpy as jnp

from coat_jax import recompute
from coat_jax.kernels import norm as kernel
from coat_jax.policy import DEFAULT, Policy, check_policy
from coat_jax.typing import Array, Float

Norm = Literal["rms", "layer"]


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    policy: Policy = DEFAULT,
) -> Float[Array, "..."]:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, as `nnx.RMSNorm`.

    The forward is computed from x in float32 (from the stored x where
    `policy.kept.in_forward`). The backward is the gradient at the stored x,
    |stored - x| <= max(u |x|, a s), with u and a the format's unit roundoff and half
    subnormal step, and s the scale of x's group.

    Args:
      x: (..., features), bfloat16, float16 or float32; its codes are all that is kept.
      scale: (features,), or None for 1.
      epsilon: added to the mean square.
      policy: `kept` says how x is kept.

    Returns:
      An array like x.

    Raises:
      ValueError: if scale isn't (features,).

    Source: Zhang and Sennrich (arXiv 1910.07467), equation 4.

    Example:
      >>> y = rms_norm(jnp.array([3.0, 4.0]), epsilon=0.0)
      >>> [round(v, 4) for v in y.tolist()]
      [0.8485, 1.1314]
    """
    return _normalise("rms", x, scale, None, epsilon, policy)


def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, " features"] | None = None,
    bias: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    policy: Policy = DEFAULT,
) -> Float[Array, "..."]:
    """(x - mean) / sqrt(var + epsilon) * scale + bias over the last axis.

    As `rms_norm` in what is kept and how it is differentiated. The variance is
    mean(x^2) - mean(x)^2, at least zero, as in `nnx.LayerNorm`.

    Args:
      x: (..., features), bfloat16, float16 or float32; its codes are all that is kept.
      scale: (features,), or None for 1.
      bias: (features,), or None for 0. OLMo's norm has neither.
      epsilon: added to the variance.
      policy: `kept` says how x is kept.

    Returns:
      An array like x.

    Raises:
      ValueError: if scale or bias isn't (features,).

    Source: Ba, Kiros and Hinton (arXiv 1607.06450), equation 3.

    Example:
      >>> layer_norm(jnp.array([1.0, 3.0]), epsilon=0.0).tolist()
      [-1.0, 1.0]
    """
    return _normalise("layer", x, scale, bias, epsilon, policy)


def _normalise(norm: Norm, x, scale, bias, epsilon, policy: Policy):
    check_policy(f"{norm}_norm", policy)
    check_norm(f"{norm}_norm", x, scale, bias)
    plain = function_of(norm, epsilon)
    if policy.plain or policy.kept.format is None:
        # Flax brings parameters to the compute dtype first.
        params = [p if p is None else p.astype(x.dtype) for p in (scale, bias)]
        return plain(params, x).astype(x.dtype)
    (y,) = recompute.recompute(plain, [scale, bias], [x], policy=policy)
    return y.astype(x.dtype)


def function_of(norm: Norm, epsilon: float) -> kernel.Norm:
    """The norm itself, in at least float32, of [scale, bias], or None each, and x.

    The order of operations is Flax's, so that plain results are its bits.
    """
    statistics = functools.partial(_statistics, norm=norm, epsilon=epsilon)
    return kernel.Norm(statistics, _normalised, norm, epsilon)


def _widened(x):
    return x.astype(x.dtype if x.dtype.itemsize > 4 else jnp.float32)


def _statistics(x, *, norm: Norm, epsilon: float):
    """1 / sqrt(mean square + epsilon), behind it the mean if that is subtracted."""
    x = _widened(x)
    square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    if norm == "rms":
        return [lax.rsqrt(square + epsilon)]
    mean = jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.maximum(0.0, square - lax.square(mean))
    return [lax.rsqrt(square + epsilon), mean]


def _normalised(params, rows, x):
    # Its own cast, as Flax has it: a narrow x then gets the sum of two rounded
    # gradients.
    (scale, bias), (factor, *mean) = params, rows
    y = _widened(x)
    y = y - mean[0] if mean else y
    if scale is not None:
        factor = factor * _rows(scale, y)
    y = y * factor
    return y if bias is None else y + _rows(bias, y)


def _rows(param, x):
    """A parameter of the last axis, ready to meet x."""
    return param.astype(x.dtype).reshape((1,) * (x.ndim - 1) + param.shape[-1:])


def check_norm(who: str, x, scale, bias) -> None:
    """Raises unless scale and bias have one element for each of x's last axis."""
    for name, param in (("scale", scale), ("bias", bias)):
        if param is not None and param.shape != x.shape[-1:]:
            raise ValueError(
                f"{who}: {name} must have one element for each of x's last axis, got "
                f"{param.shape} for x of shape {x.shape}"
            )
