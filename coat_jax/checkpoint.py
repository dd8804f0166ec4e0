"""Training states on disk: saved whole or not at all, restored bit for bit or refused.

A checkpoint is a folder `step_<n>` with two items written by orbax: `state`, the arrays
under running numbers, and `meta`, one JSON object that says what each array is. A
restore compares `meta` with its target before it opens an array, because orbax itself
turns FP8 codes into float32 without their scales when the target asks for float32.
"""

import operator
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np

from coat_jax import serialization
from coat_jax.moments import Storage
from coat_jax.serialization import CheckpointError as CheckpointError
from coat_jax.serialization import brief, few
from coat_jax.serialization import export_npz as export_npz
from coat_jax.serialization import import_npz as import_npz


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns: the state, its `extra` and its step."""

    state: Any
    extra: dict[str, Any]
    step: int


class Checkpointer:
    """Saves and restores training states in one directory; a context manager.

    Saves run in the background and are atomic: a step exists once it is whole. The
    first save removes what killed saves left behind, so one process at a time may write
    a directory; readers change nothing and may come at any time.

    Args:
      directory: a folder on a mounted file system, made by the first save.
      storage: how the state's moments are stored. Kept beside the state; a restore
        under other formats or another group is refused by name.
      max_to_keep: newest steps kept, None for all.
      save_interval_steps: `save` passes over steps that are no multiple of it.
      keep_period: multiples of it are never removed.

    Raises:
      CheckpointError: if an argument is out of range or `directory` is a file.

    Example:
      >>> import tempfile
      >>> from jax import numpy as jnp
      >>> state = {"w": jnp.arange(3.0), "step": 7}
      >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     started = checkpointer.save(7, state, extra={"next_index": 21})
      ...     restored = checkpointer.restore(state)
      >>> restored.step, restored.extra, restored.state["w"].tolist()
      (7, {'next_index': 21}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        storage: Storage | None = None,
        max_to_keep: int | None = 3,
        save_interval_steps: int = 1,
        keep_period: int | None = None,
    ):
        self._directory = _checked_directory(directory)
        if storage is not None and not isinstance(storage, Storage):
            raise CheckpointError(
                f"Checkpointer: storage must be a coat_jax.Storage or None, got "
                f"{storage!r}; pass the storage that the optimizer has"
            )
        self._storage = storage
        kept = {"max_to_keep": max_to_keep, "keep_period": keep_period}
        self._options: dict[str, Any] = {k: v for k, v in kept.items() if v is not None}
        for name, value in self._options.items():
            _checked_int(value, 1, f"Checkpointer: {name}")
        self._interval = _checked_int(
            save_interval_steps, 1, "Checkpointer: save_interval_steps"
        )
        self._manager: Any = None
        self._pending: int | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def save(
        self,
        step: int | Any,
        state: Any,
        *,
        extra: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Starts to save `state`; returns whether it did.

        It does not if `step` is no multiple of the interval (`force` saves all the
        same) or is saved already. The arrays are copied before it returns: they may be
        donated or changed at once. At most one save runs; a second waits for it.

        Args:
          step: at least 0, and not below the newest step in the directory.
          state: a pytree of JAX arrays (typed keys too), NumPy arrays, Python numbers.
          extra: anything else that JSON holds: data position, config. It comes back as
            JSON returns it: tuples as lists, keys as strings.
          force: save whatever the interval says.

        Raises:
          CheckpointError: if an earlier save failed (it is named; the next call goes
            on), or this one cannot start: a bad step, a leaf or `extra` that cannot be
            stored, a directory that cannot be written.
        """
        step = _checked_int(step, 0, "save: step")
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()
        if step % self._interval and not force:
            return False
        self.wait()
        steps = self.all_steps()
        if step in steps:
            return False
        if steps and step < steps[-1]:
            raise CheckpointError(
                f"save: step {step} is below the newest step in {self._directory}, "
                f"{steps[-1]}, and the next resume would pass it over; remove the "
                "newer steps or save to another directory"
            )
        self._start(step, state, extra)
        return True

    def _start(self, step, state, extra):
        """Hands one checkpoint to orbax; what fails here leaves nothing behind."""
        import orbax.checkpoint as ocp  # 0.4 s, which importing coat_jax need not pay

        facts, arrays = serialization.pack(state, "save")
        meta = serialization.document(
            facts, caller="save", step=step, storage=self._storage, extra=extra
        )
        items: dict[str, Any] = {"meta": ocp.args.JsonSave(meta)}
        if arrays:  # orbax refuses an empty tree
            items["state"] = ocp.args.StandardSave(arrays)
        self._pending = step
        try:
            if self._manager is None:
                self._manager = self._open()
            # orbax passes over steps below its newest without a word: we decide.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            raise self._failure(error) from error

    def _open(self):
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(
            step_prefix="step", cleanup_tmp_directories=True, **self._options
        )
        return ocp.CheckpointManager(
            self._directory, item_names=("state", "meta"), options=options
        )

    def _failure(self, error) -> CheckpointError:
        """Forgets the manager, whose list now holds a step that does not exist."""
        step, self._pending = self._pending, None
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as again:  # the same failure, or one that it caused
                error.add_note(f"closing orbax's manager: {again!r}")
        for unfinished in self._directory.glob(f"step_{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)  # or the disk stays full
        return CheckpointError(
            f"save: step {step} was not saved in {self._directory}: {brief(error)}; "
            f"the newest step there is {_newest(self._directory)}. Free space or mend "
            "the directory; the next save tries again"
        )

    def restore(self, target: Any, *, step: int | Any | None = None) -> Restored:
        """Reads a saved state into the structure, dtypes and shardings of `target`.

        Waits for a save that is running. Bits are exact under any sharding: the
        target's counts, not the one it was saved with. Arrays without one are not
        committed to a device. Python and NumPy leaves come back as such.

        Args:
          target: the state's tree, abstract (`abstract_state`, `jax.eval_shape`) or
            concrete, which is not changed.
          step: None for the newest.

        Raises:
          CheckpointError: if there is no such step; if format version, group,
            formats, structure, a shape or a dtype differs from the target's (no array
            is read then); if the files are damaged; or if an earlier save failed.
        """
        self.wait()
        step = self._chosen(step)
        folder = self._directory / f"step_{step}"
        where = f"restore: step {step} in {self._directory}"
        meta = serialization.read_document(folder / "meta" / "metadata", where)
        serialization.check_storage(meta, self._storage, where)
        leaves = serialization.leaves_of(target, "restore")
        serialization.check_leaves(meta, leaves, where)
        arrays = _read_arrays(folder / "state", meta, leaves, where)
        state = serialization.unpack(target, leaves, meta, arrays, where)
        return Restored(state, meta["extra"], step)

    def _chosen(self, step):
        steps = self.all_steps()
        if step is None and steps:
            return steps[-1]
        if step is not None and _checked_int(step, 0, "restore: step") in steps:
            return operator.index(step)
        raise CheckpointError(
            f"restore: {self._directory} must hold "
            f"{'a checkpoint' if step is None else f'step {step}'}, it holds "
            f"{'steps ' + few(steps) if steps else 'none'}; check the path and the step"
        )

    def latest_step(self) -> int | None:
        """The newest committed step, read from the directory; None if there is none."""
        return _newest(self._directory)

    def all_steps(self) -> list[int]:
        """The committed steps in rising order, read from the directory."""
        return _steps(self._directory)

    def wait(self) -> None:
        """Returns once no save is running; CheckpointError if the last one failed."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        self._pending = None

    def close(self) -> None:
        """Waits, then frees what orbax holds. The object may be used again."""
        self.wait()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


