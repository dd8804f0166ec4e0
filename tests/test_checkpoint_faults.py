"""Checkpoints on a disk that fails, beside files of others, and under kill -9."""

import contextlib
import gc
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np
import pytest

from coat_jax.checkpoint import Checkpointer, CheckpointError
from tests import checkpoint_worker
from tests.helpers import assert_same_bits
from tests.test_checkpoint import SMALL, restore, saved

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
# After a failed write, tensorstore calls back into an event loop that orbax has closed.
orbax_leaves_callbacks = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def test_interval_retention_and_period(tmp_path):
    options = {"max_to_keep": 2, "save_interval_steps": 2, "keep_period": 4}
    with Checkpointer(tmp_path, **options) as checkpointer:
        started = [checkpointer.save(step, SMALL) for step in range(11)]
        assert started == [step % 2 == 0 for step in range(11)]
        checkpointer.wait()
        assert checkpointer.all_steps() == [0, 4, 8, 10]
        assert checkpointer.save(11, SMALL, force=True)
        checkpointer.wait()
        assert checkpointer.all_steps() == [0, 4, 8, 10, 11]
        assert checkpointer.latest_step() == 11
    saved(tmp_path, SMALL, step=13, max_to_keep=1)  # another process, other options
    assert Checkpointer(tmp_path).all_steps() == [13]


def test_a_saved_step_is_not_saved_again_and_an_older_one_is_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(5, SMALL)
        assert not checkpointer.save(5, {"w": np.zeros(6)}, force=True)
        with pytest.raises(
            CheckpointError, match="step 4 is below the newest .*, 5, and"
        ):
            checkpointer.save(4, SMALL)
        assert_same_bits(checkpointer.restore(SMALL, step=5).state, SMALL)


def test_restoring_what_is_not_there(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")
    assert (checkpointer.latest_step(), checkpointer.all_steps()) == (None, [])
    with pytest.raises(CheckpointError, match="must hold a checkpoint, it holds none"):
        checkpointer.restore(SMALL)
    assert not (tmp_path / "none").exists()  # a mistyped path stays visible as such
    saved(tmp_path, SMALL, step=5)
    with pytest.raises(CheckpointError, match="must hold step 4, it holds steps 5;"):
        restore(tmp_path, SMALL, step=4)


def test_files_of_others_are_neither_steps_nor_removed(tmp_path):
    for name in ["step_7", "step_x", "step_008", "9", "step_10.orbax-checkpoint-tmpx"]:
        (tmp_path / name).mkdir()
    for name in ["step_11", "notes.txt"]:
        (tmp_path / name).write_text("mine")
    with Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
        assert checkpointer.all_steps() == []
        assert checkpointer.save(1, SMALL)
        assert checkpointer.save(2, SMALL)
        assert_same_bits(checkpointer.restore(SMALL).state, SMALL)
        assert checkpointer.all_steps() == [2]
    left = {path.name for path in tmp_path.iterdir()}
    assert {"step_x", "9", "step_11", "notes.txt"} <= left


def test_bad_directories(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="must be a folder or not exist yet"):
        Checkpointer(file)
    with pytest.raises(CheckpointError, match="must be on a mounted file system"):
        Checkpointer("gs://bucket/run")
    below = Checkpointer(file / "below")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="step 1 was not saved in .*NotADirec"
        ):
            below.save(1, SMALL)
    assert below.latest_step() is None


@contextlib.contextmanager
def full_disk(size):
    """No file may grow beyond `size` bytes: as on a full disk, a write then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@orbax_leaves_callbacks
@pytest.mark.parametrize("reports", ["save", "wait", "restore", "close"])
def test_a_failed_save_is_named_by_the_next_call_and_the_one_after_works(
    tmp_path, reports
):
    state = checkpoint_worker.state_at(1)
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, state)
    checkpointer.wait()
    with full_disk(100_000):
        assert checkpointer.save(2, state)
        while checkpointer._manager.is_saving_in_progress():
            time.sleep(0.01)
    assert checkpointer.latest_step() == 1
    call = {
        "save": lambda: checkpointer.save(3, state),
        "wait": checkpointer.wait,
        "restore": lambda: checkpointer.restore(state),
        "close": checkpointer.close,
    }[reports]
    with pytest.raises(
        CheckpointError, match="save: step 2 was not saved.* is 1. Free"
    ):
        call()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert_same_bits(checkpointer.restore(state).state, state)
    assert checkpointer.save(3, state)
    checkpointer.close()
    assert checkpointer.all_steps() == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]
    gc.collect()  # so that the callbacks fail here and in no later test


@orbax_leaves_callbacks
def test_a_save_that_is_passed_over_still_reports_the_failure_before_it(tmp_path):
    state = checkpoint_worker.state_at(1)
    checkpointer = Checkpointer(tmp_path, save_interval_steps=2)
    with full_disk(100_000):
        assert checkpointer.save(2, state)
        while checkpointer._manager.is_saving_in_progress():
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        checkpointer.save(3, state)
    assert not checkpointer.save(3, state)
    gc.collect()


def test_damaged_arrays_are_one_error_and_another_step_is_named(tmp_path):
    saved(tmp_path, SMALL, step=1)
    saved(tmp_path, SMALL, step=2)
    for path in (tmp_path / "step_2" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="reading its arrays gave .* steps 1, 2"):
        restore(tmp_path, SMALL)
    assert_same_bits(restore(tmp_path, SMALL, step=1).state, SMALL)


def kill_during_a_save(directory, delay, saves=2):
    """Kills a worker after some saves, `delay` s later; the last step it reported."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint_worker", str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        lines = [worker.stdout.readline() for _ in range(saves)]
        time.sleep(delay)
        worker.kill()
        lines += worker.stdout.read().splitlines()
    assert worker.returncode == -9
    return max(int(line.split()[1]) for line in lines if line.strip())


def assert_the_newest_is_whole(directory, committed):
    """The newest step is no older than what the worker was told, and has its state."""
    with Checkpointer(directory) as checkpointer:
        newest = checkpointer.latest_step()
        assert newest >= committed
        for step in checkpointer.all_steps()[-2:]:
            want = checkpoint_worker.state_at(step)
            restored = checkpointer.restore(want, step=step)
            assert restored.extra == {"next_index": 7 * step}
            assert_same_bits(restored.state, want)
    return newest


def test_kills_during_saves_lose_nothing_that_was_committed(tmp_path):
    newest = -1
    for delay in (0.0, 0.007, 0.023):
        committed = kill_during_a_save(tmp_path, delay)
        assert committed > newest
        newest = assert_the_newest_is_whole(tmp_path, committed)
    # Had the killed run been further on, its next save would not meet what it left.
    for left in tmp_path.glob("*.orbax-checkpoint-tmp"):
        left.rename(tmp_path / f"step_{newest + 9}.orbax-checkpoint-tmp")
    assert Checkpointer(tmp_path).latest_step() == newest  # readers remove nothing
    assert len(list(tmp_path.glob("*tmp*"))) == 1, "no kill fell into a save"
    saved(tmp_path, SMALL, step=newest + 1)
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.soak
def test_fifty_kills_lose_nothing_that_was_committed(tmp_path):
    for kill in range(50):
        committed = kill_during_a_save(tmp_path, 0.0013 * kill, saves=1 + kill % 3)
        assert_the_newest_is_whole(tmp_path, committed)


def test_importing_the_library_does_not_import_orbax():
    program = (
        "import sys, coat_jax.checkpoint; sys.exit('orbax.checkpoint' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
