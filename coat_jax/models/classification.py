"""The loss of a model that names an image's class."""

from collections.abc import Callable
from typing import Any

from jax import numpy as jnp
import optax


def classification_loss(apply: Callable[..., Any]) -> Callable[..., Any]:
    """loss(params, (images, labels), key): mean cross-entropy, logits read as float32.

    Args:
      apply: (params, images) -> logits (B, K).

    Returns:
      The loss; labels are int32 (B,). The key is there for layers that draw.

    Example:
      >>> loss = classification_loss(lambda params, images: images @ params)
      >>> batch = jnp.eye(2), jnp.array([0, 1])
      >>> round(float(loss(jnp.zeros((2, 2)), batch)), 4)
      0.6931
    """

    def loss(params, batch, key=None):
        del key
        images, labels = batch
        logits = apply(params, images).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(each)

    return loss
