"""Blocks of modules: plain compositions bit for bit, one set of codes when FP8."""

import functools

from flax import nnx
import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import fused, nn
from coat_jax.attention import dot_product_attention
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept, Policy
from coat_jax.rope import rope
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

FP8_ATTENTION = Policy(attention=Kept())
named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


# Compiling is most of a test's time, and speed is not what is tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def call(module, *args, **how):
    """module(*args) under jit."""
    graph, state = nnx.split(module)
    return jit(lambda state, *args: nnx.merge(graph, state)(*args, **how))(state, *args)


def graded(module, **how):
    """A function of state and args: the result, and gradients for one cotangent."""
    graph = nnx.graphdef(module)

    def run(state, *args):
        f = lambda state, *args: nnx.merge(graph, state)(*args, **how)
        y, pull = jax.vjp(f, state, *args)
        return y, pull(draw(9, *y.shape, dtype=y.dtype))

    return run


def program(f, *args):
    """The text of f's program: where two are equal, so is every bit."""
    return jax.jit(f).lower(*args).as_text()


def assert_close(ours, theirs, state, *args, db, **how):
    """Results and gradients of two modules with one state, by their SQNR."""
    f = lambda *args: (graded(ours, **how)(*args), graded(theirs, **how)(*args))
    got, want = map(jax.tree.leaves, jit(f)(state, *args))
    for g, w in zip(got, want, strict=True):
        # A key's bias moves no softmax: its gradient is rounding alone.
        if np.abs(w).max() > 1e-5:
            assert_sqnr(g, w, db=db)


class Foreign(nnx.Module):
    """A linear map of low rank: neither Flax's nor ours."""

    def __init__(self, din, dout, *, rngs):
        self.a, self.b = (
            nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape))
            for shape in ((din, 4), (4, dout))
        )

    def __call__(self, x):
        return (x @ self.a[...]) @ self.b[...]


def parts(kind, policy=DEFAULT, norm=None):
    """A norm, two projections and one back, of one kind, with biases."""
    rngs = nnx.Rngs(0)
    own = {"ours": {"policy": policy}, "plain": {"policy": BF16}}.get(kind, {})
    source = nn if own else nnx
    linear = Foreign if kind == "foreign" else functools.partial(source.Linear, **own)
    norm = (norm or source).RMSNorm
    made = [linear(32, 48, rngs=rngs) for _ in range(2)] + [linear(48, 32, rngs=rngs)]
    extra = own if norm is nn.RMSNorm else {}
    return [norm(32, rngs=rngs, **extra), *made]


class Parts(nnx.Module):
    """A gated MLP, by the helpers or by hand."""

    def __init__(self, parts, by_hand=False):
        self.parts, self.by_hand = nnx.List(parts), by_hand

    def __call__(self, x):
        norm, gate, up, down = self.parts
        if self.by_hand:
            h = norm(x)
            gate, up = gate(h), up(h)
            return x + down(jax.nn.silu(gate) * up)
        both = nn.norm_linear(norm, [gate, up], x)
        return nn.act_linear(jax.nn.silu, down, *both, residual=x)


@pytest.mark.parametrize("kind", ["flax", "foreign", "plain"])
def test_other_modules_are_called_one_by_one(kind):
    joined, by_hand = Parts(parts(kind)), Parts(parts(kind), by_hand=True)
    args = nnx.state(joined), draw(0, 2, 5, 32)
    assert program(graded(joined), *args) == program(graded(by_hand), *args)


def test_our_modules_are_the_fused_block():
    norm, gate, up, down = parts("ours")
    x = draw(0, 2, 5, 32)
    value = lambda layer: (layer.kernel[...], layer.bias[...])
    weights, biases = zip(*map(value, (gate, up, down)), strict=True)
    scale = {"norm": "rms", "scale": norm.scale[...], "epsilon": norm.epsilon}
    block = functools.partial(fused.gated_mlp, policy=DEFAULT, **scale)
    want = program(lambda x: block(x, *weights, biases, residual=x), x)
    module = Parts([norm, gate, up, down])
    assert program(lambda x: module(x), x) == want
    plain = Parts(parts("flax"))
    assert_close(module, plain, nnx.state(plain), x, db=21)


MIXTURES = {
    "another norm": lambda: parts("ours", norm=nnx),
    "one of another policy": lambda: [
        *parts("ours")[:2],
        nn.Linear(32, 48, policy=PAPER, rngs=nnx.Rngs(1)),
        parts("ours")[3],
    ],
    "one foreign": lambda: [*parts("ours")[:3], Foreign(48, 32, rngs=nnx.Rngs(1))],
    "another dtype": lambda: [
        *parts("ours")[:3],
        nn.Linear(48, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(1)),
    ],
    "a hook": lambda: [
        *parts("ours")[:3],
        nn.Linear(48, 32, promote_dtype=lambda a, dtype: a, rngs=nnx.Rngs(1)),
    ],
}


