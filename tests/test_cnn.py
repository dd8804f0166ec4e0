"""The convolutional network: its sizes, its mathematics against NumPy, its layers."""

import dataclasses
import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import policy as policies
from coat_jax.models import cnn
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

MICRO = cnn.PRESETS["micro"]
# Compiling takes most of the time here, and no speed is wanted of what is compiled.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@pytest.fixture(scope="module")
def params():
    return quick_jit(functools.partial(cnn.init_params, MICRO))(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    """Images (3, 12, 9, 1), of unequal sides one of which is odd, and their labels."""
    images = jax.random.normal(jax.random.key(1), (3, 12, 9, 1))
    return images, jnp.array([0, 3, 9])


def count(c: cnn.CnnConfig) -> int:
    """The sum of the shapes, written out."""
    total, width_in = c.stem_kernel**2 * c.channels * c.widths[0], c.widths[0]
    for width, blocks in zip(c.widths, c.blocks, strict=True):
        first = 2 * width_in + 9 * width_in * width + 2 * width + 9 * width**2
        total += first + width_in * width * (width_in != width)
        total += (blocks - 1) * (4 * width + 18 * width**2)
        width_in = width
    return total + 2 * width_in + (width_in + 1) * c.classes


def same_conv(x, kernel, strides=1):
    """A 3 x 3 convolution as XLA pads it, one pixel of the result at a time."""
    size = -(-np.array(x.shape[1:3]) // strides)
    short = np.maximum((size - 1) * strides + 3 - x.shape[1:3], 0)
    x = np.pad(x, [(0, 0), *((s // 2, s - s // 2) for s in short), (0, 0)])
    y = np.zeros((len(x), *size, kernel.shape[-1]))
    for r, q in np.ndindex(*size):
        window = x[:, r * strides : r * strides + 3, q * strides : q * strides + 3]
        y[:, r, q] = np.tensordot(window, kernel, 3)
    return y


def norm_relu(x, p):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]
    return np.maximum(y, 0)


def forward(params, images):
    """The micro preset in NumPy float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = same_conv(np.asarray(images, np.float64), params["stem"]["kernel"])
    for name, strides in (("stage0_block0", 1), ("stage1_block0", 2)):
        p = params["blocks"][name]
        first, second = p["first"], p["second"]
        around = x[:, ::strides, ::strides]
        if "shortcut" in p:
            around = around @ p["shortcut"]["kernel"]
        h = same_conv(norm_relu(x, first["norm"]), first["conv"]["kernel"], strides)
        x = around + same_conv(norm_relu(h, second["norm"]), second["conv"]["kernel"])
    h = norm_relu(x, params["norm"]).mean(axis=(1, 2))
    return h @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("preset", cnn.PRESETS)
def test_parameter_counts(preset):
    config = cnn.PRESETS[preset]
    assert cnn.count_params(config) == count(config)


def test_logits_are_those_of_numpy(params, batch):
    # Norms and biases start as ones and zeros, which many a mistake would hide behind.
    noise = lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)
    params = jax.tree.map(noise, params)
    want = forward(params, batch[0])
    terms = 9 * (1 + 8 + 8 + 8 + 16) + 16
    got = quick_jit(cnn.make_apply(MICRO))(params, batch[0])
    assert_reordered(got, want, terms, np.abs(want).max())


def test_compressed_layers_take_the_same_parameters(params, batch):
    grad = lambda layers: jax.value_and_grad(cnn.make_loss(MICRO, layers=layers))
    want = quick_jit(grad(None))(params, batch)
    assert_same_bits(
        quick_jit(grad(cnn.fp8_layers(policies.BF16)))(params, batch), want
    )
    value, grads = quick_jit(grad(cnn.fp8_layers()))(params, batch)
    assert_sqnr(value, want[0], 40)
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    assert assert_sqnr(flat(grads), flat(want[1]), 15) < 60  # it did round
    assert abs(float(want[0]) - math.log(MICRO.classes)) < 0.2  # as of guessing


def kept_bytes(layers, batch):
    """What the loss hands to its backward."""
    config = dataclasses.replace(MICRO, blocks=(3, 3), dtype=jnp.bfloat16)
    loss = cnn.make_loss(config, layers=layers)
    params = jax.eval_shape(lambda: cnn.init_params(config, jax.random.key(0)))
    pull = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, batch), p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def test_compressed_layers_keep_less(batch):
    many = tuple(jnp.concatenate([x] * 32) for x in batch)
    assert kept_bytes(cnn.fp8_layers(), many) < kept_bytes(None, many) / 3


class Halved(cnn.NormActConv):
    """A replacement that can be told from the original."""

    def __call__(self, x_BRQC, residual=None):
        return super().__call__(x_BRQC / 2, residual)


def test_an_injected_unit_is_the_one_that_runs(params, batch):
    halved = cnn.make_apply(MICRO, layers=cnn.Layers(unit=Halved))
    got, want = (
        quick_jit(f)(params, batch[0]) for f in (halved, cnn.make_apply(MICRO))
    )
    assert got.shape == want.shape
    # The norm takes out the halving, but for its epsilon.
    assert 0 < np.abs(np.asarray(got) - want).max() < 1e-3


def test_bfloat16_computes_with_float32_parameters(batch):
    config = dataclasses.replace(MICRO, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: cnn.init_params(config, jax.random.key(0)))
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
    logits = jax.eval_shape(cnn.make_apply(config), shapes, batch[0])
    assert logits.dtype == jnp.bfloat16
    grads = jax.eval_shape(jax.grad(cnn.make_loss(config)), shapes, batch)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": (1,)}, r"one positive number a stage, .* got \(8, 16\), \(1,\)"),
        ({"widths": (8, 0)}, r"one positive number a stage, .* got \(8, 0\)"),
        ({"classes": 0}, "be positive, got .* 0, 1"),
        ({"activation": "tanh"}, "activation must be one of silu, .* got 'tanh'"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MICRO, **change)
