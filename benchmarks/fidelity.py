"""How far FP8 products and kept codes take gradients and outputs from bfloat16's.

    python -m benchmarks.fidelity                  needs a GPU of compute capability 9
    python -m benchmarks.fidelity --size=micro     tries the script, in float32 on a CPU

With XLA_FLAGS=--xla_gpu_enable_triton_gemm=false in the environment a program compiles
in 2 to 9 seconds on an H200 and all products are cuBLASLt's; without it XLA tries
Triton's products too, and that takes minutes a policy.

Four decoder blocks of Llama-2-7B's width, one after the other, on random data: weights
N(0, 1 / fan-in), inputs N(0, 1), all drawn in float32 and then cast to bfloat16, since
a draw in bfloat16 takes a few hundred values only. The loss is a fixed random linear
functional of the output.

    gradients   cosine to those of the bf16 policy and ratio of norms, for each policy:
                of all 28 matrices as one vector, and of each matrix
    forward     error of the output after each block, where the norms read their input
                from FP8, with a scale for a group of 128 or 16 neighbours, a block of 4
                tokens x 4 channels, or the whole tensor (COAT, arXiv 2410.19313,
                figure 4a). Also on inputs whose tokens or channels differ in size by a
                log-normal factor
    nan         share of the output that is NaN after one NaN in the input
    products    matrix products in the program as it was compiled here, by kind
    step_ms     one block, forward and backward: the median of 20 after 3, in two turns

Each line has the keys benchmark, case, implementation, metric, value, unit, device,
jax, commit and date.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import math
import re
import statistics
import subprocess
import sys
import time

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.formats import E4M3, E5M2, cast
from coat_jax.models import llama
from coat_jax.policy import BF16, DEFAULT, LEAN, PAPER, Kept, Operand
from coat_jax.quantize import TINY, dequantize, largest, quantize

LAYERS, REPEATS = 4, 20
_CHANGE = functools.partial(dataclasses.replace, DEFAULT)
_VECTOR = Operand(scaling="vector")
POLICIES = {
    "default": DEFAULT,
    "lean": LEAN,
    "paper": PAPER,
    "e5m2-gradients": _CHANGE(g=Operand(format=E5M2)),
    "vector": _CHANGE(x=_VECTOR, w=_VECTOR, g=_VECTOR),
    "fast-backward": _CHANGE(backward="fast"),
    "promoted-forward": _CHANGE(forward="promoted"),
    "in-forward": _CHANGE(kept=Kept(in_forward=True)),
}
# Preset, compute dtype, tokens, and batches: of the comparison and of the timing.
SIZES = {
    "7b": ("llama2-7b", jnp.bfloat16, 2048, 2, 8),
    "micro": ("micro", jnp.float32, 64, 2, 2),
}


def in_group(group: int | None, x_BTH):
    """x from E4M3 codes with a scale for `group` neighbours; None: for all of x."""
    x = dequantize(quantize(x_BTH, group=group), group=group)
    return x.astype(x_BTH.dtype)


def in_block(side: int, x_BTH):
    """x from E4M3 codes with a scale for `side` tokens x `side` channels."""
    B, T, H = x_BTH.shape
    x_BRSCS = x_BTH.reshape(B, T // side, side, H // side, side)
    scale = jnp.maximum(largest(x_BRSCS, (2, 4)) / E4M3.max, TINY)
    codes = cast(x_BRSCS.astype(jnp.float32) / scale, E4M3)
    return (codes.astype(jnp.float32) * scale).reshape(x_BTH.shape).astype(x_BTH.dtype)


STORED = {
    "group 1x128": functools.partial(in_group, 128),
    "group 1x16": functools.partial(in_group, 16),
    "block 4x4": functools.partial(in_block, 4),
    "tensor": functools.partial(in_group, None),
}


class StoredNorm(nnx.RMSNorm):
    """Flax's RMSNorm of an input that went through FP8."""

    def __init__(self, *args, store, **kwargs):
        super().__init__(*args, **kwargs)
        self.store = store

    def __call__(self, x):
        """The norm of `x` as `store` gives it back."""
        return super().__call__(self.store(x))


