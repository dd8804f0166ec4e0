"""A training run from config to summary: resume, step, watch, keep, stop."""

import contextlib
import math
import pathlib
import signal
import statistics
import time

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from experiments import data, folder, job, metrics, optimizers
from experiments.config import Config, resolve
from experiments.harness import ExitCode, UserError


class StopSignal:
    """SIGTERM or SIGINT, noted; the loop saves and stops. A second changes nothing."""

    def __init__(self):
        self.received: signal.Signals | None = None

    def __enter__(self):
        self._former = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # only the main thread gets signals
                self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number, frame):
        self.received = self.received or signal.Signals(number)

    def __exit__(self, *exception):
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def code(self) -> ExitCode:
        """75 asks a scheduler to start again, 130 is what a shell expects of Ctrl-C."""
        terminated = self.received == signal.SIGTERM
        return ExitCode.PREEMPTED if terminated else ExitCode.INTERRUPTED


@jax.jit
def _all_finite(tree):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


class Run:
    """The moving parts of a run: state, data position, logs, clock."""

    def __init__(self, config, built, tokens, keeper, out):
        self.config, self.job, self.keeper, self.out = config, built, keeper, out
        self.state, self.batches = built.state, data.train_batches(tokens, config)
        self.held = [built.put(batch) for batch in data.held_batches(tokens, config)]
        self.done, self.seconds, self.logs = 0, 0.0, []
        if config.resume and keeper.latest() is None:
            print(f"{out} holds no checkpoint to resume; starting at step 1")
        elif config.resume:
            self._resume()

    def _resume(self) -> None:
        placed = lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else None
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(x)),
            self.state,
        )
        self.state = None  # so that two states are never held at once
        restored = self.keeper.restore(target)
        self.state, self.done = restored.state, restored.step
        self.batches.set_state(restored.extra["data"])
        self.seconds = restored.extra["seconds"]
        print(f"continuing from step {self.done} in {self.out}")

    def open_logs(self) -> None:
        """Rows after the resumed step are dropped here: each step appears once."""
        self.logs.append(metrics.CsvLog(self.out / "metrics.csv", after_step=self.done))
        if self.config.tensorboard:
            board = metrics.TensorBoardLog(
                self.out / "tensorboard", after_step=self.done
            )
            self.logs.append(board)
        self.logs.append(metrics.Progress(self.config, start=self.done))

    def held_out_loss(self) -> float:
        """The mean over the held-out batches."""
        with jax.numpy_dtype_promotion("standard"):
            losses = [self.job.evaluate(self.state.params, x) for x in self.held]
        return float(np.mean([np.float64(loss) for loss in losses]))

    def settle(self, step: int, figures, *, held: float | str = "") -> dict:
        """Waits for a step's figures, refuses what isn't finite, writes the row."""
        loss, norm = (float(figures[name]) for name in ("loss", "grad_norm"))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._not_finite(f"loss is {loss} and the gradient's norm {norm}", step)
        now = time.perf_counter()
        spent, self.clock = now - self.clock, now
        self.seconds += spent
        tokens = self.config.batch * self.config.seq
        row = {
            "step": step,
            "loss": loss,
            "held_out_loss": held,
            "grad_norm": norm,
            "lr": float(self.job.rate(step - 1)),
            "step_ms": round(1000 * spent, 2),
            "tokens_per_s": round(tokens / spent),
            "seconds": round(self.seconds, 3),
        }
        for log in self.logs:
            log.write(row)
        return row

    def _not_finite(self, what: str, step: int):
        self.keeper.wait()
        newest = self.keeper.latest()
        kept = "none is kept" if newest is None else f"the newest is step {newest}"
        raise UserError(
            ExitCode.NON_FINITE,
            f"{what} at step {step}; stopped, and no checkpoint was written since "
            f"({kept} in {self.out}); lower --lr or raise --warmup",
        )

    def save(self, step: int) -> bool:
        """A checkpoint of this step, once the rows up to it are on the disk."""
        if not _all_finite(self.state.params):
            self._not_finite("a parameter isn't finite", step)
        for log in self.logs:
            log.sync()
        extra = {"data": self.batches.get_state(), "seconds": self.seconds}
        return self.keeper.save(step, self.state, extra)

    def steps(self, stop: StopSignal, on_step) -> None:
        """All steps that are left; one's figures are read while the next one runs."""
        config, waiting, self.clock = self.config, None, time.perf_counter()
        for step in range(self.done + 1, config.steps + 1):
            batch = self.job.put(next(self.batches))
            self.state, figures = self.job.step(self.state, batch)
            if waiting:
                on_step(self.settle(*waiting))
            waiting, last = (step, figures), step == config.steps
            look = last or (config.eval_every and step % config.eval_every == 0)
            keep = self.keeper.due(step, last=last)
            if look or keep or stop.received:
                jax.block_until_ready(figures)
                paused = time.perf_counter()
                held = self.held_out_loss() if look else ""
                self.clock += time.perf_counter() - paused
                on_step(self.settle(*waiting, held=held))
                saved = (keep or stop.received) and self.save(step)
                waiting, self.clock = None, time.perf_counter()
            self.done = step
            if stop.received and not last:
                self._stopped(stop, saved)

    def _stopped(self, stop: StopSignal, saved: bool):
        self.keeper.wait()
        then = "saved; --resume continues" if saved else "not saved (--save_every=0)"
        what = f"{stop.received.name} at step {self.done} of {self.out}: {then}"
        raise UserError(stop.code(), what)

    def summary(self, tokens: data.Tokens) -> dict:
        """What the results file and the demo's table show."""
        rows = metrics.read_rows(self.out / "metrics.csv")
        if not rows:
            raise UserError(
                ExitCode.CHECKPOINT,
                f"{self.out / 'metrics.csv'} lost the rows of this run; start it again "
                "with --overwrite",
            )
        losses = [float(row["loss"]) for row in rows]
        times = [float(row["step_ms"]) for row in rows][1:] or [math.nan]
        leaves = jax.tree.leaves(self.state.opt_state)
        count = sum(x.size for x in jax.tree.leaves(self.state.params))
        used = sum(x.nbytes for x in leaves)
        return {
            "train_loss": statistics.fmean(losses[-20:]),
            "held_out_loss": float(rows[-1]["held_out_loss"]),
            "first_loss": losses[0],
            "parameters": count,
            "optimizer_bytes": used,
            "optimizer_bytes_per_parameter": used / count,
            "step_ms": statistics.median(times),
            "seconds": self.seconds,
            "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
            "metrics": str(self.out / "metrics.csv"),
            **tokens.facts(),
        }


def train(config: Config, *, on_step=lambda row: None) -> dict:
    """Runs a config to its end and returns the summary; `on_step` sees each row.

    Raises:
      UserError: everything that stops a run before its end, with its exit code.
    """
    config = resolve(config)
    out = pathlib.Path(config.out)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        stack.enter_context(folder.locked(out))
        folder.check(out, config)
        tokens = data.prepare(config)
        built = job.build(config)
        stack.enter_context(folder.one_line_errors())
        fp8 = config.optimizer == "fp8_adamw"
        storage = optimizers.storage_of(config) if fp8 else None
        folder.claim(out, config)
        keeper = folder.Keeper(out, config, storage=storage)
        stack.callback(keeper.close)
        keeper.describe(tokens.facts())
        run = Run(config, built, tokens, keeper, out)
        run.open_logs()
        for log in run.logs:
            stack.callback(log.close)
        run.steps(stop, on_step)
        return run.summary(tokens)
