"""Faults that tensor-train libraries and their users met, each named by its row."""

import dataclasses
import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import opt_einsum
import pytest

from coat_jax.contraction import cost, tt_matmul
from coat_jax.tensor_train import (
    TensorTrain,
    TTMShape,
    feasible_ranks,
    from_dense,
    gated,
    init_train,
    to_dense,
    tt_shape,
    ttm_shape,
)
from tests.helpers import assert_sqnr

pytestmark = pytest.mark.once

dense_of = jax.jit(to_dense, static_argnames="inputs")


def core_shapes(train):
    return [core.shape for core in train.cores]


@pytest.mark.parametrize("rank", [10, 1000, [1000, 7, 1000]])
@pytest.mark.parametrize(
    "shape_of",
    [
        lambda rank: ttm_shape(
            4536, 100, rank=rank, row_dims=(2, 2, 2, 567), col_dims=(2, 2, 5, 5)
        ),
        lambda rank: tt_shape(36, 20, rank=rank, order=2),
    ],
    ids=["table", "matrix"],
)
def test_B45_ranks_above_the_largest_are_clipped_by_one_rule(shape_of, rank):
    """Fresh and decomposed trains have the same shapes, and no rank that cannot be."""
    shape = shape_of(rank)
    inputs = None if isinstance(shape, TTMShape) else len(shape.in_dims)
    lone = [math.prod(shape.modes[:k]) for k in range(len(shape.modes) + 1)]
    bound = [min(n, lone[-1] // n) for n in lone]
    assert all(r <= b for r, b in zip(shape.ranks, bound, strict=True))
    fresh = init_train(jax.random.key(0), shape, std=1.0)
    dense = jnp.asarray(
        np.random.default_rng(0).standard_normal(
            (4536, 100) if inputs is None else (36, 20), np.float32
        )
    )
    fitted = jax.jit(from_dense, static_argnames="shape")(dense, shape=shape)
    assert core_shapes(fitted) == core_shapes(fresh) == list(shape.core_shapes)
    if rank != 1000:
        return
    wanted = (1, *[1000] * (len(shape.modes) - 1), 1)
    unclipped = dataclasses.replace(shape, ranks=wanted)
    full = jax.jit(from_dense, static_argnames="shape")(dense, shape=unclipped)
    ranks = feasible_ranks(shape.modes, 1000)
    assert [c.shape[0] for c in full.cores] == list(ranks[:-1])
    assert_sqnr(dense_of(full, inputs=inputs), dense, db=100)  # 1e-5 of its norm


SIDES = {2: (16, 16), 3: (8, 8, 8), 4: (4, 4, 4, 4), 6: (2, 2, 2, 2, 2, 2)}


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [
        pytest.param(2, jnp.float32, id="2-f32"),
        pytest.param(8, jnp.float32, id="8-f32", marks=SOAK),
        pytest.param(64, jnp.float32, id="64-f32"),
        pytest.param(2, jnp.bfloat16, id="2-bf16", marks=SOAK),
        pytest.param(8, jnp.bfloat16, id="8-bf16"),
        pytest.param(64, jnp.bfloat16, id="64-bf16", marks=SOAK),
    ],
)
@pytest.mark.parametrize("dims", SIDES)
def test_B46_fresh_trains_have_the_deviation_asked_for(dims, rank, dtype):
    """Glorot's, for matrices of 2 dims a side to 6, and for tables of as many cores."""
    sides = SIDES[dims]
    n = math.prod(sides)
    matrix = tt_shape(n, n, rank=rank, in_dims=sides, out_dims=sides)
    table = ttm_shape(n, n, rank=rank, row_dims=sides, col_dims=sides)
    keys = jax.random.split(jax.random.key(dims * rank), 10)
    target = math.sqrt(2 / (n + n))

    @jax.jit
    def deviations(keys):
        def one(key):
            trains = [
                init_train(key, s, std=target, dtype=dtype) for s in (matrix, table)
            ]
            matrices = to_dense(trains[0], inputs=dims), to_dense(trains[1])
            return jnp.stack([jnp.std(m.astype(jnp.float32)) for m in matrices])

        return jax.lax.map(one, keys)

    ratios = np.asarray(deviations(keys)).mean(axis=0) / target
    assert np.all((ratios >= 0.9) & (ratios <= 1.1)), ratios


def naive(x, train):
    """Left to right: x meets one core after the other."""
    out = x.reshape(len(x), 1, -1)
    for k, core in enumerate(gated(train)):
        if k < len(train.cores) // 2:
            out = out.reshape(len(x), core.shape[0], core.shape[1], -1)
            out = jnp.einsum("traz,ras->tsz", out, core)
        else:
            out = jnp.einsum(
                "trz,ras->tzas", out.reshape(len(x), core.shape[0], -1), core
            )
            out = out.reshape(len(x), -1, core.shape[-1]).transpose(0, 2, 1)
    return out.reshape(len(x), -1)


def flops(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("tokens", [1, 32, 4096])
@pytest.mark.parametrize(
    "shape",
    [tt_shape(768, 768, rank=30), tt_shape(256, 256, rank=64, order=2)],
    ids=["rank 30", "rank 64"],
)
def test_B47_never_slower_than_dense_or_left_to_right(shape, tokens):
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    train = TensorTrain(
        tuple(struct(*s) for s in shape.core_shapes),
        tuple(struct(r) for r in shape.ranks[1:-1]),
    )
    x, inputs = struct(tokens, shape.in_features), len(shape.in_dims)
    product = functools.partial(tt_matmul, inputs=inputs)
    got = flops(product, x, train)
    one_by_one = flops(naive, x, train)
    dense = flops(jnp.matmul, x, struct(shape.in_features, shape.out_features))
    # Gates and their products, which the dense matrix has not.
    assert got <= min(dense + 4 * shape.size, one_by_one)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_B47_the_order_is_opt_einsums(tokens):
    shape = tt_shape(768, 3072, rank=30)
    names = "Zabc,aA,AbB,BcC,CdD,DeE,Ef->Zdef"
    cores = [list(core) for core in shape.core_shapes]
    cores[0], cores[-1] = cores[0][1:], cores[-1][:-1]
    views = [np.broadcast_to(0.0, s) for s in [(tokens, *shape.in_dims), *cores]]
    _, info = opt_einsum.contract_path(names, *views, optimize="optimal")
    steps = [
        set(step[2].replace("->", ",").replace(",", ""))
        for step in info.contraction_list
    ]
    merged = [step for step in steps if "Z" not in step]
    if tokens == 1:
        assert not merged
        assert cost(shape, tokens).choose == "sequential"
    else:
        # Four steps without tokens, then x meets the two halves.
        assert len(merged) == 4
        assert [s for s in steps if "Z" in s] == [set("ZabcC"), set("ZCdef")]
        assert cost(shape, tokens).choose == "halves"
