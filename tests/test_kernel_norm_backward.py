"""The backward of norms by a kernel: XLA's terms, sums in another order.

Kernels run here in Pallas's interpret mode, and are lowered and compiled for the H200.
"""

import dataclasses
import functools
import re

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import fused, norms, recompute
from coat_jax.formats import E4M3
from coat_jax.kernels import norm
from coat_jax.kernels.dispatch import use_kernels
from coat_jax.kernels.prologue import Rowwise
from coat_jax.policy import BF16, Kept, Policy
from coat_jax.quantize import Quantized, dequantize, quantize
from tests import activation_oracle as oracle
from tests.activation_oracle import draw
from tests.collectives import collectives
from tests.helpers import assert_reordered, assert_same_bits, assert_same_codes

pytestmark = pytest.mark.once

EPSILON = 1e-2
FUNCTIONS = {kind: norms.function_of(kind, EPSILON) for kind in ("rms", "layer")}
KINDS = pytest.mark.parametrize("kind", FUNCTIONS)


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "implementation"))
def made(columns, stored, dys, residual, *, kind, dtype=jnp.float32, implementation):
    """dx, the rows' statistics, gradients of the columns, and the norm's codes."""
    how = {"implementation": implementation}
    dx, rows, dcolumns = norm.backward(
        FUNCTIONS[kind], columns, stored, dys, residual, dtype=dtype, **how
    )
    if not isinstance(stored, tuple):
        return dx, rows, dcolumns
    scale = jnp.float32(2.0**-6)
    how |= {"format": E4M3}
    codes = norm.again(FUNCTIONS[kind], columns, rows, stored, scale, **how)
    return dx, rows, dcolumns, codes


def inputs(shape, kind="rms", *, count=1, group=16, dtype=jnp.float32, params=True):
    """Columns, what is kept, gradients of the result, another of x."""
    array = lambda i, s: jnp.asarray(draw(i, s), dtype)
    columns = [array(i, shape[-1:]) if params else None for i in (1, 2)]
    columns[1] = columns[1] if kind == "layer" else None
    x = jnp.asarray(draw(0, shape)) * 3 + 0.5
    stored = tuple(quantize(x, group=group)) if group else x
    return columns, stored, [array(3 + i, shape) for i in range(count)], array(9, shape)


