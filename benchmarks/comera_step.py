"""The six-encoder training step, dense, under GaLore and as tensor trains.

`python -m benchmarks.comera --only=step` runs it; --help there lists its options. The
model is `coat_jax.models.encoder`'s, preset "mnli": sequences of 128, bfloat16 compute,
float32 parameters, no dropout, the state donated.

    dense     optax.adamw
    GaLore    optax.contrib.galore, rank 128, on the matrices of blocks and pooling. It
              projects with the larger side's vectors, unlike the paper's code
    TT        rank 30, the table a TTM of rank 32; Adam for cores, rank_control for
              diagonals, the paper's objective
    TT FP8    the same under the default policy, dense leaves' moments in FP8 too
    TT memory  TT under the memory policy: activations kept in FP8, products in bfloat16

    time       of a step, several in one `lax.scan`: a median
    one call   of a step that is a program of its own: the host's work counts, which
               grows with the number of arrays. "kept" is one whose state is not
               donated: XLA copies most of hundreds of small arrays that it is to
               overwrite
    refresh    of GaLore's step that decomposes all gradients, every 200th
    state      parameters and the optimizer's state, as arguments of the program
    memory     of the one-step program: state, batch, temporaries, results
    device peak  the most in use so far, recorded where a program raised it
    launches   by the host for a step, with command buffers (CUDA graphs); at the
               smallest batch also "plain", without any
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import optax

from benchmarks import h200, harness, launches
from coat_jax import rank_control
from coat_jax.models import encoder
from coat_jax.optimizer import fp8_adamw
from coat_jax.policy import BF16, DEFAULT, MEMORY
from coat_jax.train_stacks import TrainStacks

RATE = 1e-4
GALORE_RANK, GALORE_GAP = 128, 200
POLICIES = {"TT": BF16, "TT FP8": DEFAULT, "TT memory": MEMORY}
KINDS = ("dense", "GaLore", *POLICIES)
FORMS = ("one call", "kept", "plain", "scan")
# Preset, tokens, rank, steps of a scan.
SIZES: dict[str, tuple] = {"full": ("mnli", 128, 30, 10), "micro": ("micro", 16, 4, 2)}


class State(NamedTuple):
    """params and opt: trees. objective: of the ranks, None where there are none."""

    params: Any
    opt: Any
    objective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of one kind; `layers` are the encoder's blocks."""

    size: str
    kind: str
    layers: int | None = None

    @property
    def config(self) -> encoder.EncoderConfig:
        """The model's sizes."""
        preset = encoder.PRESETS[SIZES[self.size][0]]
        changed: dict[str, Any] = {} if self.layers is None else {"layers": self.layers}
        if self.size == "full":
            changed["dtype"] = jnp.bfloat16
        return dataclasses.replace(preset, **changed)

    @property
    def trains(self) -> bool:
        """Whether layers are tensor trains."""
        return self.kind in POLICIES

    @property
    def made_of(self) -> encoder.Layers | None:
        """The encoder's layers."""
        if not self.trains:
            return None
        how = {"rank": SIZES[self.size][2], "policy": POLICIES[self.kind]}
        return encoder.tensor_train_layers(**how)

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer."""
        if self.kind == "dense":
            return optax.adamw(RATE, weight_decay=0.0)
        if self.kind == "GaLore":
            rank = min(GALORE_RANK, self.config.hidden // 2)
            how = {"rank": rank, "update_proj_gap": GALORE_GAP}
            return optax.contrib.galore(RATE, weight_dimension_numbers=_matrices, **how)
        rest = fp8_adamw if self.kind == "TT FP8" else optax.adamw
        parts = {
            "core": optax.adam(RATE),
            "diagonal": rank_control.rank_control(10 * RATE),
            "rest": rest(RATE, weight_decay=0.0),
        }
        return optax.partition(parts, rank_control.labels)

    def init(self, key):
        """The model's parameters."""
        return encoder.init_params(self.config, key, layers=self.made_of)

    @functools.cached_property
    def stacks(self) -> TrainStacks:
        """Of the trains: the state has those of one shape as one."""
        return TrainStacks(jax.eval_shape(self.init, jax.random.key(0)))

    def draw(self, key) -> State:
        """A state before the first step."""
        params = self.init(key)
        objective = rank_control.Objective().init(params) if self.trains else None
        params = self.stacks.stack(params) if self.trains else params
        return State(params, self.tx.init(params), objective)

    def batch(self, key, sentences: int):
        """Random tokens without padding, and labels."""
        of_ids, of_labels = jax.random.split(key)
        shape = (sentences, SIZES[self.size][1])
        ids = jax.random.randint(of_ids, shape, 0, self.config.vocab, jnp.int32)
        tokens = encoder.Tokens(ids, jnp.zeros_like(ids), jnp.ones(shape, jnp.bool))
        classes = self.config.classes
        labels = jax.random.randint(of_labels, shape[:1], 0, classes, jnp.int32)
        return tokens, labels

    def __call__(self, state: State, batch):
        """The next state, and the loss."""
        of_model = encoder.make_loss(self.config, layers=self.made_of)

        def loss(params):
            params = self.stacks.unstack(params) if self.trains else params
            found = of_model(params, batch)
            if not self.trains:
                return found, (found, None)
            objective = rank_control.Objective()
            total, (_, after) = objective(found, params, state.objective)
            return total, (found, after)

        with jax.numpy_dtype_promotion("standard"):
            grads, (found, after) = jax.grad(loss, has_aux=True)(state.params)
            updates, opt = self.tx.update(grads, state.opt, state.params)
            params = optax.apply_updates(state.params, updates)
        return State(params, opt, after), found

    def scan(self, state: State, batches):
        """The state after a step on each batch, and the losses."""
        return lax.scan(self, state, batches)


