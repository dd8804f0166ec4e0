"""The sentence-pair experiment: batches, rates, stages, what it records and skips."""

import dataclasses
import json
import subprocess
import types

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.models import encoder
from experiments import (
    comera_pairs,
    comera_pairs_arm,
    comera_pairs_batches,
    comera_pairs_report,
    harness,
    verse_pairs,
)
from experiments.harness import ExitCode, UserError
from tests.helpers import assert_reordered

pytestmark = pytest.mark.once
PAD, CLS, SEP = verse_pairs.PAD, verse_pairs.CLS, verse_pairs.SEP


def made_up(verses=24, longest=9):
    """Verses of 60 kinds of pieces, the second version the first one backwards."""
    rng = np.random.default_rng(0)
    length = rng.integers(2, longest + 1, verses).astype(np.int32)
    first = rng.integers(4, 60, (verses, longest)).astype(np.uint16)
    first[np.arange(longest)[None] >= length[:, None]] = PAD
    second = first[:, ::-1].copy()
    for row, n in zip(second, length, strict=True):
        row[:n], row[n:] = row[longest - n :].copy(), PAD
    chapter = np.arange(verses) // 4 * 4
    others = (np.arange(verses)[:, None] + 1 + np.arange(8)[None]) % 4
    others = np.where(
        others == np.arange(verses)[:, None] % 4, (others + 1) % 4, others
    )
    arrays = {
        "first": first, "first_length": length,
        "second": second, "second_length": length,
        "similar": (chapter[:, None] + others).astype(np.int32),
        "part": np.repeat([0, 2], [verses - 8, 8]).astype(np.uint8),
        "similarity": np.tile(np.float32([0.9, 0.1]), (verses, 1)),
    }  # fmt: skip
    sha256 = verse_pairs._sha256_of(arrays)
    return verse_pairs.Verses(**arrays, vocab=60, sha256=sha256)


VERSES = made_up()
DATA = comera_pairs_batches.put(VERSES)


# Batches -----------------------------------------------------------------------------


def test_the_longer_verse_loses_first():
    for a in range(9):
        for b in range(9):
            want = [a, b]
            while sum(want) > 7:
                want[int(want[1] > want[0])] -= 1
            got = comera_pairs_batches.lengths_within(jnp.int32(a), jnp.int32(b), 7)
            assert sum(map(int, got)) == sum(want)
            assert sorted(map(int, got)) == sorted(want)


@pytest.mark.parametrize("length", [10, 24])
def test_pairs_are_joined_as_bert_joins_them(length):
    first, second = np.array([0, 5, 9], np.int32), np.array([1, 5, 20], np.int32)
    got = jax.jit(
        lambda a, b: comera_pairs_batches.joined(DATA, a, b, length)
    )(first, second)  # fmt: skip
    for row, (i, j) in enumerate(zip(first, second, strict=True)):
        n, m = (int(x) for x in comera_pairs_batches.lengths_within(
            VERSES.first_length[i], VERSES.second_length[j], length - 3
        ))  # fmt: skip
        ids = [CLS, *VERSES.first[i, :n], SEP, *VERSES.second[j, :m], SEP]
        rest = length - len(ids)
        assert got.ids[row].tolist() == ids + [PAD] * rest
        assert got.segments[row].tolist() == [0] * (n + 2) + [1] * (m + 1) + [0] * rest
        assert got.mask[row].tolist() == [True] * len(ids) + [False] * rest


def drawn_others(easy, monkeypatch, N=16):
    """The second verses of a drawn batch, and its labels."""
    monkeypatch.setattr(
        comera_pairs_batches, "joined", lambda data, first, second, T: (first, second)
    )
    rows = jnp.asarray(VERSES.rows("train"))[:N]
    (first, second), labels = comera_pairs_batches.drawn(
        DATA, rows, jax.random.key(1), easy, 16
    )
    np.testing.assert_array_equal(first, np.tile(rows, 2))
    np.testing.assert_array_equal(labels, [1] * N + [0] * N)
    np.testing.assert_array_equal(second[:N], rows)
    return np.asarray(rows), np.asarray(second[N:])


def test_hard_negatives_are_of_the_chapter_and_most_the_first(monkeypatch):
    rows, others = drawn_others(0.0, monkeypatch)
    assert all(o in VERSES.similar[r] for r, o in zip(rows, others, strict=True))
    first = np.mean(others == VERSES.similar[rows, 0])
    assert 0.4 < first < 1


