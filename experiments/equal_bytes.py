"""Question: at about 2 bytes of optimizer state a parameter, which loss is reached?

Command:   python -m experiments.equal_bytes --jobs=8
Hardware:  one GPU, some 10 minutes; --jobs=1 on two CPU cores, some 60 minutes.
Expected:  experiments/README.md holds the measured table.

Each optimizer gets its own learning rate: a grid of five, tuned on seed 0 and widened
while the best stands at an edge; then fresh seeds at that rate. float32 AdamW, at 8
bytes, is the reference; the spread of its seeds is what "no loss" is measured by.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments import harness
from experiments.harness import ExitCode, UserError, option

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDEST = 16.0  # the grid is not widened beyond this factor of its middle
# Arguments of experiments.pretrain, and the middle of the grid of learning rates.
CONTENDERS = {
    "adamw (float32)": (("--optimizer=adamw",), 5e-3),
    "fp8_adamw": (("--optimizer=fp8_adamw",), 5e-3),
    "lion (bf16)": (("--optimizer=lion", "--momentum_dtype=bfloat16"), 1e-3),
    "muon (bf16)": (("--optimizer=muon", "--momentum_dtype=bfloat16"), 2e-2),
    "adafactor (bf16 momentum)": (
        ("--optimizer=adafactor", "--momentum_dtype=bfloat16"),
        5e-3,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Compares optimizers of equal state size on the demo's model."""

    preset: str = option("tiny", "as in experiments.pretrain")
    steps: int | None = option(None, "updates in a run")
    seeds: int = option(3, "fresh seeds at each tuned learning rate")
    jobs: int = option(1, "runs at a time")
    out: str = option("results/equal_bytes", "folder of the runs, deleted first")
    results: str = option("results/equal_bytes.jsonl", "where the table is appended")

    def __post_init__(self):
        for name in ("steps", "seeds", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")


def _train(config: Config, arguments, lr: float, seed: int) -> dict:
    """One run in its own process, so that runs share neither memory nor compiler."""
    name = f"{arguments[0].partition('=')[2]}-{lr:.3g}-{seed}"
    out = pathlib.Path(config.out) / name
    command = [
        sys.executable, "-m", "experiments.pretrain", *arguments,
        f"--preset={config.preset}", f"--lr={lr!r}", f"--seed={seed}",
        f"--out={out}", f"--results={out}.jsonl", "--overwrite", "--save_every=0",
        "--eval_every=0", "--progress=false",
    ]  # fmt: skip
    if config.steps is not None:
        command.append(f"--steps={config.steps}")
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | share
    )
    if done.returncode == ExitCode.NON_FINITE:
        return {"held_out_loss": math.inf, "train_loss": math.inf}
    if done.returncode:
        raise UserError(ExitCode.CONFIG, f"{name} failed: {done.stderr.strip()[-500:]}")
    return json.loads(pathlib.Path(f"{out}.jsonl").read_text().splitlines()[-1])


def tune(losses: dict[float, float], middle: float) -> tuple[float, list[float]]:
    """The best rate so far, and the rates to try next: one beyond it if at an edge."""
    best = min(losses, key=losses.get)
    beyond = {min(losses): best / 2, max(losses): best * 2}.get(best)
    if beyond is None or not 1 / WIDEST <= beyond / middle <= WIDEST:
        return best, []
    return best, [beyond]


def _tuned(config: Config, pool, advance) -> dict[str, dict[float, float]]:
    """Held-out loss at every rate tried, of every optimizer, on seed 0."""
    tried = {name: {} for name in CONTENDERS}
    wanted = {name: [m * f for f in FACTORS] for name, (_, m) in CONTENDERS.items()}
    while any(wanted.values()):
        runs = {
            (name, lr): pool.submit(_train, config, CONTENDERS[name][0], lr, 0)
            for name, rates in wanted.items()
            for lr in rates
        }
        for (name, lr), run in runs.items():
            tried[name][lr] = run.result()["held_out_loss"]
            advance()
        wanted = {n: tune(tried[n], CONTENDERS[n][1])[1] for n in CONTENDERS}
    return tried


def compare(config: Config) -> list[dict]:
    """One row an optimizer: tuned rate, losses of the fresh seeds, bytes, step time."""
    count = len(CONTENDERS) * (len(FACTORS) + config.seeds)
    with (
        concurrent.futures.ThreadPoolExecutor(config.jobs) as pool,
        Progress(console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("training", total=count)
        advance = lambda: bar.advance(task)
        tried = _tuned(config, pool, advance)
        best = {name: tune(tried[name], CONTENDERS[name][1])[0] for name in tried}
        runs = {
            name: [
                pool.submit(_train, config, CONTENDERS[name][0], best[name], seed)
                for seed in range(1, config.seeds + 1)
            ]
            for name in CONTENDERS
        }
        rows = []
        for name, seeds in runs.items():
            done = [run.result() for run in seeds]
            advance()
            rows.append(_row(name, best[name], tried[name], done))
    return rows


def _row(name: str, lr: float, tried: dict, done: list[dict]) -> dict:
    held = [run["held_out_loss"] for run in done]
    return {
        "optimizer": name,
        "lr": lr,
        "held_out_loss": statistics.fmean(held),
        "lowest": min(held),
        "highest": max(held),
        "train_loss": statistics.fmean(run["train_loss"] for run in done),
        "bytes_per_parameter": done[0]["optimizer_bytes_per_parameter"],
        "step_ms": statistics.median(run["step_ms"] for run in done),
        "seeds": held,
        "tuning": {f"{rate:.4g}": _finite(tried[rate]) for rate in sorted(tried)},
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def table(rows: list[dict]) -> Table:
    """The comparison as people read it, best held-out loss first."""
    shown = Table(title="held-out loss at each optimizer's own learning rate")
    headings = ("optimizer", "B/parameter", "lr", "held-out loss", "seeds", "step, ms")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for row in sorted(rows, key=lambda row: row["held_out_loss"]):
        shown.add_row(
            row["optimizer"],
            f"{row['bytes_per_parameter']:.2f}",
            f"{row['lr']:.2g}",
            f"{row['held_out_loss']:.4f}",
            f"{row['lowest']:.4f} to {row['highest']:.4f}",
            f"{row['step_ms']:.1f}",
        )
    return shown


def main(config: Config) -> None:
    """Runs the comparison, prints the table and appends it to the results."""
    rows = compare(config)
    path = harness.record(config.results, config, {"rows": rows})
    Console().print(table(rows))
    print(f"results: {path}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
