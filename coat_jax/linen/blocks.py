"""Transformer blocks for Linen, keeping what `coat_jax.fused` says.

Sub-modules hold parameters alone, under Flax's names; `coat_jax.fused` has the rest.
"""

from collections.abc import Callable
import functools
from typing import Any, no_type_check

from flax import linen as nn
from jax import numpy as jnp

from coat_jax import fused
from coat_jax.activations import Activation
from coat_jax.linen.layers import (
    LayerNorm,
    declare,
    enter,
    norm_parameters,
    require_unset,
)
from coat_jax.policy import DEFAULT, Policy
from coat_jax.rope import rope

Init = Callable[..., Any]
_kernel_init = nn.initializers.lecun_normal()
_bias_init = nn.initializers.zeros_init()


class _Affine(nn.Module):
    """The parameters of a linear map: kernel and bias."""

    shape: tuple[int, ...]
    rows: int  # how many axes of the kernel are contracted
    use_bias: bool
    param_dtype: Any
    kernel_init: Init
    bias_init: Init

    @nn.compact
    def __call__(self):
        flat, bias = (0, self.rows), self.shape[self.rows :]
        return declare(self, self.shape, bias, self.use_bias, flat=flat)


class _Scaled(nn.Module):
    """The parameters of a norm, as `coat_jax.fused` takes them."""

    norm: str
    features: int
    epsilon: float
    param_dtype: Any
    use_scale: bool = True
    scale_init: Init = nn.initializers.ones
    bias_init: Init = nn.initializers.zeros

    @property
    def use_bias(self) -> bool:
        """LayerNorm has a bias, RMSNorm has none."""
        return self.norm == "layer"

    @nn.compact
    def __call__(self):
        scale, bias = norm_parameters(self, (self.features,))
        how = {"norm": self.norm, "epsilon": self.epsilon}
        return {"scale": scale, "bias": bias, **how}


