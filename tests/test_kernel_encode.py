"""The kernels that encode under a given scale against their definition, bit for bit."""

import functools

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax.formats import E4M3, E5M2
from coat_jax.kernels import tiles
from coat_jax.kernels.encode import NAME, encode, refuses
from tests import helpers

BACKENDS = ["triton", *(["mosaic"] if tiles.HAS_MOSAIC else [])]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
OUTPUTS = {"as it lies": (True, False), "T": (False, True), "both": (True, True)}
each_output = pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)


def _drawn(shape, scale_shape, dtype=jnp.bfloat16):
    """Values, some beyond the scale's reach, and scales that are no powers of two."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    scale = rng.uniform(0.003, 0.009, scale_shape).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(scale)


def _run(x, scale, backend, outputs, *, format=E4M3, rows=None):
    codes, transposed = outputs
    how = {"codes": codes, "transposed": transposed, "implementation": backend}
    return jax.jit(functools.partial(encode, format=format, rows=rows, **how))(x, scale)


def _assert_equal(got, want):
    """The same codes; which of a format's NaN codes is left open."""
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is None:
            continue
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        nan = np.isnan(np.asarray(w, np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(g, np.float32)), nan)
        helpers.assert_same_bits(np.asarray(g)[~nan], np.asarray(w)[~nan])


CASES = [  # shape, scale's, how many axes are rows
    ((), (), None),
    ((7,), (1,), None),
    ((65, 129), (1, 1), None),
    ((65, 129), (65, 1), None),
    ((65, 129), (1, 129), None),
    ((3, 20, 40), (3, 20, 1), None),
    ((3, 20, 40), (1, 20, 40), 1),
]


@each_backend
@each_output
@pytest.mark.parametrize(("shape", "scale_shape", "rows"), CASES, ids=str)
def test_codes_are_the_references(shape, scale_shape, rows, outputs, backend):
    x, scale = _drawn(shape, scale_shape)
    got, want = (_run(x, scale, b, outputs, rows=rows) for b in (backend, "xla"))
    _assert_equal(got, want)


@each_backend
def test_the_transposed_codes_are_the_codes_transposed(backend):
    x, scale = _drawn((2, 24, 5, 8), (1, 1, 1, 1), jnp.float32)
    codes, turned = _run(x, scale, backend, (True, True), format=E5M2, rows=2)
    assert turned.shape == (5, 8, 2, 24)
    helpers.assert_same_bits(turned, codes.transpose(2, 3, 0, 1))
    helpers.assert_within_format(
        np.asarray(codes, np.float32) * scale, x, E5M2, np.asarray(scale)
    )


@each_backend
def test_nan_spoils_what_it_scales_and_large_values_are_clipped(backend):
    x, scale = _drawn((16, 48), (16, 1), jnp.float32)
    x = x.at[0, 0].set(1e30).at[1, 1].set(jnp.nan).at[2, 2].set(-jnp.inf)
    scale = scale.at[3].set(jnp.nan)
    codes, turned = _run(x, scale, backend, (True, True))
    wide = np.asarray(codes, np.float32)
    assert wide[0, 0] == E4M3.max
    want = np.zeros(x.shape, bool)
    want[3] = want[1, 1] = want[2, 2] = True
    np.testing.assert_array_equal(np.isnan(wide), want)
    np.testing.assert_array_equal(np.isnan(np.asarray(turned, np.float32)), want.T)


@pytest.mark.parametrize("mapped", [(0, 0), (0, None)], ids=["scales", "one scale"])
def test_mapped_matrices(mapped):
    x, scale = _drawn((3, 20, 48), (3,))
    scale = scale if mapped[1] == 0 else scale[0]
    run = lambda name: jax.vmap(
        functools.partial(encode, format=E4M3, transposed=True, implementation=name),
        in_axes=mapped,
    )(x, scale)
    _assert_equal(run("triton"), run("xla"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards_are_encoded_where_they_lie(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x, scale = _drawn((8, 6, 32), (8, 6, 1))
    with jax.set_mesh(mesh):
        x, scale = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in ((x, P("a", None, "b")), (scale, P("a", None, None)))
        )
        got, want = (_run(x, scale, b, (True, True)) for b in ("triton", "xla"))
        turned = NamedSharding(mesh, P("b", "a", None))
        assert got[0].sharding.is_equivalent_to(x.sharding, 3)
        assert got[1].sharding.is_equivalent_to(turned, 3)
    _assert_equal(got, want)


@pytest.mark.parametrize(
    ("shape", "scale_shape", "how", "words"),
    [
        ((4, 8), (1, 1), {"codes": False}, "must be true, got neither; leave"),
        (
            (4, 8),
            (4,),
            {},
            r"scale must have one element, .* got shape \(4,\) for x of",
        ),
        ((4, 8), (2, 1), {}, r"1 or x's size along each axis, got shape \(2, 1\)"),
        ((4, 8), (1, 1), {"rows": 3}, "rows must be a number of x's 2 axes, got 3"),
    ],
)
def test_what_does_not_fit_is_refused(shape, scale_shape, how, words):
    with pytest.raises(ValueError, match=f"^encode: .*{words}"):
        encode(*_drawn(shape, scale_shape), format=E4M3, **how)


@pytest.mark.parametrize(
    ("shape", "dtype", "scale_shape", "words"),
    [
        ((4, 8), jnp.int8, (1, 1), "x is none of float32, bfloat16, float16 but int8"),
        ((4, 0), jnp.float32, (1, 1), "x has no element"),
        (
            (4, 2**29),
            jnp.float32,
            (1, 1),
            "x has 2147483648 elements, more than 32 bits",
        ),
        ((4, 8), jnp.float32, (4, 8), r"\(4, 8\), varies along x's first 1 axes and"),
    ],
)
def test_what_no_kernel_takes(shape, dtype, scale_shape, words):
    assert words.replace("\\", "") in refuses(shape, dtype, scale_shape, 1)


def test_a_named_kernel_says_why_it_cannot():
    x, scale = _drawn((4, 8), (4, 8))
    words = "^encode: implementation='triton' must be able .* varies along x's first 1"
    with pytest.raises(ValueError, match=words):
        encode(x, scale, format=E4M3, implementation="triton")
    both = {
        name: encode(x, scale, format=E4M3, implementation=name)
        for name in (None, "xla")
    }
    _assert_equal(both[None], both["xla"])


@each_backend
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_on_an_h200_it_is_one_kernel_without_temporaries(h200_compile, backend, dtype):
    x = jax.ShapeDtypeStruct((1024, 2000), dtype)
    for scale_shape, outputs in (((1, 1), (True, True)), ((1024, 1), (True, False))):
        run = functools.partial(_run, backend=backend, outputs=outputs)
        scale = jax.ShapeDtypeStruct(scale_shape, jnp.float32)
        compiled = h200_compile(run, x, scale)
        assert NAME in compiled.as_text()
        assert " fusion(" not in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 1024


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_on_eight_h200s_nothing_is_gathered(h200_compile, h200_mesh, explicit):
    on = h200_mesh(8, shape=(4, 2), names=("a", "b"), explicit=explicit)
    described = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(on, P(*spec))
    )
    x = described((1024, 2048), jnp.bfloat16, "a", "b")
    scale = described((1024, 1), jnp.float32, "a", None)
    run = functools.partial(encode, format=E4M3, transposed=True)
    text = h200_compile(run, x, scale, on=on).as_text()
    assert NAME in text
    assert "f8e4m3fn[1024,256]" in text
    assert "all-gather" not in text