def test_easy_negatives_are_training_verses_from_anywhere(monkeypatch):
    rows, others = drawn_others(1.0, monkeypatch)
    assert set(others) <= set(VERSES.rows("train"))
    assert not all(o in VERSES.similar[r] for r, o in zip(rows, others, strict=True))


def test_negatives_become_harder_in_a_line():
    config = comera_pairs.Config(easy_epochs=4, easy=0.25)
    shares = [comera_pairs.easy_share(config, epoch) for epoch in range(6)]
    assert shares == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    assert comera_pairs.easy_share(comera_pairs.Config(easy_epochs=0), 0) == 0.25


def test_every_scored_verse_counts_once(monkeypatch):
    monkeypatch.setattr(comera_pairs_arm, "_EVAL_BATCH", 3)  # 8 verses: 3 batches
    config = comera_pairs.Config(length=24, part="test")
    same = lambda params, tokens: jax.nn.one_hot(
        (tokens.ids[:, 1] >= params).astype(jnp.int32), 2
    )
    evaluate = comera_pairs_arm._evaluation(same, VERSES, DATA, config)
    assert evaluate(0) == {"same": 1.0, "hard": 0.0, "random": 0.0}
    share = np.mean(VERSES.first[VERSES.rows("test"), 0] >= 30)
    assert evaluate(30) == {"same": share, "hard": 1 - share, "random": 1 - share}


# Optimizer and sizes -----------------------------------------------------------------


def test_rates_rise_and_fall_in_each_stage():
    config = comera_pairs.Config(
        arm="tt", epochs=10, late_epochs=5, warmup=0.1, late_lr=0.5
    )
    rate = comera_pairs_arm.rate_of(config, 1.0, 10)
    got = np.array([float(rate(step)) for step in range(150)])
    assert_reordered(got[0], 1 / 11, 4, 1)
    assert np.argmax(got) == 10
    assert got[99] < 0.001
    assert got[100] == 0.5
    assert (np.diff(got[10:100]) < 0).all()
    assert (np.diff(got[100:]) < 0).all()
    dense = comera_pairs_arm.rate_of(dataclasses.replace(config, arm="dense"), 1.0, 10)
    assert float(dense(120)) == 0.0


def shapes_of(layers):
    model = dataclasses.replace(encoder.PRESETS["mnli"], classes=2)
    make = lambda: encoder.init_params(model, jax.random.key(0), layers=layers)
    return jax.eval_shape(make)


def test_what_trains_replace():
    sizes = comera_pairs_arm.sizes(shapes_of(None))
    assert sizes["replaced_parameters"] == comera_pairs_report.DENSE == 66_498_048
    assert sizes["parameters"] - 66_498_048 == 459_267 - 769
    sizes = comera_pairs_arm.sizes(shapes_of(encoder.tensor_train_layers()))
    assert sizes["replaced_parameters"] == 1_026_528


def test_galore_projects_the_blocks_and_the_pooling():
    chosen = comera_pairs_arm.projected(shapes_of(None))
    leaves = jax.tree_util.tree_leaves_with_path(chosen)
    names = {jax.tree_util.keystr(path) for path, wanted in leaves if wanted}
    assert len(names) == 37
    assert all(name.endswith("['kernel']") for name in names)


def test_compression_is_of_all_rows_or_of_those_in_use():
    row = {"config": {"size": "full"}, "replaced_parameters": 1_026_528}
    row["vocab_used"] = 8192
    assert round(comera_pairs_report.compression(row), 1) == 64.8
    assert round(comera_pairs_report.compression(row, used=True), 1) == 48.1


# Runs --------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path):
    data = verse_pairs.write(str(tmp_path / "v.npz"), VERSES)
    return [
        f"--data={data}", f"--results={tmp_path / 'r.jsonl'}", "--dtype=float32",
        f"--image={tmp_path / 'i.png'}", "--size=micro", "--epochs=2", "--batch=8",
        "--late_epochs=1", "--epoch_steps=2", "--length=16", "--rank=3",
        "--embed_rank=3", "--seeds=1", "--galore_rank=4",
    ]  # fmt: skip


def lines(tmp_path):
    return [
        json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()
    ]


