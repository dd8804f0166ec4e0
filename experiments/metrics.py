"""Where a run's figures go: a CSV that survives kills, TensorBoard, and the screen."""

import csv
import os
import pathlib
import sys
import time

from experiments.harness import ExitCode, UserError

COLUMNS = (
    "step", "loss", "held_out_loss", "grad_norm", "lr", "step_ms", "tokens_per_s",
    "seconds",
)  # fmt: skip


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The whole rows of a metrics file; a line that a kill cut short isn't one."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return list(csv.DictReader(whole.splitlines()))


class CsvLog:
    """Appends a row a step. Opened at step n, it drops the rows after n first.

    Floats are written by repr, so that reading them gives the same bits.
    """

    def __init__(self, path: pathlib.Path, *, after_step: int):
        kept = [row for row in read_rows(path) if int(row["step"]) <= after_step]
        aside = path.with_suffix(".part")
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(aside, path)  # whole or as it was, also if killed here
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)

    def write(self, row: dict) -> None:
        """One step; the row reaches the system before the next step is shown."""
        self._writer.writerow(row)
        self._file.flush()

    def sync(self) -> None:
        """Down to the disk: called before a checkpoint, which must not be ahead."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; twice is once."""
        self._file.close()


class TensorBoardLog:
    """The same rows for TensorBoard; rows after the resumed step are purged there."""

    def __init__(self, folder: pathlib.Path, *, after_step: int):
        try:
            import tensorboardX
        except ImportError:
            raise UserError(
                ExitCode.CONFIG,
                "--tensorboard needs the package tensorboardX; install "
                "coat-jax[experiments] or leave the option out",
            ) from None
        self._writer = tensorboardX.SummaryWriter(
            str(folder), purge_step=after_step + 1 if after_step else None
        )

    def write(self, row: dict) -> None:
        """One step; empty cells are left out."""
        for name, value in row.items():
            if name != "step" and value != "":
                self._writer.add_scalar(name, float(value), row["step"])

    def sync(self) -> None:
        """Down to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _name(config) -> str:
    """What a line of progress calls the run."""
    policy = "" if config.policy == "bf16" else f", {config.policy} policy,"
    return config.optimizer + policy


class Progress:
    """A bar with loss, tokens/s and ETA; without a terminal, a line now and then."""

    def __init__(self, config, *, start: int):
        self._config, self._last, self._start = config, time.monotonic(), start
        self._began, self._bar = None, None  # the clock starts after compiling
        if config.progress and sys.stdout.isatty():
            self._bar = self._make_bar(config, start)

    def _make_bar(self, config, start):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
        )
        bar = progress.Progress(*columns)
        self._task = bar.add_task(
            _name(config), total=config.steps, completed=start, figures=""
        )
        bar.start()
        return bar

    def write(self, row: dict) -> None:
        """One step."""
        held = f"  held-out {row['held_out_loss']:.3f}" if row["held_out_loss"] else ""
        figures = f"loss {row['loss']:.3f}{held}  {row['tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], figures=figures)
        elif self._config.progress:
            self._line(row, figures)

    def _line(self, row: dict, figures: str) -> None:
        now, steps = time.monotonic(), self._config.steps
        if self._began is None:
            self._began, self._start = now, row["step"]
        if now - self._last < self._config.log_seconds and row["step"] < steps:
            return
        self._last = now
        done = row["step"] - self._start
        left = (now - self._began) / max(done, 1) * (steps - row["step"])
        minutes, seconds = divmod(int(left), 60)
        eta = f"{minutes}:{seconds:02d}" if done else "in a few steps"
        name = _name(self._config)
        print(f"{name} step {row['step']}/{steps}  {figures}  ETA {eta}", flush=True)

    def sync(self) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
