"""The comparison at equal bytes: how rates are tuned, what the table holds."""

import json
import math

import pytest

from experiments import equal_bytes, harness
from experiments.harness import ExitCode

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("losses", "best", "more"),
    [
        ({1.0: 3.0, 2.0: 2.0, 4.0: 3.0}, 2.0, []),
        ({1.0: 2.0, 2.0: 3.0}, 1.0, [0.5]),
        ({1.0: 3.0, 2.0: 2.0}, 2.0, [4.0]),
        ({16.0: 2.0, 8.0: 3.0}, 16.0, []),  # as far as the grid goes
        ({1.0: math.inf, 0.5: 3.0, 0.25: 4.0}, 0.5, []),
    ],
)
def test_the_grid_is_widened_at_its_edges_only(losses, best, more):
    assert equal_bytes.tune(losses, 1.0) == (best, more)


def fake_train(config, arguments, lr, seed):
    """A loss that is lowest at a rate of its own, off the grid's middle for muon."""
    where = 0.64 if "--optimizer=muon" in arguments else 5e-3
    loss = 3 + abs(math.log2(lr / where)) / 10 + seed / 1000
    return {
        "held_out_loss": loss,
        "train_loss": loss,
        "optimizer_bytes_per_parameter": 2.0,
        "step_ms": 1.0,
    }


def test_each_optimizer_is_run_at_its_own_best_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(equal_bytes, "_train", fake_train)
    results = tmp_path / "r.jsonl"
    arguments = [f"--results={results}", "--jobs=2", "--seeds=2"]
    code = harness.run_main(equal_bytes.main, equal_bytes.Config, arguments)
    assert code == ExitCode.DONE
    rows = {r["optimizer"]: r for r in json.loads(results.read_text())["rows"]}
    assert set(rows) == set(equal_bytes.CONTENDERS)
    assert rows["fp8_adamw"]["lr"] == 5e-3
    assert rows["fp8_adamw"]["seeds"] == [3.001, 3.002]  # not seed 0, which tuned it
    assert rows["muon (bf16)"]["lr"] == pytest.approx(0.32)  # 16 times the middle
    assert "held-out loss" in capsys.readouterr().out


def test_wrong_counts_are_refused(capsys):
    code = harness.run_main(equal_bytes.main, equal_bytes.Config, ["--seeds=0"])
    assert code == ExitCode.CONFIG
    assert "--seeds must be at least 1, got 0" in capsys.readouterr().err
