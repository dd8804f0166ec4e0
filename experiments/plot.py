"""Question: do runs on the same data follow the same curve?

Command:   python -m experiments.plot --runs=results/demo/adamw,results/demo/coat \
               --image=results/demo/curves.png
Hardware:  any; a second.
Expected:  curves on top of each other; below, differences far smaller than those of
           single batches, which drift with the runs: two seeds differ by 0.02.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
import sys

import numpy as np

from experiments import harness, metrics
from experiments.harness import ExitCode, UserError, option

_COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by colour-blind readers too
# Each later one thinner and with smaller marks, so that all of them show.
_LINES = (
    {"linewidth": 3.0, "alpha": 0.5},
    {"linewidth": 1.2, "linestyle": "--"},
    {"linewidth": 1.2, "linestyle": ":"},
)
_MARKS = ({"markersize": 9, "fillstyle": "none"}, {"markersize": 5}, {"markersize": 2})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Plots the losses of runs and, below, those of all but the first minus its own."""

    runs: str = option(
        "results/demo/adamw,results/demo/fp8_adamw,results/demo/coat",
        "folders of two or three runs, with commas between them",
    )
    image: str = option("results/demo/curves.png", "the picture to write")


def _curves(folder: str) -> dict[str, np.ndarray]:
    """Step, loss and the steps and values of the held-out loss of one run."""
    rows = metrics.read_rows(pathlib.Path(folder, "metrics.csv"))
    if not rows:
        raise UserError(
            ExitCode.DATA, f"{folder} holds no metrics.csv with a row; give a run"
        )
    held = [row for row in rows if row["held_out_loss"]]
    column = lambda part, name: np.array([float(row[name]) for row in part])
    return {
        "step": column(rows, "step"),
        "loss": column(rows, "loss"),
        "held_step": column(held, "step"),
        "held": column(held, "held_out_loss"),
    }


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the `width` (odd) values around each, of fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    here, half = np.arange(len(values)), width // 2
    starts = np.maximum(here - half, 0)
    ends = np.minimum(here + half + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _draw_losses(axis, runs: dict, width: int) -> None:
    for (name, run), colour, look, mark in zip(
        runs.items(), _COLOURS, _LINES, _MARKS, strict=False
    ):
        axis.plot(run["step"], run["loss"], color=colour, alpha=0.12, linewidth=0.6)
        label = f"{name}, training (mean of {width} steps; faint: each)"
        axis.plot(
            run["step"], smooth(run["loss"], width), color=colour, label=label, **look
        )
        held = {"color": colour, "linestyle": "none", "marker": "o"}
        label = f"{name}, held out"
        axis.plot(run["held_step"], run["held"], label=label, **held, **mark)
    axis.set_ylabel("loss (nats per token)")
    axis.legend(frameon=False)


def _draw_differences(axis, runs: dict, width: int) -> None:
    (first, base), *others = runs.items()
    axis.axhline(0.0, color="#999999", linewidth=0.8)
    for (name, run), colour in zip(others, _COLOURS[1:], strict=False):
        count = min(len(base["step"]), len(run["step"]))
        difference = run["loss"][:count] - base["loss"][:count]
        steps = base["step"][:count]
        axis.plot(steps, difference, color=colour, alpha=0.25, linewidth=0.8)
        label = f"{name}, mean of {width} steps"
        axis.plot(steps, smooth(difference, width), color=colour, label=label)
    axis.set_ylabel(f"loss - {first}'s (nats)")
    axis.set_xlabel("step")
    axis.legend(frameon=False)


def compare(folders: Sequence[str], image: str, *, title: str) -> pathlib.Path:
    """Writes the picture and returns its path; the runs are named by their folders."""
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    runs = {pathlib.Path(folder).name: _curves(folder) for folder in folders}
    if len(runs) < len(folders) or not 2 <= len(runs) <= len(_COLOURS):
        raise UserError(
            ExitCode.CONFIG,
            f"two or {len(_COLOURS)} runs, in folders of different names, make a "
            f"picture; got {', '.join(folders)}",
        )
    width = len(next(iter(runs.values()))["step"]) // 40 * 2 + 1
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 7), height_ratios=[3, 1.4], layout="constrained"
    )
    _draw_losses(top, runs, width)
    _draw_differences(bottom, runs, width)
    top.set_title(title)
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def main(config: Config) -> None:
    """Draws and says where."""
    folders = config.runs.split(",")
    title = ", ".join(pathlib.Path(folder).name for folder in folders)
    print(compare(folders, config.image, title=title))


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
