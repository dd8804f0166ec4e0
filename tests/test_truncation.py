"""Physical truncation: the same function in smaller arrays, states and checkpoints."""

import functools
import json
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import fp8_adamw, fp8_state, serialization
from coat_jax.checkpoint import Checkpointer, abstract_state
from coat_jax.factorize import tt_shape, ttm_shape
from coat_jax.moments import Storage, decode_moments, encode_moments
from coat_jax.nn.tensor_embedding import TTMEmbedding
from coat_jax.nn.tensor_train import TTLinear
from coat_jax.rank_control import labels, rank_control, ranks, size_exact, trains_of
from coat_jax.tensor_train import TAU, TensorTrain, size, to_dense
from coat_jax.truncation import fit, stored_ranks, truncate
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]
SHAPE = tt_shape(64, 64, rank=8)


def tt_params(shape: Any = SHAPE, seed=0, dead=0.4):
    """A train whose diagonals are spread over (0, 2), a share of them dead."""
    draw = np.random.default_rng(seed)
    cores = [draw.normal(size=s) / s[-1] ** 0.5 for s in shape.core_shapes]
    vs = [2 * draw.random(s[-1]) for s in shape.core_shapes[:-1]]
    vs = [np.where(draw.random(v.shape) < dead, 0.005, v) for v in vs]
    for v in vs:
        v[0] = 1.5
    wide = lambda arrays: [jnp.asarray(a.astype(np.float32)) for a in arrays]
    return {"cores": wide(cores), "diagonals": wide(vs)}


def dense(node):
    """The matrix in float64, by NumPy alone; a TTM's axes stay apart."""
    cores = [np.asarray(core, np.float64) for core in node["cores"]]
    out = cores[0]
    for v, core in zip(node["diagonals"], cores[1:], strict=True):
        v = np.asarray(v, np.float64)
        out = np.tensordot(out * np.where(v > TAU, v, 0.0), core, 1)
    return out


def assert_same_function(got, want):
    """1e-5 of the result's size would be allowed; sums in another order are within."""
    scale = float(np.abs(want).max())
    assert_reordered(got, want, 64, scale)


# The function ------------------------------------------------------------------------


@pytest.mark.parametrize("multiple_of", [None, 16])
def test_a_matrix_is_unchanged(multiple_of):
    params = {"fc": tt_params() | {"bias": jnp.ones(64)}}
    small, state, report = truncate(params, multiple_of=multiple_of)
    assert state is None
    assert_same_function(dense(small["fc"]), dense(params["fc"]))
    assert int(size_exact(small)) == int(size_exact(params))
    (train,) = trains_of(small).values()
    assert report.size == (SHAPE.size, size(train))
    middle = train.diagonals[2].shape[0]
    assert middle == 16 if multiple_of else middle <= 8
    assert report.size[1] < 0.7 * report.size[0] or multiple_of
    assert f"{SHAPE.size:,} -> {size(train):,} parameters" in str(report)


def test_diagonals_become_ones_and_padding_stays_zero():
    small = truncate(tt_params(), multiple_of=16).params
    for i, v in enumerate(small["diagonals"]):
        assert set(np.asarray(v).tolist()) <= ({0.0, 1.0} if i == 2 else {1.0})
    again = truncate(small).params
    assert again["diagonals"][2].shape[0] == int((small["diagonals"][2] > 0).sum())
    assert_same_function(dense(again), dense(small))


def test_a_matrix_train_is_unchanged():
    shape = ttm_shape(100, 24, rank=6)
    params = tt_params(shape)
    small = truncate(params).params
    assert_same_function(dense(small), dense(params))
    assert int(size_exact(small)) == size(*trains_of(small).values())


