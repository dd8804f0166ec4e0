"""Tensor-train modules: Flax's arguments and dtypes, one product's bits, kept codes."""

import collections
import functools

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import fused, lowrank, nn
from coat_jax.contraction import halves
from coat_jax.policy import BF16, DEFAULT
from coat_jax.tensor_train import size, to_dense
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)
# Compiling is most of a test's time, and speed is not what is tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
MANY, FEW = (8, 64), (2,)  # tokens for which halves, and one core after another, win


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def make(*sizes, rank=8, seed=0, **options):
    sizes = sizes or (64, 96)
    return nn.TTLinear(*sizes, rank=rank, rngs=nnx.Rngs(seed), **options)


def biased(layer, seed=7):
    layer.bias[...] = draw(seed, *layer.bias.shape)
    return layer


def graded(module, method=None):
    """A function of state and args: the result, and gradients for one cotangent."""
    graph = nnx.graphdef(module)

    def run(state, *args):
        def f(state, *args):
            module = nnx.merge(graph, state)
            return (module if method is None else functools.partial(method, module))(
                *args
            )

        y, pull = jax.vjp(f, state, *args)
        cotangents = jax.tree.map(lambda y: draw(9, *y.shape, dtype=y.dtype), y)
        return y, pull(cotangents)

    return run


# Parameters -------------------------------------------------------------------------


def test_parameters_are_lists_of_cores_and_diagonals_and_a_bias():
    layer = make(768, 3072, rank=30)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert params.keys() == {"cores", "diagonals", "bias"}
    shapes = [params["cores"][k].shape for k in range(6)]
    assert shapes == [(1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 12, 30), (30, 16, 16),
                      (16, 16, 1)]  # fmt: skip
    sizes = [params["diagonals"][k].shape for k in range(5)]
    assert sizes == [(12,), (30,), (30,), (30,), (16,)]
    assert size(layer.train) == layer.shape.size == 28_960
    assert layer.shape.in_dims == (12, 8, 8)


def test_parameters_of_a_table():
    rows, cols = (16, 20, 10, 10), (4, 4, 8, 6)
    layer = nn.TTMEmbedding(
        30522, 768, rank=32, row_dims=rows, col_dims=cols, rngs=nnx.Rngs(0)
    )
    assert size(layer.train) == layer.shape.size == 167_808
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert params.keys() == {"cores", "diagonals"}


STD = {
    "default": ({}, 64**-0.5),
    "normal": ({"kernel_init": nnx.initializers.normal(0.3)}, 0.3),
    "glorot": ({"kernel_init": nnx.initializers.glorot_normal()}, (2 / 160) ** 0.5),
    "given": ({"std": 0.7}, 0.7),
}


@named("case", STD)
def test_the_dense_deviation_is_the_initializer_s(case):
    options, want = case
    dense = to_dense(make(**options).train, inputs=3)
    # A drawn matrix of 6144 entries is off by 1 / sqrt(2 * 6144).
    assert abs(float(jnp.sqrt(jnp.mean(dense**2))) / want - 1) < 4 / (2 * 6144) ** 0.5


def test_the_known_deviations_are_what_would_be_drawn():
    drawn = lowrank.dense_std("f", nnx.initializers.lecun_normal(), (64, 96))
    assert abs(drawn * 8 - 1) < 4 / (2 * 6144) ** 0.5
    table = nnx.Embed(96, 64, rngs=nnx.Rngs(0)).embedding[...]
    ours = nn.TTMEmbedding(96, 64, rank=8, rngs=nnx.Rngs(0)).train
    rms = [float(jnp.sqrt(jnp.mean(x**2))) for x in (table, to_dense(ours))]
    assert abs(rms[0] / rms[1] - 1) < 8 / (2 * 6144) ** 0.5


# Values ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_plain_layer_is_two_products_of_jax_bit_for_bit(dtype):
    layer = biased(make(dtype=dtype))
    x = draw(0, *MANY, 64, dtype=dtype)

    def theirs(layer, x):
        left, right = halves(layer.train, 3, dtype=jnp.float32)
        y = x @ left.astype(dtype) @ right.astype(dtype)
        return y + layer.bias[...].astype(dtype)[None, None]

    args = (nnx.state(layer), x)
    got, want = jit(lambda *args: [graded(layer, f)(*args) for f in (None, theirs)])(
        *args
    )
    assert_same_bits(got, want)


