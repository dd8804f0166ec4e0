"""SiLU, GELU, ReLU and gated products that keep their inputs in FP8."""

from collections.abc import Callable
import functools
from typing import Literal

import jax
from jax import numpy as jnp

from coat_jax import recompute
from coat_jax.kernels.prologue import Rowwise
from coat_jax.policy import DEFAULT, Policy, check_policy
from coat_jax.typing import Array, Float

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]

# The ordinary functions, by the names that blocks and models take.
FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


def silu(x: Float[Array, "..."], *, policy: Policy = DEFAULT) -> Float[Array, "..."]:
    """x sigmoid(x): see `activate`.

    Example:
      >>> round(float(silu(jnp.array(1.0))), 4)
      0.7311
    """
    return activate(x, activation="silu", policy=policy)


def gelu(
    x: Float[Array, "..."], *, approximate: bool = True, policy: Policy = DEFAULT
) -> Float[Array, "..."]:
    """x Phi(x), or its tanh form as `jax.nn.gelu` has it: see `activate`.

    Example:
      >>> round(float(gelu(jnp.array(1.0), approximate=False)), 4)
      0.8413
    """
    name = "gelu_tanh" if approximate else "gelu"
    return activate(x, activation=name, policy=policy)


def relu(x: Float[Array, "..."], *, policy: Policy = DEFAULT) -> Float[Array, "..."]:
    """max(x, 0): see `activate`.

    Example:
      >>> relu(jnp.array([-1.0, 2.0])).tolist()
      [0.0, 2.0]
    """
    return activate(x, activation="relu", policy=policy)


def relu_squared(
    x: Float[Array, "..."], *, policy: Policy = DEFAULT
) -> Float[Array, "..."]:
    """max(x, 0)^2 (So et al., arXiv 2109.08668): see `activate`.

    Example:
      >>> relu_squared(jnp.array([-1.0, 2.0])).tolist()
      [0.0, 4.0]
    """
    return activate(x, activation="relu_squared", policy=policy)


def activate(
    x: Float[Array, "..."], *, activation: Activation, policy: Policy = DEFAULT
) -> Float[Array, "..."]:
    """activation(x), keeping x as FP8 codes.

    The forward is computed in float32 and rounded once (from the stored x where
    `policy.kept.in_forward`); the backward is g activation'(stored x). Elements so
    small beside their group's maximum that they are stored as zero get the derivative
    at zero.

    Args:
      x: any shape, bfloat16, float16 or float32; its codes are all that is kept.
      activation: silu, gelu (exact), gelu_tanh, relu or relu_squared.
      policy: `kept` says how x is kept.

    Returns:
      An array like x.

    Raises:
      ValueError: if there is no such activation.

    Example:
      >>> activate(jnp.array([0.0, 3.0]), activation="relu").tolist()
      [0.0, 3.0]
    """
    check_policy("activate", policy)
    f = function(activation)
    if policy.plain or policy.kept.format is None:
        return f(x)
    (y,) = recompute.recompute(product_of(activation), [], [x], policy=policy)
    return y.astype(x.dtype)


def gated(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    *,
    activation: Activation = "silu",
    policy: Policy = DEFAULT,
) -> Float[Array, "..."]:
    """activation(gate) * up, keeping both as FP8 codes and nothing else.

    As `activate` in what is kept and how it is differentiated.

    Args:
      gate: any shape, bfloat16, float16 or float32.
      up: like gate.
      activation: as in `activate`.
      policy: `kept` says how both are kept.

    Returns:
      An array like gate.

    Raises:
      ValueError: if there is no such activation, or the shapes differ.

    Source: Shazeer (arXiv 2002.05202), equation 6 (SwiGLU is silu).

    Example:
      >>> gated(jnp.array([3.0]), jnp.array([2.0]), activation="relu").tolist()
      [6.0]
    """
    check_policy("gated", policy)
    f = function(activation)
    if gate.shape != up.shape:
        raise ValueError(
            f"gated: gate and up must have one shape, got {gate.shape} and {up.shape}"
        )
    if policy.plain or policy.kept.format is None:
        return f(gate) * up
    (y,) = recompute.recompute(product_of(activation), [], [gate, up], policy=policy)
    return y.astype(gate.dtype)


def function(activation: Activation) -> Callable[..., jax.Array]:
    """The ordinary function of that name, or a ValueError that lists them."""
    if activation not in FUNCTIONS:
        raise ValueError(
            f"activation must be one of {', '.join(FUNCTIONS)}, got {activation!r}"
        )
    return FUNCTIONS[activation]


def product_of(activation: Activation) -> Rowwise:
    """activation(x), times a second x if there is one: a prologue of `recompute`."""
    f = function(activation)

    def product(columns, rows, x, *up):
        del columns, rows
        return f(x) * up[0] if up else f(x)

    return Rowwise(lambda *xs: [], product)
