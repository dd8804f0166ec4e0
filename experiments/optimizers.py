"""The optimizer that a config asks for: clip, then the update, then the schedule."""

import jax
from jax import numpy as jnp
import optax

import coat_jax


def storage_of(config) -> coat_jax.Storage:
    """How fp8_adamw keeps its moments."""
    formats = {"e4m3": coat_jax.E4M3, "e5m2": coat_jax.E5M2}
    rounding = None if config.v_rounding == "default" else config.v_rounding
    return coat_jax.Storage(
        m_format=formats[config.m_format],
        v_format=formats[config.v_format],
        group=config.group,
        expand=config.expand,
        v_rounding=rounding,
    )


def schedule_of(config):
    """A linear rise to lr over the warm-up, then a cosine down to final_lr of it.

    The first step has the first rise, not zero: a step that moves nothing is wasted.
    """
    warmup = int(config.warmup * config.steps)
    fall = optax.cosine_decay_schedule(
        config.lr, max(config.steps - warmup, 1), alpha=config.final_lr
    )
    if not warmup:
        return fall
    rise = optax.linear_schedule(config.lr / (warmup + 1), config.lr, warmup)
    return optax.join_schedules([rise, fall], [warmup])


def _update(config, schedule) -> optax.GradientTransformation:
    betas = {"b1": config.b1, "b2": config.b2}
    decay = {"weight_decay": config.weight_decay, "mask": coat_jax.decay_mask}
    kept = jnp.dtype(config.momentum_dtype)
    mu = {"mu_dtype": None if config.momentum_dtype == "float32" else kept}
    match config.optimizer:
        case "fp8_adamw":
            store = storage_of(config)
            return coat_jax.fp8_adamw(
                schedule, eps=config.eps, **betas, **decay, storage=store
            )
        case "adamw":
            return optax.adamw(schedule, eps=config.eps, **betas, **decay, **mu)
        case "lion":
            return optax.lion(schedule, **betas, **decay, **mu)
        case "muon":
            mask = {"weight_decay_mask": coat_jax.decay_mask}
            return optax.contrib.muon(
                schedule,
                weight_decay=config.weight_decay,
                adam_b2=config.b2,
                muon_weight_dimension_numbers=_matrices,
                **mask,
                **mu,
            )
        case "adafactor":
            rate, mask = config.weight_decay, coat_jax.decay_mask
            momentum = {"momentum": config.b1, "dtype_momentum": kept}
            # Decay here isn't scaled by the rate, unlike in the others: scale it.
            return optax.chain(
                optax.adafactor(
                    schedule, multiply_by_parameter_scale=False, **momentum
                ),
                _scheduled_decay(schedule, rate, mask),
            )
        case "sgd":
            return optax.chain(
                optax.add_decayed_weights(config.weight_decay, coat_jax.decay_mask),
                optax.sgd(schedule, momentum=config.b1, accumulator_dtype=kept),
            )


def _matrices(params):
    """What Muon turns: the last two axes of every matrix, stacked or not."""
    numbers = optax.contrib.MuonDimensionNumbers
    last_two = lambda p: numbers(reduction_axis=p.ndim - 2, output_axis=p.ndim - 1)
    return jax.tree.map(
        lambda p, matrix: last_two(p) if matrix else None,
        params,
        coat_jax.decay_mask(params),
    )


def _scheduled_decay(schedule, rate: float, mask) -> optax.GradientTransformation:
    """Adds -schedule(step) * rate * parameter to the masked updates."""
    inner = optax.chain(
        optax.add_decayed_weights(rate, mask), optax.scale_by_learning_rate(schedule)
    )

    def update(updates, state, params=None):
        zeros = jax.tree.map(jnp.zeros_like, updates)
        decay, state = inner.update(zeros, state, params)
        return jax.tree.map(jnp.add, updates, decay), state

    return optax.GradientTransformation(inner.init, update)


def make_optimizer(config) -> optax.GradientTransformation:
    """clip_by_global_norm (unless --clip=0) and the update, both in one chain."""
    update = _update(config, schedule_of(config))
    if not config.clip:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip), update)
