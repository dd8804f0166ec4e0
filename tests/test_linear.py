"""Linear maps: values and gradients of the very codes, at every size and dtype."""

import dataclasses
import functools

from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.formats import E5M2
from coat_jax.kernels.dispatch import use_kernels
from coat_jax.linear import fp8_dot, fp8_dot_general, linear
from coat_jax.policy import BF16, DEFAULT, PAPER, Operand, Policy
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits

_VECTOR = Operand(scaling="vector")
_OFF = Operand(format=None)
POLICIES = {
    "default": DEFAULT,
    "paper": PAPER,
    "vector": Policy(x=_VECTOR, w=_VECTOR, g=Operand(format=E5M2, scaling="vector")),
    "x in e5m2": Policy(x=Operand(format=E5M2, scaling="group"), forward="promoted"),
    "w in e5m2": Policy(w=Operand(format=E5M2, scaling="vector"), backward="fast"),
    "no w": Policy(w=_OFF),
    "no x": Policy(x=_OFF),
    "only x": Policy(w=_OFF, g=_OFF),
    "only g": dataclasses.replace(BF16, g=Operand(format=E5M2)),
}
MATMUL = (((1,), (0,)), ((), ()))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, *pull(g)


def with_dtype(dtype, *shapes):
    return [jnp.asarray(draw(i, shape), dtype) for i, shape in enumerate(shapes)]


# The plain policy ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_plain_policy_is_flax_bit_for_bit(dtype):
    x, g = with_dtype(dtype, (3, 5, 17), (3, 5, 12))
    layer = nnx.Linear(17, 12, dtype=dtype, rngs=nnx.Rngs(0))  # float32 parameters
    layer.bias[...] = jnp.asarray(draw(3, (12,)))
    graph, state = nnx.split(layer)
    params = (x, layer.kernel[...], layer.bias[...], g)
    plain = {"policy": BF16}

    def flax(x, kernel, bias, residual):
        new = nnx.State({"kernel": nnx.Param(kernel), "bias": nnx.Param(bias)})
        return residual + nnx.merge(graph, new)(x)

    ours = lambda x, kernel, bias, r: linear(x, kernel, bias, residual=r, **plain)
    with jax.numpy_dtype_promotion("standard"):
        want = value_and_gradients(flax, params, g)
    assert_same_bits(value_and_gradients(ours, params, g), want)
    del state


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(jnp.float32, None), (jnp.bfloat16, jnp.float32), (jnp.float16, None)],
)
def test_the_plain_dot_general_is_that_of_lax_bit_for_bit(dtype, wide):
    a, b = with_dtype(dtype, (2, 4, 17), (2, 17, 3))
    g = jnp.asarray(draw(2, (2, 4, 3)), wide or dtype)
    numbers = (((2,), (1,)), ((0,), (0,)))
    how = (numbers, lax.Precision.HIGHEST, wide)
    ours = lambda a, b: fp8_dot_general(a, b, *how, policy=BF16)
    theirs = lambda a, b: lax.dot_general(a, b, *how)
    same = [value_and_gradients(f, (a, b), g) for f in (ours, theirs)]
    assert_same_bits(*same)


# Against the judge --------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_values_and_gradients_are_those_of_the_codes(name):
    policy = POLICIES[name]
    x, w, bias, r, g = with_dtype(
        jnp.float32, (2, 11, 100), (100, 48), (48,), (2, 11, 48), (2, 11, 48)
    )
    f = lambda x, w, bias, r: linear(x, w, bias, residual=r, policy=policy)
    y, dx, dw, dbias, dr = value_and_gradients(f, (x, w, bias, r), g)
    want = oracle.linear("btk,kn->btn", x, w, g, policy)
    assert_computed(y, want[0] + np.asarray(bias) + np.asarray(r), n=100)
    assert_computed(dx, want[1], n=48)
    assert_computed(dw, want[2], n=22)
    assert_computed(dbias, np.asarray(g, np.float64).sum((0, 1)), n=22)
    assert_same_bits(dr, g)


