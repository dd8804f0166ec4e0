"""Ablations: which policy an option makes, windows on the device, gaps, the whole run.

Runs are of the micro preset's model on a token file of a few sources, four steps each.
"""

import dataclasses
import json
import math
import pathlib
import sysconfig

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import policy as presets
from coat_jax.formats import E4M3, E5M2
from coat_jax.models import llama
from experiments import ablation_report as report
from experiments import ablations, harness, policies, prepare, resident
from experiments import config as options
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once

WIDTHS = {"hidden": 32, "ffn": 32, "layers": 1}
SIZES = {"preset": "micro", **WIDTHS, "steps": 4, "batch": 2, "seq": 16}
PLAIN = {"dtype": "float32", "attention": "xla"}
ARMS = ["bf16", "full"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """The path of a token file of some of the standard library."""
    root = tmp_path_factory.mktemp("ablations")
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    (root / "text").mkdir()
    for path in sorted(source.glob("json/*.py")):
        (root / "text" / path.name).write_bytes(path.read_bytes())
    prepare.main(
        prepare.Config(
            data=str(root / "text"),
            out=str(root / "tokens.npz"),
            cache=str(root / "cache"),
            vocab=512,
            held_out=0.4,
        )
    )
    return root / "tokens.npz"


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    """The config of ablations that went through `main`; not to be written to."""
    out = tmp_path_factory.mktemp("out")
    config = make_config(tokens, out, arms=",".join(ARMS))
    ablations.main(config)
    return config


def make_config(tokens, folder, **changes) -> ablations.Config:
    fields = {
        "data": str(tokens),
        "seeds": 2,
        "eval_batches": 2,
        "results": str(folder / "runs.jsonl"),
        "image": str(folder / "gaps.png"),
    }
    return ablations.Config(**(fields | SIZES | PLAIN | changes))


# --- policies -------------------------------------------------------------------------


def policy_for(**given):
    return policies.policy_of(options.Config(**given))


def test_without_options_a_policy_is_its_preset():
    for name, preset in presets.PRESETS.items():
        assert policy_for(policy=name) == preset
    assert policies.policy_of(options.Config()) == presets.BF16


@pytest.mark.parametrize("base", ["default", "paper"])
@pytest.mark.parametrize(
    ("given", "where", "value"),
    [
        ({"input_format": "bf16"}, ["x.format"], None),
        ({"weight_format": "bf16"}, ["w.format"], None),
        ({"gradient_format": "bf16"}, ["g.format"], None),
        ({"gradient_format": "e4m3"}, ["g.format"], E4M3),
        ({"gradient_format": "e5m2"}, ["g.format"], E5M2),
        ({"gemm_scaling": "vector"}, ["x.scaling", "w.scaling", "g.scaling"], "vector"),
        ({"kept_group": 32}, ["kept.group", "attention.group"], 32),
        ({"attention_keeps": "fp8"}, ["attention.format"], E4M3),
        ({"attention_keeps": "bf16"}, ["attention.format"], None),
        ({"forward_accumulation": "promoted"}, ["forward"], "promoted"),
        ({"backward_accumulation": "fast"}, ["backward"], "fast"),
    ],
)
def test_an_option_changes_its_field_and_no_other(base, given, where, value):
    policy, preset = policy_for(policy=base, **given), presets.PRESETS[base]
    get = lambda p, path: _follow(p, path.split("."))
    assert all(get(policy, path) == value for path in where)
    paths = ["forward", "backward"]
    paths += [f"{r}.{f}" for r in "xwg" for f in ("format", "scaling")]
    kept = ("format", "group", "in_forward")
    paths += [f"{r}.{f}" for r in ("kept", "attention") for f in kept]
    for path in set(paths) - set(where):
        assert get(policy, path) == get(preset, path), path


def _follow(record, names):
    for name in names:
        record = getattr(record, name)
    return record


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kept_group=16"], "--kept_group changes an FP8 policy: add --policy="),
        (["--policy=bf16", "--gemm_scaling=group"], "--gemm_scaling changes an FP8"),
        (["--attention=cudnn"], "--attention=cudnn takes bfloat16 only"),
        (
            ["--policy=fp8"],
            "--policy: must be one of bf16, default, lean, memory, paper, got 'fp8'",
        ),
        (["--gemm_scaling=row"], "must be one of tensor, group, vector, got 'row'"),
        (["--policy=default", "--kept_group=0"], "--kept_group must be at least 1"),
    ],
)
def test_a_wrong_combination_is_one_line(arguments, words, capsys):
    code = harness.run_main(lambda config: None, options.Config, arguments)
    assert code == ExitCode.CONFIG
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1


