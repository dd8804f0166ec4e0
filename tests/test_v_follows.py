"""Whether v, stored in 8 bits, keeps following its gradient: figures, and an MLP."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax.moments import decode_moments

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

STEPS = 3000  # before the change, and after it
CHANGES = {"tenfold fall": 0.1, "fall to 1/10,000": 1e-4, "threefold rise": 3.0}
CHANGED = 32  # of a group's 128 elements
GROUPS = 16  # a change
FOLLOWS = 0.08  # how far the median of sqrt(v) may be from float32 Adam's, relatively
B2 = [0.95, 0.99, 0.999]
STORAGES = {
    "default": coat_jax.Storage(min_size=0),
    "nearest": coat_jax.Storage(min_size=0, v_rounding="nearest"),
}


@functools.cache
def following(b2):
    """{(storage, change): median of sqrt(v) over float32 Adam's where it changed}.

    All see the same Gaussian gradients, of which 32 in each group of 128 change their
    size after 3000 steps.
    """
    txs = {
        name: coat_jax.scale_by_fp8_adam(b2=b2, storage=storage)
        for name, storage in STORAGES.items()
    }
    txs["float32"] = optax.scale_by_adam(b2=b2)
    factor = jnp.array(list(CHANGES.values()))[:, None, None]
    after = jnp.ones((len(CHANGES), GROUPS, 128)).at[..., :CHANGED].set(factor)

    def step(states, t):
        key = jax.random.fold_in(jax.random.key(0), t)
        g = jax.random.normal(key, after.shape) * jnp.where(t < STEPS, 1.0, after)
        return {name: tx.update(g, states[name])[1] for name, tx in txs.items()}, None

    @jax.jit
    def run():
        states = {name: tx.init(after) for name, tx in txs.items()}
        states, _ = jax.lax.scan(step, states, jnp.arange(2 * STEPS))
        decoded = {
            name: decode_moments(states[name].nu, storage, "v")
            for name, storage in STORAGES.items()
        }
        return decoded, states["float32"].nu

    decoded, want = run()
    return {
        (name, change): float(np.median(np.sqrt(v / want)[i, :, :CHANGED]))
        for name, v in decoded.items()
        for i, change in enumerate(CHANGES)
    }


@pytest.mark.parametrize("b2", B2)
@pytest.mark.parametrize("change", CHANGES)
def test_v_follows_its_gradient_with_the_default_storage(b2, change):
    """Median of sqrt(v) over float32 Adam's, 3000 steps after the change (CPU):

    | b2    | change           | default | nearest |
    |-------|------------------|---------|---------|
    | 0.95  | tenfold fall     | 1.000   | 1.002   |
    | 0.95  | fall to 1/10,000 | 0.970   | 1.136   |
    | 0.95  | threefold rise   | 0.999   | 0.998   |
    | 0.99  | tenfold fall     | 1.012   | 1.080   |
    | 0.99  | fall to 1/10,000 | 0.952   | 888     |
    | 0.99  | threefold rise   | 0.999   | 0.996   |
    | 0.999 | tenfold fall     | 0.971   | 2.689   |
    | 0.999 | fall to 1/10,000 | 0.987   | 2.870   |
    | 0.999 | threefold rise   | 0.999   | 1.057   |
    """
    assert abs(following(b2)["default", change] - 1) <= FOLLOWS


def test_with_nearest_rounding_v_stops_following():
    """The fault that stochastic rounding mends; the table above has the figures."""
    assert following(0.999)["nearest", "tenfold fall"] > 2
    assert following(0.99)["nearest", "fall to 1/10,000"] > 100
    assert abs(following(0.95)["nearest", "tenfold fall"] - 1) <= FOLLOWS


SEEDS = 8


def final_losses(tx):
    """The loss of a 32-64-32 MLP after 200 steps towards a teacher, one per seed."""

    def run(seed):
        k = jax.random.split(jax.random.key(seed), 5)
        draw = lambda key, *shape: jax.random.normal(key, shape)
        x, teacher_up = draw(k[0], 256, 32), draw(k[1], 32, 64) / 32**0.5
        y = jnp.tanh(x @ teacher_up) @ draw(k[2], 64, 32) / 8
        params = {"up": draw(k[3], 32, 64) / 32**0.5, "down": draw(k[4], 64, 32) / 8}
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2)

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = jax.lax.scan(step, (params, tx.init(params)), None, length=200)
        return loss(carry[0])

    return np.asarray(jax.jit(jax.vmap(run))(jnp.arange(SEEDS)), np.float64)


@pytest.mark.soak
def test_an_mlp_at_b2_0999_ends_within_the_seed_spread_of_adamw():
    """Final losses over 8 seeds, learning rate 3e-3 (CPU, 30 November 2026):

    optax.adamw 0.01861, standard deviation 0.00105; fp8_adamw 1.4e-5 below on average;
    with v rounded to nearest 31e-5 below, as its v is then too small.
    """
    want = final_losses(optax.adamw(3e-3))
    gap = {
        name: abs(np.mean(final_losses(coat_jax.fp8_adamw(3e-3, storage=s)) - want))
        for name, s in STORAGES.items()
    }
    assert gap["default"] <= want.std(ddof=1)
    assert gap["default"] < gap["nearest"]  # what the seeds' spread alone cannot see
