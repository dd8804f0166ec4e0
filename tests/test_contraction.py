"""x @ W for tensor trains: every path against float64, and what each path costs."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import opt_einsum
import pytest

from coat_jax import contraction
from coat_jax.contraction import PATHS, cost, halves, shape_of, tt_matmul
from coat_jax.tensor_train import TensorTrain, TTShape, tt_shape
from tests import tensor_train_oracle as oracle
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

FFN = tt_shape(768, 3072, rank=30)
# Orders 2 to 8, odd factors, sides of unequal length, ranks of 1 in and at the ends.
SHAPES = {
    "order 2": tt_shape(6, 5, rank=3, order=1),
    "order 4": tt_shape(6, 20, rank=4, order=2),
    "order 6": tt_shape(30, 18, rank=3),
    "order 8": tt_shape(24, 36, rank=3, order=4),
    "odd": tt_shape(105, 45, rank=5, in_dims=(7, 5, 3), out_dims=(3, 15)),
    "ranks of 1": TTShape((3, 2, 2), (2, 5), (1, 1, 3, 1, 2, 1)),
    "dims of 1": TTShape((1, 6, 1), (4, 1), (1, 1, 3, 3, 2, 1)),
}


@functools.cache
def drawn(name, dtype=jnp.float32):
    """A train with some diagonals dead or negative, but no bond empty."""
    shape, rng = SHAPES[name], np.random.default_rng(0)
    draw = lambda s: rng.standard_normal(s, np.float32)
    cores = tuple(jnp.asarray(draw(s), dtype) for s in shape.core_shapes)
    diagonals = [1 + draw(r) for r in shape.ranks[1:-1]]
    for v in diagonals:
        v[0] = abs(v[0]) + 0.5
    return TensorTrain(cores, tuple(map(jnp.asarray, diagonals)))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def terms(train):
    """Roundings a term meets: L products and L - 1 gates, and the sums along it."""
    lengths = sum(core.shape[0] for core in train.cores)
    return 2 * len(train.cores) + lengths


@pytest.mark.parametrize("name", SHAPES)
def test_products_and_gradients_against_float64(name):
    train, shape = drawn(name), SHAPES[name]
    inputs = len(shape.in_dims)
    x, dy = normal(1, 7, shape.in_features), normal(2, 7, shape.out_features)

    @jax.jit
    def every_path(x, train):
        def both(path):
            product = lambda x, t: tt_matmul(x, t, inputs, path=path)
            y, vjp = jax.vjp(product, x, train)
            return (y, *vjp(dy))

        return [both(path) for path in PATHS]

    w, x64, dy64 = oracle.dense(train, inputs), np.float64(x), np.float64(dy)
    size = oracle.dense(oracle.magnitude(train), inputs)
    n = terms(train) + 7 + sum(w.shape)
    want = oracle.gradients(train, x64.T @ dy64)
    scale = oracle.gradients(oracle.magnitude(train), np.abs(x64).T @ np.abs(dy64))
    for y, dx, d_train in every_path(x, train):
        assert_reordered(y, x64 @ w, n, np.abs(x64) @ size)
        assert_reordered(dx, dy64 @ w.T, n, np.abs(dy64) @ size.T)
        for part in TensorTrain._fields:
            arrays = (getattr(tree, part) for tree in (d_train, want, scale))
            for g, w_, s in zip(*arrays, strict=True):
                assert_reordered(g, w_, n, s)


def test_the_judges_bound_is_small_beside_the_values():
    """The float64 comparison above would see a gate or a core left out."""
    train, inputs = drawn("order 8"), 4
    size = oracle.dense(oracle.magnitude(train), inputs)
    bound = 4 * np.sqrt(terms(train) + 67) * 2.0**-24 * size
    assert np.median(bound / np.abs(oracle.dense(train, inputs))) < 1e-4


@pytest.mark.parametrize("leading", [(), (0,), (1,), (2, 3), (0, 3)], ids=str)
def test_leading_dims_tokens_of_none_or_one_vmap_and_jit(leading):
    train, shape = drawn("odd"), SHAPES["odd"]
    x = normal(1, *leading, shape.in_features)

    @jax.jit
    def every_path(x, train):
        out = []
        for path in (*PATHS, None):
            product = functools.partial(tt_matmul, inputs=3, path=path)
            out.append(product(x, train))
            if leading:
                out.append(jax.vmap(product, in_axes=(0, None))(x, train))
        return out

    want = np.float64(x) @ oracle.dense(train, 3)
    scale = np.abs(np.float64(x)) @ oracle.dense(oracle.magnitude(train), 3)
    for y in every_path(x, train):
        assert y.shape == (*leading, shape.out_features)
        assert_reordered(y, want, terms(train) + 150, scale)


@pytest.mark.parametrize(
    ("path", "stored"),
    [("halves", jnp.float32), ("sequential", jnp.bfloat16), ("einsum", jnp.bfloat16)],
    ids=str,
)
def test_bf16_tokens_lose_what_their_own_roundings_take(path, stored):
    """x, its products and the halves are rounded to 8 bits: 40 dB or more are left."""
    train, shape = drawn("order 6", stored), SHAPES["order 6"]
    x = normal(1, 33, shape.in_features).astype(jnp.bfloat16)
    product = jax.jit(functools.partial(tt_matmul, inputs=3, path=path))
    y, dx = jax.value_and_grad(lambda x: product(x, train).sum())(x)
    assert dx.dtype == y.dtype == jnp.bfloat16
    got = product(x, train)
    assert got.dtype == jnp.bfloat16
    assert_sqnr(got, np.float64(x) @ oracle.dense(train, 3), db=40)


def test_halves_are_merged_in_float32_and_cast_once():
    train = drawn("order 8", jnp.bfloat16)
    left, right = halves(train, 4, dtype=jnp.float32)
    assert left.shape == (24, 3)
    assert right.shape == (3, 36)
    scale = oracle.dense(oracle.magnitude(train), 4)
    product = np.float64(left) @ np.float64(right)
    assert_reordered(product, oracle.dense(train, 4), terms(train), scale)
    low = halves(train, 4)
    assert_same_bits(low, (left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)))
    assert not np.any(halves(train, 4, tau=1e9)[0])


# What it costs.


@functools.cache
def optimum(shape, tokens):
    """opt_einsum's own count and steps for x and the cores, bonds of 1 squeezed."""
    arrays = [np.broadcast_to(0.0, (tokens, *shape.in_dims))]
    letters = "abcdefghijkl"[: len(shape.modes)]
    names = ["Z" + letters[: len(shape.in_dims)]]
    for k, core in enumerate(shape.core_shapes):
        bonds = "ABCDEFGHIJKLM"[k : k + 2]
        arrays.append(np.broadcast_to(0.0, core))
        names.append(bonds[0] + letters[k] + bonds[1])
    out = "Z" + letters[len(shape.in_dims) :]
    formula = ",".join(names) + "->" + out
    _, info = opt_einsum.contract_path(formula, *arrays, optimize="optimal")
    return info


