"""A Llama block in Flax Linen whose products are those of flax's own fp8_ops."""

from flax import linen
from flax.linen import fp8_ops
import jax
from jax import numpy as jnp

from coat_jax.models.llama import LlamaConfig
from coat_jax.rope import rope


class Block(linen.Module):
    """The decoder block of `coat_jax.models.llama`, with flax's FP8 products.

    They scale by the largest magnitudes of earlier steps, kept in the collection
    "_overwrite_with_gradient", whose gradients are its next values.
    """

    config: LlamaConfig
    attention: str | None = None

    @linen.compact
    def __call__(self, x_BTH):
        """(B, T, H) to (B, T, H)."""
        x_BTH = x_BTH + self._attention(self._norm("attention_norm")(x_BTH))
        h_BTH = self._norm("mlp_norm")(x_BTH)
        gate, up = (
            self._dense(name, self.config.ffn)(h_BTH) for name in ("gate", "up")
        )
        return x_BTH + self._dense("down", self.config.hidden)(jax.nn.silu(gate) * up)

    def _attention(self, h_BTH):
        heads = (*h_BTH.shape[:2], -1, self.config.head_size)
        widths = {"q": self.config.heads} | dict.fromkeys("kv", self.config.kv_heads)
        q, k, v = (
            self._dense(name, n * self.config.head_size)(h_BTH).reshape(heads)
            for name, n in widths.items()
        )
        out = jax.nn.dot_product_attention(
            rope(q), rope(k), v, is_causal=True, implementation=self.attention
        )
        return self._dense("out", self.config.hidden)(out.reshape(h_BTH.shape))

    def _norm(self, name):
        dtypes = {"dtype": self.config.dtype, "param_dtype": self.config.param_dtype}
        return linen.RMSNorm(epsilon=self.config.norm_eps, name=name, **dtypes)

    def _dense(self, name, width):
        return linen.Dense(
            width,
            use_bias=False,
            dtype=self.config.dtype,
            param_dtype=self.config.param_dtype,
            dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
            name=name,
        )


def shapes(config: LlamaConfig):
    """The block's variables as ShapeDtypeStructs, boxes and names of axes removed."""
    x = jnp.zeros((1, 16, config.hidden), config.dtype)
    return jax.eval_shape(Block(config).init, jax.random.key(0), x)
