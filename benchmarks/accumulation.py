"""What it costs, and what is lost, to sum over tokens: in products and micro-batches.

    python -m benchmarks.accumulation                   needs a GPU
    python -m benchmarks.accumulation --size=micro      tries the script on a CPU

products       weight gradients x^T g over T tokens, of E4M3 operands. Tensor cores add
               with about 14 bits ("fast"), or in float32 after every few terms
               ("promoted"). Their error against the float32 product of the same codes:
               relative, in the root of mean squares, and the slope of a straight line
               through zero, which a bias takes below 1. For Gaussian operands and for
               positive ones, whose sums are of one sign.
micro-batches  gradients of one Llama-2-7B layer for 8 sequences, in n parts: summed in
               float32 or bfloat16 by a `lax.scan`, or by `optax.MultiSteps`, whose
               running mean has the gradients' dtype. Slope and cosine are to bfloat16
               layers' gradients for all sequences at once; under "fast" the products
               of the backward are not promoted.

On a CPU products are exact, so that only the script can be tried there.
"""

import argparse
import dataclasses
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
import optax

from benchmarks import harness, layer
from coat_jax.formats import E4M3, cast
from coat_jax.policy import DEFAULT

# Channels in and out of the products' weight, tokens, sequences, parts.
SIZES: dict[str, tuple] = {
    "7b": (4096, 4096, (2048, 8192, 32768), 8, (1, 2, 4, 8)),
    "micro": (32, 48, (64, 128), 4, (1, 2)),
}
ADD = {"fast": lax.Precision.DEFAULT, "promoted": lax.Precision.HIGHEST}
SUMS = ("float32 sum", "bfloat16 sum", "optax.MultiSteps")
layer.POLICIES["fast"] = dataclasses.replace(DEFAULT, backward="fast")


def compare(got, want) -> dict[str, float]:
    """Slope, cosine and relative error of a tree of matrices, as one vector."""
    rows = [
        _sums(g, w)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    dot, got_sq, want_sq, off = (
        math.fsum(map(float, s)) for s in zip(*rows, strict=True)
    )
    return {
        "slope": dot / want_sq,
        "cosine": dot / math.sqrt(got_sq * want_sq),
        "relative error": math.sqrt(off / want_sq),
    }


@jax.jit
def _sums(got, want):
    got, want = (x.astype(jnp.float32) for x in (got, want))
    pairs = ((got, want), (got, got), (want, want), (got - want, got - want))
    return [jnp.sum(a * b) for a, b in pairs]


def operands(kind: str, tokens: int, channels: int, key):
    """E4M3 codes of (channels, tokens), the contracted axis innermost."""
    x = jax.random.normal(key, (channels, tokens))
    return cast(jnp.abs(x) if kind == "positive" else x, E4M3)


def weight_gradient(precision, x_KT, g_NT):
    """x^T g in bfloat16."""
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        x_KT, g_NT, contracted, precision, preferred_element_type=jnp.bfloat16
    )


def exact(x_KT, g_NT):
    """The same in float32, of the values that the codes stand for."""
    wide = (x.astype(jnp.float32) for x in (x_KT, g_NT))
    return lax.dot_general(*wide, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST)


def products(size: str, repeats: int) -> None:
    """The first part."""
    K, N, all_tokens, _, _ = SIZES[size]
    for tokens in all_tokens:
        for kind in ("Gaussian", "positive"):
            keys = jax.random.split(jax.random.key(tokens))
            draw = functools.partial(operands, kind, tokens)
            args = draw(K, keys[0]), draw(N, keys[1])
            want = jax.jit(exact)(*args)
            for name, precision in ADD.items():
                product = jax.jit(functools.partial(weight_gradient, precision))
                put = functools.partial(
                    _record, f"x^T g, {K} x {tokens} x {N}, {kind}", name
                )
                found = compare(product(*args), want)
                put("slope", found["slope"])
                put("relative error", found["relative error"])
                seconds = harness.time(product, *args, repeats=repeats)
                put("time", 1e3 * seconds, "ms")
                put("rate", 2e-12 * K * N * tokens / seconds, "TFLOP/s")


def summed(what: layer.Layers, how: str, parts: int, params, x, weight):
    """The mean of the parts' gradients by the parameters."""
    cut = lambda a: a.reshape(parts, a.shape[0] // parts, *a.shape[1:])
    gradient = lambda x, weight: what.gradients(params, x, weight)[1][0]
    if how == "optax.MultiSteps":
        return _multi_steps(gradient, parts, params, cut(x), cut(weight))
    wide = jnp.float32 if how == "float32 sum" else jnp.bfloat16

    def add(total, given):
        new = gradient(*given)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, new), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, wide), params)
    total, _ = lax.scan(add, zeros, (cut(x), cut(weight)))
    return jax.tree.map(lambda t: t / parts, total)


def _multi_steps(gradient, parts, params, x, weight):
    tx = optax.MultiSteps(optax.identity(), parts)

    def add(carry, given):
        state, _ = carry
        updates, state = tx.update(gradient(*given), state, params)
        return (state, updates), None

    with jax.numpy_dtype_promotion("standard"):
        first = tx.init(params), jax.tree.map(jnp.zeros_like, params)
        (_, updates), _ = lax.scan(add, first, (x, weight))
    return updates


def micro_batches(size: str, repeats: int) -> None:
    """The second part."""
    *_, batch, all_parts = SIZES[size]
    _, dtype, tokens, _ = layer.SIZES[size]
    plain = layer.make(size, "bf16", 1)
    shape = (batch, tokens, plain.config.hidden)
    keys = jax.random.split(jax.random.key(1), 2)
    inputs = [jax.random.normal(key, shape).astype(dtype) for key in keys]
    params = plain.draw()
    run = lambda what, how, parts: jax.jit(functools.partial(summed, what, how, parts))
    want = run(plain, "float32 sum", 1)(params, *inputs)
    for policy in ("bf16", "default", "fast"):
        what = layer.make(size, policy, 1)
        for how in SUMS:
            for parts in all_parts:
                step = run(what, how, parts)
                case = f"layer, {size}, {batch} x {tokens} tokens in {parts}, {how}"
                put = functools.partial(_record, case, policy)
                found = compare(step(params, *inputs), want)
                put("slope", found["slope"])
                put("cosine", found["cosine"])
                seconds = harness.time(step, params, *inputs, repeats=repeats)
                put("time", 1e3 * seconds, "ms")
                put("rate", batch * tokens / seconds, "tokens/s")


def _record(case, implementation, metric, value, unit="") -> None:
    harness.record(
        benchmark="accumulation",
        case=case,
        implementation=implementation,
        metric=metric,
        value=value,
        unit=unit,
    )


def main() -> None:
    """Prints a table, and appends to the results."""
    parser = argparse.ArgumentParser(description="Sums over tokens.")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parts = {"products": products, "micro-batches": micro_batches}
    parser.add_argument("--only", choices=parts, help="this part only")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    harness.prepare()
    for name, part in parts.items():
        if given.only in (None, name):
            part(given.size, given.repeats)
    print(harness.table("accumulation"))


if __name__ == "__main__":
    main()
