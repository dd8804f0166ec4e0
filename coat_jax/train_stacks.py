"""Trains of equal shapes as one: a training step's state in few large arrays.

    stacks = TrainStacks(params)
    stacked = stacks.stack(params)               what the optimizer sees and holds
    loss = lambda stacked: f(stacks.unstack(stacked))

A model of a hundred trains has a thousand arrays of a few thousand numbers, and two
thousand more in Adam's moments. On a GPU each is a launch or a copy a step.
"""

import collections
from typing import Any

import jax
from jax import numpy as jnp

from coat_jax.train_tree import Place, alike, names_of, place_of


class TrainStacks:
    """How the trains of a tree are stacked, known from their paths and shapes.

    Trains whose cores and diagonals have the same shapes and dtypes become one, each of
    its arrays with an axis before the others. `coat_jax.rank_control.labels` and
    `rank_control` know them, so that

        optax.partition({"core": ..., "diagonal": ..., "rest": ...}, labels)

    steps stacked parameters to the values that it gives the single ones. What asks
    which train an array is of takes parameters as they were, and refuses stacks: a
    threshold of `rank_control`, `Objective`, sizes, `truncate`. On a mesh of Explicit
    axes a stack must not be sharded over its trains.

    Args:
      params: nested dicts, lists and tuples of arrays or shapes (`jax.eval_shape`).

    Raises:
      ValueError: if there is no train in `params`.

    Example:
      >>> one = lambda: {"cores": [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))],
      ...                "diagonals": [jnp.ones(2)]}
      >>> params = {"up": one(), "down": one(), "bias": jnp.ones(3)}
      >>> stacks = TrainStacks(params)
      >>> stacked = stacks.stack(params)
      >>> [core.shape for core in stacked["cores"]], stacked["diagonals"][0].shape
      ([(2, 1, 4, 2), (2, 2, 4, 1)], (2, 2))
      >>> jax.tree.structure(stacks.unstack(stacked)) == jax.tree.structure(params)
      True
    """

    def __init__(self, params: Any):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(params)
        self._kinds = [(jnp.shape(leaf), jnp.dtype(leaf.dtype)) for _, leaf in flat]
        self._names = [jax.tree_util.keystr(path) for path, _ in flat]
        trains: dict[Any, list[tuple[Place, int]]] = collections.defaultdict(list)
        for at, (path, _) in enumerate(flat):
            place = place_of(names_of(path))
            if place is not None:
                trains[place.train].append((place, at))
        if not trains:
            raise ValueError(
                'TrainStacks: params must hold a train, a node with entries "cores" '
                'and "diagonals", found none; pass the tensorised model\'s parameters'
            )
        groups = collections.defaultdict(list)
        for members in trains.values():
            members = sorted(members, key=lambda m: (m[0].part, m[0].index))
            kinds = tuple((place.part, alike(flat[at][1])) for place, at in members)
            groups[kinds].append([at for _, at in members])
        # For each stack the leaves that are in it, by part.
        self._stacks: dict[str, list[tuple[int, ...]]] = {"cores": [], "diagonals": []}
        for kinds, members in groups.items():
            for (part, _), ats in zip(kinds, zip(*members, strict=True), strict=True):
                self._stacks[part].append(ats)
        single = {
            at for stacks in self._stacks.values() for ats in stacks for at in ats
        }
        outside: list[Any] = [None if at in single else at for at in range(len(flat))]
        self._rest = [at for at in outside if at is not None]
        self._restdef = jax.tree.structure(self._treedef.unflatten(outside))

    def stack(self, params: Any) -> dict[str, Any]:
        """{"cores": stacks, "diagonals": stacks, "rest": the tree without trains}.

        Raises:
          ValueError: if a leaf's shape or dtype isn't that of the tree given at first.
        """
        leaves = self._treedef.flatten_up_to(params)
        for leaf, name, kind in zip(leaves, self._names, self._kinds, strict=True):
            if (got := (jnp.shape(leaf), jnp.dtype(leaf.dtype))) != kind:
                raise ValueError(
                    f"TrainStacks.stack: {name} must be {kind[1]} of shape {kind[0]}, "
                    f"got {got[1]} of shape {got[0]}; make TrainStacks anew for it"
                )
        stacked = {
            part: [jnp.stack([leaves[at] for at in ats]) for ats in stacks]
            for part, stacks in self._stacks.items()
        }
        rest = self._restdef.unflatten([leaves[at] for at in self._rest])
        return stacked | {"rest": rest}

    def unstack(self, stacked: Any) -> Any:
        """What `stack` was given. Differentiable; gradients come back stacked.

        Raises:
          ValueError: if `stacked` isn't what `stack` made, or of another model.
        """
        if not _is_stacked(stacked) or any(
            len(stacked[part]) != len(stacks) for part, stacks in self._stacks.items()
        ):
            raise ValueError(
                "TrainStacks.unstack: stacked must be what this object's stack gave, "
                f"got {jax.tree.structure(stacked)}"
            )
        leaves: list[Any] = [None] * len(self._kinds)
        rest = self._restdef.flatten_up_to(stacked["rest"])
        for at, leaf in zip(self._rest, rest, strict=True):
            leaves[at] = leaf
        for part, stacks in self._stacks.items():
            for ats, stack in zip(stacks, stacked[part], strict=True):
                for at, leaf in zip(ats, self._rows(ats, stack), strict=True):
                    leaves[at] = leaf
        return self._treedef.unflatten(leaves)

    def unstack_state(self, opt_state: Any) -> Any:
        """An optimizer's state for single trains, from that for stacked ones.

        Whatever in it has the form of stacked parameters, as Adam's moments have, is
        unstacked, also where `optax.partition` left nodes without arrays. Moments of
        other forms (FP8 codes of a stack, whose groups may span trains) raise.
        """
        change = lambda node: self.unstack(node) if _is_stacked(node) else node
        return jax.tree.map(change, opt_state, is_leaf=_is_stacked)

    def _rows(self, ats, stack):
        if not jax.tree.leaves(stack):  # optax.MaskedNode
            return [stack] * len(ats)
        shape, _ = self._kinds[ats[0]]
        if getattr(stack, "shape", None) != (len(ats), *shape):
            raise ValueError(
                f"TrainStacks.unstack: the stack of {self._names[ats[0]]} must have "
                f"shape {(len(ats), *shape)}, got {getattr(stack, 'shape', stack)}"
            )
        # The reverse of a split is one concatenation, that of slices is a sum.
        return [part.reshape(shape) for part in jnp.split(stack, len(ats))]


def _is_stacked(node) -> bool:
    return isinstance(node, dict) and node.keys() == {"cores", "diagonals", "rest"}