def test_both_stages_are_recorded_tabled_drawn_and_not_run_again(
    arguments, tmp_path, capsys, monkeypatch
):
    run = lambda: harness.run_main(
        comera_pairs.main, comera_pairs.Config, [*arguments, "--arm=tt"]
    )
    assert run() == ExitCode.DONE
    early, late = lines(tmp_path)
    assert (early["stage"], late["stage"]) == ("early", "late")
    assert [e["epoch"] for e in early["epochs"] + late["epochs"]] == [1, 2, 3]
    for row in (early, late):
        assert row["accuracy_truncated"] == row["accuracy"]
        assert row["peak_bytes"] > row["parameter_bytes"] > 0
        assert row["optimizer_bytes"] > 2 * row["parameter_bytes"] - 100
        assert row["epochs"][-1]["size"] == row["replaced_parameters"]
        assert 0 <= row["epochs"][-1]["random"] <= 1
    bonds = early["epochs"][0]["ranks"]
    assert len(bonds) == 8  # a table, a block of six, the pooling
    assert {len(ranks) for ranks in bonds.values()} == {3, 5}
    assert (tmp_path / "i.png").stat().st_size > 1000
    assert "tt late" in capsys.readouterr().out
    text = (tmp_path / "r.jsonl.epochs").read_text()  # each was there as it ended
    at_once = [json.loads(line) for line in text.splitlines()]
    assert [e["epoch"] for e in at_once] == [1, 2, 3]
    assert at_once[2]["ranks"] == late["epochs"][0]["ranks"]
    monkeypatch.setattr(comera_pairs, "run", None)  # would fail if it were called
    assert run() == ExitCode.DONE


@pytest.mark.soak
@pytest.mark.parametrize("arm", ["galore", "galore_reference", "dense_coat"])
def test_the_other_arms_run(arguments, tmp_path, arm):
    few = [a for a in arguments if not a.startswith("--epochs")]
    command = [*few, "--epochs=1", f"--arm={arm}"]
    code = harness.run_main(comera_pairs.main, comera_pairs.Config, command)
    assert code == ExitCode.DONE
    (row,) = lines(tmp_path)
    assert row["stage"] == "whole"
    assert "accuracy_truncated" not in row
    assert row["config"]["policy"] == ("default" if arm == "dense_coat" else "bf16")


def test_the_size_has_no_weight_before_the_delay():
    objective = comera_pairs_arm.objective_of(comera_pairs.Config(arm="tt", delay=3))
    params = {"cores": [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]}
    params["diagonals"] = [jnp.ones(2)]
    state, weights = objective.init(params), []
    for _ in range(5):
        _, (figures, state) = objective(jnp.float32(1), params, state)
        weights.append(float(figures["c_size"]))
    assert weights == [0, 0, 0, *[float(np.float32(0.1))] * 2]


def test_the_late_stage_aims_at_a_smaller_size_and_about_the_loss():
    config = comera_pairs.Config(arm="tt", late_size=0.3, late_slack=0.05)
    objective = comera_pairs_arm.objective_of(config)
    params = {"cores": [jnp.ones((1, 4, 2)), jnp.ones((2, 4, 1))]}
    tree = objective.init(params | {"diagonals": [jnp.ones(2)]})
    state = comera_pairs_arm.State(0, None, None, tree, None)
    late = comera_pairs_arm.begin_late(config, state, 0.5).objective
    assert bool(late.late)
    assert_reordered(late.targets.loss, 0.55, 1, 1)
    assert_reordered(late.targets.size, 0.3 * 16, 1, 16)


def fake_row(config, stage, seed, same, sha256="data"):
    epoch = {"epoch": 1, "seconds": 1.0, "same": same, "hard": same, "random": 1.0}
    row = {"seed": seed, "stage": stage, "data_sha256": sha256, "vocab_used": 60}
    row |= {"epochs": [epoch], "accuracy": epoch, "replaced_parameters": 10}
    row |= {"optimizer_bytes": 8, "peak_bytes": None}
    harness.record(config.results, config, row)


