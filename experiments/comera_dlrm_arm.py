"""One arm of `experiments.comera_dlrm`: its model, optimizer and functions.

The data set lies on the device, and an epoch is one `lax.scan` there. The early and the
late stage are one program: what tells them apart is in the state.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import numpy as np
import optax

import coat_jax
from coat_jax import rank_control as ranks
from coat_jax import truncation
from coat_jax.models import dlrm
from coat_jax.tensor_train import TAU
from experiments import clicks, galore
from experiments.harness import ExitCode, UserError

_EVAL_BATCH = 8192
_SMALL = 32  # no side of a projected matrix is shorter
TRAINS = ("tt", "tt_early", "tt_late")


class State(NamedTuple):
    """All of a run. objective: the ranks' state, None in arms where they don't change.

    rate: what updates are multiplied by, all but the diagonals': traced, so that trying
    several compiles once.
    """

    step: Any
    params: Any
    opt_state: Any
    objective: Any
    rate: Any
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """Functions of an arm, the same for all its seeds.

    start: (key, rate) -> state. piece: (state, key, i) -> state, figures a step, of the
    i-th part of an epoch with the key's order. logits: params -> {part: logits of its
    rows}. late: state -> that of the late stage. measure: () -> bytes.
    """

    start: Any
    piece: Any
    logits: Any
    late: Any
    measure: Any
    steps: int


def model_of(config, data: clicks.Clicks):
    """The model's config and its layers."""
    model = dataclasses.replace(
        dlrm.PRESETS[config.size],
        tables=data.tables,
        dense=data.dense.shape[1],
        dropout=config.dropout,
    )
    if config.width is not None:
        model = dataclasses.replace(model, features=config.width)
    if config.arm not in TRAINS:
        return model, None
    layers = dlrm.tensor_train_layers(
        table_rank=config.rank,
        table_order=config.order,
        linear_rank=config.linear_rank or None,
        large_rows=config.rows,
    )
    return model, layers


def projected(params):
    """Which leaves GaLore projects: matrices that are not narrow, tables included."""
    return jax.tree.map(lambda p: p.ndim == 2 and min(p.shape) >= _SMALL, params)


def projected_by_svd(params):
    """The same without large tables, of which a step would need the whole SVD."""
    fits = lambda p, wanted: wanted and max(p.shape) <= 10_000
    return jax.tree.map(fits, params, projected(params))


def optimizer_of(config, steps: int, params) -> optax.GradientTransformation:
    """What updates this arm's parameters."""
    fall = lambda lr: optax.cosine_decay_schedule(lr, steps, alpha=config.final_lr)
    rest = {"learning_rate": fall(config.lr), "weight_decay": config.weight_decay}
    how = {"rank": config.galore_rank, "update_proj_gap": config.galore_gap}
    if config.arm == "fp8":
        return coat_jax.fp8_adamw(**rest)
    if config.arm == "galore":
        how |= {"matrices": projected, "scale": 1.0}
        return galore.galore_reference(**rest, **how)
    if config.arm == "galore_optax":
        return galore.galore_optax(**rest, **how, matrices=projected_by_svd)
    if config.arm not in TRAINS:
        return optax.adamw(**rest)
    threshold = config.threshold if config.objective == "decoupled" else None
    adapt = ranks.rank_control(
        config.diagonal_lr, threshold=threshold, modes=ranks.modes(params)
    )
    parts = {
        "core": optax.adamw(fall(config.core_lr), weight_decay=config.core_decay),
        "diagonal": optax.set_to_zero() if config.arm == "tt" else adapt,
        "rest": optax.adamw(**rest),
    }
    return optax.partition(parts, ranks.labels)


def objective_of(config) -> ranks.Objective | None:
    """What the ranks are trained for, in the arms where they change."""
    if config.arm not in ("tt_early", "tt_late"):
        return None
    return ranks.Objective(
        kind=config.objective,
        gamma=config.gamma,
        beta=config.beta,
        decay=config.loss_average,
        delay=config.delay,
    )


def stepper(model_loss, tx, objective):
    """(state, batch) -> state, {"loss", "size"}: one update, in either stage."""

    def total(params, state, batch):
        loss = model_loss(params, batch, jax.random.fold_in(state.key, state.step))
        if objective is None:
            return loss, ({"loss": loss, "size": jnp.float32(0)}, None)
        return objective(loss, params, state.objective)

    def step(state, batch):
        grad = jax.grad(total, has_aux=True)
        grads, (figures, kept) = grad(state.params, state, batch)
        pressure = {"pressure": figures["pressure"]} if objective else {}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **pressure)
        scaled = lambda u, label: u if label == "diagonal" else state.rate * u
        updates = jax.tree.map(scaled, updates, ranks.labels(updates))
        params = optax.apply_updates(state.params, updates)
        changed = {"params": params, "opt_state": opt_state, "objective": kept}
        state = state._replace(step=state.step + 1, **changed)
        return state, {name: figures[name] for name in ("loss", "size")}

    return step


