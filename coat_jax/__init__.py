"""FP8 training for JAX: optimizer states kept in 8 bits."""

from coat_jax import checkpoint as checkpoint
from coat_jax import telemetry as telemetry
from coat_jax.decay import decay_mask as decay_mask
from coat_jax.expand import Expanded as Expanded
from coat_jax.expand import expand_dequantize as expand_dequantize
from coat_jax.expand import expand_quantize as expand_quantize
from coat_jax.formats import E4M3 as E4M3
from coat_jax.formats import E5M2 as E5M2
from coat_jax.formats import Format as Format
from coat_jax.fp8_state import Fp8State as Fp8State
from coat_jax.fp8_state import fp8_state as fp8_state
from coat_jax.interop import from_optax_adam as from_optax_adam
from coat_jax.interop import to_optax_adam as to_optax_adam
from coat_jax.memory import memory_report as memory_report
from coat_jax.moments import Storage as Storage
from coat_jax.optimizer import ScaleByFp8AdamState as ScaleByFp8AdamState
from coat_jax.optimizer import apply_fused as apply_fused
from coat_jax.optimizer import fp8_adam as fp8_adam
from coat_jax.optimizer import fp8_adamw as fp8_adamw
from coat_jax.optimizer import scale_by_fp8_adam as scale_by_fp8_adam
from coat_jax.quantize import Quantized as Quantized
from coat_jax.quantize import dequantize as dequantize
from coat_jax.quantize import quantize as quantize
from coat_jax.sharding import state_shardings as state_shardings
