"""One arm of `experiments.vision`: its model, optimizer and functions, compiled once.

The data set lies on the device, and an epoch is one `lax.scan` there: drawing, cutting
and augmenting the batches are part of the compiled program.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import optax

import coat_jax
from coat_jax import policy as policies
from coat_jax import training
from coat_jax.models import cnn, vit
from experiments import config as options
from experiments import optimizers
from experiments.harness import ExitCode, UserError

MODELS = {"vit": vit, "cnn": cnn}
# Presets of the models by --size.
SIZES = {
    "micro": {"vit": "micro", "cnn": "micro"},
    "full": {"vit": "tiny", "cnn": "small"},
}
SHIFT = 2  # pixels by which a training image moves at most
_EVAL_BATCH = 500


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """Compiled functions of an arm, the same for all its seeds.

    start: key -> state. epoch: (state, key) -> state, losses. evaluate: params -> right
    answers. kept: bytes an image between forward and backward.
    """

    start: Any
    epoch: Any
    evaluate: Any
    steps: int
    kept: float


def _model_of(config, shape):
    """The module, its config and its layers."""
    module = MODELS[config.model]
    sizes = {"channels": shape[2], "dtype": jnp.dtype(config.dtype)}
    if config.model == "vit":
        if shape[0] != shape[1]:
            raise UserError(
                ExitCode.DATA, f"--model=vit takes square images, got {shape}"
            )
        sizes["side"] = shape[0]
    preset = module.PRESETS[SIZES[config.size][config.model]]
    try:
        model = dataclasses.replace(preset, **sizes)
    except ValueError as error:
        raise UserError(ExitCode.DATA, str(error)) from None
    policy = policies.PRESETS[config.policy]
    layers = None if policy.plain else module.fp8_layers(policy)
    return module, model, layers


def _optimizer_of(config, steps: int):
    return optimizers.make_optimizer(
        options.Config(
            optimizer=config.optimizer,
            steps=steps,
            lr=config.lr,
            final_lr=0.0,
            weight_decay=config.weight_decay,
        )
    )


def augmented(pixels, key):
    """Each image shifted by up to SHIFT pixels, black moving in, and half mirrored."""
    B, R, Q, C = pixels.shape
    of_shift, of_mirror = jax.random.split(key)
    edge = (SHIFT, SHIFT)
    wide = jnp.pad(pixels, ((0, 0), edge, edge, (0, 0)))
    starts = jax.random.randint(of_shift, (B, 2), 0, 2 * SHIFT + 1)
    cut = lambda x, at: jax.lax.dynamic_slice(x, (at[0], at[1], 0), (R, Q, C))
    moved = jax.vmap(cut)(wide, starts)
    mirror = jax.random.bernoulli(of_mirror, shape=(B, 1, 1, 1))
    return jnp.where(mirror, moved[:, :, ::-1], moved)


def build(config, images) -> Arm:
    """The arm's functions; the data set stays on the device."""
    shape = images.train_images.shape[1:]
    module, model, layers = _model_of(config, shape)
    count = len(images.train_images)
    steps = min(count // config.batch, config.epoch_steps or count)
    if not steps:
        raise UserError(
            ExitCode.CONFIG, f"--batch={config.batch} is more than {count} images"
        )
    tx = _optimizer_of(config, steps * config.epochs)
    model_loss = module.make_loss(model, layers=layers)
    light = lambda pixels: pixels.astype(jnp.float32) / 255
    whiten = lambda pixels: (light(pixels) - images.mean) / images.std

    def loss(params, batch, key):
        pixels, labels = batch
        pixels = augmented(pixels, key) if config.augment else pixels
        return model_loss(params, (whiten(pixels), labels))

    step = training.make_train_step(loss, tx)
    train = jax.device_put((images.train_images, images.train_labels))

    def start(key):
        params = module.init_params(model, key, layers=layers)
        return training.init_state(params, tx, jax.random.fold_in(key, 1))

    apply = module.make_apply(model, layers=layers)
    draw = lambda key: jax.random.permutation(key, count)[: steps * config.batch]
    order = lambda key: draw(key).reshape(steps, config.batch)
    # XLA:CPU runs a convolution inside of a loop six times slower.
    scan = jax.default_backend() != "cpu"
    return Arm(
        start=jax.jit(start),
        epoch=epoch_of(step, order, train, scan=scan),
        evaluate=_evaluation(lambda params, x: apply(params, whiten(x)), images),
        steps=steps,
        kept=_kept(
            loss, jax.eval_shape(start, jax.random.key(0)).params, train, config
        ),
    )


def epoch_of(step, order, train, *, scan: bool):
    """(state, key) -> state and the losses of steps on the batches that order draws.

    step: (state, batch) -> state, metrics. order: key -> rows (steps, batch) of train.
    """
    take = lambda train, rows: tuple(part[rows] for part in train)

    @functools.partial(jax.jit, donate_argnums=0)
    def scanned(state, key, train):
        def body(state, rows):
            state, metrics = step(state, take(train, rows))
            return state, metrics["loss"]

        return jax.lax.scan(body, state, order(key))

    def looped(state, key, train):
        losses = []
        for rows in order(key):
            state, metrics = step(state, take(train, rows))
            losses.append(metrics["loss"])
        return state, jnp.stack(losses)

    run = scanned if scan else looped
    return lambda state, key: run(state, key, train)


def _evaluation(apply, images):
    """params -> how many test images are classified right, in batches of one size."""
    batch = min(_EVAL_BATCH, len(images.test_images))
    tail = -len(images.test_images) % batch
    pixels = np.pad(images.test_images, ((0, tail), *[(0, 0)] * 3))
    # No answer is -1, so that what is padded never counts.
    labels = np.pad(images.test_labels, (0, tail), constant_values=-1)
    cut = lambda x: x.reshape(-1, batch, *x.shape[1:])
    test = list(zip(*jax.device_put((cut(pixels), cut(labels))), strict=True))
    right = lambda params, x, labels: jnp.argmax(apply(params, x), axis=-1) == labels
    count = jax.jit(lambda params, x, labels: jnp.sum(right(params, x, labels)))
    return lambda params: sum(count(params, x, labels) for x, labels in test)


def _kept(loss, params, train, config) -> float:
    """Bytes an image that the loss hands to its backward, before compilation."""
    batch = [x[: config.batch] for x in train]
    of_params = lambda params: loss(params, batch, jax.random.key(0))
    report = coat_jax.memory_report(params, optax.identity(), loss=of_params)
    return report["residuals"].after / config.batch
