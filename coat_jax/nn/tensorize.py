"""Replaces the linear maps and tables of an NNX model by tensor trains, in place.

As in `convert`, a layer becomes another as the same object, so that shared layers stay
shared and whatever holds them still does. Its kernel, though, is a new parameter.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import nnx
import jax
from jax import core, lax
from jax import numpy as jnp

from coat_jax import lowrank, tensor_train
from coat_jax.nn.convert import (
    Report,
    has_parameters,
    modules_of,
    not_selected,
    selection,
)
from coat_jax.nn.layers import Linear
from coat_jax.nn.merged import LowRankLinear, MergedEmbedding, become
from coat_jax.nn.tensor_embedding import TTMEmbedding
from coat_jax.nn.tensor_train import TTLinear
from coat_jax.policy import BF16, Policy, check_policy
from coat_jax.tensor_train import TAU

_KERNELS = {nnx.Linear: "kernel", nnx.Embed: "embedding"}
_nearest = functools.partial(jax.jit, static_argnums=1)(tensor_train.from_dense)
_TRAINS = (TTLinear, TTMEmbedding, LowRankLinear, MergedEmbedding)


def tensorize(
    model,
    *,
    rank: int | Sequence[int],
    only: Any = None,
    skip: Any = None,
    from_weights: bool = True,
    order: int = 3,
    embedding_order: int = 4,
    policy: Policy | None = None,
    max_unique: int | None = None,
    tau: float = TAU,
    rngs: nnx.Rngs | None = None,
) -> Report:
    """Makes every Linear a `TTLinear`, and every Embed a `TTMEmbedding`.

    Args:
      model: an NNX module, or a list or dict of them; it is changed. Outside jit.
      rank: of every bond, or one for each; less where the sizes allow no more.
      only: which layers, as `convert` takes it: path patterns and Flax's types.
      skip: which to leave, likewise.
      from_weights: whether trains are the nearest that `from_dense` finds to the
        weights, or drawn anew with the root mean square of the weights.
      order: dims on each side of a Linear.
      embedding_order: cores of an Embed.
      policy: of the new layers; None keeps that of a layer of ours, and is BF16 else.
      max_unique: of each `TTMEmbedding`.
      tau: diagonal entries up to it count as zero.
      rngs: for from_weights=False.

    Returns:
      A `Report`. A layer is left with a reason where it is not among `only`, named by
      `skip`, of a derived class, where its train would not be smaller, where its
      weights are all zero or another layer's too, or where it has options that a train
      has no place for.

    Raises:
      TypeError: if only or skip hold neither patterns nor types.
      ValueError: if rngs are missing.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(64, 96, rngs=nnx.Rngs(0)), nnx.relu)
      >>> print(tensorize(model, rank=4))
      path      type    what was done
      layers/0  Linear  replaced
    """
    if policy is not None:
        check_policy("tensorize", policy)
    if not from_weights and rngs is None:
        raise ValueError(
            "tensorize: from_weights=False draws new cores, so rngs must be given, got "
            "None; give nnx.Rngs(seed)"
        )
    only, skip = selection("tensorize", only=only, skip=skip)
    shared = _shared_variables(model)
    sizes = {"rank": rank, "orders": (order, embedding_order)}
    replaced, left = [], []
    for path, module in modules_of(model):
        kind = nnx.Linear if type(module) is Linear else type(module)
        reason = _reason(path, module, kind, only, skip)
        if reason is None and kind in _KERNELS:
            shape = _shape_of(module, kind, **sizes)
            reason = _not_worthwhile(getattr(module, _KERNELS[kind]), shape, shared)
            if reason is None:
                train = _train(module, kind, shape, None if from_weights else rngs)
                own = {"policy": policy or getattr(module, "policy", BF16), "tau": tau}
                _replace(module, kind, train, shape, own, max_unique)
                replaced.append((path, kind))
        if reason is not None:
            left.append((path, kind, reason))
    return Report(tuple(replaced), tuple(left))


def _reason(path, module, kind, only, skip) -> str | None:
    """Why a module is left, or None where it is replaced or has nothing to replace."""
    if kind in _TRAINS:
        return "it is of low rank already"
    if kind not in _KERNELS:
        base = next((b for b in _KERNELS if isinstance(module, b)), None)
        if base is not None:
            return f"derived from {base.__name__}, it may compute something else"
        own = has_parameters(module)
        return f"there is no tensor train of {kind.__name__}" if own else None
    reason = not_selected(path, kind, only, skip)
    if reason is not None:
        return reason
    unset = {"precision": (None,), "dot_general": (None, lax.dot_general)}
    if kind is nnx.Embed:
        plain = nnx.Embed(1, 1, rngs=nnx.Rngs(0)).promote_dtype
        unset = {"promote_dtype": (plain,)}
    for name, values in unset.items():
        if getattr(module, name) not in values:
            return f"its {name} is set, which a train has no place for"
    return None


def _shape_of(module, kind, *, rank, orders):
    if kind is nnx.Linear:
        sizes = (module.in_features, module.out_features)
        return tensor_train.tt_shape(*sizes, rank=rank, order=orders[0])
    sizes = (module.num_embeddings, module.features)
    return tensor_train.ttm_shape(*sizes, rank=rank, order=orders[1])


def _not_worthwhile(kernel, shape, shared: set[int]) -> str | None:
    """Why a kernel is better left as it is, or None."""
    if id(kernel) in shared:
        return "its weights are another layer's too"
    if shape.size >= kernel.size:
        return f"a train of {shape.size} parameters is not below its {kernel.size}"
    if isinstance(kernel[...], (core.Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(
            "tensorize: weights must be arrays, got those of a function being traced; "
            "call it outside jit and eval_shape"
        )
    if not jnp.any(kernel[...]):
        return "its weights are zero, and cores of zeros have gradients of zero"
    return None


def _train(module, kind, shape, rngs: nnx.Rngs | None):
    """The train of a layer's weights, or one drawn with their root mean square."""
    kernel = getattr(module, _KERNELS[kind])[...]
    if rngs is None:
        return _nearest(kernel, shape)
    wide = kernel.astype(jnp.float32)
    std = float(jnp.sqrt(jnp.mean(jnp.square(wide))))
    return lowrank.draw_train(rngs.params(), shape, std, kernel.dtype)


def _replace(module, kind, train, shape, own, max_unique) -> None:
    names = ["dtype", "param_dtype"]
    if kind is nnx.Linear:
        names += ["promote_dtype", "preferred_element_type"]
        old = become(module, TTLinear)
        own |= {name: old[name] for name in names}
        module.fill(train, shape, old["bias"], **own)
    else:
        old = become(module, TTMEmbedding)
        own |= {name: old[name] for name in names}
        module.fill(train, shape, old["num_embeddings"], max_unique=max_unique, **own)


def _shared_variables(model) -> set[int]:
    """The ids of Variables that more than one module, list or dict holds."""
    seen, shared = set(), set()
    for _, node in nnx.iter_graph(model):
        for value in _held_by(node):
            if isinstance(value, nnx.Variable):
                (shared if id(value) in seen else seen).add(id(value))
    return shared


def _held_by(node):
    if isinstance(node, dict):
        return [*node.values()]
    if isinstance(node, list | tuple):
        return [*node]
    return [*vars(node).values()] if isinstance(node, nnx.Pytree) else []
