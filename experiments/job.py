"""What a config computes: its model, its optimizer, its devices, compiled functions."""

import dataclasses
import math
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coat_jax import training
from coat_jax.models import llama
from experiments import optimizers, policies
from experiments.config import Config
from experiments.harness import ExitCode, UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a run computes: its state before the first step, and its functions."""

    state: training.TrainState
    step: Any
    evaluate: Any
    put: Any  # a batch to the devices
    rate: Any  # the learning rate of a step


def model_of(config: Config) -> llama.LlamaConfig:
    """The preset's model with the config's sizes put over it."""
    names = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads")
    sizes = {name: getattr(config, name) for name in names}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    dtypes = {n: jnp.dtype(getattr(config, n)) for n in ("dtype", "param_dtype")}
    try:
        return dataclasses.replace(
            llama.PRESETS[config.preset], **sizes, **dtypes, remat=config.remat
        )
    except ValueError as error:
        raise UserError(ExitCode.CONFIG, str(error)) from None


def _mesh(config: Config) -> Mesh | None:
    if config.mesh == "none":
        return None
    count = len(jax.devices())
    if config.batch % count:
        raise UserError(
            ExitCode.CONFIG,
            f"--mesh=data splits a batch over {count} devices, but --batch="
            f"{config.batch} is no multiple of {count}; change it",
        )
    kinds = (jax.sharding.AxisType.Auto,)  # the compiler places what lies between
    return jax.make_mesh((count,), ("data",), axis_types=kinds)


def _placement(mesh: Mesh, shape: tuple[int, ...], *, fsdp: bool) -> NamedSharding:
    """Replicated; with fsdp, split on the largest axis that the devices divide."""
    fits = [axis for axis, size in enumerate(shape) if size % mesh.size == 0]
    if not fsdp or not fits or math.prod(shape) < 4096:
        return NamedSharding(mesh, PartitionSpec())
    widest = max(fits, key=lambda axis: shape[axis])
    return NamedSharding(mesh, PartitionSpec(*[None] * widest, "data"))


def _first_params(config: Config, model, layers, mesh, key):
    make = lambda key: llama.init_params(model, key, layers=layers)
    if mesh is None:
        return jax.jit(make)(key)
    place = lambda leaf: _placement(mesh, leaf.shape, fsdp=config.fsdp)
    shardings = jax.tree.map(place, jax.eval_shape(make, key))
    return jax.jit(make, out_shardings=shardings)(key)


def build(config: Config) -> Job:
    """The model, its optimizer and the compiled functions of a resolved config."""
    model, mesh, key = model_of(config), _mesh(config), jax.random.key(config.seed)
    layers = policies.layers_of(config)
    tx = optimizers.make_optimizer(config)
    state = training.init_state(
        _first_params(config, model, layers, mesh, key), tx, jax.random.fold_in(key, 1)
    )
    shardings = jax.tree.map(lambda x: x.sharding, state) if mesh else None
    loss = llama.make_loss(model, layers=layers)
    rows = NamedSharding(mesh, PartitionSpec("data")) if mesh else None
    return Job(
        state=state,
        step=training.make_train_step(
            loss, tx, fused=config.fused, shardings=shardings
        ),
        evaluate=jax.jit(loss),
        put=lambda batch: jax.device_put(batch, rows),
        rate=optimizers.schedule_of(config),
    )
