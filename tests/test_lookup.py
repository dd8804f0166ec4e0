"""Rows of tensor-train tables: against the dense table, its gradients and its cost."""

import functools

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import lookup as lookup_module
from coat_jax.lookup import cost, lookup, shape_of, tables
from coat_jax.tensor_train import TensorTrain, TTMShape, to_dense, ttm_shape
from tests import tensor_train_oracle as oracle
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

WORDS = TTMShape((16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1))
# name: shape, ids. Each has padding rows.
SHAPES = {
    "two cores": (ttm_shape(11, 6, rank=3, order=2), 11),
    "three": (ttm_shape(35, 12, rank=4, order=3), 35),
    "four": (TTMShape((4, 3, 5, 2), (2, 1, 3, 2), (1, 2, 5, 3, 1)), 113),
    "five": (ttm_shape(61, 32, rank=2, order=5), 61),
    "rank 1": (ttm_shape(35, 12, rank=1, order=3), 35),
}
looked_up = jax.jit(lookup, static_argnames=("num_embeddings", "max_unique", "tau"))


@functools.cache
def drawn(name, dtype=jnp.float32):
    shape, rng = SHAPES[name][0], np.random.default_rng(0)
    draw = lambda s: rng.standard_normal(s, np.float32)
    cores = tuple(jnp.asarray(draw(s), dtype) for s in shape.core_shapes)
    diagonals = [1 + draw(r) for r in shape.ranks[1:-1]]
    for v in diagonals:
        v[0] = abs(v[0]) + 0.5  # no bond is empty
    return TensorTrain(cores, tuple(map(jnp.asarray, diagonals)))


def roundings(train):
    return 2 * len(train.cores) + sum(core.shape[0] for core in train.cores)


def some_ids(count, seed=0, shape=(5, 9)):
    """Ids with many duplicates, the first and the last among them."""
    few = np.random.default_rng(seed).choice(count, 7, replace=False)
    ids = np.random.default_rng(seed).choice([0, count - 1, *few], shape)
    return jnp.asarray(ids.astype(np.int32))


@pytest.mark.parametrize("max_unique", [None, 9, 1000])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_gradients_are_the_dense_tables(name, max_unique):
    """Nine ids at most occur, most of them often: their gradients add up."""
    train, (shape, count) = drawn(name), SHAPES[name]
    ids = some_ids(count)
    dy = np.random.default_rng(1).standard_normal((*ids.shape, shape.features), "f4")

    @jax.jit
    def both(train):
        rows = functools.partial(
            lookup, ids=ids, num_embeddings=count, max_unique=max_unique
        )
        out, vjp = jax.vjp(rows, train)
        return out, vjp(jnp.asarray(dy))[0]

    out, d_train = both(train)
    table, size = oracle.dense(train), oracle.dense(oracle.magnitude(train))
    assert_reordered(out, table[ids], roundings(train), size[ids])
    scattered, spread = np.zeros_like(table), np.zeros_like(table)
    np.add.at(scattered, np.asarray(ids), dy.astype(np.float64))
    np.add.at(spread, np.asarray(ids), np.abs(dy).astype(np.float64))
    want = oracle.gradients(train, scattered)
    scale = oracle.gradients(oracle.magnitude(train), spread)
    for part in TensorTrain._fields:
        arrays = (getattr(tree, part) for tree in (d_train, want, scale))
        for g, w, s in zip(*arrays, strict=True):
            assert_reordered(g, w, roundings(train) + ids.size, s)


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_once(name):
    """All ids, from tables made once, and the same bits from the train."""
    train, (_, count) = drawn(name), SHAPES[name]
    ids = jnp.arange(count, dtype=jnp.int32)
    out = looked_up(jax.jit(tables)(train), ids, num_embeddings=count)
    size = oracle.dense(oracle.magnitude(train))[:count]
    assert_reordered(out, oracle.dense(train)[:count], roundings(train), size)
    assert_reordered(out, to_dense(train)[:count], roundings(train), size)


# Which ids have a row.


@pytest.mark.parametrize("max_unique", [None, 3, 8])
def test_ids_out_of_range_are_nan_and_negative_ones_count_from_the_end(max_unique):
    """As `nnx.Embed` and `jnp.take` have it, which never sees the padding rows."""
    train, (shape, count) = drawn("three"), SHAPES["three"]
    assert shape.rows > count
    ids = jnp.array(
        [
            0,
            count - 1,
            -1,
            -count,
            -count - 1,
            count,
            shape.rows - 1,
            2**31 - 1,
            -(2**31),
        ],
        jnp.int32,
    )
    embed = nnx.Embed(count, shape.features, rngs=nnx.Rngs(0))
    embed.embedding.set_value(to_dense(train)[:count])
    want = np.asarray(embed(ids))
    out = looked_up(train, ids, num_embeddings=count, max_unique=max_unique)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert list(np.isnan(out).all(axis=1)) == [*4 * [False], *5 * [True]]


