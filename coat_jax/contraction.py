"""x @ W for a tensor train W: what each order of contraction costs, and the cheapest.

Letters: T tokens, N inputs, M outputs, R the rank between input and output cores.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.tensor_train import (
    TAU,
    TensorTrain,
    TTShape,
    check_inputs,
    gated,
    merge,
    merging,
    to_dense,
    wide,
)
from coat_jax.typing import Array, Float

PATHS = ("halves", "sequential", "dense", "einsum")
# Two plain products run faster than a chain of small ones of about their cost.
WORTH = 0.9


class Cost(NamedTuple):
    """Multiply-adds of one product by each path, and the name of the cheapest.

    halves: cores merged to (N, R) and (R, M), then two products. sequential: x meets
    core after core. dense: the matrix is formed. einsum: opt_einsum's optimum over all
    orders, which may be none of these. choose: the cheapest of the three, or "einsum"
    where that saves more than a tenth of it.
    """

    halves: int
    sequential: int
    dense: int
    einsum: int
    choose: str


def halves(
    train: TensorTrain, inputs: int, *, tau: float = TAU, dtype: Any = None
) -> tuple[Float[Array, "features rank"], Float[Array, "rank features_out"]]:
    """A train as the two factors of a low-rank matrix: W = left @ right.

    left merges the first `inputs` cores from the left, right the others from the right
    end, where the ranks are small: of the FFN of CoMERA this takes 3.6e6 multiply-adds
    against 4.9e6 when both go from the left. No tokens are involved: do it once a step,
    outside the loop over micro-batches.

    Args:
      train: a TT.
      inputs: how many cores are the input's.
      tau: the gate's threshold; the diagonal between the halves is on the left one.
      dtype: of the result, merged in float32 before; None is the cores'.

    Returns:
      left (N, R) and right (R, M).

    Raises:
      ValueError: if the train is no TT, or `inputs` leaves a side without a core.

    Example:
      >>> import jax
      >>> from coat_jax.tensor_train import init_train, tt_shape
      >>> train = init_train(jax.random.key(0), tt_shape(768, 3072, rank=30), std=0.02)
      >>> [half.shape for half in halves(train, 3)]
      [(768, 30), (30, 3072)]
    """
    check_inputs("halves", train, inputs)
    cores = gated(train, tau=tau)
    rank = cores[inputs].shape[0]
    left = merge(cores[:inputs]).reshape(-1, rank)
    right = merge(cores[inputs:], leftward=True).reshape(rank, -1)
    dtype = train.cores[0].dtype if dtype is None else dtype
    return left.astype(dtype), right.astype(dtype)


def cost(shape: TTShape, tokens: int) -> Cost:
    """Multiply-adds of x @ W by each path for x of (tokens, N), from shapes alone.

        halves      T R (N + M) + merging
        sequential  T sum_k (what x has become) r_{k-1} r_k
        dense       T N M + merging + N R M

    The forward is counted; each backward does about twice its forward's work.

    Example:
      >>> from coat_jax.tensor_train import tt_shape
      >>> ffn = tt_shape(768, 3072, rank=30)
      >>> [cost(ffn, tokens).choose for tokens in (1, 16384)]
      ['sequential', 'halves']
      >>> f"{2 * cost(ffn, 16384).halves:.2e}"
      '3.78e+09'
    """
    return _cost(shape, int(tokens))


def tt_matmul(
    x: Float[Array, "*tokens features"],
    train: TensorTrain,
    inputs: int,
    *,
    path: str | None = None,
    tau: float = TAU,
) -> Float[Array, "*tokens features_out"]:
    """x @ W for a train W, by the cheapest order of contraction for x's token count.

    Core meets core in float32; what holds tokens is in x's dtype, summed in float32. In
    exact arithmetic the path changes nothing.

    Args:
      x: (..., N); a vmapped axis is not seen and does not count as tokens.
      train: a TT of N inputs.
      inputs: how many cores are the input's.
      path: "halves", "sequential", "dense", "einsum", or None for what `cost` chooses
        when this is traced: halves from some hundred tokens on, sequential for one.
      tau: the gate's threshold.

    Returns:
      (..., M) in x's dtype.

    Raises:
      TypeError: if x is not a real floating-point array.
      ValueError: if x's last axis is not N, path is unknown, or the train is no TT.

    Example:
      >>> import jax
      >>> from jax import numpy as jnp
      >>> from coat_jax.tensor_train import init_train, tt_shape
      >>> train = init_train(jax.random.key(0), tt_shape(64, 96, rank=4), std=0.1)
      >>> tt_matmul(jnp.ones((2, 5, 64)), train, 3).shape
      (2, 5, 96)
    """
    check_inputs("tt_matmul", train, inputs)
    shape = shape_of(train, inputs)
    _check(x, shape, path)
    flat = x.reshape(-1, shape.in_features)
    path = cost(shape, len(flat)).choose if path is None else path
    if path == "halves":
        left, right = halves(train, inputs, tau=tau, dtype=x.dtype)
        y = _dot(_dot(flat, left), right)
    elif path == "dense":
        y = _dot(flat, to_dense(train, inputs=inputs, tau=tau, dtype=x.dtype))
    else:
        optimal = path == "einsum"
        steps = _optimal(shape, len(flat)) if optimal else _sequential(shape)
        y = _contract(flat, gated(train, tau=tau), shape, steps)
    return y.reshape(*x.shape[:-1], shape.out_features)


def shape_of(train: TensorTrain, inputs: int) -> TTShape:
    """The TTShape whose cores these are, ranks as they are."""
    modes = tuple(core.shape[1] for core in train.cores)
    ranks = (1, *(core.shape[-1] for core in train.cores))
    return TTShape(modes[:inputs], modes[inputs:], ranks)


def _check(x, shape: TTShape, path: str | None) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"tt_matmul: x must be a real floating-point array, got dtype {x.dtype}; "
            "cast it"
        )
    if x.shape[-1:] != (shape.in_features,):
        raise ValueError(
            f"tt_matmul: x's last axis must be the product {shape.in_features} of the "
            f"input dims {shape.in_dims}, got x of shape {x.shape}"
        )
    if path is not None and path not in PATHS:
        raise ValueError(
            f"tt_matmul: path must be one of {PATHS} or None, got {path!r}"
        )


def _dot(x, w):
    """x @ w summed in float32, in x's dtype."""
    return jnp.matmul(x, w, preferred_element_type=wide(x.dtype)).astype(x.dtype)


