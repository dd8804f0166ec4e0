"""`tensorize`: what becomes a train, what is left and why, and that nothing moves."""

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

import coat_jax
from coat_jax import nn
from coat_jax.policy import DEFAULT
from coat_jax.tensor_train import to_dense
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once


class Own(nnx.Linear):
    """A user's layer, derived from Flax's."""


class Model(nnx.Module):
    """Layers in attributes, lists, dicts and a Sequential; one of them twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = lambda *sizes, **how: nnx.Linear(*sizes, rngs=rngs, **how)
        self.embed = nnx.Embed(200, 32, rngs=rngs)
        self.layers = nnx.List([linear(32, 64), nnx.Dict(a=linear(64, 32))])
        self.again = self.layers[0]
        self.ours = nn.Linear(32, 32, policy=DEFAULT, rngs=rngs)
        self.stack = nnx.Sequential(nnx.RMSNorm(32, rngs=rngs), linear(32, 32))
        self.own = Own(32, 32, rngs=rngs)
        self.small = linear(3, 2)
        self.exact = linear(32, 32, precision="highest")
        self.zero = linear(32, 32, kernel_init=nnx.initializers.zeros)
        self.tied = nnx.List([linear(32, 32), linear(32, 32)])
        self.tied[1].kernel = self.tied[0].kernel

    def __call__(self, ids):
        x = self.layers[1]["a"](jnp.tanh(self.layers[0](self.embed(ids))))
        x = self.stack(self.ours(x)) + self.layers[1]["a"](self.again(x))
        return self.embed.attend(self.tied[1](self.own(self.exact(x))))


REPLACED = {
    "embed": nnx.Embed,
    "again": nnx.Linear,
    "layers/1/a": nnx.Linear,
    "ours": nnx.Linear,
    "stack/layers/1": nnx.Linear,
}
LEFT = {
    "own": "derived from Linear, it may compute something else",
    "small": "a train of 10 parameters is not below its 6",
    "exact": "its precision is set, which a train has no place for",
    "zero": "its weights are zero, and cores of zeros have gradients of zero",
    "tied/0": "its weights are another layer's too",
    "tied/1": "its weights are another layer's too",
    "stack/layers/0": "there is no tensor train of RMSNorm",
}


def state_of(model):
    return jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))


def test_every_layer_is_replaced_or_left_with_a_reason():
    model = Model()
    bias, again = model.again.bias, model.again
    report = coat_jax.tensorize(model, rank=2)
    assert dict(report.replaced) == REPLACED
    assert {path: reason for path, _, reason in report.left} == LEFT
    assert type(model.embed) is nn.TTMEmbedding
    assert model.again is again is model.layers[0]
    assert type(again) is nn.TTLinear
    assert again.bias is bias
    assert type(model.stack.layers[1]) is nn.TTLinear
    assert model.ours.policy == DEFAULT
    assert model.stack.layers[1].policy.plain
    assert "replaced" in str(report)


def test_a_second_time_changes_nothing():
    model = Model()
    coat_jax.tensorize(model, rank=2)
    before = state_of(model)
    report = coat_jax.tensorize(model, rank=2)
    assert report.replaced == ()
    reasons = {path: reason for path, _, reason in report.left}
    assert {p for p, r in reasons.items() if "already" in r} == REPLACED.keys()
    assert_same_bits(state_of(model), before)


def test_weights_of_low_rank_are_found_again():
    """A kernel that is a train of rank 3, and a table: what they compute stays."""
    rngs = nnx.Rngs(0)
    linear, embed = nnx.Linear(64, 96, rngs=rngs), nnx.Embed(81, 24, rngs=rngs)
    true = nn.TTLinear(64, 96, rank=3, rngs=rngs)
    table = nn.TTMEmbedding(81, 24, rank=3, rngs=rngs)
    linear.kernel[...] = to_dense(true.train, inputs=3)
    embed.embedding[...] = to_dense(table.train)[:81]
    model = nnx.List([linear, embed])
    kernel, rows = linear.kernel[...], embed.embedding[...]
    report = coat_jax.tensorize(model, rank=3)
    assert [path for path, _ in report.replaced] == ["0", "1"]
    assert_sqnr(to_dense(model[0].train, inputs=3), kernel, db=90)
    assert_sqnr(model[1](jnp.arange(81, dtype=jnp.int32)), rows, db=60)


def test_drawn_anew_the_variance_is_that_of_the_weights():
    model = nnx.Linear(
        64, 96, kernel_init=nnx.initializers.normal(0.3), rngs=nnx.Rngs(0)
    )
    rms = jnp.sqrt(jnp.mean(jnp.square(model.kernel[...])))
    coat_jax.tensorize(model, rank=4, from_weights=False, rngs=nnx.Rngs(1))
    assert type(model) is nn.TTLinear
    dense = to_dense(model.train, inputs=3)
    assert_sqnr(jnp.sqrt(jnp.mean(jnp.square(dense))), rms, db=90)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"only": nnx.Embed}, {"embed"}),
        ({"only": "layers/*"}, {"layers/1/a"}),
        ({"skip": ["stack/*", nnx.Embed]}, {"again", "layers/1/a", "ours"}),
    ],
)
def test_paths_and_types_select(options, want):
    report = coat_jax.tensorize(Model(), rank=2, **options)
    assert {path for path, _ in report.replaced} == want


def test_a_policy_is_given_to_all_and_the_model_trains():
    model = Model()
    only = {"skip": ["own", "zero", "exact"]}
    coat_jax.tensorize(model, rank=4, policy=DEFAULT, max_unique=16, **only)
    assert model.again.policy == model.embed.policy == DEFAULT
    assert model.embed.max_unique == 16
    graph, state = nnx.split(model)
    ids = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)

    @jax.jit
    def run(state):
        loss = lambda state: jnp.mean(jnp.square(nnx.merge(graph, state)(ids)))
        before, grads = jax.value_and_grad(loss)(state)
        moved = jax.tree.map(lambda p, g: p - 1e-3 * g, state, grads)
        return before, loss(moved), grads

    with jax.numpy_dtype_promotion("standard"):
        before, after, grads = run(state)
    assert after < before
    cores = nnx.to_pure_dict(grads)["again"]["cores"]
    assert all(np.abs(core).max() > 0 for core in cores.values())


def test_what_cannot_be_done_is_said_in_a_sentence():
    linear = lambda: nnx.Linear(64, 96, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs must be given"):
        coat_jax.tensorize(linear(), rank=4, from_weights=False)
    with pytest.raises(TypeError, match="tensorize: only must hold path patterns"):
        coat_jax.tensorize(linear(), rank=4, only=[3])
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.eval_shape(lambda: coat_jax.tensorize(linear(), rank=4))
    kept = nnx.Linear(64, 96, dot_general=lambda *a, **k: lax.dot_general(*a, **k),
                      rngs=nnx.Rngs(0))  # fmt: skip
    ((_, _, reason),) = coat_jax.tensorize(kept, rank=4).left
    assert reason.startswith("its dot_general is set")
