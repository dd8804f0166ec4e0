"""What layers keep between forward and backward, and the names by which remat sees it.

    block = jax.checkpoint(block, policy=coat_jax.save_fp8)

keeps the FP8 residuals of a rematerialised block and recomputes everything else.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coat_jax.formats import Format
from coat_jax.policy import Kept
from coat_jax.quantize import Quantized, dequantize, quantize

CODES_NAME = "coat_codes"
SCALE_NAME = "coat_scale"
save_fp8 = jax.checkpoint_policies.save_only_these_names(CODES_NAME, SCALE_NAME)


class Stored(NamedTuple):
    """A kept array. codes: uint8, FP8 bit patterns; scale: float32, one a group.

    The codes are bytes, not FP8 values: remat passes kept floats through
    `reduce_precision`, which on CPU turns E4M3's largest codes into NaN.
    """

    codes: Any
    scale: Any


def pack(codes, scale) -> Stored:
    """FP8 codes and their scales as named bytes."""
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    return Stored(checkpoint_name(bits, CODES_NAME), checkpoint_name(scale, SCALE_NAME))


def named_scale(scale):
    """A scale that `save_fp8` keeps beside codes of something else."""
    return checkpoint_name(scale, SCALE_NAME)


def unpack(stored: Stored, format: Format):
    """The FP8 codes and scales of `pack`."""
    return lax.bitcast_convert_type(stored.codes, format.dtype), stored.scale


def keep(x: jax.Array, kept: Kept):
    """`x` as `kept` says: Stored, or x itself where it names no format."""
    if kept.format is None:
        return x
    return pack(*quantize(x, format=kept.format, group=kept.group))


def restore(stored, kept: Kept) -> jax.Array:
    """The float32 value of what `keep` returned."""
    if kept.format is None:
        return stored.astype(jnp.float32)
    codes = Quantized(*unpack(stored, kept.format))
    return dequantize(codes, group=kept.group)
