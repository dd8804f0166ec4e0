"""One training step: a state that is a plain tuple, and the function that advances it.

    state = init_state(params, tx, jax.random.key(0))
    step = make_train_step(loss, tx)
    state, metrics = step(state, batch)

Everything that a run needs to continue bit for bit is in the state, except where the
data stands. Sharded training is the same code: give `init_state` sharded parameters,
and the optimizer's state follows them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
import optax

from coat_jax.optimizer import apply_fused
from coat_jax.sharding import state_shardings


class TrainState(NamedTuple):
    """step: int32 (). params, opt_state: trees. key: a typed PRNG key, never changed.

    The randomness of step n is `fold_in(key, n)`, so that it is known from the state
    alone and is the same however often a run was interrupted.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any


def init_state(params, tx: optax.GradientTransformation, key) -> TrainState:
    """The state before the first step; the optimizer's state is placed like `params`.

    Args:
      params: tree of arrays. Where one is laid out over several devices, so is all
        that the optimizer keeps for it.
      tx: any optax transformation.
      key: a typed key (`jax.random.key`).

    Returns:
      TrainState with step 0, of these very arrays: the first step of `make_train_step`
      gives `params` and `key` away with it.

    Raises:
      TypeError: if `key` is a raw uint32 key.

    Example:
      >>> state = init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
      >>> int(state.step)
      0
    """
    if not jnp.issubdtype(getattr(key, "dtype", float), jax.dtypes.prng_key):
        raise TypeError(
            "init_state: key must be a typed key, got "
            f"{getattr(key, 'dtype', type(key).__name__)}; use jax.random.key(0)"
        )
    step = jnp.zeros([], jnp.int32)
    placed = _first_named_sharding(params)
    if placed is None:
        return TrainState(step, params, jax.jit(tx.init)(params), key)
    init = jax.jit(tx.init, out_shardings=state_shardings(tx, params))
    # Left on one device, these two would make the second step compile anew.
    step, key = jax.device_put((step, key), NamedSharding(placed.mesh, PartitionSpec()))
    return TrainState(step, params, init(params), key)


def _first_named_sharding(params) -> NamedSharding | None:
    """A sharding over a mesh that some leaf has; None if all lie on one device.

    Traced arrays and NumPy's have no sharding of their own.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        return None
    all_of_them = (getattr(x, "sharding", None) for x in jax.tree.leaves(params))
    return next((s for s in all_of_them if isinstance(s, NamedSharding)), None)


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    fused: bool = False,
    shardings: TrainState | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """step(state, batch) -> (state, metrics), compiled whole; `state` is given away.

    With g the gradient of loss_fn(params, batch, key) and key the state's, folded with
    its step: params + tx.update(g), or `coat_jax.apply_fused` in one pass over memory.

    Args:
      loss_fn: (params, batch, key) -> scalar.
      tx: the transformation that made the state; clipping belongs in it.
      fused: update by `apply_fused`, which takes fp8_adamw, alone or last in a chain.
      shardings: of the state, kept in every step; None leaves them to the compiler.

    Returns:
      The step function. Its metrics are f32 scalars: loss, and grad_norm before any
      clipping. The state's buffers are donated: the old state can't be read again.

    Raises:
      ValueError: at the first step, if fused and `tx` isn't one that can be.

    Example:
      >>> tx, loss = optax.sgd(0.5), lambda p, x, key: jnp.sum((p - x) ** 2)
      >>> step = make_train_step(loss, tx)
      >>> state = init_state(jnp.zeros(2), tx, jax.random.key(0))
      >>> state, metrics = step(state, jnp.array([1.0, 2.0]))
      >>> state.params.tolist(), float(metrics["loss"])
      ([1.0, 2.0], 5.0)
    """

    def advance(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, key)
        if fused:
            params, opt_state = apply_fused(
                tx, grads, state.opt_state, state.params, key=key
            )
        else:
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        metrics = {name: x.astype(jnp.float32) for name, x in metrics.items()}
        return state._replace(
            step=state.step + 1, params=params, opt_state=opt_state
        ), metrics

    pinned = None if shardings is None else (shardings, None)
    compiled = jax.jit(advance, donate_argnums=0, out_shardings=pinned)

    def step(state, batch):
        # optax's bias correction is float ** int32, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return compiled(state, batch)

    return step
