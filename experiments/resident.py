"""Training with every token on the device, for many short runs in one process.

No batch travels and no figure is awaited but every `LOOK` steps, so that a small model
keeps a fast GPU busy. What is compiled for one seed serves the others. `loop.py` is the
other loop: it saves, resumes and watches, and reads its batches as it goes.
"""

import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from coat_jax import training
from coat_jax.models import llama
from experiments import job, optimizers, policies

LOOK = 50  # steps between two figures


class Batch(NamedTuple):
    """ids: int32, all tokens of a part. starts: int32 (batch,), of each window."""

    ids: Any
    starts: Any


def windows_of(batch: Batch, seq: int):
    """int32 (batch, seq + 1), cut out on the device."""
    cut = lambda start: lax.dynamic_slice(batch.ids, (start,), (seq + 1,))
    return jax.vmap(cut)(batch.starts)


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """The compiled functions of one config; the seed is an argument of the first.

    start: key -> state. step: (state, batch) -> (state, figures). own_loss and
    plain_loss: (params, ids, starts (N, batch)) -> mean loss, in the arm's own
    arithmetic and in that of Flax's layers.
    """

    start: Any
    step: Any
    own_loss: Any
    plain_loss: Any


def _mean_loss(loss, seq: int):
    def mean(params, ids, starts_NB):
        one = lambda starts: loss(params, windows_of(Batch(ids, starts), seq))
        return jnp.mean(lax.map(one, starts_NB))

    return jax.jit(mean)


@functools.lru_cache(maxsize=4)
def _plain_mean_loss(model: llama.LlamaConfig, attention: str, seq: int):
    """One compilation for all arms: their parameters have the same shapes."""
    layers = llama.Layers(implementation=attention)
    return _mean_loss(llama.make_loss(model, layers=layers), seq)


def make_arm(config) -> Arm:
    """What a resolved config computes; compiled when it is first called."""
    model, layers = job.model_of(config), policies.layers_of(config)
    tx, seq = optimizers.make_optimizer(config), config.seq
    loss = llama.make_loss(model, layers=layers)
    make = jax.jit(lambda key: llama.init_params(model, key, layers=layers))
    on_windows = lambda params, batch, key: loss(params, windows_of(batch, seq), key)
    plain_loss = _plain_mean_loss(model, config.attention, seq)
    plain = policies.policy_of(config).plain
    return Arm(
        start=lambda key: training.init_state(
            make(key), tx, jax.random.fold_in(key, 1)
        ),
        step=training.make_train_step(on_windows, tx, fused=config.fused),
        own_loss=plain_loss if plain else _mean_loss(loss, seq),
        plain_loss=plain_loss,
    )


def train_starts(count: int, config) -> np.ndarray:
    """Where the windows of each step start: int32 (steps, batch), anew each epoch.

    `count` is the number of training tokens. The seed alone decides.
    """
    windows = (count - 1) // config.seq
    need = config.steps * config.batch
    rng = np.random.default_rng(config.seed)
    epochs = [rng.permutation(windows) for _ in range(-(-need // windows))]
    chosen = np.concatenate(epochs)[:need].astype(np.int32) * np.int32(config.seq)
    return chosen.reshape(config.steps, config.batch)


def held_starts(count: int, config) -> np.ndarray:
    """int32 (batches, batch), spread over the held-out text; at least one batch."""
    windows = (count - 1) // config.seq
    batches = max(min(config.eval_batches, windows // config.batch), 1)
    chosen = np.linspace(0, windows - 1, batches * config.batch).astype(np.int32)
    return (chosen * np.int32(config.seq)).reshape(batches, config.batch)


def run(arm: Arm, config, ids, held_ids, *, on_look=lambda step, loss: None) -> dict:
    """Trains one seed to its end and returns its figures, the curve among them.

    Args:
      arm: of `make_arm`, for this config but for the seed.
      config: resolved.
      ids: the training tokens, int32, on the device.
      held_ids: the held-out tokens, likewise.
      on_look: called with the step and the mean loss of the last `LOOK` steps.

    Returns:
      held_out_loss, held_out_loss_plain (of the same parameters in Flax's layers),
      train_loss (the last look), curve, step_ms (without the first look, which
      compiles), seconds. Losses that aren't finite are None, and end the run.
    """
    began = time.perf_counter()
    state = arm.start(jax.random.key(config.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    rows = [jax.device_put(row) for row in train_starts(len(ids), config)]
    curve, losses, marks = [], [], []
    for step, starts in enumerate(rows, 1):
        state, figures = arm.step(state, Batch(ids, starts))
        losses.append(figures["loss"])
        if step % LOOK == 0 or step == len(rows):
            loss = float(np.mean(jax.device_get(losses)))
            curve.append((step, loss))
            marks.append((step, time.perf_counter()))
            on_look(step, loss)
            losses = []
            if not math.isfinite(loss):
                break
    held = held_starts(len(held_ids), config)
    with jax.numpy_dtype_promotion("standard"):
        own, plain = (
            float(f(state.params, held_ids, held))
            for f in (arm.own_loss, arm.plain_loss)
        )
    return {
        "held_out_loss": _finite(own),
        "held_out_loss_plain": _finite(plain),
        "train_loss": _finite(curve[-1][1]),
        "curve": [(step, _finite(loss)) for step, loss in curve],
        "parameters": parameters,
        "optimizer_bytes": sum(x.nbytes for x in jax.tree.leaves(state.opt_state)),
        "step_ms": _step_ms(marks),
        "seconds": time.perf_counter() - began,
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _step_ms(marks: list[tuple[int, float]]) -> float | None:
    """Of all steps after the first look; None if there was only that one."""
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (end - start) / (last - first) if last > first else None
