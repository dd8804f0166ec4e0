"""kill -9 at random moments of a training run: every resume gives the same bits."""

import csv
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import sysconfig
import time

import jax
import numpy as np
import pytest

from coat_jax.checkpoint import Checkpointer
from experiments import config as options
from experiments import job

pytestmark = pytest.mark.once

CLOCK = {"step_ms", "tokens_per_s", "seconds"}  # how fast a step was, not its result
SAVE_EVERY = 4
STEPS_A_KILL = 12
RESUMED = re.compile(r"continuing from step (\d+) ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Real text, its tokens and the compiled step, shared by all runs here."""
    root = tmp_path_factory.mktemp("kill")
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    (root / "text").mkdir()
    for path in [*source.glob("json/*.py"), *source.glob("wsgiref/*.py")]:
        (root / "text" / f"{path.parent.name}-{path.name}").write_bytes(
            path.read_bytes()
        )
    return root


def config_of(folder, name, steps):
    return options.resolve(
        options.Config(
            preset="micro",
            optimizer="fp8_adamw",
            steps=steps,
            data=str(folder / "text"),
            cache=str(folder / "cache"),
            out=str(folder / name),
            results=str(folder / "results.jsonl"),
            held_out=0.25,
            eval_every=0,
            eval_batches=1,
            save_every=SAVE_EVERY,
        )
    )


def start(folder, name, steps):
    """A training process that resumes what its folder holds."""
    config = config_of(folder, name, steps)
    names = (
        "preset optimizer steps data cache out results held_out eval_every "
        "eval_batches save_every"
    )
    arguments = [f"--{key}={getattr(config, key)}" for key in names.split()]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONUNBUFFERED": "1",  # what it printed outlives it
    }
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.pretrain", "--resume", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | cache,
    )


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def rows(folder, name):
    path = folder / name / "metrics.csv"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    read = list(csv.DictReader(whole.splitlines()))
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read]


def last_state(folder, name, steps):
    """The bytes of every leaf of the last checkpoint, read as a user would."""
    target = job.build(config_of(folder, name, steps)).state
    with Checkpointer(folder / name / "checkpoints") as checkpointer:
        restored = checkpointer.restore(target)
    assert restored.step == steps
    as_data = lambda x: jax.random.key_data(x) if is_key(x) else x
    leaves = jax.tree.leaves(jax.tree.map(as_data, restored.state))
    return [np.asarray(leaf).tobytes() for leaf in leaves], restored.extra["data"]


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def committed(folder, name):
    """The newest step that a checkpoint of is whole, or 0."""
    path = folder / name / "checkpoints"
    if not path.exists():
        return 0
    with Checkpointer(path) as checkpointer:
        return checkpointer.latest_step() or 0


def kill_after(process, folder, name, wanted, pause):
    """SIGKILL once `wanted` steps are logged and `pause` seconds have passed."""
    limit = time.monotonic() + 300
    while len(rows(folder, name)) < wanted and process.poll() is None:
        assert time.monotonic() < limit, "the run does not get on"
        time.sleep(0.002)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    return output


def assert_kills_change_nothing(folder, kills, seed):
    """Trains once in peace and once under `kills` kills, and compares the bytes."""
    steps, draw = STEPS_A_KILL * (kills + 1), random.Random(seed)
    finish(start(folder, "whole", steps))
    saved, resumed = 0, []
    for _ in range(kills):
        process = start(folder, "killed", steps)
        wanted = min(saved + draw.randint(1, STEPS_A_KILL), steps - 1)
        output = kill_after(process, folder, "killed", wanted, draw.uniform(0, 0.03))
        # Rows of the last attempt may trigger a kill before this one has resumed.
        assert set(RESUMED.findall(output)) <= {str(saved)}, output
        saved = committed(folder, "killed")
        resumed.append(saved)
    output = finish(start(folder, "killed", steps))
    assert RESUMED.findall(output) == [str(saved)], output
    want, got = rows(folder, "whole"), rows(folder, "killed")
    assert [int(row["step"]) for row in want] == list(range(1, steps + 1))
    assert got == want
    assert last_state(folder, "killed", steps) == last_state(folder, "whole", steps)
    return resumed


def test_three_kills_change_no_bit(folder):
    assert_kills_change_nothing(folder, kills=3, seed=0)


@pytest.mark.soak
def test_fifty_kills_change_no_bit(tmp_path_factory, folder):
    resumed = assert_kills_change_nothing(folder, kills=50, seed=1)
    print(f"50 kills, resumed at {resumed}")
