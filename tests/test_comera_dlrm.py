"""The click experiment: its arms, stages and bytes, what it records and refuses."""

import dataclasses
import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import rank_control
from experiments import clicks, comera_dlrm, comera_dlrm_arm, harness
from experiments.harness import ExitCode

pytestmark = pytest.mark.once
ROWS = 1 << 10


@pytest.fixture(scope="module", autouse=True)
def one_cross():
    """One cross instead of six: compiling takes most of the time here."""
    patch = pytest.MonkeyPatch()
    patch.setitem(clicks.CROSSES, "movies", (("user", "item"),))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """400 rows of two columns whose label depends on user and item."""
    path, rng = tmp_path_factory.mktemp("clicks") / "c.npz", np.random.default_rng(0)
    user, item = rng.integers(0, 6, (2, 400)).astype(np.uint16)
    labels = rng.random(400) < np.where((user + item) % 2, 0.9, 0.1)
    facts = json.dumps({"dataset": "movies", "package": "p", "sha256": "s"})
    columns = {"user": user, "item": item, "labels": labels, "facts": facts}
    dense = rng.normal(size=(400, 2)).astype(np.float32)
    np.savez(path, **columns, dense=dense, time=np.arange(400, dtype=np.int32))
    return path


def command(file, tmp_path, *more):
    out = (f"--results={tmp_path / 'r.jsonl'}", f"--image={tmp_path / 'i.png'}")
    sizes = (f"--rows={ROWS}", "--rank=4", "--linear_rank=0", "--size=micro")
    short = ("--pieces=2", "--epoch_steps=6", "--batch=16", "--rates=1", "--seeds=1")
    return [f"--data={file}", "--dataset=movies", *out, *sizes, *short, *more]


def config_of(file, tmp_path, arm, *more):
    """The config of one arm and its data."""
    config = harness.parse(comera_dlrm.Config, command(file, tmp_path, *more))
    (config,) = comera_dlrm.arms(dataclasses.replace(config, arm=arm))
    return config, comera_dlrm.load(config)


def test_two_stages_are_recorded_tabled_drawn_and_not_run_again(file, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="draws the picture")
    arguments = command(file, tmp_path, "--arm=dense,tt_late", "--target_ratio=0.25")
    run = lambda: harness.run_main(comera_dlrm.main, comera_dlrm.Config, arguments)
    assert run() == ExitCode.DONE
    rows = [json.loads(x) for x in (tmp_path / "r.jsonl").read_text().splitlines()]
    dense, late = rows
    assert [row["config"]["arm"] for row in rows] == ["dense", "tt_late"]
    assert dense["parameters"] > 8 * ROWS
    assert dense["parameter_bytes"] == 4 * dense["parameters"]
    assert dense["optimizer_bytes"] == pytest.approx(8 * dense["parameters"], rel=0.01)
    assert dense["peak_bytes"] > 3 * dense["parameter_bytes"]
    assert late["peak_bytes"] < dense["peak_bytes"] / 2
    assert late["epoch"] == 1.0  # the only mark of the late stage
    assert [mark["late"] for mark in late["marks"]] == [False, True]
    assert [mark["epoch"] for mark in dense["marks"]] == [0.5, 1.0]
    assert len(late["size_by_step"]) == 6
    assert 0 <= late["test_auc"] <= 1
    assert late["moved_by_truncation"] < 1e-5
    out = capsys.readouterr().out
    assert "tt_late" in out
    assert (tmp_path / "i.png").stat().st_size > 1000
    assert run() == ExitCode.DONE
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("arm", ["dense", "fp8", "galore", "galore_optax", "tt_early"])
def test_each_arm_lowers_its_loss_at_its_rate(file, tmp_path, arm):
    sizes = ("--dropout=0", "--galore_rank=4", "--lr=0.01", "--core_lr=0.01")
    config, data = config_of(file, tmp_path, arm, *sizes)
    train = data.of(clicks.TRAIN)
    model, layers = comera_dlrm_arm.model_of(config, data)
    make = lambda key: comera_dlrm_arm.dlrm.init_params(model, key, layers=layers)
    params = make(jax.random.key(0))
    tx = comera_dlrm_arm.optimizer_of(config, 12, params)
    objective = comera_dlrm_arm.objective_of(config)
    loss = comera_dlrm_arm.dlrm.make_loss(model, layers=layers)
    step = jax.jit(comera_dlrm_arm.stepper(loss, tx, objective))
    goal = objective.init(params) if objective else None
    with jax.numpy_dtype_promotion("standard"):
        state = comera_dlrm_arm.State(
            jnp.int32(0),
            params,
            tx.init(params),
            goal,
            jnp.float32(1),
            jax.random.key(1),
        )
        still, _ = step(state._replace(rate=jnp.float32(0)), train)
        figures = []
        for _ in range(8):
            state, figure = step(state, train)
            figures.append(float(figure["loss"]))
    assert figures[-1] < figures[0]
    names = comera_dlrm_arm.ranks.labels(params)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, still.params)
    moved = jax.tree.map(lambda s, name: s or name == "diagonal", same, names)
    assert all(jax.tree.leaves(moved))


