"""Reads from a compiled program what travels between devices."""

import math
import re
from typing import NamedTuple

_OP = re.compile(
    r"= (?P<type>.+?) (?P<name>all-gather|all-to-all|collective-permute|all-reduce|"
    r"reduce-scatter|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array of a collective operation."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def collectives(text: str) -> list[Collective]:
    """All arrays that the collectives of an optimised HLO text take or give."""
    found = []
    for line in text.splitlines():
        if match := _OP.search(line):
            for dtype, dims in _ARRAY.findall(match["type"]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                found.append(Collective(match["name"], dtype, shape))
    return found


def assert_only_statistics_travel(text: str, rows: int, most: int):
    """No collective takes FP8 codes, or more than `most` values a row of an array.

    XLA combines all-reduces: those of both moments' maxima and minima, each of two
    partial statistics, may be one array.
    """
    for found in collectives(text):
        limit = rows * most * (8 if found.name == "all-reduce" else 1)
        assert not found.dtype.startswith("f8"), f"codes travel: {found}"
        assert found.size <= limit, f"more than statistics travels: {found}"
