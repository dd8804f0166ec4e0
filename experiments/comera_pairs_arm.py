"""One arm of `experiments.comera_pairs`: batches, optimizer and compiled functions.

The verses lie on the device and an epoch is one `lax.scan` there: drawing the pairs and
joining their word pieces are part of the compiled program. Both stages of tensor trains
are that one program; only truncation, which changes shapes, compiles another.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import optax

import coat_jax
from coat_jax import policy as policies
from coat_jax import rank_control, truncation
from coat_jax.models import encoder
from experiments import galore, verse_pairs
from experiments.comera_pairs_batches import Data, drawn, joined
from experiments.harness import ExitCode, UserError

CLASSES = 2
KINDS = ("same", "hard", "random")  # of pairs that are evaluated
_EVAL_BATCH = 256


class State(NamedTuple):
    """step: int32 (). params, opt_state: trees. objective: of the ranks, or None."""

    step: Any
    params: Any
    opt_state: Any
    objective: Any
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """Functions of an arm, the same for all its seeds.

    start: key -> State. epoch: (State, key, easy, Data) -> State, figures by step; to
    be compiled by `compiled`. evaluate: params -> {kind: share of right answers}.
    """

    start: Any
    epoch: Any
    evaluate: Any
    steps: int


def is_tensor_train(config) -> bool:
    """Whether an arm's matrices are tensor trains."""
    return config.arm.startswith("tt")


def model_of(config, vocab: int) -> tuple[encoder.EncoderConfig, encoder.Layers]:
    """The encoder that a config asks for, and its layers.

    The full one's word table has the paper's 30,522 rows, however few are used.
    """
    preset = encoder.PRESETS[{"full": "mnli", "micro": "micro"}[config.size]]
    sizes = {"classes": CLASSES, "dtype": jnp.dtype(config.dtype)}
    if config.size == "micro":
        sizes |= {"vocab": vocab, "positions": 128, "layers": 1}
    model = dataclasses.replace(preset, **sizes, dropout=config.dropout)
    policy = policies.PRESETS[config.policy]
    if is_tensor_train(config):
        how = {"rank": config.rank, "embed_rank": config.embed_rank}
        return model, encoder.tensor_train_layers(policy=policy, **how)
    return model, encoder.Layers() if policy.plain else encoder.fp8_layers(policy)


def rate_of(config, peak: float, steps: int):
    """Warm-up, a cosine to zero over the early stage, and another over the late one."""
    early, late = config.epochs * steps, config.late_epochs * steps
    warm = max(int(config.warmup * early), 1)
    parts = [
        optax.linear_schedule(peak / (warm + 1), peak, warm),
        optax.cosine_decay_schedule(peak, max(early - warm, 1)),
    ]
    if is_tensor_train(config) and late:
        parts.append(optax.cosine_decay_schedule(config.late_lr * peak, late))
    return optax.join_schedules(parts, [warm, early][: len(parts) - 1])


def projected(params):
    """What GaLore projects: the blocks' matrices and the pooling's, not embeddings."""
    wanted = lambda path, leaf: (
        leaf.ndim == 2 and bool({"blocks", "pool"} & _names(path))
    )
    return jax.tree_util.tree_map_with_path(wanted, params)


def optimizer_of(config, steps: int) -> optax.GradientTransformation:
    """Clipping, and the arm's update."""
    rate = rate_of(config, config.lr, steps)
    decay = {"weight_decay": config.weight_decay, "mask": coat_jax.decay_mask}
    match config.arm:
        case "galore" | "galore_reference":
            make = {"galore": galore.galore_optax}.get(
                config.arm, galore.galore_reference
            )
            how = {"rank": config.galore_rank, "update_proj_gap": config.galore_gap}
            how |= {"scale": config.galore_scale, "matrices": projected}
            update = make(rate_of(config, config.galore_lr, steps), **decay, **how)
        case "dense_coat":
            update = coat_jax.fp8_adamw(rate, **decay)
        case "dense":
            update = optax.adamw(rate, **decay)
        case _:
            core, early = rate_of(config, config.core_lr, steps), config.epochs * steps
            rates = config.diagonal_lr, config.late_diagonal_lr
            diagonal = lambda step: jnp.where(step < early, *rates)
            parts = {
                "core": optax.adam(core),
                "diagonal": rank_control.rank_control(diagonal),
                "rest": optax.adamw(rate, **decay),
            }
            update = optax.partition(parts, rank_control.labels)
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def objective_of(config) -> rank_control.Objective:
    """What a tensor train minimises."""
    how = {"gamma": config.gamma, "beta": config.beta, "delay": config.delay}
    return rank_control.Objective(kind=config.objective, **how)


