"""Singular values of a train: decomposing a tensor, and lowering the ranks of a train.

Works on bare lists of 3-axis cores (r_{k-1}, n_k, r_k), in float32 or float64.
"""

from collections.abc import Sequence
import math

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.typing import Array, Float

HIGHEST = lax.Precision.HIGHEST  # a GPU would otherwise multiply in TF32
# Of a bond's largest singular value: smaller ones count as this when they are shared
# between two cores, so that rounding noise is not divided by a number near zero.
FLOOR = 2.0**-12


def decompose(
    tensor: Float[Array, "..."], modes: Sequence[int], ranks: Sequence[int]
) -> list[jax.Array]:
    """Cores of the train of `tensor`, an array of prod(modes) entries, by TT-SVD.

    At bond k the unfolding (r_{k-1} n_k, n_{k+1} ... n_L) is cut to its ranks[k]
    largest singular values. With e_k what bond k leaves out,
    |tensor - train|^2 <= sum_k e_k^2. Source: Oseledets, SIAM J. Sci. Comput. 33
    (2011), algorithm 1.
    """
    cores, spectra, rest = [], [], tensor
    for k, mode in enumerate(modes[:-1]):
        rest = rest.reshape(ranks[k] * mode, -1)
        u, s, vt = jnp.linalg.svd(rest, full_matrices=False)
        rank = ranks[k + 1]
        cores.append(u[:, :rank].reshape(ranks[k], mode, rank))
        spectra.append(s[:rank])
        rest = s[:rank, None] * vt[:rank]
    cores.append(rest.reshape(ranks[-2], modes[-1], 1))
    return _balance(cores, spectra)


def lower(
    cores: Sequence[jax.Array], ranks: Sequence[int] | None, tolerance: float | None
) -> list[jax.Array]:
    """The train with ranks cut: a QR sweep to the left, then SVDs to the right.

    After the first sweep everything right of a bond has orthonormal rows, so that the
    singular values of one core are those of the whole unfolding and cutting them is
    the best cut. `tolerance` is the relative Frobenius error of all bonds together and
    needs concrete arrays, since the new shapes depend on it.
    """
    cores, cut = _orthogonal(cores), None
    if tolerance is not None:
        share = tolerance / math.sqrt(max(len(cores) - 1, 1))
        cut = share * float(jnp.linalg.norm(cores[0]))
    spectra = []
    for k in range(len(cores) - 1):
        r0, mode, _ = cores[k].shape
        matrix = cores[k].reshape(r0 * mode, -1)
        u, s, _ = jnp.linalg.svd(matrix, full_matrices=False)
        rank = s.shape[0] if ranks is None else min(ranks[k + 1], s.shape[0])
        if cut is not None:
            rank = min(rank, _needed(s, cut))
        u = u[:, :rank]
        cores[k] = u.reshape(r0, mode, rank)
        # s vt, without the rounding of the SVD's own factors.
        carry = jnp.matmul(u.T, matrix, precision=HIGHEST)
        cores[k + 1] = jnp.tensordot(carry, cores[k + 1], 1, precision=HIGHEST)
        spectra.append(s[:rank])
    return _balance(cores, spectra)


def _orthogonal(cores) -> list[jax.Array]:
    """The same train whose cores but the first have orthonormal rows."""
    cores = list(cores)
    for k in range(len(cores) - 1, 0, -1):
        r0, mode, r1 = cores[k].shape
        q, r = jnp.linalg.qr(cores[k].reshape(r0, mode * r1).T)
        cores[k] = q.T.reshape(-1, mode, r1)
        cores[k - 1] = jnp.tensordot(cores[k - 1], r.T, 1, precision=HIGHEST)
    return cores


def _needed(s, cut: float) -> int:
    """How many of the values s must stay for the rest to have norm `cut` at most."""
    tails = jnp.sqrt(jnp.cumsum(s[::-1] ** 2)[::-1])
    return max(int(jnp.sum(tails > cut)), 1)


def _balance(cores, spectra) -> list[jax.Array]:
    """Gives either side of every bond the square roots of its singular values.

    The sweeps leave them all on the right. Cores of like size take like steps under
    Adam, and neither side of a bond starts at zero where only its value is zero.
    """
    roots = []
    for s in spectra:
        s = jnp.maximum(s, FLOOR * s[0])
        roots.append(jnp.sqrt(jnp.where(s > 0, s, 1.0)))
    for k, root in enumerate(roots):
        cores[k] = cores[k] * root[None, None]
        cores[k + 1] = cores[k + 1] / root[:, None, None]
    return cores
