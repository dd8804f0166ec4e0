"""Linen layers and blocks: Flax's parameters and bits, and the NNX modules' values."""

import functools

from flax import nnx
import flax.linen
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import linen, nn
from coat_jax.policy import BF16, DEFAULT, PAPER
from tests.helpers import assert_same_bits, assert_sqnr

LAYERS = {
    "Dense": ("Dense", (48,), {}, (2, 5, 32)),
    "Dense, no bias": ("Dense", (48,), {"use_bias": False}, (5, 32)),
    "DenseGeneral": ("DenseGeneral", ((4, 12),), {"axis": (1, -1)}, (3, 4, 5, 8)),
    "DenseGeneral, batch": ("DenseGeneral", (24,), {"batch_dims": 0}, (3, 5, 32)),
    "Einsum": ("Einsum", ((4, 32, 8), "...ta,hab->...thb"), {}, (2, 5, 32)),
    "Conv": ("Conv", (24, (3, 3)), {"padding": "CIRCULAR"}, (2, 6, 6, 16)),
    "Conv, 1 x 1": ("Conv", (24, (1, 1)), {"use_bias": False}, (2, 4, 4, 32)),
    "RMSNorm": ("RMSNorm", (), {}, (2, 5, 32)),
    "LayerNorm": ("LayerNorm", (), {"epsilon": 1e-3}, (2, 5, 32)),
    "LayerNorm, no bias": ("LayerNorm", (), {"use_bias": False}, (5, 32)),
    "Attention": ("Attention", (4,), {}, (2, 6, 32)),
    "Attention, normal": ("Attention", (4,), {"normalize_qk": True}, (2, 6, 32)),
}
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)
pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def pair(layer, policy, **options):
    name, args, own, _ = layer
    flax_name = "MultiHeadDotProductAttention" if name == "Attention" else name
    options = own | options
    theirs = getattr(flax.linen, flax_name)(*args, **options)
    return theirs, getattr(linen, name)(*args, policy=policy, **options)


def graded(module, **how):
    def run(params, x):
        y, pull = jax.vjp(lambda p, x: module.apply(p, x, **how), params, x)
        return y, pull(draw(2, *y.shape, dtype=y.dtype))

    return run


@named("layer", LAYERS)
def test_parameters_and_plain_programs_are_flax_s(layer):
    """Initial values of the FP8 layer too, which declares its own parameters."""
    x = draw(0, *layer[3])
    theirs, plain = pair(layer, BF16)
    _, ours = pair(layer, DEFAULT)
    key = jax.random.key(3)
    want, got = jit(lambda x: (theirs.init(key, x), ours.init(key, x)))(x)
    assert_same_bits(got, want)
    text = lambda module: jax.jit(graded(module)).lower(want, x).as_text()
    assert text(plain) == text(theirs)


@named("layer", {n: v for n, v in LAYERS.items() if "no" not in n})
def test_an_fp8_layer_is_close_to_flax_s(layer):
    x = draw(0, *layer[3])
    theirs, ours = pair(layer, DEFAULT)

    @jit
    def run(x):
        params = jax.tree.map(
            lambda v: v + 0.1 * draw(v.size, *v.shape),
            theirs.init(jax.random.key(3), x),
        )
        return graded(ours)(params, x), graded(theirs)(params, x)

    got, want = map(jax.tree.leaves, run(x))
    assert any(np.any(g != w) for g, w in zip(got, want, strict=True))
    for g, w in zip(got, want, strict=True):
        if np.abs(w).max() > 1e-4:
            assert_sqnr(g, w, db=15)


@pytest.mark.parametrize("name", ["Dense", "Conv", "LayerNorm"])
def test_a_layer_in_bfloat16_returns_it(name):
    x = draw(0, *LAYERS[name][3])
    theirs, ours = pair(LAYERS[name], PAPER, dtype=jnp.bfloat16)
    of = lambda module: jax.eval_shape(
        lambda x: graded(module)(theirs.init(jax.random.key(0), x), x), x
    )
    assert jax.tree.map(str, of(ours)) == jax.tree.map(str, of(theirs))


def test_partitioned_parameters_stay_boxed():
    box = flax.linen.with_partitioning(flax.linen.initializers.ones, ("x", None))
    for layer in (LAYERS["Dense"], LAYERS["DenseGeneral, batch"]):
        x = jnp.ones(layer[3])
        theirs, ours = pair(layer, DEFAULT, kernel_init=box)
        init = lambda module, x=x: jax.eval_shape(module.init, jax.random.key(0), x)
        assert jax.tree.structure(init(ours)) == jax.tree.structure(init(theirs))