@pytest.mark.parametrize(
    ("M", "K", "N", "name"),
    [
        (1, 3, 5120, "default"), (3, 17, 712, "paper"), (17, 5120, 96, "default"),
        (96, 96, 100, "vector"), (100, 129, 3, "default"), (129, 712, 17, "vector"),
        (712, 100, 1, "paper"), (5120, 1, 129, "default"),
    ],
)  # fmt: skip
def test_every_size_in_every_dimension(M, K, N, name):
    x, w, g = with_dtype(jnp.float32, (M, K), (K, N), (M, N))
    f = functools.partial(fp8_dot, policy=POLICIES[name])
    got = value_and_gradients(f, (x, w), g)
    want = oracle.linear("tk,kn->tn", x, w, g, POLICIES[name])
    for value, correct, terms in zip(got, want, (K, N, M), strict=True):
        assert_computed(value, correct, n=terms)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(jnp.bfloat16, "default"), (jnp.bfloat16, "vector"), (jnp.float16, "paper")],
)
def test_narrow_inputs_add_the_rounding_of_their_results(dtype, name):
    # Float32 kernels: encoded as they are, without a narrow copy between.
    x, g = with_dtype(dtype, (20, 100), (20, 48))
    w = jnp.asarray(draw(5, (100, 48)))
    f = functools.partial(fp8_dot, policy=POLICIES[name])
    y, dx, dw = value_and_gradients(f, (x, w), g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    want = oracle.linear("tk,kn->tn", x, w, g, POLICIES[name])
    # bfloat16 products are rounded before their scales are applied, and after.
    assert_computed(y, want[0], n=100, roundings=2)
    assert_computed(dx, want[1], n=48, roundings=2)
    narrow = np.asarray(dw).astype(jnp.bfloat16)  # the product's own rounding
    assert_computed(narrow, want[2], n=20, roundings=2)


@pytest.mark.parametrize(
    ("spec", "shapes", "numbers"),
    [
        ("tjk,jkn->tn", [(6, 3, 17), (3, 17, 20)], (((1, 2), (0, 1)), ((), ()))),
        ("btk,bkn->btn", [(2, 9, 17), (2, 17, 20)], (((2,), (1,)), ((0,), (0,)))),
        ("tbk,nkb->btn", [(9, 2, 17), (20, 17, 2)], (((-1,), (-2,)), ((1,), (-1,)))),
    ],
    ids=["two", "batched", "permuted"],
)
@pytest.mark.parametrize("name", ["paper", "vector"])
def test_dimension_numbers_as_lax_takes_them(spec, shapes, numbers, name):
    x, w = with_dtype(jnp.float32, *shapes)
    policy = POLICIES[name]
    f = lambda x, w: fp8_dot_general(x, w, numbers, policy=policy)
    g = jnp.asarray(draw(2, jax.eval_shape(f, x, w).shape))
    want = oracle.linear(spec, x, w, g, policy)
    for value, correct in zip(value_and_gradients(f, (x, w), g), want, strict=True):
        assert_computed(value, correct, n=51)


def test_a_kernel_with_two_axes_on_either_side():
    x, w, bias = with_dtype(jnp.float32, (5, 4, 8), (4, 8, 3, 6), (3, 6))
    f = lambda x, w, bias: linear(x, w, bias, policy=PAPER, contract=2)
    g = jnp.asarray(draw(7, (5, 3, 6)))
    y, dx, dw, dbias = value_and_gradients(f, (x, w, bias), g)
    want = oracle.linear("tjk,jknm->tnm", x, w, g, PAPER)
    assert_computed(y, want[0] + np.asarray(bias), n=32)
    assert_computed(dx, want[1], n=18)
    assert_computed(dw, want[2], n=5)
    assert_computed(dbias, np.asarray(g).sum(0), n=5)


@pytest.mark.parametrize("name", ["vector", "no x"])
def test_keeping_the_input_gives_the_bits_of_keeping_its_codes(name):
    x, w, g = with_dtype(jnp.bfloat16, (9, 40), (40, 20), (9, 20))
    both = [
        value_and_gradients(
            functools.partial(fp8_dot, policy=POLICIES[name], keep=keep), (x, w), g
        )
        for keep in ("codes", "input")
    ]
    assert_same_bits(*both)


def test_a_wider_result_is_not_rounded_to_the_operands_dtype():
    x, w = with_dtype(jnp.bfloat16, (20, 100), (100, 48))
    f = lambda x, w: fp8_dot_general(x, w, MATMUL, None, jnp.float32)
    y = jax.jit(f)(x, w)
    assert y.dtype == jnp.float32
    want = oracle.linear("tk,kn->tn", x, w, jnp.ones((20, 48)), DEFAULT)
    assert_computed(y, want[0], n=100)


# Edges --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "K", "N", "name"),
    [
        (0, 4, 5, "vector"),
        (3, 0, 5, "default"),
        (3, 0, 5, "paper"),
        (3, 4, 0, "vector"),
    ],
)
def test_empty_arrays_have_products_and_gradients(M, K, N, name):
    x, w, g = with_dtype(jnp.float32, (M, K), (K, N), (M, N))
    y, dx, dw = value_and_gradients(
        functools.partial(fp8_dot, policy=POLICIES[name]), (x, w), g
    )
    assert_same_bits(
        (y, dx, dw), (jnp.zeros((M, N)), jnp.zeros((M, K)), jnp.zeros((K, N)))
    )


def test_vectors_are_products_too():
    x, w = with_dtype(jnp.float32, (17,), (17, 3))
    g = jnp.asarray(draw(2, (3,)))
    got = value_and_gradients(fp8_dot, (x, w), g)
    want = oracle.linear("k,kn->n", x, w, g, DEFAULT)
    for value, correct in zip(got, want, strict=True):
        assert_computed(value, correct, n=17)


@pytest.mark.parametrize("name", ["default", "paper", "vector"])
def test_zeros_stay_zeros(name):
    x, w, g = jnp.zeros((4, 32)), jnp.zeros((32, 16)), jnp.zeros((4, 16))
    f = functools.partial(fp8_dot, policy=POLICIES[name])
    assert_same_bits(value_and_gradients(f, (x, w), g), (g, x, w))


