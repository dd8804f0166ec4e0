"""Convolutions against Flax's, and their gradients at the stored input."""

import functools

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import activations, nn, norms
from coat_jax.convolution import conv, norm_act_conv
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept, Policy
from coat_jax.quantize import dequantize, quantize
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

# Shape of x, window, output channels, and Flax's options.
WINDOWS = {
    "same": ((2, 6, 5, 8), (3, 3), 4, {}),
    "valid, stride 2": ((2, 7, 6, 8), (3, 3), 4, {"padding": "VALID", "strides": 2}),
    "circular": ((2, 6, 5, 8), (3, 4), 4, {"padding": "CIRCULAR"}),
    "reflect": ((2, 6, 5, 8), (3, 4), 4, {"padding": "REFLECT", "strides": (2, 1)}),
    "causal": ((2, 9, 8), (3,), 4, {"padding": "CAUSAL", "kernel_dilation": 2}),
    "pairs": (
        (2, 6, 5, 8),
        (3, 3),
        4,
        {"padding": ((0, 2), 1), "kernel_dilation": (2, 1)},
    ),
    "transposed": ((2, 4, 4, 8), (3, 3), 4, {"input_dilation": 2, "padding": 1}),
    "depthwise": ((2, 6, 5, 8), (3, 3), 8, {"feature_group_count": 8}),
    "no batch": ((6, 5, 8), (3, 3), 4, {}),
    "two batch axes": ((2, 3, 6, 5, 8), (3, 3), 4, {}),
    "three axes": ((1, 4, 4, 4, 3), (2, 3, 2), 5, {}),
}
POINTS = {
    "plain": {},
    "stride 2": {"strides": 2},
    "stride (2, 3), valid": {"strides": (2, 3), "padding": "VALID"},
}
# Compiling is most of a test's time, and speed is not what is tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def weights_of(shape, window, out, options):
    groups = options.get("feature_group_count", 1)
    return draw(1, *window, shape[-1] // groups, out), draw(2, out)


@named("window", WINDOWS)
def test_every_window_is_flax_s(window):
    shape, size, out, options = window
    kernel, bias = weights_of(*window)
    layer = nnx.Conv(shape[-1], out, size, rngs=nnx.Rngs(0), **options)
    layer.kernel[...], layer.bias[...] = kernel, bias
    ours = lambda policy: functools.partial(conv, policy=policy, **options)
    run = lambda x, *weights: (
        layer(x),
        ours(BF16)(x, *weights),
        ours(DEFAULT)(x, *weights),
    )
    want, plain, got = jit(run)(draw(0, *shape), kernel, bias)
    assert_same_bits(plain, want)
    # The forward reads x itself: the same sums.
    assert_reordered(got, want, kernel[..., 0].size, np.abs(want).max())


@named("policy", {"default": DEFAULT, "paper": PAPER})
@named(
    "window", {name: WINDOWS[name] for name in ("circular", "depthwise", "no batch")}
)
def test_the_backward_is_the_gradient_at_the_stored_input(window, policy):
    shape, _, _, options = window
    kernel, bias = weights_of(*window)
    x, kept = draw(0, *shape), policy.kept
    ours = functools.partial(conv, policy=policy, **options)
    plain = functools.partial(conv, policy=BF16, **options)
    stored = dequantize(
        quantize(x, format=kept.format, group=kept.group), group=kept.group
    )

    @jit
    def both(x, stored, kernel, bias):
        y, pull = jax.vjp(ours, x, kernel, bias)
        z, pull_plain = jax.vjp(plain, stored, kernel, bias)
        return y, z, pull(y), pull_plain(y)

    y, z, got, want = both(x, stored, kernel, bias)
    if kept.in_forward:
        assert_reordered(y, z, kernel[..., 0].size, np.abs(z).max())
    for g, w in zip(got, want, strict=True):
        assert_reordered(g, w, y.size, np.abs(w).max())
    assert_reordered(got[2], y.sum(tuple(range(y.ndim - 1))), y.size, np.abs(y).max())


@named("options", POINTS)
def test_a_window_of_one_pixel_is_an_fp8_product(options):
    x, kernel, bias = draw(0, 2, 5, 7, 32), draw(1, 1, 1, 32, 16), draw(2, 16)

    def f(policy, x, kernel, bias):
        y, pull = jax.vjp(
            functools.partial(conv, policy=policy, **options), x, kernel, bias
        )
        return y, pull(y)

    run = jit(f, static_argnums=0)
    got, want = run(DEFAULT, x, kernel, bias), run(BF16, x, kernel, bias)
    assert got[0].shape == want[0].shape
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert assert_sqnr(g, w, db=25) < 60 or g.ndim == 1  # FP8, but for the bias
    text = run.lower(DEFAULT, x, kernel, bias).as_text()
    assert "convolution" not in text
    assert "f8E4M3FN" in text


def test_a_padded_window_of_one_pixel_is_no_product():
    x, kernel = draw(0, 1, 3, 3, 8), draw(1, 1, 1, 8, 4)
    options = {"padding": ((1, 0), (0, 0))}
    y = jit(functools.partial(conv, **options))(x, kernel)
    assert y.shape == (1, 4, 3, 4)
    assert not np.any(np.asarray(y[:, 0]))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
def test_a_block_is_its_parts(norm, size):
    x, kernel = draw(0, 2, 6, 6, 16), draw(1, size, size, 16, 8)
    bias, scale = draw(2, 8), draw(3, 16)
    residual = draw(5, 2, 3, 3, 8)
    norm_bias = draw(4, 16) if norm == "layer" else None
    how = {"norm": norm, "activation": "silu", "strides": 2}

    def block(policy, x, kernel, bias, scale, norm_bias, residual):
        return norm_act_conv(
            x,
            kernel,
            bias,
            scale=scale if norm else None,
            norm_bias=norm_bias,
            residual=residual,
            policy=policy,
            **how,
        )

    def parts(x, kernel, bias, scale, norm_bias, residual):
        if norm == "rms":
            x = norms.rms_norm(x, scale, policy=BF16)
        if norm == "layer":
            x = norms.layer_norm(x, scale, norm_bias, policy=BF16)
        h = activations.silu(x, policy=BF16)
        return residual + conv(h, kernel, bias, strides=2, policy=BF16)

    def graded(f, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(y)

    args = (x, kernel, bias, scale, norm_bias, residual)
    of = lambda policy: functools.partial(block, policy)
    run = lambda *a: [graded(f, *a) for f in (parts, of(BF16), of(DEFAULT))]
    want, plain, got = jit(run)(*args)
    assert_same_bits(plain, want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_sqnr(g, w, db=22)


def test_only_the_codes_of_the_input_are_kept():
    x, kernel = jnp.ones((2, 8, 8, 128), jnp.bfloat16), jnp.ones((3, 3, 128, 256))
    scale = jnp.ones(128)
    how = {"norm": "rms", "activation": "relu"}
    f = lambda x, kernel, scale: norm_act_conv(x, kernel, scale=scale, **how)
    kept = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], x, kernel, scale)
    sizes = sorted((leaf.size * leaf.dtype.itemsize) for leaf in jax.tree.leaves(kept))
    codes, scales = x.size, 4 * x.size // 128
    assert sizes == sorted([codes, scales, 4 * kernel.size, 4 * scale.size])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_has_the_input_s_dtype(dtype):
    x, kernel, bias = draw(0, 1, 4, 4, 8).astype(dtype), draw(1, 3, 3, 8, 4), draw(2, 4)

    @jit
    def run(*args):
        y, pull = jax.vjp(conv, *args)
        wide = x.astype(jnp.float32)
        return y, pull(y), conv(wide, *args[1:], policy=BF16)

    y, grads, want = run(x, kernel, bias)
    assert y.dtype == dtype
    assert [g.dtype for g in grads] == [dtype, jnp.float32, jnp.float32]
    assert_sqnr(y, want, db=40)


def test_a_kept_input_of_full_precision_gives_exact_gradients():
    policy = Policy(kept=Kept(format=None))
    x, kernel = draw(0, 1, 5, 5, 8), draw(1, 3, 3, 8, 4)
    loss = lambda policy: lambda *a: jnp.sum(jnp.sin(conv(*a, policy=policy)))
    both = lambda *a: [jax.grad(loss(p), (0, 1))(*a) for p in (policy, BF16)]
    for g, w in zip(*jit(both)(x, kernel), strict=True):
        assert_reordered(g, w, 1000, np.abs(w).max())


REFUSED = {
    "padding name": ({"padding": "SOME"}, "padding must be one of"),
    "causal in 2D": ({"padding": "CAUSAL"}, "padding must be one of"),
    "padding length": ({"padding": (1, 1, 1)}, "padding must be one of"),
    "strides": ({"strides": (1, 2, 3)}, "strides must be a positive number"),
    "dilation": ({"kernel_dilation": 0}, "kernel_dilation must be a positive"),
    "groups": ({"feature_group_count": 3}, "kernel .*feature_group_count"),
}


@named("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(case):
    options, message = case
    with pytest.raises(ValueError, match=message):
        conv(jnp.ones((1, 4, 4, 8)), jnp.ones((3, 3, 8, 4)), **options)


def test_wrong_arrays_are_refused_in_a_sentence():
    x, kernel = jnp.ones((1, 4, 4, 8)), jnp.ones((3, 3, 8, 4))
    with pytest.raises(ValueError, match="bias must have shape"):
        conv(x, kernel, jnp.ones(3))
    with pytest.raises(TypeError, match="conv: arrays must be bfloat16"):
        conv(x, kernel.astype(jnp.float8_e5m2))


def test_a_window_of_one_with_negative_padding_is_flaxs():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 9, 8)), jnp.float32)
    how = {"kernel_size": (1, 1), "padding": [(-1, 0), (0, 0)]}
    ours = nn.Conv(8, 16, **how, rngs=nnx.Rngs(0))
    flaxs = nnx.Conv(8, 16, **how, rngs=nnx.Rngs(0))
    assert ours(x).shape == (2, 7, 9, 16)
    assert_sqnr(ours(x), flaxs(x), db=20)