# Orders of contraction as opt_einsum writes them: at each step two operands leave the
# list and their product joins its end. Operand 0 is x, operand k core k. An operand is
# the tuple of its indices: ("t", 0) tokens, ("n", k) mode k, ("r", k) bond k.


def _terms(shape: TTShape) -> list[tuple[Any, ...]]:
    """Indices of x and of every core. Bonds 0 and L have size 1 and are left out."""
    order, ins = len(shape.modes), len(shape.in_dims)
    terms: list[tuple[Any, ...]] = [(("t", 0), *(("n", k) for k in range(ins)))]
    for k in range(order):
        left = (("r", k),) if k else ()
        right = (("r", k + 1),) if k + 1 < order else ()
        terms.append((*left, ("n", k), *right))
    return terms


def _output(shape: TTShape) -> tuple:
    ins = len(shape.in_dims)
    return (("t", 0), *(("n", k) for k in range(ins, len(shape.modes))))


def _joined(a: tuple, b: tuple, others: Sequence[tuple]) -> tuple:
    """The indices that the product of two operands keeps: those that others need."""
    needed = {index for term in others for index in term}
    return tuple(i for i in dict.fromkeys((*a, *b)) if i in needed)


def _sequential(shape: TTShape) -> tuple[tuple[int, int], ...]:
    """x, then each product so far, meets the next core."""
    left = len(shape.modes)  # what is not contracted yet; the product stands last
    return ((0, 1), *((0, k - 1) for k in range(left, 1, -1)))


