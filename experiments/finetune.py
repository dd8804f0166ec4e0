"""Question: does a published model fine-tune in FP8 to where BF16 takes it?

Command:   python -m experiments.finetune --policy=all --attention=cudnn
Hardware:  one GPU, minutes an arm. Two CPU cores: a few steps only.
Expected:  experiments/README.md holds the measured table.

SmolLM2-135M-Instruct, dequantised from Q4_1, on gsm_symbolic. All weights train:
float32 parameters, bfloat16 arithmetic. The loss is of the answers' tokens only; the
questions are read, not learnt. Seeds draw the order of the problems and the rounding of
the optimizer, so their spread is what "the same" is measured by. --prepare writes all
that a machine without a network needs into --data, weights in pieces below 64 MiB.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

from experiments import config as options
from experiments import harness
from experiments.harness import ExitCode, UserError, option

# What tells arms apart: the preset, what of it is changed, and the optimizer.
_CHANGES = ("attention_keeps", "gemm_scaling", "input_format", "weight_format")
_CHANGES += ("gradient_format",)
_ARM = ("policy", *_CHANGES, "optimizer")
# The first is what the others are held to.
ARMS = (
    {"policy": "bf16", "optimizer": "adamw"},
    {"policy": "bf16", "optimizer": "fp8_adamw"},
    {"policy": "default", "optimizer": "adamw"},
    {"policy": "default", "optimizer": "fp8_adamw"},
    {"policy": "default", "attention_keeps": "fp8", "optimizer": "fp8_adamw"},
    {"policy": "paper", "optimizer": "fp8_adamw"},
    {"policy": "default", "gemm_scaling": "vector", "optimizer": "adamw"},
    {"policy": "default", "gemm_scaling": "vector", "optimizer": "fp8_adamw"},
    {"policy": "memory", "optimizer": "adamw"},
    {"policy": "memory", "optimizer": "fp8_adamw"},
    {"policy": "default", "input_format": "bf16", "optimizer": "adamw"},
    {"policy": "default", "weight_format": "bf16", "optimizer": "adamw"},
    {"policy": "default", "gradient_format": "bf16", "optimizer": "adamw"},
)
# Rows of the results file are compared if these agree.
_COMPARED = ("steps", "batch", "seq", "lr", "warmup", "dtype", "attention")
_FACTS = ("data_sha256", "weights_sha256", "device")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tunes SmolLM2-135M on word problems, in BF16 and in FP8.

    Exit codes: 0 done, 3 loss not finite, 4 not the weights expected, 5 data missing or
    bad, 6 wrong option.
    """

    policy: Literal["all", "bf16", "default", "lean", "memory", "paper"] = option(
        "all", "FP8 of products and of what layers keep; all runs every arm"
    )
    attention_keeps: Literal["bf16", "fp8"] | None = option(
        None, "queries, keys and values until the backward; changes an FP8 policy"
    )
    gemm_scaling: Literal["tensor", "group", "vector"] | None = option(
        None, "scales of the operands of products; likewise"
    )
    input_format: Literal["e4m3", "bf16"] | None = option(
        None, "of activations in products; likewise"
    )
    weight_format: Literal["e4m3", "bf16"] | None = option(
        None, "of weights in products; likewise"
    )
    gradient_format: Literal["e4m3", "e5m2", "bf16"] | None = option(
        None, "of gradients in products; likewise"
    )
    optimizer: Literal["fp8_adamw", "adamw"] = option(
        "fp8_adamw", "what updates the parameters; --policy=all has its own"
    )
    seeds: int = option(3, "runs an arm: orders of the problems")
    steps: int = option(300, "updates in a run")
    batch: int = option(16, "problems in a batch")
    seq: int = option(320, "tokens of a problem with its answer; longer ones are left")
    lr: float = option(1e-4, "highest learning rate")
    warmup: float = option(0.1, "share of the steps in which the rate rises from 0")
    train_items: int = option(8000, "problems generated to train on")
    held_items: int = option(512, "problems generated to be held out")
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "computes the model")
    attention: Literal["xla", "cudnn"] = option("xla", "attention implementation")
    weights: str = option("installed", "a GGUF file, or of the installed package")
    perplexity: float = option(12.7, "that the weights must have; 0 takes any")
    data: str = option("results/finetune", "folder of problems and weights, or to be")
    prepare: bool = option(False, "write --data for a machine without a network; stop")
    results: str = option("results/finetune.jsonl", "where runs are appended")

    def __post_init__(self):
        for name in ("seeds", "steps", "batch", "seq", "train_items", "held_items"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 < self.lr < math.inf or self.perplexity < 0:
            raise ValueError(
                f"--lr must be above 0 and finite, --perplexity 0 or more, got "
                f"{self.lr} and {self.perplexity}"
            )
        given = [name for name in _CHANGES if getattr(self, name) is not None]
        if self.policy == "all" and given:
            raise ValueError(f"--policy=all has its own --{given[0]}: leave it out")
        for arm in arms(self):
            run_options(arm)


def arms(config: Config) -> list[Config]:
    """The config of each arm: one, or all of them."""
    if config.policy != "all":
        return [config]
    return [dataclasses.replace(config, **arm) for arm in ARMS]


def run_options(config: Config) -> options.Config:
    """The arm in the words of `experiments.pretrain`, which checks them too."""
    names = (*_ARM, "steps", "lr", "warmup", "dtype", "attention")
    values = {name: getattr(config, name) for name in names}
    return options.Config(**values, weight_decay=0.0)


def earlier(config: Config, facts: dict) -> list[dict]:
    """Rows of the results file that this config's arms may be compared with.

    The newest row of an arm and seed stands for it.

    Raises:
      UserError: a line that isn't a result; exit code 5.
    """
    found = {}
    for number, row in enumerate(harness.results(config.results), 1):
        try:
            same = all(row["config"][k] == getattr(config, k) for k in _COMPARED)
            if same and all(row[name] == facts[name] for name in _FACTS):
                found[arm_of(row), row["seed"]] = row
        except (KeyError, TypeError) as error:
            raise UserError(
                ExitCode.DATA,
                f"line {number} of {config.results} isn't a result of this experiment "
                f"({type(error).__name__}: {error}); move the file away",
            ) from None
    return [*found.values()]


def _key(arm: dict) -> tuple[str | None, ...]:
    """An arm as what tells it apart; a change that a row is older than is None."""
    return arm["policy"], *(arm.get(name) for name in _CHANGES), arm["optimizer"]


def arm_of(row: dict) -> tuple[str | None, ...]:
    """Policy, its changes, optimizer."""
    return _key(row["config"])


def name_of(arm: tuple[str | None, ...]) -> str:
    """An arm of `arm_of` as people read it."""
    policy, *changes, optimizer = arm
    told = [f"{n}={v}" for n, v in zip(_CHANGES, changes, strict=False) if v]
    return " ".join([f"{policy}", *told, f"{optimizer}"])


def summarized(rows: list[dict]) -> list[dict]:
    """One row an arm, over its seeds; change is against the first arm of ARMS."""
    by_arm = {}
    for row in rows:
        by_arm.setdefault(arm_of(row), []).append(row)
    mean = lambda runs, name: statistics.fmean(run[name] for run in runs)
    first = by_arm.get(_key(ARMS[0]))
    first = first and mean(first, "held_out_loss_after")
    return [
        {
            "arm": arm,
            "seeds": len(runs),
            "before": mean(runs, "held_out_loss_before"),
            "after": mean(runs, "held_out_loss_after"),
            "lowest": min(run["held_out_loss_after"] for run in runs),
            "highest": max(run["held_out_loss_after"] for run in runs),
            "plain": mean(runs, "plain_held_out_loss_after"),
            "change": first and mean(runs, "held_out_loss_after") / first - 1,
            "bytes": mean(runs, "optimizer_bytes_per_parameter"),
            "step_ms": statistics.median(run["step_ms"] for run in runs),
        }
        for arm, runs in by_arm.items()
    ]


def table(rows: list[dict]) -> Table:
    """The arms as people read them, in the order in which they were run."""
    shown = Table(
        title="loss of an answer's token in held-out problems",
        caption="arm: policy, its changes, optimizer; bytes: its state's, a parameter",
    )
    for heading in ("arm", "loss", "its seeds", "change", "bytes", "ms"):
        justify = "left" if heading == "arm" else "right"
        shown.add_column(heading, justify=justify, no_wrap=heading != "arm")
    for row in summarized(rows):
        shown.add_row(
            name_of(row["arm"]),
            f"{row['after']:.4f}",
            f"{row['lowest']:.4f}-{row['highest']:.4f}",
            "-" if row["change"] is None else f"{100 * row['change']:+.2f} %",
            f"{row['bytes']:.2f}",
            f"{row['step_ms']:.0f}",
        )
    return shown


def _prepare(config: Config, problems) -> None:
    """The weights in pieces beside the problems; says what to take along."""
    from experiments import smollm

    folder = pathlib.Path(config.data)
    if config.weights == "installed":
        source = smollm.installed()
    else:
        source = pathlib.Path(config.weights)
    smollm.write_pieces(source, folder)
    for path in sorted(folder.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(json.dumps(problems.facts, indent=2))


def main(config: Config) -> None:
    """Checks the weights, fine-tunes every arm and seed, prints the table."""
    harness.results(config.results)  # refused now if it can't be written
    # These import JAX, which --help needn't wait for.
    from experiments import finetune_arm, smollm

    model = smollm.load(config.weights, pathlib.Path(config.data))
    problems = finetune_arm.problems_of(config, model)
    found = smollm.require_perplexity(model, problems.sentence, config.perplexity)
    print(f"perplexity of {len(problems.sentence)} tokens: {found:.2f}")
    if config.prepare:
        return _prepare(config, problems)
    for arm in arms(config):
        built = finetune_arm.Arm(arm, run_options(arm), model, problems)
        for seed in range(config.seeds):
            facts = built.run(seed) | {"perplexity": found}
            harness.record(config.results, arm, facts)
            print(
                f"{arm.policy}, {arm.optimizer}, seed {seed}: held-out loss "
                f"{facts['held_out_loss_before']:.4f} to "
                f"{facts['held_out_loss_after']:.4f}, {facts['step_ms']:.0f} ms a step",
                flush=True,
            )
    Console().print(table(earlier(config, facts)))
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
