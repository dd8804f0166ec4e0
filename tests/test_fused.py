"""Fused blocks: the plain composition's bits, or the gradient of what they keep."""

import dataclasses
import functools
import inspect

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import fused, norms
from coat_jax.formats import E5M2
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept, Operand, Policy
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

_VECTOR = Operand(scaling="vector")
POLICIES = {
    "default": DEFAULT,
    "paper": PAPER,
    "vector": Policy(x=_VECTOR, w=_VECTOR, g=_VECTOR, kept=Kept(group=7)),
    "kept whole": dataclasses.replace(DEFAULT, kept=Kept(format=None)),
    "only kept": dataclasses.replace(BF16, kept=Kept(format=E5M2, group=16)),
}
H, F = 48, 40


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, gs):
    y, pull = jax.vjp(f, *args)
    return y, *pull(gs)


def drawn(*shapes, dtype=jnp.float32, seed=0):
    return [jnp.asarray(draw(seed + i, shape), dtype) for i, shape in enumerate(shapes)]


def dot(x, w, b=None):
    y = lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    return (
        y if b is None else y + b.astype(x.dtype).reshape((1,) * (y.ndim - 1) + b.shape)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_plain_policy_is_the_ordinary_composition_bit_for_bit(dtype):
    x, r, g = drawn((2, 5, H), (2, 5, H), (2, 5, H), dtype=dtype)
    scale, gate, up, down, b = drawn((H,), (H, F), (H, F), (F, H), (F,), seed=3)
    q, k, v = drawn(*[(2, 5, 6, 8)] * 3, dtype=dtype, seed=9)
    out = jnp.asarray(draw(8, (6, 8, H)))
    plain = {"policy": BF16}

    def ours(x, r, scale, gate, up, down, b, q, k, v, out):
        how = {"norm": "rms", "scale": scale, "residual": r, **plain}
        y = fused.gated_mlp(x, gate, up, down, (b, None, None), **how)
        z = fused.mlp(x, up, down, (b, None), norm="layer", **plain)
        a = fused.attention_linear(q, k, v, out, is_causal=True, residual=r, **plain)
        return y, z, a

    def theirs(x, r, scale, gate, up, down, b, q, k, v, out):
        h = norms.rms_norm(x, scale, **plain)
        y = r + dot(jax.nn.silu(dot(h, gate, b)) * dot(h, up), down)
        h = norms.layer_norm(x, **plain)
        z = dot(jax.nn.gelu(dot(h, up, b)), down)
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        axes = (((2, 3), (0, 1)), ((), ()))
        return y, z, r + lax.dot_general(o, out.astype(o.dtype), axes)

    args = (x, r, scale, gate, up, down, b, q, k, v, out)
    # The gradient of JAX's own attention promotes bfloat16.
    with jax.numpy_dtype_promotion("standard"):
        same = [value_and_gradients(f, args, (g, g, g)) for f in (ours, theirs)]
    assert_same_bits(*same)


@pytest.mark.parametrize(
    ("norm", "name"),
    [("rms", name) for name in POLICIES] + [("layer", "default"), ("layer", "paper")],
)
def test_norm_linear_with_two_kernels(norm, name):
    policy = POLICIES[name]
    x, w1, w2, scale, b2 = drawn((2, 9, H), (H, 20), (H, 3, 4), (H,), (3, 4))
    bias = drawn((H,), seed=7) if norm == "layer" else []
    gs = drawn((2, 9, 20), (2, 9, 3, 4), seed=11)

    def f(x, w1, w2, b2, scale, *bias):
        how = {"norm": norm, "scale": scale, "bias": bias[0] if bias else None}
        return fused.norm_linear(
            x, [w1, w2], [None, b2], **how, epsilon=1e-3, policy=policy
        )

    (y1, y2), dx, dw1, dw2, db2, *dparams = value_and_gradients(
        f, (x, w1, w2, b2, scale, *bias), gs
    )
    prologue = oracle.norm(norm, 1e-3)
    flat = [w1, w2.reshape(H, 12)], [gs[0], gs[1].reshape(2, 9, 12)]
    ys, wanted, (want_dx,), dws = oracle.block(
        prologue, [scale, *(bias or [None])], [x], "bth,hn->btn", *flat, policy
    )
    assert_computed(y1, ys[0], n=H)
    assert_computed(y2.reshape(2, 9, 12), ys[1] + np.asarray(b2).reshape(12), n=H)
    assert_computed(dx, want_dx, n=H * 32)
    assert_computed(dw1, dws[0], n=H * 18)
    assert_computed(dw2.reshape(H, 12), dws[1], n=H * 18)
    assert_computed(db2, np.asarray(gs[1], np.float64).sum((0, 1)), n=18)
    for got, correct in zip(dparams, wanted, strict=False):
        assert_computed(got, correct, n=18 * 32)


@pytest.mark.parametrize(
    ("activation", "name"),
    [("silu", name) for name in POLICIES]
    + [("gelu_tanh", "paper"), ("relu_squared", "default")],
)
def test_act_linear_alone_and_gated(activation, name):
    policy = POLICIES[name]
    gated = activation == "silu"
    xs = drawn(*[(2, 9, F)] * (1 + gated))
    w, b, r, g = drawn((F, 24), (24,), (2, 9, 24), (2, 9, 24), seed=5)
    f = lambda xs, w, b, r: fused.act_linear(
        xs, w, b, activation=activation, policy=policy, residual=r
    )
    y, dxs, dw, db, dr = value_and_gradients(f, (xs, w, b, r), g)
    (want,), _, want_dxs, (want_dw,) = oracle.block(
        oracle.activation(activation), [], xs, "btf,fn->btn", [w], [g], policy
    )
    assert_computed(y, want + np.asarray(b) + np.asarray(r), n=F)
    for got, correct in zip(dxs, want_dxs, strict=True):
        assert_computed(got, correct, n=F)
    assert_computed(dw, want_dw, n=F)
    assert_computed(db, np.asarray(g, np.float64).sum((0, 1)), n=18)
    assert_same_bits(dr, g)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("default", Kept(format=None)),
        ("default", Kept()),
        ("paper", Kept(in_forward=True)),
    ],
)
def test_attention_linear(name, kept):
    policy = dataclasses.replace(POLICIES[name], attention=kept)
    q, k, v = drawn((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    w, b, g = drawn((4, 8, 24), (24,), (2, 5, 24), seed=5)
    mask = np.tri(5, dtype=bool)
    f = lambda q, k, v, w, b: fused.attention_linear(
        q, k, v, w, b, is_causal=True, policy=policy
    )
    y, dq, dk, dv, dw, db = value_and_gradients(f, (q, k, v, w, b), g)
    (want,), _, dxs, (want_dw,) = oracle.block(
        oracle.attention(mask),
        [None],
        [q, k, v],
        "btnd,ndh->bth",
        [w],
        [g],
        policy,
        kept,
    )
    assert_computed(y, want + np.asarray(b), n=32)
    for got, correct in zip((dq, dk, dv), dxs, strict=True):
        assert_computed(got, correct, n=32 * 5)
    assert_computed(dw, want_dw, n=40)
    assert_computed(db, np.asarray(g, np.float64).sum((0, 1)), n=10)


def test_a_gated_mlp_is_its_two_halves():
    x, gate, up, down, b1, g = drawn((7, H), (H, F), (H, F), (F, H), (F,), (7, H))
    args, how = (x, gate, up, down, b1), {"policy": PAPER}

    def whole(x, gate, up, down, b1):
        return fused.gated_mlp(x, gate, up, down, (b1, None, None), **how, epsilon=1e-2)

    def halves(x, gate, up, down, b1):
        pair = fused.norm_linear(x, [gate, up], [b1, None], **how, epsilon=1e-2)
        return fused.act_linear(pair, down, activation="silu", **how)

    same = [value_and_gradients(f, args, g) for f in (whole, halves)]
    assert_same_bits(*same)


def test_without_a_norm_the_input_is_the_operand():
    x, w1, w2, g1, g2 = drawn((11, H), (H, 20), (H, 12), (11, 20), (11, 12))
    f = lambda x, w1, w2: fused.norm_linear(x, [w1, w2], norm=None)
    (y1, y2), dx, dw1, dw2 = value_and_gradients(f, (x, w1, w2), [g1, g2])
    first, second = (
        oracle.linear("th,hn->tn", x, w, g, DEFAULT) for w, g in ((w1, g1), (w2, g2))
    )
    for got, want in zip(
        (y1, y2, dw1, dw2), (first[0], second[0], first[2], second[2]), strict=True
    ):
        assert_computed(got, want, n=H)
    assert_computed(dx, first[1].value + second[1].value, n=32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_blocks_have_the_gradient_of_the_stored_input(dtype):
    x, w, g = drawn((33, 96), (96, 64), (33, 64), dtype=dtype)
    scale = jnp.asarray(draw(5, (96,)), dtype)
    f = lambda x, w, scale: fused.norm_linear(x, [w], scale=scale)
    got = value_and_gradients(f, (x, w, scale), [g])
    ys, (dscale, _), (dx,), (dw,) = oracle.block(
        oracle.norm("rms", 1e-6), [scale, None], [x], "th,hn->tn", [w], [g], DEFAULT
    )
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    # A code at a tie may fall either way: 40 dB is far above what FP8 itself reaches.
    pairs = zip((got[0][0], *got[1:]), (ys[0].value, dx, dw.value, dscale), strict=True)
    for value, correct in pairs:
        assert_sqnr(value, correct, db=40)


X, W = jnp.ones((2, 8)), jnp.ones((8, 4))


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "default"])
@pytest.mark.parametrize(
    ("name", "args", "options", "words"),
    [
        ("norm_linear", (X, [W.mT]), {}, "norm_linear: kernel must begin with x's"),
        ("norm_linear", (X, [W], [X[0]]), {}, "norm_linear: bias must have kernel's"),
        ("norm_linear", (X, [W], [None, None]), {}, "zip"),
        ("norm_linear", (X, [W]), {"norm": "batch"}, "rms, layer or None, got 'batch'"),
        ("norm_linear", (X, [W]), {"bias": X[0]}, "norm='rms' has no bias"),
        ("norm_linear", (X, [W]), {"norm": None, "scale": X[0]}, "None has no scale"),
        ("norm_linear", (X, [W]), {"scale": W[0]}, "scale must have one element"),
        ("act_linear", ([X, W], W), {"activation": "silu"}, "inputs must be .* or"),
        ("act_linear", ([X] * 3, W), {"activation": "silu"}, r"\[x\] or \[gate, up\]"),
        ("act_linear", ([X], W), {"activation": "swish"}, "got 'swish'"),
        ("attention_linear", (jnp.ones((3, 2, 8)),) * 3 + (W,), {}, "last 2 axes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(name, args, options, words, policy):
    with pytest.raises((ValueError, TypeError), match=f"{words}|Type-check"):
        inspect.unwrap(getattr(fused, name))(*args, **options, policy=policy)
