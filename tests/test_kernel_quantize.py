"""The kernels of group quantisation against their definition in XLA, bit for bit."""

import functools
import re

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax import formats
from coat_jax.kernels import quantize as kernel
from coat_jax.kernels import tiles
from coat_jax.quantize import quantize
from tests import helpers

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
BACKENDS = ["triton", *(["mosaic"] if tiles.HAS_MOSAIC else [])]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def _rows(shape, dtype=np.float32):
    """Values of all sizes, with a zero group, and groups with a NaN and an Inf."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, shape)
    flat = x.reshape(-1)
    flat[:300] = 0
    flat[-1], flat[flat.size // 2] = np.nan, -np.inf
    flat[301] = 1e-45
    return jnp.asarray(x.astype(np.float32), dtype)


def _both(x, backend, **how):
    run = lambda name: jax.jit(functools.partial(quantize, implementation=name, **how))(
        x
    )
    return run(backend), run("xla")


def _assert_equal(got, want):
    """The same scales and codes; which of a format's NaN codes is left open."""
    assert got.codes.dtype == want.codes.dtype
    helpers.assert_same_bits(got.scale, want.scale)
    nan = np.isnan(np.asarray(want.codes, np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(got.codes, np.float32)), nan)
    helpers.assert_same_bits(np.asarray(got.codes)[~nan], np.asarray(want.codes)[~nan])


CASES = [
    ((5, 512), 128, "e4m3", jnp.bfloat16),
    ((2, 35, 48), 16, "e4m3", jnp.bfloat16),
    ((3, 256), 256, "e5m2", jnp.float32),
    ((640,), 64, "e5m2", jnp.float16),
    ((2, 3, 4, 96), 32, "e4m3", jnp.float32),
]


@each_backend
@pytest.mark.parametrize(("shape", "group", "format", "dtype"), CASES, ids=str)
def test_codes_and_scales_are_the_references(shape, group, format, dtype, backend):
    x = _rows(shape, dtype)
    got, want = _both(x, backend, group=group, format=FORMATS[format])
    _assert_equal(got, want)
    scale = np.asarray(got.scale)
    assert got.scale.shape == (*shape[:-1], shape[-1] // group)
    assert 0 < np.isnan(scale).sum() <= 2  # of the NaN and of the Inf, maybe one group
    assert np.nanmin(scale) == np.float32(kernel.TINY)  # of the zeros


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_scale_for_the_whole_array(backend):
    x = _rows((33, 130))[:10]  # whole, without NaN
    _assert_equal(*_both(x, backend, group=None))


def test_a_mapped_axis_is_rows():
    x = _rows((3, 5, 256))
    got = jax.vmap(functools.partial(quantize, implementation="triton"))(x)
    _assert_equal(got, jax.jit(quantize)(x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards_are_quantised_where_they_lie(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(_rows((8, 512)), NamedSharding(mesh, P("a", "b")))
        got, want = _both(x, "triton")
        assert got.codes.sharding.is_equivalent_to(x.sharding, 2)
    _assert_equal(got, want)


@pytest.mark.parametrize(
    ("x", "how", "words"),
    [
        (np.ones((4, 96)), {"group": 48}, "the group is none of 16, .* but 48"),
        (np.ones((4, 130)), {"group": 128}, r"\(4, 130\) has no whole groups of 128"),
        (np.ones((128, 4)), {"axis": 0}, "kernels group the last axis alone"),
    ],
    ids=["group", "short group", "axis"],
)
def test_a_named_kernel_says_why_it_cannot(x, how, words):
    x = jnp.asarray(x, jnp.float32)
    with pytest.raises(
        ValueError, match=f"^quantize: implementation='triton'.*{words}"
    ):
        quantize(x, implementation="triton", **how)
    _assert_equal(quantize(x, **how), quantize(x, implementation="xla", **how))


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, 128), jnp.int32, "x is none of float32, .* but int32"),
        ((0, 128), jnp.float32, r"no element, its shape being \(0, 128\)"),
        ((2**24, 128), jnp.float32, "2147483648 elements, more than 32 bits"),
    ],
)
def test_what_no_kernel_reads(shape, dtype, words):
    found = []
    note = lambda x: found.append(kernel.refuses(x, 128))
    jax.eval_shape(note, jax.ShapeDtypeStruct(shape, dtype))
    assert re.search(words, found[0])


def test_cut_groups_are_left_to_xla():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((2, 512)), NamedSharding(mesh, P(None, "a")))
    assert "cuts groups of 128" in kernel.refuses(x, 128)
    assert kernel.refuses(x, 64) is None


@each_backend
@pytest.mark.parametrize("group", [16, 256])
def test_on_an_h200_it_is_one_kernel_without_temporaries(h200_compile, backend, group):
    x = jax.ShapeDtypeStruct((1000, 11008), jnp.bfloat16)
    run = functools.partial(
        kernel.quantize, format=formats.E4M3, group=group, implementation=backend
    )
    compiled = h200_compile(lambda x: run(x), x)
    assert kernel.NAME in compiled.as_text()
    assert " fusion(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_on_eight_h200s_nothing_is_gathered(h200_compile, h200_mesh, explicit):
    on = h200_mesh(8, shape=(4, 2), names=("a", "b"), explicit=explicit)
    split = NamedSharding(on, P("a", "b"))
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=split)
    text = h200_compile(quantize, x, on=on).as_text()
    assert kernel.NAME in text
    assert "f8e4m3fn[256,1024]" in text
    assert "all-gather" not in text
