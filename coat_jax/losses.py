"""Cross-entropy over a vocabulary whose logits are never whole.

Letters: T tokens of a sequence, C tokens of a chunk, H hidden, V vocabulary.

The logits of 2048 tokens and 32000 words are 250 MiB in float32, and softmax, its
gradient and their rounding are as large again. Here a chunk's logits are made, turned
into the gradients of what they came from, and forgotten.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax.typing import Array, Float, Float32, Int32


def chunked_cross_entropy(
    hidden: Float[Array, "*B T H"],
    kernel: Float[Array, "..."],
    labels: Int32[Array, "*B T"],
    weights: Float[Array, "*B T"] | None = None,
    *,
    chunk: int = 1024,
    vocab_first: bool = False,
) -> Float32[Array, ""]:
    r"""Mean cross-entropy of `labels` given logits = hidden kernel, a chunk at a time.

    With logits :math:`l_t = h_t W`, weights :math:`w_t` and labels :math:`y_t`,
    :math:`\sum_t w_t (\log \sum_v e^{l_{tv}} - l_{t y_t}) / \sum_t w_t`.
    The gradients are made in the forward, so that no logits are made twice: until the
    backward, hidden's is kept in its dtype and the kernel's in float32.

    Args:
      hidden: (*B, T, H). Operands of products have its dtype; sums are float32.
      kernel: (H, V), or (V, H) with `vocab_first`, as an embedding is.
      labels: (*B, T), int32.
      weights: (*B, T), of the tokens; 0 leaves one out. None: all 1. No gradient.
      chunk: tokens at a time, of all sequences together; each sequence is cut alike.
      vocab_first: whether the kernel is (V, H).

    Returns:
      A float32 scalar. Loss and gradients are, to the order of summation, those of
      `optax.softmax_cross_entropy_with_integer_labels` on float32 logits; each gradient
      is rounded to its dtype once, and that of the logits to hidden's.

    Raises:
      ValueError: if the shapes don't fit, or `chunk` is below 1.

    Example:
      >>> h, W = jnp.ones((2, 4, 8)), jnp.zeros((8, 16))
      >>> labels = jnp.zeros((2, 4), jnp.int32)
      >>> f"{float(chunked_cross_entropy(h, W, labels, chunk=2)):.4f}"  # ln 16
      '2.7726'
    """
    check(hidden, kernel, labels, weights, chunk, vocab_first)
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    sequences = max(1, labels.size // max(1, labels.shape[-1]))
    rows = min(max(1, chunk // sequences), max(1, labels.shape[-1]))
    return _loss(hidden, kernel, labels, weights, rows, 0 if vocab_first else 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(hidden, kernel, labels, weights, rows: int, axis: int):
    kernel = kernel.astype(hidden.dtype)

    def add(total, chunk):
        return total + _of_chunk(kernel, axis, *chunk)[0], None

    chunks = _chunks(hidden, labels, weights, rows)
    return lax.scan(add, jnp.float32(0), chunks)[0]


def _forward(hidden, kernel, labels, weights, rows: int, axis: int):
    narrow = kernel.astype(hidden.dtype)

    def add(carry, chunk):
        total, dkernel = carry
        loss, dlogits = _of_chunk(narrow, axis, *chunk)
        h, dlogits = chunk[0], dlogits.astype(hidden.dtype)
        dh = _product(dlogits, narrow, dlogits.ndim - 1, axis).astype(h.dtype)
        over = tuple(range(h.ndim - 1))
        pair = (h, dlogits) if axis == 1 else (dlogits, h)
        return (total + loss, dkernel + _product(*pair, over, over)), dh

    zero = jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32)
    chunks = _chunks(hidden, labels, weights, rows)
    (loss, dkernel), dh = lax.scan(add, zero, chunks)
    # The last two hold no more than dtypes, which a tree of arrays has no place for.
    kept = (_joined(dh, hidden.shape), dkernel, hidden[..., :0], kernel[:0])
    return loss, kept


def _backward(rows: int, axis: int, kept, g):
    del rows, axis
    dh, dkernel, *like = kept
    scaled = [
        (g * d.astype(jnp.float32)).astype(x.dtype)
        for d, x in zip((dh, dkernel), like, strict=True)
    ]
    return *scaled, None, None


_loss.defvjp(_forward, _backward)


def _of_chunk(kernel, axis: int, h, labels, weights):
    """The loss of a chunk and its gradient by the logits, float32 (*B, C, V)."""
    logits = _product(h, kernel, h.ndim - 1, 1 - axis)
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_label = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_label = is_label == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    softmax = jnp.exp(logits - log_sum)
    dlogits = weights[..., None] * (softmax - is_label.astype(jnp.float32))
    return jnp.sum(weights * (log_sum[..., 0] - picked)), dlogits


def _product(a, b, over_a, over_b):
    """a b, summed in float32 over these axes."""
    as_tuple = lambda axes: (axes,) if isinstance(axes, int) else axes
    numbers = ((as_tuple(over_a), as_tuple(over_b)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def _chunks(hidden, labels, weights, rows: int):
    """Each cut along T into (n, *B, rows, ...); the weights divided by their sum."""
    weights = weights.astype(jnp.float32)
    weights = weights / jnp.sum(weights)
    axis = labels.ndim - 1

    def cut(x):
        T = x.shape[axis]
        n = -(-T // rows)
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, n * rows - T)  # of weight 0
        x = jnp.pad(x, pads)
        x = x.reshape(*x.shape[:axis], n, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return cut(hidden), cut(labels), cut(weights)


def _joined(x, shape):
    """An array of `shape` from what `_chunks` made of one like it."""
    axis = len(shape) - 2
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, shape[-1])
    return lax.slice_in_dim(x, 0, shape[axis], axis=axis)


def check(hidden, kernel, labels, weights, chunk: int, vocab_first: bool) -> None:
    """Raises unless these fit together, as `chunked_cross_entropy` wants them."""
    if chunk < 1:
        raise ValueError(
            f"chunked_cross_entropy: chunk must be at least 1 token, got {chunk}"
        )
    features = kernel.shape[1 if vocab_first else 0] if kernel.ndim == 2 else None
    fits = hidden.ndim >= 2 and features == hidden.shape[-1]
    same = labels.shape == hidden.shape[:-1]
    if not (fits and same and (weights is None or weights.shape == labels.shape)):
        order = "(V, H)" if vocab_first else "(H, V)"
        raise ValueError(
            f"chunked_cross_entropy: hidden must be (*B, T, H), kernel {order}, labels "
            f"and weights (*B, T), got {hidden.shape}, {kernel.shape}, {labels.shape}"
            f"{'' if weights is None else f' and {weights.shape}'}; set vocab_first "
            "for a kernel with the vocabulary first"
        )
