"""Codes of norms and activations by a kernel: XLA's codes, and the bits that are kept.

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
from coat_jax.kernels import prologue
from coat_jax.policy import Operand
from coat_jax.quantize import quantize
from tests import activation_oracle as oracle
from tests.activation_oracle import draw
from tests.collectives import collectives
from tests.helpers import assert_same_bits, assert_same_codes, assert_within_format

pytestmark = pytest.mark.once

FUNCTIONS = {name: activations.product_of(name) for name in activations.FUNCTIONS}
FUNCTIONS |= {name: norms.function_of(name, 1e-6) for name in ("rms", "layer")}
BY_KERNEL = [name for name in FUNCTIONS if name != "gelu"]
GROUP = 128


def scale_for(most, format=E4M3):
    """The scale that a layer would take."""
    return matmul.scale_from(most, Operand(format=format))


@functools.partial(
    jax.jit, static_argnames=("name", "format", "kept", "implementation")
)
def made(xs, columns=(), *, name, format=E4M3, kept=(E4M3, GROUP), implementation):
    """The largest value, the codes and what is kept, as a layer makes them."""
    function, columns = FUNCTIONS[name], list(columns)
    rows = function.statistics(*[x.astype(jnp.float32) for x in xs])
    how = {"implementation": implementation}
    most = prologue.largest(function, columns, rows, xs, **how)
    scale = scale_for(most, format)
    how |= {"format": format, "kept": kept}
    codes, stored = prologue.encode(function, columns, rows, xs, scale, **how)
    return most, codes, stored


def both(xs, columns=(), **how):
    """(by the kernel, by XLA), after what must hold of any two."""
    how = {"kept": (E4M3, GROUP), **how}
    got = made(xs, columns, **how, implementation="triton")
    want = made(xs, columns, **how, implementation="xla")
    most, like = np.asarray(got[0]), np.asarray(want[0])
    # The same value but for its last bits, which a power of two's exponent hides.
    np.testing.assert_array_equal(np.isfinite(most), np.isfinite(like))
    assert_same_bits(scale_for(got[0]), scale_for(want[0]))
    assert_same_codes(got[1], want[1])
    assert_same_bits(got[2], want[2])
    kept = [
        tuple(quantize(x, format=how["kept"][0], group=how["kept"][1]))
        for x in (xs if how["kept"] else ())
    ]
    assert_same_bits(got[2], kept)  # which is what a layer without kernels keeps
    return got, want


def columns_of(N, which, dtype=jnp.float32):
    """[scale, bias] of a norm, or None for each whose letter isn't in `which`."""
    draws = {"s": draw(8, (N,)) / 8 + 1, "b": draw(9, (N,)) / 8}
    return tuple(
        jnp.asarray(d, dtype) if name in which else None for name, d in draws.items()
    )


def inputs(shape, dtype=jnp.float32, count=1):
    return [jnp.asarray(draw(i, shape), dtype) for i in range(count)]


# Shape, group, dtype of x, formats of codes and of what is kept.
CASES = [
    ((1, 128), 128, jnp.float32, E4M3, E4M3),
    ((5, 48), 16, jnp.bfloat16, E4M3, E4M3),
    ((37, 96), 32, jnp.float16, E5M2, E4M3),
    ((130, 256), 128, jnp.bfloat16, E4M3, E5M2),
    ((5, 512), 256, jnp.float32, E5M2, E5M2),
    ((256,), 128, jnp.float32, E4M3, E4M3),
    ((2, 5, 384), 128, jnp.bfloat16, E4M3, E4M3),
    ((2, 1, 3, 96), 32, jnp.float32, E4M3, E4M3),
    ((130, 4352), 256, jnp.bfloat16, E4M3, E4M3),
]


@pytest.mark.parametrize(
    ("shape", "group", "dtype", "format", "kept"), CASES, ids=lambda v: str(v)[:18]
)
def test_every_size_dtype_and_format(shape, group, dtype, format, kept):
    how = {"format": format, "kept": (kept, group)}
    if shape[-1] % 64 == 0:
        both(inputs(shape, dtype, 2), name="silu", **how)
    else:
        both(inputs(shape, dtype), columns_of(shape[-1], "s", dtype), name="rms", **how)


@pytest.mark.parametrize("name", [n for n in BY_KERNEL if n in activations.FUNCTIONS])
def test_every_activation_alone(name):
    both(inputs((37, 384), jnp.bfloat16), name=name)


@pytest.mark.parametrize(
    ("name", "which"), [("rms", ""), ("layer", ""), ("layer", "b"), ("layer", "s")]
)
def test_norms_with_and_without_parameters(name, which):
    both(inputs((2, 19, 256), jnp.bfloat16), columns_of(256, which), name=name)


@pytest.mark.parametrize("name", ["silu", "layer"])
def test_what_is_not_kept_is_not_made(name):
    columns = columns_of(384, "sb") if name == "layer" else ()
    got, _ = both(inputs((5, 384)), columns, name=name, kept=None)
    assert got[2] == []


@pytest.mark.parametrize("name", BY_KERNEL)
def test_codes_are_those_of_the_function_itself(name):
    """Against NumPy in float64, which knows no kernel."""
    norm = name in ("rms", "layer")
    xs = inputs((5, 256), count=1 if norm else 2)
    columns = columns_of(256, "sb" if name == "layer" else "s") if norm else ()
    (most, codes, _), _ = both(xs, columns, name=name)
    wide = [np.asarray(x, np.float64) for x in xs]
    judge = oracle.norm(name, 1e-6) if norm else oracle.activation(name)
    h, _ = judge(columns, *wide)
    np.testing.assert_allclose(most, np.abs(h).max(), rtol=1e-6)
    scale = float(scale_for(most))
    assert_within_format(np.asarray(codes, np.float64) * scale, h, E4M3, scale)


