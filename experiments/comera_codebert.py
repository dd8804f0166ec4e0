"""Question: what does masked-token pretraining on code lose when matrices are trains?

Command:   python -m experiments.prepare --data=stdlib --stdlib_tests \
               --on_bad_file=skip --vocab=2048 --out=results/code.npz
           python -m experiments.comera_codebert --data=results/code.npz
Hardware:  one H200, some minutes an arm; the first command two CPU cores, one minute.
Expected:  the loss falls to what tokens' frequencies tell (4.8), stays there, and falls
           again once context is used: for dense matrices in the third epoch, for
           tensor trains not within these epochs. experiments/README.md holds what was
           measured.

CodeBERT-like: masked-token pretraining on the Python standard library, its tests
included. Six post-norm encoders of 768, windows of 128 tokens of which 15 % are to be
guessed, from scratch. Tensor trains replace the blocks' matrices, at a rank that makes
these about 13 times smaller, as the paper's are 12.3 times; the table of tokens, which
is the head's too, stays dense in all arms. Arms:

    dense             matrices, optax.adamw
    tt                tensor trains, early stage; then the late one from there
    galore            dense, optax.contrib.galore: it projects the longer side
    galore_reference  dense, projected as the authors' code does: the shorter side; not
                      among --arm=all

Where a stage of tensor trains ends its dead ranks are taken out of the arrays; the loss
is measured before and after. Whole files are held out.
"""

import collections
import dataclasses
import math
import pathlib
import sys
import time
from typing import Literal

from experiments import harness
from experiments.harness import ExitCode, UserError, option

ARMS = ("tt", "dense", "galore")  # of "all"
# What may differ between runs that stand in one table.
_NOT_SETTINGS = ("arm", "seeds", "data", "cache", "results", "image")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains each arm on each seed and compares them.

    A stage is appended to --results as it ends, and what is there isn't run again. An
    epoch's figures are appended at once to RESULTS.epochs: they outlive a lost stage.
    Exit codes: 0 done, 130 stopped by Ctrl-C, 3 loss not finite, 5 bad data, 6 wrong
    option.
    """

    arm: Literal["all", "dense", "tt", "galore", "galore_reference"] = option(
        "all", "what is trained"
    )
    seeds: int = option(1, "runs an arm: seeds 0, 1, ...; 0 shows what there is")
    size: Literal["full", "micro"] = option("full", "of the model; micro is for tests")
    seq: int = option(128, "tokens in a window")
    batch: int = option(64, "windows in a batch")
    epochs: int = option(6, "passes over the training text (the early stage)")
    late_epochs: int = option(2, "passes of the late stage")
    epoch_steps: int | None = option(None, "updates an epoch, fewer than the text's")
    mask: float = option(0.15, "share of a window's tokens to be guessed")
    lr: float = option(2.5e-4, "highest rate of dense leaves (cosine)")
    core_lr: float = option(6e-4, "highest rate of cores (cosine)")
    diagonal_lr: float = option(1e-3, "rate of diagonals (constant)")
    late_diagonal_lr: float = option(2e-3, "the same, in the late stage")
    late_lr: float = option(0.5, "highest rates of the late stage, as a share")
    warmup: float = option(0.1, "share of the early stage")
    weight_decay: float = option(0.01, "of dense matrices only")
    clip: float = option(1.0, "largest norm of all gradients")
    rank: int = option(64, "of matrices' inner bonds at the start")
    objective: Literal["paper", "code"] = option("paper", "what trains minimise")
    gamma: float = option(0.02, "weight of the size in the early stage")
    delay: int = option(5000, "steps before that weight counts")
    beta: float = option(1e-6, "weight of the cores' squared norm")
    late_size: float = option(0.5, "size to reach, as a share of the first one")
    late_slack: float = option(0.1, "by how much the loss may rise for it")
    w_size: float = option(1.0, "weight of the size's excess over its target")
    w_loss: float = option(20.0, "weight of the loss's excess over its target")
    rho: float = option(0.1, "weight of what is not the worse one")
    galore_rank: int = option(128, "columns of GaLore's projectors")
    galore_gap: int = option(500, "steps between two of its searches")
    galore_scale: float = option(1.0, "of its projected steps")
    galore_lr: float = option(2.5e-4, "highest rate of all leaves under it (cosine)")
    policy: Literal["bf16", "default", "paper"] = option(
        "bf16", "FP8 of all arms' blocks; bf16 has none of it"
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "computes the model")
    eval_windows: int | None = option(None, "held-out windows, fewer than all")
    data: str = option("stdlib", "stdlib, a folder, or a file of experiments.prepare")
    vocab: int = option(2048, "entries of the tokenizer")
    cache: str = option("results/cache", "folder for tokenizers and tokens")
    results: str = option("results/comera_codebert.jsonl", "where stages are appended")
    image: str = option("results/comera_codebert.png", "the picture to write")

    def __post_init__(self):
        least = {"seeds": 0, "seq": 2, "batch": 1, "epochs": 1, "late_epochs": 0}
        least |= {"epoch_steps": 1, "rank": 1, "eval_windows": 1}
        for name, most in least.items():
            value = getattr(self, name)
            if value is not None and value < most:
                raise ValueError(f"--{name} must be at least {most}, got {value}")
        for name in ("mask", "warmup", "late_size"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} must be above 0 and below 1, got {getattr(self, name)}"
                )


def arms(config: Config) -> list[Config]:
    """One config an arm that is asked for."""
    names = ARMS if config.arm == "all" else (config.arm,)
    return [dataclasses.replace(config, arm=name) for name in names]


def stages_of(config: Config) -> list[str]:
    """What a run records: a line each."""
    if config.arm != "tt":
        return ["whole"]
    return ["early", "late"] if config.late_epochs else ["early"]


def tokens_of(config: Config):
    """The text's tokens."""
    from experiments import config as options
    from experiments import data

    fields = ("data", "vocab", "seq", "batch", "cache")
    asked = {name: getattr(config, name) for name in fields}
    how = {"stdlib_tests": True, "on_bad_file": "skip", "eval_batches": 1}
    return data.prepare(options.Config(**asked, **how))


