"""Tensor-train layers against dense ones: their linear maps, and whole training steps.

    python -m benchmarks.comera                       on a GPU, some four minutes
    python -m benchmarks.comera --only=linear         linear maps alone
    python -m benchmarks.comera --only=step           the six-encoder step alone
    python -m benchmarks.comera --compile-only        bytes and launches, needs no GPU
    python -m benchmarks.comera --size=micro          tries the script on a CPU

Linear maps: 768 x 768, 1024 x 4096 and 4096 x 4096, bfloat16 activations. Dense ones
have bfloat16 weights; tensor trains (TT) have float32 cores of order 6, whose halves
are merged in each call, in some thirty small kernels forward and backward. "merged" has
the float32 halves as its parameters: what a call costs where the merge is done once for
all micro-batches. "FP8" is the default policy. Forward alone, and forward with the
gradients by x and the parameters from a given gradient of y. Several calls on inputs of
their own are one program where tokens are few, so that no launch from the host counts.

    time      one call's
    bound     of time: the larger of operations at the tensor cores' peak and of bytes
              at the memory's, both nominal (an H200's 989 and 1979 TFLOP/s, 4.8 TB/s).
              Counted once a pass: x, y and the gradients; dense weights. Not counted:
              cores, what has R columns
    of bound  bound over time
    gain      time of dense bf16 over this one's, in the same run; its bound likewise

The step is `benchmarks.comera_step`'s.
"""

import argparse
from collections.abc import Callable
import concurrent.futures
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from benchmarks import comera_step, h200, harness
from coat_jax import contraction, tensor_train
from coat_jax.linear import fp8_dot
from coat_jax.lowrank import lowrank_dot
from coat_jax.policy import BF16, DEFAULT, Policy

