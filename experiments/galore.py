"""GaLore as its authors' code has it: gradients projected on their shorter side.

A matrix's gradient G (m x n, m >= n) is seen as G P, where the r columns of P (n x r)
are G's leading right singular vectors, found anew every `update_proj_gap` steps; Adam
runs on m x r, and its step goes back through P^T. For m < n all of it is transposed.
`optax.contrib.galore` projects the longer side: its moments are smaller and its P is
larger. For 1024 x 256 and r = 32 that is 0.75 bytes a parameter, and 1.125 here.

Source: Zhao et al., arXiv 2403.03507; which side is read from the published code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import optax

_HIGHEST = lax.Precision.HIGHEST  # a GPU's default would round to TF32


class ShorterSideState(NamedTuple):
    """count: int32 (). projectors: f32 (shorter side, r) each. inner: of r-columns."""

    count: Any
    projectors: Any
    inner: Any


def projector(gradient, rank: int):
    """f32 (shorter side, rank): leading singular vectors of the shorter side.

    As eigenvectors of the shorter side's Gram matrix, which is faster than an SVD, and
    as good for singular values above 1e-3 of the largest. A zero gradient gives any
    orthonormal columns.
    """
    g = gradient.astype(jnp.float32)
    g = g / jnp.maximum(jnp.max(jnp.abs(g)), jnp.finfo(jnp.float32).tiny)
    tall = g if g.shape[0] >= g.shape[1] else g.T
    gram = jnp.matmul(tall.T, tall, precision=_HIGHEST)
    _, vectors = jnp.linalg.eigh(gram)  # ascending
    return vectors[:, ::-1][:, :rank]


def project(gradient, P):
    """(m, r) for m >= n, else (r, n)."""
    g = gradient.astype(jnp.float32)
    tall = g.shape[0] >= g.shape[1]
    pair = (g, P) if tall else (P.T, g)
    return jnp.matmul(*pair, precision=_HIGHEST)


def project_back(low, P, shape: tuple[int, int]):
    """The (m, n) that `project` saw as `low`."""
    pair = (low, P.T) if shape[0] >= shape[1] else (P, low)
    return jnp.matmul(*pair, precision=_HIGHEST)


def scale_by_shorter_side(
    *,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    inner: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """scale * back(inner(projected gradient)), for trees of matrices alone.

    Args:
      rank: r, at most each matrix's shorter side.
      update_proj_gap: steps between two searches for P; the first step makes one.
      scale: of the step; the published scripts have 0.25.
      inner: runs on projected gradients, without parameters; `optax.scale_by_adam()`.

    Raises:
      ValueError: for a leaf that is no matrix, or a rank or gap below 1.

    Example:
      >>> tx = scale_by_shorter_side(rank=2, scale=1.0, inner=optax.identity())
      >>> g = jnp.outer(jnp.arange(4.0), jnp.ones(3))
      >>> update, _ = tx.update({"w": g}, tx.init({"w": g}))
      >>> bool(jnp.allclose(update["w"], g, atol=1e-5))
      True
    """
    if rank < 1 or update_proj_gap < 1:
        raise ValueError(
            "scale_by_shorter_side: rank and update_proj_gap must be at least 1, got "
            f"{rank} and {update_proj_gap}"
        )
    inner = optax.scale_by_adam() if inner is None else inner

    def init(params):
        jax.tree.map(_check_matrix, params)
        width = lambda p: (min(p.shape), min(rank, *p.shape))
        zeros = jax.tree.map(lambda p: jnp.zeros(width(p)), params)
        low = jax.tree.map(project, params, zeros)
        return ShorterSideState(jnp.zeros([], jnp.int32), zeros, inner.init(low))

    def update(updates, state, params=None):
        del params
        fresh = lambda: jax.tree.map(
            lambda g, P: projector(g, P.shape[1]), updates, state.projectors
        )
        is_due = state.count % update_proj_gap == 0
        projectors = lax.cond(is_due, fresh, lambda: state.projectors)
        low = jax.tree.map(project, updates, projectors)
        low, inner_state = inner.update(low, state.inner)
        back = lambda g, l, P: scale * project_back(l, P, g.shape).astype(g.dtype)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(back, updates, low, projectors)
        return updates, ShorterSideState(count, projectors, inner_state)

    return optax.GradientTransformation(init, update)


def _check_matrix(p) -> None:
    if p.ndim != 2:
        raise ValueError(
            f"scale_by_shorter_side: every leaf must be a matrix, got shape {p.shape}; "
            "give the others to another transformation (optax.partition)"
        )


def galore_reference(
    learning_rate, *, matrices: Callable[[Any], Any], weight_decay=0.0, mask=None, **how
) -> optax.GradientTransformation:
    """AdamW whose moments are projected where `matrices` (params -> bools) is True.

    Args:
      learning_rate: a number or a schedule.
      matrices: params -> a tree of bools; the other leaves have Adam's own moments.
      weight_decay: decoupled, of the whole parameters.
      mask: what decays, as in `optax.adamw`.
      **how: rank, update_proj_gap and scale of `scale_by_shorter_side`.
    """
    names = {True: "projected", False: "whole"}
    labels = lambda params: jax.tree.map(lambda m: names[m], matrices(params))
    parts = {
        "projected": scale_by_shorter_side(**how),
        "whole": optax.scale_by_adam(),
    }
    return optax.chain(
        optax.partition(parts, labels),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def galore_optax(
    learning_rate, *, matrices: Callable[[Any], Any], weight_decay=0.0, mask=None, **how
) -> optax.GradientTransformation:
    """`optax.contrib.galore` of the same matrices, its axes the first and the second.

    Arguments as in `galore_reference`.
    """
    axes = optax.contrib.GaLoreDimensionNumbers()
    numbers = lambda params: jax.tree.map(
        lambda m: axes if m else None, matrices(params)
    )
    return optax.contrib.galore(
        learning_rate,
        weight_decay=weight_decay,
        mask=mask,
        weight_dimension_numbers=numbers,
        **how,
    )