def build(config, data: clicks.Clicks) -> Arm:
    """The arm's functions; the data set stays on the device."""
    model, layers = model_of(config, data)
    train = jax.device_put(data.of(clicks.TRAIN))
    count = len(train[2])
    each = min(count // config.batch, config.epoch_steps or count) // config.pieces
    if not each:
        raise UserError(
            ExitCode.CONFIG,
            f"--pieces={config.pieces} of --batch={config.batch} are more than {count} "
            "rows",
        )
    steps = each * config.pieces
    make = lambda key: dlrm.init_params(model, key, layers=layers)
    shapes = jax.eval_shape(make, jax.random.key(0))
    tx = optimizer_of(config, steps * config.epochs, shapes)
    objective = objective_of(config)
    step = stepper(dlrm.make_loss(model, layers=layers), tx, objective)

    def start(key, rate):
        params = make(key)
        return State(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=tx.init(params),
            objective=objective.init(params) if objective else None,
            rate=jnp.asarray(rate, jnp.float32),
            key=jax.random.fold_in(key, 1),
        )

    order = lambda key: jax.random.permutation(key, count)[: steps * config.batch]
    rows = lambda key: order(key).reshape(steps, config.batch)
    apply = dlrm.make_apply(model, layers=layers)
    return Arm(
        start=_promoting(jax.jit(start)),
        piece=pieces_of(step, rows, train, each),
        logits=logits_of(apply, data),
        late=lambda state: late_stage(state, objective, config),
        measure=lambda: measure(step, start, train, config.batch),
        steps=steps,
    )


def _promoting(function):
    """Under standard promotion: optax's bias correction is float ** int32."""

    @functools.wraps(function)
    def wrapped(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return wrapped


def pieces_of(step, order, train, each: int):
    """(state, key, i) -> state and figures of steps i * each, ... of an epoch.

    order: key -> the rows of train of all of the epoch's batches.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def piece(state, key, i, train):
        body = lambda state, rows: step(state, tuple(part[rows] for part in train))
        rows = jax.lax.dynamic_slice_in_dim(order(key), i * each, each)
        return jax.lax.scan(body, state, rows)

    return _promoting(lambda state, key, i: piece(state, key, jnp.int32(i), train))


def logits_of(apply, data: clicks.Clicks):
    """params -> {part: float32 (rows,)} of what is held out, in batches of one size."""
    held = data.part != clicks.TRAIN
    part, inputs = data.part[held], (data.dense[held], data.sparse[held])
    batch = min(_EVAL_BATCH, len(part))
    wide = (np.pad(x, ((0, -len(part) % batch), (0, 0))) for x in inputs)
    inputs = jax.device_put([x.reshape(-1, batch, x.shape[1]) for x in wide])
    each = lambda params, batches: jax.lax.map(lambda b: apply(params, *b), batches)
    run = jax.jit(lambda params, batches: each(params, batches).reshape(-1))

    def logits(params):
        out = np.asarray(run(params, inputs), np.float32)[: len(part)]
        return {p: out[part == p] for p in (clicks.VALIDATION, clicks.TEST)}

    return _promoting(logits)


def late_stage(state: State, objective, config) -> State:
    """The state from which on a loss and a size are aimed at.

    Nothing is cut here: truncation makes all diagonals 1 again, and the late stage goes
    by which of them is the smallest.
    """
    size = float(ranks.size_exact(state.params)) * config.target_ratio
    loss = loss_seen(state.objective, objective.decay)
    weights = {"w_size": config.w_size, "rho": config.rho}
    targets = ranks.Targets(loss=loss, size=size, **weights)
    return state._replace(objective=objective.late(state.objective, targets))


def loss_seen(goal, decay: float) -> float:
    """The running average of the loss, without its bias to zero."""
    return float(goal.average) / (1 - decay ** int(goal.count))


def measure(step, start, train, batch: int) -> dict[str, int]:
    """Bytes of what a step holds, and of what the compiled step takes at its peak.

    The peak is XLA's own figure for one step (arguments, results and temporaries, less
    what results take over from arguments), with one batch but without the data set.
    """
    part = lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    compiled = jax.jit(step, donate_argnums=0)
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(start, jax.random.key(0), 1.0)
        report = compiled.lower(shapes, jax.tree.map(part, train)).compile()
    found = report.memory_analysis()
    peak = found.argument_size_in_bytes + found.output_size_in_bytes
    peak += found.temp_size_in_bytes - found.alias_size_in_bytes
    size = lambda tree: sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    params = size(shapes.params)
    return {
        "parameter_bytes": params,
        "gradient_bytes": params,
        "optimizer_bytes": size(shapes.opt_state),
        "peak_bytes": int(peak),
    }


def alive(params) -> int:
    """Parameters of the model without the ranks whose diagonals are dead.

    As many as truncation would leave, diagonals included.
    """
    total = sum(x.size for x in jax.tree.leaves(params))
    trains = ranks.trains_of(params).values()
    if not trains:
        return total
    stored = sum(x.size for train in trains for part in train for x in part)
    diagonals = sum(
        int((np.asarray(v) > TAU).sum()) for t in trains for v in t.diagonals
    )
    return total - stored + int(ranks.size_exact(params)) + diagonals


def truncated(params):
    """The parameters without their dead ranks: the same function."""
    return truncation.truncate(params).params if ranks.trains_of(params) else params


def ranks_alive(params) -> dict[str, list[int]]:
    """How many entries of each bond are left, by train."""
    counts = lambda t: [int((np.asarray(v) > TAU).sum()) for v in t.diagonals]
    return {
        "/".join(map(str, path)): counts(train)
        for path, train in ranks.trains_of(params).items()
    }
