"""What all benchmarks share: device time, measured ceilings, bytes, and records.

A benchmark prepares with `prepare`, times with `time`, and keeps every figure with
`record`, which remembers it for `table` and appends a line of JSON to
`benchmarks/results/<device>.jsonl`, or in the folder that BENCHMARK_RESULTS names.
"""

from collections.abc import Callable, Sequence
import datetime
import functools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import time as clock
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.formats import E4M3, cast

FOLDER = pathlib.Path(__file__).parent / "results"
KEYS = (
    "benchmark",
    "case",
    "implementation",
    "metric",
    "value",
    "unit",
    "device",
    "jax",
    "commit",
    "date",
)
FLAG = "--xla_gpu_enable_triton_gemm"
LEAST = 0.02  # seconds of queued work that one measurement takes at least
_records: list[dict[str, Any]] = []


def prepare() -> None:
    """Has all matrix products be cuBLASLt's, unless XLA_FLAGS says otherwise.

    XLA would try its own Triton products too, which takes minutes a program. It reads
    the variable as it first compiles.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}=false".strip()


def time(
    fn: Callable,
    *args: Any,
    donate: Sequence[int] = (),
    repeats: int = 20,
    calls: int | None = None,
) -> float:
    """Seconds that one call of fn(*args) takes on the device: a median.

    Calls are queued one behind the other and waited for together, so that what the host
    does in between is not counted unless it takes longer than the device.

    Args:
      fn: compiled, jitted (with the same donation) or plain; a plain one is jitted.
      *args: trees of arrays. Those donated are used up.
      donate: positions of donated arguments. Each call gives their next values: the
        first len(donate) of its results, in order (its only result, if it is no tuple).
      repeats: measurements, of which the median is taken.
      calls: calls a measurement; None: as many as take LEAST seconds, 200 at most.
    """
    run = fn if hasattr(fn, "lower") or isinstance(fn, jax.stages.Compiled) else None
    run = run or jax.jit(fn, donate_argnums=tuple(donate))
    turn = functools.partial(_turn, run, list(args), tuple(donate))
    turn(2)  # compiles, and fills caches and the allocator's pools
    if calls is None:
        # The first guess is of one call, which holds the host's share too.
        calls = _calls_for(turn(1))
        calls = _calls_for(turn(calls) / calls)
    return statistics.median(turn(calls) / calls for _ in range(repeats))


def _calls_for(seconds: float) -> int:
    return max(1, min(200, math.ceil(LEAST / max(seconds, 1e-9))))


def _turn(run, args: list, donate: tuple[int, ...], calls: int) -> float:
    """Seconds of `calls` calls; `args` is left with the next values of what it lent."""
    jax.block_until_ready(args)
    began = clock.perf_counter()
    for _ in range(calls):
        results = run(*args)
        given = results if isinstance(results, tuple) else (results,)
        for position, value in zip(donate, given, strict=False):
            args[position] = value
    jax.block_until_ready(results)
    return clock.perf_counter() - began


def attempt(what: str, measure: Callable[[], None]) -> bool:
    """Calls measure(); whether it ended. What stopped it is printed, not raised.

    One case that fails, or needs more memory than there is, shall not cost the others
    that a benchmark measures behind it.
    """
    try:
        measure()
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        short = "out of memory" if "RESOURCE_EXHAUSTED" in text else text[:300]
        print(f"{what}: FAILED, {type(error).__name__}: {short}", flush=True)
        return False
    return True


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a compiled program: arguments, results, reused, temporaries, total.

    The total is what the program needs at once, results in donated arguments' memory
    being counted once.
    """
    found = compiled.memory_analysis()
    sizes = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "reused": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    total = sizes["arguments"] + sizes["results"] - sizes["reused"]
    return sizes | {"total": total + sizes["temporaries"]}