class Stack:
    """Blocks with parameters of shape (layers, in, out), under one kind of layers."""

    def __init__(self, config: llama.LlamaConfig, layers: llama.Layers):
        make = lambda: llama.DecoderBlock(config, layers, rngs=nnx.Rngs(0))
        self.graph, state = nnx.split(nnx.eval_shape(make))
        self.shapes = nnx.to_pure_dict(state)

    def draw(self, key, layers: int):
        """Kernels N(0, 1 / fan-in), norms 1."""
        leaves, tree = jax.tree.flatten(self.shapes)
        keys = jax.random.split(key, len(leaves))

        def one(key, leaf):
            shape = (layers, *leaf.shape)
            if leaf.ndim == 1:
                return jnp.ones(shape, leaf.dtype)
            return (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(leaf.dtype)

        return tree.unflatten(map(one, keys, leaves))

    def outputs(self, params, x_BTH):
        """(layers, B, T, H): the residual stream after each block."""

        def block(x_BTH, params):
            y_BTH = nnx.merge(self.graph, params)(x_BTH)
            return y_BTH, y_BTH

        with jax.numpy_dtype_promotion("standard"):
            return lax.scan(block, x_BTH, params)[1]

    def loss(self, params, x_BTH, weight_BTH):
        """mean(weight * output), of which every gradient is linear in `weight`."""
        y_BTH = self.outputs(params, x_BTH)[-1]
        return jnp.mean(y_BTH.astype(jnp.float32) * weight_BTH.astype(jnp.float32))

    def gradients(self, params, x_BTH, weight_BTH):
        """The loss, and its gradients by the parameters and by x."""
        return jax.value_and_grad(self.loss, argnums=(0, 1))(params, x_BTH, weight_BTH)


def make_stack(config, policy) -> Stack:
    """The blocks under an FP8 policy."""
    return Stack(config, llama.fp8_layers(policy))


def draw_inputs(key, shape, dtype, kind: str):
    """N(0, 1); with kind tokens or channels, times exp(N(0, 1)) for each of those."""
    of_x, of_size = jax.random.split(key)
    x_BTH = jax.random.normal(of_x, shape)
    if kind != "gaussian":
        wide = (1, shape[1], 1) if kind == "tokens" else (1, 1, shape[2])
        x_BTH = x_BTH * jnp.exp(jax.random.normal(of_size, wide))
    return x_BTH.astype(dtype)


@jax.jit
def _sums(got, want):
    """got . want, |got|^2 and |want|^2 in float32, over all but the first axis."""
    got, want = (x.astype(jnp.float32) for x in (got, want))
    over = tuple(range(1, got.ndim))
    return [jnp.sum(a * b, over) for a, b in ((got, want), (got, got), (want, want))]


def compare(got, want) -> dict[str, tuple[float, float]]:
    """(cosine, ratio of norms) of each matrix, and of all together under "together"."""
    found, all_sums = {}, []
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, expected), leaf in zip(paths, jax.tree.leaves(got), strict=True):
        if leaf.ndim < 3:
            continue  # a norm's scale
        name = "/".join(str(part.key) for part in path[:-1])
        rows = list(zip(*map(jax.device_get, _sums(leaf, expected)), strict=True))
        all_sums += rows
        found |= {f"layer {i} {name}": _figures(row) for i, row in enumerate(rows)}
    total = [math.fsum(map(float, column)) for column in zip(*all_sums, strict=True)]
    return {"together": _figures(total), **found}


def _figures(sums) -> tuple[float, float]:
    dot, got, want = map(float, sums)
    return dot / math.sqrt(got * want), math.sqrt(got / want)


