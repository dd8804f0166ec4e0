"""Flax NNX modules with FP8 activations: Flax's names, arguments and parameters."""

from coat_jax.nn.attention import Attention as Attention
from coat_jax.nn.blocks import MLP as MLP
from coat_jax.nn.blocks import DecoderBlock as DecoderBlock
from coat_jax.nn.blocks import EncoderBlock as EncoderBlock
from coat_jax.nn.blocks import GatedMLP as GatedMLP
from coat_jax.nn.convert import Report as Report
from coat_jax.nn.convert import convert as convert
from coat_jax.nn.functional import act_linear as act_linear
from coat_jax.nn.functional import attention_linear as attention_linear
from coat_jax.nn.functional import mlp as mlp
from coat_jax.nn.functional import norm_linear as norm_linear
from coat_jax.nn.layers import Conv as Conv
from coat_jax.nn.layers import Einsum as Einsum
from coat_jax.nn.layers import LayerNorm as LayerNorm
from coat_jax.nn.layers import Linear as Linear
from coat_jax.nn.layers import LinearGeneral as LinearGeneral
from coat_jax.nn.layers import RMSNorm as RMSNorm
from coat_jax.nn.merged import LowRankLinear as LowRankLinear
from coat_jax.nn.merged import MergedEmbedding as MergedEmbedding
from coat_jax.nn.merged import merge as merge
from coat_jax.nn.tensor_embedding import TTMEmbedding as TTMEmbedding
from coat_jax.nn.tensor_train import TTLinear as TTLinear
from coat_jax.nn.tensorize import tensorize as tensorize
