"""The click model: its sizes, its mathematics against NumPy, its layers, its loss."""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import rank_control
from coat_jax.models import dlrm
from coat_jax.tensor_train import to_dense
from tests.helpers import assert_reordered

pytestmark = pytest.mark.once

MICRO = dlrm.PRESETS["micro"]
TRAINS = dlrm.tensor_train_layers(table_rank=3, table_order=2, large_rows=500)


@pytest.fixture(scope="module")
def batch():
    """Dense features (5, 3), ids (5, 2) with a repeated row, labels (5,)."""
    dense = jax.random.normal(jax.random.key(1), (5, 3))
    ids = jnp.array([[0, 599], [6, 0], [3, 77], [3, 599], [2, 311]], jnp.int32)
    return dense, ids, jnp.array([1.0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def params():
    return dlrm.init_params(MICRO, jax.random.key(0))


def mlp(p, x, *, end):
    maps = [p["maps"][i] for i in sorted(p["maps"])]
    for i, one in enumerate(maps):
        x = x @ one["kernel"] + one["bias"]
        x = np.maximum(x, 0) if end or i + 1 < len(maps) else x
    return x


def forward(params, dense, ids):
    """The model in NumPy float64, pair by pair."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = mlp(p["bottom"], np.asarray(dense, np.float64), end=True)
    rows = [p["tables"][i]["embedding"][ids[:, i]] for i in range(ids.shape[1])]
    vectors = [x, *rows]
    pairs = [(vectors[i] * vectors[j]).sum(-1) for i in range(3) for j in range(i)]
    return mlp(p["top"], np.concatenate([x, np.stack(pairs, 1)], 1), end=False)[:, 0]


def test_logits_and_loss_are_those_of_the_definition(params, batch):
    *inputs, labels = batch
    big = jax.tree.map(lambda x: 3 * x, params)  # so that the products count
    big["tables"] = jax.tree.map(lambda x: 30 * x, big["tables"])
    want = forward(big, *map(np.asarray, inputs))
    got = dlrm.make_apply(MICRO)(big, *inputs)
    assert got.shape == (5,)
    assert np.abs(want).max() > 1
    assert_reordered(got, want, 64, np.abs(want).max())
    y = np.asarray(labels, np.float64)
    p = 1 / (1 + np.exp(-want))
    loss = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert_reordered(dlrm.make_loss(MICRO)(big, batch), loss, 64, np.abs(want).max())


def test_pairs_are_each_pair_once():
    x = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
    want = [
        [x[b, i] @ x[b, j] for i in range(5) for j in range(i)] for b in range(len(x))
    ]
    got = dlrm.interactions(jnp.asarray(x))
    assert got.shape == (2, 10)
    assert_reordered(got, np.array(want), 4, np.abs(x).max() ** 2)
    config = dataclasses.replace(MICRO, tables=(3, 4, 5, 6))
    assert config.pairs == 10


def test_trains_stand_for_the_dense_tables(params, batch):
    *inputs, _ = batch
    trained = dlrm.init_params(MICRO, jax.random.key(2), layers=TRAINS)
    trained["tables"][1] = jax.tree.map(lambda x: 2 * x, trained["tables"][1])
    (train,) = rank_control.trains_of(trained).values()
    assert train.diagonals[0].shape == (3,)
    table = to_dense(train)[:600]
    dense = {**trained, "tables": {0: trained["tables"][0], 1: {"embedding": table}}}
    want = dlrm.make_apply(MICRO)(dense, *inputs)
    got = dlrm.make_apply(MICRO, layers=TRAINS)(trained, *inputs)
    assert_reordered(got, want, 64, np.abs(want).max())


def test_only_large_tables_and_wide_maps_become_trains():
    config = dataclasses.replace(MICRO, top=(160, 24))
    layers = dataclasses.replace(
        dlrm.tensor_train_layers(table_rank=3, linear_rank=4), large_rows=600
    )
    make = lambda key: dlrm.init_params(config, key, layers=layers)
    shapes = jax.eval_shape(make, jax.random.key(0))
    assert set(shapes["tables"][0]) == {"embedding"}
    assert set(shapes["tables"][1]) == {"cores", "diagonals"}
    kinds = [set(shapes["top"]["maps"][i]) for i in range(3)]
    train = {"cores", "diagonals", "bias"}
    assert kinds == [train, train, {"kernel", "bias"}]


def test_tables_begin_as_noise_of_the_given_size():
    config = dataclasses.replace(MICRO, tables=(3000, 3001), embedding_std=0.02)
    layers = dlrm.tensor_train_layers(table_rank=8, large_rows=3001)
    make = lambda key: dlrm.init_params(config, key, layers=layers)["tables"]
    drawn = jax.jit(jax.vmap(make))(jax.random.split(jax.random.key(0), 8))
    (train,) = rank_control.trains_of(drawn).values()
    whole = jax.jit(jax.vmap(to_dense))(train)
    assert np.std(drawn[0]["embedding"]) == pytest.approx(0.02, rel=0.02)
    assert np.std(whole) == pytest.approx(0.02, rel=0.25)


def test_dropout_needs_a_key_and_keeps_the_mean(params, batch):
    config = dataclasses.replace(MICRO, dropout=0.25)
    loss, plain = dlrm.make_loss(config), dlrm.make_loss(MICRO)
    assert float(loss(params, batch)) == float(plain(params, batch))
    key = jax.random.key(3)
    assert float(loss(params, batch, key)) != float(plain(params, batch, key))
    assert float(plain(params, batch, key)) == float(plain(params, batch))
    dropped = np.asarray(dlrm.dropout(jnp.ones((100, 100)), 0.25, key))
    values, counts = np.unique(dropped, return_counts=True)
    assert_reordered(values, np.array([0, 4 / 3]), 1, 1)
    assert counts[0] / 1e4 == pytest.approx(0.25, abs=0.02)


def test_gradients_reach_every_parameter(batch):
    params = dlrm.init_params(MICRO, jax.random.key(0), layers=TRAINS)
    grads = jax.grad(dlrm.make_loss(MICRO, layers=TRAINS))(params, batch)
    zero = [bool((g == 0).all()) for g in jax.tree.leaves(grads)]
    assert zero == [False] * len(zero)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": ()}, r"tables must be positive sizes, got \(\)"),
        ({"top": (8, 0)}, r"top must be positive sizes, got \(8, 0\)"),
        ({"dense": 0}, "dense must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=f"DLRMConfig: {words}"):
        dataclasses.replace(MICRO, **change)
