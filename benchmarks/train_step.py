"""A whole training step of Llama-2-7B or 13B on one GPU: bytes, time, tokens a second.

    python -m benchmarks.train_step                          on a GPU
    python -m benchmarks.train_step --compile-only           bytes alone, needs no GPU
    python -m benchmarks.train_step --size=13b --batch=1 4
    python -m benchmarks.train_step --size=micro             tries the script on a CPU

bfloat16 parameters, cuDNN attention, the layers in one `lax.scan`, random tokens,
sequences of 2048, every buffer of the state donated. Under an FP8 policy the optimizer
is `fp8_adamw` by `apply_fused` with stochastic rounding; under "bf16" and "bf16 remat"
it is optax.adamw with float32 moments. A step that needs more than the device has is
said to, and the next one is tried.

    --step=layerwise   a layer is updated as soon as its gradient is known, and logits
                       are made in chunks (`coat_jax.layerwise_step`); what needs all
                       gradients, as optax.adamw does, has the chunks alone
    --step=chunked     all gradients, logits in chunks
    --step=ordinary    all gradients, all logits

    memory        of the compiled step: arguments, results that reuse none, temporaries
    device peak   the most that this process has had in use. Batches go from small to
                  large, and FP8 before bfloat16, so that it is the step's own where it
                  has grown
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import optax

from benchmarks import h200, harness
from coat_jax import layerwise
from coat_jax.models import llama
from coat_jax.optimizer import apply_fused, fp8_adamw
from coat_jax.policy import BF16, DEFAULT, LEAN, PAPER, Operand, Policy

GIB = 2**30
_VECTOR = Operand(scaling="vector")
_PRESETS = {"7b": "llama2-7b", "13b": "llama2-13b", "micro": "micro"}
SIZES = {size: llama.PRESETS[name] for size, name in _PRESETS.items()}
TOKENS = {"7b": 2048, "13b": 2048, "micro": 64}
POLICIES = {
    "default": DEFAULT,
    "lean": LEAN,
    "paper": PAPER,
    "vector": dataclasses.replace(DEFAULT, x=_VECTOR, w=_VECTOR, g=_VECTOR),
    "bf16": BF16,
    "bf16 remat": BF16,
}
RATE = 3e-4


class State(NamedTuple):
    """count: steps done. params and opt: trees."""

    count: Any
    params: Any
    opt: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of one model under one policy."""

    config: llama.LlamaConfig
    policy: Policy
    attention: str | None
    how: str = "ordinary"

    @property
    def fp8(self) -> bool:
        """Whether moments are FP8, and updates fused."""
        return not self.policy.plain

    @property
    def layers(self) -> llama.Layers:
        """What the model is made of."""
        return llama.fp8_layers(self.policy, implementation=self.attention)

    @property
    def tx(self):
        """The optimizer."""
        make = fp8_adamw if self.fp8 else optax.adamw
        return make(RATE, b1=0.9, b2=0.95, weight_decay=0.1)

    def shapes(self) -> State:
        """The state as ShapeDtypeStructs."""
        make = lambda: llama.init_params(
            self.config, jax.random.key(0), layers=self.layers
        )
        return jax.eval_shape(lambda: self._with_params(make()))

    def _with_params(self, params) -> State:
        # optax's second moment has the dtype of what it is made for.
        made_for = params if self.fp8 else _wide(params)
        return State(jnp.zeros([], jnp.int32), params, self.tx.init(made_for))

    def draw(self) -> State:
        """A state of random parameters, drawn a layer at a time to need no more."""
        leaves, tree = jax.tree.flatten(self.shapes().params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        params = tree.unflatten(map(_draw, keys, leaves))
        return jax.jit(self._with_params, donate_argnums=0)(params)

    def loss(self, params, windows):
        """The mean cross-entropy."""
        if self.how == "ordinary":
            return llama.make_loss(self.config, layers=self.layers)(params, windows)
        return self.parts.loss(params, windows)

    @property
    def parts(self) -> layerwise.Parts:
        """The model as embedding, layers and loss."""
        return llama.make_parts(self.config, layers=self.layers)

    def __call__(self, state: State, windows):
        """The next state, and the loss."""
        with jax.numpy_dtype_promotion("standard"):
            if self.fp8:
                loss, *new = self._fp8(state, windows)
            else:
                loss, grads = jax.value_and_grad(self.loss)(state.params, windows)
                updates, opt = self.tx.update(_wide(grads), state.opt, state.params)
                new = optax.apply_updates(state.params, updates), opt
        return State(state.count + 1, *new), loss

    def _fp8(self, state: State, windows):
        """The loss, new parameters and the optimizer's state."""
        key = jax.random.fold_in(jax.random.key(1), state.count)
        if self.how == "layerwise":
            return layerwise.layerwise_step(
                self.parts, self.tx, windows, state.opt, state.params, key=key
            )
        loss, grads = jax.value_and_grad(self.loss)(state.params, windows)
        new = apply_fused(self.tx, grads, state.opt, state.params, key=key)
        return loss, *new


def _wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@functools.partial(jax.jit, static_argnums=1)
def _draw(key, leaf):
    """N(0, 1 / fan-in), drawn in float32; norms 1."""
    if leaf.ndim == 1 or min(leaf.shape) < 32 and leaf.ndim == 2:
        return jnp.ones(leaf.shape, leaf.dtype)

    def one(key):
        x = jax.random.normal(key, leaf.shape[-2:]) * leaf.shape[-2] ** -0.5
        return x.astype(leaf.dtype)

    if leaf.ndim == 2:
        return one(key)
    return lax.map(one, jax.random.split(key, leaf.shape[0]))


def make(size: str, policy: str, how: str = "ordinary") -> Step:
    """The step of a size under a policy, made as `--step` says."""
    dtype = jnp.float32 if size == "micro" else jnp.bfloat16
    config = dataclasses.replace(
        SIZES[size], dtype=dtype, param_dtype=dtype, remat=policy == "bf16 remat"
    )
    attention = None if size == "micro" else "cudnn"
    made = POLICIES[policy]
    if made.plain and how == "layerwise":
        how = "chunked"
    return Step(config=config, policy=made, attention=attention, how=how)


def operations(config: llama.LlamaConfig, batch: int, tokens: int) -> float:
    """Of one step's products: 6 a parameter and token, and those of causal attention.

    Recomputation does not count.
    """
    matrices = llama.count_params(config) - config.vocab * config.hidden
    attention = config.layers * config.hidden * tokens
    return 6.0 * batch * tokens * (matrices + attention)


def compiled(step: Step, batch: int, tokens: int, *, here: bool):
    """The step as a program: for this device, or for an H200 that is not there."""
    windows = jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32)
    if here:
        return jax.jit(step, donate_argnums=0).lower(step.shapes(), windows).compile()
    return h200.compile_for(step, step.shapes(), windows, donate=(0,))


