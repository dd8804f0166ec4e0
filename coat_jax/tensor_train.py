"""Tensor trains with rank-control diagonals: matrices (TT) and tables (TTM) as cores.

Letters: N inputs, M outputs, L cores, n and m modes, r ranks.
"""

from collections.abc import Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax import tt_svd
from coat_jax.factorize import TTMShape as TTMShape
from coat_jax.factorize import TTShape as TTShape
from coat_jax.factorize import feasible_ranks as feasible_ranks
from coat_jax.factorize import merging as merging
from coat_jax.factorize import tt_shape as tt_shape
from coat_jax.factorize import ttm_shape as ttm_shape
from coat_jax.typing import Array, Float, PRNGKeyArray

TAU = 1e-2  # CoMERA's threshold
HIGHEST = lax.Precision.HIGHEST  # a GPU would otherwise merge in TF32


class TensorTrain(NamedTuple):
    """A matrix as a chain of cores with a diagonal on every bond between two of them.

    Invariants: cores are L arrays, (r_{k-1}, n_k, r_k) of a TT or
    (r_{k-1}, n_k, m_k, r_k) of a TTM, r_0 = r_L = 1; diagonals are L - 1 float32
    arrays (r_k,). Ranks are read from these shapes. With g the gate, entry i_1 ... i_L
    is  G_1[:, i_1] diag(g(v_1)) G_2[:, i_2] ... diag(g(v_{L-1})) G_L[:, i_L].
    """

    cores: Any
    diagonals: Any


def gate(v: Float[Array, "..."], *, tau: float = TAU) -> Float[Array, "..."]:
    """v where v > tau, else 0; the gradient is 1 where v > tau, else 0. NaN stays.

    Pure: CoMERA's released code writes -100 into the v of tables, so that a mere
    evaluation prunes for good.

    Example:
      >>> import jax.numpy as jnp
      >>> [float(v) for v in gate(jnp.array([1.0, 0.01, -2.0]))]
      [1.0, 0.0, 0.0]
    """
    return jnp.where(v <= tau, jnp.zeros_like(v), v)


def size(train: TensorTrain) -> int:
    """Parameters of the cores, from their shapes; the diagonals fold into the cores."""
    return sum(math.prod(core.shape) for core in train.cores)


def init_train(
    key: PRNGKeyArray,
    shape: TTShape | TTMShape,
    *,
    std: float,
    dtype: Any = jnp.float32,
) -> TensorTrain:
    """A random train whose dense entries have mean 0 and root mean square `std`.

    An entry is a sum over P = r_1 ... r_{L-1} paths of products of L independent core
    entries. With core entries of variance s^2 it has variance P s^(2 L), so

        s = (std / sqrt(P))^(1 / L),   P from the clipped ranks.

    That holds on average over draws; one draw of a long train with small ranks may miss
    it several times over. So the cores are then multiplied by one common factor that
    makes the Frobenius norm of the dense matrix exactly std sqrt(entries). No entry is
    favoured, therefore each still has variance std^2. Products have heavier tails than
    a normal variable: the kurtosis is about 5 at CoMERA's shapes.

    Args:
      key: a random key.
      shape: TTShape or TTMShape.
      std: of the dense entries, such as sqrt(2 / (N + M)) or 1.
      dtype: of the cores, drawn in float32 and rounded.

    Returns:
      TensorTrain with diagonals of ones.

    Raises:
      ValueError: if std is not positive.

    Source: CoMERA (arXiv 2405.14377); its code scales core k by std^(1/L) / sqrt(r_k),
    which has the same variance but neither equal cores nor the exact norm.

    Example:
      >>> import jax
      >>> train = init_train(jax.random.key(0), tt_shape(768, 768, rank=30), std=0.02)
      >>> size(train), f"{float(to_dense(train, inputs=3).std()):.4f}"
      (20448, '0.0200')
    """
    if not std > 0:
        raise ValueError(f"init_train: std must be positive, got {std}")
    cores, order = shape.core_shapes, len(shape.modes)
    scale = math.exp((math.log(std) - math.log(math.prod(shape.ranks)) / 2) / order)
    # One draw for all cores: a model of many trains then compiles in less time.
    ends = list(itertools.accumulate(map(math.prod, cores)))
    flat = scale * jax.random.normal(key, (ends[-1],), jnp.float32)
    pieces = jnp.split(flat, ends[:-1])
    draws = [piece.reshape(c) for piece, c in zip(pieces, cores, strict=True)]
    miss = std * math.sqrt(shape.dense_size) / _norm(draws)
    draws = [(core * miss ** (1 / order)).astype(dtype) for core in draws]
    return TensorTrain(tuple(draws), _ones(draws))


