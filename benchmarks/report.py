"""Tables and plots of what benchmarks recorded, for the documentation.

    python -m benchmarks.report                              all results, as Markdown
    python -m benchmarks.report --benchmark=layer            of one benchmark
    python -m benchmarks.report --plots=docs/figures --metric=layer:time

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


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Bars of one metric: a group a case, a colour an implementation."""
    # Imported here: tables need no matplotlib.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.25 * len(cases) * len(names)))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        some = [row for row in rows if row["implementation"] == name]
        places = [cases.index(row["case"]) + i * height for row in some]
        bars = axes.barh(places, [row["value"] for row in some], height, label=name)
        axes.bar_label(bars, [shown(row["value"]) for row in some], padding=3)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel(f"{rows[0]['metric']} [{rows[0]['unit']}]")
    axes.set_title(f"{rows[0]['benchmark']}, {rows[0]['device']}")
    axes.margins(x=0.12)
    axes.legend()
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
        "--metric", action="append", default=[], help="what to plot: benchmark:metric"
    )
    given = parser.parse_args(arguments)
    rows = read(given.files or sorted(FOLDER.glob("*.jsonl")))
    rows = [r for r in rows if given.benchmark in (None, r["benchmark"])]
    print(markdown(rows))
    for asked in given.metric if given.plots else ():
        benchmark, _, metric = asked.partition(":")
        some = [r for r in rows if (r["benchmark"], r["metric"]) == (benchmark, metric)]
        if not some:
            parser.error(f"--metric={asked}: nothing of the kind is recorded")
        name = re.sub(r"[^a-z0-9]+", "-", asked.lower()).strip("-")
        plot(some, given.plots / f"{name}.svg")


if __name__ == "__main__":
    main()
