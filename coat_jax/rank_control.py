"""The optimizer of the trains' diagonals: Adam under which ranks die and stay dead."""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import optax

from coat_jax.rank_objective import Objective as Objective
from coat_jax.rank_objective import ObjectiveState as ObjectiveState
from coat_jax.rank_objective import Targets as Targets
from coat_jax.rank_objective import core_norm as core_norm
from coat_jax.rank_objective import mean_diagonal as mean_diagonal
from coat_jax.rank_objective import size_exact as size_exact
from coat_jax.rank_objective import size_relaxed as size_relaxed
from coat_jax.tensor_train import TAU, gate
from coat_jax.train_tree import alike, core_modes, names_of, place_of, train_name
from coat_jax.train_tree import labels as labels
from coat_jax.train_tree import modes as modes
from coat_jax.train_tree import ranks as ranks
from coat_jax.train_tree import trains_of as trains_of

# Of a bond whose entries would all die, the largest is kept at this multiple of tau, so
# far above it that rounding parameter + update does not put it below.
_FLOOR = 1.25
# Diagonals in one array. With more, the operands and results of a step's kernels pass
# the 96 that XLA allows a fusion, and it makes a kernel of each result.
_ROWS = 12


class RankControlState(NamedTuple):
    """State of `rank_control`: count int32, Adam's moments float32, params' trees."""

    count: Any
    mu: Any
    nu: Any