def _kind(line: str) -> str | None:
    for mark, name in (
        ("__cublas$lt$matmul$f8", "cuBLASLt FP8"),
        ("__cublas", "cuBLAS, wider"),
        ("__triton", "Triton fusion"),
        ("__cudnn$fmha", "cuDNN attention"),
        ("__cudnn", "cuDNN, other"),
    ):
        if mark in line:
            return name
    return None


def products(text: str) -> dict[str, int]:
    """How often a compiled program's text calls each kind of matrix product."""
    dtypes, found = {}, collections.Counter()
    for name, dtype in re.findall(r"%?([\w.-]+) = (\w+)\[", text):
        dtypes[name] = dtype
    for line in text.splitlines():
        dot = re.search(r" (?:scaled-)?dot\((.*?)\)", line)
        if dot:
            named = re.findall(r"%?([\w.-]+)(?:,|$)", dot.group(1))
            fp8 = [dtypes.get(name, "").startswith("f8") for name in named[:2]]
            found["dot of two FP8 operands" if all(fp8) else "dot, wider"] += 1
        elif (kind := _kind(line)) and kind != "Triton fusion":
            found[kind] += 1
    return dict(found)


@functools.cache
def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _line(case, policy, metric, value, unit="") -> None:
    row = {"benchmark": "fidelity", "case": case, "implementation": policy}
    row |= {"metric": metric, "value": value, "unit": unit}
    row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    row |= {"commit": _commit(), "date": datetime.date.today().isoformat()}
    print(json.dumps(row), flush=True)