def multiply_adds(info):
    """Of each step the product of the sizes of all its indices."""
    total = 0
    for step in info.contraction_list:
        indices = set(step[2].replace("->", ",").replace(",", ""))
        total += np.prod([float(info.size_dict[i]) for i in indices])
    return total


@pytest.mark.parametrize(
    "shape", [FFN, tt_shape(768, 768, rank=30)], ids=["ffn", "qkv"]
)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 4096, 16384])
def test_the_optimum_is_opt_einsums(shape, tokens):
    assert cost(shape, tokens).einsum == multiply_adds(optimum(shape, tokens))


def test_many_tokens_take_halves_few_the_cores_one_by_one():
    choices = [cost(FFN, t).choose for t in (1, 2, 16, 64, 512, 4096, 16384)]
    assert choices == [*2 * ["sequential"], *2 * ["einsum"], *3 * ["halves"]]
    few, many = cost(FFN, 1), cost(FFN, 4096)
    assert few.sequential == few.einsum
    assert many.halves == many.einsum
    # Halves cost one token more than the dense product would.
    assert few.halves > FFN.dense_size > few.sequential
    assert 2 * cost(FFN, 16384).halves == pytest.approx(3.78e9, rel=1e-3)
    assert cost(tt_shape(64, 64, rank=64), 4096).choose == "dense"


def flops(f, *shapes):
    """Of the compiled program, without running it."""
    arguments = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple) and all(isinstance(n, int) for n in s),
    )
    return jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]


def shapes_of(shape):
    return TensorTrain(shape.core_shapes, tuple((r,) for r in shape.ranks[1:-1]))


@pytest.mark.parametrize(
    ("tokens", "path"),
    [(1, "halves"), (1, "sequential"), (64, "einsum"), (64, None), (16384, None)],
)
def test_compiled_programs_do_the_counted_work(tokens, path):
    """Two a multiply-add, and a few for gates; the FFN at 16384 tokens: 3.78e9."""
    x, count = (tokens, 768), cost(FFN, tokens)
    got = flops(lambda x, t: tt_matmul(x, t, 3, path=path), x, shapes_of(FFN))
    want = 2 * getattr(count, path or count.choose)
    assert want <= got <= 1.02 * want + 2 * FFN.size
    if tokens == 16384:
        assert got == pytest.approx(3.78e9, rel=2e-3)


def test_the_dense_product_takes_twenty_times_as_much():
    dense = flops(jnp.matmul, (16384, 768), (768, 3072))
    assert dense == pytest.approx(7.73e10, rel=1e-3)
    assert dense > 20 * 2 * cost(FFN, 16384).halves


def test_halves_hoisted_out_of_micro_batches_are_merged_once():
    """Four products with shared halves: four times the tokens' work, one merge."""

    def step(xs, train):
        left, right = halves(train, 3)
        return [x @ left @ right for x in xs]

    once = cost(FFN, 0).halves
    got = flops(step, [(128, 768)] * 4, shapes_of(FFN))
    want = 2 * (4 * (cost(FFN, 128).halves - once) + once)
    assert want <= got <= 1.01 * want + 2 * FFN.size


def test_shape_of_reads_a_trains_shape():
    assert shape_of(drawn("odd"), 3) == SHAPES["odd"]


X, TRAIN = normal(1, 2, 30), drawn("order 6")
REFUSED = {
    "width": (lambda: tt_matmul(X[:, :5], TRAIN, 3), ValueError, "the product 30"),
    "path": (lambda: tt_matmul(X, TRAIN, 3, path="best"), ValueError, "one of"),
    "no input": (lambda: tt_matmul(X, TRAIN, 0), ValueError, "1 to 5"),
    "integers": (
        lambda: contraction._check(jnp.ones((2, 30), int), SHAPES["order 6"], None),
        TypeError,
        "got dtype int32",
    ),
    "a table": (
        lambda: halves(TensorTrain((jnp.ones((1, 2, 2, 1)),) * 2, (jnp.ones(1),)), 1),
        ValueError,
        "see coat_jax.lookup",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
