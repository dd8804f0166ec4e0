"""What the kernels compute on a real GPU, beside XLA on the same GPU.

    python -m tests.gpu_kernel_checks                 prints PASS or FAIL a line
    compute-sanitizer --tool=memcheck --target-processes application-only \
        python -m tests.gpu_kernel_checks --once
    compute-sanitizer --tool=racecheck --target-processes application-only \
        python -m tests.gpu_kernel_checks --once

`--once` runs each kernel a single time, on small arrays of ragged sizes, and compares
nothing: for compute-sanitizer, under which a kernel takes a thousand times longer.
`--only=adam` runs those whose names hold that. `--planted` runs instead a kernel that
reads one element behind an array: memcheck must report it, or its "0 errors" of the
others says nothing of arrays' ends. It needs a GPU, and is not collected by pytest.

What is exact must be equal to the bit, but for the order of sums where there are some.
Codes behind exponentials and reciprocal square
roots, which kernels and XLA approximate differently, differ in at most 1e-4 of elements
and by one step.
"""

import argparse
import functools
import os
import sys
import traceback

import jax
from jax import numpy as jnp
import numpy as np
import optax

import coat_jax
from coat_jax import activations, fused, matmul, norms
from coat_jax.formats import E4M3, E5M2
from coat_jax.kernels import encode, norm, prologue, pullback
from coat_jax.kernels import quantize as grouped
from tests.gpu_checks import ordinal, require

SHARE = 1e-4
# One of each kernel, backend and way through it.
ONCE = ("quantize 128", "encode (3, 19, 712)", "silu 2", "silu 2 backward", "rms norm")
ONCE += ("rms pulled 128", "layer pulled 16", "adam float32", "adam bfloat16")
BACKENDS = ("triton", "mosaic")


def draw(seed, shape, dtype=jnp.bfloat16):
    """Normal values, drawn in float32."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def by(implementation, fn, *args):
    """fn(*args) with that implementation, as NumPy arrays."""
    fn = functools.partial(fn, implementation=implementation)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]


def same(got, want, share=0.0):
    """Equal arrays, codes but for a share that is one step away; the share found."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        require(a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {b.shape}")
        if a.dtype.itemsize > 1:
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            require(equal.all(), f"{(~equal).sum()} of {a.size} values differ")
            continue
        nan = np.isnan(a.astype(np.float32))
        require((nan == np.isnan(b.astype(np.float32))).all(), "NaN elsewhere")
        steps = np.abs(ordinal(a) - ordinal(b))[~nan]
        if steps.size:
            require(steps.max() <= 1, f"codes {steps.max()} steps apart")
            worst = max(worst, float((steps != 0).mean()))
    require(worst <= share, f"a share of {worst:.1e} differs, {share:.0e} may")
    return f"{worst:.1e} of codes differ"


def quantised(x, *, group, implementation):
    """Group quantisation."""
    return grouped.quantize(x, format=E4M3, group=group, implementation=implementation)


def encoded(x, *, rows, implementation, both=True, format=E5M2):
    """Codes under a scale for each row, as they lie and transposed."""
    axes = tuple(range(rows, x.ndim))
    scale = matmul.scale_of(x, coat_jax.Operand(format=format, scaling="vector"), axes)
    how = {"format": format, "rows": rows, "implementation": implementation}
    made = encode.encode(x, scale, transposed=True, codes=both, **how)
    return [each for each in made if each is not None]


def forward(columns, *xs, function, group, implementation):
    """Codes of what comes before a product, and those that are kept."""
    rows = function.statistics(*(x.astype(jnp.float32) for x in xs))
    how = {"implementation": implementation}
    most = prologue.largest(function, columns, rows, xs, **how)
    scale = matmul.power_of_two(most / E4M3.max).reshape((1,) * xs[0].ndim)
    how |= {"format": E4M3, "kept": (E4M3, group)}
    return prologue.encode(function, columns, rows, xs, scale, **how)


def backward(dh, *xs, function, group, implementation):
    """Codes of h and of the gradients of xs."""
    stored = [grouped.reference(x, format=E4M3, group=group) for x in xs]
    how = {"group": group, "implementation": implementation}
    most = pullback.largest(function, stored, dh, **how)
    scales = [matmul.power_of_two(m / E4M3.max) for m in most]
    how |= {"h_format": E4M3, "g_format": E4M3}
    return pullback.encode(function, stored, dh, [jnp.float32(0.125), *scales], **how)


