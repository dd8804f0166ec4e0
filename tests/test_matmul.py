"""Encoded operands and their products against NumPy, at every size and axis order."""

import functools

import jax
from jax import numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax import matmul
from coat_jax.formats import E4M3, E5M2
from coat_jax.kernels.dispatch import use_kernels
from coat_jax.policy import Operand
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_reordered, assert_same_bits

SCALINGS = ("tensor", "group", "vector")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
TINY = np.finfo(np.float32).tiny
encode = jax.jit(matmul.encode, static_argnums=(1, 2))


SHAPES = [
    ((), ()), ((1,), (0,)), ((17,), ()), ((3, 129), (1,)), ((2, 3, 96), (1, 2)),
    ((4, 5, 6), (0, 2)), ((1, 712), (-1,)),
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("shape", "contract"), SHAPES)
def test_operands_are_codes_times_scales(scaling, shape, contract):
    format = E5M2 if len(shape) == 3 else E4M3
    operand, x = Operand(format=format, scaling=scaling), draw(0, shape)
    got = encode(jnp.asarray(x), operand, contract)
    axes = contract if scaling == "vector" else range(len(shape))
    axes = {axis % len(shape) for axis in axes}
    scales = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    assert (got.codes.dtype, got.codes.shape) == (format.dtype, shape)
    assert (got.scale.dtype, got.scale.shape) == (jnp.float32, scales)
    want, doubt = oracle.encode(x, operand, contract)
    assert not doubt.any()
    assert_reordered(matmul.decode(got), want, n=1, scale=np.abs(want))


def test_without_a_format_an_operand_is_itself():
    x = jnp.asarray(draw(0, (3, 4)), jnp.bfloat16)
    got = matmul.encode(x, Operand(format=None), (1,))
    assert got.codes is x
    assert got.scale is None
    assert_same_bits(matmul.decode(got), x.astype(jnp.float32))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_group_scaling_is_the_published_two_stages(format):
    x = draw(3, (5, 100))
    got = matmul.encode(jnp.asarray(x), Operand(format=format, scaling="group"), (1,))
    # Stage 1, in the producing kernel: a bfloat16 scale for every 16 neighbours.
    first = np.zeros((5, 7), ml_dtypes.bfloat16)
    for i in range(7):
        largest = np.abs(x[:, 16 * i : 16 * i + 16]).max(axis=1)
        first[:, i] = (largest / np.float32(format.max)).astype(ml_dtypes.bfloat16)
    # Stage 2: the largest of them, used to encode and to decode.
    S = first.astype(np.float32).max()
    assert_same_bits(np.asarray(got.scale), np.full((1, 1), S))
    codes = np.clip(x / S, -format.max, format.max).astype(format.dtype)
    assert_same_bits(np.asarray(got.codes), codes)


def test_a_scale_that_bfloat16_rounds_down_saturates():
    x = jnp.full((1, 16), 448 * (1 + 2.0**-9), jnp.float32)  # bfloat16 makes it 448
    got = matmul.encode(x, Operand(scaling="group"), (1,))
    assert float(got.scale[0, 0]) == 1
    assert (np.asarray(got.codes, np.float32) == E4M3.max).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_make_all_under_their_scale_nan(scaling, value):
    x = draw(0, (4, 2000))
    x[2, 1234] = value
    got = np.asarray(
        matmul.decode(encode(jnp.asarray(x), Operand(scaling=scaling), (1,)))
    )
    want = np.zeros(x.shape, bool)
    want[2 if scaling == "vector" else slice(None)] = True
    assert_same_bits(np.isnan(got), want)
    assert np.isfinite(got[~want]).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3.2e38])
