"""How large the tensor trains are, and the objective that trades it for the loss."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

from coat_jax.tensor_train import TAU, gate
from coat_jax.train_tree import alike, core_modes, trains_of

_GAMMA: dict[str, float] = {"paper": 0.1, "code": 0.01, "decoupled": 0.0}
_BETA: dict[str, float] = {"paper": 1e-4, "code": 0.0, "decoupled": 1e-4}


# Sizes -------------------------------------------------------------------------------


def size_exact(params: Any, *, tau: float = TAU) -> jax.Array:
    r"""Parameters in the cores of all trains that the gate leaves, an int32 scalar.

    .. math:: S = \sum_k n_k\, r_{k-1} r_k, \quad r_k = \#\{j : v_{k,j} > \tau\}

    with :math:`n_k m_k` for :math:`n_k` in a matrix train. A train with a bond without
    any rank counts 0: its layer computes its bias only. No gradient.

    Example:
      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"cores": cores, "diagonals": [jnp.array([1.0, 0.001])]}
      >>> int(size_exact(params))
      8
    """
    count = lambda vs: jnp.sum(vs > tau, axis=-1, dtype=jnp.int32)
    return _summed(params, count, jnp.int32, whole=True)


def size_relaxed(params: Any, *, tau: float = TAU) -> jax.Array:
    r"""`size_exact` with sums of gated entries for counts: differentiable, float32.

    .. math:: \hat S = \sum_k n_k\, |\tilde v_{k-1}|_1\, |\tilde v_k|_1

    Equal to `size_exact` where all diagonals are ones, as at the start. Its gradient is
    n_k |v_{k-1}| + n_{k+1} |v_{k+1}| for every entry of bond k that is above tau.
    """
    total = lambda vs: gate(vs, tau=tau).sum(axis=-1, dtype=jnp.float32)
    return _summed(params, total, jnp.float32, whole=False)


def mean_diagonal(params: Any, *, tau: float = TAU) -> jax.Array:
    """The mean of all diagonals' entries above tau, float32; 0 where there are none.

    It is what the released code of CoMERA has in place of the size.
    """
    vs = _stacks(v for train in trains_of(params).values() for v in train.diagonals)
    total = functools.reduce(
        jnp.add, [gate(v, tau=tau).sum(dtype=jnp.float32) for v in vs], 0.0
    )
    count = functools.reduce(jnp.add, [(v > tau).sum() for v in vs], 0)
    return total / jnp.maximum(jnp.asarray(count, jnp.float32), 1.0)


def core_norm(params: Any) -> jax.Array:
    """The sum of squares of all cores' entries, a float32 scalar."""
    cores = _stacks(
        core for train in trains_of(params).values() for core in train.cores
    )
    squares = [jnp.sum(core.astype(jnp.float32) ** 2) for core in cores]
    return functools.reduce(jnp.add, squares, jnp.float32(0))


def _stacks(arrays):
    """Arrays of one shape as one: on a GPU each alone would be a launch or two."""
    rows = collections.defaultdict(list)
    for array in arrays:
        rows[alike(array)].append(array)
    return [jnp.stack(members) for members in rows.values()]


def _summed(params, of_bonds, dtype, *, whole: bool):
    """Sizes of all trains, from numbers that stand for the ranks of bonds (trains, r).

    With `whole` a train with a bond whose number is 0 counts 0.
    """
    rows = collections.defaultdict(list)
    for train in trains_of(params).values():
        rows[tuple(map(alike, train.diagonals))].append(train)
    total = jnp.zeros([], dtype)
    for trains in rows.values():
        bonds = zip(*(train.diagonals for train in trains), strict=True)
        numbers = [of_bonds(jnp.stack(vs)) for vs in bonds]
        n = np.array([core_modes(train) for train in trains]).T
        ends = [jnp.ones(len(trains), dtype)]
        ranks = [*ends, *numbers, *ends]
        terms = zip(n, ranks[:-1], ranks[1:], strict=True)
        sizes = [jnp.asarray(n, dtype) * left * right for n, left, right in terms]
        size = functools.reduce(jnp.add, sizes)
        if whole:
            every = functools.reduce(jnp.logical_and, [n > 0 for n in numbers])
            size = jnp.where(every, size, jnp.zeros_like(size))
        total = total + size.sum(dtype=dtype)
    return total


# Objective ---------------------------------------------------------------------------


