"""Tables and plots of what benchmarks recorded, for the documentation.

    python -m benchmarks.report                              all results, as Markdown
    python -m benchmarks.report --benchmark=layer            of one benchmark
    python -m benchmarks.report --plots=docs/figures         the figures of the docs
    python -m benchmarks.report --plots=. --metric=layer:time

Where a figure was recorded more than once, the last one counts. Plots need matplotlib.
"""

import argparse
from collections.abc import Iterable, Sequence
import json
import pathlib
import re
from typing import Any

from benchmarks.harness import FOLDER, shown

Row = dict[str, Any]
CEILING = 4.2  # TB/s that kernels reach on an H200 which read and write once
# Of what is drawn for the docs: benchmark, metric, and how many of its units the
# ceiling has.
_KERNELS = (("quantize", "rate", CEILING), ("optimizer", "traffic", 1000 * CEILING))
_FIGURES = {"layer": ("layer", "time"), "train-step": ("train_step", "rate")}


def read(paths: Iterable[pathlib.Path]) -> list[Row]:
    """All records of the files, the last of each figure only, in order."""
    found: dict[tuple, Row] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = ("device", "benchmark", "case", "implementation", "metric")
            found[tuple(row[name] for name in key)] = row
    return list(found.values())


def groups(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows by the values of some keys, in the order in which these first appear."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def markdown(rows: Sequence[Row]) -> str:
    """A section a benchmark and device: a line a case and implementation."""
    parts = []
    for (benchmark, device), some in groups(rows, "benchmark", "device").items():
        versions = sorted({f"jax {row['jax']}, {row['commit']}" for row in some})
        days = sorted({row["date"] for row in some})
        parts += [f"## {benchmark}", "", f"{device}; {'; '.join(versions)}; {days[-1]}"]
        parts += ["", *_lines(some), ""]
    return "\n".join(parts)


def _lines(rows: Sequence[Row]) -> list[str]:
    head = lambda row: f"{row['metric']} [{row['unit']}]".replace(" []", "")
    columns = list(dict.fromkeys(map(head, rows)))
    text = ["case", "implementation", *columns]
    lines = [text, ["---", "---", *("---:" for _ in columns)]]
    for key, some in groups(rows, "case", "implementation").items():
        values = {head(row): shown(row["value"]) for row in some}
        lines.append([*key, *(values.get(column, "") for column in columns)])
    return [f"| {' | '.join(line)} |" for line in lines]


def shares(rows: Sequence[Row]) -> list[Row]:
    """What share of the ceiling each kernel's counted traffic reaches, in per cent."""
    found = []
    for benchmark, metric, ceiling in _KERNELS:
        for row in rows:
            if (row["benchmark"], row["metric"]) == (benchmark, metric):
                case = f"{benchmark} {row['case']}"
                share = {"metric": f"share of {CEILING} TB/s", "unit": "%"}
                share["value"] = 100 * row["value"] / ceiling
                found.append({**row, **share, "benchmark": "kernels", "case": case})
    return found


def figures(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each of the docs' figures of which anything is recorded."""
    found = {"kernels": shares(rows)}
    for name, wanted in _FIGURES.items():
        found[name] = [r for r in rows if (r["benchmark"], r["metric"]) == wanted]
    return {name: some for name, some in found.items() if some}


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Bars of one metric: a group a case, a colour an implementation."""
    # Imported here: tables need no matplotlib.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # Text as text, and the same names each time: small files, with small differences.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.name})
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    bars = len(cases) * len(names)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + min(0.25 * bars, 0.1 * bars + 2)))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        some = [row for row in rows if row["implementation"] == name]
        places = [cases.index(row["case"]) + i * height for row in some]
        bars = axes.barh(places, [row["value"] for row in some], height, label=name)
        labels = [shown(row["value"]) for row in some]
        axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel(f"{rows[0]['metric']} [{rows[0]['unit']}]")
    axes.set_title(f"{rows[0]['benchmark']}, {rows[0]['device']}")
    axes.margins(x=0.12)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints tables; draws what is asked for."""
    parser = argparse.ArgumentParser(description="Tables and plots of results.")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: all")
    parser.add_argument("--benchmark", help="this one only")
    parser.add_argument("--plots", type=pathlib.Path, help="the folder for plots")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        help="what to plot, as benchmark:metric; the docs' figures without",
    )
    given = parser.parse_args(arguments)
    rows = read(given.files or sorted(FOLDER.glob("*.jsonl")))
    rows = [r for r in rows if given.benchmark in (None, r["benchmark"])]
    print(markdown(rows))
    if given.plots and not given.metric:
        drawn = figures(rows)
        if not drawn:
            parser.error("--plots: nothing is recorded of which a figure is made")
        for name, some in drawn.items():
            plot(some, given.plots / f"{name}.svg")
    for asked in given.metric if given.plots else ():
        benchmark, _, metric = asked.partition(":")
        some = [r for r in rows if (r["benchmark"], r["metric"]) == (benchmark, metric)]
        if not some:
            parser.error(f"--metric={asked}: nothing of the kind is recorded")
        name = re.sub(r"[^a-z0-9]+", "-", asked.lower()).strip("-")
        plot(some, given.plots / f"{name}.svg")


if __name__ == "__main__":
    main()
