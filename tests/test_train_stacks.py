"""Trains stacked by shape: equal values, gradients and steps; wrong trees refused."""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import fp8_adamw
from coat_jax.factorize import tt_shape, ttm_shape
from coat_jax.models import encoder
from coat_jax.rank_control import (
    Objective,
    core_norm,
    labels,
    rank_control,
    ranks,
    size_exact,
    size_relaxed,
)
from coat_jax.tensor_train import init_train
from coat_jax.train_stacks import TrainStacks
from coat_jax.truncation import truncate
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]
WIDE = tt_shape(8, 8, rank=3, order=2)
TABLE = ttm_shape(12, 8, rank=2, row_dims=(3, 4), col_dims=(2, 4))


def params(dtype=jnp.float32):
    """Three trains of one shape, one of another dtype, a table, and the rest."""

    def train(seed, shape, dtype=jnp.float32):
        made = init_train(jax.random.key(seed), shape, std=0.1, dtype=dtype)
        random = np.random.default_rng(seed)
        near = [
            jnp.float32(random.uniform(0.005, 0.1, v.shape)) for v in made.diagonals
        ]
        return {"cores": list(made.cores), "diagonals": near}

    return {
        "a": train(0, WIDE) | {"bias": jnp.arange(3.0)},
        "b": [train(1, WIDE), train(2, WIDE, dtype)],
        "table": train(3, TABLE),
        "head": jnp.ones((2, 2)),
    }


