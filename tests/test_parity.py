"""The comparison on recorded gradients: the recording, the JAX side, files, the table.

The torch side needs an environment of its own; here a small program stands in for it.
"""

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from experiments import baselines, harness
from experiments.baselines import exchange, jax_side, parity, record
from tests.helpers import assert_reordered, assert_same_bits
from tests.test_layering import imported

pytestmark = pytest.mark.once

FOLDER = pathlib.Path(baselines.__file__).parent
ADAM = exchange.Adam(lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
AT = [2, 6]
SMALL = {"width": 32, "narrow": 200}
# Ways of storing that are replayed here: each is a program to compile.
COMPARED = (
    "fp8_adamw, v to nearest",
    "fp8_adamw, v stochastic",
    "fp8_adamw, unexpanded, group 256",
)


def make(text, seed=0):
    params = record.init_params(0, **SMALL)
    return record.record(params, text, steps=AT[-1], seed=seed, adam=ADAM)


@pytest.fixture(scope="module")
def text():
    return record.read_text(50_000)


@pytest.fixture(scope="module")
def recorded(text):
    with jax.numpy_dtype_promotion("standard"):
        return make(text)


@pytest.fixture(scope="module")
def replayed(recorded):
    with jax.numpy_dtype_promotion("standard"):
        names = (jax_side.REFERENCE, *COMPARED)
        outcomes = [jax_side.replay(n, recorded[0], ADAM, AT) for n in names]
    return {outcome.optimizer: outcome for outcome in outcomes}


def adamw(recording, adam):
    """Parameters after each step and the last v, in NumPy float64."""
    p = {n: leaf.astype(np.float64) for n, leaf in recording.params.items()}
    m, v = ({n: np.zeros_like(leaf) for n, leaf in p.items()} for _ in range(2))
    steps = []
    for t in range(1, recording.steps + 1):
        for n in p:
            g = recording.grads[n][t - 1].astype(np.float64)
            m[n] = adam.b1 * m[n] + (1 - adam.b1) * g
            v[n] = adam.b2 * v[n] + (1 - adam.b2) * g**2
            root = np.sqrt(v[n] / (1 - adam.b2**t)) + adam.eps
            u = m[n] / (1 - adam.b1**t) / root
            p[n] = p[n] - adam.lr * (u + adam.weight_decay * p[n])
        steps.append(dict(p))
    return steps, v


def test_the_recorded_run_learns_and_can_be_made_again(recorded, text, optax_promotion):
    recording, losses = recorded
    assert losses[-1] < losses[0]
    assert {n: g.shape for n, g in recording.grads.items()} == {
        n: (AT[-1], *p.shape) for n, p in recording.params.items()
    }
    again, other = make(text), make(text, seed=1)
    for field in ("params", "grads", "trained"):
        assert_same_bits(getattr(again[0], field), getattr(recording, field))
    assert again[1] == losses
    assert other[1] != losses


def test_the_reference_is_adamw_and_ends_where_the_recorded_run_did(recorded, replayed):
    recording, got = recorded[0], replayed[jax_side.REFERENCE]
    steps, v = adamw(recording, ADAM)
    for step in AT:
        for name, leaf in got.params[step].items():
            size = 1 + np.abs(steps[step - 1][name])
            assert_reordered(leaf, steps[step - 1][name], step, size)
    for name, leaf in got.v.items():
        assert_reordered(leaf, v[name], AT[-1], v[name].max())
        trained = recording.trained[name]
        assert_reordered(got.params[AT[-1]][name], trained, AT[-1], 1 + abs(trained))


def test_every_way_of_storing_is_told_apart(recorded, replayed):
    recording = recorded[0]
    rows = parity.compare(recording, list(replayed.values()))
    far = {row["optimizer"]: row["distance"]["6"] for row in rows}
    assert list(far.values()) == sorted(far.values())
    assert far.pop(jax_side.REFERENCE) == 0
    assert all(0 < value < 1 for value in far.values())
    assert len(set(far.values())) == len(COMPARED)
    nearest, stochastic, unexpanded = (far[name] for name in COMPARED)
    assert max(nearest, stochastic) < unexpanded


@pytest.mark.parametrize(
    ("name", "group"),
    [("fp8_adamw, v to nearest", 128), ("fp8_adamw, unexpanded, group 256", 256)],
)
def test_bytes_are_those_of_codes_and_groups(recorded, replayed, name, group):
    moment = 0
    for p in recorded[0].params.values():
        stored = p.size >= exchange.MIN_SIZE
        rows = p.size // p.shape[-1] if stored else 0
        # A float32 leaf has placeholders in place of its one amax and power.
        groups = rows * -(-p.shape[-1] // group) if stored else 1
        moment += p.size * (1 if stored else 4) + groups * 5
    assert replayed[name].size == 2 * moment + 4


def test_files_give_back_what_was_written(recorded, replayed, tmp_path):
    exchange.write_recording(tmp_path / "deep" / "r.npz", recorded[0])
    got = exchange.read_recording(tmp_path / "deep" / "r.npz")
    for field in ("params", "grads", "trained"):
        assert_same_bits(getattr(got, field), getattr(recorded[0], field))
    assert (got.adam, got.steps) == (ADAM, AT[-1])
    want = [replayed[name] for name in COMPARED[:2]]
    want = [*want, want[0]._replace(b2=0.95)]
    assert len({exchange.write_outcome(tmp_path, o) for o in want}) == len(want)
    facts = lambda o: (o.optimizer, o.b2, o.size, o.versions, sorted(o.params))
    read = sorted(exchange.read_outcomes(tmp_path), key=str)
    assert sorted(map(facts, read), key=str) == sorted(map(facts, want), key=str)
    by_key = {(o.optimizer, o.b2): o for o in read}
    for outcome in want:
        other = by_key[outcome.optimizer, outcome.b2]
        assert_same_bits((other.params, other.v), (outcome.params, outcome.v))


def test_distance_is_a_share_of_the_way_gone():
    start = {"a": np.zeros(3, np.float32), "b": np.ones((2, 2), np.float32)}
    end = {"a": np.full(3, 2, np.float32), "b": np.zeros((2, 2), np.float32)}
    half = {n: (start[n] + end[n]) / 2 for n in start}
    assert parity.distance(end, end, start) == 0
    assert parity.distance(half, end, start) == 0.5
    assert parity.distance(start, end, start) == 1


def test_v_is_compared_where_it_is_stored_in_8_bits_and_not_zero():
    want = np.ones(exchange.MIN_SIZE, np.float32)
    want[:96] = 0  # not known, whatever is stored
    got = 4 * want
    got[:96] = 7
    got[96:1096] = 0
    small = np.full(10, 1e9, np.float32)
    assert parity.v_against(
        {"w": got, "small": small}, {"w": want, "small": np.ones(10)}
    ) == (2.0, 0.25)


STAND_IN = """#!{python}
import pathlib, sys
sys.path.insert(0, ".")
from experiments.baselines import exchange
if sys.argv[1] == "-c":
    sys.exit()  # asked for its packages
assert sys.argv[1:3] == ["-m", "experiments.baselines.torch_side"], sys.argv
options = dict(argument[2:].split("=") for argument in sys.argv[3:])
recording = exchange.read_recording(pathlib.Path(options["recording"]))
at = [int(step) for step in options["at"].split(",")]
grown = {{n: g[0] ** 2 for n, g in recording.grads.items()}}
for b2 in options["b2"].split(","):
    params = {{step: recording.params for step in at}}
    exchange.write_outcome(pathlib.Path(options["out"]), exchange.Outcome(
        "stand-in", float(b2), params, grown, 12, {{"torch": "0"}}))
"""
MISSING = "#!{python}\nraise ModuleNotFoundError(\"No module named 'torch'\")\n"


def program(path, text):
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A config of the smallest comparison: the reference alone on the JAX side."""
    monkeypatch.setattr(
        record, "init_params", functools.partial(record.init_params, **SMALL)
    )
    monkeypatch.setattr(jax_side, "STORED", {})
    return parity.Config(
        b2="0.95", at="3", work=str(tmp_path / "w"), results=str(tmp_path / "r.jsonl")
    )


def test_the_command_compares_both_sides(small, tmp_path, capsys, optax_promotion):
    stale = tmp_path / "w" / "outcomes" / "stale.npz"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another run")
    python = program(tmp_path / "python", STAND_IN)
    results = parity.main(dataclasses.replace(small, torch_python=python))
    rows = {row["optimizer"]: row for row in results[0.95]}
    assert set(rows) == {jax_side.REFERENCE, "stand-in"}
    # The stand-in has not moved.
    assert rows["stand-in"]["distance"] == {"3": 1.0}
    line = json.loads(pathlib.Path(small.results).read_text())
    assert line["rows"] == results[0.95]
    assert line["config"]["at"] == "3"
    assert line["rows"][0]["versions"]["jax"] == importlib.metadata.version("jax")
    shown = capsys.readouterr().out
    for name, row in rows.items():
        size = f"{row['bytes_per_parameter']:.3f}"
        parts = map(re.escape, (name, size, f"{row['distance']['3']:.2e}"))
        assert re.search(".*".join(parts), shown)


def test_without_torch_the_jax_side_is_compared_and_it_says_so(
    small, capsys, optax_promotion
):
    (row,) = parity.main(small)[0.95]
    assert row["optimizer"] == jax_side.REFERENCE
    assert row["v_median"] == 1
    assert "without --torch_python" in capsys.readouterr().out


@pytest.mark.parametrize("python", ["incomplete", "absent"])
def test_a_python_without_torch_is_one_line_at_once(small, tmp_path, capsys, python):
    program(tmp_path / "incomplete", MISSING)
    options = dataclasses.asdict(small) | {"torch_python": str(tmp_path / python)}
    argv = [f"--{name}={value}" for name, value in options.items()]
    assert harness.run_main(parity.main, parity.Config, argv) == harness.ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert "requirements.txt" in line
    assert {"incomplete": "No module named 'torch'", "absent": "not start"}[
        python
    ] in line
    assert not pathlib.Path(small.work).exists()


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("b2", "1.0"), ("b2", "high"), ("b2", ""), ("at", "0,5"), ("at", "1.5")],
)
def test_a_wrong_option_is_refused_in_a_sentence(option, wrong, capsys):
    code = harness.run_main(parity.main, parity.Config, [f"--{option}={wrong}"])
    assert code == harness.ExitCode.CONFIG
    assert f"--{option} must be" in capsys.readouterr().err


def test_the_torch_side_needs_what_requirements_pin_and_nothing_of_ours():
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z]+==[0-9.]+", pin) for pin in pins)
    tops = lambda path: {n.partition(".")[0] for n in imported(path.read_text())}
    pinned = {pin.partition("==")[0] for pin in pins}
    foreign = tops(FOLDER / "torch_side.py") - set(sys.stdlib_module_names)
    foreign |= tops(FOLDER / "exchange.py") - set(sys.stdlib_module_names)
    assert foreign == pinned | {"experiments"}
    for path in FOLDER.parent.rglob("*.py"):
        others = imported(path.read_text())
        if path.name != "torch_side.py":
            assert not [n for n in others if n.startswith("torch") or "torch_side" in n]
