"""Low-rank products: what is kept, and how they follow from single FP8 products."""

import collections
import dataclasses
import functools
import re

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import linear, lowrank, nn
from coat_jax.contraction import halves
from coat_jax.linear import fp8_dot
from coat_jax.lookup import tables
from coat_jax.policy import BF16, DEFAULT, PAPER, Operand
from coat_jax.tensor_train import init_train, to_dense, tt_shape, ttm_shape
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

ONLY_W = dataclasses.replace(BF16, w=Operand())
POLICIES = {"default": DEFAULT, "paper": PAPER, "only w": ONLY_W}
T, N, R, M = (2, 24), 64, 16, 96


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_plain_policy_is_two_products_bit_for_bit(dtype):
    x, r, g = (
        draw(0, *T, N, dtype=dtype),
        *(draw(i, *T, M, dtype=dtype) for i in (1, 2)),
    )
    args = (x, draw(3, N, R), draw(4, R, M), draw(5, M), r)

    def theirs(x, left, right, bias, r):
        y = x @ left.astype(x.dtype) @ right.astype(x.dtype)
        return r + (y + bias.astype(x.dtype)[None, None])

    ours = lambda x, left, right, bias, r: lowrank.lowrank_dot(
        x, left, right, bias, residual=r
    )
    got, want = (value_and_gradients(f, args, g) for f in (ours, theirs))
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_one_fp8_product_after_another(name):
    """Each is judged in tests/test_linear.py; keeping the input moves no bit."""
    policy = POLICIES[name]
    x, g = draw(0, *T, N, dtype=jnp.bfloat16), draw(1, *T, M, dtype=jnp.bfloat16)
    args = (x, draw(3, N, R), draw(4, R, M), draw(5, M))

    def parts(x, left, right, bias):
        t = fp8_dot(x, left, policy=policy)
        return linear.linear(t, right, bias, policy=policy)

    ours = lambda *args: lowrank.lowrank_dot(*args, policy=policy)
    got, want = (value_and_gradients(f, args, g) for f in (ours, parts))
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", POLICIES)
def test_what_shares_an_input_computes_the_same_alone(name):
    policy = POLICIES[name]
    x = draw(0, *T, N)
    factors = [(draw(3 * i, N, R + i), draw(3 * i + 1, R + i, M)) for i in (1, 2, 3)]
    biases = [draw(9, M), None, draw(10, M)]
    g = [draw(20 + i, *T, M) for i in range(3)]

    def shared(x, factors):
        return lowrank.lowrank_project(x, factors, biases, policy=policy)

    def alone(x, factors):
        pairs = zip(factors, biases, strict=True)
        return [lowrank.lowrank_dot(x, *f, b, policy=policy) for f, b in pairs]

    got, want = (value_and_gradients(f, (x, factors), g) for f in (shared, alone))
    assert_same_bits((got[0], got[2]), (want[0], want[2]))
    scale = np.abs(np.asarray(want[1])).max()
    assert_reordered(got[1], want[1], n=3, scale=scale)


def kept_by(f, *args):
    """Shapes and dtypes of what a function's pullback holds."""
    pull = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    leaves = jax.tree.leaves(pull)
    return collections.Counter((leaf.dtype.name, leaf.shape) for leaf in leaves)


def test_three_maps_keep_one_set_of_codes_and_their_ranks():
    x = draw(0, *T, N, dtype=jnp.bfloat16)
    factors = [(draw(1, N, R), draw(2, R, M))] * 3
    f = lambda x, fs: lowrank.lowrank_project(x, fs, policy=DEFAULT)
    kept = kept_by(f, x, factors)
    assert kept["uint8", x.shape] == 1
    assert kept["bfloat16", (*T, R)] == 3
    assert not [key for key in kept if key[0] != "uint8" and key[1][-1] == x.shape[-1:]]
    tokens = sum(n for (_, shape), n in kept.items() if shape[:2] == T)
    assert tokens == 1 + 3


def test_merging_before_the_cast_errs_at_most_0_6_of_casting_before():
    """FFN1 of the six encoders at rank 32: what the layer computes is its own W."""

    def errors(key):
        train = init_train(key, tt_shape(768, 3072, rank=32), std=0.02)
        want, eye = to_dense(train, inputs=3), jnp.eye(768)
        merged = lowrank.lowrank_dot(eye, *halves(train, 3), policy=ONLY_W)
        cast = tuple(rounded(core) for core in train.cores)
        after = to_dense(train._replace(cores=cast), inputs=3)
        return jnp.linalg.norm(merged - want), jnp.linalg.norm(after - want)

    keys = jax.random.split(jax.random.key(0), 3)
    merged, cast = jax.jit(lambda keys: lax.map(errors, keys))(keys)
    assert np.mean(merged / cast) <= 0.6


