"""Flax NNX's Embed as a tensor train of matrices: a table of few parameters.

Each core has a digit of the row and one of the column. The train is merged to two small
tables, of which a row of the whole is one product; a row is never looked up in anything
of num_embeddings times features, nor is its gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_embed_init
import jax
from jax import numpy as jnp

from coat_jax import lookup, lowrank, tensor_train
from coat_jax.nn.tensor_train import ranks_of, refuse, set_train, train_of
from coat_jax.policy import BF16, Policy, check_policy
from coat_jax.tensor_train import TAU, TensorTrain, TTMShape

Init = Callable[..., Any]
Dims = Sequence[int] | None


class TTMEmbedding(nnx.Module):
    """`nnx.Embed` whose table is a tensor train of matrices.

    The train is merged to two small tables, from which each row is one product, so that
    rows share what they have in common: `coat_jax.lookup`. Ids out of range give what
    `nnx.Embed` gives.

    Args:
      num_embeddings: rows that can be asked for; the train may have more.
      features: of each row.
      rank: of every bond, or one for each of them; less where the sizes allow no more.
      row_dims: whose product is num_embeddings or more; None finds some.
      col_dims: whose product is features; None finds some.
      order: how many of each to find.
      dtype, param_dtype: as `nnx.Embed` has them; diagonals are float32.
      embedding_init: its standard deviation, of a dense table, is the train's.
      std: that standard deviation itself, in place of embedding_init.
      promote_dtype, embedding_metadata: there is no table for them: they are refused.
      max_unique: a bound on the different ids of a call, for which alone rows are made;
        None makes one for each id.
      policy: of the product in `attend`.
      tau: diagonal entries up to it count as zero.
      rngs: of the parameters.

    Raises:
      ValueError: if the dims don't fit, or std is zero.
      NotImplementedError: for options that are refused.

    Source: CoMERA (arXiv 2405.14377), embedding tables.

    Example:
      >>> layer = TTMEmbedding(500, 32, rank=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[3, 499]], jnp.int32)).shape, len(layer.cores)
      ((1, 2, 32), 4)
    """

    cores: Any
    diagonals: Any
    dtype: Any
    max_unique: int | None
    policy: Policy
    tau: float

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rank: int | Sequence[int],
        row_dims: Dims = None,
        col_dims: Dims = None,
        order: int = 4,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Init = default_embed_init,
        promote_dtype: Any = dtypes.promote_dtype,
        std: float | None = None,
        max_unique: int | None = None,
        policy: Policy = BF16,
        tau: float = TAU,
        rngs: nnx.Rngs,
        embedding_metadata: Any = None,
    ):
        options = {"embedding_metadata": embedding_metadata}
        if promote_dtype is not dtypes.promote_dtype:
            options["promote_dtype"] = promote_dtype
        refuse("TTMEmbedding", options)
        check_policy("TTMEmbedding", policy)
        how = {"rank": rank, "row_dims": row_dims, "col_dims": col_dims, "order": order}
        shape = tensor_train.ttm_shape(num_embeddings, features, **how)
        dense = (num_embeddings, features)
        known = features**-0.5 if embedding_init is default_embed_init else None
        std = lowrank.dense_std("TTMEmbedding", embedding_init, dense, std, known=known)
        train = lowrank.draw_train(rngs.params(), shape, std, param_dtype)
        own = {"dtype": dtype or param_dtype, "param_dtype": param_dtype}
        own |= {"max_unique": max_unique, "policy": policy, "tau": tau}
        self.fill(train, shape, num_embeddings, **own)

    def fill(self, train: TensorTrain, shape: TTMShape, rows: int, **attributes):
        """Takes this train and its dims, of which `rows` rows can be asked for."""
        set_train(self, train)
        self.num_embeddings, self.features = rows, shape.features
        self.row_dims, self.col_dims = tuple(shape.row_dims), tuple(shape.col_dims)
        for name, value in attributes.items():
            setattr(self, name, value)

    @property
    def train(self) -> TensorTrain:
        """The cores and diagonals as they are now."""
        return train_of(self)

    @property
    def shape(self) -> TTMShape:
        """Dims, and the ranks of the cores as they are now."""
        return TTMShape(self.row_dims, self.col_dims, ranks_of(self))

    def tables(self) -> lookup.Tables:
        """The table as two, in float32: left (a, p, R) and right (R, b, q)."""
        return lookup.tables(self.train, tau=self.tau, dtype=jnp.float32)

    def __call__(self, inputs, out_sharding=None):
        """Integers of any shape to (*shape, features)."""
        refuse("TTMEmbedding", {"out_sharding": out_sharding})
        return look_up(self, self.tables(), inputs)

    def attend(self, query, out_sharding=None):
        """query (..., features) times the table's transpose: (..., num_embeddings)."""
        refuse("TTMEmbedding", {"out_sharding": out_sharding})
        return attend(self, self.tables(), query)


def look_up(layer, tables: lookup.Tables, ids):
    """Rows of `tables` by ids, with the options of an embedding layer."""
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise ValueError(
            f"{type(layer).__name__}: ids must be integers, got {jnp.result_type(ids)} "
            f"of shape {jnp.shape(ids)}; cast them"
        )
    if layer.num_embeddings == 1:
        ids = jnp.zeros_like(ids)  # nnx.Embed, too, has one row for every id
    tables = jax.tree.map(lambda table: table.astype(layer.dtype), tables)
    how = {"num_embeddings": layer.num_embeddings, "max_unique": layer.max_unique}
    return lookup.lookup(tables, ids, **how)


def attend(layer, tables: lookup.Tables, query):
    """query times the transpose of `tables`, with the options of an embedding layer."""
    how = {"num_embeddings": layer.num_embeddings, "policy": layer.policy}
    return lowrank.lowrank_attend(query.astype(layer.dtype), tables, **how)
