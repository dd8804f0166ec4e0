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

from coat_jax.train_tree import Place, names_of, place_of


class TrainStacks:
    """How the trains of a tree are stacked, known from their paths and shapes.

    Trains whose cores and diagonals have the same shapes and dtypes become one, each of
    its arrays with an axis before the others. `coat_jax.rank_control.labels` and
    `rank_control` know them, so that

        optax.partition({"core": ..., "diagonal": ..., "rest": ...}, labels)

    steps stacked parameters to the values that it gives the single ones. Not so what
    asks which train an array is of: a threshold of `rank_control` and `truncate` take
    parameters as they were.

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
        self._count = len(flat)
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
        kind = lambda at: (jnp.shape(flat[at][1]), jnp.dtype(flat[at][1].dtype))
        alike = collections.defaultdict(list)
        for members in trains.values():
            members = sorted(members, key=lambda m: (m[0].part, m[0].index))
            shapes = tuple((place.part, *kind(at)) for place, at in members)
            alike[shapes].append([at for _, at in members])
        # For each stack the leaves that are in it, by part.
        self._stacks: dict[str, list[tuple[int, ...]]] = {"cores": [], "diagonals": []}
        for shapes, members in alike.items():
            for (part, *_), ats in zip(shapes, zip(*members, strict=True), strict=True):
                self._stacks[part].append(ats)
        single = {
            at for stacks in self._stacks.values() for ats in stacks for at in ats
        }
        self._rest = [at for at in range(self._count) if at not in single]

    def stack(self, params: Any) -> dict[str, Any]:
        """{"cores": stacks, "diagonals": stacks, "rest": the tree without trains}."""
        leaves = self._treedef.flatten_up_to(params)
        stacked = {
            part: [jnp.stack([leaves[at] for at in ats]) for ats in stacks]
            for part, stacks in self._stacks.items()
        }
        outside: list[Any] = [None] * self._count
        for at in self._rest:
            outside[at] = leaves[at]
        return stacked | {"rest": self._treedef.unflatten(outside)}

    def unstack(self, stacked: dict[str, Any]) -> Any:
        """What `stack` was given. Differentiable; gradients come back stacked."""
        leaves: list[Any] = [None] * self._count
        rest = jax.tree.leaves(stacked["rest"])
        for at, leaf in zip(self._rest, rest, strict=True):
            leaves[at] = leaf
        for part, stacks in self._stacks.items():
            for ats, stack in zip(stacks, stacked[part], strict=True):
                # The reverse of a split is one concatenation, that of slices is a sum.
                parts = jnp.split(stack, len(ats))
                for at, part_of in zip(ats, parts, strict=True):
                    leaves[at] = part_of.reshape(part_of.shape[1:])
        return self._treedef.unflatten(leaves)
