"""What every layer promises: what it keeps, and how it lives under transforms."""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import activations, attention, fused, linear, norms
from coat_jax.formats import of_dtype
from coat_jax.policy import DEFAULT, PAPER, Kept, Operand
from coat_jax.residuals import save_fp8
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.once

T, H = 6, 32
FULL = dataclasses.replace(DEFAULT, kept=Kept(group=16), attention=Kept(group=8))
_ATTENTION = dataclasses.replace(PAPER, attention=Kept(group=8, in_forward=True))
POLICIES = {"fp8": FULL, "paper": _ATTENTION}


def heads(x, n=2):
    return x.reshape(*x.shape[:-1], n, -1)


# Each: f(policy, x, params) -> an array like x, its parameters, and what it keeps: the
# number of codes and of scales.
def _linear(policy, x, p):
    return linear.linear(x, p["w"], p["b"], policy=policy, residual=x)


def _norm(policy, x, p):
    return norms.layer_norm(x, p["b"], p["b2"], policy=policy)


def _silu(policy, x, p):
    del p
    return activations.silu(x, policy=policy)


def _gated(policy, x, p):
    del p
    return activations.gated(x, x[..., ::-1], policy=policy)


def _norm_linear(policy, x, p):
    q, k = fused.norm_linear(x, [p["w"], p["w2"]], scale=p["b"], policy=policy)
    return q + k


def _gated_mlp(policy, x, p):
    return fused.gated_mlp(
        x, p["up"], p["up2"], p["down"], scale=p["b"], policy=policy, residual=x
    )


def _attend(policy, x, p):
    del p
    q, k, v = heads(x), heads(x[..., ::-1]), heads(-x)
    y = attention.dot_product_attention(q, k, v, is_causal=True, policy=policy)
    return y.reshape(x.shape)


def _attend_linear(policy, x, p):
    q, k, v = heads(x), heads(x[..., ::-1]), heads(-x)
    segments = jnp.arange(T) // 4
    return fused.attention_linear(
        q, k, v, p["out"], p["b"], query_segments=segments, policy=policy, residual=x
    )


