"""Flax Linen's Dense and Embed as tensor trains: few parameters, shrinkable ranks.

Parameters are `bias` and the lists `cores` and `diagonals`, whose shapes alone say what
the ranks are. Given a truncated tree, `apply` computes with its smaller ranks. What is
computed is what the modules of `coat_jax.nn` compute.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_embed_init
from jax import numpy as jnp

from coat_jax import contraction, lookup, lowrank, tensor_train
from coat_jax.linen.layers import enter
from coat_jax.policy import BF16, Policy
from coat_jax.tensor_train import TAU, TensorTrain

Init = Callable[..., Any]
Dims = Sequence[int] | None
_kernel_init = nn.initializers.lecun_normal()


class TTLinear(nn.Module):
    """`nn.Dense` whose kernel is a tensor train.

    Fields beside Flax's, which keep their meaning: rank, in_dims, out_dims, order, std,
    policy and tau, as in `coat_jax.nn.TTLinear`. Of kernel_init the standard deviation
    is taken; precision and dot_general have nothing to apply to, and are refused.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
      >>> layer = TTLinear(96, rank=4)
      >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
      >>> y.shape, sorted(variables["params"])
      ((2, 96), ['bias', 'cores', 'diagonals'])
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Init = _kernel_init
    bias_init: Init = nn.initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    dot_general: Any = None
    dot_general_cls: Any = None
    rank: int | Sequence[int] = 0
    in_dims: Dims = None
    out_dims: Dims = None
    order: int = 3
    std: float | None = None
    policy: Policy = BF16
    tau: float = TAU

    @nn.compact
    def __call__(self, inputs):
        """(..., features of the input) to (..., features)."""
        unset = {"precision": None, "dot_general": None, "dot_general_cls": None}
        _refuse(self, unset | {"promote_dtype": promote_dtype})
        sizes = (jnp.shape(inputs)[-1], self.features)
        shape = tensor_train.tt_shape(
            *sizes,
            rank=self.rank,
            in_dims=self.in_dims,
            out_dims=self.out_dims,
            order=self.order,
        )
        known = sizes[0] ** -0.5 if self.kernel_init is _kernel_init else None
        train = _declare(self, shape, sizes, self.kernel_init, known)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, sizes[1:], self.param_dtype)
        x = enter(self.dtype, inputs, train.cores[0], bias)
        return self._product(x, train, len(shape.in_dims), bias)

    def _product(self, x, train, inputs: int, bias):
        """x times the train, in the order that costs least; in FP8 by its halves."""
        shape = contraction.shape_of(train, inputs)
        path = contraction.cost(shape, math.prod(x.shape[:-1])).choose
        if path == "halves" or not self.policy.plain:
            how = {"tau": self.tau, "dtype": jnp.float32}
            left, right = contraction.halves(train, inputs, **how)
            return lowrank.lowrank_dot(x, left, right, bias, policy=self.policy)
        y = contraction.tt_matmul(x, train, inputs, path=path, tau=self.tau)
        if bias is None:
            return y
        return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


class TTMEmbedding(nn.Module):
    """`nn.Embed` whose table is a tensor train of matrices.

    Fields beside Flax's, which keep their meaning: rank, row_dims, col_dims, order,
    std, max_unique, policy and tau, as in `coat_jax.nn.TTMEmbedding`. Of embedding_init
    the standard deviation is taken; promote_dtype is refused.

    Example:
      >>> import jax
      >>> ids = jax.ShapeDtypeStruct((2, 3), jnp.int32)
      >>> layer = TTMEmbedding(500, 32, rank=4)
      >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), ids)[0].shape
      (2, 3, 32)
    """

    num_embeddings: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Init = default_embed_init
    promote_dtype: Any = promote_dtype
    rank: int | Sequence[int] = 0
    row_dims: Dims = None
    col_dims: Dims = None
    order: int = 4
    std: float | None = None
    max_unique: int | None = None
    policy: Policy = BF16
    tau: float = TAU

    def setup(self):
        """Declares the train."""
        _refuse(self, {"promote_dtype": promote_dtype})
        sizes = (self.num_embeddings, self.features)
        shape = tensor_train.ttm_shape(
            *sizes,
            rank=self.rank,
            row_dims=self.row_dims,
            col_dims=self.col_dims,
            order=self.order,
        )
        known = None
        if self.embedding_init is default_embed_init:
            known = self.features**-0.5
        self.train = _declare(self, shape, sizes, self.embedding_init, known)

    def __call__(self, inputs):
        """Integers of any shape to (*shape, features)."""
        if not jnp.issubdtype(jnp.result_type(inputs), jnp.integer):
            raise ValueError(
                f"TTMEmbedding: ids must be integers, got {jnp.result_type(inputs)} of "
                f"shape {jnp.shape(inputs)}; cast them"
            )
        if self.num_embeddings == 1:
            inputs = jnp.zeros_like(inputs)  # nn.Embed, too, has one row for every id
        how = {"num_embeddings": self.num_embeddings, "max_unique": self.max_unique}
        dtype = self.dtype or self.param_dtype
        tables = lookup.tables(self.train, tau=self.tau, dtype=dtype)
        return lookup.lookup(tables, inputs, **how)

    def attend(self, query):
        """query (..., features) times the table's transpose: (..., num_embeddings)."""
        tables = lookup.tables(self.train, tau=self.tau, dtype=jnp.float32)
        x = enter(self.dtype, query, self.train.cores[0])
        how = {"num_embeddings": self.num_embeddings, "policy": self.policy}
        return lowrank.lowrank_attend(x, tables, **how)


def _declare(module: nn.Module, shape, sizes, init: Init, known) -> TensorTrain:
    """The train of a module: its parameters, or new ones of `shape`."""
    names = ("cores", "diagonals")
    if module.has_variable("params", "cores"):
        parts = [module.get_variable("params", name) for name in names]
        return TensorTrain(*map(_sequence, parts))
    who = type(module).__name__
    std = lowrank.dense_std(who, init, sizes, module.std, known=known)
    how = (shape, std, module.param_dtype)
    draw = lambda rng: [*lowrank.draw_train(rng, *how).cores]
    cores = module.param("cores", draw)
    ones = lambda _: [jnp.ones(core.shape[-1:], jnp.float32) for core in cores[:-1]]
    return TensorTrain(tuple(cores), tuple(module.param("diagonals", ones)))


def _sequence(part) -> tuple:
    """Arrays in order; a checkpoint may have a list as a dict of "0", "1" and so on."""
    if hasattr(part, "keys"):
        return tuple(part[key] for key in sorted(part, key=int))
    return tuple(part)


def _refuse(module: nn.Module, unset: dict) -> None:
    for name, value in unset.items():
        if getattr(module, name) is not value:
            raise NotImplementedError(
                f"{type(module).__name__}: {name} has nothing to apply to in a tensor "
                f"train, got {getattr(module, name)!r}; leave it out"
            )