def abstract_state(init_fn, *args, shardings: Any = None) -> Any:
    """The target of a restore: `init_fn(*args)` as shapes, dtypes and shardings.

    Nothing is computed, so a state larger than memory costs nothing to describe.

    Args:
      init_fn: makes the state; only traced.
      args: arrays or `jax.ShapeDtypeStruct`.
      shardings: one sharding for all leaves, or a tree with the state's structure
        (None where a leaf has none). By default those that `jax.eval_shape` reports.

    Example:
      >>> from jax import numpy as jnp
      >>> abstract_state(lambda w: {"m": w * 0}, jnp.ones(3))
      {'m': ShapeDtypeStruct(shape=(3,), dtype=float32)}
    """
    tree = jax.eval_shape(init_fn, *args)
    if shardings is None:
        return tree
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        shardings = jax.tree.map(lambda leaf: one, tree)

    def place(leaf, sharding):
        weak = leaf.weak_type
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak
        )

    return jax.tree.map(place, tree, shardings)


def _checked_directory(directory):
    if "://" in os.fspath(directory):
        raise CheckpointError(
            "Checkpointer: directory must be on a mounted file system, got "
            f"{directory}; mount the bucket"
        )
    path = pathlib.Path(directory).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"Checkpointer: directory must be a folder or not exist yet, {path} is a "
            "file; choose another path"
        )
    return path


def _checked_int(value, least, what):
    """`value` as an int: any integer type, but neither a bool nor a rounded float."""
    try:
        number = None if isinstance(value, bool | np.bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number < 2**63:
        raise CheckpointError(
            f"{what} must be an integer of at least {least}, got {value!r}; pass an int"
        )
    return number


def _steps(directory):
    """Orbax renames a step's folder into place when all is written; half-removed ones
    and folders of others lack a file that every checkpoint has.
    """
    try:
        names = os.listdir(directory) if directory.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"Checkpointer: {directory} must be readable, got {brief(error)}"
        ) from error
    steps = [
        int(name[5:]) for name in names if re.fullmatch("step_(0|[1-9]\\d*)", name)
    ]
    needed = ("_CHECKPOINT_METADATA", "meta/metadata")
    whole = lambda step: all((directory / f"step_{step}" / n).is_file() for n in needed)
    return sorted(filter(whole, steps))


def _newest(directory):
    return max(_steps(directory), default=None)


def _read_arrays(folder, meta, leaves, where):
    """{path: array as written}, each on the devices that the target asks for."""
    import orbax.checkpoint as ocp

    names = serialization.stored(meta)
    templates = {
        n: _template(leaves[p], f"{where}: leaf {p}") for p, n in names.items()
    }
    if not templates:
        return {}
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            tree = reader.restore(folder, args=ocp.args.StandardRestore(templates))
    except Exception as error:
        raise CheckpointError(
            f"{where} must be readable, reading its arrays gave {brief(error)}; "
            f"restore another of the steps {few(_steps(folder.parent.parent))}"
        ) from error
    return {path: tree[name] for path, name in names.items()}


def _template(leaf, where):
    """What orbax shall make: a NumPy array where no sharding is asked for."""
    shape, dtype = serialization.encoded(leaf)
    sharding = serialization.placement(leaf, where)
    if sharding is None:
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
