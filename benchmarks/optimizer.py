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
import optax

from benchmarks import harness
from coat_jax import apply_fused, fp8_adamw
from coat_jax.expand import expand_quantize
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
# What a step by a kernel may differ by from XLA's, from one state. The first step has
# equal moments to encode; in the others m's smallest number may be what two that cancel
# leave, each of which rounds otherwise, and with it go power and codes of a group.
SAME_CODES = 1e-4  # share of other codes, in groups of equal power
# Steps by which they may: m is the sum of two terms, which may cancel.
FARTHEST = {"first": {"m": 1, "v": 1}, "fifth": {"m": 4, "v": 1}}
OTHER_POWERS = {"first": {"m": 1e-6, "v": 1e-6}, "fifth": {"m": 5e-4, "v": 2e-5}}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype, scale):
    return (jax.random.normal(key, shape) * scale).astype(dtype)


def draw(shapes, dtype, scale: float, seed: int):
    """A tree of normal numbers, drawn in float32 on the device."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = lambda key, shape: _normal(key, shape, dtype, jnp.float32(scale))
    return tree.unflatten(map(make, keys, leaves))


def steps(dtype):
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
    size = lambda leaf: leaf.size * leaf.dtype.itemsize
    nbytes = lambda tree: sum(map(size, jax.tree.leaves(tree)))
    return 2 * nbytes(params) + 2 * nbytes(state) + nbytes(grads)


def compare(case: str, shapes, dtype, repeats: int) -> None:
    """Times and records every implementation on a tree of `shapes`."""
    leaf = shapes is LEAF
    ceiling = traffic_only(dtype, repeats) if leaf else None
    if ceiling:
        _, p, g, *moments = jax.eval_shape(functools.partial(operands, dtype))
        report(case, "traffic only", ceiling, p.size, traffic_of(p, moments, g))
    grads = draw(shapes, dtype, 1e-3, 1)
    for name, (tx, step) in steps(dtype).items():
        if name != "xla" or leaf:  # XLA's rate is no other on a tree
            one = functools.partial(
                measure, case, name, tx, step, shapes, grads, ceiling, repeats
            )
            harness.attempt(f"{case} {name}", one)


def measure(case, name, tx, step, shapes, grads, ceiling, repeats: int) -> None:
    """Times and records one implementation."""
    params = draw(shapes, jax.tree.leaves(grads)[0].dtype, 0.02, 0)
    state = jax.jit(tx.init)(params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    moved = traffic_of(params, state, grads)
    run = jax.jit(step, donate_argnums=(0, 1))
    arrays, how = (params, state, grads), {"donate": (0, 1), "repeats": repeats}
    report(case, name, harness.time(run, *arrays, **how), count, moved, ceiling)


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
    p, g = (draw({"w": shape}, dtype, s, i)["w"] for i, s in enumerate((1, 1e-3)))
    scalars = adam.Scalars(
        b1=0.9,
        b1_rest=0.1,
        b2=0.999,
        b2_rest=0.001,
        m_scale=1 / (1 - 0.9**2),
        g_scale=0.0,
        v_scale=1 / (1 - 0.999**2),
        half_log2_v_scale=-0.5 * math.log2(1 - 0.999**2),
        eps_root=0.0,
        eps=1e-8,
        u_factor=-1e-3,
        p_factor=-1e-7,
        seed=5,
        p_word=9,
    )
    return adam.packed(scalars), p, g, *_encoded(g)


@jax.jit
def _encoded(g):
    """Moments, of a gradient."""
    encode = lambda x: tuple(expand_quantize(x, format=E4M3, group=GROUP))
    return encode(g), encode(g * g)


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
    each = [(4, 4), (16, 8)]
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


def check(dtypes, shape=(2048, 11008)) -> bool:
    """Whether kernels take XLA's step from one state, as far as is stated; prints it.

    One leaf is ragged for Triton and refused by Mosaic: XLA's step then, bit for bit.
    """
    shapes, good = {"w": shape, "ragged": (3, 301, 384)}, True
    for dtype in dtypes:
        found = steps(dtype)
        run = {n: jax.jit(step) for n, (_, step) in found.items() if n != "optax.adamw"}
        for scale in (1e-3, 1e-8, 1e3):
            grads = [draw(shapes, dtype, scale, seed) for seed in range(5)]
            params = draw(shapes, dtype, 0.02, 9)
            state = jax.jit(found["xla"][0].init)(params)
            for i, g in enumerate(grads):
                want = run["xla"](params, state, g)
                if when := {0: "first", 4: "fifth"}.get(i):
                    for name in list(run)[1:]:
                        got = run[name](params, state, g)
                        words, within = verdict(
                            jax.device_get(_differ(got, want)), when
                        )
                        print(f"check {dtype.__name__} {scale:g} {when} {name}:", words)
                        good &= within
                params, state = want
    return good


@jax.jit
def _differ(got, want):
    """For each moment (other codes where powers agree, the farthest, other powers)."""
    (params, state), (others, other) = got, want
    found = {}
    for kind, a, b in zip("mv", state[0][1:], other[0][1:], strict=True):
        same = jax.tree.map(lambda x, y: x == y, a.power, b.power)
        apart = jax.tree.map(
            lambda x, y, s: jnp.abs(ordinal(x) - ordinal(y)) * jnp.repeat(s, GROUP, -1),
            *(a.codes, b.codes, same),
        )
        join = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
        apart, same = join(apart), join(same)
        found[kind] = (apart > 0).mean(), apart.max(), (~same).sum(), same.size
    wide = lambda x: x.astype(jnp.float32)
    off = jax.tree.map(lambda x, y: jnp.abs(wide(x) - wide(y)).max(), params, others)
    return found, jax.tree.reduce(jnp.maximum, off)


def verdict(differ, when: str):
    """Words on what differs, and whether it is within what is stated."""
    found, off = differ
    words, good = [], True
    for kind, (share, farthest, powers, groups) in found.items():
        most = max(1, OTHER_POWERS[when][kind] * groups)
        within = share <= SAME_CODES and powers <= most
        within = within and farthest <= FARTHEST[when][kind]
        words.append(
            f"{kind} codes {share:.1e} by {farthest}, powers {powers} of {groups}"
            f"{'' if within else ' MORE THAN STATED'};"
        )
        good &= bool(within)
    return " ".join([*words, f"p by {off:.1e}"]), good


def ordinal(codes):
    """Codes numbered by value."""
    number = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
    return jnp.where(number >= 128, 128 - number, number)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="tiles and variants")
    parser.add_argument("--check", action="store_true", help="compare with XLA's step")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    harness.prepare()
    dtypes = (jnp.bfloat16, jnp.float32)
    if args.check and not check(dtypes):
        raise SystemExit(
            "check: a kernel's step differs from XLA's by more than stated"
        )
    if args.sweep:
        sweep(dtypes, 3)
    if args.check or args.sweep:
        return
    for dtype in dtypes:
        for where, shapes in (
            ("16384 x 16384", LEAF),
            (f"Llama-2-7B, {LAYERS} layers,", LLAMA),
        ):
            compare(f"{where} {dtype.__name__}", shapes, dtype, args.repeats)
    print(harness.table("optimizer"))


if __name__ == "__main__":
    main()
