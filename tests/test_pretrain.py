"""The main job: resume, signals, exit codes, one-line errors, metrics.

Runs are of a model with a fifth of the micro preset's work: 20 steps, a second each
besides compiling.
"""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig

import jax
import numpy as np
import optax
import pytest

from coat_jax.models import llama
from experiments import config as options
from experiments import (
    data,
    folder,
    harness,
    job,
    loop,
    metrics,
    optimizers,
    plot,
    pretrain,
)
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once

# What says how fast a step was, not what it computed.
CLOCK = {"step_ms", "tokens_per_s", "seconds"}
SIZES = {"hidden": 32, "ffn": 32, "batch": 2, "seq": 16, "steps": 20}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of real text, and the cache of its tokens."""
    root = tmp_path_factory.mktemp("text")
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in [*source.glob("json/*.py"), *source.glob("wsgiref/*.py")]:
        target = root / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    return root, tmp_path_factory.mktemp("cache")


def make_config(text, folder) -> options.Config:
    return options.Config(
        preset="micro",
        optimizer="adamw",
        data=str(text[0]),
        cache=str(text[1]),
        held_out=0.25,
        out=str(folder / "run"),
        results=str(folder / "results.jsonl"),
        save_every=8,
        eval_every=5,
        eval_batches=2,
        **SIZES,
    )


@pytest.fixture
def config(text, tmp_path):
    return make_config(text, tmp_path)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The config of a run that went through `pretrain.main`; not to be written to."""
    config = make_config(text, tmp_path_factory.mktemp("finished"))
    config = dataclasses.replace(config, steps=3, tensorboard=True)
    pretrain.main(config)
    return config


@pytest.fixture
def copied(finished, tmp_path):
    """The same with a copy of the run's folder, resumed."""
    shutil.copytree(finished.out, tmp_path / "copy")
    return dataclasses.replace(finished, out=str(tmp_path / "copy"), resume=True)


def rows_of(config):
    """Every row without the clock's columns: text, so that equal means equal bits."""
    rows = metrics.read_rows(pathlib.Path(config.out, "metrics.csv"))
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]


def stopped(config, **hooks) -> UserError:
    with pytest.raises(UserError) as caught:
        loop.train(config, **hooks)
    assert "\n" not in str(caught.value)
    return caught.value


def steps_in(config):
    names = pathlib.Path(config.out, "checkpoints").glob("step_*")
    return sorted(int(path.name[5:]) for path in names)


def flags(config) -> list[str]:
    """The command line that gives the config."""
    given = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
    text = {
        k: str(v).lower() if v is True or v is False else v for k, v in given.items()
    }
    return [f"--{name}={value}" for name, value in text.items()]


# --- resuming -----------------------------------------------------------------------


def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(config, tmp_path):
    config = dataclasses.replace(config, optimizer="fp8_adamw")
    whole = loop.train(config)
    assert steps_in(config) == [8, 16, 20]
    # As a kill between steps 8 and 16 leaves it: the checkpoint, the rows written
    # since, and one cut short.
    cut = dataclasses.replace(config, out=str(tmp_path / "cut"), resume=True)
    shutil.copytree(config.out, cut.out)
    for step in (16, 20):
        shutil.rmtree(pathlib.Path(cut.out, "checkpoints", f"step_{step}"))
    lines = pathlib.Path(config.out, "metrics.csv").read_text().splitlines()
    pathlib.Path(cut.out, "metrics.csv").write_text("\n".join(lines[:13] + ["13,4."]))
    again = loop.train(cut)
    assert rows_of(cut) == rows_of(config)
    assert [row["step"] for row in rows_of(cut)] == [str(n) for n in range(1, 21)]
    assert steps_in(cut) == [8, 16, 20]
    for name in ("train_loss", "held_out_loss", "optimizer_bytes", "tokens_sha256"):
        assert again[name] == whole[name]
    # The embedding is in FP8; all else in so small a model isn't.
    assert whole["optimizer_bytes_per_parameter"] < 5


