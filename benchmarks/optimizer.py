"""Times one optimizer step: the kernels, plain XLA, and optax.adamw beside them.

    python -m benchmarks.optimizer [--sweep] [--check]

Traffic is what a step must read and write: parameters, gradients, codes and statistics.
The traffic-only kernel moves the same arrays through the same tiles.
"""

import argparse
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from coat_jax import apply_fused, fp8_adamw
from coat_jax.formats import E4M3
from coat_jax.kernels import adam, dispatch
from coat_jax.kernels.approximate import triton_functions

GROUP = 128
LEAF = {"w": (16384, 16384)}
LAYERS = 4  # of Llama-2-7B's 32; its embedding and head are whole
H, F, VOCABULARY = 4096, 11008, 32000
LLAMA = {
    "embedding": (VOCABULARY, H),
    "head": (H, VOCABULARY),
    "final norm": (H,),
    "norms": (LAYERS, 2, H),
    "attention": {name: (LAYERS, H, H) for name in "qkvo"},
    "gate": (LAYERS, H, F),
    "up": (LAYERS, H, F),
    "down": (LAYERS, F, H),
}
TILES = [(4, 1), (2, 1), (8, 2), (8, 4), (4, 2), (16, 4)]
SAME_CODES = 1e-4  # share of codes that may differ from the reference, by one step


def draw(shapes, dtype, scale: float, seed: int):
    """A tree of normal numbers, drawn in float32 on the device."""
    is_shape = lambda x: isinstance(x, tuple)
    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(
        lambda key, shape: (jax.random.normal(key, shape) * scale).astype(dtype),
        static_argnums=1,
    )
    return tree.unflatten(map(make, keys, leaves))


def steps(shapes, dtype):
    """Name to (transformation, step): f(params, state, grads) -> (params, state)."""
    tx, peer = fp8_adamw(1e-3, b2=0.95), optax.adamw(1e-3, b2=0.95)
    key = jax.random.key(0) if dtype == jnp.bfloat16 else None

    def fused(params, state, grads, *, implementation):
        how = {"key": key, "implementation": implementation}
        return apply_fused(tx, grads, state, params, **how)

    def of_optax(params, state, grads):
        updates, state = peer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = {"optax.adamw": (peer, of_optax)}
    for name in ("xla", *adam.KERNELS):
        if name == "xla" or getattr(dispatch, f"has_{name}")():
            found[name] = tx, functools.partial(fused, implementation=name)
    return found


def traffic_of(params, state, grads) -> int:
    """Bytes that a step reads and writes."""
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    return 2 * nbytes(params) + 2 * nbytes(state) + nbytes(grads)


