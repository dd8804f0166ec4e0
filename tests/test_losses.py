"""The chunked cross-entropy: optax's on whole logits, and what it needs of memory."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import losses
from coat_jax.losses import chunked_cross_entropy
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.once

T, H, V = 13, 16, 37


def draw(dtype=jnp.float32, *, lead=(2,), vocab_first=False):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    kernel = normal(V, H) if vocab_first else normal(H, V)
    labels = jnp.asarray(rng.integers(0, V, (*lead, T)), jnp.int32)
    return normal(*lead, T, H), kernel, labels


def whole(hidden, kernel, labels, weights=None):
    """In float64 by NumPy: the loss and its gradients."""
    h, W = (np.asarray(x).astype(np.float64) for x in (hidden, kernel))
    w = np.ones(labels.shape) if weights is None else np.asarray(weights, np.float64)
    w = w / w.sum()
    logits = h @ W
    log_sum = np.log(np.exp(logits).sum(-1))
    onehot = np.eye(V)[np.asarray(labels)]
    loss = (w * (log_sum - (logits * onehot).sum(-1))).sum()
    d = w[..., None] * (np.exp(logits - log_sum[..., None]) - onehot)
    return loss, d @ W.T, h.reshape(-1, H).T @ d.reshape(-1, V)


# A chunk of one token, one that does not divide, one that does, one above all.
@pytest.mark.parametrize("chunk", [1, 8, 26, 1000])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_it_is_the_mean_cross_entropy_and_its_gradients(lead, chunk):
    args = draw(lead=lead)
    f = functools.partial(chunked_cross_entropy, chunk=chunk)
    loss, grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*args)
    want, *wanted = whole(*args)
    assert_reordered(loss, want, n=H * V, scale=abs(want))
    for got, w in zip(grads, wanted, strict=True):
        assert_reordered(got, w, n=H * V, scale=np.abs(w).max())
    assert_reordered(jax.jit(f)(*args), loss, n=args[2].size, scale=abs(want))


def test_an_embedding_has_the_vocabulary_first():
    h, kernel, labels = draw(vocab_first=True)
    run = lambda kernel, first: jax.jit(
        jax.value_and_grad(
            lambda k: chunked_cross_entropy(h, k, labels, chunk=8, vocab_first=first)
        )
    )(kernel)
    (got, dgot), (want, dwant) = run(kernel, True), run(kernel.T, False)
    assert_reordered(got, want, n=H * V, scale=abs(want))
    assert_reordered(dgot, dwant.T, n=H * V, scale=np.abs(dwant).max())


def test_weights_leave_tokens_out():
    h, kernel, labels = draw()
    weights = jnp.asarray(np.arange(2 * T).reshape(2, T) % 3, jnp.float32)
    f = functools.partial(chunked_cross_entropy, chunk=8)
    loss, grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(
        h, kernel, labels, weights
    )
    want, *wanted = whole(h, kernel, labels, weights)
    assert_reordered(loss, want, n=H * V, scale=abs(want))
    for got, w in zip(grads, wanted, strict=True):
        assert_reordered(got, w, n=H * V, scale=np.abs(w).max())
    assert not np.asarray(grads[0])[np.asarray(weights) == 0].any()


def test_gradients_have_the_dtypes_of_what_they_are_of():
    h, kernel, labels = draw(jnp.bfloat16)
    wide = kernel.astype(jnp.float32)
    grad = jax.jit(jax.grad(chunked_cross_entropy, argnums=(0, 1)))
    (dh, dk), (dh_wide, dk_wide) = grad(h, kernel, labels), grad(h, wide, labels)
    assert (dh.dtype, dk.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert (dh_wide.dtype, dk_wide.dtype) == (jnp.bfloat16, jnp.float32)
    assert_same_bits((dh, dk), (dh_wide, dk_wide.astype(jnp.bfloat16)))


def test_the_cotangent_scales_the_gradients():
    h, kernel, labels = draw()
    f = lambda factor: lambda h: factor * chunked_cross_entropy(h, kernel, labels)
    got, want = jax.jit(jax.grad(f(4.0)))(h), jax.jit(jax.grad(f(1.0)))(h)
    assert_same_bits(got, 4 * want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk": 0}, "chunk must be at least 1 token, got 0"),
        ({"vocab_first": True}, "kernel .V, H., labels"),
        ({"labels": jnp.zeros((2, T + 1), jnp.int32)}, "got .2, 13, 16."),
        ({"weights": jnp.zeros((2, T + 1))}, "and .2, 14."),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    hidden, kernel, labels = draw()
    args = {"hidden": hidden, "kernel": kernel, "labels": labels, "weights": None}
    args |= {"chunk": 8, "vocab_first": False} | changes
    with pytest.raises(ValueError, match=words):
        losses.check(**args)  # as the annotations are checked before it here


@pytest.mark.once
@pytest.mark.parametrize("vocab_first", [False, True])
def test_logits_are_never_whole(h200_compile, vocab_first):
    """8192 tokens, 32000 words: a chunk's logits beside the kernel's float32 sum."""
    tokens, hidden, vocab, chunk = 8192, 1024, 32000, 1024
    kernel = (vocab, hidden) if vocab_first else (hidden, vocab)
    shape = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    args = (
        shape(jnp.bfloat16, 1, tokens, hidden),
        shape(jnp.bfloat16, *kernel),
        shape(jnp.int32, 1, tokens),
    )
    f = functools.partial(chunked_cross_entropy, chunk=chunk, vocab_first=vocab_first)
    step = jax.value_and_grad(f, argnums=(0, 1))
    memory = h200_compile(step, *args).memory_analysis()
    of_chunk = 4 * chunk * vocab
    of_gradients = 4 * hidden * vocab + 2 * tokens * hidden
    assert memory.temp_size_in_bytes <= 1.1 * (3 * of_chunk + of_gradients)
    assert memory.temp_size_in_bytes < 4 * tokens * vocab


def test_whole_logits_would_be_whole(h200_compile):
    """The same measurement of the ordinary loss, so that it can be seen to measure."""
    shape = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)

    def ordinary(hidden, kernel, labels):
        logits = (hidden @ kernel).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(each)

    args = (
        shape(jnp.bfloat16, 1, 8192, 1024),
        shape(jnp.bfloat16, 1024, 32000),
        shape(jnp.int32, 1, 8192),
    )
    program = h200_compile(jax.value_and_grad(ordinary, argnums=(0, 1)), *args)
    assert program.memory_analysis().temp_size_in_bytes >= 2 * 8192 * 32000