def pulled(columns, x, dys, residual, *, function, group, implementation):
    """A norm's gradients, and its codes again."""
    stored = tuple(grouped.reference(x, format=E4M3, group=group))
    how = {"implementation": implementation}
    dx, rows, dcolumns = norm.backward(
        function, columns, stored, dys, residual, dtype=jnp.float32, **how
    )
    scale = jnp.float32(2.0**-6)
    again = norm.again(function, columns, rows, stored, scale, format=E4M3, **how)
    return dx, rows, dcolumns, again


def stepped(params, grads, *, implementation):
    """Two steps of the optimizer; float32 gradients are clipped, which optax rounds."""
    with jax.numpy_dtype_promotion("standard"):
        storage = coat_jax.Storage(min_size=256)
        adamw = coat_jax.fp8_adamw(1e-3, storage=storage)
        max_norm = 1.0 if grads["w"].dtype == jnp.float32 else 1e6
        tx = optax.chain(optax.clip_by_global_norm(max_norm), adamw)
        state = tx.init(params)
        for how in ("xla", implementation):  # from equal moments, none of them zero
            key = jax.random.key(0)
            params, state = coat_jax.apply_fused(
                tx, grads, state, params, key=key, implementation=how
            )
        return params, state


def layer(x, gate, up, down, g, *, implementation):
    """An MLP and its gradients."""
    with coat_jax.use_kernels(implementation):
        run = lambda x, *w: fused.gated_mlp(x, *w, residual=x)
        y, pull = jax.vjp(run, x, gate, up, down)
        return y, *pull(g)


