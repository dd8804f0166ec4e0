"""Attention against NumPy's: who sees whom, and in which form inputs are kept."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.attention import dot_product_attention, prepare, refuses
from coat_jax.policy import BF16, DEFAULT, Kept
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits, assert_sqnr

B, T, N, D = 2, 6, 4, 8
KEPT = {
    "itself": DEFAULT,
    "fp8": dataclasses.replace(DEFAULT, attention=Kept()),
    "fp8 in forward": dataclasses.replace(
        DEFAULT, attention=Kept(group=3, in_forward=True)
    ),
}
LOWER = np.tri(T, dtype=bool)
MASK = np.random.default_rng(9).random((B, 1, T, T)) < 0.6
BLIND = np.ones((1, 1, T, T), bool)
BLIND[..., 2, :] = False  # a query that sees nothing
SEGMENTS = np.array([[0, 0, 0, 1, 1, 2], [5, 5, 5, 5, 7, 7]], np.int32)
SAME = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])[:, None]


def case(options=(), allowed=None, heads=N, keys=T, bias=None):
    return dict(options), allowed, heads, keys, bias


CASES = {
    "all": case(),
    "causal": case({"is_causal": True}, LOWER),
    "grouped": case({"is_causal": True}, LOWER, heads=2),
    "one key head, scaled": case({"scale": 0.7}, heads=1),
    "mask": case({"mask": MASK}, MASK, heads=2),
    "bias": case({"is_causal": True}, LOWER, bias=(1, N, T, T)),
    "packed": case(
        {"query_segments": SEGMENTS, "is_causal": True}, SAME & LOWER, heads=2
    ),
    "packed and masked": case({"query_segments": SEGMENTS, "mask": MASK}, SAME & MASK),
    "cross": case(keys=9, heads=2),
    "cross causal": case({"is_causal": True}, np.tri(T, 9, dtype=bool), keys=9),
    "cross packed": case(
        {"query_segments": SEGMENTS, "key_segments": SEGMENTS[:, 1:]},
        SAME[..., 1:],
        keys=5,
    ),
    "blind": case({"mask": BLIND}, BLIND, bias=(B, 1, T, T)),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


def drawn(heads=N, keys=T, dtype=jnp.float32):
    shapes = [(B, T, N, D), (B, keys, heads, D), (B, keys, heads, D), (B, T, N, D)]
    return [jnp.asarray(draw(i, shape), dtype) for i, shape in enumerate(shapes)]


def arrays(options):
    known = (np.ndarray, np.generic)
    as_jax = lambda v: jnp.asarray(v) if isinstance(v, known) else v
    return {name: as_jax(v) for name, v in options.items()}


PAIRS = [(name, "fp8") for name in CASES]
PAIRS += [(name, "itself") for name in ("grouped", "bias", "cross packed", "blind")]
PAIRS += [(name, "fp8 in forward") for name in ("grouped", "bias", "cross packed")]


@pytest.mark.parametrize(("name", "kept"), PAIRS)
def test_values_and_gradients(name, kept):
    options, allowed, heads, keys, bias = CASES[name]
    policy, options = KEPT[kept], arrays(options)
    *qkv, g = drawn(heads, keys)
    params = [] if bias is None else [jnp.asarray(draw(8, bias))]
    f = lambda q, k, v, *bias: dot_product_attention(
        q, k, v, *bias, **options, policy=policy
    )
    got = value_and_gradients(f, (*qkv, *params), g)
    prologue = oracle.attention(allowed, options.get("scale"))
    (want,), dparams, dxs, _ = oracle.block(
        prologue, params or [None], qkv, None, [], [g], policy, policy.attention
    )
    for value, correct in zip(got, [want, *dxs, *dparams], strict=False):
        assert_computed(value, correct, n=D * keys)
    assert len(got) == 4 + len(params)


def test_a_query_that_sees_no_key_gets_a_mean_of_values():
    q, k, v, _ = drawn()
    f = jax.jit(dot_product_attention, static_argnames="policy")
    for policy in (BF16, *KEPT.values()):
        y = f(q, k, v, mask=jnp.asarray(BLIND), policy=policy)
        kept = policy.attention if policy.attention.in_forward else Kept(format=None)
        assert_computed(y[:, 2], oracle.stored(v, kept).mean(1), n=T)


# On a CPU jax.nn's own has no float16.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_plain_policy_is_jax_nn_bit_for_bit(dtype):
    *qkv, g = drawn(2, dtype=dtype)
    options = {"is_causal": True, "mask": jnp.asarray(MASK)}
    ours = functools.partial(dot_product_attention, **options, policy=BF16)
    theirs = functools.partial(jax.nn.dot_product_attention, **options)
    with jax.numpy_dtype_promotion("standard"):
        want = value_and_gradients(theirs, qkv, g)
        got = value_and_gradients(ours, qkv, g)
    assert_same_bits(got, want)
    # What keeps q, k and v themselves recomputes the same forward.
    again = functools.partial(dot_product_attention, **options, policy=DEFAULT)
    with jax.numpy_dtype_promotion("standard"):
        assert_same_bits(value_and_gradients(again, qkv, g)[0], got[0])


def test_narrow_inputs_keep_their_dtype_and_the_gradient_of_the_stored():
    *qkv, g = drawn(2, dtype=jnp.bfloat16)
    policy = KEPT["fp8"]
    f = functools.partial(dot_product_attention, is_causal=True, policy=policy)
    # JAX lowers the gradient of its own attention by promotion.
    with jax.numpy_dtype_promotion("standard"):
        got = value_and_gradients(f, qkv, g)
    assert {a.dtype for a in got} == {jnp.dtype(jnp.bfloat16)}
    _, _, dxs, _ = oracle.block(
        oracle.attention(LOWER), [None], qkv, None, [], [g], policy, policy.attention
    )
    # bfloat16 arithmetic inside: far above the 20 to 25 dB that FP8 itself reaches.
    for value, correct in zip(got[1:], dxs, strict=True):
        assert_sqnr(value, correct, db=35)


def test_one_sequence_needs_no_batch_axis():
    *qkv, g = drawn()
    f = functools.partial(dot_product_attention, is_causal=True, policy=KEPT["fp8"])
    one = value_and_gradients(f, [x[:1] for x in qkv], g[:1])
    bare = value_and_gradients(f, [x[0] for x in qkv], g[0])
    for a, b in zip(one, bare, strict=True):
        assert_computed(b, np.asarray(a)[0], n=D * T)


@pytest.mark.parametrize("policy", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_seen_by_those_who_see_the_key(policy, bad):
    q, k, v, g = drawn()
    k = k.at[0, 3, 1, 2].set(bad)
    f = functools.partial(dot_product_attention, is_causal=True, policy=policy)
    y, *grads = value_and_gradients(f, (q, k, v), g)
    assert np.isfinite(y[0, :3]).all()
    assert np.isfinite(y[1]).all()
    hurt = np.asarray(q)[0, 3:, 1, 2] > 0 if bad == np.inf else np.ones(3, bool)
    assert np.isnan(np.asarray(y)[0, 3:, 1][hurt]).all()
    assert np.isnan(np.concatenate([np.ravel(d[0]) for d in grads])).any()


def test_segments_of_keys_need_those_of_queries():
    q, k, v, _ = drawn()
    with pytest.raises(
        ValueError, match="key_segments needs query_segments; give both"
    ):
        dot_product_attention(q, k, v, key_segments=jnp.asarray(SEGMENTS))


def test_cudnn_refuses_in_words_and_never_falls_back():
    q, k, v, _ = drawn()
    with pytest.raises(
        NotImplementedError, match="cuDNN refuses: it takes bfloat16 and"
    ):
        dot_product_attention(q, k, v, implementation="cudnn")
    like = lambda T, D: jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16)
    assert refuses(like(6, 128), like(6, 128)) is None
    assert "multiple of 8" in refuses(like(6, 20), like(6, 20))
    assert "got 136" in refuses(like(6, 136), like(6, 136))
    assert "must be even, got 7 and 6" in refuses(like(7, 64), like(6, 64))


def test_jax_itself_refuses_cudnn_a_gradient_of_an_odd_length(h200_compile):
    """Why `refuses` does; should JAX ever take it, this fails and `refuses` may."""

    def loss(q):
        o = jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
        return jnp.sum(o.astype(jnp.float32))

    odd = jax.ShapeDtypeStruct((B, 49, N, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="sequence length"):
        h200_compile(jax.grad(loss), odd)


@pytest.mark.parametrize("shape", [(B, 1, 1, 64), (1, 1, 64, 1), (B, N, 64, 64)])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_cudnn_takes_masks_and_biases_that_broadcast(h200_compile, name, shape):
    """JAX hands them to cuDNN as they are, and refuses a length of 1."""
    dtype = {"mask": jnp.bool, "bias": jnp.bfloat16}[name]

    def loss(q, other):
        o = dot_product_attention(q, q, q, implementation="cudnn", **{name: other})
        return jnp.sum(o.astype(jnp.float32))

    q = jax.ShapeDtypeStruct((B, 64, N, 64), jnp.bfloat16)
    compiled = h200_compile(jax.grad(loss), q, jax.ShapeDtypeStruct(shape, dtype))
    assert "__cudnn$fmha" in compiled.as_text()


def test_only_cudnn_keeps_what_a_policy_without_a_format_asks_for():
    q = jnp.ones((B, T, N, D), jnp.bfloat16)
    cudnn = prepare(q, q, implementation="cudnn")
    assert cudnn.keeps_itself(DEFAULT)
    assert not cudnn.keeps_itself(KEPT["fp8"])
    assert not prepare(q, q, implementation="xla").keeps_itself(DEFAULT)
