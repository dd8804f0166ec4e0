"""Every option of a training run, with the presets that fill what is left out."""

import dataclasses
from typing import Literal

from experiments.harness import option


# What each model size trains with unless an option says otherwise. The batch is in
# sequences. 7b and 8b fit one 141 GB device at batch 1 with the FP8 optimizer only;
# larger ones need several.
def _preset(batch, seq, steps, lr, vocab, eval_batches=8) -> dict[str, float]:
    sizes = {"batch": batch, "seq": seq, "steps": steps, "lr": lr, "vocab": vocab}
    return {**sizes, "eval_batches": eval_batches}


PRESETS = {
    "micro": _preset(4, 32, 20, 1e-2, 512),
    "tiny": _preset(4, 128, 1500, 2e-3, 2048, eval_batches=32),
    "small": _preset(16, 256, 2000, 3e-3, 8192),
    "125m": _preset(32, 1024, 5000, 1e-3, 50304),
    "1b": _preset(16, 2048, 5000, 4e-4, 128256),
    "llama2-7b": _preset(1, 2048, 1000, 3e-4, 32000, eval_batches=32),
    "llama2-13b": _preset(8, 2048, 1000, 3e-4, 32000, eval_batches=32),
    "llama-30b": _preset(8, 2048, 1000, 1.5e-4, 32000, eval_batches=32),
    "llama3-8b": _preset(1, 2048, 1000, 3e-4, 128256, eval_batches=32),
    "llama3-70b": _preset(8, 2048, 1000, 1.5e-4, 128256, eval_batches=32),
}
# Options that say how a run is watched or kept, not what it computes: `--resume` may
# change them. Everything else must be as it was.
FREE_TO_CHANGE = (
    "out", "data", "cache", "results", "resume", "overwrite", "keep", "save_every",
    "eval_every", "eval_batches", "log_seconds", "tensorboard", "progress",
    "mesh", "fsdp", "on_bad_file",
)  # fmt: skip
# Options that change the preset that --policy names.
POLICY_KNOBS = (
    "input_format", "weight_format", "gradient_format", "gemm_scaling", "kept_group",
    "attention_keeps", "forward_accumulation", "backward_accumulation",
)  # fmt: skip
OPTIMIZERS = Literal["fp8_adamw", "adamw", "lion", "adafactor", "muon", "sgd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a Llama decoder from scratch on real text.

    Without --data the text is the Python standard library's own sources, which every
    machine that runs this has; --data=debian fetches 108 MB of prose and manuals as
    Debian packages. Exit codes: 0 done, 75 stopped by SIGTERM and saved,
    130 the same by Ctrl-C, 3 loss not finite, 4 checkpoint unusable, 5 bad data,
    6 wrong option.
    """

    preset: Literal[
        "micro",
        "tiny",
        "small",
        "125m",
        "1b",
        "llama2-7b",
        "llama2-13b",
        "llama-30b",
        "llama3-8b",
        "llama3-70b",
    ] = option("tiny", "model size with its batch, length, steps and learning rate")
    optimizer: OPTIMIZERS = option("fp8_adamw", "what updates the parameters")
    seed: int = option(0, "of the initial weights, the data order and the rounding")
    steps: int | None = option(None, "updates to make")
    batch: int | None = option(None, "sequences in a batch")
    seq: int | None = option(None, "tokens in a sequence")
    vocab: int | None = option(None, "entries of the embedding table")
    hidden: int | None = option(None, "width of the residual stream")
    ffn: int | None = option(None, "width of the gated MLP")
    layers: int | None = option(None, "decoder blocks")
    heads: int | None = option(None, "query heads")
    kv_heads: int | None = option(None, "key and value heads; must divide heads")
    dtype: Literal["float32", "bfloat16"] = option("float32", "computes the model")
    param_dtype: Literal["float32", "bfloat16"] = option("float32", "stores parameters")
    attention: Literal["xla", "cudnn"] = option("xla", "attention implementation")
    remat: bool = option(False, "recompute each block in the backward pass")
    policy: Literal["bf16", "default", "lean", "memory", "paper"] = option(
        "bf16", "FP8 of products and of what layers keep; bf16 has none of it"
    )
    input_format: Literal["e4m3", "bf16"] | None = option(
        None, "of activations in products; this and the next seven change --policy"
    )
    weight_format: Literal["e4m3", "bf16"] | None = option(
        None, "of weights in products"
    )
    gradient_format: Literal["e4m3", "e5m2", "bf16"] | None = option(
        None, "of gradients in products"
    )
    gemm_scaling: Literal["tensor", "group", "vector"] | None = option(
        None, "scales of the operands of products"
    )
    kept_group: int | None = option(None, "elements a scale in what layers keep")
    attention_keeps: Literal["bf16", "fp8"] | None = option(
        None, "queries, keys and values until the backward"
    )
    forward_accumulation: Literal["fast", "promoted"] | None = option(
        None, "of FP8 products in the forward pass"
    )
    backward_accumulation: Literal["fast", "promoted"] | None = option(
        None, "of FP8 products in the backward pass"
    )

    lr: float | None = option(None, "highest learning rate")
    warmup: float = option(0.05, "share of the steps in which the rate rises from 0")
    final_lr: float = option(0.1, "last rate as a share of the highest (cosine)")
    b1: float = option(0.9, "decay of the first moment")
    b2: float = option(0.99, "decay of the second moment")
    eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.1, "of matrices only; norms and biases have none")
    clip: float = option(1.0, "highest global norm of the gradient; 0 never clips")
    momentum_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "of lion, muon, adafactor, sgd and adamw's first moment"
    )
    fused: bool = option(False, "update parameters in one pass (fp8_adamw only)")
    m_format: Literal["e4m3", "e5m2"] = option("e4m3", "first moment of fp8_adamw")
    v_format: Literal["e4m3", "e5m2"] = option("e4m3", "second moment of fp8_adamw")
    group: int = option(128, "elements that share a scale in fp8_adamw")
    expand: bool = option(True, "widen the range of a group before it is rounded")
    v_rounding: Literal["default", "nearest", "stochastic"] = option(
        "default", "of the second moment in fp8_adamw"
    )

    data: str = option(
        "stdlib", "folder of text, stdlib, debian, or a file of experiments.prepare"
    )
    stdlib_tests: bool = option(False, "also train on the standard library's tests")
    held_out: float = option(0.05, "share of the files that are never trained on")
    on_bad_file: Literal["fail", "skip"] = option("fail", "for a file that isn't text")
    tokenizer: Literal["bpe", "bytes"] = option("bpe", "byte pairs, or single bytes")
    cache: str = option("results/cache", "folder for tokenizers and tokens")

    out: str | None = option(None, "folder of this run's checkpoints and metrics")
    results: str = option("results/pretrain.jsonl", "where the summary is appended")
    resume: bool = option(False, "continue from the newest checkpoint in --out")
    overwrite: bool = option(False, "delete the run that --out already holds")
    save_every: int = option(100, "steps between checkpoints; 0 keeps none")
    keep: int = option(3, "checkpoints to keep")
    eval_every: int = option(100, "steps between held-out losses; 0 only at the end")
    eval_batches: int | None = option(None, "batches in a held-out loss")
    log_seconds: float = option(5.0, "between progress lines when there's no terminal")
    progress: bool = option(True, "show progress")
    tensorboard: bool = option(False, "also write TensorBoard files into --out")
    mesh: Literal["none", "data"] = option("none", "split batches over all devices")
    fsdp: bool = option(False, "with --mesh=data: split parameters and state too")

    def __post_init__(self):
        _check(self)


def _require(fine: bool, name: str, must: str, value) -> None:
    if not fine:
        raise ValueError(f"--{name} must be {must}, got {value}")


def _check(config: Config) -> None:
    """One sentence for each value that no run could have meant."""
    names = ", ".join(PRESETS)
    _require(config.preset in PRESETS, "preset", f"one of {names}", config.preset)
    for name in ("steps", "batch", "seq", "vocab", "hidden", "ffn", "layers"):
        value = getattr(config, name)
        _require(value is None or value >= 1, name, "at least 1", value)
    for name in ("heads", "kv_heads", "group", "kept_group", "keep", "eval_batches"):
        value = getattr(config, name)
        _require(value is None or value >= 1, name, "at least 1", value)
    for name in ("save_every", "eval_every", "seed", "clip", "weight_decay", "eps"):
        _require(getattr(config, name) >= 0, name, "0 or more", getattr(config, name))
    for name in ("b1", "b2", "warmup"):
        value = getattr(config, name)
        _require(0 <= value < 1, name, "at least 0 and below 1", value)
    lr, held = config.lr, config.held_out
    _require(lr is None or 0 < lr < float("inf"), "lr", "above 0 and finite", lr)
    _require(0 <= config.final_lr <= 1, "final_lr", "from 0 to 1", config.final_lr)
    _require(0 < held < 1, "held_out", "between 0 and 1", held)
    if config.fused and config.optimizer != "fp8_adamw":
        raise ValueError(
            f"--fused needs --optimizer=fp8_adamw, got {config.optimizer}; leave it out"
        )
    knobs = [name for name in POLICY_KNOBS if getattr(config, name) is not None]
    if knobs and config.policy == "bf16":
        raise ValueError(
            f"--{knobs[0]} changes an FP8 policy: add --policy=default, say"
        )
    if config.attention == "cudnn" and config.dtype != "bfloat16":
        raise ValueError("--attention=cudnn takes bfloat16 only: add --dtype=bfloat16")
    if config.fsdp and config.mesh != "data":
        raise ValueError("--fsdp splits over the mesh: add --mesh=data")
    if config.resume and config.overwrite:
        raise ValueError("--resume continues a run, --overwrite deletes it: give one")


def resolve(config: Config) -> Config:
    """The config with the preset's values where an option was left out."""
    preset = PRESETS[config.preset]
    missing = {k: v for k, v in preset.items() if getattr(config, k) is None}
    policy = "" if config.policy == "bf16" else f"-{config.policy}"
    name = f"results/{config.preset}-{config.optimizer}{policy}-{config.seed}"
    return dataclasses.replace(config, **missing, out=config.out or name)


def differences(saved: dict, config: Config) -> list[str]:
    """What a resumed run may not change: 'lr was 0.01, now 0.02' for each."""
    now = dataclasses.asdict(config)
    # An option that is newer than the run: it ran with what is now the default.
    saved = {f.name: f.default for f in dataclasses.fields(Config)} | saved
    return [
        f"{name} was {saved[name]}, now {now[name]}"
        for name in now
        if name not in FREE_TO_CHANGE and saved[name] != now[name]
    ]
