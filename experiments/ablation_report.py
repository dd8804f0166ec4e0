"""What the rows of an ablation say: gaps to BF16 seed by seed, a table, a picture."""

import math
import pathlib
import statistics

BASE = "bf16"
TARGET = 0.25  # per cent: the gap that full COAT may have
_COLOUR, _GREY = "#0072b2", "#777777"


def gaps(rows: list[dict], base: list[dict]) -> list[float]:
    """100 * (loss / the base's loss of the same seed - 1), of the seeds that both have.

    Pairing the seeds takes out what they share: the weights at the start, the batches.
    """
    losses = {row["config"]["seed"]: row["held_out_loss"] for row in base}
    pairs = [(row["held_out_loss"], losses.get(row["config"]["seed"])) for row in rows]
    return [100 * (a / b - 1) for a, b in pairs if a is not None and b is not None]


def standard_error(values: list[float]) -> float:
    """Of the mean; NaN for fewer than two values.

    Example:
      >>> standard_error([1.0, 3.0])
      1.0
    """
    if len(values) < 2:
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def summarise(name: str, rows: list[dict], base: list[dict]) -> dict:
    """One arm: mean and range of its held-out losses, its gap in per cent."""
    held = [row["held_out_loss"] for row in rows]
    diverged = held.count(None)
    held = [loss for loss in held if loss is not None]
    gap = gaps(rows, base) if held else []
    column = lambda key: [row[key] for row in rows if row[key] is not None]
    mean = lambda values: statistics.fmean(values) if values else math.nan
    return {
        "arm": name,
        "held_out_loss": mean(held),
        "lowest": min(held, default=math.nan),
        "highest": max(held, default=math.nan),
        "gap": mean(gap),
        "error": standard_error(gap),
        "held_out_loss_plain": mean(column("held_out_loss_plain")),
        "train_loss": mean(column("train_loss")),
        "step_ms": statistics.median(column("step_ms") or [math.nan]),
        "diverged": diverged,
    }


def _cells(row: dict) -> list[str]:
    error = "" if math.isnan(row["error"]) else f" +- {row['error']:.3f}"
    gap = "-" if math.isnan(row["gap"]) else f"{row['gap']:+.3f}{error}"
    note = f" ({row['diverged']} diverged)" if row["diverged"] else ""
    return [
        row["arm"] + note,
        f"{row['held_out_loss']:.4f}",
        f"{row['lowest']:.4f} to {row['highest']:.4f}",
        gap,
        f"{row['held_out_loss_plain']:.4f}",
        f"{row['train_loss']:.4f}",
        f"{row['step_ms']:.1f}",
    ]


def table(made: dict[str, list[dict]]) -> str:
    """A Markdown table, an arm a row, in the order that they ran.

    The gap is the mean over seeds, with its standard error. "In bf16" is the held-out
    loss of the same parameters in Flax's layers.
    """
    base = made.get(BASE, [])
    heads = ["arm", "held-out loss", "seeds", f"gap to {BASE}, %"]
    heads += ["in bf16", "train loss", "step, ms"]
    lines = [heads, ["---"] * len(heads)]
    lines += [_cells(summarise(name, rows, base)) for name, rows in made.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _draw_gaps(axis, made: dict, base: list[dict]) -> None:
    names = [name for name in made if name != BASE][::-1]
    axis.axvline(0.0, color=_GREY, linewidth=0.8)
    axis.axvline(TARGET, color=_GREY, linewidth=0.8, linestyle=":")
    for place, name in enumerate(names):
        each = gaps(made[name], base)
        if not each:
            continue
        error = standard_error(each)
        bar = {"xerr": 0.0 if math.isnan(error) else error, "capsize": 3}
        axis.errorbar(statistics.fmean(each), place, fmt="o", color=_COLOUR, **bar)
        axis.plot(each, [place] * len(each), "|", color=_COLOUR, alpha=0.5)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel(f"held-out loss over that of {BASE}, % (dotted: {TARGET})")
    axis.set_title("mean, standard error, each seed")


def _draw_curves(axis, made: dict, base: list[dict]) -> None:
    """Mean over seeds of the training loss minus the base's, at every look."""
    known = {row["config"]["seed"]: dict(row["curve"]) for row in base}
    for name, rows in made.items():
        lines = []
        for row in rows:
            other = known.get(row["config"]["seed"], {})
            lines.append(
                {s: v - other[s] for s, v in row["curve"] if v and other.get(s)}
            )
        steps = sorted(set.intersection(*(set(line) for line in lines)))
        if name != BASE and steps:
            means = [statistics.fmean(line[s] for line in lines) for s in steps]
            axis.plot(steps, means, label=name, linewidth=1.0)
    axis.axhline(0.0, color=_GREY, linewidth=0.8)
    axis.set_xlabel("step")
    axis.set_ylabel(f"training loss minus that of {BASE} (nats)")
    if axis.lines[:-1]:
        axis.legend(frameon=False, fontsize="small")


def draw(made: dict[str, list[dict]], image: str) -> pathlib.Path:
    """Writes the picture and returns its path."""
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    base = made.get(BASE, [])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    right.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)  # for all arms
    _draw_gaps(left, made, base)
    _draw_curves(right, made, base)
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
