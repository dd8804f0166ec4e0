"""Blocks of modules: one set of codes for a norm, or activation, and what follows it.

    q, k, v = norm_linear(norm, [query, key, value], x)
    y = act_linear("silu", down, gate, up, residual=x)
    y = attention_linear(out, q, k, v, residual=x, is_causal=True)

take modules of any kind. Where they are ours with one FP8 policy, the block is that of
`coat_jax.fused`, which keeps the codes of what enters it and nothing else. Any other
module is called as it is: these are then the plain compositions, bit for bit. So a
model is written once, and is compressed by the layers that are put into it.

A tensor train, merged, is a map to R features and one from there. The first is a part
of the block like any kernel, beside dense ones too; the second keeps its R features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
import jax

from coat_jax import activations, attention, fused, lowrank
from coat_jax.nn import layers, tensor_train
from coat_jax.nn.layers import (
    Layer,
    LayerNorm,
    Linear,
    LinearGeneral,
    RMSNorm,
    value_of,
)
from coat_jax.nn.merged import LowRankLinear
from coat_jax.nn.tensor_train import TTLinear
from coat_jax.policy import BF16, Policy

_LOW_RANK = (TTLinear, LowRankLinear)
_NORMS = {RMSNorm: "rms", LayerNorm: "layer"}
_ACTIVATIONS = {jax.nn.silu: "silu", jax.nn.relu: "relu", jax.nn.gelu: "gelu_tanh"}


def norm_linear(
    norm: Layer | None, linears: Sequence[Layer], x: jax.Array
) -> list[jax.Array]:
    """linear(norm(x)) for each of `linears`.

    Args:
      norm: a norm, or None to project x itself.
      linears: modules over the last axis.
      x: (..., features).

    Returns:
      What each of them returns.

    Example:
      >>> rngs = nnx.Rngs(0)
      >>> norm, x = RMSNorm(16, rngs=rngs), jax.numpy.ones((2, 16))
      >>> gate, up = (Linear(16, 32, rngs=rngs) for _ in range(2))
      >>> [y.shape for y in norm_linear(norm, [gate, up], x)]
      [(2, 32), (2, 32)]
    """
    policy = shared_policy(linears)
    if norm is not None and (policy is None or not _joins(norm, linears, policy, x)):
        x, norm = norm(x), None
    first = linears if norm is None else [norm]
    dtype = None if policy is None else _dtype_of(first, x.dtype)
    if policy is None or dtype is None:
        return [linear(x) for linear in linears]
    maps = [_map_of(linear) for linear in linears]
    kernels, biases = [m.kernel for m in maps], [m.within for m in maps]
    how = {} if norm is None else _norm_arguments(norm)
    how = {"norm": None, **how, "policy": policy}
    ys = fused.norm_linear(x.astype(dtype), kernels, biases, **how)
    return [m.leave(y, policy) for m, y in zip(maps, ys, strict=True)]


def act_linear(
    activation,
    linear: Layer,
    *inputs: jax.Array,
    residual: jax.Array | None = None,
) -> jax.Array:
    """residual + linear(activation(x)), or linear(activation(gate) * up).

    Args:
      activation: a name as `coat_jax.activations.activate` takes it, or one of
        jax.nn.silu, jax.nn.relu and jax.nn.gelu.
      linear: a module over the last axis.
      *inputs: x, or gate and up.
      residual: added to the result, or None.

    Raises:
      ValueError: for another activation, or more inputs.

    Example:
      >>> down, x = Linear(32, 16, rngs=nnx.Rngs(0)), jax.numpy.ones((2, 32))
      >>> act_linear("silu", down, x, x).shape
      (2, 16)
    """
    known = isinstance(activation, str)
    name: Any = activation if known else _ACTIVATIONS.get(activation)
    if name is None or len(inputs) not in (1, 2):
        raise ValueError(
            "act_linear: activation must be a name of coat_jax.activations or jax.nn's "
            f"silu, relu or gelu, with one or two inputs, got {activation!r} with "
            f"{len(inputs)}"
        )
    policy = shared_policy([linear])
    if policy is None:
        h = activations.product_of(name)([], *inputs)
        return _added(residual, linear(h))
    dtype = compute_dtype(linear, inputs[0].dtype)
    if any(x.dtype != dtype for x in inputs):
        f = activations.activate if len(inputs) == 1 else activations.gated
        return _added(residual, linear(f(*inputs, activation=name, policy=policy)))
    within, after = _split(residual, dtype)
    own, how = _map_of(linear), {"activation": name, "policy": policy}
    if own.right is None:
        how["residual"] = within
    y = fused.act_linear(inputs, own.kernel, own.within, **how)
    return _added(after, own.leave(y, policy, within))


def mlp(
    norm: Layer | None,
    into: Sequence[Layer],
    activation,
    down: Layer,
    x: jax.Array,
    residual: jax.Array | None = None,
) -> jax.Array:
    """residual + down(activation(gate) * up), gate and up being `into` of norm(x).

    What `norm_linear` and `act_linear` give one after the other. Where all are ours, of
    one policy and without biases before the activation, the gradients between the two
    are made as FP8 codes at once (`coat_jax.fused.gated_mlp`).

    Args:
      norm: a norm, or None to project x itself.
      into: one module, or two: gate and up.
      activation: as `act_linear` takes it.
      down: a module over the last axis.
      x: (..., features).
      residual: added to the result, or None.

    Example:
      >>> rngs = nnx.Rngs(0)
      >>> norm, up = RMSNorm(16, rngs=rngs), Linear(16, 32, rngs=rngs)
      >>> down = Linear(32, 16, rngs=rngs)
      >>> mlp(norm, [up], "silu", down, jax.numpy.ones((2, 16))).shape
      (2, 16)
    """
    known = isinstance(activation, str)
    name: Any = activation if known else _ACTIVATIONS.get(activation)
    policy = shared_policy([*into, down])
    if (
        name is None
        or policy is None
        or norm is None
        or any(isinstance(linear, _LOW_RANK) for linear in (*into, down))
        or not _joins(norm, into, policy, x)
        or not _same_dtype(norm, [*into, down], x, residual)
    ):
        h = norm_linear(norm, into, x)
        return act_linear(activation, down, *h, residual=residual)
    dtype = compute_dtype(norm, x.dtype)
    kernels = [linear.kernel[...] for linear in (*into, down)]
    biases = [value_of(linear.bias) for linear in (*into, down)]
    run: Any = fused.gated_mlp if len(into) == 2 else fused.mlp
    how = {"activation": name, "policy": policy, "residual": residual}
    return run(x.astype(dtype), *kernels, biases, **how, **_norm_arguments(norm))


def attention_linear(
    linear: Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    residual: jax.Array | None = None,
    *,
    policy: Policy = BF16,
    **attend,
) -> jax.Array:
    """residual + linear(attention(query, key, value)), the heads joined.

    Args:
      linear: a `LinearGeneral` over the heads' two axes, or any module over the last
        axis of length heads * head size.
      query: as in `coat_jax.attention.dot_product_attention`.
      key: likewise.
      value: likewise.
      residual: added to the result, or None.
      policy: of the attention, where `linear` has no FP8 policy of its own.
      **attend: the other arguments of `dot_product_attention`.

    Example:
      >>> out = Linear(32, 16, rngs=nnx.Rngs(0))
      >>> q = jax.numpy.ones((2, 6, 4, 8))
      >>> attention_linear(out, q, q, q, is_causal=True).shape
      (2, 6, 16)
    """
    axes = 2 if isinstance(linear, nnx.LinearGeneral) else 1
    own = shared_policy([linear], axes=axes)
    if own is None or compute_dtype(linear, query.dtype) != query.dtype:
        policy = policy if own is None else own
        o = attention.dot_product_attention(query, key, value, policy=policy, **attend)
        o = o if axes == 2 else o.reshape(*o.shape[:-2], -1)
        return _added(residual, linear(o))
    low, (within, after) = _map_of(linear), _split(residual, query.dtype)
    if low.right is None:
        attend["residual"] = within
    inputs = (query, key, value, low.kernel, low.within)
    y = fused.attention_linear(*inputs, policy=own, **attend)
    return _added(after, low.leave(y, own, within))


class _Map(NamedTuple):
    """A linear map as a block takes it, and what is left to do after the block.

    kernel, within: what the block multiplies by, and adds.
    right, bias: of a low-rank map, whose `kernel` is its left factor; else None.
    """

    kernel: jax.Array
    within: jax.Array | None
    right: jax.Array | None = None
    bias: jax.Array | None = None

    def leave(self, y, policy: Policy, residual=None):
        """The map's result, of what the block returned."""
        if self.right is None:
            return y
        how = {"policy": policy, "residual": residual}
        return lowrank.leave(y, self.right, self.bias, **how)


