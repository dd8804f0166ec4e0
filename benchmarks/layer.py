"""A Llama-2-7B layer, forward and backward: time and bytes under each policy.

    python -m benchmarks.layer                          on a GPU
    python -m benchmarks.layer --batch=1 --layers=1     one layer, in no scan
    python -m benchmarks.layer --policy=default --profile
    python -m benchmarks.layer --compile-only           bytes alone, needs no GPU
    python -m benchmarks.layer --size=micro             tries the script on a CPU

Four layers in one `lax.scan` (with --layers=1: one layer, without), bfloat16 weights
and activations, cuDNN attention, sequences of 2048. The program is the loss and its
gradients by the parameters and by x, of a fixed random linear functional of the output.

    time          one layer's share
    products      operations of products and of causal attention, without recomputation
    of bf16       time over that of the bf16 policy in the same run
    temporaries   one layer's share of the compiled program's

"bf16 remat" recomputes each layer; "promoted" adds all products in float32; "vector"
scales by token and channel; "flax fp8_ops" is the same block with flax's own FP8
products (`benchmarks.flax_peer`).
"""

import argparse
import dataclasses
import functools
import sys
from typing import Any

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp

from benchmarks import device_profile, flax_peer, h200, harness
from coat_jax.models import llama
from coat_jax.policy import BF16, DEFAULT, LEAN, PAPER, Operand