@named("mixture", MIXTURES)
def test_mixtures_compose_and_stay_right(mixture):
    made = mixture()
    x = draw(0, 2, 5, 32)
    with jax.numpy_dtype_promotion("standard"):
        joined, by_hand = Parts(made), Parts(made, by_hand=True)
        got, want = jit(lambda x: (joined(x), by_hand(x)))(x)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert_sqnr(got, want, db=25)


def test_a_wider_residual_stream_stays_wide():
    rngs = nnx.Rngs(0)
    block = nn.GatedMLP(32, 48, dtype=jnp.bfloat16, rngs=rngs)
    norm = nn.RMSNorm(32, dtype=jnp.bfloat16, rngs=rngs)
    x = 100 + draw(0, 2, 5, 32)
    with jax.numpy_dtype_promotion("standard"):
        joined = program(lambda x: block(x, norm=norm, residual=x), x)
        assert joined == program(lambda x: x + block(x, norm=norm), x)
        assert jax.eval_shape(lambda x: block(x, residual=x), x).dtype == x.dtype


def test_activations_are_named_or_known():
    down, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    with pytest.raises(ValueError, match="activation must be a name"):
        nn.act_linear(jnp.tanh, down, x)
    with pytest.raises(ValueError, match="with 3"):
        nn.act_linear("silu", down, x, x, x)


def test_attention_linear_takes_joined_and_separate_heads():
    q, k, v = (draw(i, 2, 6, heads, 8) for i, heads in enumerate((4, 2, 2)))
    apart = nn.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=nnx.Rngs(0))
    joined = nn.Linear(32, 16, rngs=nnx.Rngs(0))
    joined.kernel[...] = apart.kernel[...].reshape(32, 16)
    foreign = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    foreign.kernel[...] = joined.kernel[...]

    @jit
    def run(q, k, v):
        layers = (apart, joined, foreign)
        ys = [nn.attention_linear(a, q, k, v, is_causal=True) for a in layers]
        o = dot_product_attention(q, k, v, is_causal=True, policy=BF16)
        return *ys, foreign(o.reshape(2, 6, 32))

    of_apart, of_joined, of_foreign, want = run(q, k, v)
    assert_same_bits(of_joined, of_apart)
    assert_same_bits(of_foreign, want)
    assert_sqnr(of_apart, want, db=25)


# Constructor options, and the inputs' shapes.
ATTENTIONS = {
    "self": ({}, [(2, 6, 32)], {}),
    "causal": ({"bias_init": nnx.initializers.ones}, [(2, 6, 32)], {"is_causal": True}),
    "grouped": ({"num_kv_heads": 2, "use_bias": False}, [(2, 6, 32)], {}),
    "keys": ({"in_kv_features": 24, "qkv_features": 64}, [(2, 6, 32), (2, 4, 24)], {}),
    "keys, values": ({}, [(2, 6, 32), (2, 4, 32), (2, 4, 32)], {}),
    "normal, two batch axes": ({"normalize_qk": True}, [(2, 3, 6, 32)], {}),
    "no batch": ({}, [(6, 32)], {}),
    "mask": ({"out_features": 16}, [(2, 6, 32)], {"mask": True}),
}  # fmt: skip


def attentions(options, shapes, call, policy, **more):
    theirs = nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), **options, **more)
    ours = nn.Attention(4, 32, policy=policy, rngs=nnx.Rngs(0), **options, **more)
    if "mask" in call:
        mask = jnp.tril(jnp.ones((6, 6), bool))[None, None]
        call = {"mask": jnp.broadcast_to(mask, (2, 4, 6, 6))}
    xs = [draw(i, *shape) for i, shape in enumerate(shapes)]
    return theirs, ours, xs, call


@named("case", ATTENTIONS)
def test_attention_has_flax_s_parameters_bits_and_values(case):
    theirs, ours, xs, call = attentions(*case, BF16)
    assert isinstance(ours, nnx.MultiHeadAttention)
    assert_same_bits(
        nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs))
    )
    args = nnx.state(theirs), *xs
    want = program(graded(theirs, decode=False, **call), *args)
    assert program(graded(ours, **call), *args) == want
    _, ours, xs, call = attentions(*case, FP8_ATTENTION)
    if call or len(xs) > 1 or "normalize_qk" in case[0]:
        assert_close(ours, theirs, *args, db=15, decode=False, **call)


