"""Question: fed the same gradients, how far from float32 AdamW does 8-bit AdamW end?

Records the gradients of a small training run, feeds them in turn to optax.adamw, to
coat_jax.fp8_adamw and, in an environment of their own, to torch's AdamW, torchao's
AdamWFp8 and AdamW8bit and bitsandbytes' AdamW8bit: same start, same learning rate,
betas, eps and weight decay. The gradients do not answer to the parameters, so nothing
but the stored moments differs. A distance is |p - p_f32| / |p_f32 - p_0| over all
parameters, p_f32 being optax.adamw's.

Command:   python -m venv .venv-baselines
           .venv-baselines/bin/pip install -r experiments/baselines/requirements.txt
           python -m experiments.baselines.parity \
               --torch_python=.venv-baselines/bin/python
Hardware:  two CPU cores, 20 minutes while six other jobs ran there; torchao compiles
           its step, which takes a C++ compiler.
Expected:  torch's AdamW within 1e-4 of optax's: the float32 rounding of decay in
           embeddings that are never trained. After 200 steps, seeds 0 and 1:
                                     b2 = 0.95      b2 = 0.999
           fp8_adamw                 0.12, 0.12     0.04, 0.04
           torchao AdamW8bit         0.39, 0.38     0.13, 0.10
           bitsandbytes AdamW8bit    0.48, 0.47     0.14, 0.13
           torchao AdamWFp8          0.98, 0.48     1.84, 0.30
           fp8_adamw "unexpanded, group 256" stores as AdamWFp8 does, and equals it to
           three digits. results.jsonl beside this file holds the tables.
"""

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys

import numpy as np

from experiments import harness
from experiments.baselines import exchange
from experiments.harness import ExitCode, UserError, option