def rank_control(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    tau: jax.typing.ArrayLike = TAU,
    threshold: optax.ScalarOrSchedule | None = None,
    modes: Mapping[str, Sequence[int]] | None = None,
    revive: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam for the diagonals v of tensor trains, which prunes their ranks.

    With :math:`u_t` Adam's step of size `learning_rate` :math:`\alpha`, `threshold`
    :math:`\gamma` (0 if None) and `pressure` p (1 if not given to update):

    .. math::
        v' = \max(v - \alpha u_t - \alpha\, p\, \gamma\, w_k,\ 0), \qquad
        w_k \propto \partial \hat S / \partial v_k

    An entry at or below `tau` is dead: it stays where it is, with moments of zero. The
    largest entry of a bond that has one alive never dies, so no layer is lost. w_k is
    the same for all entries of bond k and has mean 1 over all bonds. That term acts
    beside Adam, which would otherwise scale a weak pull on a rank down to nothing where
    the loss's gradients are noisy.

    Args:
      learning_rate: a scalar or a schedule. An entry falls from 1 to tau in at least
        0.99 / learning_rate steps: choose it apart from the others', and 3 to 10 times
        as large.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      tau: the layers' threshold.
      threshold: a scalar or a schedule of the same steps; None has no soft threshold.
      modes: `coat_jax.rank_control.modes(params)`, for w_k; needed where the
        transformation does not see the cores, as within `optax.partition`.
      revive: let the dead move. The gate's gradient is zero at or below its tau, so
        this needs layers with tau = -1, whose gate passes every entry of v >= 0: exact
        zeros come from the threshold alone, and gradients above it end them.

    Returns:
      A transformation for trees of which some leaves are diagonals; all others get a
      plain Adam step. `update` needs `params`. Updates have the gradients' dtypes.
      State: `RankControlState`.

    Raises:
      ValueError: if `params` is not given, a number is out of range, or there is a
        threshold, but neither cores nor modes.

    Source: CoMERA (arXiv 2405.14377), section 3; the threshold is this library's.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"cores": cores, "diagonals": [jnp.array([1.0, 0.011])]}
      >>> parts = {"core": optax.adam(1e-3), "diagonal": rank_control(2e-3)}
      >>> tx = optax.partition(parts | {"rest": optax.adam(1e-3)}, labels)
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> [round(float(v), 3) for v in params["diagonals"][0]]
      [0.998, 0.009]
    """
    _check(learning_rate=learning_rate, tau=tau, threshold=threshold)

    def init(params):
        zeros = lambda p: jnp.zeros_like(p, dtype=jnp.float32)
        mu, nu = (jax.tree.map(zeros, params) for _ in range(2))
        return RankControlState(jnp.zeros([], jnp.int32), mu, nu)

    def update(updates, state, params=None, *, pressure=1.0, **extra):
        del extra
        if params is None:
            raise ValueError(
                "rank_control: update must be given the parameters, got None; call "
                "tx.update(grads, state, params)"
            )
        rate = _at(learning_rate, state.count)
        adam = functools.partial(_adam, count=state.count + 1, b1=b1, b2=b2, eps=eps)
        pulls = {}
        if threshold is not None:
            scale = rate * _at(threshold, state.count) * pressure
            pulls = _pulls(params, modes, tau, scale)

        def plain(p, m, v, g):
            step, m, v = adam(m, v, g)
            new = p.astype(jnp.float32) - rate * step
            return (new - p.astype(jnp.float32)).astype(g.dtype), m, v

        def bonds(pull, p, m, v, g):
            step, m, v = adam(m, v, g)
            new = p.astype(jnp.float32) - rate * step
            if pull is not None:
                new = jnp.maximum(new - pull[:, None], 0.0)
            new = _kept_alive(p, new, tau, revive)
            gone = (new <= tau) & (not revive)
            m, v = (jnp.where(gone, 0.0, moment) for moment in (m, v))
            return (new - p).astype(g.dtype), m, v

        out, mu, nu = _apart(plain, bonds, pulls, params, state.mu, state.nu, updates)
        return out, RankControlState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _apart(plain, bonds, pulls, params, *trees):
    """Three trees: `plain` of each leaf, `bonds` of all diagonals of one length.

    Those are rows of one array: a leaf of its own each, a GPU would start a dozen
    kernels for some thirty numbers, hundreds of times in a model.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    rows = list(zip(*map(treedef.flatten_up_to, (params, *trees)), strict=True))
    found: dict[int, tuple] = {}
    groups = collections.defaultdict(list)
    for at, (path, _) in enumerate(flat):
        place = place_of(names_of(path))
        if place is None or place.part != "diagonals":
            found[at] = plain(*rows[at])
            continue
        groups[tuple(map(alike, rows[at]))].append((at, place))
    batches = [
        all_[at : at + _ROWS]
        for all_ in groups.values()
        for at in range(0, len(all_), _ROWS)
    ]
    for members in batches:
        pull = None
        if pulls:
            each = [pulls[train_name(place.train)][place.index] for _, place in members]
            pull = jnp.stack(each)
        parts = zip(*(rows[at] for at, _ in members), strict=True)
        results = bonds(pull, *map(jnp.stack, parts))
        for row, (at, _) in enumerate(members):
            found[at] = tuple(part[row] for part in results)
    columns = zip(*(found[at] for at in range(len(flat))), strict=True)
    out = [treedef.unflatten(column) for column in columns]
    return out or [params] * 3  # no leaves: nothing to update


def _kept_alive(old, new, tau, revive):
    """New diagonals, (..., r): the dead as they were, one of the living at least."""
    alive = old > tau
    if not revive:
        new = jnp.where(alive, new, old)
    candidates = jnp.where(alive, new, -jnp.inf)
    best = jnp.argmax(candidates, axis=-1, keepdims=True)
    largest = jax.lax.broadcasted_iota(best.dtype, new.shape, new.ndim - 1) == best
    lost = alive.any(-1, keepdims=True) & ~(new > tau).any(-1, keepdims=True)
    return jnp.where(lost & largest, jnp.maximum(new, _FLOOR * tau), new)


def _pulls(params, given, tau, scale):
    """{train's path: for each bond, by how much the threshold lowers its entries}."""
    sums, sizes = {}, dict(given or {})
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        place = place_of(names_of(key_path))
        if place is not None and place.part == "diagonals":
            if leaf.ndim != 1:
                raise ValueError(
                    "rank_control: a threshold needs diagonals of single trains, got "
                    f"one of shape {leaf.shape}; unstack what TrainStacks stacked"
                )
            bonds = sums.setdefault(train_name(place.train), {})
            bonds[place.index] = gate(leaf, tau=tau).sum()
    for path, train in trains_of(params).items():
        sizes.setdefault(train_name(path), core_modes(train))
    slopes = {name: _slopes(name, bonds, sizes) for name, bonds in sums.items()}
    every = [slope for of_train in slopes.values() for slope in of_train]
    mean = jnp.mean(jnp.stack(every)) if every else 1.0
    return {n: [scale * s / mean for s in of_train] for n, of_train in slopes.items()}


def _slopes(name, bonds, sizes):
    """dS^/dv of each bond of one train."""
    if len(sizes.get(name, ())) != len(bonds) + 1:
        raise ValueError(
            f"rank_control: a threshold needs the mode sizes of train {name!r}, which "
            f"has {len(bonds)} diagonals, got {sizes.get(name)} for it; pass "
            "modes=coat_jax.rank_control.modes(params) of the whole parameters"
        )
    n = sizes[name]
    sums = [jnp.float32(1), *(bonds[i] for i in sorted(bonds)), jnp.float32(1)]
    return [
        n[i] * sums[i] + n[i + 1] * sums[i + 2] for i in range(len(bonds))
    ]  # bond i lies between cores i and i + 1


# Adam --------------------------------------------------------------------------------


def _adam(m, v, g, *, count, b1, b2, eps):
    """m / (sqrt(v) + eps), both without their bias to zero; and m, v after g."""
    g, steps = jnp.asarray(g).astype(jnp.float32), count.astype(jnp.float32)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    right = lambda x, b: x / (1 - jnp.asarray(b, jnp.float32) ** steps)
    return right(m, b1) / (jnp.sqrt(right(v, b2)) + eps), m, v


def _at(value, count):
    """A scalar, or a schedule's at this step; float32, as the diagonals are."""
    return jnp.asarray(value(count) if callable(value) else value, jnp.float32)


def _check(**numbers):
    for name, value in numbers.items():
        fits = not isinstance(value, int | float) or 0 <= value < float("inf")
        if not fits:
            raise ValueError(
                f"rank_control: {name} must be a finite number of at least 0, got "
                f"{value!r}"
            )