def compare(case: str, shapes, dtype, repeats: int) -> None:
    """Times and records every implementation on a tree of `shapes`."""
    ceiling = traffic_only(dtype, repeats) if shapes is LEAF else None
    for name, (tx, step) in steps(shapes, dtype).items():
        params, grads = draw(shapes, dtype, 0.02, 0), draw(shapes, dtype, 1e-3, 1)
        state = jax.jit(tx.init)(params)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        moved = traffic_of(params, state, grads)
        run = jax.jit(step, donate_argnums=(0, 1))
        try:
            seconds = harness.time(
                run, params, state, grads, donate=(0, 1), repeats=repeats
            )
        except Exception as error:  # the others still count
            print(f"{case} {name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        report(case, name, seconds, count, moved, ceiling)


def report(case, name, seconds, count, moved, ceiling=None) -> None:
    """Records one implementation's figures."""
    record = functools.partial(
        harness.record, benchmark="optimizer", case=case, implementation=name
    )
    record(metric="time", value=seconds * 1e6, unit="us")
    record(metric="traffic", value=moved / seconds / 1e9, unit="GB/s")
    record(metric="rate", value=count / seconds / 1e9, unit="Gparam/s")
    if ceiling and name in adam.KERNELS:
        record(metric="of traffic only", value=100 * ceiling / seconds, unit="%")


# The kernel alone --------------------------------------------------------------------


def moves(how, s, p, g, m, v, start):
    """In place of a tile's step: next to no arithmetic."""
    del how, start
    p = (p.astype(jnp.float32) + s.u_factor * g.astype(jnp.float32)).astype(p.dtype)
    again = lambda codes, amax, power: (codes, amax * s.b1, power)
    return p, again(*m), again(*v)


def operands(dtype, shape=LEAF["w"]):
    """(words, p, g, m, v) of a kernel, the moments' groups spanning some octaves."""
    tx = fp8_adamw(1e-3)
    params, grads = (draw({"w": shape}, dtype, s, i) for i, s in enumerate((1, 1e-3)))
    _, state = jax.jit(functools.partial(apply_fused, tx, implementation="xla"))(
        grads, jax.jit(tx.init)(params), params
    )
    m, v = (tuple(tree["w"] for tree in moment) for moment in state[0][1:])
    half = -0.5 * math.log2(1 - 0.999**2)
    numbers = [0.9, 0.1, 0.999, 0.001, 1 / (1 - 0.9**2), 0.0, 1 / (1 - 0.999**2), half]
    words = adam.packed(adam.Scalars(*numbers, 0.0, 1e-8, -1e-3, -1e-7, 5, 9))
    return words, params["w"], grads["w"], m, v


def time_kernel(dtype, repeats: int, arrays=None, *, v="stochastic", **how) -> float:
    """Seconds of the Triton kernel on the large leaf."""
    words, p, g, m, n = operands(dtype) if arrays is None else arrays
    settings = adam.How(
        m_format=E4M3,
        v_format=E4M3,
        group=GROUP,
        expand=True,
        stochastic_v=v == "stochastic",
        stochastic_p=dtype == jnp.bfloat16,
    )
    kernel = functools.partial(adam.triton, how=settings, interpret=False, **how)
    fn = lambda p, m, v, words, g: kernel(words, p, g, m, v, None)
    return harness.time(fn, p, m, n, words, g, donate=(0, 1, 2), repeats=repeats)


def traffic_only(dtype, repeats: int) -> float:
    """Seconds of the kernel without arithmetic, at the best of some tiles."""
    each = [(4, 4), (8, 4), (16, 8)]
    return min(
        time_kernel(dtype, repeats, step=moves, tile=tile, warps=warps)
        for tile, warps in each
    )


def sweep(dtypes, repeats: int) -> None:
    """Prints Gparam/s of tiles, and of variants of the arithmetic."""
    variants = {
        "traffic only": {"step": moves},
        "v nearest": {"v": "nearest"},
        "full": {},
        "full, table": {"functions": functools.partial(triton_functions, table=True)},
    }
    for dtype in dtypes:
        for tile, warps in TILES:
            row = []
            for name, how in variants.items():
                seconds = time_kernel(dtype, repeats, tile=tile, warps=warps, **how)
                row.append(f"{name} {math.prod(LEAF['w']) / seconds / 1e9:.0f}")
            print(dtype.__name__, f"{tile} groups, {warps} warps:", *row, flush=True)


# The kernel against its definition ----------------------------------------------------


def check(dtypes) -> None:
    """Prints what differs between the kernel's step and XLA's, from one state."""
    shapes = {"w": (4096, 11008), "v": (3, 300, 384)}
    for dtype in dtypes:
        for scale in (1e-3, 1e-8, 1e3):
            grads = [draw(shapes, dtype, scale, seed) for seed in range(5)]
            found = steps(shapes, dtype)
            by_xla = jax.jit(found["xla"][1])
            params = draw(shapes, dtype, 0.02, 9)
            state = jax.jit(found["xla"][0].init)(params)
            for g in grads[:4]:
                params, state = by_xla(params, state, g)
            want = by_xla(params, state, grads[4])
            for name in adam.KERNELS:
                got = jax.jit(found[name][1])(params, state, grads[4])
                print(
                    f"check {dtype.__name__} {scale:g} {name}:", *differences(got, want)
                )


def differences(got, want):
    """Words on codes, powers and parameters."""
    (params, state), (others, other) = got, want
    for kind, a, b in zip("mv", state[0][1:], other[0][1:], strict=True):
        steps = [
            np.abs(ordinal(x) - ordinal(y))
            for x, y in zip(*map(jax.tree.leaves, (a.codes, b.codes)), strict=True)
        ]
        steps = np.concatenate([s.ravel() for s in steps])
        powers = [
            np.mean(np.asarray(x) != np.asarray(y))
            for x, y in zip(*map(jax.tree.leaves, (a.power, b.power)), strict=True)
        ]
        share = (steps > 0).mean()
        verdict = (
            "ok" if share <= SAME_CODES and steps.max() <= 1 else "MORE THAN STATED"
        )
        yield f"{kind} codes {share:.1e} by {steps.max()}"
        yield f"powers {max(powers):.1e} {verdict};"
    wide = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
    pairs = list(zip(wide(params), wide(others), strict=True))
    yield f"p by {max(np.abs(x - y).max() for x, y in pairs):.1e}"
    yield f"in {max(np.mean(x != y) for x, y in pairs):.1e}"


def ordinal(codes) -> np.ndarray:
    """Codes numbered by value."""
    number = np.asarray(lax.bitcast_convert_type(codes, jnp.uint8)).astype(np.int32)
    return np.where(number & 0x80, -(number & 0x7F), number)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="tiles and variants")
    parser.add_argument("--check", action="store_true", help="compare with XLA's step")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    harness.prepare()
    dtypes = (jnp.float32, jnp.bfloat16)
    if args.check:
        check(dtypes)
    if args.sweep:
        sweep(dtypes, 3)
    if args.check or args.sweep:
        return
    for dtype in dtypes:
        compare(f"16384 x 16384 {dtype.__name__}", LEAF, dtype, args.repeats)
        compare(
            f"Llama-2-7B, {LAYERS} layers, {dtype.__name__}", LLAMA, dtype, args.repeats
        )
    print(harness.table("optimizer"))


if __name__ == "__main__":
    main()
