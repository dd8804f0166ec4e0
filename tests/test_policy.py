"""Records of formats and precision: what they refuse, and what makes a policy plain."""

import copy
import dataclasses
import inspect

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import activations, fused, linear, norms
from coat_jax.formats import E4M3, E5M2
from coat_jax.policy import (
    BF16,
    DEFAULT,
    LEAN,
    MEMORY,
    PAPER,
    PRESETS,
    Kept,
    Operand,
    Policy,
    reference_mode,
)
from tests.activation_oracle import draw
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.once

X = jnp.asarray(draw(0, (4, 32)))
W = jnp.asarray(draw(1, (32, 16)))


def remade(record, **fields):
    """A record with other fields, past the tests' own type checks."""
    record = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    inspect.unwrap(type(record).__post_init__)(record)


E5M2_ON = Operand(format=E5M2)


@pytest.mark.parametrize(
    ("record", "fields", "error", "words"),
    [
        (Operand(), {"format": "e4m3"}, TypeError, "Operand: format .*E4M3.*'e4m3'"),
        (Operand(), {"format": jnp.bfloat16}, TypeError, "E5M2 or None, got"),
        (Operand(), {"scaling": "row"}, ValueError, "scaling .*vector, got 'row'"),
        (Operand(), {"scaling": None}, ValueError, "Operand: scaling"),
        (Kept(), {"format": "e4m3"}, TypeError, "Kept: format"),
        (Kept(), {"group": 0}, ValueError, "group .*at least 1, got 0"),
        (Kept(), {"group": 16.0}, ValueError, "group .*whole number"),
        (Policy(), {"forward": "exact"}, ValueError, "forward .*promoted, got 'exact'"),
        (Policy(), {"backward": None}, ValueError, "Policy: backward"),
        (Policy(), {"x": E5M2_ON, "w": E5M2_ON}, ValueError, "x and w meet"),
        (Policy(), {"g": E5M2_ON, "w": E5M2_ON}, ValueError, "g and w meet"),
        (Policy(), {"x": E5M2_ON, "g": E5M2_ON}, ValueError, "x and g meet"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(record, fields, error, words):
    with pytest.raises(error, match=words):
        remade(record, **fields)


def test_records_take_keywords_alone():
    for record in (Operand, Kept, Policy):
        with pytest.raises(TypeError):
            record(E4M3)


def test_presets_are_what_they_are_called():
    found = {"bf16": BF16, "default": DEFAULT, "lean": LEAN, "memory": MEMORY}
    assert PRESETS == {**found, "paper": PAPER}
    assert MEMORY.kept == DEFAULT.kept
    assert {MEMORY.x.format, MEMORY.w.format, MEMORY.g.format} == {None}
    assert Policy() == DEFAULT
    assert (BF16.plain, DEFAULT.plain, PAPER.plain) == (True, False, False)
    # The published recipe: groups of 16, E5M2 gradients, fast sums.
    assert (PAPER.x.format, PAPER.w.format, PAPER.g.format) == (E4M3, E4M3, E5M2)
    assert (PAPER.x.scaling, PAPER.g.scaling) == ("group", "group")
    assert (PAPER.kept.group, PAPER.kept.in_forward) == (16, True)
    assert (PAPER.forward, PAPER.backward) == ("fast", "fast")
    assert PAPER.attention.format is None
    lean = dataclasses.replace(DEFAULT, attention=LEAN.attention)
    assert lean == LEAN  # the default, and attention in FP8
    assert LEAN.attention.format == E4M3
    assert (DEFAULT.forward, DEFAULT.backward) == ("fast", "promoted")


@pytest.mark.parametrize("name", ["x", "w", "g", "kept", "attention"])
def test_one_format_makes_a_policy_that_is_not_plain(name):
    on = {name: Operand() if name in "xwg" else Kept()}
    assert not dataclasses.replace(BF16, **on).plain


def test_policies_are_values():
    same = dataclasses.replace(DEFAULT)
    assert hash(same) == hash(DEFAULT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.forward = "promoted"
    count = []

    def f(x, policy):
        count.append(1)
        return activations.silu(x, policy=policy)

    jitted = jax.jit(f, static_argnames="policy")
    jitted(X, DEFAULT)
    jitted(X, same)  # equal policies share a compilation
    assert len(count) == 1


FUNCTIONS = {
    "linear": lambda x, policy: linear.linear(x, W, policy=policy),
    "rms_norm": lambda x, policy: norms.rms_norm(x, policy=policy),
    "gated": lambda x, policy: activations.gated(x, x, policy=policy),
    "norm_linear": lambda x, policy: fused.norm_linear(x, [W], policy=policy)[0],
}
FULL = dataclasses.replace(DEFAULT, attention=Kept())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_mode_makes_every_policy_plain(name):
    loss = lambda policy: lambda x: jnp.sum(FUNCTIONS[name](x, policy=policy) ** 2)
    direction = jnp.asarray(draw(2, X.shape))
    # Forward over reverse: the derivative that FP8 functions do not have.
    second = lambda policy: jax.jit(
        lambda x: jax.jvp(jax.grad(loss(policy)), (x,), (direction,))
    )
    want = second(BF16)(X)
    in_mode = second(FULL)
    with reference_mode():
        got = in_mode(X)
    assert_same_bits(got, want)
    assert np.isfinite(got[1]).all()
    first = lambda x: jax.jvp(loss(FULL), (x,), (direction,))
    with pytest.raises(TypeError, match="custom_vjp"):
        first(X)  # the mode ends with its block


def test_reference_mode_is_part_of_the_cache_key():
    f = jax.jit(lambda x: linear.linear(x, W, policy=DEFAULT))
    plain = jax.jit(lambda x: linear.linear(x, W, policy=BF16))(X)
    before = f(X)
    with reference_mode():
        inside = f(X)
    assert_same_bits(inside, plain)
    assert_same_bits(f(X), before)
    assert (np.asarray(before) != plain).any()