def rounded(core):
    """A core as an FP8 product would see it."""
    flat = core.reshape(-1, core.shape[-1])
    return fp8_dot(jnp.eye(len(flat)), flat, policy=ONLY_W).reshape(core.shape)


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "fp8"])
def test_the_result_may_be_wider_than_the_input(policy):
    x, left = draw(0, *T, N, dtype=jnp.bfloat16), draw(1, N, R)
    right, bias = draw(2, R, M), draw(3, M)
    f = functools.partial(lowrank.lowrank_dot, x, left, right, bias, policy=policy)
    wide = f(preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    assert np.any(wide != wide.astype(jnp.bfloat16).astype(jnp.float32))
    assert_sqnr(f(), wide, db=45)


@pytest.mark.parametrize("rows", [84, 79])
def test_attend_is_the_product_with_the_table(rows):
    @jax.jit
    def run(query, train):
        how = {"num_embeddings": rows}
        f = functools.partial(lowrank.lowrank_attend, query, tables(train), **how)
        want = query @ to_dense(train)[:rows].T
        return f(policy=BF16), f(policy=DEFAULT), want

    train = init_train(jax.random.key(0), ttm_shape(84, 24, rank=5), std=1.0)
    plain, fp8, want = run(draw(0, 3, 5, 24), train)
    assert_sqnr(plain, want, db=100)
    assert_sqnr(fp8, want, db=25)


REFUSED = {
    "left": ((draw(0, N + 1, R), draw(1, R, M)), "kernel must begin with x's last"),
    "right": ((draw(0, N, R), draw(1, R + 1, M)), "kernel must begin with x's last"),
    "bias": ((draw(0, N, R), draw(1, R, M), draw(2, R)), "bias must have kernel's"),
}


@pytest.mark.parametrize(("args", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_what_does_not_fit_is_refused(args, words, dtype):
    with pytest.raises(ValueError, match=words):
        lowrank.lowrank_dot(draw(3, *T, N), *args, preferred_element_type=dtype)


def test_a_query_of_another_width_and_a_std_of_zero_are_refused():
    small = tables(init_train(jax.random.key(0), ttm_shape(84, 24, rank=5), std=1.0))
    with pytest.raises(ValueError, match="the table's 24 features"):
        lowrank.lowrank_attend(draw(0, 3, 23), small, num_embeddings=84)
    with pytest.raises(ValueError, match="must be above zero"):
        lowrank.dense_std("f", nnx.initializers.zeros, (4, 4))


# Compiled for the H200 ----------------------------------------------------------------

LAYERS, TOKENS, WIDTH, RANK = 4, 2048, 768, 32


@pytest.fixture(scope="module")
def projections(h200_compile):
    """Scanned layers x + q + k + v of norm(x), by tensor trains: loss and gradients."""

    def layer(key):
        rngs = nnx.Rngs(key)
        how = {"rank": RANK, "policy": DEFAULT, "use_bias": False, "rngs": rngs}
        trains = [nn.TTLinear(WIDTH, WIDTH, **how) for _ in range(3)]
        return nnx.List([nn.RMSNorm(WIDTH, rngs=rngs), *trains])

    with jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(nnx.eval_shape(lambda: layer(0)))
    stack = lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype)

    def step(x, params):
        norm, *trains = nnx.merge(graph, params)
        with jax.numpy_dtype_promotion("standard"):
            for linear in trains:
                linear.dtype = norm.dtype = jnp.bfloat16
            ys = nn.norm_linear(norm, trains, x)
        return x + ys[0] + ys[1] + ys[2], None

    def loss(params, x):
        y, _ = lax.scan(step, x, params)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    params = jax.tree.map(stack, nnx.to_pure_dict(state))
    options = {"xla_disable_hlo_passes": "dot-merger"}
    fn = jax.grad(loss, argnums=(0, 1))
    return h200_compile(fn, params, x, options=options).as_text()


@pytest.mark.once
def test_the_input_of_query_key_and_value_is_kept_once_as_codes(projections):
    """Stacked over the layers: one array of codes, its scales, three of rank."""
    made = re.findall(r"= (\w+\[4,2048[\d,]*\])\S* dynamic-update-slice", projections)
    assert collections.Counter(made) == {
        f"u8[4,2048,{WIDTH}]": 1,
        f"bf16[4,2048,{RANK}]": 3,
        "f32[4,2048,6]": 1,
    }


@pytest.mark.once
def test_products_with_tokens_are_fp8_and_merges_are_not(projections):
    """Two products forward and four backward of each map; merges in float32."""
    targets = collections.Counter(
        re.findall(r'custom_call_target="(__cublas[^"]+)"', projections)
    )
    assert targets["__cublas$lt$matmul$f8"] == 3 * 6
    assert set(re.findall(r"= (\w+)\[\S* dot\(", projections)) <= {"f32"}


@pytest.mark.once
def test_no_copy_of_the_normalised_input_is_made(projections):
    """Between the norm and the products are codes: a prologue makes them from x."""
    assert "coat_prologue" in projections
    assert not re.findall(r"= \(?bf16\[2048,768\]\S*[^\n]*/coat_prologue", projections)