def _matrices(tree):
    """What GaLore projects: kernels of blocks and pooling."""
    numbers = optax.contrib.GaLoreDimensionNumbers()

    def one(path, leaf):
        inside = jax.tree_util.keystr(path[:1]) in ("['blocks']", "['pool']")
        return numbers if inside and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(one, tree)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step at one batch in one form.

    Forms: "one call", "kept" (nothing donated), "plain" (no graphs) or "scan".
    """

    step: Step
    sentences: int
    form: str

    @property
    def name(self) -> str:
        """In words."""
        return f"batch {self.sentences}, {self.step.kind}, {self.form}"

    @property
    def steps(self) -> int:
        """Of one program."""
        return SIZES[self.step.size][3] if self.form == "scan" else 1

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of donated arguments."""
        return () if self.form == "kept" else (0,)

    def inputs(self, key):
        """A state and a batch, or a batch a step."""
        make = functools.partial(self.step.batch, sentences=self.sentences)
        batch = make(key)
        if self.form == "scan":
            batch = jax.vmap(make)(jax.random.split(key, self.steps))
        return self.step.draw(key), batch

    def compile(self, compile_only: bool):
        """A function that compiles it and counts launches, lowering being done."""
        run = self.step.scan if self.form == "scan" else self.step
        shapes = jax.eval_shape(self.inputs, jax.random.key(0))
        if compile_only:
            make = lambda options: h200.compile_for(
                run, *shapes, options=options, donate=self.donated
            )
        else:
            lowered = jax.jit(run, donate_argnums=self.donated).lower(*shapes)
            make = lambda options: lowered.compile(compiler_options=options)
        if not compile_only and jax.default_backend() != "gpu":
            return lambda: (make({}), launches.NONE)
        graphs = self.form != "plain"
        return functools.partial(_counted, make, graphs)


