"""What the lines of `experiments.comera_pairs` say: a table and two pictures."""

import pathlib
import statistics

DENSE = 66_498_048  # what the tensor trains replace, at the paper's shapes
_ROWS, _HIDDEN = 30522, 768
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777"]


def accuracy(share: dict) -> float:
    """Of paraphrases and hard negatives, half each."""
    return (share["same"] + share["hard"]) / 2


def compression(row: dict, *, used: bool = False) -> float:
    """Dense matrices' parameters over those of the trains, or of the arrays there.

    With `used`, rows of the word table that no word piece has don't count as dense.
    """
    dense = DENSE
    if row["config"]["size"] != "full":
        return float("nan")  # of other shapes
    if used:
        dense -= (_ROWS - row["vocab_used"]) * _HIDDEN
    return dense / row["replaced_parameters"]


def summary(runs: list[dict]) -> dict:
    """Means over seeds of one arm's stage, and the range of its accuracy."""
    scores = [accuracy(row["accuracy"]) for row in runs]
    mean = lambda f: statistics.fmean(map(f, runs))
    epochs = [epoch for row in runs for epoch in row["epochs"][1:]] or [
        epoch for row in runs for epoch in row["epochs"]
    ]
    return {
        "accuracy": statistics.fmean(scores),
        "lowest": min(scores),
        "highest": max(scores),
        "seeds": len(scores),
        "random": mean(lambda row: row["accuracy"]["random"]),
        "moved": max(_moved(row) for row in runs),
        "size": mean(lambda row: row["replaced_parameters"]),
        "compression": mean(compression),
        "used": mean(lambda row: compression(row, used=True)),
        "state": mean(lambda row: row["optimizer_bytes"]) / 2**20,
        "peak": mean(lambda row: row["peak_bytes"] or 0) / 2**20,
        "epoch_s": statistics.median(epoch["seconds"] for epoch in epochs),
    }


def _moved(row: dict) -> float:
    """By how much truncation changed the accuracy."""
    after = row.get("accuracy_truncated", row["accuracy"])
    return abs(accuracy(after) - accuracy(row["accuracy"]))


def table(found: dict[str, dict[int, dict]], tf_idf: float):
    """A line an arm and stage."""
    from rich.table import Table

    shown = Table(title=f"paraphrase or not (TF-IDF threshold: {tf_idf:.3f})")
    headings = ("arm", "accuracy", "lowest to highest", "seeds", "random", "cut")
    headings += ("matrices", "x", "x used", "state MiB", "peak MiB", "epoch s")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, by_seed in found.items():
        s = summary(list(by_seed.values()))
        shown.add_row(
            name,
            f"{s['accuracy']:.4f}",
            f"{s['lowest']:.4f} to {s['highest']:.4f}",
            str(s["seeds"]),
            f"{s['random']:.3f}",
            f"{s['moved']:.4f}",
            f"{s['size']:,.0f}",
            f"{s['compression']:.1f}",
            f"{s['used']:.1f}",
            f"{s['state']:.1f}",
            f"{s['peak']:.0f}",
            f"{s['epoch_s']:.2f}",
        )
    return shown


def show(found: dict[str, dict[int, dict]], tf_idf: float) -> None:
    """Prints the table, and what its columns are."""
    from rich.console import Console

    Console(width=140).print(table(found, tf_idf))
    print(
        "random: right answers for verses from elsewhere. cut: largest change of the\n"
        "accuracy by truncation. matrices: parameters of what trains replace.\n"
        "x: how many times less than 66,498,048; x used: without the table's rows\n"
        "that no word piece has. peak: arguments, results and temporaries of an epoch."
    )


def draw(found: dict[str, dict[int, dict]], image: str) -> pathlib.Path:
    """Writes the picture: accuracy against size, and a run's ranks by epoch."""
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5), layout="constrained", width_ratios=(1, 1.3)
    )
    _plane(left, found)
    _ranks(right, found, figure)
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _plane(axis, found) -> None:
    """Accuracy against parameters: a path an epoch a step, its end a dot."""
    for colour, (name, runs) in zip(_COLOURS, found.items(), strict=False):
        for row in runs.values():
            size = lambda epoch, row=row: epoch.get("size", row["replaced_parameters"])
            path = [(size(epoch), accuracy(epoch)) for epoch in row["epochs"]]
            axis.plot(*zip(*path, strict=True), "-", color=colour, alpha=0.4)
            label = name if row is next(iter(runs.values())) else None
            axis.plot(*path[-1], "o", color=colour, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("parameters of the matrices")
    axis.set_ylabel("accuracy on test pairs (a dot a seed, a path an epoch a step)")
    axis.legend()


def _ranks(axis, found, figure) -> None:
    """Of the first run of tensor trains: living ranks, a row a bond, by epoch."""
    stages = [found[name] for name in ("tt early", "tt late") if name in found]
    if not stages:
        axis.set_axis_off()
        return
    seed = next(iter(stages[0]))
    epochs = [
        epoch for runs in stages if seed in runs for epoch in runs[seed]["epochs"]
    ]
    names = list(epochs[0]["ranks"])
    rows = [[r for name in names for r in epoch["ranks"][name]] for epoch in epochs]
    shown = axis.imshow(
        list(zip(*rows, strict=True)), aspect="auto", interpolation="none"
    )
    places = [len(epochs[0]["ranks"][name]) for name in names]
    starts = [sum(places[:i]) for i in range(len(names))]
    axis.set_yticks(starts, names, fontsize=5)
    axis.set_xticks(
        range(len(epochs)), [epoch["epoch"] for epoch in epochs], fontsize=7
    )
    if len(stages) > 1 and seed in stages[1]:
        axis.axvline(len(stages[0][seed]["epochs"]) - 0.5, color="white")
    axis.set_xlabel("epoch")
    axis.set_title(f"living ranks of each train's bonds, seed {seed}")
    figure.colorbar(shown, ax=axis)
