"""Rows of a table that is a tensor train: each half of an id is looked up once.

Letters: a b row dims of the halves, p q column dims, R the rank between them, U ids.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.tensor_train import (
    TAU,
    TensorTrain,
    TTMShape,
    check_train,
    gated,
    merge,
    merging,
    table,
    wide,
)
from coat_jax.typing import Array, Float, Shaped

_ONE_HOT_ROWS = 2048


class Tables(NamedTuple):
    """A table as two small ones: row (i, j) is left[i] @ right[:, j], read row by row.

    left (a, p, R) merges the first cores of a TTM, right (R, b, q) the others; the
    table has a b rows and p q columns.
    """

    left: Any
    right: Any


class LookupCost(NamedTuple):
    """Multiply-adds of one lookup. chain: every id walks all cores.

    tables: merging the halves, whatever the ids. rows: one product an id looked up.
    """

    chain: int
    tables: int
    rows: int


def tables(train: TensorTrain, *, tau: float = TAU, dtype: Any = None) -> Tables:
    """A TTM's two merged halves, gates applied: what ids with a half in common share.

    They depend on no id: make them once a step. The cores are split where merging is
    cheapest, near the middle.

    Args:
      train: a TTM of two or more cores.
      tau: the gate's threshold.
      dtype: of the tables, merged in float32 before; None is the cores'.

    Returns:
      Tables.

    Raises:
      ValueError: if the train is no TTM of two or more cores.

    Example:
      >>> import jax
      >>> from coat_jax.tensor_train import init_train, ttm_shape
      >>> shape = ttm_shape(30522, 768, rank=32)
      >>> [half.shape for half in tables(init_train(jax.random.key(0), shape, std=1.0))]
      [(168, 32, 32), (32, 182, 24)]
    """
    shape = shape_of("tables", train)
    split, cores = _split(shape), gated(train, tau=tau)
    dtype = train.cores[0].dtype if dtype is None else dtype
    left = table(merge(cores[:split]))  # (1, a, p, R)
    right = table(merge(cores[split:], leftward=True))  # (R, b, q, 1)
    return Tables(left[0].astype(dtype), right[..., 0].astype(dtype))


def lookup(
    train_or_tables: TensorTrain | Tables,
    ids: Shaped[Array, "*ids"],
    *,
    num_embeddings: int | None = None,
    max_unique: int | None = None,
    tau: float = TAU,
) -> Float[Array, "*ids features"]:
    """table[ids] without the table, as `jnp.take(table, ids, axis=0)` and `nnx.Embed`.

    An id i is the pair (i // b, i % b); row i is left[i // b] @ right[:, i % b]. The
    gradient adds up over equal ids and is scattered into the two small tables only.

    Args:
      train_or_tables: a TTM, or its `tables` where several lookups share them.
      ids: whole numbers of any shape. Negative ones count from the end of
        num_embeddings. Those outside [-num_embeddings, num_embeddings) give NaN rows.
      num_embeddings: how many ids there are; None is every row of the table. Rows
        beyond it pad the dims' product and cannot be reached.
      max_unique: a bound on how many different ids there are, static. Each is then
        computed once and copied, so it must be a true bound: of more ids the largest
        ones give NaN rows, never wrong ones. min(ids.size, num_embeddings) is always
        true and the largest that is used. None computes every id.
      tau: the gate's threshold, for a train.

    Returns:
      (*ids, features) in the tables' dtype, summed in float32.

    Raises:
      TypeError: if ids are not whole numbers.
      ValueError: if num_embeddings exceeds the table's rows, or max_unique < 1.

    Source: CoMERA (arXiv 2405.14377), whose program shares halves of ids likewise; its
    rows are shared under a bound here, since shapes are static.

    Example:
      >>> import jax
      >>> from jax import numpy as jnp
      >>> from coat_jax.tensor_train import init_train, ttm_shape
      >>> train = init_train(jax.random.key(0), ttm_shape(100, 12, rank=4), std=1.0)
      >>> lookup(train, jnp.array([[3, -1], [3, 99]]), num_embeddings=100).shape
      (2, 2, 12)
    """
    halves = train_or_tables
    if isinstance(halves, TensorTrain):
        halves = tables(halves, tau=tau)
    rows = halves.left.shape[0] * halves.right.shape[1]
    count = rows if num_embeddings is None else num_embeddings
    _check(ids, count, rows, max_unique)
    flat, valid = _counted(ids.reshape(-1), count)
    bound = None if max_unique is None else min(max_unique, flat.size, count)
    if bound is None or bound >= flat.size:
        out = _rows(halves, jnp.where(valid, flat, 0))
    else:
        # Ids without a row become the largest id, so that none of them takes a place
        # from one that has a row.
        unique, where = _unique(jnp.where(valid, flat, count), bound)
        computed = _rows(halves, jnp.minimum(unique, count - 1))
        out = jnp.take(computed, where, axis=0, mode="fill", fill_value=jnp.nan)
    out = jnp.where(valid[:, None], out, jnp.full_like(out, jnp.nan))
    return out.reshape(*ids.shape, out.shape[-1])


def cost(shape: TTMShape, tokens: int, *, unique: int | None = None) -> LookupCost:
    """Multiply-adds of looking up `tokens` ids, `unique` of them different.

        chain   T sum_{k >= 2} m_1 ... m_k r_{k-1} r_k
        tables  merging the cores of each half
        rows    U H R,  U = unique, or T without one

    Example:
      >>> from coat_jax.tensor_train import TTMShape
      >>> shape = TTMShape((16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1))
      >>> c = cost(shape, 16384, unique=4000)
      >>> round(c.chain / (c.tables + c.rows))
      26
    """
    ranks, chain, width = shape.ranks, 0, shape.col_dims[0]
    for k in range(1, len(shape.col_dims)):
        width *= shape.col_dims[k]
        chain += tokens * width * ranks[k] * ranks[k + 1]
    split = _split(shape)
    count = tokens if unique is None else unique
    return LookupCost(
        chain, merging(shape, split), count * shape.features * ranks[split]
    )


def shape_of(who: str, train: TensorTrain) -> TTMShape:
    """The TTMShape whose cores these are, or a ValueError."""
    check_train(who, train)
    if train.cores[0].ndim != 4 or len(train.cores) < 2:
        raise ValueError(
            f"{who}: takes a TTM of 2 or more cores with 4 axes, got "
            f"{[tuple(core.shape) for core in train.cores]}; see ttm_shape"
        )
    ranks = (1, *(core.shape[-1] for core in train.cores))
    rows, cols = ([core.shape[k] for core in train.cores] for k in (1, 2))
    return TTMShape(tuple(rows), tuple(cols), ranks)


def _check(ids, count: int, rows: int, max_unique) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"lookup: ids must be whole numbers, got dtype {ids.dtype}")
    if not 1 <= count <= rows:
        raise ValueError(
            f"lookup: num_embeddings must be 1 to the {rows} rows of the table, got "
            f"{count}"
        )
    if max_unique is not None and max_unique < 1:
        raise ValueError(
            f"lookup: max_unique must be at least 1, got {max_unique}; None computes "
            "every id"
        )


def _counted(ids, count: int):
    """Ids as int32, negative ones from the end, and whether each has a row."""
    info = jnp.iinfo(ids.dtype)
    if info.max > jnp.iinfo(jnp.int32).max:  # else the cast would wrap them into range
        ids = jnp.clip(ids, max(info.min, -count - 1), count)
    ids = ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + count, ids)
    return ids, (ids >= 0) & (ids < count)


def _rows(halves: Tables, ids):
    """Row by row left[i] @ right[:, j]; ids within the table."""
    i, j = jnp.divmod(ids, halves.right.shape[1])
    left = _taken(halves.left, i)  # (U, p, R)
    right = _taken(halves.right.transpose(1, 0, 2), j)  # (U, R, q)
    out = jnp.einsum(
        "upr,urq->upq", left, right, preferred_element_type=wide(left.dtype)
    )
    wide_row = left.shape[1] * right.shape[2]
    return out.astype(left.dtype).reshape(ids.size, wide_row)


def _taken(table, ids):
    """table[ids] along the first axis, ids within it; see `summed` for the gradient."""
    rows, dtype = table.shape[0], table.dtype

    @jax.custom_vjp
    def take(table, ids):
        return jnp.take(table, ids, axis=0, mode="clip")

    forward = lambda table, ids: (take(table, ids), ids)
    backward = lambda ids, g: (summed(g, ids, rows).astype(dtype), None)
    take.defvjp(forward, backward)
    return take(table, ids)


def summed(
    values: Float[Array, "ids ..."], ids: Shaped[Array, "ids"], rows: int
) -> Float[Array, "rows ..."]:
    """For each row the sum in float32 of the values whose id it is.

    On a GPU a table of up to 2048 rows is a product with the ids' one-hot matrix, on
    tensor cores. A scatter adds atomically there, and tokens that share an id, such as
    padding, wait for each other: in bfloat16, thousands of times over.
    """
    flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    scatter = functools.partial(_scattered, rows=rows)
    if rows <= _ONE_HOT_ROWS:
        product = functools.partial(_multiplied, rows=rows)
        out = lax.platform_dependent(flat, ids, cuda=product, default=scatter)
    else:
        out = scatter(flat, ids)
    return out.reshape(rows, *values.shape[1:])


def _scattered(values, ids, rows: int):
    values = values.astype(wide(values.dtype))
    return jnp.zeros((rows, values.shape[1]), values.dtype).at[ids].add(values)


def _multiplied(values, ids, rows: int):
    """A value that is not finite makes its column NaN in every row."""
    hot = jax.nn.one_hot(ids, rows, dtype=values.dtype)
    exact = lax.Precision.HIGHEST if values.dtype.itemsize > 2 else None
    return lax.dot_general(
        hot,
        values,
        (((0,), (0,)), ((), ())),
        precision=exact,
        preferred_element_type=wide(values.dtype),
    )


def _unique(ids, bound: int):
    """The `bound` smallest different ids, the rest 0, and each id's place among them.

    Places beyond the bound are returned as they are, so that a lookup can tell;
    `jnp.unique` gives no promise about them.
    """
    order = jnp.argsort(ids)
    ordered = ids[order]
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(new, dtype=jnp.int32)
    unique = jnp.zeros(bound, ids.dtype).at[place].set(ordered, mode="drop")
    return unique, jnp.zeros_like(place).at[order].set(place)


def _split(shape: TTMShape) -> int:
    """After how many cores the halves part: fewest multiply-adds, then the middle."""
    order = len(shape.row_dims)
    key = lambda s: (merging(shape, s), abs(2 * s - order), s)
    return min(range(1, order), key=key)