def test_the_table_is_of_runs_with_these_settings(tmp_path, capsys):
    config = comera_pairs.Config(results=str(tmp_path / "r.jsonl"), seeds=2)
    dense, tt = comera_pairs.arms(config)[:2]
    fake_row(dense, "whole", 0, 0.5)
    fake_row(dense, "whole", 0, 0.75)  # the later of two counts
    fake_row(dataclasses.replace(dense, lr=0.5), "whole", 1, 0.1)
    fake_row(dense, "whole", 1, 0.1, "of other data")
    fake_row(tt, "early", 0, 0.5)
    found = comera_pairs.found_in(config, "data")
    assert set(found) == {"dense whole", "tt early"}
    assert list(found["dense whole"]) == [0]
    assert found["dense whole"][0]["accuracy"]["same"] == 0.75
    left = {(arm.arm, seed) for arm, seed in comera_pairs.missing(config, "data")}
    assert ("dense", 0) not in left
    assert {("dense", 1), ("tt", 0), ("tt", 1), ("galore", 0)} <= left
    comera_pairs_report.show(found, 0.9)
    assert "0.7500 to 0.7500" in capsys.readouterr().out


def test_jobs_are_processes_on_the_devices_in_turn(arguments, monkeypatch):
    seen = []

    def fake(command, env):
        harness.parse(comera_pairs.Config, command[3:])  # every option is one
        seen.append((env["CUDA_VISIBLE_DEVICES"], [c for c in command if "seed=" in c]))
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake)
    command = [*arguments, "--arm=dense", "--seeds=4", "--jobs=2", "--gpus=2"]
    config = harness.parse(comera_pairs.Config, command)
    comera_pairs._train_apart(config, comera_pairs.missing(config, VERSES.sha256))
    assert {seed for _, (seed,) in seen} == {f"--seed={n}" for n in range(4)}
    assert {device for device, _ in seen} == {"0", "1"}


@pytest.mark.parametrize(
    ("ended", "code"),
    [(int(ExitCode.NON_FINITE), ExitCode.NON_FINITE), (1, ExitCode.CONFIG), (-9, 6)],
)
def test_a_job_that_fails_ends_the_rest_with_its_code(
    arguments, monkeypatch, ended, code
):
    ends = types.SimpleNamespace(returncode=ended)
    monkeypatch.setattr(subprocess, "run", lambda command, env: ends)
    config = harness.parse(comera_pairs.Config, [*arguments, "--jobs=2"])
    with pytest.raises(UserError, match=f"seed 0 ended with {ended}") as caught:
        comera_pairs._train_apart(config, comera_pairs.missing(config, VERSES.sha256))
    assert caught.value.code == code


def test_arms_are_all_or_named_and_fp8_only_where_it_belongs():
    named = comera_pairs.arms(comera_pairs.Config(arm="tt,tt_fp8", policy="paper"))
    assert [(c.arm, c.policy) for c in named] == [("tt", "bf16"), ("tt_fp8", "paper")]
    assert len(comera_pairs.arms(comera_pairs.Config())) == len(comera_pairs.ARMS)
    stages = [comera_pairs.stages_of(config) for config in named]
    assert stages == [["early", "late"], ["early"]]


def test_a_loss_that_is_not_finite_stops_the_run():
    config, state = comera_pairs.Config(arm="dense"), types.SimpleNamespace(params={})
    epoch = lambda state, key, easy: (state, {"loss": np.array([1.0, np.nan])})
    with pytest.raises(UserError, match="dense, seed 1: the loss is nan in epoch 3"):
        comera_pairs._one_epoch(config, 1, None, epoch, state, 2)


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("--batch=3", ExitCode.CONFIG, "--batch must be even, got 3"),
        ("--batch=200", ExitCode.CONFIG, "--batch=200 takes 100 verses, and there are"),
        ("--dropout=1.5", ExitCode.CONFIG, "--dropout must be from 0 to 1, got 1.5"),
        ("--clip=inf", ExitCode.CONFIG, "--clip: must be a finite number, got 'inf'"),
        ("--results=/proc/none/r", ExitCode.CONFIG, "can't be read and written"),
        ("--rank=0", ExitCode.CONFIG, "--rank must be at least 1, got 0"),
        ("--easy=2", ExitCode.CONFIG, "--easy must be from 0 to 1, got 2.0"),
        ("--arm=lte", ExitCode.CONFIG, "--arm must be all, or of dense, tt, galore"),
        ("--seeds=0", ExitCode.DATA, "holds no run with these settings"),
        ("--data=none.npz", ExitCode.DATA, "none.npz can't be read"),
    ],
)
def test_wrong_options_are_one_line(arguments, capsys, argument, code, words):
    command = [*arguments, argument]
    assert harness.run_main(comera_pairs.main, comera_pairs.Config, command) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