def test_an_empty_bond_leaves_the_bias_and_finite_gradients():
    params = tt_params()
    params["diagonals"][1] = jnp.full_like(params["diagonals"][1], 0.003)
    small = truncate(params, multiple_of=16).params
    assert ranks(small) == {"": (1,) * 7}
    assert int(size_exact(small)) == int(size_exact(params)) == 0

    def loss(params):
        train = TensorTrain(tuple(params["cores"]), tuple(params["diagonals"]))
        return jnp.sum((to_dense(train, inputs=3) + 2.0) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(small)
    assert float(value) == 4.0 * 64 * 64
    assert all(bool(jnp.all(g == 0)) for g in jax.tree.leaves(grads))


def test_half_precision_cores_keep_their_dtype():
    params = tt_params()
    params["cores"] = [core.astype(jnp.bfloat16) for core in params["cores"]]
    small = truncate(params).params
    assert {core.dtype for core in small["cores"]} == {jnp.dtype(jnp.bfloat16)}
    assert {v.dtype for v in small["diagonals"]} == {jnp.dtype(jnp.float32)}


def test_the_halves_of_a_train_need_not_be_equal():
    shape = tt_shape(16, 64, rank=8, in_dims=(4, 4), out_dims=(4, 4, 4))
    small = truncate({"a": tt_params(shape)}, multiple_of=16, inputs={"a": 2})
    after = small.report.ranks["a"][1]
    assert after[2] == 16
    assert max(after[3:]) < 16


# Optimizer states --------------------------------------------------------------------


def partitioned(diagonal=None, core=None, rest=None):
    parts = {"core": core or optax.adamw(1e-3), "rest": rest or optax.adamw(1e-3)}
    return optax.partition(parts | {"diagonal": diagonal or rank_control(1e-3)}, labels)


def used(tx, params):
    """A state with nothing in it that is zero, without running a step."""
    return jax.tree.map(lambda x: np.asarray(x) + np.ones((), x.dtype), tx.init(params))


@pytest.mark.parametrize(
    "make",
    [
        lambda: partitioned(rest=fp8_adamw(1e-3)),
        lambda: optax.chain(optax.clip_by_global_norm(1e3), partitioned()),
        lambda: optax.MultiSteps(partitioned(), every_k_schedule=2),
        lambda: optax.apply_if_finite(partitioned(), 3),
        lambda: optax.sgd(1e-3, momentum=0.9),
        lambda: partitioned(core=optax.lion(1e-4)),
        lambda: optax.inject_hyperparams(rank_control)(1e-3),
    ],
    ids="partition chain MultiSteps apply_if_finite trace lion inject".split(),
)
def test_a_state_continues_at_the_truncated_shapes(make):
    tx = make()
    params = {"fc": tt_params() | {"bias": jnp.zeros(64)}, "head": jnp.ones((64, 128))}
    small, cut, report = truncate(params, used(tx, params))
    want = jax.eval_shape(tx.init, small)
    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert jax.tree.structure(cut) == jax.tree.structure(want)
    assert shapes(cut) == shapes(want)
    assert report.unscaled == ()
    updates, state = jax.eval_shape(tx.update, small, cut, small)
    assert shapes(state) == shapes(cut)
    assert shapes(updates) == shapes(small)


def test_moments_follow_the_chain_rule():
    """Moments after truncation are those of a run whose parameters were G v all along.

    With the gradient g of G, that of G v is g / v; so mu scales by 1 / v, nu by
    1 / v^2, and those of v itself, now 1, by v and v^2.
    """
    tx = optax.adam(1e-3)
    params = tt_params(tt_shape(16, 16, rank=4, in_dims=(4, 4), out_dims=(4, 4)))

    def loss(params):
        train = TensorTrain(tuple(params["cores"]), tuple(params["diagonals"]))
        return jnp.sum(jnp.sin(to_dense(train, inputs=2)))

    @jax.jit
    def first(params):
        return tx.update(jax.grad(loss)(params), tx.init(params))[1][0]

    small = truncate(params).params
    got, want = truncate(params, first(params)).opt_state, first(small)
    for a, b in ((got.mu, want.mu), (got.nu, want.nu)):
        scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(b))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert_reordered(x, y, 256, scale)


def test_moments_in_fp8_are_decoded_cut_and_stored():
    storage = Storage(min_size=64)
    shape = tt_shape(64, 512, rank=40, in_dims=(8, 8), out_dims=(64, 8))
    params = tt_params(shape, dead=0.0)
    ones = [jnp.ones_like(v) for v in params["diagonals"]]
    params["diagonals"] = [ones[0], 2.0 * ones[1].at[36:].set(0.0), ones[2]]
    tx = fp8_state(optax.trace(0.9), storage=storage)
    values = np.random.default_rng(1).normal(size=(8, 8, 40)).astype(np.float32)
    state, stored = tx.init(params), encode({"x": jnp.asarray(values)}, storage)
    for column, new in zip(state.inner_state.trace, stored, strict=True):
        column["cores"][1] = new["x"]
    small, cut, _ = truncate(params, state, storage=storage)
    want = jax.eval_shape(tx.init, small)
    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert shapes(cut) == shapes(want)
    found = decode(cut.inner_state.trace, storage)["cores"][1]
    old = np.asarray(decode(stored, storage)["x"])[..., :36] / 2
    assert cut.inner_state.trace.codes["cores"][1].dtype == jnp.float8_e4m3fn
    assert_sqnr(found, old, 28.0)  # codes of codes, under another maximum


def encode(tree, storage):
    return jax.jit(lambda t: encode_moments(t, storage, "m"))(tree)


def decode(stored, storage):
    return jax.jit(lambda t: decode_moments(t, storage, "m"))(stored)


def test_fields_of_unknown_names_are_reported():
    params = tt_params()
    state = {"mine": params, "mu": params}
    assert truncate(params, state).report.unscaled == ("mine",)


