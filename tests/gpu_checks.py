"""What the library does on a real GPU, compared with the CPU of the same machine.

    python -m tests.gpu_checks

prints a line a check, PASS or FAIL with what was found, and exits with 1 if any failed.
It needs jax with its CUDA plugin, flax and optax, and is not collected by pytest: a
machine with a GPU is no part of the ordinary run. Without a GPU it says so and exits
with 2; `--cpu` compares the CPU with itself, to try the script.

Codes that two backends make of equal input may differ where a value lies on the edge
between two codes, by one step, in at most 1e-5 of the elements: log2 and exp2 are not
the same there. What involves no such function must be equal to the bit.
"""

import argparse
import os
import pathlib
import sys
import traceback

import jax
from jax import numpy as jnp
import ml_dtypes
import numpy as np
import optax

from coat_jax import expand, formats, moments, optimizer, rounding
from coat_jax.quantize import dequantize, quantize

GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
BETAS = {
    "one_step_gauss": (0.0, 0.0),
    "one_step_wide": (0.0, 0.0),
    "ten_steps_gauss": (0.9, 0.95),
    "ten_steps_tail": (0.9, 0.999),
    "ten_steps_plain": (0.9, 0.95),
}
SAME_STATE = 1e-5  # share of codes that may be on the other side of an edge
# With stochastic rounding an edge is each drawn number's: where two decoded neighbours
# are 1 % apart, their rounding by 2^-23 moves it by 1e-5, or a few times that.
SAME_DRAW = 1e-4
PAIR = (formats.E4M3, formats.E5M2)
SPECIAL = [0.0, 1e-45, 1e-39, 2.0**-126, 2.0**-10, 1.0, 447.9, 448.0, 449.0, 464.0]
SPECIAL += [464.1, 57344.0, 61439.0, 61440.0, 1e9, 3e38, 3.4028235e38, np.inf, np.nan]


def on(device, fn, *args):
    """fn(*args) jitted on one device, as NumPy arrays."""
    args = jax.device_put(args, device)
    return jax.tree.map(np.asarray, jax.jit(fn)(*args))


def both(devices, fn, *args):
    """What the GPU and the CPU return."""
    return tuple(on(device, fn, *args) for device in devices)


def require(holds, found):
    """A failure that says what was found."""
    if not holds:
        raise AssertionError(found)