@named("tokens", {"many": MANY, "few": FEW, "one": (), "none": (0,)})
def test_values_and_gradients_are_those_of_the_dense_kernel(tokens):
    layer, x = biased(make()), draw(0, *tokens, 64)
    dense = lambda layer, x: jnp.reshape(
        x.reshape(-1, 64) @ to_dense(layer.train, inputs=3) + layer.bias[...][None],
        (*x.shape[:-1], 96),
    )
    got, want = jit(lambda *a: [graded(layer, f)(*a) for f in (None, dense)])(
        nnx.state(layer), x
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_sqnr(g, w, db=100)


def test_few_tokens_meet_one_core_after_another_and_FP8_has_halves_only():
    layer = make()
    assert layer._path(draw(0, *MANY, 64)) == "halves"
    assert layer._path(draw(0, 1, 64)) == "sequential"
    assert make(policy=DEFAULT)._path(draw(0, 1, 64)) == "halves"


DTYPES = {
    "inferred": ({}, jnp.float32),
    "narrow input": ({}, jnp.bfloat16),
    "narrow params": ({"param_dtype": jnp.bfloat16}, jnp.bfloat16),
    "wider params": ({"param_dtype": jnp.float32}, jnp.bfloat16),
    "given": ({"dtype": jnp.bfloat16}, jnp.float32),
    "whole numbers": ({}, jnp.int32),
    "preferred": (
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        jnp.float32,
    ),
}


@named("case", DTYPES)
@pytest.mark.parametrize("tokens", [MANY, FEW], ids=["many", "few"])
@pytest.mark.usefixtures("optax_promotion")
def test_dtypes_are_those_of_flax(case, tokens):
    options, dtype = case
    x = jax.ShapeDtypeStruct((*tokens, 64), dtype)
    theirs = nnx.Linear(64, 96, rngs=nnx.Rngs(0), **options)
    want = jax.eval_shape(theirs, x)
    assert jax.eval_shape(make(**options), x) == want
    assert jax.eval_shape(make(**options, policy=DEFAULT), x) == want


def test_a_promote_dtype_of_one_s_own_is_called():
    def promote(arrays, dtype):
        assert dtype is None
        return [None if a is None else a.astype(jnp.bfloat16) for a in arrays]

    x = draw(0, *MANY, 64)
    own, narrow = make(promote_dtype=promote), make(dtype=jnp.bfloat16)
    assert_same_bits(*jit(lambda x: (own(x), narrow(x)))(x))


REFUSED = {
    "precision": ({"precision": "highest"}, "precision has nothing to apply to"),
    "hook": ({"dot_general": jnp.dot}, "dot_general has nothing to apply to"),
    "metadata": ({"kernel_metadata": {"a": 1}}, "kernel_metadata has nothing"),
    "zeros": ({"kernel_init": nnx.initializers.zeros}, "must be above zero"),
    "dims": ({"in_dims": (5, 5)}, "in_dims must multiply to 64"),
}


@named("case", REFUSED)
def test_what_a_train_has_no_place_for_is_refused(case):
    options, words = case
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=words):
        make(**options)
    with pytest.raises(NotImplementedError, match="out_sharding has nothing"):
        make()(draw(0, 2, 64), out_sharding=P())


def test_a_forward_changes_nothing_and_entries_up_to_tau_count_as_zero():
    layer, x = make(), draw(0, *MANY, 64)
    entries = layer.diagonals[2][...]
    layer.diagonals[2][...] = entries.at[0].set(0.01).at[1].set(-3.0)
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    got = layer(x)
    assert_same_bits(nnx.state(layer), before)
    layer.diagonals[2][...] = entries.at[:2].set(0.0)
    assert_same_bits(layer(x), got)


# FP8 blocks ---------------------------------------------------------------------------


def parts(policy, kinds="tt"):
    """A norm, a gate, an up and a down of tensor trains or, where "d", dense."""
    rngs, how = nnx.Rngs(0), {"policy": policy, "dtype": jnp.bfloat16}
    tt = lambda *sizes: nn.TTLinear(*sizes, rank=8, rngs=rngs, **how)
    dense = lambda *sizes: nn.Linear(*sizes, rngs=rngs, **how)
    first, second = (tt if kind == "t" else dense for kind in kinds)
    norm = nn.RMSNorm(64, rngs=rngs, **how)
    layers = [norm, first(64, 96), second(64, 96), tt(96, 64)]
    return nnx.List([norm, *map(biased, layers[1:])])


def block(layers, x):
    norm, gate, up, down = layers
    return nn.mlp(norm, [gate, up], "silu", down, x, residual=x)