@pytest.mark.usefixtures("optax_promotion")
def test_attention_keeps_one_set_of_codes_for_query_key_and_value():
    layer = nn.Attention(
        4,
        128,
        use_bias=False,
        policy=FP8_ATTENTION,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(layer)
    f = lambda state, x: jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)[1]
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)
    kept = jax.tree.leaves(jax.eval_shape(f, state, x))
    codes = [leaf for leaf in kept if leaf.dtype == jnp.uint8]
    assert sum(leaf.size for leaf in codes) == 4 * 2 * 64 * 128  # x, q, k and v
    floats = [leaf for leaf in kept if leaf.dtype != jnp.uint8]
    weights = sum(leaf.size for leaf in jax.tree.leaves(state))
    # Of each head's group; of x, the attention's result, and the four kernels.
    scales = 3 * 2 * 64 * 4 + 2 + 4
    assert sum(leaf.size for leaf in floats) == weights + scales


def test_decoding_and_dropout_are_flax_s_on_fp8_projections():
    how = {"dropout_rate": 0.5, "deterministic": True, "decode": False}
    theirs, ours, (x,), _ = attentions({}, [(2, 6, 32)], {}, DEFAULT, **how)
    drop = {"deterministic": False}

    def run(layer):
        graph, state = nnx.split(layer)
        layer = nnx.merge(graph, state)
        still, dropped = layer(x), layer(x, rngs=nnx.Rngs(1), **drop)
        layer.init_cache((2, 6, 32))
        steps = [layer(x[:, i : i + 1], decode=True) for i in range(2)]
        return still, dropped, *steps

    got, want = jit(lambda: (run(ours), run(theirs)))()
    for g, w in zip(got, want, strict=True):
        assert_sqnr(g, w, db=20)
    assert np.any(np.asarray(got[0]) != np.asarray(got[1]))


def test_an_attention_function_of_the_user_is_called():
    seen = []

    def attend(query, key, value, **how):
        seen.append(how["mask"])
        return value

    layer = nn.Attention(4, 32, attention_fn=attend, rngs=nnx.Rngs(0))
    assert jax.eval_shape(layer, draw(0, 2, 6, 32)).shape == (2, 6, 32)
    assert seen == [None]


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["bf16", "default"])
def test_rope_turns_queries_and_keys(policy):
    make = functools.partial(nn.Attention, 4, 32, policy=policy)
    turned, still = (make(rope_base=b, rngs=nnx.Rngs(0)) for b in (100.0, None))
    causal = {"is_causal": True}

    @jit
    def run(x):
        q, k, v = nn.norm_linear(None, [turned.query, turned.key, turned.value], x)
        q, k = (rope(a, base=100.0) for a in (q, k))
        want = nn.attention_linear(turned.out, q, k, v, **causal)
        moved = turned(x, positions=jnp.arange(3, 9), **causal)
        return turned(x, **causal), want, moved, still(x, **causal)

    got, want, moved, unturned = run(draw(0, 2, 6, 32))
    assert_same_bits(got, want)
    assert np.any(np.asarray(got) != np.asarray(unturned))
    assert_sqnr(moved, got, db=25)  # positions count by their differences


def test_packed_sequences_do_not_see_one_another():
    layer = nn.Attention(4, 32, policy=DEFAULT, rngs=nnx.Rngs(0))
    x = draw(0, 1, 6, 32)
    segments = jnp.asarray([[0, 0, 0, 0, 1, 1]])
    run = lambda x: (layer(x, query_segments=segments)[:, 4:], layer(x[:, 4:]))
    both, alone = jit(run)(x)
    assert_sqnr(both, alone, db=25)


def test_what_attention_has_not_is_refused_in_a_sentence():
    layer = nn.Attention(4, 32, rope_base=10.0, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2, 32))
    with pytest.raises(NotImplementedError, match="decode is set.*rope_base"):
        layer(x, decode=True)
    with pytest.raises(NotImplementedError, match="sow_weights is set"):
        layer(x, sow_weights=True)
    with pytest.raises(ValueError, match="inputs_v needs inputs_k"):
        layer(x, None, x)
    with pytest.raises(ValueError, match="positions are for RoPE"):
        nn.Attention(4, 32, rngs=nnx.Rngs(0))(x, positions=jnp.arange(2))
    plain = nn.Attention(4, 32, policy=BF16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="key_segments needs query_segments"):
        jax.eval_shape(lambda x: plain(x, key_segments=jnp.zeros((1, 2), jnp.int32)), x)
    with pytest.raises(ValueError, match="even size for RoPE"):
        nn.Attention(4, 12, rope_base=10.0, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="its dot_general is"):
        nn.Attention(4, 32, qkv_dot_general=lambda *a: None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="heads must have an even size"):
        rope(jnp.ones((1, 2, 1, 3)))