_CHANGE = functools.partial(dataclasses.replace, DEFAULT)
_VECTOR = Operand(scaling="vector")
POLICIES = {
    "bf16": BF16,
    "bf16 remat": BF16,
    "default": DEFAULT,
    "vector": _CHANGE(x=_VECTOR, w=_VECTOR, g=_VECTOR),
    "lean": LEAN,
    "paper": PAPER,
    "promoted": _CHANGE(forward="promoted"),
    "flax fp8_ops": None,
}
# Preset, dtype, tokens, attention.
SIZES: dict[str, tuple] = {
    "7b": ("llama2-7b", jnp.bfloat16, 2048, "cudnn"),
    "micro": ("micro", jnp.float32, 64, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one size under one policy, one after the other."""

    config: llama.LlamaConfig
    policy: str
    attention: str | None
    layers: int

    def parts(self):
        """(block(params, x), shapes of one block's parameters)."""
        if self.policy == "flax fp8_ops":
            block = flax_peer.Block(self.config, self.attention)
            return block.apply, flax_peer.shapes(self.config)
        made_of = llama.fp8_layers(POLICIES[self.policy], implementation=self.attention)
        make = lambda: llama.DecoderBlock(self.config, made_of, rngs=nnx.Rngs(0))
        graph, state = nnx.split(nnx.eval_shape(make))
        run = lambda params, x: nnx.merge(graph, params)(x)
        run = jax.checkpoint(run) if self.policy == "bf16 remat" else run
        return run, nnx.to_pure_dict(state)

    def shapes(self):
        """Parameters as ShapeDtypeStructs, (layers, ...)."""
        add = lambda s: jax.ShapeDtypeStruct((self.layers, *s.shape), s.dtype)
        return jax.tree.map(add, self.parts()[1])

    def draw(self):
        """Matrices N(0, 1 / fan-in), drawn in float32; 1 elsewhere, histories 0."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.shapes())
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return tree.unflatten(
            jnp.zeros(leaf.shape, leaf.dtype)
            if "amax" in jax.tree_util.keystr(path)
            else _draw(key, leaf)
            for key, (path, leaf) in zip(keys, leaves, strict=True)
        )

    def gradients(self, params, x_BTH, weight_BTH):
        """The loss, and its gradients by the parameters and by x."""
        run, _ = self.parts()

        def loss(params, x_BTH):
            with jax.numpy_dtype_promotion("standard"):
                if self.layers == 1:
                    y_BTH = run(jax.tree.map(lambda p: p[0], params), x_BTH)
                else:
                    step = lambda x, params: (run(params, x), None)
                    y_BTH, _ = lax.scan(step, x_BTH, params)
            return jnp.mean(y_BTH.astype(jnp.float32) * weight_BTH.astype(jnp.float32))

        # flax's amax history has a dtype of its own, by which JAX differentiates.
        return jax.value_and_grad(loss, argnums=(0, 1))(params, x_BTH)


@functools.partial(jax.jit, static_argnums=1)
def _draw(key, leaf):
    if leaf.ndim < 3:
        return jnp.ones(leaf.shape, leaf.dtype)
    x = jax.random.normal(key, leaf.shape) * leaf.shape[1] ** -0.5
    return x.astype(leaf.dtype)


def make(size: str, policy: str, layers: int) -> Layers:
    """The layers of a size under a policy."""
    preset, dtype, _, attention = SIZES[size]
    config = dataclasses.replace(llama.PRESETS[preset], dtype=dtype, param_dtype=dtype)
    return Layers(config=config, policy=policy, attention=attention, layers=layers)


def operations(config: llama.LlamaConfig, batch: int, tokens: int) -> float:
    """Of one layer's products, forward and backward."""
    D = config.head_size
    widths = (2 * config.heads + 2 * config.kv_heads) * D + 3 * config.ffn
    causal = config.heads * D * tokens
    return 6.0 * batch * tokens * (config.hidden * widths + causal)


class Bench:
    """A run: its sizes, and the time of bf16 to compare with."""

    def __init__(self, size: str, layers: int, *, compile_only: bool, repeats: int):
        self.size, self.layers, self.repeats = size, layers, repeats
        self.compile_only, self.bf16 = compile_only, None

    def program(self, what: Layers, batch: int):
        """The gradients as a program, and the shapes it takes."""
        _, dtype, tokens, _ = SIZES[self.size]
        x = jax.ShapeDtypeStruct((batch, tokens, what.config.hidden), dtype)
        given = (what.shapes(), x, x)
        if self.compile_only:
            return h200.compile_for(what.gradients, *given), given
        return jax.jit(what.gradients).lower(*given).compile(), given

    def measure(self, policy: str, batch: int, *, traced: bool) -> None:
        """Records one policy's figures."""
        what = make(self.size, policy, self.layers)
        program, (_, x, _) = self.program(what, batch)
        put = functools.partial(self._record, policy, batch)
        used = harness.memory_of(program)["temporaries"] / self.layers
        put("temporaries", used / 2**20, "MiB")
        if self.compile_only:
            return
        keys = jax.random.split(jax.random.key(1), 2)
        draw = lambda key: jax.random.normal(key, x.shape).astype(x.dtype)
        args = (what.draw(), *map(draw, keys))
        seconds = harness.time(program, *args, repeats=self.repeats) / self.layers
        put("time", 1e3 * seconds, "ms")
        done = operations(what.config, batch, SIZES[self.size][2]) / seconds
        put("products", done / 1e12, "TFLOP/s")
        if policy == "bf16":
            self.bf16 = seconds
        if self.bf16:
            put("of bf16", seconds / self.bf16, "")
        if traced:
            self.trace(policy, batch, lambda: program(*args))

    def trace(self, policy: str, batch: int, call) -> None:
        """Prints one layer's time by kernel."""
        calls = 3
        events = device_profile.trace(lambda: [call() for _ in range(calls)])
        found = device_profile.kernels(events)
        print(f"--- {self.size}, {batch} sequences, {policy}: us a layer")
        print(device_profile.summary(found, turns=calls * self.layers), flush=True)

    def _record(self, policy, batch, metric: str, value: float, unit: str) -> Any:
        form = f"{self.layers} in a scan" if self.layers > 1 else "1, no scan"
        case = f"{self.size}, {form}, {batch} x {SIZES[self.size][2]} tokens"
        print(f"{case}, {policy}: {metric} {harness.shown(value)} {unit}", flush=True)
        return harness.record(
            benchmark="layer",
            case=case,
            implementation=policy,
            metric=metric,
            value=value,
            unit=unit,
            device="compiled for NVIDIA H200" if self.compile_only else None,
        )


def main() -> None:
    """Prints a table, and appends to the results."""
    parser = argparse.ArgumentParser(description="A Llama layer's time and bytes.")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--layers", type=int, default=4, help="1: in no scan")
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=[*POLICIES])
    parser.add_argument("--profile", action="store_true", help="print time by kernel")
    parser.add_argument("--compile-only", action="store_true", help="no GPU needed")
    parser.add_argument("--ceilings", action="store_true", help="measure these first")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    harness.prepare()
    if given.ceilings:
        harness.ceilings(repeats=given.repeats)
    fine = True
    for batch in given.batch:
        bench = Bench(
            given.size,
            given.layers,
            compile_only=given.compile_only,
            repeats=given.repeats,
        )
        for policy in given.policy:
            measure = functools.partial(bench.measure, policy, batch)
            measure = functools.partial(measure, traced=given.profile)
            fine &= harness.attempt(f"{batch} sequences, {policy}", measure)
    print(harness.table())
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
