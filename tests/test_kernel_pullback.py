"""Gradients of activations made as codes by a kernel: XLA's, and NumPy's in float64.

Kernels run here in Pallas's interpret mode, and are lowered and compiled for the H200.
"""

import functools
import re

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import activations, matmul, norms
from coat_jax.formats import E4M3, E5M2
from coat_jax.kernels import pullback
from coat_jax.policy import Operand
from coat_jax.quantize import Quantized, dequantize, quantize
from tests import activation_oracle as oracle
from tests.activation_oracle import draw
from tests.collectives import collectives
from tests.helpers import assert_same_bits, assert_same_codes, assert_within_format

FUNCTIONS = {name: activations.product_of(name) for name in activations.FUNCTIONS}
BY_KERNEL = [name for name in FUNCTIONS if name != "gelu"]
GROUP = 128
H_SCALE = jnp.float32(2.0**-5)


@functools.partial(
    jax.jit, static_argnames=("name", "group", "formats", "implementation")
)
def made(stored, dh, *, name, group=GROUP, formats=(E4M3, E4M3), implementation):
    """The largest gradients, the codes of h turned and of each gradient, both ways."""
    how = {"group": group, "implementation": implementation}
    most = pullback.largest(FUNCTIONS[name], stored, dh, **how)
    operand = Operand(format=formats[1])
    scales = [H_SCALE, *(matmul.scale_from(m, operand) for m in most)]
    how |= {"h_format": formats[0], "g_format": formats[1]}
    h_T, pairs = pullback.encode(FUNCTIONS[name], stored, dh, scales, **how)
    return most, scales, h_T, pairs


def both(stored, dh, **how):
    """(by the kernel, by XLA), after what must hold of any two."""
    got, want = (made(stored, dh, **how, implementation=i) for i in ("triton", "xla"))
    assert_same_bits(got[1], want[1])
    for g, w in zip(*map(jax.tree.leaves, (got[2:], want[2:])), strict=True):
        assert_same_codes(g, w)
    for lying, turned in got[3]:
        assert_same_bits(turned, jnp.moveaxis(lying, -1, 0))
    return got, want


def inputs(shape, dtype=jnp.float32, count=2, *, format=E4M3, group=GROUP):
    """What was kept, and a gradient."""
    xs = [jnp.asarray(draw(i, shape)) for i in range(count)]
    stored = [tuple(quantize(x, format=format, group=group)) for x in xs]
    return stored, jnp.asarray(draw(7, shape) / 64, dtype)


# Shape, group, dtype of dh, formats of what is kept, of h, and of gradients.
CASES = [
    ((1, 128), 128, jnp.float32, E4M3, (E4M3, E4M3)),
    ((5, 48), 16, jnp.bfloat16, E4M3, (E4M3, E5M2)),
    ((37, 96), 32, jnp.float16, E5M2, (E4M3, E4M3)),
    ((130, 256), 128, jnp.bfloat16, E4M3, (E5M2, E4M3)),
    ((5, 512), 256, jnp.float32, E4M3, (E4M3, E4M3)),
    ((256,), 128, jnp.float32, E4M3, (E4M3, E4M3)),
    ((2, 37, 384), 128, jnp.bfloat16, E4M3, (E4M3, E4M3)),
    ((2, 1, 3, 64), 32, jnp.float32, E4M3, (E4M3, E4M3)),
]


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "group", "dtype", "kept", "formats"), CASES, ids=lambda v: str(v)[:18]
)
def test_every_size_dtype_and_format(shape, group, dtype, kept, formats):
    stored, dh = inputs(shape, dtype, format=kept, group=group)
    both(stored, dh, name="silu", group=group, formats=formats)


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "gated"])
@pytest.mark.parametrize("name", BY_KERNEL)
def test_codes_are_those_of_the_gradients(name, count):
    """Against NumPy in float64, which knows no kernel."""
    stored, dh = inputs((37, 256), count=count)
    (most, scales, h_T, pairs), _ = both(stored, dh, name=name)
    xs = [np.asarray(dequantize(Quantized(*x)), np.float64) for x in stored]
    h, pull = oracle.activation(name)([], *xs)
    _, dxs = pull(np.asarray(dh, np.float64))
    top = E4M3.max * float(H_SCALE)
    value = np.asarray(h_T, np.float64).T * float(H_SCALE)
    assert_within_format(value, np.clip(h, -top, top), E4M3, float(H_SCALE))
    for m, scale, (codes, _), dx in zip(most, scales[1:], pairs, dxs, strict=True):
        np.testing.assert_allclose(m, np.abs(dx).max(), rtol=1e-5)
        # Near a zero of the slope float32 cancels: by a subnormal step at the most.
        error = np.abs(np.asarray(codes, np.float64) * float(scale) - dx)
        floor = 2 * E4M3.absolute * float(scale)
        assert (error <= np.maximum(E4M3.relative * np.abs(dx), floor) * 1.0001).all()