@functools.lru_cache
def _optimal(shape: TTShape, tokens: int) -> tuple[tuple[int, int], ...]:
    """opt_einsum's order of least multiply-adds, found by dynamic programming."""
    sizes = _sizes(shape, max(tokens, 1))
    terms = [*_terms(shape), _output(shape)]
    number = {index: k for k, index in enumerate(sizes)}
    arguments = []
    for term in terms[:-1]:
        of_term = tuple(sizes[index] for index in term)
        arguments += [jax.ShapeDtypeStruct(of_term, jnp.float32)]
        arguments += [[number[index] for index in term]]
    arguments += [[number[index] for index in terms[-1]]]
    path, _ = jnp.einsum_path(*arguments, optimize="dp")
    return tuple((min(step), max(step)) for step in path)


def _sizes(shape: TTShape, tokens: int) -> dict:
    """The size of every index."""
    bonds = {("r", k): r for k, r in enumerate(shape.ranks)}
    modes = {("n", k): n for k, n in enumerate(shape.modes)}
    return {("t", 0): tokens, **modes, **bonds}


def _count(shape: TTShape, tokens: int, steps) -> int:
    """Multiply-adds of an order: of each step the product of all sizes it touches."""
    sizes, terms, total = _sizes(shape, tokens), _terms(shape), 0
    for i, j in steps:
        b, a = terms.pop(j), terms.pop(i)
        total += math.prod(sizes[index] for index in {*a, *b})
        terms.append(_joined(a, b, [*terms, _output(shape)]))
    return total


@functools.lru_cache
def _cost(shape: TTShape, tokens: int) -> Cost:
    rank = shape.ranks[len(shape.in_dims)]
    merged = merging(shape, len(shape.in_dims))
    counts = {
        "halves": tokens * rank * (shape.in_features + shape.out_features) + merged,
        "sequential": _count(shape, tokens, _sequential(shape)),
        "dense": (tokens + rank) * shape.dense_size + merged,
        "einsum": _count(shape, tokens, _optimal(shape, tokens)),
    }
    named = min(PATHS[:3], key=counts.__getitem__)
    choose = "einsum" if counts["einsum"] < WORTH * counts[named] else named
    return Cost(**counts, choose=choose)


def _contract(x, cores, shape: TTShape, steps):
    """Runs an order: core with core in float32, tokens in x's dtype."""
    terms, output = _terms(shape), _output(shape)
    operands = [x.reshape(-1, *shape.in_dims)]
    operands += [c.reshape(_squeezed(c, k, len(cores))) for k, c in enumerate(cores)]
    for i, j in steps:
        (b, b_term), (a, a_term) = ((operands.pop(k), terms.pop(k)) for k in (j, i))
        kept = _joined(a_term, b_term, [*terms, output]) if terms else output
        operands.append(_pair(a, a_term, b, b_term, kept, x.dtype))
        terms.append(kept)
    return operands[0]


def _squeezed(core, k: int, order: int) -> tuple[int, ...]:
    """A core's shape without the two bonds of size 1 at the train's ends."""
    shape = core.shape
    return shape[1 if k == 0 else 0 : -1 if k == order - 1 else None]


def _pair(a, a_term, b, b_term, kept, dtype):
    """Two operands contracted; with tokens among them in `dtype`, else in float32."""
    name = {i: k for k, i in enumerate(dict.fromkeys((*a_term, *b_term)))}
    numbers = lambda term: [name[i] for i in term]
    tokens = ("t", 0) in name
    if tokens:
        a, b = a.astype(dtype), b.astype(dtype)
    out = jnp.einsum(
        a,
        numbers(a_term),
        b,
        numbers(b_term),
        numbers(kept),
        preferred_element_type=wide(a.dtype),
        precision=None if tokens else lax.Precision.HIGHEST,
    )
    return out.astype(dtype) if tokens else out