def run(step: Step, program, batch: int, tokens: int, repeats: int) -> float:
    """Seconds a step."""
    shape = (batch, tokens + 1)
    windows = jax.random.randint(jax.random.key(2), shape, 0, step.config.vocab)
    return harness.time(
        program, step.draw(), windows, donate=(0,), repeats=repeats, calls=1
    )


def figures(
    step: Step, batch: int, tokens: int, *, compile_only: bool, repeats: int
) -> Iterator[tuple]:
    """(metric, value, unit) of one step, as they become known."""
    program = compiled(step, batch, tokens, here=not compile_only)
    found = harness.memory_of(program)
    state = found["arguments"] / GIB
    yield "arguments", state, "GiB"
    yield "temporaries", found["temporaries"] / GIB, "GiB"
    yield "memory", found["total"] / GIB, "GiB"
    if compile_only:
        return
    seconds = run(step, program, batch, tokens, repeats)
    yield "time", 1e3 * seconds, "ms"
    yield "rate", batch * tokens / seconds, "tokens/s"
    done = operations(step.config, batch, tokens) / seconds
    yield "products", done / 1e12, "TFLOP/s"
    if (peak := harness.device_peak()) is not None:
        yield "device peak", peak / GIB, "GiB"


def measure(size: str, policy: str, batch: int, step: Step, **how) -> None:
    """Records the figures of one step, or says that it does not fit."""
    tokens = TOKENS[size]
    put = functools.partial(
        harness.record,
        benchmark="train_step",
        case=f"{size}, {batch} x {tokens} tokens",
        implementation=f"{policy}, {step.how}",
        device="compiled for NVIDIA H200" if how["compile_only"] else None,
    )
    said = f"{size}, {batch} x {tokens} tokens, {policy}, {step.how}:"
    try:
        for metric, value, unit in figures(step, batch, tokens, **how):
            put(metric=metric, value=value, unit=unit)
            print(said, metric, harness.shown(value), unit, flush=True)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(said, "out of memory", flush=True)
        put(metric="time", value=math.inf, unit="ms")


def main() -> None:
    """Prints a table, and appends to the results."""
    parser = argparse.ArgumentParser(description="Training steps of Llama.")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    names = ["default", "lean", "bf16", "bf16 remat"]
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=names)
    kinds = ("layerwise", "chunked", "ordinary")
    parser.add_argument("--step", choices=kinds, default="layerwise")
    parser.add_argument("--compile-only", action="store_true", help="no GPU needed")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    harness.prepare()
    how = {"compile_only": given.compile_only, "repeats": given.repeats}
    fine = True
    for policy in given.policy:
        step = make(given.size, policy, given.step)
        for batch in sorted(given.batch):
            one = functools.partial(measure, given.size, policy, batch, step, **how)
            fine &= harness.attempt(f"{batch} sequences, {policy}", one)
    print(harness.table("train_step"))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
