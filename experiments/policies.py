"""The FP8 policy and the layers that a config asks for."""

import dataclasses

from coat_jax import policy as policies
from coat_jax.formats import E4M3, E5M2
from coat_jax.models import llama
from experiments.harness import ExitCode, UserError

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "fp8": E4M3, "bf16": None}


def _changed(base: policies.Policy, config) -> policies.Policy:
    change = dataclasses.replace
    records = {name: getattr(base, name) for name in ("x", "w", "g")}
    if config.gemm_scaling is not None:
        scaling = config.gemm_scaling
        records = {k: change(v, scaling=scaling) for k, v in records.items()}
    formats = {"x": config.input_format, "w": config.weight_format}
    formats["g"] = config.gradient_format
    for name, form in formats.items():
        if form is not None:
            records[name] = change(records[name], format=_FORMATS[form])
    kept, attention = base.kept, base.attention
    if config.kept_group is not None:
        kept = change(kept, group=config.kept_group)
        attention = change(attention, group=config.kept_group)
    if config.attention_keeps is not None:
        attention = change(attention, format=_FORMATS[config.attention_keeps])
    sums = {"forward": config.forward_accumulation}
    sums["backward"] = config.backward_accumulation
    sums = {name: value for name, value in sums.items() if value is not None}
    return change(base, **records, kept=kept, attention=attention, **sums)


def policy_of(config) -> policies.Policy:
    """The preset that --policy names with the single options put over it.

    Raises:
      UserError: a combination that the library refuses; exit code 6.
    """
    try:
        return _changed(policies.PRESETS[config.policy], config)
    except (TypeError, ValueError) as error:
        raise UserError(ExitCode.CONFIG, str(error)) from None


def layers_of(config) -> llama.Layers:
    """What the decoder is made of; under bf16, Flax's own layers bit for bit.

    Raises:
      UserError: a policy or sizes that the compressed layers refuse; exit code 6.
    """
    try:
        return llama.fp8_layers(policy_of(config), implementation=config.attention)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(ExitCode.CONFIG, str(error)) from None