def test_extreme_values_are_finite_and_within_the_format(scaling, size):
    x = (np.sign(draw(0, (2, 32))) * np.float32(size)).astype(np.float32)
    got = np.asarray(
        matmul.decode(encode(jnp.asarray(x), Operand(scaling=scaling), (1,)))
    )
    # bfloat16 scales move the maximum by one more rounding before it saturates.
    bound = E4M3.relative * np.abs(x.astype(np.float64)) + TINY
    assert (np.abs(got - x.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_empty_operands_have_scales_and_no_codes(scaling, shape):
    got = matmul.encode(jnp.zeros(shape), Operand(scaling=scaling), (len(shape) - 1,))
    assert got.codes.shape == shape
    assert got.scale.ndim == len(shape)
    assert np.isfinite(np.asarray(got.scale)).all()


# Each case: einsum, and its dimension numbers with negative and permuted axes.
PRODUCTS = {
    "plain": ("tk,kn->tn", (5, 17), (17, 3), (((1,), (0,)), ((), ()))),
    "negative": ("tk,nk->tn", (5, 17), (3, 17), (((-1,), (-1,)), ((), ()))),
    "leading": ("abk,kn->abn", (2, 3, 17), (17, 5), (((2,), (0,)), ((), ()))),
    "two": ("tjk,jkn->tn", (4, 3, 17), (3, 17, 5), (((1, 2), (0, 1)), ((), ()))),
    "crossed": ("jtk,knjm->tnm", (3, 4, 7), (7, 5, 3, 2), (((0, 2), (2, 0)), ((), ()))),
    "batched": ("btk,bkn->btn", (2, 4, 17), (2, 17, 5), (((2,), (1,)), ((0,), (0,)))),
    "batches": (
        "tbkc,kcnb->bctn", (3, 2, 7, 4), (7, 4, 5, 2), (((2,), (0,)), ((1, 3), (3, 1))),
    ),
    "outer": ("t,n->tn", (4,), (5,), (((), ()), ((), ()))),
    "inner": ("k,k->", (17,), (17,), (((0,), (0,)), ((), ()))),
    "large": ("tk,kn->tn", (17, 712), (712, 96), (((1,), (0,)), ((), ()))),
}  # fmt: skip
OPERANDS = {
    "tensor": (Operand(), Operand()),
    "group": (Operand(scaling="group"), Operand(format=E5M2)),
    "vector": (Operand(scaling="vector"), Operand(format=E5M2, scaling="vector")),
    "mixed": (Operand(scaling="vector"), Operand()),
    "one": (Operand(format=None), Operand(scaling="vector")),
}


PAIRS = [(case, "vector") for case in PRODUCTS]
PAIRS += [("plain", "tensor"), ("two", "group"), ("batched", "mixed"), ("large", "one")]


@pytest.mark.parametrize(("case", "operands"), PAIRS)
def test_products_and_those_of_their_gradients(case, operands):
    (spec, left, right, numbers), operands = PRODUCTS[case], OPERANDS[operands]
    a, b = draw(0, left), draw(1, right)
    dims = matmul.dims_of(a.ndim, b.ndim, numbers)
    product = lambda a, b: jax.lax.dot_general(a, b, dims.numbers)
    g = draw(2, jax.eval_shape(product, a, b).shape)

    @jax.jit
    def run(a, b, g):
        how = {"dtype": jnp.dtype("float32"), "accumulation": "promoted"}
        y = matmul.multiply(*_pair(a, b, operands, dims), dims, **how)
        da_dims, da_order = matmul.lhs_gradient(dims)
        pair = _pair(g, b, operands, da_dims)
        da = matmul.gradient(*pair, da_dims, da_order, jax.typeof(a), **how)
        db_dims, db_order = matmul.rhs_gradient(dims)
        pair = _pair(a, g, operands, db_dims)
        db = matmul.gradient(*pair, db_dims, db_order, jax.typeof(b), **how)
        return y, da, db

    l, r, out = spec.replace("->", ",").split(",")
    want = (
        oracle.product(spec, a, b, *operands),
        oracle.product(f"{out},{r}->{l}", g, b, *operands),
        oracle.product(f"{l},{out}->{r}", a, g, *operands),
    )
    for got, correct in zip(run(a, b, g), want, strict=True):
        assert got.dtype == jnp.float32
        assert_computed(got, correct, n=max(a.size, b.size, g.size))


def _pair(a, b, operands, dims):
    contract = (dims.lhs_contract, dims.rhs_contract)
    zipped = zip((a, b), operands, contract, strict=True)
    return [matmul.encode(x, operand, axes) for x, operand, axes in zipped]


@pytest.mark.parametrize("accumulation", ["fast", "promoted"])
def test_the_largest_codes_neither_overflow_nor_lose_terms(accumulation):
    K = 5120
    # 448 * 57344 * 5120 is far above float16's maximum, into which no code may go.
    dims = matmul.dims_of(2, 2, (((1,), (0,)), ((), ())))
    ones = jnp.ones((16, K)), jnp.ones((K, 16))
    pair = _pair(*ones, (Operand(), Operand(format=E5M2)), dims)
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        y = matmul.multiply(*pair, dims, dtype=dtype, accumulation=accumulation)
        assert_reordered(y, np.full((16, 16), K), n=K, scale=K)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("contract", "leading"),
    [((2,), (0, 1)), ((1, 2), (0,)), ((2,), (1,)), ((0, 1), (2,)), ((0, 1, 2), ())],
    ids=["last", "last two", "one batch axis", "first two", "vector"],
)
def test_a_gradient_is_encoded_for_both_products_as_for_each(
    contract, leading, scaling
):
    """Whatever the kernel does with the axes, and where it is left out."""
    x, operand = jnp.asarray(draw(0, (3, 9, 20))), Operand(scaling=scaling)
    with use_kernels("triton"):
        twice = functools.partial(matmul.encode_twice, x, operand, contract, leading)
        got = jax.jit(twice)()
    for found, axes in zip(got, (contract, leading), strict=True):
        assert_same_bits(found, encode(x, operand, axes))


def _constant_product(a, b, scaling, **how):
    """Each element of a product of two matrices of 16 x 16 equal elements."""
    dims = matmul.dims_of(2, 2, (((1,), (0,)), ((), ())))
    operands = (Operand(scaling=scaling),) * 2
    pair = _pair(jnp.full((16, 16), a), jnp.full((16, 16), b), operands, dims)
    y = matmul.multiply(*pair, dims, dtype=jnp.float32, accumulation="fast", **how)
    return np.asarray(y)


def test_scales_are_applied_one_after_the_other():
    # Their product is below float32's range; the result is not.
    y = _constant_product(2.0**-100, 2.0**-20, "tensor")
    assert_same_bits(y, np.full((16, 16), 16 * 2.0**-120, np.float32))


@pytest.mark.parametrize(("a", "b"), [(100, -100), (120, -126), (-60, -40), (60, 40)])
def test_powers_of_two_are_applied_at_once(a, b):
    # Of large and small operands too, where the codes' product with one would overflow.
    y = _constant_product(2.0**a, 2.0**b, "tensor", exact=True)
    assert_same_bits(y, np.full((16, 16), 16 * 2.0 ** (a + b), np.float32))


def test_a_scale_below_the_range_makes_zero():
    y = _constant_product(2.0**-100, 2.0**-60, "tensor", exact=True)
    assert not y.any()


@pytest.mark.parametrize("scaling", ["tensor", "vector"])
def test_scales_are_powers_of_two_just_large_enough(scaling):
    x = draw(1, (5, 64)) * np.float32(3e-5)
    operand = Operand(scaling=scaling)
    scale = np.asarray(matmul.scale_of(jnp.asarray(x), operand, (1,)))
    assert_same_bits(np.frexp(scale)[0], np.full(scale.shape, 0.5, np.float32))
    largest = np.abs(x).max(axis=1 if scaling == "vector" else None, keepdims=True)
    assert (largest <= scale * E4M3.max).all()
    assert (largest > scale / 2 * E4M3.max).all()


@pytest.mark.parametrize(
    ("M", "K", "N", "small"),
    [
        (1, 256, 5120, True), (256, 5120, 1, True), (4, 4, 4, True), (9, 11, 100, True),
        (10, 10, 10, False), (16, 16, 16, False), (3, 5120, 100, False),
        (128, 1, 128, False), (0, 16, 16, True),
    ],
)  # fmt: skip
def test_which_products_are_too_small_for_fp8(M, K, N, small):
    dims = matmul.dims_of(2, 2, (((1,), (0,)), ((), ())))
    assert matmul.too_small((M, K), (K, N), dims) == small
    f = lambda a, b: matmul.multiply(
        *_pair(a, b, (Operand(), Operand()), dims),
        dims,
        dtype=a.dtype,
        accumulation="fast",
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (K, N))]
    (dot,) = [
        e for e in jax.make_jaxpr(f)(*shapes).eqns if e.primitive.name == "dot_general"
    ]
    want = jnp.float32 if small else E4M3.dtype
    assert [v.aval.dtype for v in dot.invars] == [want, want]