# One run -----------------------------------------------------------------------------


def run(config: Config, seed: int, tokens, keep) -> None:
    """Trains one arm on one seed; `keep` is given each stage's figures as it ends."""
    import jax

    from experiments import comera_codebert_arm as arm_of
    from experiments import comera_pairs_arm

    arm, key = arm_of.build(config, tokens), jax.random.key(seed)
    state, rows = arm.start(key), []
    facts = {"seed": seed, "device": jax.devices()[0].device_kind, "steps": arm.steps}
    for stage in stages_of(config):
        count = config.late_epochs if stage == "late" else config.epochs
        if stage == "late":
            state = comera_pairs_arm.begin_late(config, state, rows[-1]["loss"])
        began = time.monotonic()
        epoch, peak = arm_of.compiled(arm, state, key)
        facts |= {"compile_seconds": time.monotonic() - began, "peak_bytes": peak}
        for number in range(len(rows), len(rows) + count):
            state, row = _one_epoch(config, seed, arm, epoch, state, number)
            rows.append(row)
            of_run = {"arm": config.arm, "seed": seed, "stage": stage}
            harness.append(f"{config.results}.epochs", of_run | row)
        state, ended = arm_of.end_stage(arm, config, state)
        keep({**facts, "stage": stage, "epochs": rows[-count:], **ended})


def _one_epoch(config: Config, seed: int, arm, epoch, state, number: int):
    """The state after it, and its figures."""
    import jax

    from experiments import comera_pairs_arm

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), number)
    began = time.monotonic()
    state, figures = epoch(state, key)
    figures = jax.device_get(figures)
    row = {"epoch": number + 1, "seconds": time.monotonic() - began}
    row |= comera_pairs_arm.figures_of(config, state.params, figures)
    if not math.isfinite(row["loss"]):
        raise UserError(
            ExitCode.NON_FINITE,
            f"{config.arm}, seed {seed}: the loss is {row['loss']} in epoch "
            f"{row['epoch']}; lower --lr or --core_lr",
        )
    row["held_out"] = arm.evaluate(state.params)
    size = f"  size {row['size']:,}" if "size" in row else ""
    print(
        f"{config.arm}  seed {seed}  epoch {row['epoch']}  loss {row['loss']:.4f}  "
        f"held out {row['held_out']['loss']:.4f}, accuracy "
        f"{row['held_out']['accuracy']:.4f}{size}  {row['seconds']:.1f} s",
        flush=True,
    )
    return state, row


# All runs ----------------------------------------------------------------------------


def found_in(config: Config, sha256: str) -> dict[str, dict[int, dict]]:
    """By "arm stage" and seed: lines of --results with these settings and this text."""
    found, rows = collections.defaultdict(dict), harness.results(config.results)
    for arm in arms(config):
        wanted = dataclasses.asdict(arm)
        for name in _NOT_SETTINGS:
            wanted.pop(name)
        for row in rows:
            same = all(row["config"].get(k) == v for k, v in wanted.items())
            mine = row["config"]["arm"] == arm.arm and row["tokens_sha256"] == sha256
            if same and mine:
                found[f"{arm.arm} {row['stage']}"][row["seed"]] = row
    return dict(found)


