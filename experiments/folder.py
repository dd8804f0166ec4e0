"""The folder of one run: who may write it, its config, its checkpoints."""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil

from coat_jax.checkpoint import Checkpointer, CheckpointError
from experiments import config as options
from experiments.harness import ExitCode, UserError

_OURS = ("config.json", "metrics.csv", "checkpoints", "tensorboard")


@contextlib.contextmanager
def locked(folder: pathlib.Path):
    """Makes the folder and holds it; the kernel lets go whatever ends the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            ExitCode.CONFIG, f"--out={folder} can't be written ({error}); give another"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                ExitCode.CONFIG,
                f"another process is writing --out={folder}; wait for it or give "
                "another folder",
            ) from None
        yield folder


def check(folder: pathlib.Path, config) -> None:
    """Refuses a folder that holds a run, unless it is to be deleted or fits."""
    started = folder / "config.json"
    if not started.exists() or config.overwrite:
        return
    if not config.resume:
        raise UserError(
            ExitCode.CONFIG,
            f"{folder} already holds a run; add --resume to continue it, --overwrite "
            "to delete it, or give another --out",
        )
    try:
        saved = json.loads(started.read_text())
        changed = options.differences(saved, config)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            ExitCode.CHECKPOINT,
            f"{started} can't be read ({error}); restore it or start again in "
            "another --out",
        ) from None
    if changed:
        raise UserError(
            ExitCode.CONFIG,
            f"--resume must continue the run in {folder} as it was started, but "
            f"{'; '.join(changed)}; give the former values or another --out",
        )


def claim(folder: pathlib.Path, config) -> None:
    """Deletes what --overwrite deletes (our own files only) and notes the config."""
    if config.overwrite:
        for name in _OURS:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    aside = folder / "config.part"
    aside.write_text(json.dumps(dataclasses.asdict(config), indent=1))
    aside.replace(folder / "config.json")


@contextlib.contextmanager
def one_line_errors():
    """A checkpoint or a disk that fails becomes one line and exit code 4."""
    try:
        yield
    except CheckpointError as error:
        raise UserError(ExitCode.CHECKPOINT, str(error)) from None
    except OSError as error:
        raise UserError(
            ExitCode.CHECKPOINT,
            f"can't write the run's files ({error}); free space, then --resume",
        ) from None


class Keeper:
    """The checkpoints of one run; with --save_every=0 it writes none."""

    def __init__(self, folder: pathlib.Path, config, *, storage):
        self._every, self._folder = config.save_every, folder / "checkpoints"
        self._facts: dict = {}
        self._checkpointer = Checkpointer(
            self._folder, storage=storage, max_to_keep=config.keep
        )

    def describe(self, facts: dict) -> None:
        """What each checkpoint says of the data that it was trained on."""
        self._facts = facts

    def latest(self) -> int | None:
        """The newest committed step."""
        return self._checkpointer.latest_step()

    def due(self, step: int, *, last: bool) -> bool:
        """Whether this step is one to keep."""
        return bool(self._every) and (last or step % self._every == 0)

    def save(self, step: int, state, extra: dict) -> bool:
        """Starts to write a checkpoint; returns whether checkpoints are kept at all."""
        if not self._every:
            return False
        self._checkpointer.save(step, state, extra={**extra, "facts": self._facts})
        return True

    def restore(self, target):
        """The newest checkpoint in the target's structure; it must be of this data."""
        restored = self._checkpointer.restore(target)
        for name in ("corpus_sha256", "tokens_sha256"):
            was, now = restored.extra["facts"][name], self._facts[name]
            if was != now:
                raise UserError(
                    ExitCode.DATA,
                    f"step {restored.step} in {self._folder} was trained on other text "
                    f"({name} {was[:12]}, now {now[:12]}); give the former --data, and "
                    "for the standard library the former Python",
                )
        return restored

    def wait(self) -> None:
        """Returns once no save is running."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Waits, and frees what writes."""
        self._checkpointer.close()
