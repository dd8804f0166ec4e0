"""The JAX side, fed a recording: optax.adamw and fp8_adamw stored in several ways."""

import importlib.metadata

import jax
import numpy as np
import optax

import coat_jax
from coat_jax import moments, telemetry
from experiments.baselines.exchange import Adam, Outcome, Recording

REFERENCE = "optax.adamw (float32)"
# The last does what torchao's AdamWFp8 does, but that its groups end with the rows.
STORED = {
    "fp8_adamw": {},
    "fp8_adamw, v to nearest": {"v_rounding": "nearest"},
    "fp8_adamw, v stochastic": {"v_rounding": "stochastic"},
    "fp8_adamw, group 256": {"group": 256},
    "fp8_adamw, unexpanded": {"expand": False, "v_rounding": "nearest"},
    "fp8_adamw, unexpanded, group 256": {
        "expand": False,
        "v_rounding": "nearest",
        "group": 256,
    },
}


def transformation(name: str, adam: Adam):
    """(the optax transformation called `name`, its storage or None)."""
    scalars = (adam.lr, adam.b1, adam.b2, adam.eps)
    decay = {"weight_decay": adam.weight_decay}
    if name == REFERENCE:
        return optax.adamw(*scalars, **decay), None
    storage = coat_jax.Storage(**STORED[name])
    return coat_jax.fp8_adamw(*scalars, **decay, storage=storage), storage


def replay(name: str, recording: Recording, adam: Adam, at: list[int]) -> Outcome:
    """Feeds the gradients in turn; parameters are kept after each step of `at`."""
    tx, storage = transformation(name, adam)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jax.numpy.asarray, recording.params)
    state, kept = tx.init(params), {}
    for i in range(recording.steps):
        grads = {name: leaf[i] for name, leaf in recording.grads.items()}
        params, state = step(params, state, grads)
        if i + 1 in at:
            kept[i + 1] = jax.tree.map(np.asarray, params)
    v = state[0].nu
    if storage is not None:
        v = moments.decode_moments(v, storage, "v")
    versions = {n: importlib.metadata.version(n) for n in ("jax", "optax")}
    size = telemetry.state_bytes(state)
    return Outcome(name, adam.b2, kept, jax.tree.map(np.asarray, v), size, versions)