def by_hand(layers, x):
    """The same by `fused` and `lowrank`, a low-rank map being two."""
    norm, *maps = layers
    pairs = [layer.halves() for layer in maps]
    how, value = {"policy": DEFAULT}, lambda layer: layer.bias[...]
    scale = norm.scale[...]
    ts = fused.norm_linear(x, [left for left, _ in pairs[:2]], scale=scale, **how)
    inner = [
        lowrank.leave(t, right, value(layer), **how)
        for t, (_, right), layer in zip(ts, pairs[:2], maps[:2], strict=True)
    ]
    t = fused.act_linear(inner, pairs[2][0], activation="silu", **how)
    return lowrank.leave(t, pairs[2][1], value(maps[2]), residual=x, **how)


def test_a_block_of_trains_is_the_fused_block_of_their_factors():
    layers, x = parts(DEFAULT), draw(0, *MANY, 64, dtype=jnp.bfloat16)
    run = lambda *args: [graded(layers, f)(*args) for f in (block, by_hand)]
    got, want = jit(run)(nnx.state(layers), x)
    assert_same_bits(got, want)


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("kinds", ["tt", "td"])
def test_blocks_are_close_to_their_plain_selves(kinds):
    x = draw(0, *MANY, 64, dtype=jnp.bfloat16)
    fp8, plain = parts(DEFAULT, kinds), parts(BF16, kinds)
    run = lambda *args: [graded(layers, block)(*args)[0] for layers in (fp8, plain)]
    got, want = jit(run)(nnx.state(fp8), x)
    assert_sqnr(got, want, db=20)


def kept_by(layers, f, x):
    """(dtype, shape) of what the pullback of f holds, beside the parameters."""
    graph, state = nnx.split(layers)
    g = lambda state, x: jax.vjp(lambda s, x: f(nnx.merge(graph, s), x), state, x)[1]
    leaves = jax.tree.leaves(jax.eval_shape(g, state, x))
    return collections.Counter((leaf.dtype.name, leaf.shape) for leaf in leaves)


@pytest.mark.parametrize("kinds", ["tt", "td"])
def test_a_norm_and_its_projections_keep_one_set_of_codes(kinds):
    """Nothing else of x's size, in no dtype; of a train its rank's features."""
    x = jax.ShapeDtypeStruct((*MANY, 64), jnp.bfloat16)
    f = lambda layers, x: nn.norm_linear(layers[0], layers[1:3], x)
    kept = kept_by(parts(DEFAULT, kinds), f, x)
    tokens = {key: n for key, n in kept.items() if key[1][:2] == MANY}
    assert tokens == {
        ("uint8", x.shape): 1,
        ("float32", (*MANY, 1)): 1,
        ("bfloat16", (*MANY, 8)): kinds.count("t"),
    }


def test_attention_projects_through_a_train():
    rngs, how = nnx.Rngs(0), {"policy": DEFAULT, "rank": 8}
    out = nn.TTLinear(64, 48, rngs=rngs, **how)
    q = draw(0, 2, 6, 4, 16)
    run = lambda layer, q: nn.attention_linear(layer, q, q, q, is_causal=True)

    def hand(layer, q):
        left, right = layer.halves()
        how = {"is_causal": True, "policy": DEFAULT}
        t = fused.attention_linear(q, q, q, left, **how)
        return lowrank.leave(t, right, layer.bias[...], policy=DEFAULT)

    both = lambda *args: [graded(out, f)(*args) for f in (run, hand)]
    got, want = jit(both)(nnx.state(out), q)
    assert_same_bits(got, want)


def test_convert_gives_trains_a_policy():
    model = nnx.List([make(), nn.TTMEmbedding(96, 64, rank=8, rngs=nnx.Rngs(0))])
    report = nn.convert(model, DEFAULT)
    assert report.replaced == (("0", nn.TTLinear),)
    assert model[0].policy == DEFAULT
    ((path, kind, reason),) = report.left
    assert (path, kind) == ("1", nn.TTMEmbedding)
    assert reason.startswith("rows are looked up")


# Tables -------------------------------------------------------------------------------


def table(rows=500, **options):
    return nn.TTMEmbedding(rows, 32, rank=4, rngs=nnx.Rngs(0), **options)