def test_what_the_library_refuses_is_one_line(monkeypatch):
    def refuse(policy, implementation=None):
        raise NotImplementedError("fp8_layers: not these")

    monkeypatch.setattr(llama, "fp8_layers", refuse)
    with pytest.raises(UserError, match="fp8_layers: not these") as caught:
        policies.layers_of(options.Config(policy="default"))
    assert caught.value.code == ExitCode.CONFIG


def test_all_arms_start_from_the_same_weights():
    model = dataclasses.replace(llama.PRESETS["micro"], **WIDTHS)
    key = jax.random.key(0)
    plain = llama.init_params(model, key)
    for policy in ("default", "paper"):
        layers = policies.layers_of(options.Config(policy=policy))
        assert layers != llama.Layers()
        params = llama.init_params(model, key, layers=layers)
        assert jax.tree.structure(params) == jax.tree.structure(plain)
        same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), params, plain)
        assert all(jax.tree.leaves(same))


# --- windows on the device ------------------------------------------------------------


def run_of(**changes) -> options.Config:
    fields = {"preset": "micro", **SIZES, **changes}
    return options.resolve(options.Config(**fields))


def test_each_epoch_shows_each_window_once_in_an_order_of_the_seed():
    config = run_of(steps=5)  # ten windows of sixteen tokens are one epoch
    starts = resident.train_starts(161, config)
    assert starts.shape == (5, 2)
    assert sorted(starts.ravel()) == [16 * i for i in range(10)]
    again = resident.train_starts(161, run_of(steps=10))
    np.testing.assert_array_equal(again[:5], starts)
    assert sorted(again[5:].ravel()) == sorted(starts.ravel())
    assert not np.array_equal(again[5:], starts)
    assert not np.array_equal(
        resident.train_starts(161, run_of(steps=5, seed=1)), starts
    )


@pytest.mark.parametrize(("count", "batches"), [(161, 2), (33, 1), (65, 2), (49, 1)])
def test_held_out_windows_lie_within_the_text(count, batches):
    starts = resident.held_starts(count, run_of(eval_batches=2))
    assert starts.shape == (batches, 2)
    assert starts.min() == 0
    assert starts.max() == (count - 1) // 16 * 16 - 16


def test_a_window_is_cut_where_it_starts():
    ids = jnp.arange(100, 200)
    cut = resident.windows_of(resident.Batch(ids, jnp.array([0, 32, 83])), 16)
    want = [np.arange(100 + start, 117 + start) for start in (0, 32, 83)]
    np.testing.assert_array_equal(cut, np.stack(want))


def test_the_held_out_loss_is_the_mean_over_its_windows():
    # A loss that is exact in float32 and tells every window from every other.
    loss = lambda params, windows: jnp.sum(windows[:, ::16]) * params
    ids, starts = jnp.arange(65), resident.held_starts(65, run_of())
    want = [sum(s + (s + 16) for s in row) for row in starts]
    got = resident._mean_loss(loss, 16)(jnp.int32(3), ids, starts)
    assert float(got) == 3 * np.mean(want)


# --- the report -----------------------------------------------------------------------


def row(seed, held, **fields) -> dict:
    figures = {"held_out_loss_plain": held, "train_loss": held, "step_ms": 1.0}
    curve = {"curve": [(50, 3.0 + seed), (100, 2.0)]}
    config = {"config": {"seed": seed}, "held_out_loss": held}
    return config | figures | curve | fields


def test_a_gap_is_taken_seed_by_seed():
    base = [row(0, 2.0), row(1, 4.0)]
    rows = [row(1, 4.04), row(0, 2.0), row(2, 9.0)]  # seed 2 has no partner
    assert report.gaps(rows, base) == pytest.approx([1.0, 0.0])
    said = report.summarise("arm", rows, base)
    assert said["gap"] == pytest.approx(0.5)
    assert said["error"] == pytest.approx(0.5)  # of 1 and 0: deviation 0.71, root of 2
    assert (said["lowest"], said["highest"]) == (2.0, 9.0)
    assert math.isnan(report.standard_error([1.0]))


def test_the_table_says_what_diverged_and_what_has_no_base():
    made = {
        "bf16": [row(0, 2.0), row(1, 2.0)],
        "bad": [row(0, None, train_loss=None), row(1, 2.002)],
        "worst": [row(0, None, train_loss=None, step_ms=None)],
    }
    shown = report.table(made).splitlines()
    assert len({line.count("|") for line in shown}) == 1
    assert shown[2].startswith("| bf16 | 2.0000 | 2.0000 to 2.0000 | +0.000 +- 0.000 |")
    assert shown[3].startswith("| bad (1 diverged) | 2.0020 |")
    assert "| +0.100 |" in shown[3]
    assert shown[4].startswith("| worst (1 diverged) | nan |")
    assert "| - |" in report.table({"full": [row(0, 2.0)]})


