"""Tensor trains: shapes, starting values, decomposition and rounding, by NumPy."""

import dataclasses
import functools
import itertools
import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import factorize
from coat_jax.tensor_train import (
    TAU,
    TensorTrain,
    TTShape,
    feasible_ranks,
    from_dense,
    gate,
    gated,
    init_train,
    round_train,
    size,
    to_dense,
    tt_shape,
    ttm_shape,
)
from tests import tensor_train_oracle as oracle
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

# Compiled whole: one compilation a shape, not one an operation.
dense_of = jax.jit(to_dense, static_argnames=("inputs", "tau"))
fitted = jax.jit(from_dense, static_argnames="shape")
rounded_of = jax.jit(round_train, static_argnames="ranks")
started = jax.jit(init_train, static_argnames=("shape", "std", "dtype"))

ATTENTION = tt_shape(768, 768, rank=30)
UP, DOWN = tt_shape(768, 3072, rank=30), tt_shape(3072, 768, rank=30)
WORDS = ttm_shape(30522, 768, rank=32, row_dims=(16, 20, 10, 10), col_dims=(4, 4, 8, 6))
# name: shape, cores of the input. Odd factors, unequal sides, boundary ranks 1.
SHAPES = {
    "order 4": (tt_shape(6, 20, rank=4, order=2), 2),
    "order 6": (tt_shape(30, 18, rank=3), 3),
    "order 8": (tt_shape(24, 36, rank=3, order=4), 4),
    "odd": (tt_shape(105, 45, rank=5, in_dims=(7, 5, 3), out_dims=(3, 15)), 3),
    "ranks of 1": (TTShape((3, 4), (2, 5), (1, 1, 3, 1, 1)), 2),
    "table 2": (ttm_shape(11, 6, rank=3, order=2), None),
    "table 4": (ttm_shape(100, 24, rank=3), None),
    "table 5": (ttm_shape(40, 32, rank=2, order=5), None),
}


@functools.cache
def drawn(name, seed=0, dtype=jnp.float32):
    """A train whose diagonals hold dead, negative and living entries, one at least."""
    shape, _ = SHAPES[name]
    rng = np.random.default_rng(seed)
    draw = lambda s: rng.standard_normal(s, np.float32)
    cores = tuple(jnp.asarray(draw(s), dtype) for s in shape.core_shapes)
    diagonals = [1 + draw(r) for r in shape.ranks[1:-1]]
    for v in diagonals:
        v[0], v[1:2] = abs(v[0]) + 0.5, -0.1  # no bond is empty, all have a dead rank
    return TensorTrain(cores, tuple(map(jnp.asarray, diagonals)))


def living(name):
    """A train with every rank alive."""
    train = drawn(name, seed=3)
    return TensorTrain(train.cores, tuple(0.5 + jnp.abs(v) for v in train.diagonals))


def assert_dense(got, train, inputs):
    """Against float64, within the roundings of a chain: each term meets L products."""
    terms = oracle.dense(oracle.magnitude(train), inputs)
    assert_reordered(got, oracle.dense(train, inputs), 2 * len(train.cores), terms)


# What the paper's model holds.


def test_parameters_of_the_papers_layers():
    assert [s.size for s in (ATTENTION, UP, DOWN, WORDS)] == [
        20_448,
        28_960,
        28_960,
        167_808,
    ]
    layers = 6 * [*4 * [ATTENTION], UP, DOWN] + [WORDS, ATTENTION]
    assert sum(s.size for s in layers) == 1_026_528
    padding = (WORDS.rows - 30522) * 768
    assert sum(s.dense_size for s in layers) - padding == 66_498_048
    assert round(66_498_048 / 1_026_528, 1) == 64.8


@pytest.mark.parametrize("shape", [ATTENTION, UP, DOWN, WORDS], ids=lambda s: s.size)
def test_trains_hold_what_their_shape_counts(shape):
    train = jax.eval_shape(lambda k: init_train(k, shape, std=1.0), jax.random.key(0))
    assert size(train) == shape.size == sum(c.size for c in train.cores)
    assert [v.shape for v in train.diagonals] == [(r,) for r in shape.ranks[1:-1]]


