"""Masked-token pretraining: the masks, a run of both stages, and what is refused."""

import json
import math

from flax import nnx
import jax
import numpy as np
import pytest

from coat_jax import rank_control
from experiments import comera_codebert, comera_codebert_arm, data, harness, token_file
from experiments.harness import ExitCode

pytestmark = pytest.mark.once
CYCLE = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of which every token follows from its place: 0 1 ... 15 0 1 ..."""
    ids = lambda count: np.arange(count, dtype=np.int32) % CYCLE
    arrays = {"train": ids(16 * 8 * 40), "held": ids(16 * 8)}
    facts = {"vocab": 16, "tokenizer": "bpe", "end": 15, "origin": {"corpus": "cycle"}}
    tokens = data.Tokens(**arrays, **facts, sha256=data.sha256_of(arrays))
    return token_file.write(tmp_path_factory.mktemp("text") / "cycle.npz", tokens)


def command(text, tmp_path, *more):
    out = (f"--results={tmp_path / 'r.jsonl'}", f"--image={tmp_path / 'i.png'}")
    small = ("--size=micro", "--seq=16", "--batch=8", "--rank=4", "--dtype=float32")
    return [f"--data={text}", *out, *small, *more]


def run(arguments):
    return harness.run_main(comera_codebert.main, comera_codebert.Config, arguments)


def test_masks_follow_the_rule():
    ids = jax.random.randint(jax.random.key(1), (400, 128), 0, 1000)
    got = comera_codebert_arm.masked(ids, jax.random.key(0), share=0.15, vocab=1000)
    places, shown = np.asarray(got.places), np.asarray(got.ids)
    assert places.shape == (400, 19)
    assert all(len(set(row)) == 19 for row in places)
    at = lambda x: np.take_along_axis(np.asarray(x), places, axis=1)
    np.testing.assert_array_equal(got.targets, at(ids))
    changed = shown != np.asarray(ids)
    assert changed.sum() == (at(shown) != at(ids)).sum()  # nowhere else
    mask, same = (at(shown) == 1000).mean(), (at(shown) == at(ids)).mean()
    assert abs(mask - 0.8) < 0.02
    assert abs(same - 0.1) < 0.02
    assert shown.max() == 1000
    again = comera_codebert_arm.masked(ids, jax.random.key(2), share=0.15, vocab=1000)
    assert not np.array_equal(again.places, got.places)


def test_windows_are_consecutive_and_whole():
    ids = np.arange(70, dtype=np.int32)
    got = comera_codebert_arm.windows_of(ids, 16)
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(got, ids[:64].reshape(4, 16))


@pytest.mark.soak
def test_both_stages_learn_the_cycle_and_are_recorded_once(text, tmp_path, capsys):
    stages = ("--epochs=2", "--late_epochs=1", "--lr=1e-2", "--core_lr=1e-2")
    # Diagonals of 1 reach the threshold in 20 steps, where the size outweighs the loss.
    rates = ("--diagonal_lr=0.05", "--late_diagonal_lr=0.05")
    late = ("--delay=9", *rates, "--late_size=0.5", "--late_slack=9")
    arguments = command(text, tmp_path, "--arm=tt", *stages, *late)
    assert run(arguments) == ExitCode.DONE
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    early, last = map(json.loads, lines)
    assert (early["stage"], last["stage"]) == ("early", "late")
    epochs = early["epochs"] + last["epochs"]
    assert [row["epoch"] for row in epochs] == [1, 2, 3]
    written = (tmp_path / "r.jsonl.epochs").read_text().splitlines()
    at_once = [json.loads(line) for line in written]
    assert [row["held_out"] for row in at_once] == [row["held_out"] for row in epochs]
    assert early["held_out"]["loss"] < 0.2 * math.log(CYCLE)
    assert early["held_out"]["accuracy"] > 0.9
    assert early["parameters"] > early["matrices"] > last["matrices"]
    for row in (early, last):
        before, after = row["held_out"], row["held_out_truncated"]
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-3)
        assert row["matrices"] == _size(row["ranks"])
    assert (tmp_path / "i.png").stat().st_size > 1000
    assert "tt late" in capsys.readouterr().out
    assert run(arguments) == ExitCode.DONE
    assert (tmp_path / "r.jsonl").read_text().splitlines() == lines


def _size(ranks):
    """Parameters of the blocks' cores, from the dims that were chosen and the ranks."""
    config = comera_codebert.Config(size="micro", arm="tt", rank=4, seq=16)
    init, _ = comera_codebert_arm.functions_of(config, 16)
    modes = rank_control.modes(jax.eval_shape(init, jax.random.key(0)))
    total = 0
    for name, inner in ranks.items():
        r = [1, *inner, 1]
        total += sum(
            n * a * b for n, a, b in zip(modes[name], r[:-1], r[1:], strict=True)
        )
    return total


def test_the_dense_arm_steps(text, tmp_path):
    """One update of the same model with matrices."""
    more = ("--arm=dense", "--epochs=1", "--epoch_steps=1")
    assert run(command(text, tmp_path, *more)) == ExitCode.DONE
    row = json.loads((tmp_path / "r.jsonl").read_text())
    assert (row["stage"], row["steps"]) == ("whole", 1)
    at_once = json.loads((tmp_path / "r.jsonl.epochs").read_text())
    assert (at_once["arm"], at_once["held_out"]) == ("dense", row["held_out"])
    assert abs(row["epochs"][0]["loss"] - math.log(64)) < 1
    assert row["matrices"] == 4 * 32 * 32 + 2 * 32 * 64
    assert row["optimizer_bytes"] == pytest.approx(2 * row["parameter_bytes"], 1e-3)


def test_the_mask_has_a_row_of_its_own():
    config = comera_codebert.Config(arm="tt")
    sizes, layers = comera_codebert_arm.model_of(config, 2048)
    assert sizes.vocab == 2112
    assert layers.embed is nnx.Embed


def test_the_ranks_are_those_of_the_papers_compression():
    """The blocks' matrices are 13 times smaller than dense ones, as in the paper."""
    count = {}
    for arm in ("tt", "dense"):
        config = comera_codebert.Config(arm=arm)
        init, _ = comera_codebert_arm.functions_of(config, 2048)
        shapes = jax.eval_shape(init, jax.random.key(0))
        count[arm] = comera_codebert_arm.sizes(shapes)["matrices"]
    assert count["dense"] == 6 * (4 * 768**2 + 2 * 768 * 3072)
    assert 12 < count["dense"] / count["tt"] < 14


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--mask=0", "--mask must be above 0 and below 1, got 0.0"),
        ("--rank=0", "--rank must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_one_line(option, words, capsys):
    assert run([option]) == ExitCode.CONFIG
    assert words in capsys.readouterr().err