def test_ids_without_a_row_have_no_gradient():
    train, (_, count) = drawn("three"), SHAPES["three"]
    total = lambda t, ids, u: jnp.nansum(
        lookup(t, ids, num_embeddings=count, max_unique=u)
    )
    valid = jnp.array([3, 5, 3, 3], jnp.int32)
    mixed = jnp.array([3, count, 5, -99, 3, 10**6, 3], jnp.int32)
    for bound in (None, 2):
        got = jax.jit(jax.grad(total), static_argnums=2)(train, mixed, bound)
        want = jax.jit(jax.grad(total), static_argnums=2)(train, valid, None)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_any_whole_dtype_counts_the_same(dtype):
    train, (_, count) = drawn("four"), SHAPES["four"]
    ids = np.array([0, 7, 112, 113, 120], dtype)
    if dtype == "uint32":
        ids[-1] = 2**32 - 1  # would wrap to -1, a row
    out = looked_up(train, jnp.asarray(ids), num_embeddings=count)
    assert list(np.isnan(out).all(axis=1)) == [False, False, False, True, True]
    want = looked_up(train, jnp.array([0, 7, 112], jnp.int32), num_embeddings=count)
    assert_same_bits(out[:3], want)


# Each id once.


@pytest.mark.parametrize("bound", [1, 2, 4, 6])
def test_ids_beyond_the_bound_are_nan_and_never_wrong(bound):
    """Of six different ids the `bound` smallest have their rows, the others NaN."""
    train, (_, count) = drawn("four"), SHAPES["four"]
    ids = jnp.array([[90, 3, 3, 50], [3, 112, 7, 90], [64, 50, -1, 3]], jnp.int32)
    known = np.unique(np.asarray(ids) % count)[:bound]
    out = looked_up(train, ids, num_embeddings=count, max_unique=bound)
    lost = ~np.isin(np.asarray(ids) % count, known)
    np.testing.assert_array_equal(
        np.isnan(out), np.broadcast_to(lost[..., None], out.shape)
    )
    assert lost.any() == (bound < 6)
    every = looked_up(train, ids, num_embeddings=count)
    np.testing.assert_allclose(out[~lost], every[~lost], rtol=1e-6, atol=1e-6)


def test_ids_without_a_row_take_no_place_from_others():
    train, (_, count) = drawn("four"), SHAPES["four"]
    ids = jnp.array([112, 500, 3, -400, 999, 3], jnp.int32)
    out = looked_up(train, ids, num_embeddings=count, max_unique=2)
    assert list(np.isnan(out).all(axis=1)) == [False, True, False, True, True, False]


def computed_rows(tokens, **options):
    """How many rows the traced program multiplies out."""
    train = jax.eval_shape(lambda: drawn("four"))
    jaxpr = jax.make_jaxpr(functools.partial(lookup, **options))(
        train, jax.ShapeDtypeStruct((tokens,), jnp.int32)
    )
    batched = [
        e
        for e in jaxpr.eqns
        if e.primitive.name == "dot_general" and e.params["dimension_numbers"][1][0]
    ]
    (product,) = batched
    return product.outvars[0].aval.shape[0]


def test_the_bound_is_never_above_ids_or_rows():
    assert computed_rows(500) == 500
    assert computed_rows(500, max_unique=40) == 40
    assert computed_rows(30, max_unique=40) == 30
    assert computed_rows(500, max_unique=400) == 120
    assert computed_rows(500, max_unique=400, num_embeddings=113) == 113


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (3, 4)], ids=str)
@pytest.mark.parametrize("max_unique", [None, 2])
def test_ids_of_any_shape_and_vmap(shape, max_unique):
    train, (_, count) = drawn("three"), SHAPES["three"]
    ids = jnp.asarray(np.resize(np.array([4, 17], np.int32), shape))
    out = looked_up(train, ids, num_embeddings=count, max_unique=max_unique)
    assert out.shape == (*shape, 12)
    size = oracle.dense(oracle.magnitude(train))[ids]
    assert_reordered(out, oracle.dense(train)[ids], roundings(train), size)
    if shape == (3, 4):
        look = lambda i: lookup(train, i, num_embeddings=count, max_unique=max_unique)
        mapped = jax.jit(jax.vmap(look))(ids)
        assert_reordered(mapped, oracle.dense(train)[ids], roundings(train), size)


def test_bf16_tables_are_merged_in_float32():
    """Cores of bf16, or tables of it: an 8-bit rounding of each factor is lost."""
    train, (_, count) = drawn("four", jnp.bfloat16), SHAPES["four"]
    ids = some_ids(count)
    wanted = oracle.dense(train)[ids]
    out = looked_up(train, ids, num_embeddings=count)
    assert out.dtype == jnp.bfloat16
    assert_sqnr(out, wanted, db=45)
    wide = tables(train, dtype=jnp.float32)
    assert_same_bits(tables(train), jax.tree.map(lambda t: t.astype("bfloat16"), wide))
    assert_sqnr(looked_up(wide, ids, num_embeddings=count), wanted, db=120)