class MLP(nn.Module):
    """down(activation(up(x))): keeps one byte for each element of x and of up(x).

    Fields as in `coat_jax.nn.MLP`.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> jax.eval_shape(MLP(64).init_with_output, jax.random.key(0), x)[0].shape
      (2, 16)
    """

    hidden_features: int
    out_features: int | None = None
    activation: Activation = "gelu_tanh"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Init = _kernel_init
    bias_init: Init = _bias_init
    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, x, residual=None, **norm):
        """residual + MLP(norm(x)); norm as `coat_jax.fused.norm_linear` takes it."""
        shapes = _shapes(self, x)
        up, down = (_affine(self, name, shapes[name]) for name in ("up", "down"))
        x = enter(self.dtype, x, *up, *down)
        run = functools.partial(
            fused.mlp,
            x,
            up[0],
            down[0],
            (up[1], down[1]),
            activation=self.activation,
            policy=self.policy,
            **{"norm": None, **norm},
        )
        return _added(residual, x.dtype, run)


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)): keeps the codes of x, gate(x) and up(x).

    Fields as in `coat_jax.nn.GatedMLP`.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> jax.eval_shape(GatedMLP(64).init_with_output, jax.random.key(0), x)[0].shape
      (2, 16)
    """

    activation: Activation = "silu"
    use_bias: bool = False

    @nn.compact
    def __call__(self, x, residual=None, **norm):
        """residual + MLP(norm(x)); norm as `coat_jax.fused.norm_linear` takes it."""
        shapes = _shapes(self, x)
        gate, up, down = (
            _affine(self, name, shapes[name]) for name in ("gate", "up", "down")
        )
        x = enter(self.dtype, x, *gate, *up, *down)
        run = functools.partial(
            fused.gated_mlp,
            x,
            gate[0],
            up[0],
            down[0],
            (gate[1], up[1], down[1]),
            activation=self.activation,
            policy=self.policy,
            **{"norm": None, **norm},
        )
        return _added(residual, x.dtype, run)


@no_type_check
class Attention(nn.MultiHeadDotProductAttention):
    """`nn.MultiHeadDotProductAttention` of FP8 layers, with grouped heads and RoPE.

    With a `plain` policy, and none of the fields and arguments that are ours, it is
    Flax's. Otherwise dropout, decoding, sowed weights and other attention functions are
    refused: `coat_jax.attention` has none of them.

    Fields beside Flax's:
      num_kv_heads: of keys and values; num_heads if None.
      rope_base: turns queries and keys by their position; None doesn't.
      implementation: as in `coat_jax.attention.dot_product_attention`.
      policy: of the projections; `policy.attention` of the attention.

    Example:
      >>> import jax
      >>> layer = Attention(4, num_kv_heads=2)
      >>> x = jax.ShapeDtypeStruct((2, 6, 32), jnp.float32)
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
      (2, 6, 32)
    """

    num_kv_heads: int | None = None
    rope_base: float | None = None
    implementation: Any = None
    policy: Policy = DEFAULT

    @nn.compact
    def __call__(
        self,
        inputs_q,
        inputs_k=None,
        inputs_v=None,
        *,
        norm=None,
        residual=None,
        mask=None,
        is_causal: bool = False,
        positions=None,
        **options,
    ):
        """residual + attention of norm(inputs_q) to itself, or to inputs_k, inputs_v.

        norm is a dict as `coat_jax.fused.norm_linear` takes it; options are
        query_segments and key_segments of `coat_jax.attention`, or what Flax takes.
        """
        ours = (self.num_kv_heads, self.rope_base, self.implementation)
        ours = (*ours, norm, residual, options.get("query_segments"))
        plain = self.policy.plain and not is_causal
        if plain and all(value is None for value in ours):
            return super().__call__(inputs_q, inputs_k, inputs_v, mask=mask, **options)
        attend = {"mask": mask, "is_causal": is_causal, **self._allowed(options)}
        q, k, v = self._project(inputs_q, inputs_k, inputs_v, norm)
        if self.normalize_qk:
            q, k = (
                LayerNorm(
                    use_bias=False,
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    policy=self.policy,
                    name=name,
                )(x)
                for name, x in (("query_ln", q), ("key_ln", k))
            )
        if self.rope_base is not None:
            own = positions if inputs_k is None else None
            q = rope(q, positions, base=self.rope_base)
            k = rope(k, own, base=self.rope_base)
        if mask is not None:
            attend["mask"] = mask.astype(bool)
        out = self.out_features or inputs_q.shape[-1]
        kernel, bias = self._affine("out", (*q.shape[-2:], out), rows=2)
        how = {"policy": self.policy, "implementation": self.implementation, **attend}
        run = functools.partial(fused.attention_linear, q, k, v, kernel, bias, **how)
        return _added(residual, q.dtype, run)

    def _allowed(self, options) -> dict:
        """What is left of a call's options, or a sentence about what can't be."""
        require_unset(self)
        segments = ("query_segments", "key_segments")
        attend = {name: options.get(name) for name in segments}
        still = options.get("deterministic") or self.deterministic
        dropout = self.dropout_rate > 0 and not still
        known = {*segments, "deterministic", "sow_weights"}
        if dropout or options.get("sow_weights") or options.keys() - known:
            raise NotImplementedError(
                "Attention: dropout, sowed weights and Flax's other options need "
                f"Flax's attention, got {sorted(options)} with dropout_rate "
                f"{self.dropout_rate}; leave them out or take policy BF16"
            )
        return attend

    def _project(self, x, x_k, x_v, norm):
        """Queries, keys and values; those of one input share its codes."""
        if x_k is None and x_v is not None:
            raise ValueError("Attention: inputs_v needs inputs_k; give inputs_k too")
        width = self.qkv_features or x.shape[-1]
        kv_heads = self.num_kv_heads or self.num_heads
        if width % self.num_heads or self.num_heads % kv_heads:
            raise ValueError(
                "Attention: num_heads must divide qkv_features and be a multiple of "
                f"num_kv_heads, got {self.num_heads} heads, {kv_heads} key heads and "
                f"{width} features"
            )
        size = width // self.num_heads
        k_from = x if x_k is None else x_k
        v_from = k_from if x_v is None else x_v
        shapes = {
            "query": (x.shape[-1], self.num_heads, size),
            "key": (k_from.shape[-1], kv_heads, size),
            "value": (v_from.shape[-1], kv_heads, size),
        }
        weights = {name: self._affine(name, shape) for name, shape in shapes.items()}
        norm = {"norm": None, **(norm or {})}
        if x_k is None:
            return self._linear(x, weights, ("query", "key", "value"), norm)
        (q,) = self._linear(x, weights, ("query",), norm)
        if x_v is None:
            return [q, *self._linear(x_k, weights, ("key", "value"), {"norm": None})]
        k = self._linear(x_k, weights, ("key",), {"norm": None})
        return [q, *k, *self._linear(x_v, weights, ("value",), {"norm": None})]

    def _linear(self, x, weights, names, norm):
        kernels, biases = zip(*(weights[name] for name in names), strict=True)
        x = enter(self.dtype, x, *kernels, *biases)
        how = {"policy": self.policy, **norm}
        return fused.norm_linear(x, [*kernels], [*biases], **how)

    def _affine(self, name: str, shape, *, rows: int = 1):
        last = rows == 2
        return _Affine(
            shape,
            rows,
            self.use_bias,
            self.param_dtype,
            (last and self.out_kernel_init) or self.kernel_init,
            (last and self.out_bias_init) or self.bias_init,
            name=name,
        )()


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: RMSNorm, causal attention with RoPE, gated MLP.

    Fields as in `coat_jax.nn.DecoderBlock`.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 6, 32), jnp.float32)
      >>> block = DecoderBlock(64, 4, num_kv_heads=2)
      >>> jax.eval_shape(block.init_with_output, jax.random.key(0), x)[0].shape
      (2, 6, 32)
    """

    hidden_features: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    activation: Activation = "silu"
    rope_base: float | None = 10_000.0
    epsilon: float = 1e-6
    use_bias: bool = False
    normalize_qk: bool = False
    is_causal: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Init = _kernel_init
    bias_init: Init = _bias_init
    implementation: Any = None
    policy: Policy = DEFAULT

    @nn.compact
    def __call__(self, x, **attend):
        """(*batch, T, features) to the same; attend as `Attention` takes it."""
        return _block(self, x, GatedMLP, "rms", attend)