@named("options", {"all": {}, "different ones": {"max_unique": 5}})
def test_rows_and_gradients_are_those_of_the_dense_table(options):
    """Out of range, negative and repeated ids are as `nnx.Embed` has them."""
    layer = table(**options)
    ids = jnp.array([[3, 499, 3], [-1, 500, 0]], jnp.int32)

    def dense(layer, ids):
        embed = nnx.Embed(500, 32, rngs=nnx.Rngs(0))
        embed.embedding = nnx.Param(to_dense(layer.train)[:500])
        return embed(ids)

    def run(state):
        both = []
        for f in (lambda layer, ids: layer(ids), dense):
            g = lambda state, f=f: f(nnx.merge(graph, state), ids)
            y, pull = jax.vjp(g, state)
            both.append((y, pull(jnp.where(jnp.isnan(y), 0, draw(1, *y.shape)))))
        return both

    graph, state = nnx.split(layer)
    got, want = jit(run)(state)
    assert np.isnan(np.asarray(got[0])).all(-1).tolist() == [
        [False] * 3,
        [False, True, False],
    ]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_sqnr(np.nan_to_num(g), np.nan_to_num(w), db=100)


def test_a_table_of_one_row_has_it_for_every_id():
    layer = table(1, order=2)
    assert_same_bits(
        layer(jnp.array([7, 0], jnp.int32)), layer(jnp.zeros(2, jnp.int32))
    )


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "fp8"])
def test_attend_is_the_product_with_the_rows(policy):
    layer, query = table(policy=policy), draw(0, 2, 3, 32)
    want = query @ to_dense(layer.train)[:500].T
    got = jit(lambda state, q: nnx.merge(graph, state).attend(q))
    graph, state = nnx.split(layer)
    assert_sqnr(got(state, query), want, db=100 if policy.plain else 25)


def test_tables_have_flax_s_dtypes_and_refuse_floats():
    ids = jnp.array([1], jnp.int32)
    assert table(dtype=jnp.bfloat16)(ids).dtype == jnp.bfloat16
    assert table(param_dtype=jnp.bfloat16)(ids).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="ids must be integers"):
        table()(jnp.ones(2))
    with pytest.raises(NotImplementedError, match="promote_dtype has nothing"):
        table(promote_dtype=lambda arrays, dtype: arrays)


# Transformations and files ------------------------------------------------------------


def test_layers_run_under_vmap_scan_remat_and_nnx_grad():
    def stacked(key):
        return nn.TTLinear(32, 32, rank=4, policy=DEFAULT, rngs=nnx.Rngs(key))

    layers = nnx.vmap(stacked)(jax.random.split(jax.random.key(0), 2))
    graph, state = nnx.split(layers)
    x = draw(0, 2, 64, 32)

    def loss(state, wrap):
        step = wrap(lambda x, one: (nnx.merge(graph, one)(x), None))
        return jnp.sum(lax.scan(step, x, state)[0] ** 2)

    def by_hand(state):
        h = x
        for k in range(2):
            h = nnx.merge(graph, jax.tree.map(lambda leaf, k=k: leaf[k], state))(h)
        return jnp.sum(h**2)

    wraps = (jax.checkpoint, lambda f: f)
    fns = [by_hand, *(functools.partial(loss, wrap=wrap) for wrap in wraps)]
    want, *found = jit(lambda state: [jax.grad(f)(state) for f in fns])(state)
    for got in found:
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_reordered(g, w, n=256, scale=np.abs(w).max())
    each = jit(jax.vmap(lambda s, x: nnx.merge(graph, s)(x), (0, None)))(state, x)
    one = jax.tree.map(lambda leaf: leaf[1], state)
    assert_sqnr(each[1], nnx.merge(graph, one)(x), db=100)


def test_nnx_transformations_take_the_modules():
    layer, x = make(32, 32), draw(0, *MANY, 32)
    loss = lambda layer, x: jnp.mean(nnx.remat(lambda m, x: m(x))(layer, x) ** 2)
    grads = nnx.jit(nnx.grad(loss))(layer, x)
    graph, state = nnx.split(layer)
    want = jax.jit(jax.grad(lambda s: jnp.mean(nnx.merge(graph, s)(x) ** 2)))(state)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert_reordered(g, w, n=512, scale=np.abs(w).max())


def test_whole_cores_serve_split_tokens_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",))
    layers = parts(DEFAULT)
    graph, state = nnx.split(layers)
    x = draw(0, 8, 16, 64, dtype=jnp.bfloat16)
    loss = lambda state, x: jnp.mean(
        jnp.square(block(nnx.merge(graph, state), x).astype(jnp.float32))
    )
    run = jit(jax.value_and_grad(loss))
    want = run(state, x)
    state = jax.device_put(state, NamedSharding(mesh, P()))
    got = run(state, jax.device_put(x, NamedSharding(mesh, P("data"))))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_sqnr(np.asarray(g), w, db=30)
