"""Multi-head attention: Flax's module, with an FP8 policy, grouped heads and RoPE."""

from typing import Any

from flax import nnx
import jax

from coat_jax.attention import dot_product_attention
from coat_jax.nn.functional import attention_linear, norm_linear
from coat_jax.nn.layers import OURS, adopt
from coat_jax.policy import DEFAULT, Policy
from coat_jax.rope import rope


class Attention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` of FP8 layers, keeping what `policy` says.

    Query, key and value share one set of codes of their input. With a policy that is
    `plain`, and none of the arguments that are ours, it is Flax's computation bit for
    bit. Where dropout is active, weights are sowed, a token is decoded, or
    `attention_fn` is another than Flax's, Flax's attention runs on FP8 projections, and
    keeps what Flax keeps.

    Args:
      *args: as `nnx.MultiHeadAttention` takes them.
      policy: of the projections; `policy.attention` of the attention.
      rope_base: turns queries and keys by their position; None doesn't.
      implementation: as in `coat_jax.attention.dot_product_attention`.
      **options: as `nnx.MultiHeadAttention` takes them.

    Raises:
      NotImplementedError: for hooks or precision beside an FP8 policy.

    Example:
      >>> layer = Attention(4, 32, num_kv_heads=2, rope_base=1e4, rngs=nnx.Rngs(0))
      >>> jax.eval_shape(layer, jax.numpy.ones((2, 6, 32))).shape
      (2, 6, 32)
    """

    policy: Policy
    rope_base: float | None = None
    implementation: Any = None

    def __init__(
        self,
        *args,
        policy: Policy = DEFAULT,
        rope_base: float | None = None,
        implementation: Any = None,
        **options,
    ):
        super().__init__(*args, **options)
        if rope_base is not None and self.head_dim % 2:
            raise ValueError(
                "Attention: heads must have an even size for RoPE, got "
                f"{self.head_dim}; change num_heads or leave out rope_base"
            )
        self.policy, self.rope_base = policy, rope_base
        self.implementation = implementation
        for layer in (self.query, self.key, self.value, self.out):
            adopt(layer, policy)
        for norm in (self.query_ln, self.key_ln):
            if norm is not None:
                adopt(norm, policy)

    def __call__(
        self,
        inputs_q,
        inputs_k=None,
        inputs_v=None,
        *,
        norm: nnx.Module | None = None,
        residual: jax.Array | None = None,
        query_segments: jax.Array | None = None,
        key_segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        mask=None,
        is_causal=False,
        out_sharding=None,
        qkv_sharding=None,
        **options,
    ):
        """residual + attention of norm(inputs_q) to itself, or to inputs_k, inputs_v.

        Args:
          inputs_q: (*batch, T, in_features).
          inputs_k: (*batch, S, in_kv_features), or None for norm(inputs_q).
          inputs_v: like inputs_k, or None for inputs_k.
          norm: a module through which inputs_q goes; None leaves it as it is.
          residual: added to the result.
          query_segments: of packed sequences, (*batch, T): see
            `coat_jax.attention.dot_product_attention`.
          key_segments: (*batch, S).
          positions: of the queries, (*batch, T), and of the keys in self-attention.
          mask: broadcasts to (*batch, num_heads, T, S); False hides.
          is_causal: query t sees keys 0 .. t only.
          out_sharding: of the result, where axes are Explicit.
          qkv_sharding: of queries, keys and values.
          **options: deterministic, rngs, sow_weights and decode, as Flax takes them.

        Returns:
          (*batch, T, out_features).

        Raises:
          NotImplementedError: for ours and Flax's own options together.
        """
        reason = self._only_flax(options)
        given = {"rope_base": self.rope_base, "query_segments": query_segments}
        given["key_segments"] = key_segments
        ours = [name for name, value in given.items() if value is not None]
        if reason and ours:
            raise NotImplementedError(
                f"Attention: {reason}, where Flax's attention runs, which has no "
                f"{' or '.join(ours)}; leave out either"
            )
        if positions is not None and self.rope_base is None:
            raise ValueError(
                "Attention: positions are for RoPE; construct with rope_base, or leave "
                "them out"
            )
        plain = self._plain() and self.implementation is None
        if reason or (plain and not ours):
            decode = bool(self._first("decode", options))  # Flax has no default
            own = {"mask": mask, "is_causal": is_causal, **options, "decode": decode}
            own |= {"out_sharding": out_sharding, "qkv_sharding": qkv_sharding}
            h = inputs_q if norm is None else norm(inputs_q)
            y = super().__call__(h, inputs_k, inputs_v, **own)
            return y if residual is None else residual + y
        attend = {"mask": mask, "is_causal": is_causal, "positions": positions}
        attend |= {"query_segments": query_segments, "key_segments": key_segments}
        inputs = [inputs_q, inputs_k, inputs_v, residual]
        shardings = (qkv_sharding, out_sharding)
        return self._fold(inputs, norm, attend, shardings)

    def _plain(self) -> bool:
        layers: list[Any] = [self.query, self.key, self.value, self.out]
        ours = [layer.policy for layer in layers if type(layer) in OURS.values()]
        return all(policy.plain for policy in [self.policy, *ours])

    def _first(self, name: str, options):
        """An option of the call, or of the module where the call has none."""
        value = options.get(name)
        return getattr(self, name) if value is None else value

    def _only_flax(self, options) -> str | None:
        """Why this call is for Flax's attention, or None."""
        if self.attention_fn is not nnx.dot_product_attention:
            return "attention_fn is not Flax's own"
        if options.get("sow_weights"):
            return "sow_weights is set"
        if self._first("decode", options):
            return "decode is set"
        if self.dropout_rate > 0 and not self._first("deterministic", options):
            return "dropout is active"
        known = {"sow_weights", "decode", "deterministic", "rngs"}
        other = [
            name for name, v in options.items() if name not in known and v is not None
        ]
        return f"{', '.join(other)} is given" if other else None

    def _fold(self, inputs, norm, attend, shardings):
        """Merges several batch axes into one, as Flax does, and splits them again."""
        batch = inputs[0].shape[:-2]
        if len(batch) < 2:
            return self._attend(inputs, norm, attend, shardings)
        last = lambda x, axes: x if x is None else x.reshape(-1, *x.shape[-axes:])
        axes = {"mask": 3, "query_segments": 1, "key_segments": 1, "positions": 1}
        folded = {
            name: last(value, axes[name]) if name in axes else value
            for name, value in attend.items()
        }
        inputs = [last(x, 2) for x in inputs]
        y = self._attend(inputs, norm, folded, shardings)
        return y.reshape(*batch, *y.shape[1:])

    def _attend(self, inputs, norm, attend, shardings):
        x, x_k, x_v, residual = inputs
        qkv_sharding, out_sharding = shardings
        q, k, v = self._project(norm, x, x_k, x_v, qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        positions = attend.pop("positions")
        if self.rope_base is not None:
            own = positions if x_k is None else None
            q = rope(q, positions, base=self.rope_base)
            k = rope(k, own, base=self.rope_base)
        if attend["mask"] is not None:
            attend["mask"] = attend["mask"].astype(bool)
        how = {"policy": self.policy, "implementation": self.implementation, **attend}
        if out_sharding is None:
            return attention_linear(self.out, q, k, v, residual, **how)
        y = self.out(dot_product_attention(q, k, v, **how), out_sharding=out_sharding)
        return y if residual is None else residual + y

    def _project(self, norm, x, x_k, x_v, sharding):
        """Queries, keys and values; those of one input share its codes."""
        if x_k is None and x_v is not None:
            raise ValueError(
                "Attention: inputs_v needs inputs_k; give inputs_k alone where both "
                "are the same"
            )
        query, key, value = self.query, self.key, self.value
        if sharding is not None:
            h = x if norm is None else norm(x)
            h_k = h if x_k is None else x_k
            h_v = h_k if x_v is None else x_v
            pairs = ((query, h), (key, h_k), (value, h_v))
            return [layer(h, out_sharding=sharding) for layer, h in pairs]
        if x_k is None:
            return norm_linear(norm, [query, key, value], x)
        (q,) = norm_linear(norm, [query], x)
        if x_v is None:
            return [q, *norm_linear(None, [key, value], x_k)]
        return [q, *norm_linear(None, [key], x_k), *norm_linear(None, [value], x_v)]