def _map_of(linear) -> _Map:
    bias = value_of(linear.bias)
    if not isinstance(linear, _LOW_RANK):
        return _Map(linear.kernel[...], bias)
    left, right = linear.halves()
    return _Map(left, None, right, bias)


def compute_dtype(layer: Layer, dtype):
    """What a layer computes in when its input is of `dtype`."""
    of = tensor_train if isinstance(layer, _LOW_RANK) else layers
    return of.compute_dtype(layer, dtype)


def shared_policy(linears: Sequence[Layer], *, axes: int = 1) -> Policy | None:
    """The one FP8 policy of linear maps over the last `axes` axes, or None.

    None, too, where one of them is not ours, or has options that the blocks haven't.
    """
    policies = {_policy_of(linear, axes) for linear in linears}
    return policies.pop() if len(policies) == 1 else None


def _policy_of(linear, axes: int) -> Policy | None:
    last = tuple(range(-axes, 0))
    general = type(linear) is LinearGeneral
    if general and (linear.axis != last or linear.batch_axis):
        return None
    if not general and type(linear) not in (Linear, *_LOW_RANK):
        return None
    own = (
        linear.promote_dtype is promote_dtype and linear.preferred_element_type is None
    )
    return linear.policy if own and not linear.policy.plain else None


def _joins(norm, linears, policy: Policy, x) -> bool:
    """Whether a norm is ours, and computes with the linear maps in one dtype."""
    if type(norm) not in _NORMS or norm.promote_dtype is not promote_dtype:
        return False
    dtype = compute_dtype(norm, x.dtype)
    return norm.policy == policy and _dtype_of(linears, dtype) == dtype


def _dtype_of(linears, dtype):
    """What all of the linear maps compute in, or None where they differ."""
    found = {compute_dtype(linear, dtype) for linear in linears}
    return found.pop() if len(found) == 1 else None


def _same_dtype(norm, linears, x, residual) -> bool:
    """Whether all compute in one dtype, to which a residual can be added."""
    dtype = compute_dtype(norm, x.dtype)
    fits = residual is None or residual.dtype == dtype
    return fits and _dtype_of(linears, dtype) == dtype


def _norm_arguments(norm) -> dict:
    return {
        "norm": _NORMS[type(norm)],
        "scale": value_of(norm.scale),
        "bias": value_of(getattr(norm, "bias", None)),
        "epsilon": norm.epsilon,
    }


def _split(residual, dtype):
    """A residual to add before the rounding to `dtype`, or after it, if it is wider."""
    inside = residual is None or residual.dtype == dtype
    return (residual, None) if inside else (None, residual)


def _added(residual, y):
    return y if residual is None else residual + y