def test_other_shapes_for_a_core_are_refused():
    params = tt_params()
    state = {"mu": jax.tree.map(lambda p: p[None], params)}
    with pytest.raises(ValueError, match="make a new state"):
        truncate(params, state)
    with pytest.raises(ValueError, match="must hold a train"):
        truncate({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="multiple_of must be"):
        truncate(params, multiple_of=0)


# Flax --------------------------------------------------------------------------------


class Model(nnx.Module):
    """An embedding and two layers as trains, and a dense head."""

    def __init__(self, rngs):
        self.embed = TTMEmbedding(100, 24, rank=6, rngs=rngs)
        self.layers = nnx.List(
            [TTLinear(24, 24, rank=8, order=2, rngs=rngs) for _ in range(2)]
        )
        self.head = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def thinned(model):
    """The model with every third entry of each diagonal dead, others spread."""
    for train in (model.embed, *model.layers):
        for v in train.diagonals:
            i = jnp.arange(v[...].size)
            v[...] = jnp.where(i % 3 == 1, 0.002, 0.5 + 0.1 * i)


IDS = jnp.array([[0, 5, 99], [17, 5, 42]])


def test_a_model_and_its_optimizer_are_truncated_in_place():
    model = Model(nnx.Rngs(0))
    thinned(model)
    tx = partitioned()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(IDS) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    step(model, optimizer)
    want = model(IDS)
    got = truncate(model, optimizer)
    assert got.params is model
    assert got.opt_state is optimizer
    assert_same_function(model(IDS), want)
    assert got.report.size[1] < 0.7 * got.report.size[0]
    assert model.layers[0].cores[0][...].shape == (1, 6, 4)
    first = step(model, optimizer)
    assert float(step(model, optimizer)) < float(first)


def test_a_state_of_nnx_is_truncated_as_a_tree():
    model = Model(nnx.Rngs(0))
    thinned(model)
    graph, state = nnx.split(model)
    small = truncate(state).params
    assert_same_function(nnx.merge(graph, small)(IDS), model(IDS))
    assert ranks(small) == ranks(truncate(model).params)


def test_a_sharded_run_keeps_its_mesh():
    mesh = jax.make_mesh((1,), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(tt_params(), everywhere)
    small = truncate(params).params
    assert {leaf.sharding for leaf in jax.tree.leaves(small)} == {everywhere}


# Checkpoints -------------------------------------------------------------------------


def test_checkpoints_of_either_shape_are_resumed(tmp_path):
    """A fresh model of full rank takes the shapes that the checkpoint's meta tells."""
    tx = partitioned(rest=fp8_adamw(1e-3))
    params = {"fc": tt_params() | {"bias": jnp.zeros(64)}, "head": jnp.ones((64, 128))}
    state = used(tx, params)
    small = truncate(params, state)
    saved = {1: (params, state), 2: (small.params, small.opt_state)}
    with Checkpointer(tmp_path, storage=Storage()) as checkpointer:
        for step, tree in saved.items():
            checkpointer.save(
                step, dict(zip(("params", "opt_state"), tree, strict=True))
            )
        checkpointer.wait()
        for step, tree in saved.items():
            meta = tmp_path / f"step_{step}" / "meta" / "metadata"
            leaves = serialization.read_document(meta, "test")["leaves"]
            fresh = abstract_state(lambda: (params, tx.init(params)))
            shapes = fit(*fresh, ranks=stored_ranks(leaves))
            target = {"params": shapes.params, "opt_state": shapes.opt_state}
            found = checkpointer.restore(target, step=step).state
            assert_same_bits(found["params"], tree[0])
            assert_same_bits(found["opt_state"], tree[1])


def test_a_model_takes_ranks_that_went_through_json():
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    thinned(model)
    truncate(model)
    found = json.loads(json.dumps(ranks(model)))
    optimizer = nnx.Optimizer(other, partitioned(), wrt=nnx.Param)
    fit(other, optimizer, ranks=found)
    nnx.update(other, nnx.state(model))
    assert_same_bits(other(IDS), model(IDS))
    shapes = functools.partial(jax.tree.map, jnp.shape)
    want = nnx.Optimizer(model, partitioned(), wrt=nnx.Param)
    assert shapes(nnx.as_pure(optimizer.opt_state)) == shapes(
        nnx.as_pure(want.opt_state)
    )
    with pytest.raises(ValueError, match="must hold 5 ranks for train 'layers/0'"):
        fit(other, ranks={"embed": ranks(other)["embed"]})


def test_ranks_are_read_from_orbax_metadata(tmp_path):
    import orbax.checkpoint as ocp

    small = {"model": {"fc": truncate(tt_params()).params}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", small)
        checkpointer.wait_until_finished()
        shapes = checkpointer.metadata(tmp_path / "c").item_metadata
        got = fit({"fc": tt_params()}, ranks=stored_ranks(shapes)).params
    assert ranks(got) == {"fc": ranks(small)["model/fc"]}