def assert_same(got, want, features, rows):
    """dx and all sums but for their order; codes but for few."""
    near = lambda a, b, n: assert_reordered(a, b, n, np.abs(_wide(b)).max() + 1.0)
    near(got[0], want[0], features)
    for g, w in zip(got[1], want[1], strict=True):
        near(g, w, features)
    for g, w in zip(got[2], want[2], strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            near(g, w, features * rows)
    for g, w in zip(got[3:], want[3:], strict=True):
        assert_same_codes(g, w)


def _wide(x):
    return np.asarray(x, np.float64)


def both(args, kind, **how):
    """By the kernel, after it was compared with XLA's."""
    run = functools.partial(made, *args, kind=kind, **how)
    got, want = run(implementation="triton"), run(implementation="xla")
    assert_same(got, want, args[2][0].shape[-1], args[2][0].size)
    return got


# Shape, gradients, group (0: x itself is kept), parameters.
CASES = [
    ((16, 96), 1, 16, True),
    ((2, 40, 640), 3, 128, True),
    ((2, 3, 8, 48), 2, 16, False),
    ((37, 64), 2, 64, True),
    ((8, 5120), 1, 128, True),
    ((24, 32), 3, 0, True),
]


@KINDS
@pytest.mark.parametrize(("shape", "count", "group", "params"), CASES, ids=str)
def test_every_size(shape, count, group, params, kind):
    args = inputs(shape, kind, count=count, group=group, params=params)
    both(args, kind)
    if shape == CASES[0][0]:
        both((*args[:3], None), kind)


@KINDS
def test_it_is_the_gradient_in_float64(kind):
    columns, stored, dys, residual = inputs((16, 96), kind, count=2)
    dx, _, dcolumns, codes_T = both((columns, stored, dys, residual), kind)
    x = _wide(dequantize(Quantized(*stored), group=16))
    h, pull = oracle.norm(kind, EPSILON)(columns, x)
    want, (want_dx,) = pull(sum(map(_wide, dys)))
    assert_reordered(dx, want_dx + _wide(residual), 96, np.abs(want_dx).max())
    for got, correct in zip(dcolumns, want, strict=True):
        if got is not None:
            assert_reordered(got, correct, 96 * 16, np.abs(correct).max())
    error = np.abs(_wide(codes_T).T * 2.0**-6 - np.clip(h, -7, 7))
    assert (error <= np.maximum(E4M3.relative * np.abs(h), 2.0**-15) * 1.001).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_added_in_float32_and_rounded_once(dtype):
    args = inputs((16, 96), count=3, dtype=dtype)
    run = functools.partial(made, *args, kind="rms", implementation="triton")
    narrow, wide = run(dtype=dtype), run(dtype=jnp.float32)
    assert narrow[0].dtype == narrow[2][0].dtype == dtype
    assert_same_bits(narrow[0], wide[0].astype(dtype))


@KINDS
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 0.0])
def test_what_is_not_finite_comes_to_its_row(kind, value):
    columns, stored, dys, residual = inputs((16, 96), kind)
    spoilt = dys[0].at[3, 40].set(value)
    x = jnp.asarray(draw(0, (16, 96))).at[3, 40].set(value)
    for args in (
        (columns, stored, [spoilt], residual),
        (columns, tuple(quantize(x, group=16)), dys, residual),
    ):
        run = functools.partial(made, *args, kind=kind)
        got, want = run(implementation="triton"), run(implementation="xla")
        for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_array_equal(np.isnan(_wide(g)), np.isnan(_wide(w)))
        bad = np.isnan(_wide(got[0])).any(1)
        assert bad[3] or np.isfinite(value)
        assert not np.delete(bad, 3).any()


@KINDS
def test_rows_of_one_value(kind):
    """Zeros: rsqrt(epsilon). Elsewhere the variance of a LayerNorm is about zero."""
    columns, _, dys, residual = inputs((16, 96), kind)
    args = columns, tuple(quantize(jnp.zeros((16, 96)), group=16)), dys, residual
    both(args, kind)


def _refusal(shape=(16, 96), function=FUNCTIONS["rms"], group=16, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct
    scales = struct((*shape[:-1], -(-shape[-1] // group)), jnp.float32)
    stored = struct(shape, E4M3.dtype), scales
    return norm.refuses(function, stored, [struct(shape, dtype)], dtype)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"function": Rowwise(lambda x: [], lambda c, r, x: x)}, "is no norm"),
        (
            {"function": dataclasses.replace(FUNCTIONS["rms"], epsilon=None)},
            "number for epsilon",
        ),
        ({"shape": (96,)}, "two axes or more"),
        ({"shape": (16, 16384)}, "of up to 8192"),
        ({"shape": (16, 100)}, "not whole groups of 16 to 256"),
        ({"shape": (16, 96), "group": 24}, "not whole groups"),
        ({"shape": (131, 96)}, "131 rows have no divisor from 4 to 128"),
        ({"shape": (0, 96)}, "no element"),
        ({"dtype": jnp.int8}, "but int8"),
    ],
)
def test_what_no_kernel_takes_is_said(how, words):
    assert re.search(words, str(_refusal(**how)))
    assert _refusal() is None


def test_a_named_kernel_does_not_give_way():
    args = inputs((131, 96))
    with pytest.raises(ValueError, match=r"norm_backward: .*'triton'.*no divisor"):
        made(*args, kind="rms", implementation="triton")
    assert made(*args, kind="rms", implementation=None)[0].shape == (131, 96)


def test_vmap_is_more_rows():
    columns, stored, dys, residual = inputs((3, 16, 96), count=2)
    f = functools.partial(made, kind="rms", implementation="triton")
    got = jax.vmap(f, (None, 0, 0, 0))(columns, stored, dys, residual)
    for i in range(3):
        args = jax.tree.map(lambda a, i=i: a[i], (stored, dys, residual))
        want = f(columns, *args)
        assert_same(jax.tree.map(lambda a, i=i: a[i], got), want, 96, 16)


AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("spec", [P("x", None, None), P(None, "x", None)], ids=str)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_rows_stay_where_they_lie(axes, spec):
    """The same bits; only the columns' sums travel."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axes,))
    columns, stored, dys, residual = inputs((8, 64, 96), "layer", count=2)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    args = columns, *jax.tree.map(place, (stored, dys, residual))
    f = functools.partial(made, kind="layer", implementation="triton")
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*args).compile()
    got = compiled(*args)
    want = f(columns, stored, dys, residual)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    for i in (0, 1, 3):
        assert_same_bits(jax.device_get(got[i]), jax.device_get(want[i]))
    assert_same(got, want, 96, 8 * 64)
    assert all(c.size <= 2 * 96 for c in collectives(compiled.as_text()))


# In layers ---------------------------------------------------------------------------

FP8 = Policy(kept=Kept(group=16))


def _gradients(kernels, run, *args):
    with use_kernels(kernels):
        y, pull = jax.vjp(run, *args)
        return y, pull(jax.tree.map(lambda a: jnp.ones_like(a) / 8, y))


@pytest.mark.soak
@pytest.mark.parametrize("with_input", [False, True])
@pytest.mark.parametrize("kept", [Kept(group=16), Kept(format=None)], ids=str)
def test_layers_use_it(kept, with_input):
    x, w = (jnp.asarray(draw(i, s)) for i, s in ((0, (16, 96)), (1, (96, 32))))
    how = {"scale": jnp.ones(96), "policy": Policy(kept=kept)}
    run = lambda x, w: fused.norm_linear(x, [w, w], **how, with_input=with_input)
    named = str(jax.make_jaxpr(functools.partial(_gradients, "triton", run))(x, w))
    assert f"name={norm.NAMES[0]}\n" in named
    assert (f"name={norm.NAMES[1]}\n" in named) == (kept.format is not None)
    got, want = (_gradients(k, run, x, w) for k in ("triton", "xla"))
    for g, v in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # A code of the product's operand may fall elsewhere, and is worth 2^-3 of it.
        np.testing.assert_allclose(g, v, atol=0.02 * np.abs(v).max())


@pytest.mark.parametrize("kernels", ["xla", "triton"])
def test_the_residuals_gradient_is_added_before_the_rounding(kernels):
    """To what a float32 x of the same values gets, and rounded once."""
    x, g, r = (jnp.asarray(draw(i, (16, 96)), jnp.bfloat16) for i in range(3))

    def gradient(x, g, r):
        run = functools.partial(recompute.recompute, FUNCTIONS["rms"], [None, None])
        with use_kernels(kernels):
            _, pull = jax.vjp(lambda x: run([x], policy=FP8, with_input=True), x)
        return pull([g.astype(jnp.float32), r])[0]

    wide = gradient(*(a.astype(jnp.float32) for a in (x, g, r)))
    assert_same_bits(gradient(x, g, r), wide.astype(jnp.bfloat16))


def test_a_plain_policy_gives_x_itself():
    x, w = jnp.ones((2, 16)), jnp.ones((16, 16))
    y, through = fused.norm_linear(x, [w], policy=BF16, with_input=True)
    assert through is x
    assert y.shape == (2, 16)


# For the H200 ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "features"), [("rms", 4096), ("layer", 5120)])
def test_it_is_compiled_for_an_H200(kind, features, h200_compile):
    struct = lambda dtype, *shape: jax.ShapeDtypeStruct((2, 64, *shape), dtype)
    row = struct(jnp.bfloat16, features)
    stored = struct(E4M3.dtype, features), struct(jnp.float32, features // 128)
    column = jax.ShapeDtypeStruct((features,), jnp.bfloat16)
    columns = [column, column if kind == "layer" else None]
    f = functools.partial(made, kind=kind, dtype=jnp.bfloat16, implementation=None)
    text = h200_compile(f, columns, stored, [row] * 3, row).as_text()
    for name in norm.NAMES:
        assert name in text
    assert not re.search(r"= f32\[2,64,\d{4}\]", text)  # nothing wide in memory
