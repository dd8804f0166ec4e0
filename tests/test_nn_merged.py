"""Trains merged once for many products: what is shared, hoisted, pulled back, saved."""

import functools
import re

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import nn
from coat_jax.checkpoint import Checkpointer
from coat_jax.policy import BF16, DEFAULT
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr
from tests.test_nn_tensor_train import biased, jit, make, table

pytestmark = pytest.mark.once


class Model(nnx.Module):
    """Tokens to logits; one layer is there twice, one in a list."""

    def __init__(self, policy=BF16):
        self.embed = table(policy=policy)
        self.layers = nnx.List([biased(make(32, 32, policy=policy)) for _ in range(2)])
        self.layers.append(self.layers[0])
        self.out = nnx.Linear(32, 32, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.embed.attend(self.out(x))


def test_a_merged_model_shares_what_is_no_train_and_leaves_the_model():
    model = Model()
    merged = nn.merge(model)
    kinds = [type(layer) for layer in (merged.embed, *merged.layers)]
    assert kinds == [nn.MergedEmbedding, *[nn.LowRankLinear] * 3]
    assert merged.layers[2] is merged.layers[0]
    assert merged.out.kernel is model.out.kernel
    assert merged.layers[1].bias is model.layers[1].bias
    assert type(model.embed) is nn.TTMEmbedding
    assert type(model.layers[0]) is nn.TTLinear
    ids = jnp.arange(128, dtype=jnp.int32).reshape(2, 64)
    got, want = jit(lambda ids: (merged(ids), model(ids)))(ids)
    assert_sqnr(got, want, db=100)


def losses(graph, hoisted):
    """Mean loss over micro-batches under scan; trains merged outside or in each."""

    def loss(state, batches):
        model = nnx.merge(graph, state)
        model = nn.merge(model) if hoisted else model

        def micro(total, ids):
            inner = model if hoisted else nn.merge(model)
            return total + jnp.mean(jnp.square(inner(ids))), None

        return lax.scan(micro, jnp.float32(0), batches)[0] / len(batches)

    return loss


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "fp8"])
def test_merging_outside_the_loop_changes_no_gradient(policy):
    graph, state = nnx.split(Model(policy))
    ids = jax.random.randint(jax.random.key(0), (3, 2, 64), 0, 500)
    both = lambda *args: [
        jax.value_and_grad(losses(graph, hoisted))(*args) for hoisted in (True, False)
    ]
    got, want = jit(both)(state, ids)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Of three micro-batches' sums, then of the merge's products of up to 128 terms.
        assert_reordered(g, w, n=3 * 128, scale=np.abs(w).max())


def test_the_merge_s_products_are_outside_of_the_compiled_loop():
    """Every product in a loop, forward or backward, has a micro-batch's tokens."""
    graph, state = nnx.split(Model())
    ids = jnp.zeros((3, 2, 61), jnp.int32)
    fn = jax.jit(jax.grad(losses(graph, hoisted=True)))
    text = fn.lower(state, ids).compile().as_text()
    inside, outside = products(text)
    has_tokens = lambda sizes: any(size % 61 == 0 for size in sizes)  # none else is
    # Three calls of a layer, the dense one, a lookup and attend; and their gradients.
    assert len(inside) >= 3 * 2 + 1 + 1 + 2
    assert all(map(has_tokens, inside))
    # Two layers merge 2 + 2 products each, and the table 1 + 1; each has two gradients.
    assert len(outside) >= 2 * 4 + 2
    assert not any(map(has_tokens, outside))


def products(text):
    """The sizes of each product's axes, of those in loops and of the others."""
    form = r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}"
    bodies = dict(re.findall(form, text, re.M | re.S))
    todo, looped = re.findall(r"body=%?([\w.\-]+)", text), set()
    while todo:
        name = todo.pop()
        if name not in looped:
            looped.add(name)
            called = r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)"
            todo += re.findall(called, bodies[name])
    shapes = dict(re.findall(r"%?([\w.\-]+) = \w+\[([\d,]*)\]", text))
    found = ([], [])
    for name, body in bodies.items():
        for result, operands in re.findall(r"%?(\S+) = \S+ dot\(([^)]*)\)", body):
            names = [result, *re.findall(r"%([\w.\-]+)", operands)]
            sizes = {int(n) for each in names for n in shapes[each].split(",") if n}
            found[name not in looped].append(sizes)
    return found


def test_the_merge_can_be_pulled_back_by_itself():
    """For gradients that a loop accumulates: of the merged model, then of the cores."""
    model = Model()
    graph, state = nnx.split(model)

    def merged(state):
        merged = nn.merge(nnx.merge(graph, state))
        inner, state = nnx.split(merged)
        return state, inner

    ids = jnp.arange(128, dtype=jnp.int32).reshape(2, 64)

    def run(state):
        low, pull, inner = jax.vjp(merged, state, has_aux=True)
        loss = lambda graph, state: jnp.mean(jnp.square(nnx.merge(graph, state)(ids)))
        (by_two,) = pull(jax.grad(functools.partial(loss, inner))(low))
        return by_two, jax.grad(functools.partial(loss, graph))(state)

    got, want = jit(run)(state)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(g, w, n=128, scale=np.abs(w).max())


@pytest.mark.usefixtures("optax_promotion")
def test_a_checkpoint_brings_a_model_back(tmp_path):
    model = Model()
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
        back = checkpointer.restore(jax.eval_shape(lambda: state))
    assert_same_bits(back.state, state)
