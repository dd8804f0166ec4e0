"""Replaces the layers of an existing NNX model by ours, in place.

A Flax layer becomes ours as the same object: its class changes and it gains a policy.
Its Variables are the very ones it had, so shared parameters stay shared, whatever
container holds the layer still does, and the model itself may be a layer.
"""

import fnmatch
from typing import Any, NamedTuple

from flax import nnx

from coat_jax.nn.attention import Attention
from coat_jax.nn.layers import OURS, adopt, refuses, set_policy
from coat_jax.nn.merged import LowRankLinear, MergedEmbedding
from coat_jax.nn.tensor_embedding import TTMEmbedding
from coat_jax.nn.tensor_train import TTLinear
from coat_jax.policy import DEFAULT, Policy, check_policy

_KINDS = {
    **OURS,
    nnx.MultiHeadAttention: Attention,
    TTLinear: TTLinear,
    LowRankLinear: LowRankLinear,
}
_TABLES = (TTMEmbedding, MergedEmbedding)


class Report(NamedTuple):
    """What `convert` or `tensorize` did; prints as a table.

    replaced: (path, Flax's type) of each layer that now is another, or has the policy.
    left: (path, type, reason) of each other module that has parameters of its own.
    """

    replaced: tuple[tuple[str, type], ...]
    left: tuple[tuple[str, type, str], ...]

    def __str__(self) -> str:
        rows = [(path, kind.__name__, "replaced") for path, kind in self.replaced]
        rows += [(path, kind.__name__, f"left: {why}") for path, kind, why in self.left]
        rows = [
            ("path", "type", "what was done"),
            *((p or ".", k, w) for p, k, w in rows),
        ]
        wide = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{p:{wide[0]}}  {k:{wide[1]}}  {w}" for p, k, w in rows]
        return "\n".join(lines)


def convert(
    model,
    policy: Policy = DEFAULT,
    *,
    only: Any = None,
    skip: Any = None,
) -> Report:
    """Gives every Linear, LinearGeneral, Einsum, Conv, norm and attention a policy.

    Args:
      model: an NNX module, or a list or dict of them; it is changed.
      policy: of every layer that is replaced. Layers that are ours already take it.
      only: a shell-style pattern of paths ("blocks/*/mlp/*": names and indices joined
        by "/", "" for the model itself), a type, or several of either; a layer that
        matches one is replaced. None takes all.
      skip: likewise, of layers to leave.

    Returns:
      A `Report`. A layer is left with a reason where it is not among `only`, named by
      `skip`, of a class derived from Flax's (which may compute something else), or has
      options that an FP8 policy has no place for.

    Raises:
      TypeError: if only or skip hold neither patterns nor types.

    Example:
      >>> from coat_jax.policy import DEFAULT
      >>> model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu)
      >>> print(convert(model, DEFAULT))
      path      type    what was done
      layers/0  Linear  replaced
    """
    check_policy("convert", policy)
    only, skip = selection("convert", only=only, skip=skip)
    replaced, left = [], []
    for path, module in modules_of(model):
        kind = _flax_type(module)
        reason = _reason(path, module, kind, policy, only, skip)
        if reason is not None:
            left.append((path, kind, reason))
        elif kind in _KINDS:
            _replace(module, policy)
            replaced.append((path, kind))
    return Report(tuple(replaced), tuple(left))


def modules_of(model) -> list[tuple[str, nnx.Module]]:
    """Each module once, the outer before the inner; the lists of a train are none."""
    found = [
        (path, node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
    ]
    trains = [node for _, node in found if isinstance(node, (TTLinear, TTMEmbedding))]
    parts = {id(part) for each in trains for part in (each.cores, each.diagonals)}
    found = [(path, node) for path, node in found if id(node) not in parts]
    found.sort(key=lambda item: tuple((isinstance(p, str), p) for p in item[0]))
    return [("/".join(map(str, path)), node) for path, node in found]


def _flax_type(module) -> type:
    """The class that a layer of ours is Flax's of; any other module's own."""
    flax_of = {ours: flax for flax, ours in _KINDS.items()}
    return flax_of.get(type(module), type(module))


def _reason(path, module, kind, policy, only, skip) -> str | None:
    """Why a module is left, or None where it is replaced or has nothing to replace."""
    if kind in _TABLES:
        return "rows are looked up, not multiplied; its policy is that of attend"
    if kind not in _KINDS:
        base = next((b for b in _KINDS if isinstance(module, b)), None)
        if base is not None:
            return f"derived from {base.__name__}, it may compute something else"
        own = has_parameters(module)
        return f"there is no FP8 form of {kind.__name__}" if own else None
    reason = not_selected(path, kind, only, skip)
    if reason is not None:
        return reason
    if getattr(module, "policy", None) == policy:
        return "it has this policy already"
    if kind is nnx.MultiHeadAttention:
        foreign = module.attention_fn is not nnx.dot_product_attention
        return "its attention_fn is not Flax's own" if foreign else None
    return refuses(module, policy)


def _replace(module: Any, policy: Policy) -> None:
    if type(module) in OURS:
        adopt(module, policy)
    elif type(module) in (nnx.MultiHeadAttention, Attention):
        module.__class__ = Attention
        module.policy = policy
    else:
        set_policy(module, policy)


def has_parameters(module) -> bool:
    """Whether a module has parameters of its own, beside those of its parts."""
    return any(isinstance(value, nnx.Param) for value in vars(module).values())


def selection(who: str, **selected) -> list[tuple | None]:
    """Each of `only` and `skip` as a tuple of patterns and types, or None.

    Raises:
      TypeError: if one holds anything else.
    """
    return [_items(who, name, value) for name, value in selected.items()]


def _items(who: str, name: str, value) -> tuple | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, str | type) else tuple(value)
    if not all(isinstance(item, str | type) for item in items):
        raise TypeError(
            f"{who}: {name} must hold path patterns such as 'blocks/*' and types "
            f"such as nnx.Linear, got {value!r}"
        )
    return items


def not_selected(path: str, kind: type, only, skip) -> str | None:
    """Why `only` and `skip`, as `selection` gives them, leave a module; or None."""
    if only is not None and not _matches(path, kind, only):
        return "not among only"
    if skip is not None and _matches(path, kind, skip):
        return "named by skip"
    return None


def _matches(path: str, kind: type, items) -> bool:
    patterns = [item for item in items if isinstance(item, str)]
    types = tuple(item for item in items if isinstance(item, type))
    return issubclass(kind, types) or any(
        fnmatch.fnmatchcase(path, pattern) for pattern in patterns
    )