class EncoderBlock(DecoderBlock):
    """Pre-norm encoder block: LayerNorm, attention to all, MLP with GELU.

    Fields as in `coat_jax.nn.EncoderBlock`.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 6, 32), jnp.float32)
      >>> block = EncoderBlock(64, 4)
      >>> jax.eval_shape(block.init_with_output, jax.random.key(0), x)[0].shape
      (2, 6, 32)
    """

    activation: Activation = "gelu_tanh"
    rope_base: float | None = None
    use_bias: bool = True
    is_causal: bool = False

    @nn.compact
    def __call__(self, x, **attend):
        """(*batch, T, features) to the same; attend as `Attention` takes it."""
        return _block(self, x, MLP, "layer", attend)


def _affine(module, name: str, shape: tuple[int, int]):
    """Kernel and bias of one linear map of an MLP."""
    init = (module.kernel_init, module.bias_init)
    how = (module.use_bias, module.param_dtype, *init)
    return _Affine(shape, 1, *how, name=name)()


def _shapes(mlp: MLP, x) -> dict[str, tuple[int, int]]:
    features, hidden = x.shape[-1], mlp.hidden_features
    wide, back = (features, hidden), (hidden, mlp.out_features or features)
    return {"gate": wide, "up": wide, "down": back}


def _block(block, x, mlp, norm: str, attend: dict):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    both = {"dtype": block.dtype, "param_dtype": block.param_dtype}
    both |= {"kernel_init": block.kernel_init, "bias_init": block.bias_init}
    both |= {"use_bias": block.use_bias, "policy": block.policy}
    scaled = (x.shape[-1], block.epsilon, block.param_dtype)
    width = block.head_dim and block.head_dim * block.num_heads
    x = Attention(
        block.num_heads,
        qkv_features=width,
        num_kv_heads=block.num_kv_heads,
        normalize_qk=block.normalize_qk,
        rope_base=block.rope_base,
        implementation=block.implementation,
        name="attention",
        **both,
    )(
        x,
        norm=_Scaled(norm, *scaled, name="attention_norm")(),
        residual=x,
        **{"is_causal": block.is_causal, **attend},
    )
    h = _Scaled(norm, *scaled, name="mlp_norm")()
    part = mlp(block.hidden_features, activation=block.activation, name="mlp", **both)
    return part(x, residual=x, **h)


def _added(residual, dtype, run):
    """run(residual=residual), or run() + residual where the dtypes differ."""
    if residual is None or residual.dtype == dtype:
        return run(residual=residual)
    return residual + run()
