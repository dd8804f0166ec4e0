"""Tensor trains merged once, for many products: a step's micro-batches, or inference.

    merged = merge(model)                     TTLinear, TTMEmbedding -> the forms here
    total = lax.scan(lambda s, batch: (s + loss(merged, batch), None), 0.0, batches)

The merge is part of what is differentiated: gradients of the factors are summed over
the micro-batches, and go back through the merge to the cores once.
"""

import collections
import functools
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
import jax
from jax import numpy as jnp

from coat_jax import contraction
from coat_jax.lookup import Tables
from coat_jax.nn import tensor_embedding as embedding
from coat_jax.nn.tensor_embedding import TTMEmbedding
from coat_jax.nn.tensor_train import TTLinear, apply_halves, refuse
from coat_jax.policy import BF16, Policy, check_policy

# An NNX module, or a list or dict of them.
Model = Any


class LowRankLinear(nnx.Module):
    """(x left) right + bias: what a `TTLinear` is once its train is merged.

    Args:
      left: (in_features, R).
      right: (R, out_features).
      bias: (out_features,), or None.
      dtype, promote_dtype, preferred_element_type: as in `TTLinear`.
      policy: formats, scaling and accumulation of the products.

    Example:
      >>> from jax import numpy as jnp
      >>> layer = LowRankLinear(jnp.ones((16, 2)), jnp.ones((2, 32)))
      >>> layer(jnp.ones((3, 16))).shape, layer.in_features, layer.out_features
      ((3, 32), 16, 32)
    """

    def __init__(
        self,
        left: jax.Array,
        right: jax.Array,
        bias: Any = None,
        *,
        dtype: Any = None,
        promote_dtype: Any = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        policy: Policy = BF16,
    ):
        check_policy("LowRankLinear", policy)
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            raise ValueError(
                "LowRankLinear: left must be (in_features, R) and right (R, "
                f"out_features), got shapes {left.shape} and {right.shape}"
            )
        self.left, self.right = nnx.Param(left), nnx.Param(right)
        bias = bias if bias is None or isinstance(bias, nnx.Param) else nnx.Param(bias)
        self.bias = nnx.data(bias)
        self.use_bias = bias is not None
        self.in_features, self.out_features = left.shape[0], right.shape[1]
        self.dtype, self.param_dtype = dtype, left.dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.policy = policy

    def halves(self):
        """Left (in_features, R) and right (R, out_features)."""
        return self.left[...], self.right[...]

    def __call__(self, inputs, out_sharding=None):
        """(..., in_features) to (..., out_features)."""
        refuse("LowRankLinear", {"out_sharding": out_sharding})
        return apply_halves(self, inputs)


class MergedEmbedding(nnx.Module):
    """What a `TTMEmbedding` is once its train is merged: two small tables.

    Args:
      tables: left (a, p, R) and right (R, b, q), of rows (a, b) and columns (p, q).
      num_embeddings: rows that can be asked for, of a b.
      dtype, max_unique, policy: as in `TTMEmbedding`.

    Example:
      >>> from jax import numpy as jnp
      >>> tables = Tables(jnp.ones((3, 2, 4)), jnp.ones((4, 5, 8)))
      >>> layer = MergedEmbedding(tables, 14)
      >>> layer(jnp.array([0, 13], jnp.int32)).shape
      (2, 16)
    """

    def __init__(
        self,
        tables: Tables,
        num_embeddings: int,
        *,
        dtype: Any = None,
        max_unique: int | None = None,
        policy: Policy = BF16,
    ):
        check_policy("MergedEmbedding", policy)
        left, right = tables
        self.left, self.right = nnx.Param(left), nnx.Param(right)
        self.num_embeddings = num_embeddings
        self.features = left.shape[1] * right.shape[2]
        self.dtype, self.param_dtype = dtype or left.dtype, left.dtype
        self.max_unique, self.policy = max_unique, policy

    def tables(self) -> Tables:
        """Left (a, p, R) and right (R, b, q)."""
        return Tables(self.left[...], self.right[...])

    def __call__(self, inputs, out_sharding=None):
        """Integers of any shape to (*shape, features)."""
        refuse("MergedEmbedding", {"out_sharding": out_sharding})
        return embedding.look_up(self, self.tables(), inputs)

    def attend(self, query, out_sharding=None):
        """query (..., features) times the table's transpose: (..., num_embeddings)."""
        refuse("MergedEmbedding", {"out_sharding": out_sharding})
        return embedding.attend(self, self.tables(), query)


def merge(model: Model) -> Model:
    """A model with the trains of `model` merged; everything else is shared with it.

    Pure and differentiable: call it inside the function that is differentiated, outside
    the loop over micro-batches. Layers of one shape are merged as one batch. The
    result's parameters are Params `left` and `right` in float32, so it may be trained
    on its own, too: as an ordinary low-rank model.

    Args:
      model: an NNX module, or a list or dict of them; it is not changed.

    Returns:
      A model of the same structure. Modules are new, Variables are those of `model`.

    Example:
      >>> from jax import numpy as jnp
      >>> layer = TTLinear(64, 96, rank=4, rngs=nnx.Rngs(0))
      >>> merged = merge(layer)
      >>> type(merged).__name__, merged.left[...].shape, len(layer.cores)
      ('LowRankLinear', (64, 4), 6)
    """
    copy = nnx.clone(model, variables=False)
    found = [node for _, node in nnx.iter_graph(copy)]
    layers = [module for module in found if type(module) is TTLinear]
    for layer, halves in zip(layers, _halves_of(layers), strict=True):
        _merge_linear(layer, *halves)
    for module in found:
        if type(module) is TTMEmbedding:
            _merge_embedding(module)
    return copy


def _halves_of(layers: list[TTLinear]) -> list[tuple[jax.Array, jax.Array]]:
    """What `halves` gives of each. Trains of one shape are merged as one batch.

    A merge is a dozen small products, and its backward two; on a GPU each is a launch.
    """
    alike = collections.defaultdict(list)
    for place, layer in enumerate(layers):
        dtypes_of = tuple(param.dtype for param in layer.cores)
        alike[layer.shape, layer.tau, dtypes_of].append(place)
    found = {}
    for (shape, tau, _), places in alike.items():
        how = {"inputs": len(shape.in_dims), "tau": tau, "dtype": jnp.float32}
        trains = [layers[place].train for place in places]
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *trains)
        lefts, rights = jax.vmap(functools.partial(contraction.halves, **how))(stacked)
        found |= {place: (lefts[k], rights[k]) for k, place in enumerate(places)}
    return [found[place] for place in range(len(layers))]


def become(layer: Any, kind: type) -> Any:
    """Empties a layer and makes it one of `kind`: whatever holds it still does.

    The attributes are to be set anew. Returns what they were.
    """
    old = {k: v for k, v in vars(layer).items() if not k.startswith("_pytree__")}
    for name in old:
        delattr(layer, name)
    object.__setattr__(layer, "__class__", kind)  # Flax would list it as an attribute
    return old


def _merge_linear(layer, left, right) -> None:
    old = become(layer, LowRankLinear)
    names = ("dtype", "promote_dtype", "preferred_element_type", "policy")
    own = {name: old[name] for name in names}
    LowRankLinear.__init__(layer, left, right, old["bias"], **own)


def _merge_embedding(layer) -> None:
    tables = layer.tables()
    old = become(layer, MergedEmbedding)
    own = {name: old[name] for name in ("dtype", "max_unique", "policy")}
    MergedEmbedding.__init__(layer, tables, old["num_embeddings"], **own)