def device_peak() -> int | None:
    """The most bytes that were in use on the first device since the process began."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def copy_rate(*, shape=(16384, 11008), repeats: int = 20) -> float:
    """Bytes a second, read and written, of an elementwise bfloat16 operation."""
    x = jnp.ones(shape, jnp.bfloat16)
    seconds = time(lambda x: x + jnp.bfloat16(1), x, repeats=repeats)
    return 2 * x.nbytes / seconds


def in_place_rate(*, shape=(16384, 16384), repeats: int = 20) -> float:
    """Bytes a second of an elementwise float32 operation on a donated array."""
    x = jnp.ones(shape, jnp.float32)
    nbytes = 2 * x.nbytes
    seconds = time(lambda x: x * jnp.float32(0.5), x, donate=(0,), repeats=repeats)
    return nbytes / seconds


def product_rate(
    kind: str, *, shape=(16384, 4096, 11008), promoted: bool = False, repeats: int = 20
) -> float:
    """Operations a second of an (M, K) x (K, N) product to bfloat16.

    Args:
      kind: "bf16", or "fp8": E4M3 operands, both with the contracted axis innermost.
      shape: M, K, N.
      promoted: whether FP8 products are added in float32 throughout.
      repeats: as for `time`.
    """
    M, K, N = shape
    of_x, of_w = jax.random.split(jax.random.key(0))
    x_MK = jax.random.normal(of_x, (M, K))
    w_NK = jax.random.normal(of_w, (N, K))
    dtype = lambda x: cast(x, E4M3) if kind == "fp8" else x.astype(jnp.bfloat16)
    x_MK, w_NK = jax.jit(dtype)(x_MK), jax.jit(dtype)(w_NK)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if promoted else lax.Precision.DEFAULT,
        preferred_element_type=jnp.bfloat16,
    )
    return 2 * M * K * N / time(product, x_MK, w_NK, repeats=repeats)


def ceilings(*, repeats: int = 20) -> dict[str, float]:
    """Measures and records what this device reaches: TB/s and TFLOP/s, by name."""
    tera = 1e12
    found = {
        "copy": copy_rate(repeats=repeats) / tera,
        "in place": in_place_rate(repeats=repeats) / tera,
        "bf16 product": product_rate("bf16", repeats=repeats) / tera,
        "FP8 product": product_rate("fp8", repeats=repeats) / tera,
        "FP8 product, promoted": (
            product_rate("fp8", promoted=True, repeats=repeats) / tera
        ),
    }
    for name, value in found.items():
        unit = "TFLOP/s" if "product" in name else "TB/s"
        implementation = "cuBLASLt" if "product" in name else "xla"
        record(
            benchmark="ceilings",
            case=name,
            implementation=implementation,
            metric="rate",
            value=value,
            unit=unit,
        )
    return found


@functools.cache
def commit() -> str:
    """The short hash of what is checked out, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def record(
    *,
    benchmark: str,
    case: str,
    implementation: str,
    metric: str,
    value: float,
    unit: str,
    device: str | None = None,
) -> dict[str, Any]:
    """Keeps one figure: a line in the device's file of results, and for `table`.

    Args:
      benchmark: the module, as "optimizer".
      case: shapes and dtypes, in words.
      implementation: "triton", "xla", "optax.adamw", ...
      metric: what was measured, as "time".
      value: rounded to six digits.
      unit: of the value.
      device: None: the kind of the device that is there. Programs that were only
        compiled say so here.
    """
    device = jax.devices()[0].device_kind if device is None else device
    given = (benchmark, case, implementation, metric, float(f"{value:.6g}"), unit)
    made = (device, jax.__version__, commit(), datetime.date.today().isoformat())
    row = dict(zip(KEYS, (*given, *made), strict=True))
    path = results_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    _records.append(row)
    return row


def results_file(device: str) -> pathlib.Path:
    """Where the device's records are: its name in small letters and hyphens."""
    folder = pathlib.Path(os.environ.get("BENCHMARK_RESULTS") or FOLDER)
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{name}.jsonl"


def table(benchmark: str | None = None) -> str:
    """What this process has recorded: cases and implementations by metrics."""
    rows = [r for r in _records if benchmark in (None, r["benchmark"])]
    return layout(rows)


def layout(rows: Sequence[dict[str, Any]]) -> str:
    """Records as text: a line for each case and implementation, a column a metric.

    Where one is recorded more than once, the last one counts.
    """
    head = lambda r: f"{r['metric']} [{r['unit']}]" if r["unit"] else r["metric"]
    columns = list(dict.fromkeys(map(head, rows)))
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        line = cells.setdefault((row["case"], row["implementation"]), {})
        line[head(row)] = row["value"]
    lines = [("case", "implementation", *columns)]
    for key, found in cells.items():
        lines.append((*key, *(shown(found.get(column)) for column in columns)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = lambda text, width, i: text.ljust(width) if i < 2 else text.rjust(width)
    padded = (
        "  ".join(
            pad(*both, i) for i, both in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def shown(value: float | None) -> str:
    """A figure to four digits; nothing for None."""
    if value is None:
        return ""
    if value != value or value in (math.inf, -math.inf):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