# The function, the codes it keeps, and its scales: of groups, of h, of kernels.
LAYERS = {
    "linear": (_linear, T * H, 1 + 1 + 0),
    "norm": (_norm, T * H, T * H // 16),
    "silu": (_silu, T * H, T * H // 16),
    "gated": (_gated, 2 * T * H, 2 * T * H // 16),
    "norm_linear": (_norm_linear, T * H, T * H // 16 + 1 + 2),
    "gated_mlp": (_gated_mlp, T * (H + 2 * 48), T * (H + 2 * 48) // 16 + 2 + 3),
    "attention": (_attend, 3 * T * H, 3 * T * H // 8),
    "attention_linear": (_attend_linear, 3 * T * H, 3 * T * H // 8 + 1 + 1),
}
SHAPES = {
    "w": (H, H), "w2": (H, H), "b": (H,), "b2": (H,), "up": (H, 48), "up2": (H, 48),
    "down": (48, H), "out": (2, H // 2, H),
}  # fmt: skip
BOTH = [(layer, "fp8") for layer in LAYERS] + [("norm_linear", "paper")]
some_layers = pytest.mark.parametrize("layer", ["linear", "norm_linear"])


def params_of(dtype=jnp.float32, stack=()):
    draws = {n: draw(i, (*stack, *s)) for i, (n, s) in enumerate(SHAPES.items())}
    return {n: jnp.asarray(a / 6, dtype) for n, a in draws.items()}


def inputs(dtype=jnp.float32, shape=(T, H)):
    return jnp.asarray(draw(20, shape), dtype), jnp.asarray(draw(21, shape), dtype)


def pulled(f, x, p, g):
    y, pull = jax.vjp(f, x, p)
    return y, *pull(g)


def kept(f, x, p):
    """What f's forward hands to its backward, parameters and constants apart."""
    forward = lambda x, p: jax.tree.leaves(jax.vjp(f, x, p)[1])
    jaxpr = jax.make_jaxpr(forward)(x, p).jaxpr
    known = {id(v) for v in (*jaxpr.invars[1:], *jaxpr.constvars)}
    found = {id(v): v.aval for v in jaxpr.outvars if not hasattr(v, "val")}
    avals = [aval for key, aval in found.items() if key not in known]
    return [a for a in avals if a.dtype != jax.dtypes.float0]


def count(avals, dtype):
    return sum(a.size for a in avals if a.dtype == dtype)


ALL = [(*both, stacked) for both in BOTH for stacked in (False, True)]


@pytest.mark.parametrize(("layer", "policy", "stacked"), ALL)
def test_only_codes_and_scales_are_kept(layer, policy, stacked):
    f, codes, scales = LAYERS[layer]
    one = functools.partial(f, POLICIES[policy])
    scanned = lambda x, p: lax.scan(lambda x, p: (one(x, p), None), x, p)[0]
    x, _ = inputs(jnp.bfloat16)
    layers, f = (3, scanned) if stacked else (1, one)
    found = kept(f, x, params_of(stack=(3,) * stacked))
    assert count(found, jnp.uint8) == layers * codes
    assert count(found, jnp.float32) == layers * scales
    rest = [a for a in found if a.dtype not in (jnp.uint8, jnp.float32)]
    # Beside them: a mask of segments, never a float array.
    assert not [a for a in rest if jnp.issubdtype(a.dtype, jnp.floating)]


def test_one_scale_a_row_and_a_column_is_kept_with_vector_scaling():
    vector = dataclasses.replace(FULL, x=Operand(scaling="vector"))
    found = kept(functools.partial(_linear, vector), inputs()[0], params_of())
    assert count(found, jnp.uint8) == T * H
    assert count(found, jnp.float32) == H + 1  # of dw = x^T g's operand, and of w


def test_whole_inputs_are_kept_by_reference_where_no_format_is_named():
    off = dataclasses.replace(FULL, kept=Kept(format=None))
    x, _ = inputs(jnp.bfloat16)
    found = kept(functools.partial(_norm_linear, off), x, params_of())
    whole, *scales = sorted(found, key=lambda a: -a.size)
    assert (whole.shape, whole.dtype) == (x.shape, x.dtype)
    assert [a.size for a in scales] == [1, 1, 1]  # of h and of the kernels


@pytest.mark.parametrize(
    ("layer", "policy"),
    [
        ("linear", "fp8"),
        ("norm", "fp8"),
        ("norm_linear", "paper"),
        ("attention", "fp8"),
    ],
)
def test_remat_changes_no_bit_in_float32_under_jit(layer, policy):
    f = functools.partial(LAYERS[layer][0], POLICIES[policy])
    x, g = inputs()
    forms = [f, jax.checkpoint(f), jax.checkpoint(f, policy=save_fp8)]
    step = jax.jit(pulled, static_argnums=0)
    want, *others = [step(form, x, params_of(), g) for form in forms]
    for got in others:
        assert_same_bits(got, want)


def test_remat_of_narrow_layers():
    f = functools.partial(_silu, FULL)
    (x, g), p = inputs(jnp.bfloat16), params_of(jnp.bfloat16)
    forms = [f, jax.checkpoint(f), jax.checkpoint(f, policy=save_fp8)]
    want, *others = [pulled(form, x, p, g) for form in forms]
    for got in others:  # not jitted: the same operations, one by one
        assert_same_bits(got, want)
    jitted = [jax.jit(pulled, static_argnums=0)(form, x, p, g) for form in forms]
    for got in jitted[1:]:
        for a, b in zip(*map(jax.tree.leaves, (got, jitted[0])), strict=True):
            assert_computed(a, np.asarray(b, np.float64), n=H, roundings=2)


def encodings(jaxpr):
    """How many values a jaxpr rounds to FP8, in all that it calls."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            found += of_dtype(eqn.params["new_dtype"]) is not None
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            found += encodings(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("layer", ["linear", "silu", "norm_linear"])
def test_the_exported_policy_saves_what_it_says(layer):
    f, codes, scales = LAYERS[layer]
    f = functools.partial(f, FULL)
    x, g = inputs()
    saving = jax.checkpoint(f, policy=save_fp8)
    found = kept(saving, x, params_of())
    assert count(found, jnp.uint8) == codes
    # A residual connection's or a recomputed forward's input is kept beside them.
    assert count(found, jnp.float32) in (scales, scales + x.size)

    def backward(form):
        _, pull = jax.vjp(form, x, params_of())
        return encodings(jax.make_jaxpr(pull)(g).jaxpr)

    plain, saved, whole = map(backward, (f, saving, jax.checkpoint(f)))
    assert saved < whole
    assert plain <= saved


@some_layers
def test_vmap_is_a_loop(layer):
    f = functools.partial(LAYERS[layer][0], FULL)
    (x, g), p = inputs(shape=(3, T, H)), params_of()
    step = functools.partial(pulled, f)
    got = jax.jit(jax.vmap(step, in_axes=(0, None, 0)))(x, p, g)
    one = jax.jit(step)
    want = [one(x[i], p, g[i]) for i in range(3)]
    for i in range(3):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want[i]), strict=True):
            assert_computed(a[i], np.asarray(b, np.float64), n=64)


def test_scan_over_layers_is_a_loop():
    f = functools.partial(_norm_linear, FULL)
    (x, g), p = inputs(), params_of(stack=(2,))
    scanned = lambda x, p: lax.scan(lambda x, p: (f(x, p), None), x, p)[0]
    loop = lambda x, p: f(f(x, _layer(p, 0)), _layer(p, 1))
    forms = [
        jax.jit(functools.partial(pulled, form))(x, p, g) for form in (scanned, loop)
    ]
    for a, b in zip(*map(jax.tree.leaves, forms), strict=True):
        assert_computed(a, np.asarray(b, np.float64), n=64)


def _layer(p, i):
    return jax.tree.map(lambda a: a[i], p)


@pytest.mark.parametrize(("layer", "policy"), BOTH)
def test_evaluation_is_training_traced_once_and_shows_nan(layer, policy):
    traced = []

    def f(x, p):
        traced.append(1)
        return LAYERS[layer][0](POLICIES[policy], x, p)

    (x, g), p = inputs(), params_of()
    train = jax.jit(lambda x, p, g: pulled(f, x, p, g))
    y, *_ = train(x, p, g)
    train(x + 1, p, g)
    assert len(traced) == 1
    assert_same_bits(jax.jit(f)(x, p), y)
    # NaN is seen in its token, and in a gradient.
    y, *grads = train(x.at[4, 5].set(jnp.nan), p, g)
    assert np.isnan(np.asarray(y)[4]).any()
    assert any(np.isnan(np.asarray(d)).any() for d in jax.tree.leaves(grads))


@pytest.mark.parametrize("layer", ["linear", "silu"])
def test_forward_mode_is_refused_and_second_derivatives_are_finite(layer):
    f = functools.partial(LAYERS[layer][0], FULL)
    (x, g), p = inputs(), params_of()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: f(x, p), (x,), (g,))
    slope = lambda x: jnp.vdot(jax.grad(lambda x: jnp.vdot(f(x, p), f(x, p)))(x), g)
    assert np.isfinite(jax.jit(jax.grad(slope))(x)).all()