@pytest.mark.parametrize("name", ["default", "paper", "vector"])
def test_nan_and_inf_are_seen_wherever_they_enter(name):
    """A finite value where the true one is NaN would be wrong in silence."""
    f = functools.partial(fp8_dot, policy=POLICIES[name])
    arrays = [draw(i, shape) for i, shape in enumerate([(4, 32), (32, 16), (4, 16)])]
    plain = functools.partial(fp8_dot, policy=BF16)
    for bad in (np.nan, np.inf):
        for which in range(3):
            hurt = [a.copy() for a in arrays]
            hurt[which][3, 5] = bad
            x, w, g = map(jnp.asarray, hurt)
            got = value_and_gradients(f, (x, w), g)
            for ours, true in zip(
                got, value_and_gradients(plain, (x, w), g), strict=True
            ):
                assert (np.isnan(ours) | np.isfinite(true)).all()


@pytest.mark.parametrize(
    "sizes", [(1e30, 1e-30), (1e32, 1e-32), (1e-20, 1e-6), (1e-38, 1.0)]
)
def test_huge_and_tiny_values_keep_their_product(sizes):
    x, w, g = with_dtype(jnp.float32, (8, 32), (32, 16), (8, 16))
    x, w = x * sizes[0], w * sizes[1]
    y, dx, _ = value_and_gradients(fp8_dot, (x, w), g)
    want = oracle.linear("tk,kn->tn", x, w, g, DEFAULT)
    if sizes[0] > 1e-38:
        assert_computed(y, want[0], n=32)
    assert np.isfinite(y).all()
    assert_computed(dx, want[1], n=16)


# Errors -------------------------------------------------------------------------------


X, W = jnp.ones((2, 3, 4)), jnp.ones((4, 5))


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((X, W.mT), {}, r"begin with x's last 1 .*\(2, 3, 4\) and .*\(5, 4\)"),
        ((X, W, jnp.ones(4)), {}, r"bias must have .*\(5,\), got \(4,\)"),
        ((X, W), {"contract": 0}, "linear: contract must lie between 1 and"),
        ((X, W), {"contract": 3}, "contract must|last 3 axes"),
        ((X, W), {"contract": 2}, "kernel must begin with x's last 2 axes"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(args, options, words):
    with pytest.raises(ValueError, match=words):
        linear(*args, **options)


def test_a_dot_names_itself_and_an_unknown_keep_is_refused():
    with pytest.raises(ValueError, match="fp8_dot: kernel must begin"):
        fp8_dot(X, W.mT)
    with pytest.raises((ValueError, TypeError), match="codes or input|Type-check"):
        linear(X, W, keep="all")


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "default"])
def test_only_floats_of_two_or_four_bytes_are_taken(policy):
    f8 = X.astype(policy.w.format.dtype) if policy.w.format else X.astype(jnp.int32)
    for bad in (f8, X.astype(jnp.int8)):
        with pytest.raises(TypeError, match=r"must be bfloat16.*cast it|Type-check"):
            linear(bad, W, policy=policy)
        with pytest.raises(TypeError, match=r"must be bfloat16.*cast it|Type-check"):
            fp8_dot_general(bad, W, (((2,), (0,)), ((), ())), policy=policy)


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["bf16", "default"])
def test_a_residual_of_another_shape_is_refused(policy):
    x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
    with pytest.raises(ValueError, match=r"residual must have the shape of the result"):
        linear(x, w, policy=policy, residual=jnp.ones((1, 16)))


@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        ((((2,), (1,)), ((0,), (0,))), [(3, 8, 32), (3, 32, 16), (3, 8, 16)]),
        ((((1,), (1,)), ((2,), (0,))), [(8, 32, 3), (3, 32, 16), (3, 8, 16)]),
        ((((1, 2), (0, 1)), ((), ())), [(8, 4, 16), (4, 16, 32), (8, 32)]),
        ((((0,), (0,)), ((), ())), [(32, 8), (32, 16), (8, 16)]),
        ((((0,), (0,)), ((), ())), [(32,), (32, 16), (16,)]),
    ],
    ids=["batch", "last batch", "two axes", "first axes", "a vector"],
)
@pytest.mark.parametrize("policy", ["default", "vector", "paper"])
def test_kernels_change_no_bit_of_a_product(policy, numbers, shapes):
    lhs, rhs, g = with_dtype(jnp.bfloat16, *shapes)
    how = {"preferred_element_type": jnp.float32, "policy": POLICIES[policy]}
    f = lambda lhs, rhs: fp8_dot_general(lhs, rhs, numbers, **how)
    found = {}
    for kernels in ("triton", "xla"):
        with use_kernels(kernels):
            args = f, (lhs, rhs), g.astype(jnp.float32)
            found[kernels] = value_and_gradients(*args)
    assert_same_bits(found["triton"], found["xla"])