def test_sigterm_saves_the_step_it_came_in(config):
    def on_step(row):
        if row["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # a second must not abort the save

    # There is nothing to resume yet, so this starts from the beginning.
    error = stopped(dataclasses.replace(config, resume=True), on_step=on_step)
    assert error.code == ExitCode.PREEMPTED
    assert "SIGTERM at step 4" in str(error)
    assert "saved; --resume continues" in str(error)
    assert steps_in(config) == [4]
    assert [row["step"] for row in rows_of(config)] == ["1", "2", "3", "4"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_has_the_code_that_shells_expect():
    with loop.StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop.received == signal.SIGINT
    assert stop.code() == ExitCode.INTERRUPTED == 130


def test_a_finished_run_resumes_to_nothing_but_its_summary(copied, finished):
    again = loop.train(copied)
    (line,) = pathlib.Path(finished.results).read_text().splitlines()
    for name in ("held_out_loss", "train_loss", "seconds"):
        assert again[name] == json.loads(line)[name]
    assert rows_of(copied) == rows_of(finished)


# --- what a run refuses ---------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_written_over(config):
    pathlib.Path(config.out).mkdir()
    folder.claim(pathlib.Path(config.out), options.resolve(config))
    error = stopped(config)
    assert error.code == ExitCode.CONFIG
    assert "already holds a run; add --resume" in str(error)


def test_overwrite_deletes_the_run_and_nothing_else(config, tmp_path):
    out = pathlib.Path(config.out)
    (out / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.csv", "checkpoints/step", "mine.txt"):
        (out / name).write_text("{}")
    folder.claim(out, dataclasses.replace(config, overwrite=True))
    assert {p.name for p in out.iterdir()} == {"config.json", "mine.txt"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, "lr was 0.01, now 0.5"),
        ({"group": 64}, "group was 128, now 64"),
        ({"steps": 30, "seed": 1}, "seed was 0, now 1; steps was 20, now 30"),
    ],
)
def test_resuming_with_another_config_names_what_changed(config, change, words):
    pathlib.Path(config.out).mkdir()
    folder.claim(pathlib.Path(config.out), options.resolve(config))
    error = stopped(dataclasses.replace(config, resume=True, **change))
    assert error.code == ExitCode.CONFIG
    assert words in str(error)


def test_a_run_from_before_an_option_was_there_had_its_default(config):
    saved = dataclasses.asdict(config)
    del saved["policy"]
    assert options.differences(saved, config) == []
    other = dataclasses.replace(config, policy="default")
    assert options.differences(saved, other) == ["policy was bf16, now default"]


def test_what_only_watches_a_run_may_change_on_resume(config):
    saved = dataclasses.asdict(config)
    other = dataclasses.replace(
        config, resume=True, save_every=3, log_seconds=1.0, tensorboard=True, keep=9
    )
    assert options.differences(saved, other) == []


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_file_is_one_line(config, content):
    out = pathlib.Path(config.out)
    out.mkdir()
    (out / "config.json").write_text(content)
    error = stopped(dataclasses.replace(config, resume=True))
    assert error.code == ExitCode.CHECKPOINT
    assert "config.json can't be read" in str(error)


def test_a_checkpoint_of_other_text_is_refused(copied, text, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(text[0], other)
    some = other / "json/decoder.py"
    some.write_text(some.read_text() + "# one more line\n")
    error = stopped(dataclasses.replace(copied, data=str(other)))
    assert error.code == ExitCode.DATA
    assert "was trained on other text (corpus_sha256" in str(error)


def test_a_checkpoint_of_another_layout_is_refused(copied):
    started = pathlib.Path(copied.out, "config.json")
    forged = json.loads(started.read_text()) | {"hidden": 64}
    started.write_text(json.dumps(forged))
    error = stopped(dataclasses.replace(copied, hidden=64))
    assert error.code == ExitCode.CHECKPOINT
    assert "shape" in str(error)


def test_two_processes_do_not_share_a_folder(config):
    with folder.locked(pathlib.Path(config.out)):
        assert "another process is writing" in str(stopped(config))


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(config):
    bad = dataclasses.replace(config, save_every=1, clip=0.0, lr=1e30, warmup=0.0)
    error = stopped(bad)
    assert error.code == ExitCode.NON_FINITE
    assert "at step 2; stopped" in str(error)
    assert "the newest is step 1" in str(error)
    assert steps_in(bad) == [1]
    assert [row["step"] for row in rows_of(bad)] == ["1"]


def test_a_batch_that_the_devices_do_not_divide_is_refused(config):
    error = stopped(dataclasses.replace(config, mesh="data", batch=3))
    assert error.code == ExitCode.CONFIG
    assert "--batch=3 is no multiple of" in str(error)


# --- the command line -----------------------------------------------------------------


def refused(*argv, capsys) -> str:
    assert harness.run_main(lambda config: None, options.Config, list(argv)) == 6
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--lrr=3", "unknown option --lrr=3; did you mean --lr?"),
        ("--optimiser=adamw", "did you mean --optimizer?"),
        ("--zzz", "see --help for the options"),
        ("--steps=many", "--steps: must be a whole number, got 'many'"),
        ("--steps=1.5", "--steps: must be a whole number, got '1.5'"),
        ("--lr=fast", "--lr: must be a finite number, got 'fast'"),
        ("--lr=nan", "--lr: must be a finite number, got 'nan'"),
        ("--clip=inf", "--clip: must be a finite number, got 'inf'"),
        ("--lr=-1", "--lr must be above 0 and finite, got -1.0"),
        ("--b2=1", "--b2 must be at least 0 and below 1, got 1.0"),
        ("--group=0", "--group must be at least 1, got 0"),
        ("--clip=-1", "--clip must be 0 or more, got -1.0"),
        ("--expand=maybe", "--expand: must be true or false, got 'maybe'"),
        ("--optimizer=adagrad", "must be one of fp8_adamw, adamw, lion"),
        ("--preset=huge", "must be one of micro, tiny, small"),
        ("--kept_group=16", "--kept_group changes an FP8 policy: add --policy="),
        ("--held_out=1", "--held_out must be between 0 and 1, got 1.0"),
        ("--fsdp", "--fsdp splits over the mesh: add --mesh=data"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_is_right(argument, words, capsys):
    assert words in refused(argument, capsys=capsys)


def test_options_that_exclude_each_other(capsys):
    line = refused("--fused", "--optimizer=lion", capsys=capsys)
    assert "--fused needs --optimizer=fp8_adamw, got lion" in line
    assert "give one" in refused("--resume", "--overwrite", capsys=capsys)


def test_sizes_that_make_no_model_are_one_line(config):
    error = stopped(dataclasses.replace(config, heads=3))
    assert error.code == ExitCode.CONFIG
    assert "got 32 / 3" in str(error)


def test_help_tells_every_option_without_loading_jax():
    program = (
        "import sys; from experiments import harness, pretrain\n"
        "from experiments.config import Config\n"
        "try: harness.parse(Config, ['--help'])\n"
        "finally: assert 'jax' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    for field in dataclasses.fields(options.Config):
        assert f"--{field.name} " in shown.stdout
        assert field.metadata["help"].split()[0] in shown.stdout


def test_a_command_line_gives_back_its_config(config):
    assert harness.parse(options.Config, flags(config)) == config


def test_every_preset_has_a_model_and_every_model_a_preset():
    assert options.PRESETS.keys() == llama.PRESETS.keys()
    for name, preset in options.PRESETS.items():
        config = options.resolve(options.Config(preset=name))
        assert job.model_of(config) == llama.PRESETS[name]
        assert None not in (config.steps, config.batch, config.seq, config.lr)
        assert preset["vocab"] == llama.PRESETS[name].vocab


def test_a_full_disk_ends_in_one_line(config):
    """The whole program, in a process that may write only small files."""
    data.prepare(options.resolve(config))  # the cache is there already
    small = dataclasses.replace(config, steps=2, save_every=1)
    # 10 kB a file: rows and config fit, the parameters do not.
    program = (
        "import resource, runpy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "runpy.run_module('experiments.pretrain', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *flags(small)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: save: step ")
    assert rows_of(small)
    assert steps_in(small) == []


# --- what a run writes ----------------------------------------------------------------


def test_results_hold_config_versions_and_hashes(finished):
    (line,) = pathlib.Path(finished.results).read_text().splitlines()
    row = json.loads(line)
    assert row["config"] == dataclasses.asdict(options.resolve(finished))
    assert {"jax", "optax", "coat-jax", "python"} <= row["versions"].keys()
    assert len(row["corpus_sha256"]) == 64
    assert row["commit"] == "unknown" or len(row["commit"]) == 40
    assert row["optimizer_bytes"] > 0
    assert row["device"]
    rows = metrics.read_rows(pathlib.Path(finished.out, "metrics.csv"))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert rows[-1]["held_out_loss"] == repr(row["held_out_loss"])
    assert list(pathlib.Path(finished.out, "tensorboard").iterdir())


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys):
    config = options.resolve(options.Config(preset="micro", log_seconds=0.0))
    bar = metrics.Progress(config, start=10)
    row = {"loss": 2.5, "held_out_loss": 2.25, "tokens_per_s": 1234.0}
    for step in (11, 20):  # the first took the compiler's time and foretells nothing
        bar.write({"step": step, **row})
    bar.close()
    assert capsys.readouterr().out.splitlines() == [
        f"fp8_adamw step {step}/20  loss 2.500  held-out 2.250  1,234 tokens/s  {eta}"
        for step, eta in ((11, "ETA in a few steps"), (20, "ETA 0:00"))
    ]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("lion", 2, 2.1), ("muon", 2, 2.1), ("adafactor", 2, 2.3), ("sgd", 2, 2.1)],
)
def test_the_other_optimizers_step_in_bfloat16(config, name, low, high):
    config = dataclasses.replace(config, optimizer=name, momentum_dtype="bfloat16")
    tx = optimizers.make_optimizer(options.resolve(config))
    model = llama.PRESETS["tiny"]

    def one(key):
        params = llama.init_params(model, key)
        state = tx.init(params)
        updates, after = tx.update(params, state, params)
        return params, state, optax.apply_updates(params, updates), after

    with jax.numpy_dtype_promotion("standard"):
        params, before, moved, after = jax.eval_shape(one, jax.random.key(0))
    kept = jax.tree.map(lambda a, b: a.dtype == b.dtype, before, after)
    assert all(jax.tree.leaves(kept))
    assert jax.tree.structure(params) == jax.tree.structure(moved)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    count = sum(x.size for x in jax.tree.leaves(params))
    assert low <= size(before) / count <= high


def test_smoothing_is_the_mean_of_the_values_around():
    values = np.arange(7.0) ** 2
    want = [values[max(i - 1, 0) : i + 2].mean() for i in range(7)]
    np.testing.assert_allclose(plot.smooth(values, 3), want, rtol=1e-12)