REFUSED = {
    "dot_general": ("Dense", {"dot_general": lambda *a: None}),
    "precision": ("Conv", {"precision": "highest"}),
    "promote_dtype": ("DenseGeneral", {"promote_dtype": lambda *a, dtype: a}),
    "reduction_axes": ("RMSNorm", {"reduction_axes": (0, 1)}),
    "use_fast_variance": ("LayerNorm", {"use_fast_variance": False}),
    "attention_fn": ("Attention", {"attention_fn": lambda *a: None}),
    "decode": ("Attention", {"decode": True}),
}


@named("case", REFUSED)
def test_what_contradicts_a_policy_is_refused(case):
    name, options = case
    _, ours = pair(LAYERS[name], DEFAULT, **options)
    with pytest.raises(NotImplementedError, match=f"{name}: its {next(iter(options))}"):
        jax.eval_shape(ours.init, jax.random.key(0), draw(0, *LAYERS[name][3]))


def test_what_attention_has_not_is_refused():
    init = lambda layer, *args, **how: jax.eval_shape(
        lambda x: layer.init(jax.random.key(0), x, *args, **how), jnp.ones((1, 2, 32))
    )
    with pytest.raises(NotImplementedError, match="Attention: dropout"):
        init(linen.Attention(4, dropout_rate=0.5), deterministic=False)
    with pytest.raises(NotImplementedError, match="Attention: dropout"):
        init(linen.Attention(4), sow_weights=True)
    with pytest.raises(ValueError, match="inputs_v needs inputs_k"):
        init(linen.Attention(4), None, jnp.ones((1, 2, 32)))
    with pytest.raises(ValueError, match="num_heads must divide"):
        init(linen.Attention(4, num_kv_heads=3))
    init(linen.Attention(4, dropout_rate=0.5), deterministic=True)


def test_a_masked_norm_is_flax_s():
    x, mask = draw(0, 2, 32), draw(1, 2, 32) > 0
    theirs, ours = pair(LAYERS["RMSNorm"], DEFAULT)
    params = theirs.init(jax.random.key(0), x)
    run = lambda m: jax.jit(lambda x: m.apply(params, x, mask=mask)).lower(x).as_text()
    assert run(ours) == run(theirs)


BLOCKS = {
    "decoder": ("DecoderBlock", (48, 4), {"num_kv_heads": 2, "head_dim": 16}),
    "encoder": ("EncoderBlock", (48, 4), {}),
}


@named("case", BLOCKS)
def test_blocks_are_the_nnx_ones_with_other_clothes(case):
    """NNX's parameters, renamed by nothing, give NNX's values."""
    name, args, options = case
    module = getattr(nn, name)(32, *args, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(module)
    params = {"params": nnx.to_pure_dict(state)}
    block = getattr(linen, name)(*args, **options)
    x = draw(0, 2, 6, 32)
    shapes = lambda tree: jax.tree.map(lambda v: (v.shape, v.dtype), tree)
    assert shapes(jax.eval_shape(block.init, jax.random.key(0), x)) == shapes(params)
    run = lambda x: (
        block.apply(params, x),
        nnx.merge(graph, state)(x),
        block.copy(policy=BF16).apply(params, x),
    )
    got, want, plain = jit(run)(x)
    assert_same_bits(got, want)
    assert assert_sqnr(got, plain, db=20) < 60


def test_a_wider_residual_stream_stays_wide():
    for layer in (
        linen.MLP(48, dtype=jnp.bfloat16),
        linen.GatedMLP(48, dtype=jnp.bfloat16),
    ):
        x = jnp.ones((2, 32))
        run = lambda x, layer=layer: layer.init_with_output(jax.random.key(0), x, x)[0]
        assert jax.eval_shape(run, x).dtype == jnp.float32


def test_keys_and_values_of_their_own():
    layer = linen.Attention(4, num_kv_heads=2, rope_base=100.0)
    x, k, v = (draw(i, 2, n, 32) for i, n in enumerate((6, 4, 4)))
    mask = jnp.ones((2, 1, 6, 4), bool)

    @jit
    def run(x, k, v):
        params = layer.init(jax.random.key(0), x)
        given = layer.apply(params, x, k, k, mask=mask)
        return given, layer.apply(params, x, k), layer.apply(params, x, k, v)

    given, alone, other = run(x, k, v)
    assert_sqnr(given, alone, db=25)
    assert np.any(np.asarray(other) != np.asarray(given))