def build(config, verses: verse_pairs.Verses, data: Data) -> Arm:
    """The arm's functions; nothing is compiled yet."""
    model, layers = model_of(config, verses.vocab)
    half = config.batch // 2
    steps = min(len(data.train) // half, config.epoch_steps or len(data.train))
    if not steps:
        raise UserError(
            ExitCode.CONFIG,
            f"--batch={config.batch} takes {half} verses, and there are "
            f"{len(data.train)} for training",
        )
    tx = optimizer_of(config, steps)
    step = _step_of(config, encoder.make_loss(model, layers=layers), tx)

    def start(key):
        params = encoder.init_params(model, key, layers=layers)
        tree = objective_of(config).init(params) if is_tensor_train(config) else None
        # Dropout's bits are the device's own generator's, of which XLA makes one call.
        key = jax.random.key(jax.random.bits(jax.random.fold_in(key, 1)), impl="rbg")
        with jax.numpy_dtype_promotion("standard"):
            return State(jnp.int32(0), params, tx.init(params), tree, key)

    def epoch(state, key, easy, data):
        order = jax.random.permutation(key, data.train)[: steps * half]
        body = lambda state, rows: step(state, data, rows, easy)
        with jax.numpy_dtype_promotion("standard"):
            return jax.lax.scan(body, state, order.reshape(steps, half))

    apply = encoder.make_apply(model, layers=layers)
    return Arm(
        start=start,  # op by op: compiled whole, hundreds of draws take longer
        epoch=jax.jit(epoch, donate_argnums=0),
        evaluate=_evaluation(apply, verses, data, config),
        steps=steps,
    )


def _step_of(config, model_loss, tx):
    """(state, data, rows, easy) -> state, figures: one update."""
    control = objective_of(config) if is_tensor_train(config) else None

    def whole(params, objective, batch, key):
        loss = model_loss(params, batch, key)
        if control is None:
            return loss, ({"loss": loss, "pressure": jnp.float32(1)}, objective)
        return control(loss, params, objective)

    def step(state, data, rows, easy):
        of_pairs, of_dropout = jax.random.split(
            jax.random.fold_in(state.key, state.step)
        )
        batch = drawn(data, rows, of_pairs, easy, config.length)
        grad = jax.grad(whole, has_aux=True)
        grads, (figures, objective) = grad(
            state.params, state.objective, batch, of_dropout
        )
        extra = {"pressure": figures.pop("pressure")} if control is not None else {}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
        params = optax.apply_updates(state.params, updates)
        new = State(state.step + 1, params, opt_state, objective, state.key)
        return new, figures

    return step


@dataclasses.dataclass(frozen=True, eq=False)
class Epoch:
    """A compiled epoch for states of these shapes; `peak` in bytes, or None."""

    run: Any
    shapes: Any
    peak: int | None

    def __call__(self, state: State, key, easy: float):
        """The next state, and figures by step."""
        return self.run(state, key, easy)


def compiled(arm: Arm, state: State, key, data: Data, *, reuse=None) -> Epoch:
    """The epoch for a state's shapes: the one to reuse, if it is for them."""
    shapes = jax.tree.map(jnp.shape, state)
    if reuse is not None and reuse.shapes == shapes:
        return reuse
    made = arm.epoch.lower(state, key, jnp.float32(0), data).compile()
    run = lambda state, key, easy: made(state, key, jnp.float32(easy), data)
    return Epoch(run, shapes, _peak(made.memory_analysis()))


def _peak(memory) -> int | None:
    """Of arguments, results and temporaries together; None where XLA doesn't say."""
    if memory is None:
        return None
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(size + memory.temp_size_in_bytes - memory.alias_size_in_bytes)


def _evaluation(apply, verses, data: Data, config):
    """params -> {kind: share of right answers} over the verses of a part."""
    rows = jnp.asarray(verses.rows(config.part))[: config.eval_verses]
    others = {
        "same": rows,
        "hard": data.similar[rows, 0],
        # A fixed verse from elsewhere in the part.
        "random": jnp.roll(rows, len(rows) // 2),
    }

    @jax.jit
    def right(params, first, second, wanted, data):
        tokens = joined(data, first, second, config.length)
        with jax.numpy_dtype_promotion("standard"):
            return jnp.argmax(apply(params, tokens), axis=-1) == wanted

    def evaluate(params):
        shares = {}
        for kind in KINDS:
            wanted, hits = jnp.int32(kind == "same"), 0
            for at in range(0, len(rows), _EVAL_BATCH):
                take = functools.partial(_padded, at=at)
                found = right(params, take(rows), take(others[kind]), wanted, data)
                hits += found[: len(rows) - at].sum()
            shares[kind] = float(hits) / len(rows)
        return shares

    return evaluate


def _padded(rows, at: int):
    """A batch of rows, the first ones again where there are no more."""
    return jnp.take(rows, at + jnp.arange(_EVAL_BATCH), mode="wrap")


# Stages ------------------------------------------------------------------------------


def sizes(params) -> dict[str, int]:
    """Parameters of the arrays: of everything, and of what a tensor train replaces.

    "replaced" are the words' table, the blocks' matrices and the pooling's, or the
    cores that stand for them.
    """
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    replaced = lambda path: (
        bool({"kernel", "embedding", "cores"} & _names(path))
        and not {"position", "segment", "head"} & _names(path)
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    part = sum(leaf.size for path, leaf in leaves if replaced(path))
    return {"parameters": total, "replaced_parameters": part}


def _names(path) -> set:
    return {getattr(key, "key", None) for key in path}


def live_ranks(params) -> dict[str, list[int]]:
    """{train's path: living ranks of its bonds}."""
    trains = rank_control.trains_of(params).items()
    count = lambda v: int((v > rank_control.TAU).sum())
    return {"/".join(map(str, p)): [*map(count, t.diagonals)] for p, t in trains}


def figures_of(config, params, figures) -> dict:
    """What a line of results says of an epoch's training."""
    row = {"loss": float(figures["loss"].mean())}
    if is_tensor_train(config):
        row |= {
            "size": int(figures["size"][-1]),
            "core_norm": float(figures["core_norm"][-1]),
            "size_steps": float((figures["c_size"] > figures["c_loss"]).mean()),
            "ranks": live_ranks(params),
        }
    return row


def begin_late(config, state: State, loss: float) -> State:
    """The state whose objective aims at a smaller size, and at about this loss."""
    size = config.late_size * state.objective.size_start
    targets = rank_control.Targets(
        loss=loss + config.late_slack,
        size=size,
        w_loss=config.w_loss,
        w_size=config.w_size,
        rho=config.rho,
    )
    return state._replace(objective=objective_of(config).late(state.objective, targets))


def end_stage(arm: Arm, config, state: State) -> tuple[State, dict]:
    """The state without dead ranks; bytes, and the accuracy before and after."""
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    facts = {"accuracy": arm.evaluate(state.params)}
    if is_tensor_train(config):
        small = truncation.truncate(state.params, state.opt_state)
        state = state._replace(params=small.params, opt_state=small.opt_state)
        facts["accuracy_truncated"] = arm.evaluate(state.params)
    facts |= {
        "parameter_bytes": nbytes(state.params),
        "gradient_bytes": nbytes(state.params),  # of the same shapes and dtypes
        "optimizer_bytes": nbytes(state.opt_state),
        **sizes(state.params),
    }
    return state, facts
