"""Activations and gated products: plain bits, or the gradient at the stored values."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import activations
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
}
NAMES = list(oracle.ACTIVATIONS)
PAIRS = [(name, "default") for name in NAMES] + [("silu", "paper"), ("gelu", "e5m2")]
PLAIN = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jax.nn.relu(x) ** 2,
}
# Each function by its own name, as a user calls it.
DIRECT = {
    "silu": activations.silu,
    "gelu": functools.partial(activations.gelu, approximate=False),
    "gelu_tanh": activations.gelu,
    "relu": activations.relu,
    "relu_squared": activations.relu_squared,
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


def drawn(dtype=jnp.float32, shape=(4, 3, 100), count=3):
    return [jnp.asarray(draw(i, shape), dtype) for i in range(count)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_plain_policy_is_jax_nn_bit_for_bit(dtype):
    x, up, g = drawn(dtype)
    for name in NAMES:
        ours = functools.partial(DIRECT[name], policy=BF16)
        same = [value_and_gradients(f, (x,), g) for f in (ours, PLAIN[name])]
        assert_same_bits(*same)
    gated = functools.partial(activations.gated, activation="silu", policy=BF16)
    theirs = lambda gate, up: jax.nn.silu(gate) * up
    same = [value_and_gradients(f, (x, up), g) for f in (gated, theirs)]
    assert_same_bits(*same)


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_values_and_gradients_are_those_of_the_stored_input(name, policy):
    policy = POLICIES[policy]
    x, up, g = drawn()
    alone = functools.partial(DIRECT[name], policy=policy)
    pair = functools.partial(activations.gated, activation=name, policy=policy)

    @jax.jit
    def both(x, up, g):  # one compilation for the two
        return [_vjp(alone, (x,), g), _vjp(pair, (x, up), g)]

    for got, xs in zip(both(x, up, g), ([x], [x, up]), strict=True):
        (want,), _, dxs, _ = oracle.block(
            oracle.activation(name), [], xs, None, [], [g], policy
        )
        for value, correct in zip(got, (want, *dxs), strict=True):
            assert_computed(value, correct, n=16)  # exp and tanh are a few roundings


def _vjp(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(dtype):
    gate, up, g = drawn(dtype, (16, 96))
    got = value_and_gradients(activations.gated, (gate, up), g)
    (want,), _, dxs, _ = oracle.block(
        oracle.activation("silu"), [], [gate, up], None, [], [g], DEFAULT
    )
    assert {a.dtype for a in got} == {jnp.dtype(dtype)}
    assert_computed(got[0], want, n=16, roundings=1)
    # A code at a tie may fall either way: 45 dB is far above what FP8 itself reaches.
    for value, correct in zip(got[1:], dxs, strict=True):
        assert_sqnr(value, correct, db=45)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (129,), (2, 712), (1, 5120)])
def test_every_shape(shape):
    x, up, g = drawn(shape=shape)
    got = value_and_gradients(activations.gated, (x, up), g)
    (want,), _, dxs, _ = oracle.block(
        oracle.activation("silu"), [], [x, up], None, [], [g], DEFAULT
    )
    for value, correct in zip(got, (want, *dxs), strict=True):
        assert_computed(value, correct, n=16)


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_nan_inf_zeros_and_extremes(name, policy):
    policy = POLICIES[policy]
    x = np.asarray(draw(0, (6, 128)))
    x[0], x[1, 3], x[2, 4], x[4] = 0, np.nan, np.inf, x[4] * 1e-30
    x[5] = np.abs(x[5]) * 1e15
    f = functools.partial(activations.activate, activation=name, policy=policy)
    y, dx = value_and_gradients(f, (jnp.asarray(x),), jnp.ones_like(x))
    y, dx = np.asarray(y), np.asarray(dx)
    assert np.isfinite(y[[0, 3, 4, 5]]).all()
    assert np.isfinite(dx[[0, 3, 4, 5]]).all()
    assert (y[0] == 0).all()
    assert np.isnan(y[1, 3])
    assert not np.isfinite(y[2, 4])
    if not name.startswith("relu"):  # whose derivative at NaN is 0, as jax.nn.relu's
        assert np.isnan(dx[1, 3])
        assert np.isnan(dx[2, 4])


def test_a_value_stored_as_zero_has_the_derivative_at_zero():
    x = jnp.full((128,), 1e-6).at[0].set(448.0)  # below half the smallest code
    _, dx = value_and_gradients(activations.silu, (x,), jnp.ones(128))
    assert_same_bits(dx[1:], jnp.full(127, 0.5))


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["bf16", "default"])
def test_what_does_not_exist_or_fit_is_refused(policy):
    x = jnp.ones((2, 8))
    words = (
        "must be one of silu, gelu, gelu_tanh, relu, relu_squared, got 'swish'|Type-"
    )
    with pytest.raises((ValueError, TypeError), match=words):
        activations.activate(x, activation="swish", policy=policy)
    with pytest.raises(ValueError, match=r"one shape, got \(2, 8\) and \(2, 4\)"):
        activations.gated(x, x[:, :4], policy=policy)
    for bad in (jnp.ones(8, jnp.int32),):
        with pytest.raises(TypeError):
            activations.silu(bad, policy=policy)