def test_rope_counts_positions_where_they_are_given():
    x = draw(0, 2, 5, 3, 8)
    whole = rope(jnp.pad(x, ((0, 0), (4, 0), (0, 0), (0, 0))))[:, 4:]
    positions = jnp.broadcast_to(jnp.arange(4, 9), (2, 5))
    assert_reordered(rope(x, positions), whole, 4, 4.0)
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    angle = np.arange(5)[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angle)[None, :, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    assert_reordered(rope(x), want, 16, 4.0)


def test_a_block_is_close_to_its_plain_self():
    make = functools.partial(nn.DecoderBlock, 32, 48, 4, num_kv_heads=2)
    plain, ours = make(policy=BF16, rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0))
    assert_close(ours, plain, nnx.state(plain), draw(0, 2, 6, 32), db=15)


def test_a_part_of_a_block_may_be_any_module():
    block = nn.DecoderBlock(32, 48, 4, head_dim=16, rngs=nnx.Rngs(0))
    block.mlp.down = Foreign(48, 32, rngs=nnx.Rngs(1))
    block.attention_norm = nnx.LayerNorm(32, rngs=nnx.Rngs(2))
    got = jit(graded(block))(nnx.state(block), draw(0, 2, 6, 32))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(got))
    assert block.attention.query.kernel.shape == (32, 4, 16)


def test_an_mlp_is_its_formula():
    layer = nn.MLP(32, 48, 16, activation="relu", policy=BF16, rngs=nnx.Rngs(0))
    x = draw(0, 3, 32)
    want = program(lambda x: layer.down(jax.nn.relu(layer.up(x))), x)
    assert program(lambda x: layer(x), x) == want


class Mixer(nnx.Module):
    """A block small enough to compile often."""

    def __init__(self, *, rngs):
        self.norm = nn.LayerNorm(32, rngs=rngs)
        self.mlp = nn.MLP(32, 48, rngs=rngs)

    def __call__(self, x):
        return self.mlp(x, norm=self.norm, residual=x)


def test_blocks_run_stacked_under_scan_and_remat():
    make = lambda key: Mixer(rngs=nnx.Rngs(key))
    blocks = nnx.vmap(make)(jax.random.split(jax.random.key(0), 2))
    graph, state = nnx.split(blocks)
    x = draw(0, 2, 6, 32)

    def loss(state, wrap):
        step = wrap(lambda x, one: (nnx.merge(graph, one)(x), None))
        return jnp.sum(jax.lax.scan(step, x, state)[0] ** 2)

    grad = lambda wrap: jax.grad(functools.partial(loss, wrap=wrap))
    wraps = (jax.checkpoint, lambda f: f)
    got, want = jit(lambda state: [grad(wrap)(state) for wrap in wraps])(state)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(g, w, 256, np.abs(w).max())


MESHES = {
    "tensor and data parallel": (AxisType.Auto, Mixer, P(None, "model")),
    "explicit, data parallel": (AxisType.Explicit, Mixer, P()),
}


@named("case", MESHES)
def test_blocks_run_on_eight_devices(case):
    kind, make, spec = case
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    graph, state = nnx.split(make(rngs=nnx.Rngs(0)))
    x = draw(0, 8, 6, 32)
    loss = lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)
    run = jax.value_and_grad(loss)
    want = jit(run)(state, x)
    put = lambda v: jax.device_put(v, NamedSharding(mesh, spec if v.ndim > 1 else P()))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = jax.block_until_ready(jit(run)(jax.tree.map(put, state), x))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.abs(w).max() > 1e-6:
            assert_sqnr(np.asarray(g), w, db=30)


def test_attention_takes_shardings_of_explicit_axes():
    mesh = jax.make_mesh(
        (2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    layer = nn.Attention(4, 32, rope_base=10.0, use_bias=False, rngs=nnx.Rngs(0))
    x = draw(0, 2, 6, 32)
    want = call(layer, x)
    graph, state = nnx.split(layer)
    spec = {"out": P("model")}
    with jax.set_mesh(mesh):
        placed = jax.tree.map_with_path(
            lambda path, v: jax.device_put(v, spec.get(path[0].key, P(None, "model"))),
            state,
        )
        run = jit(lambda s, x: nnx.merge(graph, s)(x, out_sharding=P()))
        got = jax.block_until_ready(run(placed, jax.device_put(x, P())))
    assert_sqnr(np.asarray(got), want, db=25)