def test_the_late_stage_has_targets_and_truncation_changes_nothing(file, tmp_path):
    config, data = config_of(file, tmp_path, "tt_late")
    arm = comera_dlrm_arm.build(config, data)
    state = arm.start(jax.random.key(0), 1.0)
    state, _ = arm.piece(state, jax.random.key(1), 0)
    (place,) = rank_control.trains_of(state.params)
    diagonals = state.params[place[0]][place[1]]["diagonals"]
    diagonals[0] = jnp.asarray([0.7, 0.0, 1.3, 0.0])
    before, parameters = arm.logits(state.params), comera_dlrm_arm.alive(state.params)
    assert comera_dlrm_arm.ranks_alive(state.params) == {"tables/2": [2]}
    late = arm.late(state)
    small = comera_dlrm_arm.truncated(late.params)
    assert comera_dlrm_arm.alive(small) == parameters
    assert sum(x.size for x in jax.tree.leaves(small)) == parameters
    assert bool(late.objective.late)
    size = int(rank_control.size_exact(state.params))
    assert late.objective.targets.size == np.float32(config.target_ratio * size)
    after = arm.logits(small)
    for part, logits in before.items():
        assert len(logits) == len(data.of(part)[2])
        np.testing.assert_allclose(after[part], logits, atol=1e-5)
    arm.piece(late, jax.random.key(2), 1)


def test_the_loss_seen_is_the_average_of_what_was_lost():
    objective = rank_control.Objective(decay=0.5)
    params = {"cores": [jnp.ones((1, 2, 1)), jnp.ones((1, 2, 1))]}
    params["diagonals"] = [jnp.ones(1)]
    state = objective.init(params)
    for loss in (4.0, 1.0):
        _, (_, state) = objective(jnp.float32(loss), params, state)
    assert comera_dlrm_arm.loss_seen(state, 0.5) == pytest.approx(2.0)


def test_the_rate_and_the_epoch_are_chosen_by_validation():
    row = lambda rate, seed, auc: {"rate": rate, "seed": seed, "validation_auc": auc}
    runs = [row(1, 0, 0.7), row(2, 0, 0.8), row(2, 1, 0.1), row(1, 1, 0.9)]
    assert comera_dlrm.chosen(runs) == [runs[1], runs[2]]
    assert comera_dlrm.chosen(runs[2:]) == []


def test_seed_0_tries_the_rates_and_the_others_take_the_best(tmp_path):
    how = {"rates": "1,2", "seeds": 2, "results": str(tmp_path / "r.jsonl")}
    config = comera_dlrm.Config(arm="dense", **how)
    (arm,) = comera_dlrm.arms(config)
    asked = []
    for rate, seed in comera_dlrm._missing(config, arm):
        asked.append((rate, seed))
        auc = {"validation_auc": rate / 10}
        harness.record(config.results, arm, {"rate": rate, "seed": seed, **auc})
    assert asked == [(1, 0), (2, 0), (2, 1)]
    other = dataclasses.replace(config, rank=7)
    assert comera_dlrm.finished(other) == {}


def test_hashed_has_fewer_rows_and_the_same_settings_else():
    by_name = {c.arm: c for c in comera_dlrm.arms(comera_dlrm.Config())}
    assert tuple(by_name) == comera_dlrm.ARMS
    assert {c.rows for n, c in by_name.items() if n != "hashed"} == {1 << 20}
    assert by_name["hashed"].rows == 1 << 14


def test_galore_projects_tables_and_optax_leaves_the_large_ones():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    params = {"t": shape(20_000, 64), "w": shape(64, 512), "n": shape(3, 64)}
    params["b"] = shape(64)
    want = {"t": True, "w": True, "n": False, "b": False}
    assert comera_dlrm_arm.projected(params) == want
    assert comera_dlrm_arm.projected_by_svd(params) == {**want, "t": False}


def test_the_pieces_of_an_epoch_are_its_steps_in_order():
    train = (np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) ** 2)
    step = lambda state, batch: (state + batch[0].sum(), {"loss": batch[1].sum()})
    order = lambda key: jnp.array([[0, 7], [3, 1], [2, 2], [5, 6]])
    run = comera_dlrm_arm.pieces_of(step, order, train, 2)
    state, first = run(jnp.float32(1), jax.random.key(0), 0)
    state, second = run(state, jax.random.key(0), 1)
    assert float(state) == 27.0
    assert [*first["loss"].tolist(), *second["loss"].tolist()] == [
        49.0,
        10.0,
        8.0,
        61.0,
    ]


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("--rank=0", ExitCode.CONFIG, "--rank must be at least 1, got 0"),
        ("--seeds=-1", ExitCode.CONFIG, "--seeds must be at least 0, got -1"),
        ("--gamma=-1", ExitCode.CONFIG, "--gamma must be at least 0, got -1.0"),
        ("--order=0", ExitCode.CONFIG, "--order must be at least 1, got 0"),
        ("--delay=-5", ExitCode.CONFIG, "--delay must be at least 0, got -5"),
        ("--results=/proc/none/r", ExitCode.CONFIG, "can't be read and written"),
        ("--lr=0", ExitCode.CONFIG, "--lr must be above 0 and finite, got 0.0"),
        ("--rates=1,x", ExitCode.CONFIG, "--rates must be positive numbers"),
        ("--arm=dense,sparse", ExitCode.CONFIG, "--arm must be all, or some of dense"),
        ("--batch=401", ExitCode.CONFIG, "--batch=401 are more than 320 rows"),
        ("--seeds=0", ExitCode.DATA, "holds no run with these settings"),
        ("--dataset=flights", ExitCode.DATA, "holds movies; give --data the file of"),
    ],
)
def test_wrong_options_are_one_line(file, tmp_path, capsys, argument, code, words):
    arguments = command(file, tmp_path, argument)
    assert harness.run_main(comera_dlrm.main, comera_dlrm.Config, arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
