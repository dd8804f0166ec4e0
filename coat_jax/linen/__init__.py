"""Flax Linen modules with FP8 activations: Flax's names, fields and parameters."""

from coat_jax.linen.blocks import MLP as MLP
from coat_jax.linen.blocks import Attention as Attention
from coat_jax.linen.blocks import DecoderBlock as DecoderBlock
from coat_jax.linen.blocks import EncoderBlock as EncoderBlock
from coat_jax.linen.blocks import GatedMLP as GatedMLP
from coat_jax.linen.layers import Conv as Conv
from coat_jax.linen.layers import Dense as Dense
from coat_jax.linen.layers import DenseGeneral as DenseGeneral
from coat_jax.linen.layers import Einsum as Einsum
from coat_jax.linen.layers import LayerNorm as LayerNorm
from coat_jax.linen.layers import RMSNorm as RMSNorm
from coat_jax.linen.tensor_train import TTLinear as TTLinear
from coat_jax.linen.tensor_train import TTMEmbedding as TTMEmbedding