@pytest.mark.parametrize("name", BY_KERNEL)
def test_zeros_nan_inf_huge_and_tiny(name):
    norm = name in ("rms", "layer")
    count = 1 if norm else 2
    columns = columns_of(256, "sb" if name == "layer" else "s") if norm else ()
    for spoilt in (0.0, np.nan, np.inf, -np.inf, 1e30, 1e-30, 1e-42):
        xs = inputs((5, 256), count=count)
        xs[-1] = xs[-1].at[3, 130].set(spoilt)
        xs[-1] = xs[-1] * 0 if spoilt == 0 else xs[-1]
        (most, codes, stored), _ = both(xs, columns, name=name)
        if np.isnan(spoilt):
            assert np.isnan(most)
            assert np.isnan(np.asarray(codes, np.float32)).all()
        if not np.isfinite(spoilt):  # its group alone
            scales = np.asarray(stored[-1][1])
            np.testing.assert_array_equal(np.argwhere(np.isnan(scales)), [[3, 1]])
    everywhere = [jnp.full((5, 256), -1e-42)] * count
    both(everywhere, columns, name=name)


def _refusal(name="silu", shape=(4, 128), dtype=jnp.float32, group=GROUP):
    return prologue.refuses(
        FUNCTIONS[name], [], [jax.ShapeDtypeStruct(shape, dtype)], group
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"name": "gelu"}, "Triton backend has no erfc"),
        ({"group": 48, "shape": (4, 96)}, "power of two up to 2048, got 48"),
        ({"group": 4096, "shape": (4, 8192)}, "power of two up to 2048, got 4096"),
        ({"shape": (4, 130)}, r"\(4, 130\) has no whole groups of 128"),
        ({"shape": (0, 128)}, "has no whole groups"),
        ({"shape": ()}, "has no whole groups"),
        ({"shape": (2**24, 128)}, "more than 32 bits can count"),
        ({"dtype": jnp.float64}, "none of float32, bfloat16 and float16, but float64"),
        ({"dtype": jnp.int32}, "but int32"),
    ],
)
def test_what_no_kernel_takes_is_said(how, words):
    assert re.search(words, _refusal(**how))
    assert _refusal() is None
    assert _refusal(group=None) is None


def test_a_named_kernel_does_not_give_way():
    how = {"name": "silu", "implementation": "triton"}
    with pytest.raises(ValueError, match=r"prologue: .*'triton'.*no whole groups"):
        made(inputs((4, 130)), **how)
    most, *_ = made(inputs((4, 130)), name="silu", implementation=None, kept=None)
    assert most.shape == ()


@pytest.mark.parametrize("name", ["silu", "layer"])
def test_vmap_is_a_loop(name):
    norm = name == "layer"
    xs = inputs((3, 5, 256), count=1 if norm else 2)
    columns = [c.reshape(1, -1) for c in columns_of(256, "sb")] if norm else []
    columns = [jnp.tile(c, (3, 1)) * jnp.arange(1.0, 4)[:, None] for c in columns]
    f = functools.partial(made, name=name, implementation="triton")
    most, codes, stored = jax.jit(jax.vmap(f))(xs, columns)
    for i in range(3):
        one = f([x[i] for x in xs], [c[i] for c in columns])
        assert_same_codes(codes[i], one[1])
        assert_same_bits([(c[i], s[i]) for c, s in stored], one[2])
        np.testing.assert_allclose(most[i], one[0], rtol=1e-6)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_shards_are_encoded_where_they_lie(kind, spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    (x,), columns = inputs((16, 1024), jnp.bfloat16), columns_of(1024, "sb")
    f = functools.partial(made, name="layer", implementation="triton")
    args = [place(x, spec)], [place(c, P(spec[1])) for c in columns]
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*args).compile()
    most, codes, stored = compiled(*args)
    want = made([x], columns, name="layer", implementation="xla")
    assert_same_codes(codes, want[1])
    assert_same_bits(stored, want[2])
    for each in (codes, stored[0][0]):
        assert each.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    # A row's sums travel where rows are cut, and the one maximum: nothing of x's size.
    assert max(c.size for c in collectives(compiled.as_text())) <= 2 * x.shape[0]


def _struct(shape=(512, 1024)):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("name", BY_KERNEL)
def test_it_is_compiled_for_an_H200(name, h200_compile):
    norm = name in ("rms", "layer")
    columns = [jax.ShapeDtypeStruct((1024,), jnp.float32)] * 2 if norm else []
    f = functools.partial(made, name=name, implementation=None)
    text = h200_compile(f, [_struct()] * (1 if norm else 2), columns).as_text()
    for kernel in prologue.NAMES:
        assert kernel in text


def test_XLA_runs_for_an_H200_what_no_kernel_takes(h200_compile):
    f = functools.partial(made, name="gelu", implementation=None)
    text = h200_compile(f, [_struct()]).as_text()
    assert not [kernel for kernel in prologue.NAMES if kernel in text]


def test_derivatives_are_the_references():
    (x,) = inputs((5, 256))
    norm = FUNCTIONS["layer"]

    def loss(x, implementation):
        rows = norm.statistics(x)
        how = {"implementation": implementation}
        return prologue.largest(norm, [None, None], rows, [x], **how)

    got, want = (jax.grad(loss)(x, i) for i in ("triton", "xla"))
    assert_same_bits(got, want)