def same_bits(got, want):
    """How many elements, of how many, differ in any byte; none may."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    wrong = sum(int((bits(g) != bits(w)).sum()) for g, w in pairs)
    total = sum(g.size for g, _ in pairs)
    require(wrong == 0, f"{wrong} bytes of {total} elements differ")
    return f"{total} elements equal to the bit"


def bits(array):
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def ordinal(codes):
    """Codes numbered by value, so that neighbours differ by one; NaN is set apart."""
    number = codes.view(np.uint8).astype(int)
    size = number & 0x7F
    signed = np.where(number & 0x80, -size, size)
    return np.where(np.isnan(codes.astype(np.float32)), 1000, signed)


def same_state(got, want, limit=SAME_STATE):
    """Codes of one state made twice: few differ, by one step."""
    steps = np.abs(ordinal(got) - ordinal(want))
    share = (steps > 0).mean()
    found = f"{(steps > 0).sum()} of {steps.size} codes differ, by {steps.max()} steps"
    require(share <= limit and steps.max() <= 1, found)
    return found


# The checks: each takes (gpu, cpu) and returns what it found ------------------------


def policy(devices, format):
    """Special values and every bfloat16, against the CPU and ml_dtypes."""
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = x.astype(np.float32)
        special = np.array(SPECIAL, np.float32)
        x = np.concatenate([x, special, -special])
    gpu, cpu = both(devices, lambda x: formats.cast(x, format), x)
    finite = np.isfinite(x)
    want = np.clip(x[finite], -format.max, format.max).astype(format.dtype)
    for codes in (gpu, cpu):
        nan = np.isnan(codes.astype(np.float32))
        require((nan == ~finite).all(), f"NaN at {x[nan != ~finite][:4]}")
        wrong = codes[finite].astype(np.float32) != want.astype(np.float32)
        require(not wrong.any(), f"{wrong.sum()} wrong, as {x[finite][wrong][:4]}")
    return f"{x.size} values; " + same_bits(gpu[finite], cpu[finite])


def neighbours(devices, format):
    """The codes around a value."""
    x = np.abs(np.random.default_rng(0).standard_normal(1 << 16)).astype(np.float32)
    return same_bits(*both(devices, lambda x: formats.neighbours(x, format), x))


def random_bits(devices):
    """The same bits, uniforms and seeds."""

    def draw(step):
        seed = rounding.fold(step, 3_000_000_000)
        shape = (257, 1023)
        return rounding.random_bits(seed, shape), rounding.uniform(seed, shape)

    return same_bits(*both(devices, draw, np.int32(12345)))


def stochastic_bfloat16(devices):
    """Random words of every kind; NaN stays NaN."""
    rng = np.random.default_rng(0)
    words, noise = rng.integers(0, 2**32, (2, 1 << 18), dtype=np.uint32)
    x = words.view(np.float32)
    # As words: a float argument might lose its subnormals on the way in.
    round_ = lambda w, n: rounding.stochastic_bfloat16(
        jax.lax.bitcast_convert_type(w, jnp.float32), n
    )
    gpu, cpu = both(devices, round_, words, noise)
    nan = np.isnan(x)
    for got in (gpu, cpu):
        require((np.isnan(got.astype(np.float32)) == nan).all(), "NaN was lost or made")
    word = (words + np.uint64(0) + (noise & 0xFFFF)) >> np.uint64(16)
    want = np.where(np.isfinite(x), word, words >> 16).astype(np.uint16)
    same_bits(cpu[~nan], want[~nan].view(cpu.dtype))
    return same_bits(gpu[~nan], cpu[~nan])


def samples(rng, shape):
    """Rows of first-moment-like, second-moment-like and very wide groups."""
    normal = rng.standard_normal(shape)
    kinds = [normal * 1e-3, np.exp(normal), normal * 10 ** rng.uniform(-15, 15, shape)]
    return np.concatenate(kinds).astype(np.float32)


def quantised(devices, format):
    """Plain group scales: a division each, right to the last place or two."""
    x = samples(np.random.default_rng(0), (256, 1000))
    gpu, cpu = both(devices, lambda x: quantize(x, format=format), x)
    ratio = np.abs(gpu.scale / cpu.scale - 1).max()
    require(ratio <= 2.0**-22, f"scales differ by {ratio}")
    back = on(devices[0], dequantize, cpu)
    require((back == on(devices[1], dequantize, cpu)).all(), "decoded values differ")
    return same_state(gpu.codes, cpu.codes)


def expanded(devices, format, stochastic=False):
    """Codes, maxima and powers; a power on the edge may be off by a sixteenth."""
    x = samples(np.random.default_rng(0), (256, 1024))

    def encode(x):
        u = rounding.uniform(rounding.fold(1), x.shape) if stochastic else None
        return expand.expand_quantize(x, format=format, uniform=u)

    gpu, cpu = both(devices, encode, x)
    same_bits(gpu.amax, cpu.amax)
    off = np.abs(gpu.power.astype(int) - cpu.power)
    found = f"{(off > 0).sum()} of {off.size} powers differ by up to {off.max()}; "
    require(off.max() <= 1 and (off > 0).mean() <= 1e-3, found)
    same = np.repeat(off == 0, 128, axis=-1)
    limit = SAME_DRAW if stochastic else SAME_STATE
    return found + same_state(gpu.codes[same], cpu.codes[same], limit)


def decoded(devices, format):
    """The same codes decoded: within float32 rounding of a power, zeros at zeros."""
    x = samples(np.random.default_rng(1), (256, 1024))
    e = on(devices[1], lambda x: expand.expand_quantize(x, format=format), x)
    gpu, cpu = both(devices, expand.expand_dequantize, e)
    require(np.isfinite(gpu).all(), "not all finite")
    require(((gpu == 0) == (x == 0)).all(), "zeros moved")
    error = np.abs(gpu - cpu) / np.where(cpu == 0, 1, np.abs(cpu))
    # Two factors exp2(a / 2k), |a| < 2^5, k > 1/4. In each, on each device, rounding a
    # moves the exponent by 2^-19, and rounding it times log(2), below 2^6, by as much.
    require(error.max() <= 8 * 2.0**-19, f"relative difference {error.max():.1e}")
    return f"relative difference at most {error.max():.1e}"


def degenerate(devices, format):
    """Constant, all-zero, one-element, NaN and Inf groups."""
    rng = np.random.default_rng(0)
    constants = np.repeat(10 ** rng.uniform(-30, 30, (64, 1)), 128, 1)
    x = (constants * rng.choice([-1, 1], (64, 1))).astype(np.float32)
    x[0], x[1, 1:], x[2, 0], x[3, 5], x[4, 7] = 0, 0, 0, np.nan, np.inf
    encode = lambda x: expand.expand_quantize(x, format=format)
    round_trip = lambda x: (lambda e: (e, expand.expand_dequantize(e)))(encode(x))
    for e, back in both(devices, round_trip, x):
        require((e.power[1:3] == 255).all() and e.power[0] == 16, "power of a constant")
        require((e.power[5:] == 255).all(), "power of a constant")
        require(np.isnan(back[3:5]).all() and np.isnan(e.amax[3:5]).all(), "NaN lost")
        clean = np.delete(np.arange(64), [3, 4])
        require(np.isfinite(back[clean]).all(), "not finite")
        close = np.abs(back[clean] - x[clean]) <= 1e-5 * np.abs(x[clean])
        require(close.all(), f"{(~close).sum()} constants moved")
    return "powers, NaN and constants right on both"


def pinned(devices, format):
    """A value cast and read back at once in one program shows its rounding."""
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    narrow = lambda x: formats.cast(x, format).astype(jnp.bfloat16).astype(jnp.float32)
    gpu, cpu = both(devices, narrow, x)
    require((gpu != x).mean() > 0.9, "the casts were removed")
    return same_bits(gpu, cpu)


def train(device, params, grads, b1, b2, **fields):
    """Parameters and moments after a step for each row of gradients."""
    tx = optimizer.fp8_adamw(
        1e-3, b1, b2, 1e-8, weight_decay=0.1, storage=moments.Storage(**fields)
    )

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update({"w": grads}, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put({"w": params}, device)
    state = jax.device_put(tx.init(params), device)
    for row in grads:
        params, state = step(params, state, jax.device_put(row, device))
    pick = lambda e: expand.Expanded(*(np.asarray(leaf["w"]) for leaf in e))
    return np.asarray(params["w"]), pick(state[0].mu), pick(state[0].nu)


def golden(devices, name):
    """The published kernel's states, on the GPU."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        data = dict(file)
    n = data["params_before"].size
    pad = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -n % 128)])
    fields = {"min_size": 0, "v_rounding": "nearest"}
    params, m, v = train(
        devices[0],
        pad(data["params_before"]),
        pad(data["grads"]),
        *BETAS[name],
        expand=not name.endswith("plain"),
        **fields,
    )
    found = []
    for kind, e in (("m", m), ("v", v)):
        off = (e.power / 16 != data[f"{kind}_power"]).sum()
        want = data[f"{kind}_codes"].view(e.codes.dtype)
        steps = np.abs(ordinal(e.codes[:n]) - ordinal(want))
        found.append(f"{kind}: {off} powers, {(steps > 0).sum()} codes differ")
        exact = kind == "m" or name.startswith("one_step")
        limit = 0 if exact else 0.005
        require(
            off == 0 and (steps > 0).mean() <= limit and steps.max() <= 1, found[-1]
        )
    error = np.abs(params[:n].astype(np.float64) - data["params_after"])
    found.append(f"parameters {error.max():.1e}, on average {error.mean():.1e}")
    require(error.max() <= 1e-4 and error.mean() <= 1e-7, found[-1])
    return "; ".join(found)


