"""Which axes of a kernel's operands and results are sharded alike.

A rule is written as for Einstein sums, "... (g s), ... g -> ... (g s)", and read here.
"""

import math
import re
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

Axes = tuple[tuple[str, ...], ...]


class Rule(NamedTuple):
    """A rule for operands of certain ranks: for each of their axes, its factors.

    An axis is a tuple of the names of its factors, slowest first: ("m",) or ("g", "s").
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sizes: tuple[tuple[str, int], ...]  # of the factors that are no whole axis
    whole: tuple[str, ...]  # factors that no device may hold a part of


def axes_of(array: str) -> tuple[tuple[str, ...], ...]:
    """ "... (g s) m" as (("...",), ("g", "s"), ("m",))."""
    axes: list[tuple[str, ...]] = []
    run: list[str] | None = None
    for word in array.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            run = []
        elif word == ")":
            axes.append(tuple(run or ()))
            run = None
        elif run is not None:
            run.append(word)
        else:
            axes.append((word,))
    return tuple(axes)


def has_rows(axes) -> bool:
    """Whether the axes begin with "..."."""
    return bool(axes) and axes[0] == ("...",)


def leading(operands, args) -> int:
    """How many axes "..." stands for; raises unless the ranks are the rule's."""
    if len(operands) != len(args):
        raise ValueError(
            f"shard_local: the rule must name each operand, but has {len(operands)} "
            f"for {len(args)} arrays"
        )
    found = {
        arg.ndim - len(axes) + 1
        for axes, arg in zip(operands, args, strict=True)
        if has_rows(axes)
    }
    exact = all(
        has_rows(axes) or arg.ndim == len(axes)
        for axes, arg in zip(operands, args, strict=True)
    )
    if len(found) > 1 or min(found, default=0) < 0 or not exact:
        raise ValueError(
            f"shard_local: arrays of shapes {[arg.shape for arg in args]} must have "
            f"the rule's axes {operands}"
        )
    return found.pop() if found else 0


def ranked(axes, lead: int):
    """The axes with "..." written out as `lead` of their own."""
    if not has_rows(axes):
        return axes
    return (*((f"lead{i}",) for i in range(lead)), *axes[1:])


def split_of(rule: Rule, mesh, arrays) -> dict[str, tuple[str, ...]]:
    """Over which mesh axes each factor is sharded: as its first sharded holder is.

    Where that would cut what must not be cut, the mesh axes go to the first leading
    axis that they divide: what is sharded by columns travels once, to be sharded by
    rows, and no device holds more than its share.

    Args:
      rule: the rule.
      mesh: the mesh.
      arrays: (axes, shape, spec) of operands, or of operands and results.
    """
    split, room, homeless = {}, room_of(rule, arrays), []
    divides = lambda names, factor: (
        room[factor] % math.prod(mesh.shape[name] for name in names) == 0
    )
    unused = lambda names: not {*names} & {n for got in split.values() for n in got}
    for axes, _, spec in arrays:
        for (factor, *_), entry in zip(axes, tuple(spec), strict=False):
            names = names_of(entry)
            if not names or factor in split or not unused(names):
                continue
            if divides(names, factor):
                split[factor] = names
            else:
                homeless.append(names)
    for names in filter(unused, homeless):
        free = (f for f in room if f not in split and divides(names, f))
        if factor := next(free, None):
            split[factor] = names
    return split


def room_of(rule: Rule, arrays) -> dict[str, int]:
    """How many parts each factor has at most, in the order in which they appear."""
    room = {}
    for axes, shape, _ in arrays:
        for (factor, *runs), size in zip(axes, shape, strict=True):
            parts = size // math.prod(dict(rule.sizes)[run] for run in runs)
            room.setdefault(factor, 1 if factor in rule.whole else parts)
    return room


def names_of(entry) -> tuple[str, ...]:
    """An entry of a PartitionSpec as the names of mesh axes."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def specs(arrays, split) -> list[P]:
    """The spec of each array, given over what each factor is sharded."""
    return [P(*(split.get(factor) for factor, *_ in axes)) for axes in arrays]


def shardy_rule(rule: Rule, room, mesh, *types):
    """The rule as Shardy reads it, over the mesh for which the program is lowered.

    Shardy would propagate a sharding that cuts a run, over a part of a mesh axis. So
    where it could, the axis with the runs and that of one element a run get factors of
    their own, and what then differs is resharded as the program is partitioned.
    """
    parts = math.prod(mesh.shape.values())
    runs, kept = dict(rule.sizes), {}

    def axis(factors):
        if len(factors) == 1:
            return factors[0]
        if room[factors[0]] % parts:
            return "_".join(factors)
        kept.update((run, runs[run]) for run in factors[1:])
        return f"({' '.join(factors)})"

    side = lambda arrays: ", ".join(" ".join(map(axis, axes)) for axes in arrays)
    notation = f"{side(rule.operands)} -> {side(rule.results)}"
    order = re.findall(r"\w+", notation)  # Shardy wants them as they first appear
    fixed = {*rule.whole, *kept}
    whole = tuple(factor for factor in dict.fromkeys(order) if factor in fixed)
    return notation, {"need_replication_factors": whole, **kept}
