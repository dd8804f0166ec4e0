"""Where the tensor trains stand in a tree of parameters, by the paths of its leaves."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from coat_jax.tensor_train import TensorTrain

Path = tuple[str | int, ...]


class Place(NamedTuple):
    """What a leaf is of a train.

    train: path of the node that has "cores" and "diagonals". part: which of the two.
    index: counted from 0.
    """

    train: Path
    part: str
    index: int


def names_of(key_path) -> Path:
    """The keys of a leaf's path, without the `value` of a Variable or a Linen box."""
    if len(key_path) > 1 and key_path[-1] == GetAttrKey("value"):
        key_path = key_path[:-1]
    return tuple(map(_name, key_path))


def place_of(names: Path) -> Place | None:
    """The place that a leaf of this path has in a train, or None if in none."""
    if len(names) < 2 or names[-2] not in ("cores", "diagonals"):
        return None
    index = str(names[-1])
    return Place(names[:-2], str(names[-2]), int(index)) if index.isdigit() else None


def train_name(path: Path) -> str:
    """A train's path as text: names joined by "/", as leaves' paths are elsewhere."""
    return "/".join(map(str, path))


def trains_of(tree: Any) -> dict[Path, TensorTrain]:
    """The trains in a tree: every node with the entries "cores" and "diagonals".

    Both may be lists, tuples or dicts keyed 0, 1, ... The leaves are returned as they
    are, so that gradients flow through; a train of whose cores or diagonals the tree
    has none (`optax.partition` hides them) is left out.

    Args:
      tree: nested dicts, an `nnx.State`, an nnx model, Linen parameters, or a tree of
        anything else that has these shapes.

    Returns:
      {path of the node, a tuple of keys: TensorTrain}, in the tree's order.

    Raises:
      ValueError: if a train's numbers of cores and diagonals do not fit.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"fc": {"cores": cores, "diagonals": [jnp.ones(2)]}}
      >>> list(trains_of(params))
      [('fc',)]
    """
    found: dict[Path, dict[str, dict[int, Any]]] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place = place_of(names_of(key_path))
        if place is not None:
            parts = found.setdefault(place.train, {"cores": {}, "diagonals": {}})
            parts[place.part][place.index] = leaf
    whole = {path: p for path, p in found.items() if p["cores"] and p["diagonals"]}
    return {path: _train(path, **parts) for path, parts in whole.items()}


def labels(params: Any) -> Any:
    """The tree with "core", "diagonal" or "rest" at each leaf, for `optax.partition`.

    Give `optax.partition` the function itself. It knows leaves by their paths alone.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> labels({"cores": cores, "diagonals": [jnp.ones(2)], "bias": jnp.ones(4)})
      {'bias': 'rest', 'cores': ['core', 'core'], 'diagonals': ['diagonal']}
    """

    def label(key_path, leaf):
        del leaf
        place = place_of(names_of(key_path))
        if place is None:
            return "rest"
        return "core" if place.part == "cores" else "diagonal"

    return jax.tree_util.tree_map_with_path(label, params)


def alike(leaf: Any) -> tuple:
    """What leaves share that may be rows of one array: shape, dtype, Explicit sharding.

    Takes arrays and `jax.ShapeDtypeStruct`.
    """
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return kind.shape, kind.dtype, getattr(kind.sharding, "spec", None)


def core_modes(train: TensorTrain) -> tuple[int, ...]:
    """n_k of a tensor train's cores, n_k m_k of a matrix train's.

    Raises:
      ValueError: if the arrays have other axes, as where trains are stacked.
    """
    axes = lambda leaves: {len(jnp.shape(leaf)) for leaf in leaves}
    if not axes(train.cores) <= {3, 4} or not axes(train.diagonals) <= {1}:
        raise ValueError(
            "a train's cores must have 3 axes, a matrix train's 4, and its diagonals "
            f"1, got shapes {[jnp.shape(leaf) for part in train for leaf in part]}; "
            "unstack what TrainStacks stacked, and don't stack layers along an axis"
        )
    return tuple(math.prod(jnp.shape(core)[1:-1]) for core in train.cores)


def modes(params: Any) -> dict[str, tuple[int, ...]]:
    """{train's path: mode sizes of its cores}; truncation does not change them.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 3, 2, 1))]
      >>> modes({"fc": {"cores": cores, "diagonals": [jnp.ones(2)]}})
      {'fc': (4, 6)}
    """
    return {train_name(p): core_modes(train) for p, train in trains_of(params).items()}


def ranks(params: Any) -> dict[str, tuple[int, ...]]:
    """{train's path: its ranks (1, r_1, ..., 1), from shapes}; what JSON can hold.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> ranks({"fc": {"cores": cores, "diagonals": [jnp.ones(2)]}})
      {'fc': (1, 2, 1)}
    """
    modes(params)  # refuses stacked trains
    of = lambda train: (1, *(jnp.shape(v)[0] for v in train.diagonals), 1)
    return {train_name(path): of(train) for path, train in trains_of(params).items()}


def _name(key) -> str | int:
    match key:
        case DictKey() | FlattenedIndexKey():
            return key.key
        case SequenceKey():
            return key.idx
        case GetAttrKey():
            return key.name
    return str(key)


def _train(path: Path, cores: Mapping[int, Any], diagonals) -> TensorTrain:
    sizes = len(cores), len(diagonals)
    want = list(range(len(cores))), list(range(len(cores) - 1))
    if (sorted(cores), sorted(diagonals)) != want:
        raise ValueError(
            f"trains_of: a train of L cores must have L - 1 diagonals, each numbered "
            f"from 0, {train_name(path)!r} has {sizes[0]} and {sizes[1]}; name other "
            'parameters than "cores" and "diagonals"'
        )
    ordered = lambda parts: tuple(parts[i] for i in sorted(parts))
    return TensorTrain(ordered(cores), ordered(diagonals))
