"""Question: how many bytes a token does a decoder keep between forward and backward?

Command:   python -m experiments.activation_bytes --preset=tiny
Hardware:  any; nothing is computed, shapes suffice.
Expected:  measured and predicted agree to the byte; with FP8 a third or less is kept.

Measured: what the loss hands to its backward, read from its program before compilation,
at two batch sizes; the difference is what grows with the tokens (parameters, tables and
masks don't). Predicted: `predicted_bytes_kept`, from sizes and policy alone.
"""

import dataclasses
import sys

import jax
from jax import numpy as jnp
import optax

import coat_jax
from coat_jax.models import llama
from coat_jax.policy import Kept, Policy
from experiments import config as options
from experiments import harness, job, policies
from experiments.harness import ExitCode, UserError, option


def measured_bytes_kept(model: llama.LlamaConfig, layers, *, seq: int) -> float:
    """Bytes a token that the loss keeps: the slope between one and two sequences."""
    loss = llama.make_loss(model, layers=layers)
    make = lambda key: llama.init_params(model, key, layers=layers)
    params = jax.eval_shape(make, jax.random.key(0))

    def kept(batch: int) -> int:
        windows = jnp.zeros((batch, seq + 1), jnp.int32)
        report = coat_jax.memory_report(
            params, optax.identity(), loss=lambda p: loss(p, windows)
        )
        return report["residuals"].after

    return (kept(2) - kept(1)) / seq


def _width(elements: int, kept: Kept, size: int) -> int:
    """Bytes of a token's `elements`: codes with a scale a group, or the dtype's own."""
    if kept.format is None:
        return size * elements
    return elements * kept.format.dtype.itemsize + 4 * -(-elements // kept.group)


def _compressed_block(model: llama.LlamaConfig, policy: Policy, size: int) -> int:
    """What enters each norm, gate and up, and the heads of q, k and v."""
    H, F, D = model.hidden, model.ffn, model.head_size
    heads = model.heads + 2 * model.kv_heads
    inputs = 2 * _width(H, policy.kept, size) + 2 * _width(F, policy.kept, size)
    return inputs + heads * _width(D, policy.attention, size)


def _plain_block(model: llama.LlamaConfig, size: int, seq: int) -> int:
    """What the derivatives of Flax's layers refer to, norms and softmax in float32."""
    H, F, D, N = model.hidden, model.ffn, model.head_size, model.heads
    norms = 6 * 4 * H + 4 * 4  # of two norms, and their reciprocal roots
    operands = size * (3 * H + 6 * F + (N + 2 * model.kv_heads) * D)
    probabilities = (size + 4) * N * seq + 2 * 4 * N  # with maxima and sums
    return norms + operands + probabilities


def predicted_bytes_kept(model: llama.LlamaConfig, policy: Policy, *, seq: int) -> int:
    """Bytes a token that the decoder's loss keeps, attention by XLA, without remat.

    With H hidden, F ffn, N + 2 K heads of size D, L blocks, V vocabulary, T = seq,
    s bytes an element of the compute dtype, c(n) = n + 4 ceil(n / group) bytes of
    codes and scales:

        FP8:    L (2 c(H) + 2 c(F) + (N + 2K) a(D)) + E
        plain:  L ((3s + 24) H + 6s F + s (N + 2K) D + (s + 4) N T + 8 N + 16)
                + 5 N T + E
        E     = (s + 12) H + 4 V + 21

    a(D) is c(D) where attention keeps FP8, else s D. E is the last norm, what enters
    the head, the softmax and the targets: plain in either. The plain model's T are the
    attention's probabilities and its mask.

    Example:
      >>> tiny = llama.PRESETS["tiny"]
      >>> predicted_bytes_kept(tiny, coat_jax.policy.DEFAULT, seq=128)
      14421
    """
    if model.remat:
        raise ValueError(
            "predicted_bytes_kept: model must be without remat, which keeps less by "
            "computing again; got remat=True"
        )
    size = jnp.dtype(model.dtype).itemsize
    ends = (size + 12) * model.hidden + 4 * model.vocab + 21
    if policy.plain:
        blocks = model.layers * _plain_block(model, size, seq)
        return blocks + 5 * model.heads * seq + ends
    return model.layers * _compressed_block(model, policy, size) + ends


def of_config(config: options.Config) -> dict[str, float]:
    """Both figures of a resolved config of experiments.pretrain, for its summary."""
    model, layers = job.model_of(config), policies.layers_of(config)
    policy, seq = policies.policy_of(config), config.seq
    return {
        "kept_per_token": measured_bytes_kept(model, layers, seq=seq),
        "kept_predicted": predicted_bytes_kept(model, policy, seq=seq),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Prints the bytes a token that each policy keeps, measured and predicted."""

    preset: str = option("tiny", "model, as in experiments.pretrain")
    dtype: str = option("float32", "float32 or bfloat16, which computes the model")
    seq: int | None = option(None, "tokens in a sequence")


def main(config: Config) -> None:
    """A line a policy, without and with FP8 attention."""
    arms = [{"policy": "bf16"}, {"policy": "default"}, {"policy": "paper"}]
    arms.append({"policy": "default", "attention_keeps": "fp8"})
    print(f"{'policy':24}{'measured':>12}{'predicted':>12}{'share':>8}")
    whole = None
    for arm in arms:
        try:
            run = options.resolve(options.Config(**dataclasses.asdict(config), **arm))
        except ValueError as error:
            raise UserError(ExitCode.CONFIG, str(error)) from None
        figures = of_config(run)
        kept, predicted = figures["kept_per_token"], figures["kept_predicted"]
        whole = whole or kept
        name = ", ".join(arm.values())
        print(f"{name:24}{kept:12,.0f}{predicted:12,}{kept / whole:8.3f}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