class Targets(NamedTuple):
    """What the late stage aims at.

    loss: the loss to keep. size: the parameters to reach, as `size_exact` counts them.
    w_loss, w_size: what a unit of each excess weighs. rho: the weight of what is not
    the worse one (kind "code" has gamma for the size there).
    """

    loss: Any
    size: Any
    w_loss: Any = 1.0
    w_size: Any = 1.0
    rho: Any = 0.1


class ObjectiveState(NamedTuple):
    """State of an `Objective`: scalars, so that changing one compiles nothing anew.

    late: bool. count: int32, finite losses seen. average: their running sum of weights
    times losses. size_start: S_0. gamma, beta: float32, may be replaced at any time.
    targets: of the late stage.
    """

    late: Any
    count: Any
    average: Any
    size_start: Any
    gamma: Any
    beta: Any
    targets: Targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    r"""The loss with the trains' size, in an early and a late stage, one program.

    With L the loss, S, :math:`\hat S` the sizes, :math:`S_0` the size at the start, G
    all cores, and in the late stage targets :math:`L_*, S_*`, kind "paper" minimises

    .. math::
        \text{early} \quad & L + \gamma \hat S / S_0 + \beta |G|^2 \\
        \text{late} \quad & \max\{w_1 (L - L_*),\, w_2 (S - S_*) / S_0\}
          + \rho\, (L + \hat S / S_0) + \beta |G|^2

    where the maximum is decided by the exact count S and by a smoothed L, and the
    gradient is that of :math:`\hat S` and L. Kind "code" is what CoMERA's program does:
    R, the mean of the diagonals, in place of the size; early
    :math:`L + \gamma R`; late :math:`c_L L + c_R R`, with (rho, gamma + 1) while
    (L - L_*) / L < (S - S_*) / S and (rho + 1, gamma) otherwise. Kind "decoupled" has
    no size in its gradients: `rank_control(threshold=...)` prunes instead, if
    `figures["pressure"]` is passed on to the optimizer's update.

    Attributes:
      kind: which of the three.
      gamma: weight of the size early; None is 0.1 for "paper", 0.01 for "code".
      beta: weight of the cores' norm, without which the cores grow as the diagonals
        shrink and no size is saved; None is 1e-4, and 0 for "code".
      tau: entries at or below it count as gone; the layers' own.
      decay: of the loss's running average.
      delay: steps at the start without any weight on the size. While a model has not
        begun to learn, its loss defends no rank, and all of them may die.

    Raises:
      ValueError: for an unknown kind or a number out of range.

    Source: CoMERA (arXiv 2405.14377), section 3, and its released program.

    Example:
      Three lines more than without it:

      >>> cores = [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]
      >>> params = {"cores": cores, "diagonals": [jnp.ones(2)]}
      >>> objective = Objective(gamma=0.5, beta=0.0)               # 1
      >>> state = objective.init(params)                           # 2
      >>> def loss_fn(params, state):
      ...     loss = jnp.sum(params["cores"][0] ** 2)
      ...     return objective(loss, params, state)                # 3
      >>> grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
      >>> (total, (figures, state)), grads = grad(params, state)
      >>> float(total), float(figures["loss"]), int(figures["size"])
      (8.5, 8.0, 16)

      and, when the early stage is over, without compiling anything again:

      >>> state = objective.late(state, Targets(loss=8.0, size=8))

      With nnx the same: `objective.init(model)`, `objective(loss, model, state)` in a
      function for `nnx.value_and_grad(..., has_aux=True)`.
    """

    kind: str = "paper"
    gamma: float | None = None
    beta: float | None = None
    tau: float = TAU
    decay: float = 0.99
    delay: int = 0

    def __post_init__(self):
        if self.kind not in _GAMMA:
            raise ValueError(
                "Objective: kind must be 'paper', 'code' or 'decoupled', got "
                f"{self.kind!r}"
            )
        for name in ("gamma", "beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(
                    f"Objective: {name} must be a finite number of at least 0, got "
                    f"{value!r}; None takes the default"
                )
        if not self.delay >= 0:
            raise ValueError(
                f"Objective: delay must be at least 0 steps, got {self.delay!r}"
            )
        if not -1 <= self.tau < float("inf"):
            raise ValueError(
                "Objective: tau must be a finite number of at least -1 (which passes "
                f"every entry), got {self.tau!r}"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"Objective: decay must be at least 0 and below 1, got {self.decay!r}"
            )

    def init(self, params: Any) -> ObjectiveState:
        """The early stage's state for these parameters or this model.

        Raises:
          ValueError: if there is no train in `params`.
        """
        if not trains_of(params):
            raise ValueError(
                'Objective: params must hold a train, a node with entries "cores" and '
                '"diagonals", found none; pass the parameters of the tensorised model'
            )
        number = lambda value, default: jnp.float32(default if value is None else value)
        return ObjectiveState(
            late=jnp.bool(False),
            count=jnp.int32(0),
            average=jnp.float32(0),
            size_start=size_exact(params, tau=self.tau).astype(jnp.float32),
            gamma=number(self.gamma, _GAMMA[self.kind]),
            beta=number(self.beta, _BETA[self.kind]),
            targets=Targets(*(jnp.float32(0) for _ in Targets._fields)),
        )

    def late(self, state: ObjectiveState, targets: Targets) -> ObjectiveState:
        """The state from which on both targets count; may be given new ones later."""
        targets = Targets(*(jnp.asarray(x, jnp.float32) for x in targets))
        return state._replace(late=jnp.bool(True), targets=targets)

    def early(self, state: ObjectiveState) -> ObjectiveState:
        """The state back in the early stage."""
        return state._replace(late=jnp.bool(False))

    def __call__(
        self, loss: Any, params: Any, state: ObjectiveState
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], ObjectiveState]]:
        """The number to differentiate, and with it figures and the next state.

        Args:
          loss: the batch's loss, a scalar; over all devices, where there are several.
          params: the parameters or the model, complete.
          state: from `init` or the last step.

        Returns:
          total, ({"loss", "loss_average", "size", "size_ratio", "core_norm", "c_loss",
          "c_size", "pressure"}, state). A loss that is not finite stays out of the
          average.
        """
        loss = jnp.asarray(loss).astype(jnp.float32)
        state, average = _smoothed(state, jax.lax.stop_gradient(loss), self.decay)
        size = size_exact(params, tau=self.tau).astype(jnp.float32)
        relaxed, norm = self._relaxed(params, state), core_norm(params)
        c_loss, c_size, pressure = self._weights(average, size, state)
        penalty = 0.0 if self.kind == "decoupled" else c_size * relaxed
        total = c_loss * loss + penalty + state.beta * norm
        figures = {
            "loss": loss,
            "loss_average": average,
            "size": size,
            "size_ratio": size / state.size_start,
            "core_norm": norm,
            "c_loss": c_loss,
            "c_size": c_size,
            "pressure": pressure,
        }
        return total, (jax.lax.stop_gradient(figures), state)

    def _relaxed(self, params, state):
        if self.kind == "code":
            return mean_diagonal(params, tau=self.tau)
        return size_relaxed(params, tau=self.tau) / state.size_start

    def _weights(self, loss, size, state):
        """Weights of the loss and of the size, and what the latter is to early's."""
        targets, one = state.targets, jnp.float32(1)
        if self.kind == "code":
            least = jnp.finfo(jnp.float32).tiny
            above = (loss - targets.loss) / jnp.maximum(loss, least)
            worse = above < (size - targets.size) / jnp.maximum(size, one)
        else:
            above = targets.w_loss * (loss - targets.loss)
            worse = above < targets.w_size * (size - targets.size) / state.size_start
        base = state.gamma if self.kind == "code" else targets.rho
        late_loss = targets.rho + jnp.where(worse, 0.0, targets.w_loss)
        late_size = base + jnp.where(worse, targets.w_size, 0.0)
        c_loss = jnp.where(state.late, late_loss, one)
        started = (state.count > self.delay).astype(jnp.float32)
        c_size = jnp.where(state.late, late_size, state.gamma * started)
        return c_loss, c_size, jnp.where(state.late, late_size, started)


def _smoothed(state, loss, decay):
    """The state after this loss, and the average without its bias to the start's 0."""
    fine = jnp.isfinite(loss)
    count = state.count + fine.astype(jnp.int32)
    average = decay * state.average + (1 - decay) * loss
    average = jnp.where(fine, average, state.average)
    weight = 1 - jnp.float32(decay) ** count.astype(jnp.float32)
    seen = average / jnp.where(count > 0, weight, 1.0)
    return state._replace(count=count, average=average), seen