POLICIES = {"bf16": BF16, "FP8": DEFAULT}
PEAK = {"bf16": 989e12, "FP8": 1979e12}  # operations a second
MEMORY = 4.8e12  # bytes a second
# (inputs, outputs), ranks, tokens, tokens that one program has at least.
SIZES: dict[str, tuple] = {
    "full": (
        ((768, 768), (1024, 4096), (4096, 4096)),
        (32, 64),
        (2048, 16384, 65536),
        8192,
    ),
    "micro": (((24, 32),), (4,), (16,), 32),
}
PASSES = ("forward", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear map of some tokens: dense (rank None), a tensor train or its halves."""

    inputs: int
    outputs: int
    tokens: int
    rank: int | None
    policy: str
    merged: bool = False

    @property
    def name(self) -> str:
        """Of the implementation."""
        form = "merged" if self.merged else "TT"
        form = "dense" if self.rank is None else f"{form} {self.rank}"
        return f"{form} {self.policy}"

    @property
    def case(self) -> str:
        """The shape in words."""
        return f"{self.inputs} x {self.outputs}, {self.tokens:,} tokens"

    @property
    def shape(self):
        """Of the train."""
        return tensor_train.tt_shape(self.inputs, self.outputs, rank=self.rank)

    def draw(self, key):
        """Parameters: entries of variance 1 / inputs."""
        std = self.inputs**-0.5
        if self.rank is not None:
            train = tensor_train.init_train(key, self.shape, std=std)
            return self.halves(train) if self.merged else train
        w = std * jax.random.normal(key, (self.inputs, self.outputs))
        return w.astype(jnp.bfloat16)

    def halves(self, train):
        """(N, R) and (R, M), float32."""
        return contraction.halves(train, len(self.shape.in_dims))

    def apply(self, params, x):
        """x (T, N) to (T, M)."""
        policy: Policy = POLICIES[self.policy]
        if self.rank is None:
            return fp8_dot(x, params, policy=policy)
        left, right = params if self.merged else self.halves(params)
        return lowrank_dot(x, left, right, policy=policy)

    def run(self, passes: str, params, x, g):
        """y, and with both passes the gradients by parameters and x."""
        if passes == "forward":
            return (self.apply(params, x),)
        y, pull = jax.vjp(self.apply, params, x)
        return y, *pull(g)

    def bound(self, passes: str) -> float:
        """Seconds below which no device of these nominal rates gets."""
        N, M, T = self.inputs, self.outputs, self.tokens
        dense = self.rank is None
        turns = 1 if passes == "forward" else 3
        inner = N * M if dense else self.rank * (N + M)
        kept = 2 if self.policy == "bf16" else 1
        moved = 2 * T * (N + M) + (2 * N * M if dense else 0)
        if passes == "both":
            moved += T * (2 * M + (2 + kept) * N) + (4 * N * M if dense else 0)
            moved += kept * T * N if self.policy == "FP8" else 0  # codes written
        return max(2 * turns * T * inner / PEAK[self.policy], moved / MEMORY)


def shapes_of(size: str, inputs: list[int] | None) -> list[tuple[int, int]]:
    """Shapes of a size, those of `inputs` alone if given.

    Raises:
      ValueError: if there are none of one of them.
    """
    shapes = SIZES[size][0]
    have = [N for N, _ in shapes]
    if inputs and not {*inputs} <= {*have}:
        raise ValueError(f"--inputs must be of {have} at this --size, got {inputs}")
    return [shape for shape in shapes if not inputs or shape[0] in inputs]


def linears(size: str) -> list[Linear]:
    """Every linear map of a size, dense bf16 first for each shape."""
    shapes, ranks, tokens, _ = SIZES[size]
    return [
        Linear(inputs=N, outputs=M, tokens=T, rank=rank, policy=policy, merged=merged)
        for N, M in shapes
        for T in tokens
        for rank in (None, *ranks)
        for merged in ((False,) if rank is None else (False, True))
        for policy in POLICIES
    ]


def calls_of(what: Linear, size: str) -> int:
    """How many calls are one program."""
    return max(1, SIZES[size][3] // what.tokens)


def program(what: Linear, passes: str) -> Callable:
    """Of lists of parameters, inputs and gradients: a call each, one after the other.

    Without the barrier XLA would do equal steps of all calls as one.
    """

    def run(params, xs, gs):
        results = []
        for p, x, g in zip(params, xs, gs, strict=True):
            if results:
                p, x, g, results[-1] = lax.optimization_barrier((p, x, g, results[-1]))
            results.append(what.run(passes, p, x, g))
        return results

    return run


def arguments(what: Linear, calls: int):
    """What `program` takes: parameters, inputs and gradients of y, a list of each."""
    T, key = what.tokens, jax.random.key(0)
    draw = lambda key, n: jax.random.normal(key, (T, n)).astype(jnp.bfloat16)

    def one(key):
        of_p, of_x, of_g = jax.random.split(key, 3)
        return what.draw(of_p), draw(of_x, what.inputs), draw(of_g, what.outputs)

    def make(key):
        made = map(one, jax.random.split(key, calls))
        return [list(part) for part in zip(*made, strict=True)]

    return make, key


class Bench:
    """A run over all linear maps: a shape's compiled at once, timed one by one."""

    def __init__(self, given: argparse.Namespace):
        self.size, self.repeats, self.threads = given.size, given.repeats, given.threads
        self.compile_only, self.passes = given.compile_only, given.passes
        self.inputs = given.inputs
        self.seconds: dict[tuple[str, str, str], float] = {}
        self.failed = 0

    def compile(self, what: Linear, passes: str):
        """A function that compiles, all that needs this thread being done."""
        make, key = arguments(what, calls_of(what, self.size))
        shapes = jax.eval_shape(make, key)
        if self.compile_only:
            return functools.partial(h200.compile_for, program(what, passes), *shapes)
        return jax.jit(program(what, passes)).lower(*shapes).compile

    def run(self) -> None:
        """Compiles, times and records everything, a shape after the other."""
        for shape in shapes_of(self.size, self.inputs):
            maps = [m for m in linears(self.size) if (m.inputs, m.outputs) == shape]
            self.run_all([(what, passes) for what in maps for passes in self.passes])

    def run_all(self, pairs: list[tuple[Linear, str]]) -> None:
        """Compiles maps with their passes at once, then times one by one."""
        jobs, began = [], time.monotonic()
        # Its end waits for all: choosing kernels keeps the device busy.
        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            for what, passes in pairs:
                said = f"{what.case}, {what.name}, {passes}"
                submit = lambda what=what, passes=passes, said=said: jobs.append(
                    (said, what, passes, pool.submit(self.compile(what, passes)))
                )
                self.failed += not harness.attempt(said, submit)
        print(
            f"{len(jobs)} maps compiled in {time.monotonic() - began:.0f} s", flush=True
        )
        for said, what, passes, job in jobs:
            measure = functools.partial(self.measure, what, passes, job.result)
            self.failed += not harness.attempt(said, measure)

    def measure(self, what: Linear, passes: str, compiled) -> None:
        """Records one program's figures."""
        run, calls = compiled(), calls_of(what, self.size)
        put = functools.partial(self.record, what, passes)
        used = harness.memory_of(run)["temporaries"] / calls
        put("temporaries", used / 2**20, "MiB")
        put("bound", 1e6 * what.bound(passes), "us")
        if self.compile_only:
            return
        make, key = arguments(what, calls)
        args = jax.jit(make)(key)
        seconds = harness.time(run, *args, repeats=self.repeats) / calls
        self.seconds[what.case, what.name, passes] = seconds
        put("time", 1e6 * seconds, "us")
        put("of bound", 100 * what.bound(passes) / seconds, "%")
        dense = dataclasses.replace(what, rank=None, policy="bf16", merged=False)
        if base := self.seconds.get((what.case, dense.name, passes)):
            put("gain", base / seconds, "")
            put("gain's bound", dense.bound(passes) / what.bound(passes), "")

    def record(self, what: Linear, passes, metric: str, value: float, unit: str) -> Any:
        """Keeps one figure."""
        return harness.record(
            benchmark="comera",
            case=f"{what.case}, {passes}",
            implementation=what.name,
            metric=metric,
            value=value,
            unit=unit,
            device="compiled for NVIDIA H200" if self.compile_only else None,
        )

    def table(self) -> str:
        """A line a shape and pass: us of each form, gain, and % of the bound."""
        lines = ["us a call (gain over dense bf16; % of the time's bound)"]
        cells: dict[tuple[str, str], list[str]] = {}
        for what in linears(self.size):
            for passes in self.passes:
                took = self.seconds.get((what.case, what.name, passes))
                base = self.seconds.get((what.case, "dense bf16", passes))
                text = f"{what.name} "
                if took is None or base is None:
                    text += "-"
                else:
                    share = 100 * what.bound(passes) / took
                    text += f"{1e6 * took:.4g} ({base / took:.2f}; {share:.0f} %)"
                cells.setdefault((what.case, passes), []).append(text)
        for (case, passes), found in cells.items():
            lines.append(f"{case}, {passes}: " + " | ".join(found))
        return "\n".join(lines)


def main() -> None:
    """Prints compact tables, and appends to the results."""
    parser = argparse.ArgumentParser(description="Tensor trains against dense layers.")
    parser.add_argument("--only", choices=("linear", "step"), default=None)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--compile-only", action="store_true", help="no GPU needed")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--passes", choices=PASSES, nargs="+", default=[*PASSES])
    parser.add_argument(
        "--inputs", type=int, nargs="+", help="linear maps of so many inputs alone"
    )
    parser.add_argument("--threads", type=int, default=6, help="that compile")
    comera_step.add_arguments(parser)
    given = parser.parse_args()
    try:
        shapes_of(given.size, given.inputs)
    except ValueError as error:
        parser.error(str(error))
    harness.prepare()
    failed = 0
    if given.only != "linear":
        failed += comera_step.run(given)
    if given.only != "step":
        bench = Bench(given)
        try:
            bench.run()
        finally:
            print(bench.table(), flush=True)
        failed += bench.failed
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
