"""Times of the quantisation kernels, beside XLA's and the memory's own speed.

    python -m benchmarks.quantize                      needs a GPU
    python -m benchmarks.quantize --cases=group        those whose name has "group"
    python -m benchmarks.quantize --sweep              and the kernels' tiles and warps
    python -m benchmarks.quantize --size=micro         tries the script, on a CPU too

Of each case: the time, and the traffic that it must cause (what is read and written
once) over that time, as a share of the copy in the same run. Data are random normals
drawn in float32, a NaN and an Inf among them; scales are no powers of two. The codes of
a kernel are first compared with XLA's, byte by byte.

    copy          x + 1 in bfloat16: no kernel can be much faster
    group-16      codes, and a scale a group of 16 or 128 neighbours
    group-128
    tensor        codes under a given scale
    tensor+T      the same and the transposed codes, as a product and its gradient want
    T             the transposed codes alone
    row           codes under a given scale a row
    row+T
    weight+T      float32, codes and transposed codes
    amax          max|x| by XLA, which the scale of a tensor waits for
"""

import argparse
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from benchmarks import harness
from coat_jax.formats import E4M3
from coat_jax.kernels import dispatch, encode, quantize
from coat_jax.quantize import largest

SIZES = {"7b": ((16384, 11008), (4096, 11008)), "micro": ((64, 384), (48, 384))}
# What --sweep tries: elements or (rows, columns) of a tile, and warps.
FLAT = [(2048, 4), (4096, 4), (4096, 8), (8192, 8)]
TRANSPOSED = [
    ((64, 128), 8),
    ((128, 64), 8),
    ((128, 128), 8),
    ((128, 128), 16),
    ((64, 256), 8),
    ((32, 256), 8),
]
MOSAIC = {False: [(16, 128), (32, 128), (64, 128)], True: [(64, 128), (128, 128)]}


class Case(NamedTuple):
    """What is timed: `ways` maps an implementation to a function of `args`."""

    name: str
    args: tuple[Any, ...]
    bytes: int
    ways: dict[str, Any]


def backends() -> list[str]:
    """The implementations that this JAX has."""
    found = [("triton", dispatch.has_triton()), ("mosaic", dispatch.has_mosaic())]
    return ["xla", *(name for name, has in found if has)]


def _ways(op, **how):
    """The op under each implementation that it has."""
    return {
        name: functools.partial(op, implementation=name, **how) for name in backends()
    }


