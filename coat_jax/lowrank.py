"""Low-rank linear maps in FP8.    Letters: T tokens, N in, R rank, M out.

    t = x left       (T, R)      x is kept as FP8 codes, once for all that share it
    y = t right      (T, M)      t is kept in the compute dtype: R / N of what x was

Both factors enter as they are, in float32 say, and are rounded to FP8 here, so that
factors merged from smaller ones are rounded once, after merging.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax import linear
from coat_jax.lookup import Tables
from coat_jax.policy import BF16, Policy, check_policy
from coat_jax.tensor_train import TensorTrain, TTMShape, TTShape, init_train
from coat_jax.typing import Array, Float

Factors = tuple[Float[Array, "..."], Float[Array, "..."]]


def lowrank_dot(
    x: Float[Array, "..."],
    left: Float[Array, "..."],
    right: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    policy: Policy = BF16,
    residual: Float[Array, "..."] | None = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """residual + (x left) right + bias, both products in FP8.

    With a policy that is `plain`, it is those products in x's dtype, bit for bit.

    Args:
      x: (..., N), bfloat16, float16 or float32.
      left: (N, R), any of these.
      right: (R, *M), any of these.
      bias: (*M), or None.
      policy: formats, scaling and accumulation of all products.
      residual: (..., *M), added to the result; x's dtype.
      preferred_element_type: of the result; x's dtype if None.

    Returns:
      (..., *M) in x's dtype, or that. Each product has the bound of `fp8_dot_general`,
      and x left is rounded to x's dtype between them.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if the sizes don't fit.

    Source: CoMERA (arXiv 2405.14377), whose FP8 products are these two and their
    backward's four; how x is kept is COAT's (arXiv 2410.19313).

    Example:
      >>> from jax import numpy as jnp
      >>> x, left, right = jnp.ones((2, 32)), jnp.ones((32, 4)), jnp.ones((4, 16))
      >>> round(float(lowrank_dot(x, left, right)[0, 0]), 4)
      128.0
    """
    check_policy("lowrank_dot", policy)
    linear.check_linear("lowrank_dot", x, left, None, 1)
    (t,) = _enter(x, [left], policy)
    how = {"policy": policy, "residual": residual}
    return leave(t, right, bias, dtype=preferred_element_type, **how)


def lowrank_project(
    x: Float[Array, "..."],
    factors: Sequence[Factors],
    biases: Sequence[Float[Array, "..."] | None] | None = None,
    *,
    policy: Policy = BF16,
) -> list[Float[Array, "..."]]:
    """(x left) right + bias for each pair, x encoded and kept once for all of them.

    Args:
      x: (..., N), bfloat16, float16 or float32.
      factors: pairs of (N, R) and (R, *M); R and M may differ from pair to pair.
      biases: (*M) or None each; None for none at all.
      policy: formats, scaling and accumulation of all products.

    Returns:
      One (..., *M) for each pair, in x's dtype: what `lowrank_dot` gives of each.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if the sizes don't fit.

    Example:
      >>> from jax import numpy as jnp
      >>> x, pair = jnp.ones((2, 32)), (jnp.ones((32, 4)), jnp.ones((4, 16)))
      >>> [y.shape for y in lowrank_project(x, [pair, pair])]
      [(2, 16), (2, 16)]
    """
    check_policy("lowrank_project", policy)
    biases = [None] * len(factors) if biases is None else biases
    for left, _ in factors:
        linear.check_linear("lowrank_project", x, left, None, 1)
    ts = _enter(x, [left for left, _ in factors], policy)
    rights = [right for _, right in factors]
    return [
        leave(t, right, bias, policy=policy)
        for t, right, bias in zip(ts, rights, biases, strict=True)
    ]


def leave(
    t: Float[Array, "..."],
    right: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    policy: Policy,
    residual: Float[Array, "..."] | None = None,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """residual + t right + bias, the second product alone, keeping t as it is.

    Codes of t would be a second rounding to save R bytes a token. In the backward t is
    encoded anew, under the forward's scale. The result is of `dtype`, or of t's.
    """
    if dtype is None or jnp.dtype(dtype) == t.dtype:
        how = {"policy": policy, "residual": residual}
        return linear.linear(t, right, bias, keep="input", **how)
    linear.check_linear("lowrank_dot", t, right, bias, 1)
    numbers = linear.last_axes(t.ndim, 1)
    wide = dtype if policy.plain else jnp.float32
    how = {"policy": policy, "keep": "input"}
    y = linear.fp8_dot_general(t, right, numbers, None, wide, **how)
    return linear.finish(y, bias, residual, dtype)


def _enter(x, lefts, policy: Policy) -> list[Array]:
    """x times each, in x's dtype, keeping the codes of x."""
    if policy.plain:
        return [linear.linear(x, left, policy=policy) for left in lefts]
    ts = linear.project(x, lefts, linear.last_axes(x.ndim, 1), policy)
    return [linear.finish(t, None, None, x.dtype) for t in ts]


