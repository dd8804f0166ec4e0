"""Where a program's time goes: the device's kernels, from a trace of JAX's profiler."""

from collections.abc import Callable, Iterable
import gzip
import json
import pathlib
import re
import tempfile
from typing import Any

import jax

# The first that occurs in a kernel's name says what kind it is.
KINDS = (
    ("coat_jax kernels", r"coat_"),
    ("attention", r"fmha|flash|sdpa|cudnn|attention"),
    ("products, FP8", r"e4m3|e5m2|_qq|qmma|nvjet_q"),
    ("products, wider", r"gemm|nvjet|cutlass|cublas"),
    ("copies", r"memcpy|memset|copy"),
    ("transposes", r"transpose"),
    ("reductions", r"reduce"),
    ("fusions", r"fusion|wrapped"),
)


def trace(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events that the profiler sees while call() runs, waited for."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        return read(pathlib.Path(folder))


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The events of the trace that lies somewhere below a folder."""
    paths = sorted(folder.rglob("*.trace.json.gz"))
    if not paths:
        raise ValueError(
            f"read: the profiler must have left a *.trace.json.gz below {folder}, but "
            "there is none; is a GPU there, and the plugin's profiler with it?"
        )
    return json.loads(gzip.decompress(paths[-1].read_bytes()))["traceEvents"]


def kernels(events: Iterable[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Name to (how often, microseconds altogether) of what ran on the device's streams.

    The trace shows the same time again as operations and as modules, on lanes of other
    names; these do not count.
    """
    events = list(events)
    name_of = lambda event: (event.get("args") or {}).get("name", "")
    named = [e for e in events if e.get("ph") == "M"]
    devices = {
        e["pid"]
        for e in named
        if e["name"] == "process_name" and "device:" in name_of(e).lower()
    }
    lanes = {
        (e["pid"], e["tid"]): name_of(e)
        for e in named
        if e["name"] == "thread_name" and e["pid"] in devices
    }
    streams = {
        lane for lane, name in lanes.items() if name.lower().startswith("stream")
    }
    if not streams:
        raise ValueError(
            "kernels: the trace must have lanes of a device named Stream, but its "
            f"devices have {sorted(set(lanes.values()))}; was a GPU traced?"
        )
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        lane = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "X" and lane in streams:
            count, total = found.get(event["name"], (0, 0.0))
            found[event["name"]] = count + 1, total + event.get("dur", 0.0)
    return found


def kind(name: str) -> str:
    """What a kernel does, by its name."""
    lower = name.lower()
    return next((what for what, mark in KINDS if re.search(mark, lower)), "other")


def summary(
    found: dict[str, tuple[int, float]], *, turns: float, most: int = 40
) -> str:
    """Microseconds of one turn by kind, and those of the longest kernels.

    Args:
      found: what `kernels` returned.
      turns: calls, or calls times layers, that were traced.
      most: how many kernels are listed.
    """
    total = sum(spent for _, spent in found.values()) or 1.0
    by_kind: dict[str, tuple[int, float]] = {}
    for name, (count, spent) in found.items():
        n, t = by_kind.get(kind(name), (0, 0.0))
        by_kind[kind(name)] = n + count, t + spent
    lines = [f"{total / turns:12.1f} us altogether, in kernels"]
    for title, rows in (("kinds", by_kind), ("kernels", found)):
        lines.append(f"{title:>12}      %   count")
        longest = sorted(rows.items(), key=lambda item: -item[1][1])[:most]
        lines += [
            f"{spent / turns:12.1f} {100 * spent / total:6.1f} {count / turns:7.1f}  "
            f"{name[:120]}"
            for name, (count, spent) in longest
        ]
    return "\n".join(lines)