class Bench:
    """The sizes of a run, and what its measurements share."""

    def __init__(self, size: str, seeds: int):
        preset, dtype, self.tokens, self.batch, self.timed_batch = SIZES[size]
        self.config = dataclasses.replace(
            llama.PRESETS[preset], dtype=dtype, param_dtype=dtype
        )
        self.seeds, self.size = seeds, size

    def inputs(self, seed: int, batch: int, layers: int, kind: str = "gaussian"):
        """Parameters, x and the functional's weights."""
        keys = jax.random.split(jax.random.key(seed), 3)
        shape = (batch, self.tokens, self.config.hidden)
        params = jax.jit(make_stack(self.config, BF16).draw, static_argnums=1)(
            keys[0], layers
        )
        x = draw_inputs(keys[1], shape, self.config.dtype, kind)
        return params, x, draw_inputs(keys[2], shape, self.config.dtype, "gaussian")

    def gradients(self) -> None:
        """Every policy against bf16, seed by seed."""
        case = f"{self.size}, {LAYERS} blocks, {self.batch} x {self.tokens} tokens"
        run = jax.jit(make_stack(self.config, BF16).gradients)
        given = [self.inputs(s, self.batch, LAYERS) for s in range(self.seeds)]
        wanted = [run(*inputs)[1][0] for inputs in given]
        for name, policy in POLICIES.items():
            began = time.perf_counter()
            lowered = jax.jit(make_stack(self.config, policy).gradients).lower(
                *given[0]
            )
            compiled = lowered.compile()
            _line(case, name, "compile", round(time.perf_counter() - began, 1), "s")
            for kind, count in products(compiled.as_text()).items():
                _line(case, name, f"products: {kind}", count, "in the program")
            for seed, inputs in enumerate(given):
                loss, (grads, _) = compiled(*inputs)
                found = compare(grads, wanted[seed])
                self._gradient_lines(f"{case}, seed {seed}", name, loss, found)
            params, x, weight = given[0]
            out = compiled(params, x.at[0, 0, 0].set(jnp.nan), weight)[0]
            _line(case, name, "loss is NaN after a NaN", bool(jnp.isnan(out)))

    def _gradient_lines(self, case, name, loss, found) -> None:
        _line(case, name, "loss is finite", bool(jnp.isfinite(loss)))
        for matrix, (cosine, ratio) in found.items():
            _line(case, name, f"cosine, {matrix}", round(cosine, 5))
            _line(case, name, f"norm ratio, {matrix}", round(ratio, 5))
        together = found.pop("together")
        cosines, ratios = zip(*found.values(), strict=True)
        _line(case, name, "cosine, lowest matrix", round(min(cosines), 5))
        far = max(ratios, key=lambda ratio: abs(ratio - 1))
        _line(case, name, "norm ratio, farthest from 1", round(far, 5))
        lowest = f"together {together}, lowest {min(cosines):.4f}, farthest {far:.4f}"
        print(f"{case}, {name}: {lowest}", file=sys.stderr)

    def forward(self) -> None:
        """The output after each block, with what norms read stored in FP8."""
        plain = jax.jit(make_stack(self.config, BF16).outputs)
        for name, store in STORED.items():
            norm = functools.partial(StoredNorm, store=store)
            stored = jax.jit(Stack(self.config, llama.Layers(norm=norm)).outputs)
            for kind in ("gaussian", "tokens", "channels"):
                params, x, _ = self.inputs(0, self.batch, LAYERS, kind)
                errors = _relative_error(stored(params, x), plain(params, x))
                for layer, error in enumerate(jax.device_get(errors)):
                    what = f"relative mean square error after block {layer}"
                    _line(f"{self.size} forward, {kind}", name, what, float(error))

    def nan(self) -> None:
        """One NaN in the input."""
        params, x, _ = self.inputs(0, self.batch, LAYERS)
        for name in ("bf16", "default", "lean", "paper"):
            policy = BF16 if name == "bf16" else POLICIES[name]
            run = jax.jit(make_stack(self.config, policy).outputs)
            out = run(params, x.at[0, 0, 0].set(jnp.nan))[-1]
            share = float(jnp.mean(jnp.isnan(out).astype(jnp.float32)))
            _line(f"{self.size} nan", name, "NaN in the output", round(share, 4))

    def times(self) -> None:
        """One block, forward and backward; bf16 twice, for the spread."""
        case = f"{self.size}, 1 block, {self.timed_batch} x {self.tokens} tokens"
        inputs = self.inputs(0, self.timed_batch, 1)
        steps = {}
        chosen = {"bf16": BF16, "default": DEFAULT, "lean": LEAN, "paper": PAPER}
        for name, policy in (chosen | {"vector": POLICIES["vector"]}).items():
            lowered = jax.jit(make_stack(self.config, policy).gradients).lower(*inputs)
            steps[name] = lowered.compile()
            used = steps[name].memory_analysis().temp_size_in_bytes / 2**20
            _line(case, name, "temporaries", round(used), "MiB")
            for kind, count in products(steps[name].as_text()).items():
                _line(case, name, f"products: {kind}", count, "in the program")
        for turn in (1, 2):  # their difference is the spread
            for name, step in steps.items():
                spent = [_seconds(step, inputs) for _ in range(REPEATS + 3)][3:]
                took = round(1000 * statistics.median(spent), 3)
                _line(case, name, f"step_ms, turn {turn}", took, "ms")


@jax.jit
def _relative_error(got, want):
    got, want = (x.astype(jnp.float32) for x in (got, want))
    mean = lambda x: jnp.mean(jnp.square(x), tuple(range(1, x.ndim)))
    return mean(got - want) / mean(want)


def _seconds(step, inputs) -> float:
    began = time.perf_counter()
    jax.block_until_ready(step(*inputs))
    return time.perf_counter() - began


def main() -> None:
    """Prints one JSON line a figure."""
    parser = argparse.ArgumentParser(description="Gradients and outputs in FP8.")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--seeds", type=int, default=2, help="draws of the weights")
    parts = ("gradients", "forward", "nan", "times")
    parser.add_argument("--only", choices=parts, help="this part only")
    given = parser.parse_args()
    bench = Bench(given.size, given.seeds)
    for part in [given.only] if given.only else parts:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