def lowrank_attend(
    query: Float[Array, "... features"],
    tables: Tables,
    *,
    num_embeddings: int,
    policy: Policy = BF16,
) -> Float[Array, "... num_embeddings"]:
    """query E^T for the table E that two small ones stand for, its first rows.

    With a `plain` policy in the order that costs least; whether E is ever made depends
    on how many queries there are. Otherwise E is made in the tables' dtype, rounded to
    FP8, and the codes of query are all that is kept.

    Args:
      query: (..., p q), bfloat16, float16 or float32.
      tables: left (a, p, R) and right (R, b, q), as `coat_jax.lookup.tables` has them.
      num_embeddings: how many of the a b rows there are.
      policy: formats, scaling and accumulation of the product.

    Returns:
      (..., num_embeddings) in query's dtype.

    Raises:
      ValueError: if query's last axis isn't p q.

    Example:
      >>> from jax import numpy as jnp
      >>> tables = Tables(jnp.ones((3, 2, 4)), jnp.ones((4, 5, 8)))
      >>> lowrank_attend(jnp.ones((7, 16)), tables, num_embeddings=14).shape
      (7, 14)
    """
    (_, p, _), (_, _, q) = tables.left.shape, tables.right.shape
    if query.shape[-1:] != (p * q,):
        raise ValueError(
            f"lowrank_attend: query's last axis must be the table's {p * q} features, "
            f"got shape {query.shape}"
        )
    if not policy.plain:
        table = jnp.einsum("apr,rbq->pqab", *tables, precision=lax.Precision.HIGHEST)
        kernel = table.reshape(p * q, -1)[:, :num_embeddings]
        return linear.linear(query, kernel, policy=policy)
    left, right = (table.astype(query.dtype) for table in tables)
    halved = query.reshape(*query.shape[:-1], p, q)
    word = "...pq,apr,rbq->...ab"
    y = jnp.einsum(word, halved, left, right, optimize="optimal")
    return y.reshape(*query.shape[:-1], -1)[..., :num_embeddings]


def dense_std(
    who: str,
    init: Callable[..., Any],
    shape: tuple[int, int],
    std: float | None = None,
    *,
    known: float | None = None,
) -> float:
    """`std`, or the standard deviation of what `init` draws for a matrix of `shape`.

    `known` is that of an initializer whose formula the caller knows; of another, one
    matrix is drawn and forgotten.

    Raises:
      ValueError: if it isn't above zero: factors of zeros have gradients of zero.
    """
    if std is None:
        std = _drawn_std(init, shape) if known is None else known
    if not std > 0:
        raise ValueError(
            f"{who}: the standard deviation must be above zero, got {std}, as factors "
            "of zeros have gradients of zero; give std, or another initializer"
        )
    return std


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw_train(key, shape: TTShape | TTMShape, std: float, dtype: Any) -> TensorTrain:
    """`init_train`, compiled once for all layers of a shape."""
    return init_train(key, shape, std=std, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _drawn_std(init, shape: tuple[int, int]) -> float:
    with jax.ensure_compile_time_eval():
        drawn = init(jax.random.key(0), shape, jnp.float32)
        (drawn,) = jax.tree.leaves(drawn)  # an initializer may box it, as for sharding
        return float(jnp.sqrt(jnp.mean(jnp.square(drawn))))