class Bench:
    """A run over all cases."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.failed, self.peak = given, 0, 0
        self.rows: dict[tuple[int, str], dict[str, float]] = {}

    def cases(self) -> list[Case]:
        """Every case that is asked for."""
        given = self.given
        return [
            Case(Step(size=given.size, kind=kind, layers=given.layers), sentences, form)
            for kind in given.kinds
            for sentences in given.batch
            for form in given.forms
            # Launches matter most where there is least to do.
            if form in ("one call", "scan") or sentences == min(given.batch)
        ]

    def run(self) -> None:
        """Compiles all, then measures from the smallest program to the largest."""
        jobs, made, began = [], [], time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self.given.threads) as pool:
            for case in self.cases():
                submit = lambda case=case: jobs.append(
                    (case, pool.submit(case.compile(self.given.compile_only)))
                )
                self.failed += not harness.attempt(case.name, submit)
        for case, job in jobs:
            take = lambda case=case, job=job: made.append((case, *job.result()))
            self.failed += not harness.attempt(case.name, take)
        print(
            f"{len(made)} steps compiled in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        total = lambda one: harness.memory_of(one[1])["total"]
        for one in sorted(made, key=total):
            self.failed += not harness.attempt(
                one[0].name, functools.partial(self.measure, *one)
            )

    def measure(self, case: Case, program, found: launches.Launches) -> None:
        """Records one case's figures."""
        put = functools.partial(self.record, case)
        form = "" if case.form in ("one call", "scan") else f", {case.form}"
        if found.kernels and case.form != "scan":
            put(f"launches{form}", found.launches, "")
            put(f"kernels{form}", found.kernels, "")
        if case.form in ("one call", "kept"):
            sizes = harness.memory_of(program)
            put(f"state{form}", sizes["arguments"] / 2**20, "MiB")
            put(f"memory{form}", sizes["total"] / 2**20, "MiB")
        if self.given.compile_only:
            return
        # Not jitted: to compile hundreds of draws takes longer than to make them.
        args = case.inputs(jax.random.key(0))
        if case.step.kind == "GaLore" and case.form == "one call":
            put("refresh", 1e3 * _once(program, args), "ms")
            args = case.inputs(jax.random.key(0))
        how = {"donate": case.donated, "repeats": self.given.repeats}
        took = harness.time(program, *args, **how) / case.steps
        metric = "time" if case.form == "scan" else f"one call{form}"
        put(metric, 1e3 * took, "ms")
        if (peak := harness.device_peak()) is not None and peak > self.peak:
            self.peak = peak
            put(f"device peak, {case.form}", peak / 2**20, "MiB")

    def record(self, case: Case, metric: str, value: float, unit: str) -> Any:
        """Keeps one figure, for the table too."""
        self.rows.setdefault((case.sentences, case.step.kind), {})[metric] = value
        tokens = SIZES[case.step.size][1]
        return harness.record(
            benchmark="comera_step",
            case=f"{case.step.config.layers} encoders, {case.sentences} x {tokens}",
            implementation=case.step.kind,
            metric=metric,
            value=value,
            unit=unit,
            device="compiled for NVIDIA H200" if self.given.compile_only else None,
        )

    def table(self) -> str:
        """A line a batch and kind."""
        lines = ["training step: ms and MiB"]
        for key in sorted(self.rows):
            found = self.rows[key].items()
            text = ", ".join(f"{name} {harness.shown(value)}" for name, value in found)
            lines.append(f"batch {key[0]}, {key[1]}: {text}")
        return "\n".join(lines)


def _counted(make, graphs: bool):
    """A program and its launches, none if XLA did not write them down."""
    try:
        return launches.compiled(make, command_buffers=graphs)
    except ValueError as error:
        print(error, flush=True)
        return make({} if graphs else launches.WITHOUT), launches.NONE


def _once(program, args) -> float:
    """Seconds of the third of three calls on states that were never stepped."""
    for turn in range(3):
        given = jax.tree.map(jnp.copy, args) if turn < 2 else args
        jax.block_until_ready(given)
        began = time.perf_counter()
        jax.block_until_ready(program(*given))
        took = time.perf_counter() - began
    return took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that are the step's own."""
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=[*FORMS])
    parser.add_argument("--layers", type=int, default=None, help="encoders; default 6")


def run(given: argparse.Namespace) -> int:
    """Measures all that is asked for and prints a table; how many failed."""
    bench = Bench(given)
    try:
        bench.run()
    finally:
        print(bench.table(), flush=True)
    return bench.failed