REFERENCE = "optax.adamw (float32)"  # as in jax_side, which imports JAX
ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Compares 8-bit AdamW of three frameworks on the same recorded gradients."""

    torch_python: str | None = option(
        None, "Python with requirements.txt installed; without it, the JAX side alone"
    )
    b2: str = option("0.95,0.999", "decays of the second moment, by commas")
    at: str = option("50,100,200", "steps after which distances are taken, by commas")
    seed: int = option(0, "of the initial weights and the batches")
    lr: float = option(1e-3, "learning rate, constant")
    b1: float = option(0.9, "decay of the first moment")
    eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.01, "decoupled, of every parameter")
    work: str = option("results/parity", "folder of the recording and the outcomes")
    results: str = option("results/parity.jsonl", "where the tables are appended")

    def __post_init__(self):
        if not all(0 <= b2 < 1 for b2 in self.decays()):
            raise ValueError(f"--b2 must be from 0 to below 1, got {self.b2!r}")
        if min(self.steps()) < 1:
            raise ValueError(f"--at must be steps from 1, got {self.at!r}")

    def decays(self) -> list[float]:
        """`b2` as numbers, rising."""
        return sorted(set(_numbers("b2", self.b2, float)))

    def steps(self) -> list[int]:
        """`at` as numbers, rising; the last is the length of the recording."""
        return sorted(set(_numbers("at", self.at, int)))

    def adam(self, b2: float) -> exchange.Adam:
        """The hyperparameters with this b2."""
        names = ("lr", "b1", "eps", "weight_decay")
        return exchange.Adam(b2=b2, **{name: getattr(self, name) for name in names})


def _numbers(name: str, text: str, kind) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{name} must be numbers joined by commas, got {text!r}"
        ) from None


def make_recording(config: Config, path: pathlib.Path) -> exchange.Recording:
    """Trains at the largest b2, and keeps the gradients for the other side."""
    from experiments.baselines import record

    params, text = record.init_params(config.seed), record.read_text()
    recording, losses = record.record(
        params,
        text,
        steps=config.steps()[-1],
        seed=config.seed,
        adam=config.adam(config.decays()[-1]),
    )
    exchange.write_recording(path, recording)
    size = sum(leaf.size for leaf in recording.params.values())
    print(
        f"recorded {recording.steps} steps of {size:,} parameters, "
        f"loss {losses[0]:.3f} to {statistics.fmean(losses[-10:]):.3f}: {path}"
    )
    return recording


def run_jax_side(config: Config, recording: exchange.Recording, out: pathlib.Path):
    """Writes the outcomes of optax.adamw and of every way of fp8_adamw."""
    from experiments.baselines import jax_side

    for b2 in config.decays():
        for name in (jax_side.REFERENCE, *jax_side.STORED):
            outcome = jax_side.replay(name, recording, config.adam(b2), config.steps())
            exchange.write_outcome(out, outcome)


def _run_torch(config: Config, *arguments: str) -> None:
    # Not resolved: a virtual environment's python is a link, and its place matters.
    python = pathlib.Path(config.torch_python).absolute()
    remedy = "make its environment from experiments/baselines/requirements.txt"
    try:
        done = subprocess.run(
            [str(python), *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise UserError(
            ExitCode.CONFIG,
            f"--torch_python={python} does not start ({error.strerror}); {remedy}",
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(
            ExitCode.CONFIG,
            f"the torch side failed: {lines[-1]}; if it lacks packages, {remedy}",
        )


def check_torch_side(config: Config) -> None:
    """Asks that Python for its packages, before any work.

    Raises:
      UserError: it is missing or lacks one of them; exit code 6.
    """
    _run_torch(config, "-c", "import bitsandbytes, torch, torchao")


def run_torch_side(config: Config, recording: pathlib.Path, out: pathlib.Path):
    """Writes the outcomes of the other frameworks, in their own process.

    Raises:
      UserError: that process failed; exit code 6.
    """
    _run_torch(
        config,
        "-m",
        "experiments.baselines.torch_side",
        f"--recording={recording.resolve()}",
        f"--out={out.resolve()}",
        f"--b2={config.b2}",
        f"--at={config.at}",
    )


def distance(params: dict, reference: dict, start: dict) -> float:
    """|p - p_f32| / |p_f32 - p_0| over all leaves, in float64."""
    norm = lambda a, b: sum(
        np.sum(np.square(a[n].astype(np.float64) - b[n].astype(np.float64))) for n in a
    )
    return float(np.sqrt(norm(params, reference) / norm(reference, start)))


def v_against(v: dict, reference: dict) -> tuple[float, float]:
    """(median sqrt(v / v_f32), share of v that are zero) where v_f32 is not zero.

    Over the leaves that 8-bit optimizers store in 8 bits.
    """
    large = [name for name in v if v[name].size >= exchange.MIN_SIZE]
    got, want = (
        np.concatenate([tree[name].ravel() for name in large]).astype(np.float64)
        for tree in (v, reference)
    )
    known = want > np.finfo(np.float32).tiny
    got, want = got[known], want[known]
    return float(np.median(np.sqrt(got / want))), float(np.mean(got == 0))


def compare(
    recording: exchange.Recording, outcomes: list[exchange.Outcome]
) -> list[dict]:
    """One row an optimizer of one b2, the nearest to float32 AdamW first."""
    reference = next(o for o in outcomes if o.optimizer == REFERENCE)
    count = sum(leaf.size for leaf in recording.params.values())
    rows = []
    for outcome in outcomes:
        median, lost = v_against(outcome.v, reference.v)
        distances = {
            str(step): distance(tree, reference.params[step], recording.params)
            for step, tree in sorted(outcome.params.items())
        }
        rows.append(
            {
                "optimizer": outcome.optimizer,
                "bytes_per_parameter": outcome.size / count,
                "distance": distances,
                "v_median": median,
                "v_lost": lost,
                "versions": outcome.versions,
            }
        )
    return sorted(rows, key=lambda row: list(row["distance"].values())[-1])


def table(b2: float, rows: list[dict]):
    """The comparison as people read it."""
    from rich.table import Table

    shown = Table(title=f"distance from float32 AdamW, b2 = {b2}")
    steps = [f"step {step}" for step in rows[0]["distance"]]
    headings = ["optimizer", "B/parameter", *steps, "sqrt(v), median", "v lost"]
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for row in rows:
        shown.add_row(
            row["optimizer"],
            f"{row['bytes_per_parameter']:.3f}",
            *(f"{value:.2e}" for value in row["distance"].values()),
            f"{row['v_median']:.3f}",
            f"{row['v_lost']:.2%}",
        )
    return shown


def main(config: Config) -> dict[float, list[dict]]:
    """Records, runs both sides, prints and appends one table a b2."""
    from rich.console import Console

    if config.torch_python:
        check_torch_side(config)
    work = pathlib.Path(config.work)
    path, out = work / "recording.npz", work / "outcomes"
    for old in out.glob("*.npz"):
        old.unlink()
    recording = make_recording(config, path)
    run_jax_side(config, recording, out)
    if config.torch_python:
        run_torch_side(config, path, out)
    else:
        print("without --torch_python the other frameworks are left out; see --help")
    outcomes, results = exchange.read_outcomes(out), {}
    for b2 in config.decays():
        rows = compare(recording, [o for o in outcomes if o.b2 == b2])
        Console(width=110).print(table(b2, rows))
        facts = {"b2": b2, "cpus": os.cpu_count(), "rows": rows}
        results[b2] = rows
        harness.record(config.results, config, facts)
    print(f"results: {config.results}")
    return results


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