def to_dense(
    train: TensorTrain,
    *,
    inputs: int | None = None,
    tau: float = TAU,
    dtype: Any = None,
) -> Float[Array, "rows columns"]:
    """The matrix that a train stands for, gates applied, merged in float32.

    Args:
      train: a TT, whose first `inputs` cores are the input's, or a TTM.
      inputs: required for a TT: how many cores make the rows. None for a TTM.
      tau: the gate's threshold.
      dtype: of the result; None is the cores'.

    Returns:
      (N, M) of a TT; (rows, features) of a TTM, its padding rows included.

    Raises:
      ValueError: if inputs is missing for a TT, given for a TTM, or leaves no core for
        a side.

    Example:
      >>> import jax
      >>> train = init_train(jax.random.key(0), ttm_shape(100, 12, rank=4), std=1.0)
      >>> to_dense(train).shape
      (108, 12)
    """
    cores = gated(train, tau=tau)
    if cores[0].ndim == 4:
        if inputs is not None:
            raise ValueError(
                f"to_dense: a TTM has rows and columns in every core, got inputs="
                f"{inputs}; leave it out"
            )
        dense = table(merge(cores))[0, ..., 0]
    else:
        check_inputs("to_dense", train, inputs)
        left, right = merge(cores[:inputs]), merge(cores[inputs:], leftward=True)
        rank = right.shape[0]
        halves = left.reshape(-1, rank), right.reshape(rank, -1)
        dense = jnp.matmul(*halves, precision=HIGHEST)
    return dense.astype(train.cores[0].dtype if dtype is None else dtype)


def from_dense(
    matrix: Float[Array, "rows columns"], shape: TTShape | TTMShape
) -> TensorTrain:
    """The train of `shape` nearest to a matrix, bond by bond (TT-SVD).

    |matrix - train|^2 <= sum over bonds of the squared singular values left out; with
    the largest feasible ranks it is the matrix to float32's rounding. Singular values
    are shared by the cores of their bond, diagonals are ones.

    Args:
      matrix: (N, M) of a TTShape. For a TTMShape (rows, features) or fewer rows: the
        padding rows are then zeros.
      shape: its ranks are clipped by `feasible_ranks`.

    Returns:
      TensorTrain in the matrix's dtype, computed in float32.

    Raises:
      ValueError: if the matrix does not fit the shape.

    Example:
      >>> import jax.numpy as jnp
      >>> train = from_dense(jnp.eye(4), tt_shape(4, 4, rank=9, order=2))
      >>> bool(jnp.allclose(to_dense(train, inputs=2), jnp.eye(4), atol=1e-5))
      True
    """
    ranks = feasible_ranks(shape.modes, shape.ranks)
    values = matrix.astype(wide(matrix.dtype))
    if isinstance(shape, TTMShape):
        values = _folded_table(values, shape)
    elif matrix.shape != (shape.in_features, shape.out_features):
        raise ValueError(
            f"from_dense: the matrix must be ({shape.in_features}, "
            f"{shape.out_features}) for {shape}, got {matrix.shape}"
        )
    cores = tt_svd.decompose(values, shape.modes, ranks)
    want = [(r0, *s[1:-1], r1) for r0, s, r1 in _with_ranks(shape.core_shapes, ranks)]
    cores = tuple(
        core.reshape(s).astype(matrix.dtype)
        for core, s in zip(cores, want, strict=True)
    )
    return TensorTrain(cores, _ones(cores))


