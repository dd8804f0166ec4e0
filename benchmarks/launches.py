"""How many kernels a compiled program runs, and how often the host launches anything.

XLA writes down what the host will do, with command buffers (CUDA graphs, each launched
as a whole) and without, when it is asked for its files. No GPU is needed to read them.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import re
import tempfile
from typing import Any

from jax.stages import Compiled

# In this order: the second is all there is where no command buffer was made.
FILES = ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
WITHOUT = {"xla_gpu_enable_command_buffer": ""}
_STEP = re.compile(r"( *)\d+: (k\w+)")
_LABEL = re.compile(r"( *)\w[\w ]*:\s*$")


@dataclasses.dataclass(frozen=True)
class Launches:
    """Of one call of a program.

    kernels: what runs on the device, copies too. launches: what the host starts, a
    command buffer being one. buffers: command buffers among these.
    """

    kernels: int
    launches: int
    buffers: int

    def __add__(self, other: "Launches") -> "Launches":
        """Of one after the other."""
        return Launches(
            self.kernels + other.kernels,
            self.launches + other.launches,
            self.buffers + other.buffers,
        )


NONE = Launches(0, 0, 0)


def compiled(
    compile: Callable[[Mapping[str, Any]], Compiled], *, command_buffers: bool = True
) -> tuple[Compiled, Launches]:
    """A program and its launches.

    Args:
      compile: compiler options -> the program.
      command_buffers: False compiles without any.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {} if command_buffers else WITHOUT
        program = compile({**options, "xla_dump_to": folder})
        return program, read(pathlib.Path(folder))


def read(folder: pathlib.Path) -> Launches:
    """Launches of the largest program whose files lie in a folder.

    Raises:
      ValueError: if there is no such file, as where no GPU is compiled for.
    """
    for name in FILES:
        if found := sorted(folder.glob(f"*.{name}"), key=lambda p: p.stat().st_size):
            return count(found[-1].read_text())
    raise ValueError(
        f"read: XLA must have left a *.{FILES[1]} in {folder}, but there is none; was "
        "the program compiled for a GPU?"
    )


def count(text: str) -> Launches:
    """Launches in a sequence of thunks as XLA prints it.

    A conditional counts its smaller branch and the copy of its predicate to the host;
    a loop counts one turn.

    Example:
      >>> count("000: kCommandBuffer [x]\\n    001: kCopy [x]\\n    002: kGemm [x]\\n")
      Launches(kernels=2, launches=1, buffers=1)
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return _sum(lines)


def _sum(lines: list[str]) -> Launches:
    """Of lines at one depth, each with those below it that are deeper."""
    total, at = NONE, 0
    while at < len(lines):
        step, end = _STEP.match(lines[at]), at + 1
        depth = _depth(lines[at])
        while end < len(lines) and _depth(lines[end]) > depth:
            end += 1
        if step:
            total += _one(step[2], lines[at + 1 : end])
        elif _LABEL.match(lines[at]):
            total += _sum(lines[at + 1 : end])
        at = end
    return total


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _one(kind: str, inside: list[str]) -> Launches:
    if kind == "kConditional":
        taken = min(_branches(inside), key=lambda found: found.kernels, default=NONE)
        return taken + Launches(1, 1, 0)
    if kind == "kCommandBuffer":
        return Launches(_sum(inside).kernels, 1, 1)
    return _sum(inside) if inside else Launches(1, 1, 0)


def _branches(lines: list[str]) -> list[Launches]:
    """What each branch of a conditional launches; a label stands above each."""
    starts = [i for i, line in enumerate(lines) if _LABEL.match(line)]
    depth = min((_depth(lines[i]) for i in starts), default=0)
    starts = [i for i in starts if _depth(lines[i]) == depth]
    ends = [*starts[1:], len(lines)]
    return [_sum(lines[i + 1 : j]) for i, j in zip(starts, ends, strict=True)]