# What it costs.


def test_multiply_adds_of_the_papers_table():
    """T 16384: 6.8 times fewer with shared halves, 26 times with 4000 ids once each."""
    every, once = cost(WORDS, 16384), cost(WORDS, 16384, unique=4000)
    assert every.chain == once.chain == pytest.approx(2.82e9, rel=1e-3)
    assert every.chain / (every.tables + every.rows) >= 6.8
    assert once.chain / (once.tables + once.rows) >= 25.9
    assert every.tables == pytest.approx(1.0e7, rel=0.03)


def flops(f, *arguments):
    compiled = jax.jit(f).lower(*arguments).compile()
    return compiled.cost_analysis()["flops"], compiled.as_text()


def words():
    """The paper's table as shapes, its train and 16384 ids."""
    struct = lambda s: jax.ShapeDtypeStruct(s, jnp.float32)
    diagonals = tuple(struct((r,)) for r in WORDS.ranks[1:-1])
    train = TensorTrain(tuple(map(struct, WORDS.core_shapes)), diagonals)
    return train, jax.ShapeDtypeStruct((16384,), jnp.int32)


def chained(train, ids):
    """Every id through all four cores, as a table of trains is first written."""
    digits = []
    for dim in WORDS.row_dims[::-1]:
        ids, digit = jnp.divmod(ids, dim)
        digits.insert(0, digit)
    out = jnp.take(train.cores[0], digits[0], axis=1)[0]
    for core, digit in zip(train.cores[1:], digits[1:], strict=True):
        slices = jnp.take(core, digit, axis=1)
        out = jnp.einsum("tpr,rtqs->tpqs", out, slices)
        out = out.reshape(len(ids), -1, core.shape[-1])
    return out


@pytest.mark.once
def test_compiled_lookups_do_the_counted_work():
    """Beyond the products: choosing between rows and NaN, one or two an entry."""
    (train, ids), entries = words(), 16384 * 768
    look = lambda u: lambda t, i: lookup(t, i, num_embeddings=30522, max_unique=u)
    chain, _ = flops(chained, train, ids)
    every, _ = flops(look(None), train, ids)
    once, _ = flops(look(4000), train, ids)
    assert 1 <= chain / (2 * cost(WORDS, 16384).chain) <= 1.05
    for got, unique in ((every, 16384), (once, 4000)):
        count = cost(WORDS, 16384, unique=unique)
        want = 2 * (count.tables + count.rows)
        assert want <= got <= want + 3 * entries
    assert chain / every >= 6.8
    assert chain / once >= 24  # 26 of multiply-adds alone: the test above


@pytest.mark.once
@pytest.mark.parametrize("max_unique", [None, 4000])
def test_no_array_of_the_tables_size_in_the_backward(max_unique):
    """Gradients are scattered into the halves, never into rows by features."""
    train, ids = words()
    total = lambda t, i: lookup(t, i, num_embeddings=30522, max_unique=max_unique).sum()
    _, text = flops(jax.value_and_grad(total), train, ids)
    assert "f32[320,16,32]" in text
    for rows in (30522, 32000, 32768):
        assert f"[{rows},768]" not in text
    assert "[320,100,16,48]" not in text


def test_halves_part_where_merging_is_cheapest():
    train, _ = words()
    left, right = jax.eval_shape(tables, train)
    assert left.shape == (320, 16, 32)
    assert right.shape == (32, 100, 48)
    assert shape_of("test", train) == WORDS
    end = TTMShape((2, 50, 2), (2, 2, 2), (1, 4, 4, 1))
    struct = lambda s: jax.ShapeDtypeStruct(s, jnp.float32)
    cores = tuple(map(struct, end.core_shapes))
    left, _ = jax.eval_shape(tables, TensorTrain(cores, (struct((4,)),) * 2))
    assert left.shape[0] in (2, 100)


def test_what_is_refused():
    train, ids = drawn("three"), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="1 to the 36 rows"):
        lookup(train, ids, num_embeddings=37)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lookup(train, ids, max_unique=0)
    with pytest.raises(TypeError, match="whole numbers, got dtype float32"):
        lookup(train, jnp.zeros(3))
    matrix = TensorTrain((jnp.ones((1, 2, 1)),) * 2, (jnp.ones(1),))
    with pytest.raises(ValueError, match="TTM of 2 or more cores"):
        lookup(matrix, ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_summed_by_a_product_are_those_scattered(dtype):
    """The first is what a GPU runs for small tables, the second what a CPU does."""
    key = jax.random.key(0)
    values = jax.random.normal(key, (200, 7)).astype(dtype)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 5, 200))
    want = np.zeros((6, 7))
    np.add.at(want, np.asarray(ids), np.asarray(values, np.float64))
    for way in (lookup_module._multiplied, lookup_module._scattered):
        got = way(values, ids, 6)
        assert got.dtype == jnp.float32
        assert_reordered(got, want, 200, np.abs(np.asarray(values, np.float64)).max())
