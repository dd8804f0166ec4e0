"""Files that both sides read: recorded gradients, and what optimizers made of them.

NumPy alone, so that neither environment needs the other's packages. A tree is a flat
{name: array}; a file is an .npz without pickled objects.
"""

import dataclasses
import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

MIN_SIZE = 4096  # elements below which every optimizer compared keeps float32 moments
Tree = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """Hyperparameters, the same in every optimizer."""

    lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float


class Recording(NamedTuple):
    """A training run seen from its optimizer.

    params: before the first step. grads: one leading axis more, the steps. trained:
    the parameters after the last, as the run itself had them. adam: the run's.
    """

    params: Tree
    grads: Tree
    trained: Tree
    adam: Adam

    @property
    def steps(self) -> int:
        """How many gradients there are."""
        return len(next(iter(self.grads.values())))


class Outcome(NamedTuple):
    """What one optimizer made of a recording.

    params: {step: tree}. v: the second moments after the last step, read back to
    float32. size: bytes of the state. versions: of the packages that made it.
    """

    optimizer: str
    b2: float
    params: dict[int, Tree]
    v: Tree
    size: int
    versions: dict[str, str]


def _write(path: pathlib.Path, facts: dict[str, Any], trees: dict[str, Tree]) -> None:
    arrays = {f"{t}/{n}": leaf for t, tree in trees.items() for n, leaf in tree.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, facts=np.array(json.dumps(facts)), **arrays)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tree]]:
    trees: dict[str, Tree] = {}
    with np.load(path) as file:
        for key in file.files:
            if key != "facts":
                tree, _, name = key.partition("/")
                trees.setdefault(tree, {})[name] = file[key]
        return json.loads(str(file["facts"])), trees


def write_recording(path: pathlib.Path, recording: Recording) -> None:
    """Keeps a recording: 4 bytes a parameter and step."""
    facts = dataclasses.asdict(recording.adam)
    names = ("params", "grads", "trained")
    _write(path, facts, {name: getattr(recording, name) for name in names})


def read_recording(path: pathlib.Path) -> Recording:
    """The recording that `write_recording` kept."""
    facts, trees = _read(path)
    return Recording(**trees, adam=Adam(**facts))


def write_outcome(folder: pathlib.Path, outcome: Outcome) -> pathlib.Path:
    """Keeps an outcome under a name made of its optimizer and b2; returns the path."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", outcome.optimizer).strip("-")
    path = folder / f"{name}-{outcome.b2}.npz"
    names = ("optimizer", "b2", "size", "versions")
    trees = {f"{step}": tree for step, tree in outcome.params.items()}
    _write(path, {n: getattr(outcome, n) for n in names}, trees | {"v": outcome.v})
    return path


def read_outcomes(folder: pathlib.Path) -> list[Outcome]:
    """Every outcome in a folder, by file name."""
    outcomes = []
    for path in sorted(folder.glob("*.npz")):
        facts, trees = _read(path)
        v = trees.pop("v")
        params = {int(step): tree for step, tree in trees.items()}
        outcomes.append(Outcome(**facts, params=params, v=v))
    return outcomes
