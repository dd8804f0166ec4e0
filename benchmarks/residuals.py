"""Bytes that a block keeps between forward and backward, from programs for an H200.

    python -m benchmarks.residuals                          every row; some minutes
    python -m benchmarks.residuals --block=llama2-7b --policy=default --form=scan

Needs no GPU: XLA compiles for an NVIDIA H200 that isn't there (`benchmarks.h200`).

Method. Compile loss and gradients of L blocks for two L; the slope of the temporaries
over L is what one block keeps, as what the blocks share cancels. Values are in U, two
bytes for each element of a token (a pixel, for the CNN).

    scan      one block under `lax.scan`
    unroll    the same, two blocks to a turn
    apart     blocks one after the other, each with its own parameters. Gradients are
              reduced to their mean square: as results they would lend their memory to
              what is kept, which would then not be seen

Each line has the keys benchmark, case, implementation, metric, value, unit, device,
jax, commit and date.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import subprocess
import sys

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp

from benchmarks import h200
from coat_jax.models import cnn, llama, olmo, vit
from coat_jax.policy import PRESETS

FORMS = ("scan", "unroll", "apart")
BATCH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A kind of block: how it is made for a policy, and what goes in.

    make(policy) -> an NNX module; shape(batch) -> that of the residual stream.
    """

    make: object
    shape: object


def _llama(preset, policy):
    config = dataclasses.replace(
        llama.PRESETS[preset], dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layers = llama.fp8_layers(policy, implementation="cudnn")
    return llama.DecoderBlock(config, layers, rngs=nnx.Rngs(0))


def _olmo(policy):
    config = dataclasses.replace(
        olmo.PRESETS["7b"], dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layers = olmo.fp8_layers(policy, implementation="cudnn")
    return llama.DecoderBlock(config, layers, rngs=nnx.Rngs(0))


def _vit(policy):
    config = dataclasses.replace(
        vit.PRESETS["b16"], dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layers = vit.fp8_layers(policy, implementation="cudnn")
    return vit.EncoderBlock(config, layers, rngs=nnx.Rngs(0))


def _cnn(policy):
    config = dataclasses.replace(
        cnn.PRESETS["resnet18"], dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layers = cnn.fp8_layers(policy)
    return cnn.Block(config, layers, 128, 128, rngs=nnx.Rngs(0))


BLOCKS = {
    "llama2-7b": Block(
        make=functools.partial(_llama, "llama2-7b"), shape=lambda b: (b, 2048, 4096)
    ),
    "llama3-8b": Block(
        make=functools.partial(_llama, "llama3-8b"), shape=lambda b: (b, 2048, 4096)
    ),
    "olmo-7b": Block(make=_olmo, shape=lambda b: (b, 2048, 4096)),
    "vit-b16": Block(make=_vit, shape=lambda b: (32 * b, 196, 768)),
    "cnn-128": Block(make=_cnn, shape=lambda b: (64 * b, 28, 28, 128)),
}


def program(block: Block, policy, form: str, layers: int, batch: int):
    """(a function of parameters and x, their shapes) of that many blocks."""
    with jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(nnx.eval_shape(lambda: block.make(policy)))
    one = nnx.to_pure_dict(state)
    x = jax.ShapeDtypeStruct(block.shape(batch), jnp.bfloat16)
    run = lambda x, params: nnx.merge(graph, params)(x)
    if form == "apart":
        return _apart(run), ([one] * layers, x)
    stack = lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype)
    return _scanned(run, 2 if form == "unroll" else 1), (jax.tree.map(stack, one), x)


def _mean_square(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _scanned(run, unroll: int):
    def loss(params, x):
        with jax.numpy_dtype_promotion("standard"):
            step = lambda x, params: (run(x, params), None)
            return _mean_square(lax.scan(step, x, params, unroll=unroll)[0])

    return jax.value_and_grad(loss, argnums=(0, 1))


def _apart(run):
    def loss(params, x):
        with jax.numpy_dtype_promotion("standard"):
            return _mean_square(functools.reduce(run, params, x))

    def reduced(params, x):
        value, (dparams, dx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return value, dx, jax.tree.map(_mean_square, dparams)

    return reduced


@functools.cache
def compiled(name: str, policy: str, form: str, layers: int):
    """The program of `layers` blocks, compiled for an H200."""
    fn, shapes = program(BLOCKS[name], PRESETS[policy], form, layers, BATCH)
    return h200.compile_for(fn, *shapes)


def units_kept(name: str, policy: str, form: str) -> float:
    """What one block keeps, in U."""
    # Scans cost no more to compile where they are long.
    few, many = (2, 4) if form == "apart" else (8, 24)
    bytes_of = lambda layers: (
        compiled(name, policy, form, layers).memory_analysis().temp_size_in_bytes
    )
    grown = (bytes_of(many) - bytes_of(few)) / (many - few)
    return grown / (2 * math.prod(BLOCKS[name].shape(BATCH)))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _line(name, policy, form, metric, value, unit) -> str:
    return json.dumps(
        {
            "benchmark": "residuals",
            "case": f"{name} {form}",
            "implementation": policy,
            "metric": metric,
            "value": round(value, 3),
            "unit": unit,
            "device": "compiled for NVIDIA H200",
            "jax": jax.__version__,
            "commit": _commit(),
            "date": datetime.date.today().isoformat(),
        }
    )


def main() -> None:
    """Prints one JSON line a row."""
    parser = argparse.ArgumentParser(description="Bytes kept by a block, compiled.")
    parser.add_argument("--block", choices=BLOCKS, help="this block only")
    parser.add_argument("--policy", choices=PRESETS, help="this policy only")
    parser.add_argument("--form", choices=FORMS, help="this form only")
    given = parser.parse_args()
    if reason := h200.missing():
        sys.exit(f"cannot compile for an H200: {reason}")
    for name in [given.block] if given.block else BLOCKS:
        for policy in [given.policy] if given.policy else PRESETS:
            for form in [given.form] if given.form else FORMS:
                kept = units_kept(name, policy, form)
                print(_line(name, policy, form, "kept", kept, "U"), flush=True)


if __name__ == "__main__":
    main()
