"""Scaled dot-product attention that says what it keeps for its backward.

Letters: B batch, T queries, S keys, N query heads, K key and value heads, D head size.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import numpy as jnp

from coat_jax import recompute
from coat_jax.policy import DEFAULT, Policy, check_policy
from coat_jax.typing import Array, Bool, Float, Int

Implementation = Literal["xla", "cudnn"]
_CUDNN_HEAD = 128  # the largest head whose backward cuDNN has on every GPU


def dot_product_attention(
    query: Float[Array, "... T N D"],
    key: Float[Array, "... S K D"],
    value: Float[Array, "... S K D"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_segments: Int[Array, "... T"] | None = None,
    key_segments: Int[Array, "... S"] | None = None,
    implementation: Implementation | None = None,
    policy: Policy = DEFAULT,
) -> Float[Array, "... T N D"]:
    """softmax(scale q k^T + bias, where allowed) v, as `jax.nn.dot_product_attention`.

    The forward is the ordinary one, in the inputs' dtype (computed from stored values
    where `policy.attention.in_forward`). With `policy.attention.format` None it keeps
    query, key, value and its result in their own dtype, 8 H bytes a token in bfloat16;
    with a format it keeps the codes of the first three, 3 H bytes and scales, and its
    backward is the gradient at the stored values, for one more forward.

    Args:
      query: (B, T, N, D) or (T, N, D).
      key: (B, S, K, D); K divides N, each key head serving N / K query heads.
      value: like key.
      bias: added to the logits; broadcasts to (B, N, T, S).
      mask: where False, the logit counts as minus infinity; broadcasts likewise.
      scale: of the logits; D^-1/2 if None.
      is_causal: query t sees keys 0 .. t only.
      query_segments: of packed sequences, (B, T): a query sees the keys of its segment.
      key_segments: (B, S); query_segments if None.
      implementation: "cudnn" or "xla"; None takes cuDNN where it can be used.
      policy: `attention` says what is kept.

    Returns:
      An array like query. A query that sees no key gets a mean of values, not NaN.

    Raises:
      ValueError: for shapes that don't fit, or key_segments without query_segments.
      NotImplementedError: if implementation is "cudnn" and cuDNN can't.

    Example:
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> dot_product_attention(q, q[:, :, :1], q[:, :, :1], is_causal=True).shape
      (1, 4, 2, 8)
    """
    attend = prepare(
        query,
        key,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_segments=query_segments,
        key_segments=key_segments,
        implementation=implementation,
    )
    check_policy("dot_product_attention", policy)
    inputs = [query, key, value]
    if policy.plain or attend.keeps_itself(policy):
        return attend.run(attend.params, *inputs)
    (y,) = recompute.recompute(
        attend.run, attend.params, inputs, policy=policy, kept=policy.attention
    )
    return y.astype(query.dtype)


class Attend(NamedTuple):
    """Attention as a prologue of `recompute`: run(params, query, key, value).

    It computes in query's own dtype, whatever dtype it is given.
    """

    run: Callable[..., jax.Array]
    params: list[Any]
    implementation: Implementation

    def keeps_itself(self, policy: Policy) -> bool:
        """Whether what the implementation keeps is what the policy asks for.

        cuDNN keeps q, k, v and its output. XLA would keep the (T, S) probabilities.
        """
        return self.implementation == "cudnn" and policy.attention.format is None


def prepare(
    query,
    key,
    *,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    query_segments=None,
    key_segments=None,
    implementation=None,
) -> Attend:
    """The attention of these arguments, and the implementation chosen for it."""
    mask = _visible(mask, query_segments, key_segments)
    reason = refuses(query, key)
    if implementation is None:
        on_gpu = jax.default_backend() == "gpu"
        implementation = "cudnn" if on_gpu and reason is None else "xla"
    if implementation == "cudnn" and reason is not None:
        raise NotImplementedError(f"dot_product_attention: cuDNN refuses: {reason}")
    if implementation == "cudnn":
        lengths = query.shape[-3], key.shape[-3]
        bias, mask = (_whole(array, lengths) for array in (bias, mask))
    dtype = query.dtype

    def attend(params, query, key, value):
        inputs = (x.astype(dtype) for x in (query, key, value))
        # JAX's own multiplies narrow logits by a float32 scale.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                *inputs,
                *params,
                scale=scale,
                is_causal=is_causal,
                implementation=implementation,
            )

    return Attend(attend, [bias, mask], implementation)


def refuses(query, key) -> str | None:
    """Why cuDNN cannot be used, or None."""
    D = query.shape[-1]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, got {query.dtype}"
    if D > _CUDNN_HEAD or D % 8:
        return f"the head size must be a multiple of 8 up to {_CUDNN_HEAD}, got {D}"
    lengths = query.shape[-3], key.shape[-3]
    if any(length % 2 for length in lengths):
        # cuDNN asks this of a gradient with a bias only, JAX of every gradient.
        return f"the lengths must be even, got {lengths[0]} and {lengths[1]}"
    return None


def _whole(array, lengths: tuple[int, int]):
    """A bias or mask with both lengths in full: JAX gives cuDNN no axis of 1 there."""
    if array is None:
        return None
    return jnp.broadcast_to(array, (*array.shape[:-2], *lengths))


def _visible(mask, query_segments, key_segments):
    """The mask of what a query may see, (B, 1, T, S) where there are segments."""
    if query_segments is None:
        if key_segments is not None:
            raise ValueError(
                "dot_product_attention: key_segments needs query_segments; give both"
            )
        return mask
    if key_segments is None:
        key_segments = query_segments
    same = query_segments[..., None, :, None] == key_segments[..., None, None, :]
    return same if mask is None else mask & same
