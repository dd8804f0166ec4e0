"""Which entries of a train's bonds stay, and its arrays with no others in them."""

from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from coat_jax.tensor_train import TensorTrain


class Bond(NamedTuple):
    """What becomes of a bond.

    keep: indices of entries, -1 for a new one. scale: what they are divided by, 1 for
    the dead and the new. alive: what they become, 1 or 0.
    """

    keep: Any
    scale: Any
    alive: Any


def plan(train: TensorTrain, tau, middle, multiple_of) -> list[Bond]:
    """What to keep of each bond: what is above tau, the middle one rounded up.

    Where a bond has nothing above tau, one entry of every bond.
    """
    vs = [np.asarray(v, np.float32) for v in train.diagonals]
    kept = [np.flatnonzero(~(v <= tau)) for v in vs]  # a NaN must not vanish
    if not all(len(keep) for keep in kept):
        return [_one_rank(v, len(keep) > 0) for v, keep in zip(vs, kept, strict=True)]
    bonds = [
        Bond(keep, v[keep], np.ones(len(keep), np.float32))
        for v, keep in zip(vs, kept, strict=True)
    ]
    if multiple_of is not None:
        bonds[middle] = _rounded(bonds[middle], vs[middle], multiple_of)
    return bonds


def _one_rank(v, alive) -> Bond:
    """One rank of a bond whose train has a bond without any."""
    keep = np.array([np.argmax(v)])
    one = np.ones(1, np.float32)
    return Bond(keep, v[keep] if alive else one, one * alive)


def _rounded(bond: Bond, v, multiple_of) -> Bond:
    """The bond with dead entries, then new zeros, up to a multiple."""
    more = -len(bond.keep) % multiple_of
    dead = np.setdiff1d(np.arange(len(v)), bond.keep)[:more]
    added = np.concatenate([dead, np.full(more - len(dead), -1, dead.dtype)])
    join = lambda a, b: np.concatenate([a, b]).astype(a.dtype)
    return Bond(
        join(bond.keep, added),
        join(bond.scale, np.ones(more)),
        join(bond.alive, np.zeros(more)),
    )


def cut_core(core, left: Bond | None, right: Bond | None, degree: int):
    """A core, or what an optimizer keeps for it, between two bonds.

    degree: 1 for averages of gradients, which are divided by the right bond's scale, 2
    for squares, -1 for parameters, which are multiplied, 0 for neither.
    """
    if isinstance(core, jax.ShapeDtypeStruct):
        shape = list(core.shape)
        shape[0] = len(left.keep) if left else shape[0]
        shape[-1] = len(right.keep) if right else shape[-1]
        return core.update(shape=tuple(shape))
    new = np.asarray(core).astype(np.float32)
    if left:
        new = _taken(new, left.keep, 0)
    if right:
        new = _scaled(_taken(new, right.keep, -1), right.scale, -degree)
    return _like(new, core)


def cut_diagonal(v, bond: Bond, degree: int):
    """A diagonal, or what an optimizer keeps for it: the inverse scale of a core's."""
    if isinstance(v, jax.ShapeDtypeStruct):
        return v.update(shape=bond.keep.shape)
    new = _taken(np.asarray(v).astype(np.float32), bond.keep, 0)
    scaled = _scaled(new, bond.scale, degree)
    return _like(np.where(bond.alive > 0, scaled, 0.0).astype(np.float32), v)


def _scaled(x, scale, power):
    """x scale^power along the last axis; x / x is 1 exactly."""
    factor = scale ** np.float32(abs(power))
    return x / factor if power < 0 else x * factor


def _taken(x, keep, axis):
    """x[keep] along an axis, with zeros where keep is -1."""
    shape = list(x.shape)
    shape[axis] = 1
    padded = np.concatenate([x, np.zeros(shape, x.dtype)], axis)
    return np.take(padded, keep, axis)  # -1 is the last


def _like(new, old):
    """In the dtype of the old array, and on its devices; replicated, as it is small."""
    new = new.astype(old.dtype)
    if not isinstance(old, jax.Array):
        return new
    if isinstance(old.sharding, NamedSharding):
        return jax.device_put(new, NamedSharding(old.sharding.mesh, PartitionSpec()))
    return jnp.asarray(new) if not old.committed else jax.device_put(new, old.sharding)