def trained(devices, b2):
    """Ten steps on both; the first exactly from equal state, then in the same class."""
    rng = np.random.default_rng(0)
    params = rng.standard_normal((64, 1000)).astype(np.float32)
    grads = (1e-3 * rng.standard_normal((10, 64, 1000))).astype(np.float32)
    one = [train(d, params, grads[:1], 0.9, b2) for d in devices]
    limits = (SAME_STATE, SAME_DRAW)  # of m and v
    found = [
        same_state(one[0][i].codes, one[1][i].codes, limit)
        for i, limit in enumerate(limits, 1)
    ]
    close = np.abs(one[0][0] - one[1][0]).max()
    require(close <= 1e-6, f"after one step parameters differ by {close:.1e}")
    ten = [train(d, params, grads, 0.9, b2) for d in devices]
    require(all(np.isfinite(t[0]).all() for t in ten), "not finite")
    far = np.abs(ten[0][0] - ten[1][0]).max()
    moved = np.abs(ten[1][0] - params).max()
    # A code on an edge, rounded the other way, moves its update by part of one step.
    require(far <= 1e-3, f"after ten steps parameters differ by {far:.1e}")
    shares = [
        (ten[0][i].codes.view(np.uint8) != ten[1][i].codes.view(np.uint8)).mean()
        for i in (1, 2)
    ]
    return (
        f"one step: {found[0]}; {found[1]}; parameters {close:.1e}; ten steps: "
        f"parameters {far:.1e} of {moved:.1e} moved, codes {shares[0]:.1e} of m and "
        f"{shares[1]:.1e} of v differ"
    )


def checks():
    """(name, function of the devices) in order."""
    for format in PAIR:
        for check in (policy, neighbours, pinned, quantised, expanded, decoded):
            yield (
                f"{check.__name__} {format.name}",
                lambda d, c=check, f=format: c(d, f),
            )
        yield f"degenerate {format.name}", lambda d, f=format: degenerate(d, f)
        yield (
            f"expanded stochastically {format.name}",
            lambda d, f=format: expanded(d, f, stochastic=True),
        )
    yield "random bits", random_bits
    yield "stochastic bfloat16", stochastic_bfloat16
    for name in BETAS:
        yield f"golden {name}", lambda d, n=name: golden(d, n)
    for b2 in (0.95, 0.999):
        yield f"trained b2={b2}", lambda d, b=b2: trained(d, b)


def main():
    """Runs every check; 0 if all passed, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cpu", action="store_true", help="compare the CPU with itself"
    )
    # No more memory than is needed; read when the first device is asked for.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cpu = jax.local_devices(backend="cpu")[0]
    if parser.parse_args().cpu:
        gpu = cpu
    elif jax.default_backend() != "gpu":
        print(f"no GPU: JAX's backend is {jax.default_backend()!r}", file=sys.stderr)
        return 2
    else:
        gpu = jax.local_devices()[0]
    print(f"{gpu.device_kind} and {cpu.device_kind}, jax {jax.__version__}")
    failed = 0
    for name, check in checks():
        try:
            print(f"PASS {name}: {check((gpu, cpu))}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    print(f"{failed} failed" if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
