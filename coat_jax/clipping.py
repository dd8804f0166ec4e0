"""Clipping by global norm inside a fused step: optax's link found, and its arithmetic.

optax writes the clipped gradients to memory for the optimizer to read. Of them the
fused step needs only the norm, by which a kernel multiplies each gradient as it reads
it.
"""

import inspect
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import optax


class Clip(NamedTuple):
    """Gradients that are still to be clipped, their global norm, and to which it is."""

    grads: Any
    norm: jax.Array
    max_norm: float


class Chain(NamedTuple):
    """The update functions of an `optax.chain` that clips last of all but one."""

    before: list[Any]
    max_norm: float
    last: Any


def chain_of(tx: optax.GradientTransformation, state: Any) -> Chain | None:
    """`tx` as such a chain, with as many states, or None."""
    if not _same_code(tx.update, optax.chain(optax.identity()).update):
        return None
    links = [*_enclosed(tx.update, "update_fns", ())]
    if len(links) < 2 or not isinstance(state, tuple) or len(links) != len(state):
        return None
    max_norm = _max_norm_of(links[-2])
    return None if max_norm is None else Chain(links[:-2], max_norm, links[-1])


def _max_norm_of(update: Any) -> float | None:
    """The number given to `optax.clip_by_global_norm`, if `update` is that link's."""
    clip = optax.clip_by_global_norm(1.0)
    if _same_code(update, optax.with_extra_args_support(clip).update):
        update = getattr(_enclosed(update, "tx", None), "update", None)
    if not _same_code(update, clip.update):
        return None
    found = _enclosed(update, "max_norm", None)
    return found if isinstance(found, (int, float)) else None


def same_arrays(tree: Any, other: Any) -> bool:
    """Whether two trees hold the very same arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    others, other_treedef = jax.tree.flatten(other)
    return other_treedef == treedef and all(map(operator.is_, leaves, others))


def _same_code(function: Any, other: Any) -> bool:
    """Whether two functions come of one definition."""
    code = getattr(function, "__code__", None)
    return code is not None and code is other.__code__


def _enclosed(function: Any, name: str, default: Any) -> Any:
    """A variable around a definition; another optax may name it otherwise."""
    return inspect.getclosurevars(function).nonlocals.get(name, default)


def factor(norm: jax.Array, max_norm: float) -> jax.Array:
    """What the gradients are multiplied by, float32: 1 below `max_norm`, NaN of NaN."""
    norm = jnp.squeeze(norm).astype(jnp.float32)
    return jnp.where(norm < max_norm, jnp.float32(1), jnp.float32(max_norm) / norm)


def clipped(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Gradients of that global norm as optax clips them, to the bit.

    Each is rounded twice in its own dtype, while `factor` is rounded once, and its
    product with a gradient once more, in float32: float32 gradients differ by at most
    2^-22 of themselves, bfloat16 ones by what their two roundings take.
    """
    small = jnp.squeeze(norm < max_norm)

    def clip(g):
        return lax.select(small, g, (g / norm.astype(g.dtype)) * max_norm)

    return jax.tree.map(clip, grads)
