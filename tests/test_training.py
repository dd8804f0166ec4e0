"""One step: what it computes, what it gives away, and that it compiles once."""

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax import training
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.once

BATCH = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
# No small leaves: the 128 x 64 matrix is kept in FP8.
STORAGE = coat_jax.Storage(min_size=64)


def params_of(seed=0):
    weight = jax.random.normal(jax.random.key(seed), (128, 64))
    return {"w": weight, "b": jnp.zeros(64)}


def loss_fn(params, batch, key):
    noise = jax.random.normal(key, (64,))
    y = batch @ params["w"] + (params["b"] + noise)[None]
    return jnp.mean(jnp.square(y))


def fp8():
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, coat_jax.fp8_adamw(1e-2, storage=STORAGE))


def run(tx, steps, *, state=None, step=None, **options):
    state = state or training.init_state(params_of(), tx, jax.random.key(7))
    step, losses = step or training.make_train_step(loss_fn, tx, **options), []
    for _ in range(steps):
        state, metrics = step(state, jnp.asarray(BATCH))
        losses.append(metrics["loss"])
    return state, losses


def test_a_step_is_gradient_update_and_apply():
    tx = optax.sgd(0.5)
    state, losses = run(tx, 1)
    key = jax.random.fold_in(jax.random.key(7), 0)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params_of(), BATCH, key)
    want = jax.tree.map(
        lambda p, g: np.asarray(p) - np.float32(0.5) * np.asarray(g), params_of(), grads
    )
    assert int(state.step) == 1
    np.testing.assert_allclose(losses[0], loss, rtol=2.0**-20)
    for got, wanted in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2.0**-20, atol=2.0**-20)


def test_metrics_are_the_loss_and_the_norm_before_clipping():
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    state = training.init_state(params_of(), tx, jax.random.key(7))
    _, metrics = training.make_train_step(loss_fn, tx)(state, jnp.asarray(BATCH))
    key = jax.random.fold_in(jax.random.key(7), 0)
    grads = jax.grad(loss_fn)(params_of(), BATCH, key)
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))
    assert {name: x.dtype.name for name, x in metrics.items()} == {
        "loss": "float32",
        "grad_norm": "float32",
    }
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=2.0**-18)


@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), fp8], ids=["adamw", "fp8"])
def test_a_run_cut_in_two_is_the_same_run(make):
    tx = make()
    step = training.make_train_step(loss_fn, tx)
    whole, losses = run(tx, 6, step=step)
    half, first = run(tx, 3, step=step)
    elsewhere = jax.tree.map(jnp.copy, half)
    again, second = run(tx, 3, state=elsewhere, step=step)
    assert_same_bits((again, first + second), (whole, losses))


def test_each_step_draws_another_key_and_the_state_keeps_its_own():
    state, losses = run(optax.set_to_zero(), 3)
    assert len({float(loss) for loss in losses}) == 3  # only the noise differs
    assert_same_bits(state.key, jax.random.key(7))


def test_it_compiles_once_and_gives_the_old_state_away():
    tx = fp8()
    state = training.init_state(params_of(), tx, jax.random.key(0))
    traces = []

    def counted(params, batch, key):
        traces.append(1)
        return loss_fn(params, batch, key)

    step = training.make_train_step(counted, tx)
    old = state.params["w"]
    for _ in range(3):
        state, _ = step(state, jnp.asarray(BATCH))
    assert len(traces) == 1
    assert old.is_deleted()


def test_a_sharded_state_stays_sharded_and_gives_the_same_losses():
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=kinds, devices=jax.devices()[:4])
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    where = place(None, "d")
    params = jax.device_put(params_of(), {"w": where, "b": place()})
    tx = fp8()
    state = training.init_state(params, tx, jax.random.key(7))
    codes = state.opt_state[1][0].mu.codes["w"]
    assert codes.sharding.is_equivalent_to(where, 2)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    after, losses = run(tx, 3, state=state, shardings=shardings)
    for leaf, wanted in zip(
        jax.tree.leaves(after), jax.tree.leaves(shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    _, want = run(tx, 3)
    # Sums over shards come in another order, and a code may round the other way.
    np.testing.assert_allclose(losses, want, rtol=1e-4)


def test_fused_is_the_same_step_for_float32_parameters():
    got, _ = run(fp8(), 3, fused=True)
    want, _ = run(fp8(), 3)
    for g, w in zip(
        jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True
    ):
        # Three steps of at most lr: a code that rounds the other way moves one by a
        # fraction of a step.
        np.testing.assert_allclose(g, w, atol=3e-3)


def test_fused_refuses_other_optimizers():
    with pytest.raises((ValueError, TypeError), match="apply_fused"):
        run(optax.adamw(1e-3), 1, fused=True)


def test_raw_keys_are_refused_by_name():
    with pytest.raises(TypeError, match=r"must be a typed key, got uint32; .*key\(0\)"):
        training.init_state(params_of(), optax.sgd(0.1), jnp.zeros(2, jnp.uint32))


def test_a_state_can_be_made_of_shapes_and_of_numpy_arrays():
    make = lambda params: training.init_state(params, fp8(), jax.random.key(0))
    params = params_of()
    want = jax.tree.structure(make(params))
    assert jax.tree.structure(jax.eval_shape(make, params)) == want
    assert jax.tree.structure(make(jax.tree.map(np.asarray, params))) == want