def cases(size: str) -> list[Case]:
    """All cases at a size, on data of this process."""
    (M, N), (K, F) = SIZES[size]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    x, w = draw(M, N).astype(jnp.bfloat16), draw(K, F)
    # So that the comparison of codes sees what becomes of these.
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(-jnp.inf).at[2, 2].set(1e30)
    scale = jnp.full((1, 1), 5.1 / E4M3.max, jnp.float32)
    scale_M = largest(x, (1,)) / E4M3.max
    n = x.size
    coded = functools.partial(_ways, encode.encode, format=E4M3)
    grouped = lambda group: _ways(quantize.quantize, format=E4M3, group=group)
    return [
        Case("copy", (x,), 4 * n, {"xla": lambda x: x + jnp.ones((), x.dtype)}),
        Case("group-16", (x,), 3 * n + n // 4, grouped(16)),
        Case("group-128", (x,), 3 * n + n // 32, grouped(128)),
        Case("tensor", (x, scale), 3 * n, coded()),
        Case("tensor+T", (x, scale), 4 * n, coded(transposed=True)),
        Case("T", (x, scale), 3 * n, coded(codes=False, transposed=True)),
        Case("row", (x, scale_M), 3 * n, coded()),
        Case("row+T", (x, scale_M), 4 * n, coded(transposed=True)),
        Case("weight+T", (w, scale), 6 * w.size, coded(transposed=True)),
        Case("amax", (x,), 2 * n, {"xla": lambda x: largest(x, (0, 1))}),
    ]


def swept(case: Case, interpret: bool) -> dict[str, Any]:
    """The kernels of a case with every tile, number of warps and order of tiles."""
    how = {"format": E4M3, "interpret": interpret}
    if len(case.ways) == 1 or case.name.startswith("row"):
        return {}
    if case.name.startswith("group"):
        group = int(case.name.partition("-")[2])
        call = lambda kernel, **more: (
            lambda x: kernel(x.reshape(x.size // group, group), **how, **more)
        )
        return {
            f"triton {tile}/{warps}": call(quantize.triton, tile=tile, warps=warps)
            for tile, warps in FLAT
        } | {
            f"mosaic {tile}": call(quantize.mosaic, tile=tile) for tile in (2048, 4096)
        }
    outputs = (case.name != "T", case.name.endswith("T"))
    flat = not outputs[1] and case.name == "tensor"
    call = lambda kernel, **more: (
        lambda x, scale: kernel(
            x.reshape(1, 1, -1) if flat else x[None],
            scale[None],
            outputs=outputs,
            **how,
            **more,
        )
    )
    return {
        f"triton {m}x{n}/{warps} {'down' * down}": call(
            encode.triton, tile=(m, n), warps=warps, down=down
        )
        for (m, n), warps in (TRANSPOSED if outputs[1] else [])
        for down in (False, True)
    } | {
        f"mosaic {m}x{n}": call(encode.mosaic, tile=(m, n))
        for m, n in MOSAIC[outputs[1]]
    }


@jax.jit
def _differing(got, want):
    byte = lambda leaf: lax.bitcast_convert_type(leaf, jnp.uint8)
    return jnp.mean(byte(got) != byte(want).reshape(byte(got).shape), dtype=jnp.float32)


def differing(got, want) -> float:
    """The share of bytes that two trees of arrays do not have in common."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(_differing(g, w)) for g, w in pairs)


def measure(case: Case, name: str, way, want, *, copy: float, repeats: int) -> float:
    """Times one way of a case and prints it; returns the seconds, NaN if it fails."""
    program = jax.jit(way)
    try:
        share = differing(program(*case.args), want)
        seconds = harness.time(program, *case.args, repeats=repeats)
    except Exception as error:  # that a device cannot run a kernel is a result too
        print(f"{case.name:10} {name:20} {str(error).splitlines()[0][:90]}", flush=True)
        return float("nan")
    rate = case.bytes / seconds
    print(
        f"{case.name:10} {name:20} {1e3 * seconds:8.4f} ms {rate / 1e12:6.3f} TB/s "
        f"{rate / copy if copy else 1:6.1%} of copy   differing {share:.1e}",
        flush=True,
    )
    return seconds


def record(case: Case, name: str, seconds: float, copy: float) -> None:
    """Keeps what `measure` found."""
    rate = case.bytes / seconds
    keep = functools.partial(
        harness.record, benchmark="quantize", case=case.name, implementation=name
    )
    keep(metric="time", value=1e6 * seconds, unit="us")
    keep(metric="rate", value=rate / 1e12, unit="TB/s")
    keep(metric="share of copy", value=rate / copy, unit="")


def main() -> None:
    """Runs the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    harness.prepare()
    how = {"copy": 0.0, "repeats": 20 if options.size == "7b" else 1}
    for case in cases(options.size):
        if options.cases not in case.name and case.name != "copy":
            continue
        want = jax.jit(case.ways["xla"])(*case.args)
        for name, way in case.ways.items():
            seconds = measure(case, name, way, want, **how)
            how["copy"] = how["copy"] or case.bytes / seconds
            if seconds == seconds:
                record(case, name, seconds, how["copy"])
        if options.sweep:
            for name, way in swept(case, jax.default_backend() == "cpu").items():
                measure(case, name, way, want, **how)


if __name__ == "__main__":
    main()
