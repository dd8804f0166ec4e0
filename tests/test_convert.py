"""`nn.convert`: what is replaced, what is left and why, and that nothing else moves."""

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import nn
from coat_jax.policy import BF16, DEFAULT, PAPER
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once


class Own(nnx.Linear):
    """A user's layer, derived from Flax's."""


class Table(nnx.Module):
    """A user's layer with a parameter of its own."""

    def __init__(self, *, rngs):
        self.table = nnx.Param(jnp.ones((8, 16)))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        linear = lambda: nnx.Linear(16, 16, rngs=rngs)
        self.embed = nnx.Embed(8, 16, rngs=rngs)
        self.layers = nnx.List(
            [linear(), nnx.Dict(a=linear(), b=Own(16, 16, rngs=rngs))]
        )
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.tied = self.layers[0]
        self.exact = nnx.Linear(16, 16, precision="highest", rngs=rngs)
        self.table = Table(rngs=rngs)
        self.drop = nnx.Dropout(0.0)

    def __call__(self, tokens):
        x = self.layers[0](self.embed(tokens))
        x = self.layers[1]["b"](self.layers[1]["a"](self.norm(x)))
        return self.exact(self.tied(self.drop(x + self.attention(x))))


@pytest.fixture
def model():
    return Model(rngs=nnx.Rngs(0))


ATTENTION = {"attention", *(f"attention/{n}" for n in ("query", "key", "value", "out"))}


def paths(report):
    return {path for path, _ in report.replaced}


def call(model, *args):
    graph, state = nnx.split(model)
    return jax.jit(lambda state, *args: nnx.merge(graph, state)(*args))(state, *args)


def test_everything_is_replaced_or_left_with_a_reason(model):
    variables = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    tokens = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    want = call(model, tokens)
    report = nn.convert(model, DEFAULT)
    assert paths(report) == {"layers/0", "layers/1/a", "norm"} | ATTENTION
    left = {path: (kind, reason) for path, kind, reason in report.left}
    assert left.keys() == {"embed", "layers/1/b", "exact", "table"}
    assert left["layers/1/b"][1].startswith("derived from Linear")
    assert left["exact"] == (
        nnx.Linear,
        "its precision is 'highest', which an FP8 policy has no place for",
    )
    assert left["table"] == (Table, "there is no FP8 form of Table")
    assert type(model.layers[0]) is nn.Linear
    assert type(model.attention) is nn.Attention
    assert type(model.layers[1]["b"]) is Own
    assert model.tied is model.layers[0]
    after = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    assert after == variables
    got = call(model, tokens)
    assert np.any(got != want)
    assert_sqnr(got, want, db=15)


def test_the_report_is_a_table(model):
    lines = str(nn.convert(model, DEFAULT)).splitlines()
    assert len(lines) == 1 + 8 + 4
    assert lines[0].split() == ["path", "type", "what", "was", "done"]
    assert "layers/0         Linear              replaced" in lines
    assert lines[-1].startswith("table")
    assert lines[-1].endswith("left: there is no FP8 form of Table")


def test_a_second_time_changes_nothing_and_another_policy_is_taken(model):
    first = nn.convert(model, DEFAULT)
    again = nn.convert(model, DEFAULT)
    assert again.replaced == ()
    reasons = {path: reason for path, _, reason in again.left}
    assert {p for p, r in reasons.items() if "already" in r} == paths(first)
    assert paths(nn.convert(model, PAPER)) == paths(first)
    assert model.attention.out.policy == PAPER
    assert model.attention.policy == PAPER


def test_a_plain_policy_takes_every_flax_layer_and_keeps_its_bits(model):
    tokens = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    want = call(model, tokens)
    report = nn.convert(model, BF16)
    assert "exact" in paths(report)
    assert_same_bits(call(model, tokens), want)


SELECTIONS = {
    "pattern": ({"only": "layers/*"}, {"layers/0", "layers/1/a"}),
    "type": ({"only": nnx.RMSNorm}, {"norm"}),
    "both": (
        {"only": ["norm", nnx.LinearGeneral]},
        {"norm", *ATTENTION - {"attention"}},
    ),
    "skip": ({"skip": ["attention*", "norm"]}, {"layers/0", "layers/1/a"}),
    "skip a type": ({"only": "*", "skip": nnx.Linear}, {"norm"} | ATTENTION),
}


@pytest.mark.parametrize("case", SELECTIONS.values(), ids=SELECTIONS)
def test_paths_and_types_select(model, case):
    selection, wanted = case
    report = nn.convert(model, DEFAULT, **selection)
    assert paths(report) == wanted
    said = {path for path, _, _ in report.left}
    every = {"layers/0", "layers/1/a", "norm"} | ATTENTION
    assert every - wanted <= said


def test_selections_are_patterns_and_types(model):
    with pytest.raises(TypeError, match="convert: skip must hold path patterns"):
        nn.convert(model, DEFAULT, skip=[3])


def test_the_model_itself_may_be_a_layer():
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    report = nn.convert(layer, DEFAULT)
    assert report.replaced == (("", nnx.Linear),)
    assert type(layer) is nn.Linear
    assert ".     Linear  replaced" in str(report)


def test_a_list_or_dict_of_modules_is_a_model():
    make = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    models = [make(), {"a": make()}]
    assert paths(nn.convert(models, DEFAULT)) == {"0", "1/a"}
    assert type(models[1]["a"]) is nn.Linear


def test_every_kind_of_layer_is_replaced():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(4, 4, rngs=rngs),
        nnx.LinearGeneral(4, 4, rngs=rngs),
        nnx.Einsum("ab,bc->ac", (4, 4), rngs=rngs),
        nnx.Conv(4, 4, (3,), rngs=rngs),
        nnx.RMSNorm(4, rngs=rngs),
        nnx.LayerNorm(4, rngs=rngs),
        nnx.ConvTranspose(4, 4, (3,), rngs=rngs),
    )
    report = nn.convert(model, DEFAULT)
    assert [kind.__name__ for _, kind in report.replaced] == (
        "Linear LinearGeneral Einsum Conv RMSNorm LayerNorm".split()
    )
    assert [kind for _, kind, _ in report.left] == [nnx.ConvTranspose]
    assert all(layer.policy == DEFAULT for layer in model.layers[:6])


def test_attention_of_another_function_is_left_and_its_layers_are_not():
    layer = nnx.MultiHeadAttention(
        2, 16, attention_fn=lambda q, k, v, **how: v, rngs=nnx.Rngs(0)
    )
    report = nn.convert(layer, DEFAULT)
    assert paths(report) == {"query", "key", "value", "out"}
    assert report.left == (
        ("", nnx.MultiHeadAttention, "its attention_fn is not Flax's own"),
    )


def test_stacked_layers_are_converted_and_checkpoints_move_both_ways():
    make = lambda key: nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(key))
    stack = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))
    saved = nnx.to_pure_dict(nnx.state(stack))
    nn.convert(stack, DEFAULT)
    fresh = nnx.vmap(make)(jax.random.split(jax.random.key(1), 3))
    for source, target in ((stack, fresh), (fresh, stack)):
        nnx.update(target, nnx.to_pure_dict(nnx.state(source)))
        assert_same_bits(nnx.to_pure_dict(nnx.state(target)), saved)
    x = jnp.ones((4, 16))
    run = lambda x, layer: layer(x)
    y = nnx.jit(nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry))(x, stack)
    assert y.shape == x.shape
