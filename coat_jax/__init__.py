"""FP8 training for JAX: optimizer states kept in 8 bits at no loss."""

from coat_jax.expand import Expanded as Expanded
from coat_jax.expand import expand_dequantize as expand_dequantize
from coat_jax.expand import expand_quantize as expand_quantize
from coat_jax.formats import E4M3 as E4M3
from coat_jax.formats import E5M2 as E5M2
from coat_jax.formats import Format as Format
from coat_jax.moments import Storage as Storage
from coat_jax.optimizer import ScaleByFp8AdamState as ScaleByFp8AdamState
from coat_jax.optimizer import apply_fused as apply_fused
from coat_jax.optimizer import decay_mask as decay_mask
from coat_jax.optimizer import fp8_adam as fp8_adam
from coat_jax.optimizer import fp8_adamw as fp8_adamw
from coat_jax.optimizer import scale_by_fp8_adam as scale_by_fp8_adam
from coat_jax.quantize import Quantized as Quantized
from coat_jax.quantize import dequantize as dequantize
from coat_jax.quantize import quantize as quantize
