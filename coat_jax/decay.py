"""Which parameters weight decay should touch, by their paths."""

import re
from typing import Any

import jax
from jax import numpy as jnp

from coat_jax.moments import leaf_path

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NORMS = {"ln", "bn", "gn", "rms", "normalization", "normalisation"}
_VECTORS = {"bias", "biases", "scale", "scales", "gamma", "beta", "offset"}


def decay_mask(params: Any) -> Any:
    """What weight decay should touch: a tree of bools, by each leaf's path.

    False for leaves with one axis or none, for those whose own name says bias, scale,
    gamma, beta, offset or b ("q_bias", "b1"), and for all in a module whose name says
    norm or ln ("layers/norm1/w", "ln_f", "LayerNorm_0"); True for the others, such as
    embeddings. Words count, not letters: "normal_proj" and "wb" decay. Unlike a test of
    `ndim > 1` it is right for layers stacked along a leading axis, whose norms have two
    axes.

    Raises:
      TypeError: if given a step count: `optax.inject_hyperparams` takes a callable for
        a schedule.

    Example:
      >>> import jax.numpy as jnp
      >>> decay_mask({"norm": {"scale": jnp.ones((2, 8))}, "w": jnp.ones((2, 8, 8))})
      {'norm': {'scale': False}, 'w': True}
    """
    if isinstance(params, jax.Array) and jnp.issubdtype(params.dtype, jnp.integer):
        raise TypeError(
            "decay_mask: params must be a tree of parameters, got an integer array: "
            "inject_hyperparams calls a callable mask as a schedule; pass "
            "mask=decay_mask(params), or static_args=('mask',)"
        )

    def decays(key_path, p):
        *modules, name = map(_words, leaf_path(key_path).split("/"))
        if jnp.ndim(p) < 2 or _VECTORS & set(name) or name == ["b"]:
            return False
        return not any(map(_is_norm, [*modules, name]))

    return jax.tree_util.tree_map_with_path(decays, params)


def _words(name: str) -> list[str]:
    """ "LayerNorm_0" as layer, norm: words in lower case, without the numbers."""
    return [word.lower() for word in _WORD.findall(name) if not word.isdigit()]


def _is_norm(words: list[str]) -> bool:
    return any(word.endswith(("norm", "norms")) or word in _NORMS for word in words)