def near(got, want):
    """Arrays that are close as FP8 products are; the largest relative distance."""
    distance = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    pairs = [
        (a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(got, want, strict=True)
    ]
    worst = max(distance(a, b) for a, b in pairs)
    require(worst < 0.03, f"relative distance {worst:.3f}")
    return f"relative distance {worst:.1e}"


def summed(got, want):
    """Arrays equal but for the order of their sums, codes as `same` has them."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.dtype.itemsize == 1:
            same([a], [b], 0.0 if a.dtype == np.uint8 else SHARE)
            continue
        a, b, narrow = a.astype(np.float64), b.astype(np.float64), a.dtype.itemsize == 2
        error = np.abs(a - b) / (np.abs(b).max() + 1e-30)
        # Of sums of 4096 terms; of stochastic roundings few may go the other way.
        off = (error > 4 * 4096**0.5 * 2.0**-24).mean()
        require(off <= (2e-3 if narrow else 0), f"a share of {off:.1e} differs")
        worst = max(worst, float(error.max()))
    return f"relative to the largest, {worst:.1e}"


def poisoned(x):
    """x with NaN, Inf, zeros and extremes among its rows."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat.at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf).at[2].set(0)
    return flat.at[3, 0].set(3e38).at[4].multiply(1e-30).reshape(x.shape)


def checks(size):
    """(name, check) of every kernel, on arrays of about `size` rows.

    Each is a function, its arguments, the backend, and the share of codes that may
    differ; None where sums have another order.
    """
    x, bad = draw(0, (size, 1408)), poisoned(draw(1, (size + 5, 1408)))
    for backend in BACKENDS:
        for group in (16, 32, 64, 128):
            run = functools.partial(quantised, group=group)
            for name, a in (("", x), (" poisoned", bad)):
                yield f"quantize {group} {backend}{name}", run, (a,), backend, 0.0
        for a in (x, draw(2, (3, size // 2 + 1, 712)), bad):
            run = functools.partial(encoded, rows=a.ndim - 1)
            yield f"encode {a.shape} {backend}", run, (a,), backend, 0.0
    for name in ("silu", "gelu_tanh", "relu", "relu_squared"):
        function = activations.product_of(name)
        for xs in ([x], [x, draw(3, x.shape)], [draw(4, (size + 3, 1408))]):
            run = functools.partial(forward, function=function, group=128)
            yield f"{name} {len(xs)}", run, ([], *xs), "triton", SHARE
            run = functools.partial(backward, function=function, group=64)
            args = (draw(5, xs[0].shape), *xs)
            yield f"{name} {len(xs)} backward", run, args, "triton", SHARE
    for kind in ("rms", "layer"):
        function = norms.function_of(kind, 1e-5)
        bias = draw(7, (1408,), jnp.float32) if kind == "layer" else None
        columns = [draw(6, (1408,), jnp.float32), bias]
        run = functools.partial(forward, function=function, group=16)
        yield f"{kind} norm", run, (columns, x), "triton", SHARE
    yield from summing(size)


def summing(size):
    """Checks of what has sums in it, whose order is the kernel's own."""
    for kind, group in (("rms", 128), ("layer", 16), ("rms", 32)):
        for shape in ((size - 5, 1408), (4, size // 4 * 4, 1024)):
            function = norms.function_of(kind, 1e-5)
            bias = draw(7, shape[-1:], jnp.float32) if kind == "layer" else None
            columns = [draw(6, shape[-1:], jnp.float32), bias]
            dys, residual = [draw(i, shape) for i in (1, 2, 3)], draw(4, shape)
            run = functools.partial(pulled, function=function, group=group)
            args = columns, draw(0, shape), dys, residual
            yield f"{kind} pulled {group} {shape}", run, args, "triton", None
    for dtype in (jnp.float32, jnp.bfloat16):
        shapes = {"w": (size, 1024), "stack": (3, 16, 384), "norm": (96,)}
        params, grads = (
            {n: draw(i + j, s, dtype) for j, (n, s) in enumerate(shapes.items())}
            for i in (0, 3)
        )
        for backend in BACKENDS:
            name = f"adam {jnp.dtype(dtype).name} {backend}"
            yield name, stepped, (params, grads), backend, None


def mlp():
    """The arguments of `layer`."""
    shapes = ((1024, 2816), (1024, 2816), (2816, 1024))
    ws = [draw(i, s, jnp.float32) * s[0] ** -0.5 for i, s in enumerate(shapes)]
    return draw(8, (4, 512, 1024)), *ws, draw(9, (4, 512, 1024))


def folded():
    """Whether scales multiply a bfloat16 product before its one rounding."""
    a, b = draw(0, (256, 512), jnp.float32), draw(1, (512, 384), jnp.float32)
    dims = matmul.dims_of(2, 2, (((1,), (0,)), ((), ())))

    def product(a, b):
        pair = [
            matmul.encode(v, coat_jax.Operand(), axes)
            for v, axes in ((a, (1,)), (b, (0,)))
        ]
        how = {"accumulation": "promoted", "exact": True}
        y = matmul.multiply(*pair, dims, dtype=jnp.dtype(jnp.bfloat16), **how)
        return y, [matmul.decode(v) for v in pair]

    y, (a, b) = jax.tree.map(np.asarray, jax.jit(product)(a, b))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(y - exact).max() / np.abs(exact).max()
    require(error < 2.0**-8, f"relative error {error:.1e}")
    return f"relative error {error:.1e}"


def planted():
    """Reads one element behind the end of an array."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    def kernel(x_ref, out_ref):
        out_ref[...] = plt.load(x_ref.at[jnp.arange(64) + 1])

    x = jnp.arange(64, dtype=jnp.float32)
    run = pl.pallas_call(kernel, out_shape=x, compiler_params=plt.CompilerParams())
    return jax.block_until_ready(jax.jit(run)(x))


def main():
    """Runs every check; 0 if all passed, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--once", action="store_true", help="run only, small, compare nothing"
    )
    parser.add_argument(
        "--planted", action="store_true", help="run a kernel that memcheck must report"
    )
    parser.add_argument("--only", default="", help="those whose names hold this")
    given = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if given.once or given.planted:
        # compute-sanitizer is to see each launch, so no CUDA graphs; and each array's
        # end, which in XLA's pool is the next one's beginning. "platform" is that pool
        # too, and "address" is from jax 0.11 on.
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "address")
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer="
    if jax.default_backend() != "gpu":
        print(f"no GPU: JAX's backend is {jax.default_backend()!r}", file=sys.stderr)
        return 2
    if given.planted:
        print(planted())
        return 0
    failed = 0
    for name, run, args, backend, share in checks(37 if given.once else 2048):
        if given.only not in name or (given.once and not name.startswith(ONCE)):
            continue
        compare = summed if share is None else functools.partial(same, share=share)
        try:
            got = by(backend, run, *args)
            found = "ran" if given.once else compare(got, by("xla", run, *args))
            print(f"PASS {name}: {found}", flush=True)
        except Exception as error:
            failed += 1
            print(
                f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True
            )
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=2)
    if not given.once and not given.only:
        for name, check in (
            (
                "gated MLP",
                lambda: near(by(None, layer, *mlp()), by("xla", layer, *mlp())),
            ),
            ("folded scales", folded),
        ):
            try:
                print(f"PASS {name}: {check()}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}")
    print(f"{failed} failed" if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