def missing(config: Config, sha256: str) -> list[tuple[Config, int]]:
    """Arms and seeds of which some stage isn't in --results, first seeds first."""
    found = found_in(config, sha256)
    lacks = lambda arm, seed: any(
        seed not in found.get(f"{arm.arm} {stage}", {}) for stage in stages_of(arm)
    )
    both = [(arm, seed) for seed in range(config.seeds) for arm in arms(config)]
    return [(arm, seed) for arm, seed in both if lacks(arm, seed)]


def _train(config: Config, tokens) -> None:
    for arm, seed in missing(config, tokens.sha256):
        keep = lambda facts, arm=arm: harness.record(
            config.results, arm, {**facts, **tokens.facts()}
        )
        try:
            run(arm, seed, tokens, keep)
        except KeyboardInterrupt:
            raise UserError(
                ExitCode.INTERRUPTED,
                f"interrupted; finished stages are in {config.results}",
            ) from None


# What it shows -----------------------------------------------------------------------


def table(found: dict[str, dict[int, dict]]):
    """A line an arm and stage: its last seed's figures, the held-out ones' mean."""
    from rich.table import Table

    shown = Table(title="masked tokens of held-out files")
    headings = ("arm", "accuracy", "loss", "after cut", "seeds", "parameters")
    headings += ("matrices", "state MiB", "peak MiB", "step ms")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, by_seed in found.items():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        mean = lambda key, field, runs=runs: (
            sum(row.get(key, row["held_out"])[field] for row in runs) / len(runs)
        )
        last = runs[-1]
        step = min(epoch["seconds"] for epoch in last["epochs"]) / last["steps"]
        state = last["optimizer_bytes"] + last["parameter_bytes"]
        shown.add_row(
            name,
            f"{mean('held_out', 'accuracy'):.4f}",
            f"{mean('held_out', 'loss'):.4f}",
            f"{mean('held_out_truncated', 'loss'):.4f}",
            str(len(runs)),
            f"{last['parameters']:,}",
            f"{last['matrices']:,}",
            f"{state / 2**20:.1f}",
            "-" if last["peak_bytes"] is None else f"{last['peak_bytes'] / 2**20:.0f}",
            f"{1e3 * step:.2f}",
        )
    return shown


def draw(found: dict[str, dict[int, dict]], image: str) -> pathlib.Path:
    """Writes the picture: held-out loss by epoch, and the trains' ranks by epoch."""
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5), layout="constrained", width_ratios=(1, 1.3)
    )
    for name, by_seed in found.items():
        for seed, row in by_seed.items():
            numbers = [epoch["epoch"] for epoch in row["epochs"]]
            losses = [epoch["held_out"]["loss"] for epoch in row["epochs"]]
            left.plot(numbers, losses, ".-", label=f"{name}, seed {seed}")
    left.set_xlabel("epoch")
    left.set_ylabel("held-out loss at masked tokens")
    left.legend()
    _draw_ranks(right, found, figure)
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _draw_ranks(axis, found, figure) -> None:
    """Living ranks of the first seed's trains: a row a bond, a column an epoch."""
    stages = [found[name] for name in ("tt early", "tt late") if name in found]
    if not stages:
        axis.set_axis_off()
        return
    seed = min(stages[0])
    parts = [runs[seed]["epochs"] for runs in stages if seed in runs]
    epochs = [epoch for part in parts for epoch in part]
    names = list(epochs[0]["ranks"])
    rows = [[r for name in names for r in epoch["ranks"][name]] for epoch in epochs]
    how = {"aspect": "auto", "interpolation": "none", "vmin": 0}
    shown = axis.imshow([*zip(*rows, strict=True)], **how)
    counts = [len(epochs[0]["ranks"][name]) for name in names]
    axis.set_yticks([sum(counts[:i]) for i in range(len(names))], names, fontsize=5)
    axis.set_xticks(range(len(epochs)), [epoch["epoch"] for epoch in epochs])
    if len(parts) > 1:
        axis.axvline(len(parts[0]) - 0.5, color="white")
    axis.set_xlabel("epoch (white line: the late stage begins)")
    axis.set_title(f"living ranks of each train's bonds, seed {seed}")
    figure.colorbar(shown, ax=axis)


def main(config: Config) -> None:
    """Trains what --results lacks, then shows the table and writes the picture."""
    from rich.console import Console

    tokens = tokens_of(config)
    _train(config, tokens)
    found = found_in(config, tokens.sha256)
    if not found:
        raise UserError(
            ExitCode.DATA, f"{config.results} holds no run with these settings"
        )
    Console(width=130).print(table(found))
    print(
        "after cut: the loss once dead ranks are gone. state: parameters and the\n"
        "optimizer's. peak: arguments, results and temporaries of an epoch's program."
    )
    harness.show_picture(draw, found, config.image)
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
