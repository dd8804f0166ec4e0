"""DLRM: numbers and ids to one logit, by an MLP, embeddings, their products, an MLP.

Shape letters: B rows, N dense features, F tables, D width of an embedding, V vectors
that are multiplied with one another (the tables' and the bottom MLP's), P pairs.

Nearly all parameters are the tables', so `Layers` names what a large table and a wide
linear map are: dense by default, tensor trains with `tensor_train_layers`.

Source: Naumov et al., arXiv 1906.00091; which layers become tensor trains: Yang et al.
(CoMERA), arXiv 2405.14377.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax

from coat_jax import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """The sizes of a model. `dtype` computes, `param_dtype` is stored.

    bottom and top are the widths of the hidden layers of the two MLPs; the bottom one
    ends in `features`, the top one in the logit. dropout is of what enters the top.
    """

    tables: tuple[int, ...]
    dense: int
    features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dropout: float = 0.0
    embedding_std: float = 0.01
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        for name in ("tables", "bottom", "top"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise ValueError(
                    f"DLRMConfig: {name} must be positive sizes, got {sizes}; give at "
                    "least one"
                )
        for name in ("dense", "features"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DLRMConfig: {name} must be at least 1, got "
                    f"{getattr(self, name)}; give a positive size"
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"DLRMConfig: dropout must be in [0, 1), got {self.dropout}"
            )

    @property
    def pairs(self) -> int:
        """P, of F + 1 vectors."""
        return (len(self.tables) + 1) * len(self.tables) // 2


# Of the paper's data, the largest tables were 10,131,227 rows; here are the sizes of
# the layers, and `dataclasses.replace` gives a data set's tables and dense features.
PRESETS = {
    "micro": DLRMConfig(tables=(7, 600), dense=3, features=8, bottom=(16,), top=(24,)),
    "small": DLRMConfig(
        tables=(100, 10_000), dense=13, features=16, bottom=(128, 64), top=(128, 64)
    ),
    "full": DLRMConfig(
        tables=(1000, 1 << 20), dense=13, features=64, bottom=(512, 256), top=(512, 256)
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the model is made of: NNX classes that take their default's arguments.

    large_embed makes tables of at least large_rows rows, wide_linear maps from or to
    more than wide features. Without them, embed and linear make those too.
    """

    embed: Callable[..., Any] = nnx.Embed
    linear: Callable[..., Any] = nnx.Linear
    large_embed: Callable[..., Any] | None = None
    wide_linear: Callable[..., Any] | None = None
    large_rows: int = 10_000
    wide: int = 128


def tensor_train_layers(
    *,
    table_rank: int,
    linear_rank: int | None = None,
    table_order: int = 4,
    large_rows: int = 10_000,
) -> Layers:
    """Large tables as TTM embeddings, and wide linear maps as tensor trains.

    Args:
      table_rank: largest rank of a table's train.
      linear_rank: of a linear map's; None leaves those dense.
      table_order: cores of a table's train. Two share least between rows and take most
        parameters for a rank.
      large_rows: tables from here on are trains.

    Example:
      >>> layers = tensor_train_layers(table_rank=4, large_rows=500)
      >>> dense = count_params(PRESETS["micro"])
      >>> dense, count_params(PRESETS["micro"], layers=layers)
      (5369, 885)
    """
    table = {"rank": table_rank, "order": table_order}
    wide = functools.partial(nn.TTLinear, rank=linear_rank) if linear_rank else None
    return Layers(
        large_embed=functools.partial(nn.TTMEmbedding, **table),
        wide_linear=wide,
        large_rows=large_rows,
    )


def _types(config) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _embed(config: DLRMConfig, layers: Layers, rows: int, rngs):
    large = layers.large_embed if rows >= layers.large_rows else None
    # Close to zero: rows that training never saw then say nothing, as they should.
    normal = nnx.initializers.normal(config.embedding_std)
    how = {"embedding_init": normal, **_types(config)}
    return (large or layers.embed)(rows, config.features, rngs=rngs, **how)