@pytest.mark.parametrize("name", BY_KERNEL)
def test_zeros_nan_inf_huge_and_tiny(name):
    for spoilt in (0.0, np.nan, np.inf, 1e30, 1e-30):
        stored, dh = inputs((5, 256))
        both(stored, dh.at[3, 130].set(spoilt), name=name)
        x = jnp.asarray(draw(0, (5, 256))).at[3, 130].set(spoilt)
        stored[0] = tuple(quantize(x))
        (most, _, h_T, pairs), _ = both(stored, dh, name=name)
        if np.isfinite(spoilt):
            continue
        for m, (codes, _) in zip(most, pairs, strict=True):  # one scale for all
            assert np.isnan(m)
            assert np.isnan(np.asarray(codes, np.float32)).all()
        spread = np.isnan(np.asarray(h_T, np.float32)).T
        assert spread[3, 128:].all()  # h's scale is the forward's; its group is seen
        assert not spread[:3].any()
    zeros = [tuple(quantize(jnp.zeros((5, 256))))] * 2
    _, (_, _, h_T, pairs) = both(zeros, jnp.zeros((5, 256)), name=name)
    assert not any(np.asarray(c, np.float32).any() for c in jax.tree.leaves(pairs))


def test_values_beyond_the_scale_are_clipped():
    x = jnp.full((4, 128), 1000.0)
    stored = [tuple(quantize(x))]
    (_, _, h_T, _), _ = both(stored, jnp.ones((4, 128)), name="relu_squared")
    assert (np.asarray(h_T, np.float32) == E4M3.max).all()


def _refusal(function=FUNCTIONS["silu"], shape=(4, 256), group=GROUP, dtype=None):
    struct = jax.ShapeDtypeStruct
    groups = (*shape[:-1], shape[-1] // group)
    stored = [(struct(shape, E4M3.dtype), struct(groups, jnp.float32))]
    dh = struct(shape, dtype or jnp.bfloat16)
    return pullback.refuses(function, stored, dh, group)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"function": FUNCTIONS["gelu"]}, "Triton backend has no erfc"),
        ({"function": norms.function_of("rms", 0.0)}, "needs statistics of its rows"),
        ({"group": 48, "shape": (4, 96)}, "power of two up to 2048, got 48"),
        ({"shape": (4, 130)}, "no whole groups of 128"),
        ({"shape": (1,) * 7 + (128,)}, "more than 6 axes|more than 7 axes"),
        ({"shape": (0, 128)}, "no whole groups"),
        ({"dtype": jnp.int8}, "but int8"),
    ],
)
def test_what_no_kernel_takes_is_said(how, words):
    assert re.search(words, _refusal(**how))
    assert _refusal() is None


def test_a_named_kernel_does_not_give_way():
    stored, dh = inputs((4, 130))
    with pytest.raises(ValueError, match=r"pullback: .*'triton'.*no whole groups"):
        made(stored, dh, name="silu", implementation="triton")
    both_ways = made(stored, dh, name="gelu", implementation=None)
    assert both_ways[2].shape == (130, 4)


def test_vmap_is_a_loop():
    stored, dh = inputs((3, 5, 256))
    f = functools.partial(made, name="silu", implementation="triton")
    got = jax.jit(jax.vmap(f))(stored, dh)
    for i in range(3):
        want = f([(c[i], s[i]) for c, s in stored], dh[i])
        one = jax.tree.map(lambda a, i=i: a[i], got)
        assert_same_bits(one[1], want[1])
        for g, w in zip(*map(jax.tree.leaves, (one[2:], want[2:])), strict=True):
            assert_same_codes(g, w)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize(
    "spec", [P("x", None, None), P(None, "x", None), P(None, None, "x")], ids=str
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_shards_are_made_where_they_lie(kind, spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    stored, dh = inputs((8, 16, 1024), jnp.bfloat16)
    f = functools.partial(made, name="silu", implementation="triton")
    args = jax.tree.map(place, (stored, dh))
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*args).compile()
    _, scales, h_T, pairs = compiled(*args)
    want = made(stored, dh, name="silu", implementation="xla")
    assert_same_bits(scales, want[1])
    for g, w in zip(*map(jax.tree.leaves, ((h_T, pairs), want[2:])), strict=True):
        assert_same_codes(g, w)
    turned = P(spec[2], *spec[:2])
    for lying, codes_T in pairs:
        assert lying.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
        assert codes_T.sharding.is_equivalent_to(NamedSharding(mesh, turned), 3)
    assert all(c.size <= 2 for c in collectives(compiled.as_text()))  # the maxima


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "gated"])
@pytest.mark.parametrize("name", BY_KERNEL)
def test_it_is_compiled_for_an_H200(name, count, h200_compile):
    struct = jax.ShapeDtypeStruct
    pair = struct((512, 1024), E4M3.dtype), struct((512, 8), jnp.float32)
    f = functools.partial(made, name=name, implementation=None)
    text = h200_compile(f, [pair] * count, struct((512, 1024), jnp.bfloat16)).as_text()
    for kernel in pullback.NAMES:
        assert kernel in text
