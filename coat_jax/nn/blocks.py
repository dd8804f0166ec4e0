"""Feed-forward layers and transformer blocks, made of layers that may be replaced.

A block calls its parts through `coat_jax.nn.functional`: put any other module in the
place of one, a tensor-train layer for `mlp.down` say, and the block is right, and keeps
what the parts keep.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp

from coat_jax.activations import Activation
from coat_jax.nn.attention import Attention
from coat_jax.nn.functional import mlp
from coat_jax.nn.layers import LayerNorm, Linear, RMSNorm
from coat_jax.policy import DEFAULT, Policy

Init = Callable[..., Any]
_kernel_init = nnx.initializers.lecun_normal()
_bias_init = nnx.initializers.zeros_init()


class MLP(nnx.Module):
    """down(activation(up(x))): keeps one byte for each element of x and of up(x).

    Args:
      in_features: of x.
      hidden_features: of up(x).
      out_features: of the result; in_features if None.
      activation: as in `coat_jax.activations.activate`.
      use_bias: of both.
      dtype, param_dtype, kernel_init, bias_init, rngs: as `nnx.Linear` takes them.
      policy: of both.

    Example:
      >>> jax.eval_shape(MLP(16, 64, rngs=nnx.Rngs(0)), jnp.ones((2, 16))).shape
      (2, 16)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu_tanh",
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Init = _kernel_init,
        bias_init: Init = _bias_init,
        policy: Policy = DEFAULT,
        rngs: nnx.Rngs,
    ):
        make = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            policy=policy,
            rngs=rngs,
        )
        self.activation = activation
        self.up = make(in_features, hidden_features)
        self.down = make(hidden_features, out_features or in_features)

    def __call__(self, x, *, norm: nnx.Module | None = None, residual=None):
        """residual + MLP(norm(x)): (..., in_features) to (..., out_features)."""
        return mlp(norm, [self.up], self.activation, self.down, x, residual)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)): keeps the codes of x, gate(x) and up(x).

    Arguments as in `MLP`.

    Example:
      >>> jax.eval_shape(GatedMLP(16, 64, rngs=nnx.Rngs(0)), jnp.ones((2, 16))).shape
      (2, 16)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "silu",
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Init = _kernel_init,
        bias_init: Init = _bias_init,
        policy: Policy = DEFAULT,
        rngs: nnx.Rngs,
    ):
        make = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            policy=policy,
            rngs=rngs,
        )
        self.activation = activation
        self.gate = make(in_features, hidden_features)
        self.up = make(in_features, hidden_features)
        self.down = make(hidden_features, out_features or in_features)

    def __call__(self, x, *, norm: nnx.Module | None = None, residual=None):
        """residual + MLP(norm(x)): (..., in_features) to (..., out_features)."""
        into = [self.gate, self.up]
        return mlp(norm, into, self.activation, self.down, x, residual)


class _Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_norm: nnx.Module
    attention: Attention
    mlp_norm: nnx.Module
    mlp: MLP | GatedMLP

    def __call__(self, x: jax.Array, **attend):
        """(*batch, T, features) to the same; attend as `Attention` takes it."""
        x = self.attention(x, norm=self.attention_norm, residual=x, **attend)
        return self.mlp(x, norm=self.mlp_norm, residual=x)


class DecoderBlock(_Block):
    """Pre-norm decoder block: RMSNorm, causal attention with RoPE, gated MLP.

    Args:
      features: of the residual stream.
      hidden_features: of the MLP.
      num_heads: of queries.
      num_kv_heads: of keys and values; num_heads if None.
      head_dim: elements of a head; features / num_heads if None.
      activation: of the gate.
      rope_base: of RoPE, or None for no positions.
      epsilon: of both norms.
      use_bias: of all linear maps.
      normalize_qk, dtype, param_dtype, kernel_init, bias_init, rngs: as
        `nnx.MultiHeadAttention` takes them.
      implementation: as in `coat_jax.attention.dot_product_attention`.
      policy: of every layer.

    Example:
      >>> block = DecoderBlock(32, 64, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> jax.eval_shape(block, jnp.ones((2, 6, 32))).shape
      (2, 6, 32)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        activation: Activation = "silu",
        rope_base: float | None = 10_000.0,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        normalize_qk: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Init = _kernel_init,
        bias_init: Init = _bias_init,
        implementation: Any = None,
        policy: Policy = DEFAULT,
        rngs: nnx.Rngs,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "policy": policy}
        both["rngs"] = rngs
        init = {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "use_bias": use_bias,
        }
        self.attention_norm = RMSNorm(features, epsilon=epsilon, **both)
        self.attention = Attention(
            num_heads,
            features,
            head_dim and head_dim * num_heads,
            num_kv_heads=num_kv_heads,
            normalize_qk=normalize_qk,
            rope_base=rope_base,
            implementation=implementation,
            **init,
            **both,
        )
        self.mlp_norm = RMSNorm(features, epsilon=epsilon, **both)
        gated = functools.partial(GatedMLP, activation=activation, **init, **both)
        self.mlp = gated(features, hidden_features)

    def __call__(self, x, *, is_causal: bool = True, **attend):
        """(*batch, T, features) to the same; attend as `Attention` takes it."""
        return super().__call__(x, is_causal=is_causal, **attend)


class EncoderBlock(_Block):
    """Pre-norm encoder block: LayerNorm, attention to all, MLP with GELU.

    Arguments as in `DecoderBlock`.

    Example:
      >>> block = EncoderBlock(32, 64, 4, rngs=nnx.Rngs(0))
      >>> jax.eval_shape(block, jnp.ones((2, 6, 32))).shape
      (2, 6, 32)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_heads: int,
        *,
        activation: Activation = "gelu_tanh",
        rope_base: float | None = None,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        normalize_qk: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Init = _kernel_init,
        bias_init: Init = _bias_init,
        implementation: Any = None,
        policy: Policy = DEFAULT,
        rngs: nnx.Rngs,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "policy": policy}
        both["rngs"] = rngs
        init = {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "use_bias": use_bias,
        }
        self.attention_norm = LayerNorm(features, epsilon=epsilon, **both)
        self.attention = Attention(
            num_heads,
            features,
            normalize_qk=normalize_qk,
            rope_base=rope_base,
            implementation=implementation,
            **init,
            **both,
        )
        self.mlp_norm = LayerNorm(features, epsilon=epsilon, **both)
        plain = functools.partial(MLP, activation=activation, **init, **both)
        self.mlp = plain(features, hidden_features)