class MLP(nnx.Module):
    """Linear maps with ReLU between them, and after the last if `end` says so."""

    def __init__(self, sizes, config: DLRMConfig, layers: Layers, *, end: bool, rngs):
        made = []
        for before, after in zip(sizes[:-1], sizes[1:], strict=True):
            wide = layers.wide_linear if max(before, after) > layers.wide else None
            make = wide or layers.linear
            made.append(make(before, after, rngs=rngs, **_types(config)))
        self.maps = nnx.List(made)
        self.end = end

    def __call__(self, x_BN):
        """(B, sizes[0]) to (B, sizes[-1])."""
        for place, linear in enumerate(self.maps):
            x_BN = linear(x_BN)
            if self.end or place + 1 < len(self.maps):
                x_BN = jax.nn.relu(x_BN)
        return x_BN


def interactions(vectors_BVD):
    """The products of all pairs of different vectors, (B, P): rows of a triangle.

    Example:
      >>> interactions(jnp.array([[[1.0, 0.0], [2.0, 3.0], [0.0, 5.0]]])).tolist()
      [[2.0, 0.0, 15.0]]
    """
    gram_BVV = jnp.einsum("bvd,bwd->bvw", vectors_BVD, vectors_BVD)
    row, column = np.tril_indices(vectors_BVD.shape[1], -1)
    return gram_BVV[:, row, column]


def dropout(x, rate: float, key):
    """Each element zero with probability `rate`, else divided by 1 - rate."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


class DLRM(nnx.Module):
    """Dense features (B, N) and ids int (B, F) to logits (B,), compute dtype."""

    def __init__(
        self, config: DLRMConfig, layers: Layers | None = None, *, rngs: nnx.Rngs
    ):
        layers = layers or Layers()
        self.config = config
        make = functools.partial(MLP, config=config, layers=layers, rngs=rngs)
        self.bottom = make((config.dense, *config.bottom, config.features), end=True)
        tables = [_embed(config, layers, rows, rngs) for rows in config.tables]
        self.tables = nnx.List(tables)
        entering = config.features + config.pairs
        self.top = make((entering, *config.top, 1), end=False)

    def __call__(self, dense_BN, ids_BF, *, key=None):
        """Logits (B,); with a key, under the config's dropout."""
        x_BD = self.bottom(dense_BN.astype(self.config.dtype))
        rows = [table(ids_BF[:, i]) for i, table in enumerate(self.tables)]
        pairs_BP = interactions(jnp.stack([x_BD, *rows], axis=1))
        entering = jnp.concatenate([x_BD, pairs_BP], axis=1)
        if key is not None and self.config.dropout:
            entering = dropout(entering, self.config.dropout, key)
        return self.top(entering)[:, 0]


def init_params(config: DLRMConfig, key, *, layers: Layers | None = None):
    """A nested dict of arrays: the parameters of `DLRM`. Works under `eval_shape`."""
    return nnx.to_pure_dict(nnx.state(DLRM(config, layers, rngs=nnx.Rngs(key))))


def make_apply(config: DLRMConfig, *, layers: Layers | None = None):
    """The model as a function: apply(params, dense, ids, *, key=None) -> logits."""
    build = lambda: DLRM(config, layers, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(nnx.eval_shape(build))
    return lambda params, *inputs, key=None: nnx.merge(graph, params)(*inputs, key=key)


def make_loss(config: DLRMConfig, *, layers: Layers | None = None):
    """loss(params, (dense, ids, labels), key): mean binary cross-entropy in float32.

    Labels are 0 or 1, (B,). Without a key nothing is dropped.
    """
    apply = make_apply(config, layers=layers)

    def loss(params, batch, key=None):
        *inputs, labels = batch
        logits = apply(params, *inputs, key=key).astype(jnp.float32)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    return loss


def count_params(config: DLRMConfig, *, layers: Layers | None = None) -> int:
    """The number of parameters, without making any.

    Example:
      >>> count_params(PRESETS["full"])
      67494209
    """
    make = lambda: init_params(config, jax.random.key(0), layers=layers)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make)))