@pytest.mark.parametrize("accumulation", ["fast", "promoted"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_a_product_asks_of_the_compiler(dtype, accumulation):
    dims = matmul.dims_of(2, 2, (((1,), (0,)), ((), ())))
    how = {"dtype": jnp.dtype(dtype), "accumulation": accumulation}
    pair = _pair(jnp.ones((16, 32)), jnp.ones((32, 16)), (Operand(), Operand()), dims)
    (dot,) = [
        e
        for e in jax.make_jaxpr(lambda *p: matmul.multiply(*p, dims, **how))(*pair).eqns
        if e.primitive.name == "dot_general"
    ]
    levels = {"fast": jax.lax.Precision.DEFAULT, "promoted": jax.lax.Precision.HIGHEST}
    assert dot.params["precision"] in (
        levels[accumulation],
        (levels[accumulation],) * 2,
    )
    wide = "bfloat16" if dtype == "bfloat16" else "float32"
    assert dot.params["preferred_element_type"] == jnp.dtype(wide)


def test_dimension_numbers_are_completed():
    dims = matmul.dims_of(4, 3, (((-1,), (np.int64(1),)), ((0,), (-3,))))
    assert dims == matmul.Dims((3,), (1,), (0,), (0,), (1, 2), (2,))
    assert dims.numbers == (((3,), (1,)), ((0,), (0,)))
