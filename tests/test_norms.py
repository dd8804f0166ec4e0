"""Norms: Flax's bits under the plain policy, else the gradient at the stored value."""

import dataclasses
import functools
import inspect

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import norms
from coat_jax.formats import E5M2
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

POLICIES = {
    "default": DEFAULT,
    "paper": PAPER,
    "e5m2": dataclasses.replace(DEFAULT, kept=Kept(format=E5M2, group=7)),
    "kept whole": dataclasses.replace(DEFAULT, kept=Kept(format=None)),
}
NORMS = {"rms": norms.rms_norm, "layer": norms.layer_norm}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


@pytest.mark.parametrize(
    ("dtype", "affine"),
    [
        (jnp.float32, True),
        (jnp.bfloat16, True),
        (jnp.float16, True),
        (jnp.bfloat16, False),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_the_plain_policy_is_flax_bit_for_bit(norm, affine, dtype):
    x, g = (jnp.asarray(draw(i, (3, 5, 33)), dtype) for i in range(2))
    make = nnx.RMSNorm if norm == "rms" else nnx.LayerNorm
    options = {"dtype": dtype, "epsilon": 1e-3, "use_scale": affine}
    if norm == "layer":
        options["use_bias"] = affine
    graph, state = nnx.split(make(33, rngs=nnx.Rngs(0), **options))
    names = sorted(state)  # float32 parameters: bias, scale
    params = [jnp.asarray(draw(2 + i, (33,))) for i, _ in enumerate(names)]

    def flax(x, *params):
        given = {n: nnx.Param(p) for n, p in zip(names, params, strict=True)}
        return nnx.merge(graph, nnx.State(given))(x)

    def ours(x, *params):
        given = dict(zip(names, params, strict=True))
        return NORMS[norm](x, **given, epsilon=1e-3, policy=BF16)

    with jax.numpy_dtype_promotion("standard"):
        want = value_and_gradients(flax, (x, *params), g)
    assert_same_bits(value_and_gradients(ours, (x, *params), g), want)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients_are_those_of_the_stored_input(norm, policy):
    x, g = (jnp.asarray(draw(i, (4, 3, 100))) for i in range(2))
    params = [jnp.asarray(draw(2, (100,)))]
    params += [jnp.asarray(draw(3, (100,)))] * (norm == "layer")
    f = lambda x, *p: NORMS[norm](x, *p, epsilon=1e-2, policy=policy)
    y, dx, *dparams = value_and_gradients(f, (x, *params), g)
    given = params if norm == "layer" else [*params, None]
    prologue = oracle.norm(norm, 1e-2)
    (want,), wanted, (want_dx,), _ = oracle.block(
        prologue, given, [x], None, [], [g], policy
    )
    assert_computed(y, want, n=100)
    assert_computed(dx, want_dx, n=100)
    for got, correct in zip(dparams, wanted, strict=False):
        assert_computed(got, correct, n=12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "features"), [(3, 1), (3, 17), (129, 12), (2, 5120)])
def test_every_size_without_parameters(norm, rows, features):
    x, g = (jnp.asarray(draw(i, (rows, features))) for i in range(2))
    y, dx = value_and_gradients(functools.partial(NORMS[norm]), (x,), g)
    prologue = oracle.norm(norm, 1e-6)
    (want,), _, (want_dx,), _ = oracle.block(
        prologue, [None, None], [x], None, [], [g], DEFAULT
    )
    assert_computed(y, want, n=features)
    # Of a row of one number, the gradient is a difference of equal terms.
    base = np.abs(np.asarray(g) / np.asarray(x)).max() if features == 1 else 0
    assert_computed(dx + base, want_dx + base, n=max(features, 16))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_computed_in_float32(norm, dtype):
    x, g = (jnp.asarray(draw(i, (16, 96)), dtype) for i in range(2))
    scale = jnp.asarray(draw(2, (96,)), dtype)
    y, dx, dscale = value_and_gradients(NORMS[norm], (x, scale), g)
    assert {a.dtype for a in (y, dx, dscale)} == {jnp.dtype(dtype)}
    prologue = oracle.norm(norm, 1e-6)
    (want,), (want_dscale, _), (want_dx,), _ = oracle.block(
        prologue, [scale, None], [x], None, [], [g], DEFAULT
    )
    assert_computed(y, want, n=96, roundings=1)
    # A code at a tie may fall either way: 45 dB is far above what FP8 itself reaches.
    assert_sqnr(dx, want_dx, db=45)
    assert_sqnr(dscale, want_dscale, db=45)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "policy", [BF16, DEFAULT, PAPER], ids=["bf16", "default", "paper"]
)
def test_epsilon_is_the_arguments(norm, policy):
    x = jnp.asarray([[3.0, -3.0]])
    for epsilon in (1e-6, 16.0):
        y = NORMS[norm](x, epsilon=epsilon, policy=policy)
        assert_computed(y, np.array([[3.0, -3.0]]) / np.sqrt(9 + epsilon), n=2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("policy", [DEFAULT, PAPER], ids=["default", "paper"])
def test_zeros_nan_inf_and_extremes(norm, policy):
    x = draw(0, (6, 64))
    x[0], x[1, 5], x[2, 6], x[4], x[5] = 0, np.nan, np.inf, x[4] * 1e-30, x[5] * 1e15
    f = functools.partial(NORMS[norm], policy=policy)
    y, dx = value_and_gradients(f, (jnp.asarray(x),), jnp.ones((6, 64)))
    for array in (np.asarray(y), np.asarray(dx)):
        assert np.isfinite(array[[0, 3, 4, 5]]).all()
    assert np.isnan(y[1]).all()
    assert np.isnan(dx[1:3]).any(axis=1).all()
    assert not np.isfinite(y[2]).all()
    assert (np.asarray(y[0]) == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,)])
@pytest.mark.parametrize("norm", NORMS)
def test_empty_and_single_rows(norm, shape):
    x = jnp.asarray(draw(0, shape))
    y, dx = value_and_gradients(NORMS[norm], (x,), jnp.ones(shape))
    assert y.shape == dx.shape == shape
    assert np.isfinite(y).all()


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["bf16", "default"])
def test_parameters_of_another_size_are_refused(policy):
    x = jnp.ones((2, 8))
    words = (
        r"rms_norm: scale must have one element for each of x's last axis, got \(4,\)"
    )
    rms, layer = map(inspect.unwrap, (norms.rms_norm, norms.layer_norm))
    with pytest.raises(ValueError, match=words):
        rms(x, jnp.ones(4), policy=policy)
    with pytest.raises(ValueError, match="layer_norm: bias must have"):
        layer(x, jnp.ones(8), jnp.ones(1), policy=policy)
