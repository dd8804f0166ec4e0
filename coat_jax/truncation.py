"""Dead ranks taken out of cores, diagonals and optimizer states: smaller arrays.

On the host, between two compiled programs: at the end of a stage, and before export.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np

from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype
from coat_jax.moments import Storage, decode_moments, encode_moments
from coat_jax.tensor_train import TAU, TensorTrain
from coat_jax.train_cut import Bond, cut_core, cut_diagonal, plan
from coat_jax.train_tree import (
    Path,
    Place,
    core_modes,
    names_of,
    place_of,
    train_name,
    trains_of,
)

# What a field of an optimizer's state is made of decides how it follows G' = G v.
# Fields of other names are cut, not scaled, and named in the report.
_DEGREE = {
    **dict.fromkeys(
        "mu m m1 m2 g trace exp_avg grad_acc avg_grad acc_grads".split(), 1
    ),
    **dict.fromkeys("grad_sum previous_gradient grad mean_grads".split(), 1),
    **dict.fromkeys(
        "nu nu_max v n exp_avg_sq e_g sum_of_squares grad_sum_sq".split(), 2
    ),
    **dict.fromkeys("z x0 init_params params params0 cache".split(), -1),
}


class Truncated(NamedTuple):
    """What `truncate` and `fit` return: both as they were given, and a report."""

    params: Any
    opt_state: Any
    report: "Report"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a truncation did; print it.

    Attributes:
      ranks: {train's path: (ranks before, ranks after)}, as the shapes have them.
      sizes: {train's path: (parameters of the cores before, after)}.
      unscaled: fields of the optimizer's state that were cut but not scaled, because
        their names do not say what they hold.
    """

    ranks: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    sizes: dict[str, tuple[int, int]]
    unscaled: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Parameters of all cores, before and after."""
        before, after = (
            zip(*self.sizes.values(), strict=True) if self.sizes else ((), ())
        )
        return sum(before), sum(after)

    def __str__(self):
        row = lambda name, ranks: " ".join(
            [name or "(root)", *(",".join(map(str, r[1:-1])) for r in ranks)]
        )
        lines = [
            f"{row(name, self.ranks[name])}  {before:,} -> {after:,}"
            for name, (before, after) in self.sizes.items()
        ]
        before, after = self.size
        lines.append(f"{len(lines)} trains  {before:,} -> {after:,} parameters")
        if self.unscaled:
            lines.append(f"not scaled: {', '.join(self.unscaled)}")
        return "\n".join(lines)


def truncate(
    params: Any,
    opt_state: Any = None,
    *,
    tau: float = TAU,
    multiple_of: int | None = None,
    inputs: Mapping[str, int] | None = None,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> Truncated:
    r"""Takes out the ranks whose diagonal is at or below tau; the function stays.

    With :math:`K_k = \{j : v_{k,j} > \tau\}`, for each bond k of each train,

    .. math::
        G_k \leftarrow G_k[K_{k-1}, \ldots, K_k] \cdot v_k[K_k], \quad
        v_k \leftarrow 1

    and what the optimizer knows follows the chain rule: a core's first moment is
    divided by v, its second by v^2, and those of v are multiplied by v and v^2. So the
    next steps are as large as they would have been, in units of the new parameters.

    Args:
      params: parameters with trains in them (nested dicts, `nnx.State`, Linen's), or
        an nnx model. A model is changed in place, and returned.
      opt_state: any optax state, or the `nnx.Optimizer`, also changed in place. A leaf
        is cut where its path ends with that of a core or a diagonal.
      tau: the layers' threshold.
      multiple_of: the rank between a train's two halves, the inner dimension of its
        matrix products, is rounded up to a multiple: 16 for FP8. The entries added are
        dead ones with diagonal 0, which `size_exact` does not count.
      inputs: {train's path: number of cores of its first half}, where it isn't half of
        them.
      storage: of moments kept in FP8.

    Returns:
      `params, opt_state, report`. A train with a bond without any rank keeps one rank
      everywhere, that bond's diagonal 0: its layer still computes its bias only.
      Shapes change, so compiled programs are compiled again.

    Raises:
      ValueError: if there is no train, or a state's array for a core has another shape
        than the core.

    Error bound: 1e-5 of the layer's output in float32; entries that are NaN are kept.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"fc": {"cores": cores, "diagonals": [jnp.array([0.5, 0.001])]}}
      >>> small, _, report = truncate(params)
      >>> small["fc"]["cores"][0].shape, float(small["fc"]["cores"][0][0, 0, 0])
      ((1, 4, 1), 0.5)
      >>> print(report)
      fc 2 1  16 -> 8
      1 trains  16 -> 8 parameters
    """
    if multiple_of is not None and (type(multiple_of) is not int or multiple_of < 1):
        raise ValueError(
            "truncate: multiple_of must be a whole number of at least 1 or None, got "
            f"{multiple_of!r}"
        )
    trains = _trains("truncate", params)
    cuts = {}
    for path, train in trains.items():
        half = (inputs or {}).get(train_name(path), len(train.cores) // 2)
        cuts[path] = plan(train, tau, half - 1, multiple_of)
    return _apply(params, opt_state, trains, cuts, storage)


def fit(
    params: Any,
    opt_state: Any = None,
    *,
    ranks: Mapping[str, Sequence[int]],
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> Truncated:
    """The shapes of a truncated model, for restoring one into a fresh model.

    Args:
      params: as in `truncate`; the leaves may be `jax.ShapeDtypeStruct`.
      opt_state: as in `truncate`.
      ranks: {path: (1, r_1, ..., 1)} of each train, as `coat_jax.rank_control.ranks` or
        `stored_ranks` return; a stored path may have more names in front.
      storage: of moments kept in FP8.

    Returns:
      `params, opt_state, report`; values are leading parts or zeros, to be replaced.

    Raises:
      ValueError: if a train's ranks are not given or are not as many.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"fc": {"cores": cores, "diagonals": [jnp.ones(2)]}}
      >>> fit(params, ranks={"params/fc": (1, 1, 1)}).params["fc"]["cores"][1].shape
      (1, 4, 1)
    """
    trains = _trains("fit", params)
    cuts = {path: _to_ranks(path, train, ranks) for path, train in trains.items()}
    return _apply(params, opt_state, trains, cuts, storage)


def stored_ranks(leaves: Any) -> dict[str, tuple[int, ...]]:
    """The ranks of all trains of a checkpoint, from its description alone.

    Args:
      leaves: a tree whose leaves have a shape, as orbax's metadata of a checkpoint, or
        what `coat_jax.checkpoint` writes into its `meta` under "leaves",
        {path: [shape, kind]}.

    Example:
      >>> stored_ranks({".params['fc']['diagonals'][0]": [[3], "float32"]})
      {'params/fc': (1, 3, 1)}
    """
    found: dict[str, dict[int, int]] = {}
    for names, shape in _shapes(leaves):
        place = place_of(names)
        if place is not None and place.part == "diagonals":
            found.setdefault(train_name(place.train), {})[place.index] = shape[0]
    return {
        name: (1, *(bonds[i] for i in sorted(bonds)), 1)
        for name, bonds in found.items()
    }


def _shapes(leaves):
    """Pairs of the names in a leaf's path and its shape."""
    if isinstance(leaves, Mapping) and all(isinstance(x, str) for x in leaves):
        entries = list(leaves.values())
        if entries and all(_is_described(entry) for entry in entries):
            for path, (shape, _) in leaves.items():
                names = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", path)
                names = tuple(next(filter(None, groups)) for groups in names)
                yield (names[:-1] if names[-1] == "value" else names), shape
            return
    is_leaf = lambda x: hasattr(x, "shape")
    for key_path, x in jax.tree_util.tree_leaves_with_path(leaves, is_leaf=is_leaf):
        if is_leaf(x):
            yield names_of(key_path), x.shape


def _is_described(entry) -> bool:
    """Whether it is [shape, kind]."""
    return (
        isinstance(entry, list | tuple)
        and len(entry) == 2
        and isinstance(entry[0], list | tuple)
        and isinstance(entry[1], str)
    )


# Plans -------------------------------------------------------------------------------


def _trains(who: str, params) -> dict[Path, TensorTrain]:
    trains = trains_of(params)
    for train in trains.values():
        core_modes(train)  # refuses stacked ones
    if not trains:
        raise ValueError(
            f'{who}: params must hold a train, a node with entries "cores" and '
            '"diagonals", found none; pass the parameters of the tensorised model'
        )
    return trains


def _to_ranks(path, train: TensorTrain, ranks) -> list[Bond]:
    """Bonds of given ranks, their entries not changed."""
    own = tuple(map(str, path))
    fits = [
        name
        for name in ranks
        if (not own or tuple(name.split("/"))[-len(own) :] == own)
    ]
    want = ranks[min(fits, key=len)] if fits else ()
    if len(want) != len(train.cores) + 1:
        raise ValueError(
            f"fit: ranks must hold {len(train.cores) + 1} ranks for train "
            f"{train_name(path)!r}, got {tuple(want)} (trains there: "
            f"{', '.join(ranks) or 'none'}); pass the ranks of the same model"
        )
    bonds = []
    for v, rank in zip(train.diagonals, want[1:-1], strict=True):
        keep = np.where(np.arange(rank) < v.shape[0], np.arange(rank), -1)
        bonds.append(Bond(keep, np.ones(rank, np.float32), np.ones(rank, np.float32)))
    return bonds


# Application -------------------------------------------------------------------------


def _apply(params, opt_state, trains, cuts, storage) -> Truncated:
    unscaled: set[str] = set()
    scissors = _Scissors(trains, cuts, storage, unscaled)
    if isinstance(params, nnx.Module):
        nnx.update(params, scissors.params(nnx.state(params)))
    else:
        params = scissors.params(params)
    if isinstance(opt_state, nnx.Optimizer):
        new = scissors.state(nnx.as_pure(opt_state.opt_state))
        nnx.update(opt_state.opt_state, nnx.state(new))
    elif opt_state is not None:
        opt_state = scissors.state(opt_state)
    return Truncated(params, opt_state, _report(trains, cuts, unscaled))


def _report(trains, cuts, unscaled) -> Report:
    ranks, sizes = {}, {}
    for path, train in trains.items():
        before = (1, *(v.shape[0] for v in train.diagonals), 1)
        after = (1, *(len(bond.keep) for bond in cuts[path]), 1)
        ranks[train_name(path)] = before, after
        n = core_modes(train)
        sizes[train_name(path)] = _size(n, before), _size(n, after)
    return Report(ranks, sizes, tuple(sorted(unscaled)))


def _size(modes, ranks) -> int:
    return sum(a * n * b for a, n, b in zip(ranks[:-1], modes, ranks[1:], strict=True))


@dataclasses.dataclass(frozen=True)
class _Scissors:
    """Cuts leaves by their paths."""

    trains: Mapping[Path, TensorTrain]
    cuts: Mapping[Path, Sequence[Bond]]
    storage: Storage
    unscaled: set[str]

    def params(self, tree):
        """Parameters: cores absorb the diagonals, which become ones."""

        def cut(key_path, leaf):
            place = place_of(names_of(key_path))
            if place is None or place.train not in self.cuts:
                return leaf
            return self._cut(leaf, place, -1)

        return jax.tree_util.tree_map_with_path(cut, tree)

    def state(self, tree):
        """An optimizer's state."""
        is_stored = lambda x: isinstance(x, Expanded)
        cut = lambda key_path, leaf: (
            self._stored(key_path, leaf)
            if is_stored(leaf)
            else self._moment(names_of(key_path), leaf)
        )
        return jax.tree_util.tree_map_with_path(cut, tree, is_leaf=is_stored)

    def _moment(self, names, leaf):
        place = self._owner(names)
        if place is None:
            return leaf
        core = getattr(self.trains[place.train], place.part)[place.index]
        if np.shape(leaf) != np.shape(core):
            if np.size(leaf) <= 1:  # a placeholder
                return leaf
            raise ValueError(
                f"truncate: {train_name(names)!r} of the optimizer's state must have "
                f"the shape {np.shape(core)} of its parameter, got {np.shape(leaf)}; "
                "make a new state from the truncated parameters"
            )
        return self._cut(leaf, place, self._degree(names))

    def _stored(self, key_path, stored: Expanded):
        """Moments in FP8: decoded, cut, and stored again."""
        prefix = names_of(key_path)
        kind = "v" if self._degree(prefix) == 2 else "m"

        def cut(inner, codes, amax, power):
            names = names_of(inner)
            place = self._owner((*prefix, *names))
            if place is None:
                return codes, amax, power
            if of_dtype(codes.dtype) is None:
                return self._moment((*prefix, *names), codes), amax, power
            path = train_name(names)
            one = Expanded({path: codes}, {path: amax}, {path: power})
            wide = decode_moments(one, self.storage, kind)[path]
            wide = jnp.asarray(self._moment((*prefix, *names), wide))
            new = encode_moments({path: wide}, self.storage, kind)
            return tuple(column[path] for column in new)

        parts = jax.tree_util.tree_map_with_path(cut, *stored)
        treedef = jax.tree.structure(stored.codes)
        columns = zip(*treedef.flatten_up_to(parts), strict=True)
        found = [treedef.unflatten(column) for column in columns]
        return Expanded(*found) if found else stored

    def _owner(self, names) -> Place | None:
        """The core or diagonal with whose path this one ends; the longest such."""
        place = place_of(names)
        if place is None:
            return None
        text = tuple(map(str, place.train))
        own = lambda path: tuple(map(str, path))
        ends = lambda path: not path or text[-len(path) :] == own(path)
        fits = [path for path in self.trains if ends(path)]
        return place._replace(train=max(fits, key=len)) if fits else None

    def _degree(self, names) -> int:
        """1 for averages of gradients, 2 of their squares, -1 for parameters."""
        for name in reversed(names):
            if name in _DEGREE:
                return _DEGREE[name]
        owner = self._owner(names)
        inner = len(owner.train) + 2 if owner else 0
        self.unscaled.add(train_name(names[: len(names) - inner]))
        return 0

    def _cut(self, leaf, place: Place, degree: int):
        bonds = self.cuts[place.train]
        if place.part == "diagonals":
            return cut_diagonal(leaf, bonds[place.index], degree)
        left = bonds[place.index - 1] if place.index else None
        right = bonds[place.index] if place.index < len(bonds) else None
        return cut_core(leaf, left, right, degree)