def round_train(
    train: TensorTrain,
    *,
    ranks: int | Sequence[int] | None = None,
    tolerance: float | None = None,
    tau: float = TAU,
) -> TensorTrain:
    """The train with smaller ranks: the best cut of each bond (TT-rounding).

    Diagonals are gated and absorbed. Unlike leaving out the small diagonals, it does
    not depend on how a bond's size is shared between diagonal and cores.

    Args:
      train: TT or TTM.
      ranks: the largest rank, or one a bond; static, so that it may be jitted.
      tolerance: instead of or beside ranks, the error allowed,
        |train - rounded| <= tolerance |train| in the Frobenius norm. Concrete arrays
        only, since the shapes depend on the values.
      tau: the gate's threshold.

    Returns:
      TensorTrain in the cores' dtype with diagonals of ones and every rank at least 1.
      Neither ranks nor tolerance: ranks that no tensor of these modes can have are cut,
      the matrix stays.

    Raises:
      ValueError: if tolerance is negative.

    Example:
      >>> import jax
      >>> train = init_train(jax.random.key(0), tt_shape(64, 64, rank=8), std=1.0)
      >>> [core.shape for core in round_train(train, ranks=2).cores][:2]
      [(1, 4, 2), (2, 4, 2)]
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(
            f"round_train: tolerance must be 0 or more, got {tolerance}; it is the "
            "error relative to the train's norm"
        )
    cores = gated(train, tau=tau)
    middles = [core.shape[1:-1] for core in cores]
    flat = [c.reshape(c.shape[0], -1, c.shape[-1]) for c in cores]
    if ranks is not None:
        ranks = feasible_ranks([c.shape[1] for c in flat], ranks)
    flat = tt_svd.lower(flat, ranks, tolerance)
    cores = tuple(
        core.reshape(core.shape[0], *middle, core.shape[-1]).astype(old.dtype)
        for core, middle, old in zip(flat, middles, train.cores, strict=True)
    )
    return TensorTrain(cores, _ones(cores))


def gated(train: TensorTrain, *, tau: float = TAU) -> list[jax.Array]:
    """The cores in float32, each times the gated diagonal of the bond to its right.

    Cores of float64 stay so.
    """
    check_train("gated", train)
    cores = [core.astype(wide(core.dtype)) for core in train.cores]
    for k, v in enumerate(train.diagonals):
        scale = gate(v, tau=tau).astype(cores[k].dtype)
        cores[k] = cores[k] * scale.reshape((1,) * (cores[k].ndim - 1) + (-1,))
    return cores


def wide(dtype) -> Any:
    """float32, or float64 for itself. Strict promotion would refuse 16 bits."""
    return jnp.float64 if jnp.dtype(dtype).itemsize > 4 else jnp.float32


def merge(cores: Sequence[jax.Array], *, leftward: bool = False) -> jax.Array:
    """Neighbours contracted to one array (r_first, modes ..., r_last), from one end.

    `leftward` starts at the right end, which is cheaper where ranks fall to the right.
    """
    if leftward:
        out = cores[-1]
        for core in cores[-2::-1]:
            out = jnp.tensordot(core, out, 1, precision=HIGHEST)
        return out
    out = cores[0]
    for core in cores[1:]:
        out = jnp.tensordot(out, core, 1, precision=HIGHEST)
    return out


def table(merged: jax.Array) -> jax.Array:
    """(r, n_1, m_1, n_2, m_2 ..., s) as (r, n_1 n_2 ..., m_1 m_2 ..., s)."""
    rows = list(range(1, merged.ndim - 1, 2))
    cols = [k + 1 for k in rows]
    sizes = (math.prod(merged.shape[k] for k in axes) for axes in (rows, cols))
    order = (0, *rows, *cols, merged.ndim - 1)
    return merged.transpose(order).reshape(len(merged), *sizes, merged.shape[-1])


def check_train(who: str, train: TensorTrain) -> None:
    """Raises a ValueError unless the shapes of cores and diagonals form a chain."""
    shapes = [tuple(core.shape) for core in train.cores]
    bonds = [tuple(v.shape) for v in train.diagonals]
    chained = all(a[-1:] == b[:1] for a, b in zip(shapes, shapes[1:], strict=False))
    alike = bool(shapes) and {len(s) for s in shapes} in ({3}, {4})
    if not (
        alike
        and chained
        and shapes[0][0] == shapes[-1][-1] == 1
        and bonds == [s[-1:] for s in shapes[:-1]]
    ):
        raise ValueError(
            f"{who}: cores must all be (r, n, s), or all (r, n, m, s), each starting "
            "with the rank at which the one before ends, the ends 1, with a diagonal "
            f"of the rank between any two; got cores {shapes}, diagonals {bonds}"
        )


def check_inputs(who: str, train: TensorTrain, inputs: int | None) -> None:
    """Raises a ValueError unless a TT's cores split in two at `inputs`."""
    check_train(who, train)
    if train.cores[0].ndim != 3:
        raise ValueError(
            f"{who}: takes a TT, whose cores have 3 axes, got 4; a TTM is a table, "
            "see coat_jax.lookup"
        )
    if inputs is None or not 0 < inputs < len(train.cores):
        raise ValueError(
            f"{who}: inputs must say how many of the {len(train.cores)} cores are the "
            f"input's, 1 to {len(train.cores) - 1}, got {inputs}"
        )


def _norm(cores) -> jax.Array:
    """The Frobenius norm of a train without forming it: a chain of Gram matrices."""
    gram = jnp.ones((1, 1), jnp.float32)
    for core in cores:
        flat = core.reshape(core.shape[0], -1, core.shape[-1])
        half = jnp.tensordot(gram, flat, 1, precision=HIGHEST)
        gram = jnp.einsum("aic,aid->cd", half, flat, precision=HIGHEST)
    return jnp.sqrt(gram[0, 0])


def _ones(cores) -> tuple[jax.Array, ...]:
    return tuple(jnp.ones(core.shape[-1:], jnp.float32) for core in cores[:-1])


def _with_ranks(core_shapes, ranks):
    return zip(ranks[:-1], core_shapes, ranks[1:], strict=True)


def _folded_table(values, shape: TTMShape):
    """(rows, features), fewer rows padded with zeros, in the cores' order of axes."""
    rows, features = values.shape
    if rows > shape.rows or features != shape.features:
        raise ValueError(
            f"from_dense: the table must have {shape.features} columns and at most "
            f"{shape.rows} rows for {shape}, got {values.shape}"
        )
    values = jnp.pad(values, ((0, shape.rows - rows), (0, 0)))
    order = len(shape.row_dims)
    axes = [axis for k in range(order) for axis in (k, order + k)]
    return values.reshape(*shape.row_dims, *shape.col_dims).transpose(axes)