def total(tree):
    """A number that every leaf has its own part in."""
    leaves = jax.tree.leaves(tree)
    parts = [jnp.sum(jnp.sin(k + x.astype(jnp.float32))) for k, x in enumerate(leaves)]
    return sum(parts, jnp.float32(0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stacks_hold_trains_of_one_shape_and_dtype_and_give_them_back(dtype):
    tree = params(dtype)
    stacks = TrainStacks(jax.eval_shape(lambda: tree))  # shapes are enough
    stacked = stacks.stack(tree)
    assert_same_bits(stacks.unstack(stacked), tree)
    sizes = [len(core) for core in stacked["cores"]]
    alike = [3] if dtype == jnp.float32 else [2, 1]
    assert sizes == [n for n in alike for _ in WIDE.core_shapes] + [1, 1]
    assert jax.tree.leaves(stacked["rest"]) == jax.tree.leaves(
        {"a": {"bias": tree["a"]["bias"]}, "head": tree["head"]}
    )
    assert stacked["rest"]["a"]["cores"] == [None] * 4
    got = labels(stacked)
    assert set(got["cores"]) == {"core"}
    assert set(got["diagonals"]) == {"diagonal"}
    assert set(jax.tree.leaves(got["rest"])) == {"rest"}


def test_gradients_come_back_stacked_without_a_sum():
    """Those of the trains, bit for bit; no scatter, no padding in the program."""
    tree = params()
    stacks = TrainStacks(tree)
    grad = jax.grad(lambda s: total(stacks.unstack(s)))
    got = grad(stacks.stack(tree))
    assert_same_bits(got, stacks.stack(jax.grad(total)(tree)))
    text = str(jax.make_jaxpr(grad)(stacks.stack(tree)))
    assert "concatenate" in text
    assert "scatter" not in text
    assert "pad" not in text


def test_the_optimizer_steps_stacks_as_it_would_single_trains():
    """Ranks die, are kept and stay dead; FP8 moments for what is no train."""
    tree = params()
    stacks = TrainStacks(tree)
    parts = {"core": optax.adam(1e-3), "diagonal": rank_control(5e-3)}
    tx = optax.partition(parts | {"rest": fp8_adamw(1e-3)}, labels)
    objective = Objective(gamma=3.0)

    def steps(params, open_):
        state, of_ranks = tx.init(params), objective.init(tree)

        @jax.jit
        def step(params, state, of_ranks):
            loss = lambda p: objective(total(open_(p)), open_(p), of_ranks)
            grads, (figures, after) = jax.grad(loss, has_aux=True)(params)
            updates, state = tx.update(
                grads, state, params, pressure=figures["pressure"]
            )
            return optax.apply_updates(params, updates), state, after, figures

        for _ in range(12):
            params, state, of_ranks, figures = step(params, state, of_ranks)
        return open_(params), figures

    want, figures = steps(tree, lambda p: p)
    got, of_stacks = steps(stacks.stack(tree), stacks.unstack)
    assert 0 < int(of_stacks["size"]) < float(objective.init(tree).size_start)
    assert int(of_stacks["size"]) == int(figures["size"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(a, b, 12, 4.0)


def test_the_encoder_learns_from_stacked_parameters():
    config = dataclasses.replace(encoder.PRESETS["micro"], layers=1)
    layers = encoder.tensor_train_layers(rank=3, embed_rank=3)
    tree = encoder.init_params(config, jax.random.key(0), layers=layers)
    stacks = TrainStacks(tree)
    cores = stacks.stack(tree)["cores"]  # three kinds of matrices, and the table
    assert len(cores) == 3 * 6 + 4
    ids = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    tokens = encoder.Tokens(ids, jnp.zeros_like(ids), jnp.ones(ids.shape, bool))
    loss = encoder.make_loss(config, layers=layers)
    batch = tokens, jnp.array([0, 1], jnp.int32)
    of_stacks = lambda s: loss(stacks.unstack(s), batch)
    value, grads = jax.value_and_grad(of_stacks)(stacks.stack(tree))
    want, single = jax.value_and_grad(lambda p: loss(p, batch))(tree)
    assert_reordered(value, want, 32, 4.0)
    for a, b in zip(
        jax.tree.leaves(grads), jax.tree.leaves(stacks.stack(single)), strict=True
    ):
        assert_reordered(a, b, 256, float(jnp.abs(b).max()))


def test_a_stacked_run_is_truncated_and_goes_on_as_single_trains():
    tree = params()
    stacks = TrainStacks(tree)
    parts = {"core": optax.adam(1e-3), "diagonal": rank_control(5e-3)}
    tx = optax.partition(parts | {"rest": optax.adam(1e-3)}, labels)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

    def run(params, open_, steps=6):
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            grads = jax.grad(lambda p: total(open_(p)))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(steps):
            params, state = step(params, state)
        return params, state

    want = truncate(*run(tree, lambda p: p))
    stacked, state = run(stacks.stack(tree), stacks.unstack)
    got = truncate(stacks.unstack(stacked), stacks.unstack_state(state))
    assert ranks(got.params) == ranks(want.params) != ranks(tree)
    assert jax.tree.structure(got.opt_state) == jax.tree.structure(want.opt_state)
    for a, b in zip(
        jax.tree.leaves((got.params, got.opt_state)),
        jax.tree.leaves((want.params, want.opt_state)),
        strict=True,
    ):
        assert_reordered(a, b, 12, 4.0)
    updates, _ = tx.update(got.params, got.opt_state, got.params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, got.params)


@pytest.mark.parametrize(
    "use",
    [
        size_exact,
        size_relaxed,
        ranks,
        Objective().init,
        truncate,
        lambda p: rank_control(0.1, threshold=0.1).update(
            p, rank_control(0.1).init(p), p
        ),
    ],
    ids="size_exact size_relaxed ranks Objective truncate threshold".split(),
)
def test_what_must_know_the_trains_refuses_stacks(use):
    tree = {"a": params()["a"], "b": params()["b"]}
    with pytest.raises(ValueError, match="unstack what TrainStacks stacked"):
        use(TrainStacks(tree).stack(tree))


def test_trains_that_are_placed_differently_are_not_stacked():
    """On a mesh of Explicit axes, where sharding is part of a type."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,),
        devices=jax.devices()[:2],
    )  # fmt: skip
    put = lambda x, *spec: jax.device_put(
        x, jax.sharding.NamedSharding(mesh, jax.P(*spec))
    )
    tree = {"a": params()["a"], "b": params()["b"][0]}
    sizes = float(size_relaxed(tree)), float(core_norm(tree))
    placed = jax.tree.map(put, tree)
    cores = [put(core, None, "x") for core in tree["b"]["cores"]]
    placed["b"] = placed["b"] | {"cores": cores}
    with jax.set_mesh(mesh):
        got = float(size_relaxed(placed)), float(core_norm(placed))
        stacks = TrainStacks(placed)
        stacked = stacks.stack(placed)
        assert_same_bits(stacks.unstack(stacked), tree)
    assert got == pytest.approx(sizes, rel=1e-6)
    assert [len(core) for core in stacked["cores"]] == [1] * 8


def test_a_tree_without_trains_or_of_another_model_is_refused():
    with pytest.raises(ValueError, match="params must hold a train"):
        TrainStacks({"kernel": jnp.ones((2, 2))})
    stacks = TrainStacks(params())
    with pytest.raises(ValueError, match="head"):
        stacks.stack({k: v for k, v in params().items() if k != "head"})
    other = params()
    other["b"][1] = params(jnp.bfloat16)["b"][1]
    with pytest.raises(ValueError, match="float32 of shape .* got bfloat16"):
        stacks.stack(other)
    for wrong in (params(), None, stacks.stack(params()) | {"cores": []}):
        with pytest.raises(ValueError, match="must be what this object's stack gave"):
            stacks.unstack(wrong)
    stacked = stacks.stack(params())
    stacked["diagonals"][0] = jnp.ones((2, 8))
    with pytest.raises(ValueError, match="must have shape"):
        stacks.unstack(stacked)