# Shapes.


def test_found_dims_are_the_papers():
    assert ATTENTION == TTShape((12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
    assert UP == TTShape((12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
    assert DOWN == TTShape(UP.out_dims[::-1], UP.in_dims[::-1], UP.ranks[::-1])
    assert WORDS.ranks == (1, 32, 32, 32, 1)
    found = ttm_shape(30522, 768, rank=32)
    assert math.prod(found.col_dims) == 768
    assert 30522 <= found.rows <= 1.005 * 30522
    assert len(found.row_dims) == len(found.col_dims) == 4


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_dims_have_the_least_sum(parts):
    """By trying every split: exact ones, and for tables the covering ones."""
    for n in range(1, 80):
        tried = list(itertools.product(range(1, n + 1), repeat=parts - 1))
        exact = [(*t, n // math.prod(t)) for t in tried if n % math.prod(t) == 0]
        dims = factorize._balanced(n, parts)
        assert math.prod(dims) == n
        assert sum(dims) == min(map(sum, exact))
        covering = [(*t, -(-n // math.prod(t))) for t in tried]
        rows = factorize._covering(n, parts)
        least = min((sum(t), math.prod(t)) for t in covering)
        assert (sum(rows), math.prod(rows)) == least


@pytest.mark.parametrize("vocabulary", [1, 2, 50257, 1_000_003, 2**30 + 1])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_rows_cover_any_vocabulary_with_little_padding(vocabulary, order):
    shape = ttm_shape(vocabulary, 768, rank=8, order=order)
    assert len(shape.row_dims) == order
    assert shape.features == 768
    # One less in any dim would no longer cover it: padding is below one part in a dim.
    assert vocabulary <= shape.rows
    assert shape.rows * (1 - 1 / max(shape.row_dims)) < vocabulary


@pytest.mark.parametrize("n", [1, 2, 7, 127, 7919, 2 * 5087, 1001])
def test_primes_and_odd_sizes_have_a_shape(n):
    shape = tt_shape(n, 12, rank=4)
    assert shape.in_features == n
    assert shape.in_dims == tuple(sorted(shape.in_dims, reverse=True))
    assert 1 not in shape.in_dims or n == 1
    train = jax.eval_shape(lambda k: init_train(k, shape, std=1.0), jax.random.key(0))
    dense = jax.eval_shape(lambda t: to_dense(t, inputs=len(shape.in_dims)), train)
    assert dense.shape == (n, 12)
    assert ttm_shape(n, 7, rank=4).features == 7


def test_given_dims_stay_and_found_ones_fit_them():
    shape = tt_shape(768, 10, rank=4, in_dims=(32, 24))
    assert (shape.in_dims, shape.out_dims) == ((32, 24), (5, 2)[::-1])
    shape = ttm_shape(1000, 64, rank=4, row_dims=(5, 10, 20))
    assert (shape.row_dims, shape.col_dims) == ((5, 10, 20), (4, 4, 4))
    shape = ttm_shape(1000, 60, rank=4, col_dims=(3, 5, 4))
    assert shape.rows == 1000
    assert shape.col_dims == (3, 5, 4)
    modes = ttm_shape(30522, 768, rank=32).modes
    assert min(modes[0], modes[-1]) >= max(modes[1:-1])


@pytest.mark.parametrize("modes", [(2, 3, 4, 5), (4, 4, 4), (2, 1, 7), (6,), (3, 3)])
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 50])
def test_feasible_ranks_are_those_of_a_random_train(modes, rank):
    """The rank of every unfolding of a train whose cores have the rank asked for."""
    rng = np.random.default_rng(0)
    for wanted in (
        rank,
        [rank, 2, 9][: len(modes) - 1],
        [2, rank, 1][: len(modes) - 1],
    ):
        inner = [wanted] * (len(modes) - 1) if isinstance(wanted, int) else wanted
        full, ends = np.ones((1, 1)), [1, *inner, 1]
        for r0, n, r1 in zip(ends, modes, ends[1:], strict=False):
            full = np.tensordot(full, rng.standard_normal((r0, n, r1)), 1)
        unfolded = [
            np.linalg.matrix_rank(full.reshape(math.prod(modes[:k]), -1))
            for k in range(1, len(modes))
        ]
        assert feasible_ranks(modes, wanted) == (1, *unfolded, 1)
        assert feasible_ranks(modes, [1, *inner, 1]) == (1, *unfolded, 1)


# The gate.


def test_the_gate_is_pure_and_its_gradient_is_a_step():
    v = jnp.array([1.0, 0.011, TAU, 0.0, -3.0], jnp.float32)
    assert_same_bits(gate(v), jnp.array([1.0, 0.011, 0, 0, 0], jnp.float32))
    slope = jax.grad(lambda v: gate(v).sum())(v)
    assert_same_bits(slope, jnp.array([1.0, 1, 0, 0, 0], jnp.float32))
    assert float(gate(v, tau=2.0).sum()) == 0
    assert np.isnan(gate(jnp.array([jnp.nan]))).all()


@pytest.mark.parametrize("name", ["order 6", "odd", "table 4"])
def test_gates_compute_what_leaving_out_dead_ranks_does(name):
    """Dead slices cut away, the living diagonals multiplied in: the same matrix."""
    train, (_, inputs) = drawn(name), SHAPES[name]
    cores = [np.asarray(core) for core in train.cores]
    for k, v in enumerate(train.diagonals):
        alive = np.asarray(v) > TAU
        cores[k] = cores[k][..., alive] * np.asarray(v)[alive]
        cores[k + 1] = cores[k + 1][alive]
    assert sum(core.size for core in cores) < size(train)
    cut = TensorTrain(tuple(map(jnp.asarray, cores)), tuple(map(ones_of, cores[:-1])))
    assert_dense(dense_of(cut, inputs=inputs), train, inputs)


def ones_of(core):
    return jnp.ones(core.shape[-1:], jnp.float32)


@pytest.mark.parametrize("dead", [0.0, -1.0, TAU])
def test_an_empty_bond_is_a_zero_matrix_with_finite_gradients(dead):
    train = drawn("order 6")
    diagonals = list(train.diagonals)
    diagonals[2] = jnp.full_like(diagonals[2], dead)
    train = TensorTrain(train.cores, tuple(diagonals))
    assert not np.any(dense_of(train, inputs=3))
    slopes = jax.grad(lambda t: to_dense(t, inputs=3).sum())(train)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert not np.any(slopes.diagonals[2])


# Dense values.


@pytest.mark.parametrize("name", SHAPES)
def test_dense_against_float64(name):
    train, (shape, inputs) = drawn(name), SHAPES[name]
    got = dense_of(train, inputs=inputs)
    sides = (
        (shape.rows, shape.features)
        if inputs is None
        else (shape.in_features, shape.out_features)
    )
    assert got.shape == sides
    assert_dense(got, train, inputs)


@pytest.mark.parametrize("name", ["order 6", "table 4"])
def test_one_entry_is_a_product_of_slices(name):
    """Row-major digits of the row index and of the column index choose the slices."""
    train, (shape, inputs) = oracle.double(drawn(name)), SHAPES[name]
    dense, row, col = dense_of(drawn(name), inputs=inputs), 17, 11
    if inputs is None:
        i, j = (
            np.unravel_index(row, shape.row_dims),
            np.unravel_index(col, shape.col_dims),
        )
        slices = [c[:, a, b] for c, a, b in zip(train.cores, i, j, strict=True)]
    else:
        digits = np.unravel_index(row, shape.in_dims) + np.unravel_index(
            col, shape.out_dims
        )
        slices = [c[:, a] for c, a in zip(train.cores, digits, strict=True)]
    product = slices[0]
    for v, s in zip(oracle.gates(train), slices[1:], strict=True):
        product = product * v @ s
    scale = np.abs(np.asarray(dense)).max()
    assert_reordered(dense[row, col], product[0, 0], 8, scale)


# Starting values.


@pytest.mark.parametrize("name", SHAPES)
def test_every_draw_has_the_norm_of_its_deviation(name):
    """Exactly. And the relaxed size sum_k |v_{k-1}| n_k |v_k| counts parameters."""
    shape, inputs = SHAPES[name]
    train = started(jax.random.key(1), shape=shape, std=0.02)
    rms = np.sqrt(np.mean(oracle.dense(train, inputs) ** 2))
    assert rms == pytest.approx(0.02, rel=1e-5)
    assert {v.dtype for v in train.diagonals} == {jnp.dtype(jnp.float32)}
    sums = [1.0, *(np.abs(v).sum() for v in train.diagonals), 1.0]
    modes = [math.prod(core.shape[1:-1]) for core in train.cores]
    relaxed = sum(a * n * b for a, n, b in zip(sums, modes, sums[1:], strict=False))
    assert relaxed == size(train) == shape.size


def test_bf16_cores_are_float32_draws_rounded():
    shape, inputs = SHAPES["order 8"]
    wide = started(jax.random.key(1), shape=shape, std=0.02)
    train = started(jax.random.key(1), shape=shape, std=0.02, dtype=jnp.bfloat16)
    assert_same_bits(train.cores, tuple(c.astype(jnp.bfloat16) for c in wide.cores))
    assert {v.dtype for v in train.diagonals} == {jnp.dtype(jnp.float32)}


def test_no_entry_is_favoured():
    """Over many draws each entry has the deviation asked for, and mean 0."""
    shape, count = tt_shape(6, 6, rank=2, order=2), 4000
    keys = jax.random.split(jax.random.key(0), count)
    draw = lambda key: to_dense(init_train(key, shape, std=3.0), inputs=2)
    entries = np.asarray(jax.jit(jax.vmap(draw))(keys)).astype(np.float64)
    deviation = np.sqrt((entries**2).mean(axis=0)) / 3.0
    # The mean square of one entry over the draws varies by about 4 / sqrt(count).
    np.testing.assert_allclose(deviation, 1.0, atol=8 / np.sqrt(count))
    np.testing.assert_allclose(entries.mean(axis=0) / 3.0, 0, atol=5 / np.sqrt(count))


def test_cores_start_equal_in_scale_and_legacy_keys_serve():
    train = started(jax.random.PRNGKey(0), shape=UP, std=math.sqrt(1 / 3840))
    scales = [float(jnp.std(core)) for core in train.cores]
    want = (1 / 3840 / math.prod(UP.ranks)) ** (1 / 12)
    np.testing.assert_allclose(scales, want, rtol=0.2)


# Decomposition and rounding.


@pytest.mark.parametrize("name", ["order 6", "odd", "table 2", "table 5"])
def test_full_ranks_give_the_matrix_back(name):
    shape, inputs = SHAPES[name]
    full = dataclasses.replace(shape, ranks=feasible_ranks(shape.modes, 10**6))
    rows = shape.rows - 1 if inputs is None else shape.in_features
    cols = shape.features if inputs is None else shape.out_features
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((rows, cols), "f4"))
    back = dense_of(fitted(matrix, shape=full), inputs=inputs)
    np.testing.assert_allclose(back[:rows], matrix, atol=1e-5)
    np.testing.assert_allclose(back[rows:], 0, atol=1e-5)


def left_out(train, inputs, ranks):
    """The norm of all unfoldings' singular values beyond `ranks`, and the tensor's."""
    operands, terms, modes = oracle.chain(oracle.double(train))
    order = "".join(letter for of_core in modes for letter in of_core)
    full = np.einsum(",".join(terms) + "->" + order, *operands, optimize=True)
    sizes, total = [math.prod(core.shape[1:-1]) for core in train.cores], 0.0
    for k in range(1, len(sizes)):
        unfolded = full.reshape(math.prod(sizes[:k]), -1)
        values = np.linalg.svd(unfolded, compute_uv=False)
        total += np.sum(values[ranks[k] :] ** 2)
    return math.sqrt(total), math.sqrt(np.sum(full**2))


@pytest.mark.parametrize("name", ["order 6", "odd", "table 4"])
@pytest.mark.parametrize("source", ["matrix", "train"])
def test_smaller_ranks_lose_no_more_than_the_singular_values_left_out(name, source):
    shape, inputs = SHAPES[name]
    train = living(name)
    ranks = feasible_ranks(shape.modes, 2)
    if source == "matrix":
        cut = fitted(
            dense_of(train, inputs=inputs),
            shape=dataclasses.replace(shape, ranks=ranks),
        )
    else:
        cut = rounded_of(train, ranks=2)
    assert [core.shape[0] for core in cut.cores] == list(ranks[:-1])
    dense = oracle.dense(train, inputs)
    error = np.linalg.norm(oracle.dense(cut, inputs) - dense)
    bound, norm = left_out(train, inputs, ranks)
    assert bound / math.sqrt(len(shape.modes)) * 0.99 <= error <= bound * 1.0001
    assert 0.01 * norm < error < norm


@pytest.mark.parametrize("name", ["order 8", "ranks of 1", "table 4"])
def test_rounding_without_a_cut_changes_nothing_but_the_gauge(name):
    train, (_, inputs) = drawn(name), SHAPES[name]
    rounded = rounded_of(train)
    assert_sqnr(dense_of(rounded, inputs=inputs), oracle.dense(train, inputs), db=110)
    assert all(np.all(np.asarray(v) == 1) for v in rounded.diagonals)


def test_rounding_finds_the_ranks_of_a_train_that_was_inflated():
    """A train beside itself: every rank twice as large, the matrix twice as well."""
    train = rounded_of(living("order 6"))
    cores = [np.asarray(core) for core in train.cores]
    wide = [np.concatenate([cores[0], cores[0]], axis=-1)]
    for core in cores[1:-1]:
        zero = np.zeros_like(core)
        top, low = np.concatenate([core, zero], -1), np.concatenate([zero, core], -1)
        wide.append(np.concatenate([top, low], axis=0))
    wide.append(np.concatenate([cores[-1], cores[-1]], axis=0))
    both = TensorTrain(tuple(map(jnp.asarray, wide)), tuple(map(ones_of, wide[:-1])))
    assert size(both) > 2 * size(train)
    found = round_train(both, tolerance=1e-5)
    assert [c.shape for c in found.cores] == [c.shape for c in train.cores]
    assert_sqnr(dense_of(found, inputs=3), 2 * oracle.dense(train, 3), db=100)


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 0.5, 2.0])
def test_rounding_keeps_its_tolerance(tolerance):
    train = drawn("order 8")
    rounded = round_train(train, tolerance=tolerance)
    dense = oracle.dense(train, 4)
    error = np.linalg.norm(oracle.dense(rounded, 4) - dense) / np.linalg.norm(dense)
    assert error <= max(tolerance, 1e-6)
    assert min(core.shape[0] for core in rounded.cores) >= 1
    if tolerance == 2.0:
        assert size(rounded) == sum(core.shape[1] for core in train.cores)


def test_both_sides_of_a_bond_get_its_singular_values():
    """At a bond between two cores, left columns and right rows are alike in norm."""
    shape = tt_shape(12, 12, rank=6, order=1)
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((12, 12), "f4"))
    left, right = fitted(matrix, shape=shape).cores
    columns, rows = jnp.linalg.norm(left[0], axis=0), jnp.linalg.norm(right, axis=1)
    np.testing.assert_allclose(columns, rows[:, 0], rtol=1e-4)
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    np.testing.assert_allclose(columns**2, values[:6], rtol=1e-4)


def test_a_matrix_of_lower_rank_keeps_gradients_in_its_spare_ranks():
    outer = jnp.outer(jnp.arange(1.0, 13.0), jnp.arange(1.0, 13.0))
    for matrix in (outer, jnp.zeros((12, 12))):
        train = fitted(matrix, shape=tt_shape(12, 12, rank=6, order=2))
        np.testing.assert_allclose(dense_of(train, inputs=2), matrix, atol=1e-3)
        slopes = jax.grad(lambda t: to_dense(t, inputs=2)[::2].sum())(train)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
        assert all(
            np.any(np.asarray(c) != 0, axis=(0, 1)).all() for c in train.cores[:-1]
        )


def test_decomposition_and_rounding_are_traceable_and_keep_the_dtype():
    shape = ttm_shape(20, 12, rank=3, order=3)
    table = jnp.asarray(np.random.default_rng(0).standard_normal((20, 12), "f4"))
    table = table.astype(jnp.bfloat16)
    train = jax.jit(lambda t: from_dense(t, shape))(table)
    rounded = jax.jit(lambda t: round_train(t, ranks=[2, 1]))(train)
    for got in (train, rounded):
        assert {core.dtype for core in got.cores} == {jnp.dtype(jnp.bfloat16)}
    assert [core.shape[0] for core in rounded.cores] == [1, 2, 1]
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda t: round_train(t, tolerance=0.1))(train)


TT = drawn("order 4")
SHORT = TensorTrain(TT.cores, TT.diagonals[1:])
TORN = TensorTrain((TT.cores[0], *TT.cores[2:]), TT.diagonals[1:])
REFUSED = {
    "rank 0": (lambda: tt_shape(4, 4, rank=0), "at least 1"),
    "too few ranks": (lambda: feasible_ranks((2, 2, 2), [3]), "2 inner bonds, got 1"),
    "size 0": (lambda: tt_shape(0, 4, rank=1), "at least 1"),
    "order 0": (lambda: tt_shape(4, 4, rank=1, order=0), "at least 1"),
    "in dims": (lambda: tt_shape(8, 4, rank=1, in_dims=(3, 2)), "multiply to 8"),
    "col dims": (lambda: ttm_shape(8, 6, rank=1, col_dims=(3, 3)), "multiply to 6"),
    "row dims": (lambda: ttm_shape(8, 6, rank=1, row_dims=(3, 2)), "or more"),
    "unpaired": (
        lambda: ttm_shape(8, 6, rank=1, row_dims=(4, 2), col_dims=(3, 2, 1)),
        "as many of each",
    ),
    "one core": (lambda: ttm_shape(8, 6, rank=1, order=1), "at least 2 cores"),
    "open end": (lambda: TTShape((2,), (2,), (1, 2, 2)), "1 at both ends"),
    "std": (
        lambda: started(jax.random.key(0), SHAPES["odd"][0], std=0.0),
        "std must be positive",
    ),
    "no inputs": (lambda: dense_of(TT), "1 to 3, got None"),
    "all inputs": (lambda: dense_of(TT, inputs=4), "1 to 3, got 4"),
    "inputs of a table": (lambda: dense_of(drawn("table 2"), inputs=1), "leave it out"),
    "a diagonal missing": (lambda: gated(SHORT), "diagonal of the rank between"),
    "a core missing": (lambda: gated(TORN), "at which the one before ends"),
    "matrix": (
        lambda: fitted(jnp.ones((4, 5)), tt_shape(5, 4, rank=1)),
        "must be .5, 4.",
    ),
    "table": (
        lambda: fitted(jnp.ones((9, 4)), ttm_shape(8, 4, rank=1)),
        "at most 8 rows",
    ),
    "tolerance": (lambda: round_train(TT, tolerance=-0.1), "must be 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