def test_a_picture_is_drawn_of_whatever_there_is(tmp_path):
    one = {"bf16": [row(0, 2.0)], "full": [row(0, 2.01)]}
    lost = {"full": [row(0, None, curve=[(50, None)])]}
    for name, made in {"one": one, "lost": one | lost, "no base": lost}.items():
        path = report.draw(made, str(tmp_path / f"{name}.png"))
        assert path.read_bytes().startswith(b"\x89PNG")


# --- the whole ------------------------------------------------------------------------


def test_every_arm_and_seed_has_a_line(finished):
    rows = harness.results(finished.results)
    assert [(r["arm"], r["config"]["seed"]) for r in rows] == [
        (arm, seed) for arm in ARMS for seed in range(2)
    ]
    assert {r["tokens_sha256"] for r in rows} == {rows[0]["tokens_sha256"]}
    for base, full in zip(rows[:2], rows[2:], strict=True):
        assert full["optimizer_bytes"] < 0.5 * base["optimizer_bytes"]
        assert [step for step, _ in full["curve"]] == [4]
        assert base["held_out_loss"] == base["held_out_loss_plain"]
        assert full["held_out_loss"] != full["held_out_loss_plain"]
        assert full["config"]["policy"] == "default"
    assert pathlib.Path(finished.image).exists()


@pytest.mark.soak
def test_only_what_is_missing_is_run(finished, tmp_path, capsys):
    lines = pathlib.Path(finished.results).read_text().splitlines(keepends=True)
    lost = json.loads(lines[1])
    results = tmp_path / "runs.jsonl"
    results.write_text(lines[0] + lines[1][:50])  # as a crash leaves it
    again = dataclasses.replace(
        finished,
        arms="bf16",
        results=str(results),
        image=str(tmp_path / "again.png"),
    )
    ablations.main(again)
    printed = capsys.readouterr().out
    assert printed.count("already") == 1
    first, second = harness.results(again.results)
    assert first == json.loads(lines[0])
    for name in ("arm", "held_out_loss", "train_loss", "curve", "tokens_sha256"):
        assert second[name] == lost[name], name
    assert "| bf16 |" in printed


def test_an_arm_that_computes_what_another_does_is_left_out(finished, capsys):
    arms = ["bf16", "full", "e4m3-gradients", "e5m2-gradients", "optimizer"]
    config = dataclasses.replace(finished, arms=",".join(arms))
    # One of the two gradient formats is the default policy's own.
    own = {E4M3: "e4m3-gradients", E5M2: "e5m2-gradients"}[presets.DEFAULT.g.format]
    assert ablations.distinct(config) == [arm for arm in arms if arm != own]
    assert f"{own} is what full is already: left out" in capsys.readouterr().out


def test_another_run_is_not_taken_for_this_one(finished):
    rows = harness.results(finished.results)
    run = ablations.run_config(finished, "full", 1)
    digest = rows[0]["tokens_sha256"]
    found = ablations.find(rows, run, digest)
    assert (found["arm"], found["config"]["seed"]) == ("full", 1)
    moved = dataclasses.replace(run, cache="elsewhere", results="other.jsonl")
    assert ablations.find(rows, moved, digest) == found
    older = [dict(r, config=dict(r["config"])) for r in rows]
    for each in older:
        del each["config"]["weight_format"]
    assert ablations.find(older, run, digest)["held_out_loss"] == found["held_out_loss"]
    for change in ({"lr": 0.1}, {"seed": 7}, {"kept_group": 16}, {"eval_batches": 3}):
        assert ablations.find(rows, dataclasses.replace(run, **change), digest) is None
    assert ablations.find(rows, run, "other") is None


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--arms=bf16,ful", "--arms has no 'ful'; choose from bf16, full, optimizer"),
        ("--seeds=0", "--seeds must be at least 1, got 0"),
        ("--data=missing.npz", "--data=missing.npz can't be read as a token file"),
        ("--attention=flash", "must be one of xla, cudnn"),
        ("--dtype=float32", "--attention=cudnn takes bfloat16 only"),
        ("--preset=huge", "--preset must be one of micro, tiny"),
    ],
)
def test_wrong_options_are_one_line(argument, words, capsys):
    code = harness.run_main(ablations.main, ablations.Config, [argument])
    assert code in (ExitCode.CONFIG, ExitCode.DATA)
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1


def test_every_arm_is_a_config_and_no_two_are_the_same():
    config = ablations.Config()
    made = [ablations.run_config(config, arm, 0) for arm in ablations.ARMS]
    assert made[0].policy == "bf16"
    assert made[0].optimizer == "adamw"
    does = [dataclasses.astuple(run) for run in made]
    assert len(set(does)) == len(ablations.ARMS)
