"""Question: does a six-encoder tensor-train model match a dense one on sentence pairs?

Command:   python -m experiments.verse_pairs          (Debian and a network, 3 minutes)
           python -m experiments.comera_pairs --arm=dense,tt,galore_reference \
               --jobs=8 --gpus=4
           python -m experiments.comera_pairs --arm=galore,tt_fp8,dense_coat \
               --seeds=1 --jobs=3 --gpus=3
           python -m experiments.comera_pairs --seeds=0     (the table of what there is)
Hardware:  one H200: an estimated 2 minutes a run of `tt`, 1 of `dense`.
Expected:  tensor trains within 1 point of the dense model after the early stage, their
           matrices at least 40 times smaller than dense ones, 150 times after the late
           one. experiments/README.md holds what was measured: so it is in five runs of
           six; one fell to a loss of .693, which --core_lr=4e-4 has not been seen to.

The model is CoMERA's (arXiv 2405.14377), trained from scratch as there, on verses of
two Bibles in place of MNLI: is the second sentence the first one in other words, or
another verse of its chapter? Half of what is scored are such pairs, half the most
similar other verses. Also scored, apart: verses from elsewhere, which are easy. Arms:

    dense             matrices, optax.adamw
    dense_coat        FP8 products and activations, fp8_adamw
    tt                tensor trains, early stage; then the late one from there
    tt_fp8            the early stage with FP8 products and activations
    galore            dense, optax.contrib.galore: it projects the longer side
    galore_reference  dense, projected as the authors' code does: the shorter side

Where a stage of tensor trains ends its dead ranks are taken out of the arrays; the
accuracy is counted before and after. Nothing is chosen by the test books.
"""

import collections
import concurrent.futures
import dataclasses
import math
import os
import queue
import subprocess
import sys
import time
from typing import Literal

from experiments import harness
from experiments.harness import ExitCode, UserError, option

ARMS = ("dense", "tt", "galore_reference", "galore", "tt_fp8", "dense_coat")
# What may differ between runs that stand in one table.
_NOT_SETTINGS = ("arm", "seed", "seeds", "jobs", "gpus", "data", "results", "image")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains each arm on each seed and compares them.

    A stage is appended to --results as it ends, and what is there isn't run again. An
    epoch's figures are appended at once to RESULTS.epochs: they outlive a lost stage.
    Exit codes: 0 done, 130 stopped by Ctrl-C, 3 loss not finite, 5 bad data, 6 wrong
    option.
    """

    arm: str = option("all", "what is trained: all, or names joined by commas")
    seeds: int = option(3, "runs an arm: seeds 0, 1, ...; 0 shows what there is")
    seed: int | None = option(None, "this one alone")
    jobs: int = option(1, "runs at a time, each a process of its own")
    gpus: int = option(1, "devices that jobs take in turn")
    size: Literal["full", "micro"] = option("full", "of the model; micro is for tests")
    length: int = option(112, "tokens of a pair; longer ones are cut")
    batch: int = option(64, "pairs in a batch, half of them paraphrases")
    epochs: int = option(9, "passes over the training verses (the early stage)")
    late_epochs: int = option(5, "passes of the late stage")
    epoch_steps: int | None = option(None, "updates an epoch, fewer than all verses'")
    easy_epochs: int = option(3, "in which negatives turn from random to hard ones")
    easy: float = option(0.25, "share of random negatives from then on")
    lr: float = option(1.5e-4, "highest rate of dense leaves (cosine)")
    core_lr: float = option(6e-4, "highest rate of cores (cosine)")
    late_lr: float = option(0.5, "highest rates of the late stage, as a share")
    diagonal_lr: float = option(2e-3, "rate of diagonals (constant)")
    late_diagonal_lr: float = option(1e-3, "the same, in the late stage")
    warmup: float = option(0.1, "share of the early stage")
    weight_decay: float = option(0.01, "of dense matrices only")
    clip: float = option(1.0, "largest norm of all gradients")
    dropout: float = option(0.1, "after embeddings and sub-blocks")
    rank: int = option(30, "of matrices' inner bonds at the start")
    embed_rank: int = option(32, "of the word table's bonds at the start")
    objective: Literal["paper", "code"] = option("paper", "what trains minimise")
    gamma: float = option(0.1, "weight of the size in the early stage")
    delay: int = option(3168, "steps before that weight counts")
    beta: float = option(1e-6, "weight of the cores' squared norm")
    late_size: float = option(0.4, "size to reach, as a share of the first one")
    late_slack: float = option(0.05, "by how much the loss may rise for it")
    w_size: float = option(1.0, "weight of the size's excess over its target")
    w_loss: float = option(40.0, "weight of the loss's excess over its target")
    rho: float = option(2.0, "weight of what is not the worse one")
    galore_rank: int = option(128, "columns of GaLore's projectors")
    galore_gap: int = option(400, "steps between two of its searches")
    galore_scale: float = option(1.0, "of its projected steps")
    galore_lr: float = option(2e-4, "highest rate of all leaves under it (cosine)")
    policy: Literal["bf16", "default", "paper"] = option(
        "default", "FP8 of dense_coat and tt_fp8; all others have none"
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "computes the model")
    part: Literal["valid", "test"] = option("test", "the books that are scored")
    eval_verses: int | None = option(None, "verses that are scored, fewer than all")
    data: str = option("results/verse_pairs.npz", "of experiments.verse_pairs")
    results: str = option("results/comera_pairs.jsonl", "where stages are appended")
    image: str = option("results/comera_pairs.png", "the picture to write")

    def __post_init__(self):
        unknown = set(self.arm.split(",")) - {"all", *ARMS}
        if unknown:
            raise ValueError(
                f"--arm must be all, or of {', '.join(ARMS)}, got {unknown.pop()!r}"
            )
        least = {"jobs": 1, "gpus": 1, "length": 8, "batch": 2, "epochs": 1, "rank": 1}
        least |= {"late_epochs": 0, "seeds": 0, "embed_rank": 1, "epoch_steps": 1}
        least |= {"delay": 0}
        for name, most in least.items():
            value = getattr(self, name)
            if value is not None and value < most:
                raise ValueError(f"--{name} must be at least {most}, got {value}")
        if self.batch % 2:
            raise ValueError(f"--batch must be even, got {self.batch}")
        for name in ("easy", "warmup", "late_size", "dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"--{name} must be from 0 to 1, got {getattr(self, name)}"
                )


def arms(config: Config) -> list[Config]:
    """One config an arm that is asked for; FP8 stands only where the arm has it."""
    names = ARMS if config.arm == "all" else config.arm.split(",")
    fp8 = lambda name: name in ("dense_coat", "tt_fp8")
    policy = lambda name: config.policy if fp8(name) else "bf16"
    return [
        dataclasses.replace(config, arm=name, policy=policy(name)) for name in names
    ]


def stages_of(config: Config) -> list[str]:
    """What a run records: a line each."""
    if config.arm == "tt" and config.late_epochs:
        return ["early", "late"]
    return ["early"] if config.arm.startswith("tt") else ["whole"]


def seeds_of(config: Config) -> list[int]:
    """The seeds that are asked for."""
    return [*range(config.seeds)] if config.seed is None else [config.seed]


# One run -----------------------------------------------------------------------------


def run(config: Config, seed: int, verses, keep) -> None:
    """Trains one arm on one seed; `keep` is given each stage's figures as it ends."""
    import jax

    from experiments import comera_pairs_arm as arm_of
    from experiments import comera_pairs_batches

    data = comera_pairs_batches.put(verses)
    arm, key = arm_of.build(config, verses, data), jax.random.key(seed)
    state, rows, epoch = arm.start(key), [], None
    facts = {"seed": seed, "device": jax.devices()[0].device_kind, "steps": arm.steps}
    for stage in stages_of(config):
        count = config.late_epochs if stage == "late" else config.epochs
        if stage == "late":
            state = arm_of.begin_late(config, state, rows[-1]["loss"])
        began = time.monotonic()
        epoch = arm_of.compiled(arm, state, key, data, reuse=epoch)
        facts |= {"compile_seconds": time.monotonic() - began, "peak_bytes": epoch.peak}
        numbers = range(len(rows), len(rows) + count)
        for number in numbers:
            state, row = _one_epoch(config, seed, arm, epoch, state, number)
            rows.append(row)
            of_run = {"arm": config.arm, "seed": seed, "stage": stage}
            harness.append(f"{config.results}.epochs", of_run | row)
        state, ended = arm_of.end_stage(arm, config, state)
        keep({**facts, "stage": stage, "epochs": rows[-count:], **ended})


def _one_epoch(config: Config, seed: int, arm, epoch, state, number: int):
    """The state after it, and its figures: loss, sizes, accuracy."""
    import jax

    from experiments import comera_pairs_arm as arm_of

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), number)
    began = time.monotonic()
    state, figures = epoch(state, key, easy_share(config, number))
    figures = jax.device_get(figures)
    row = {"epoch": number + 1, "seconds": time.monotonic() - began}
    row |= arm_of.figures_of(config, state.params, figures)
    if not math.isfinite(row["loss"]):
        raise UserError(
            ExitCode.NON_FINITE,
            f"{config.arm}, seed {seed}: the loss is {row['loss']} in epoch "
            f"{row['epoch']}; lower --lr or --core_lr",
        )
    row |= arm.evaluate(state.params)
    _show(config, seed, row)
    return state, row


def easy_share(config: Config, epoch: int) -> float:
    """Random negatives' share in an epoch: from all of them to --easy, in a line."""
    left = 1 - epoch / config.easy_epochs if epoch < config.easy_epochs else 0.0
    return max(config.easy, left)


def accuracy(row: dict) -> float:
    """Of paraphrases and hard negatives, half each."""
    return (row["same"] + row["hard"]) / 2


def _show(config: Config, seed: int, row: dict) -> None:
    size = f"  size {row['size']:,}" if "size" in row else ""
    print(
        f"{config.arm}  seed {seed}  epoch {row['epoch']}  loss "
        f"{row['loss']:.4f}  accuracy {accuracy(row):.4f} (random "
        f"{row['random']:.4f}){size}  {row['seconds']:.1f} s",
        flush=True,
    )


# All runs ----------------------------------------------------------------------------


def found_in(config: Config, sha256: str) -> dict[str, dict[int, dict]]:
    """By "arm stage" and seed: lines of --results with these settings and this data."""
    found, rows = collections.defaultdict(dict), harness.results(config.results)
    for arm in arms(config):
        wanted = dataclasses.asdict(arm)
        for name in _NOT_SETTINGS:
            wanted.pop(name)
        for row in rows:
            same = all(row["config"].get(k) == v for k, v in wanted.items())
            if same and (row["config"]["arm"], row["data_sha256"]) == (arm.arm, sha256):
                found[f"{arm.arm} {row['stage']}"][row["seed"]] = row
    return dict(found)


def missing(config: Config, sha256: str) -> list[tuple[Config, int]]:
    """Arms and seeds of which some stage isn't in --results, first seeds first."""
    found = found_in(config, sha256)
    lacks = lambda arm, seed: any(
        seed not in found.get(f"{arm.arm} {stage}", {}) for stage in stages_of(arm)
    )
    pairs = [(arm, seed) for seed in seeds_of(config) for arm in arms(config)]
    return [(arm, seed) for arm, seed in pairs if lacks(arm, seed)]


def _train_here(config: Config, verses, wanted) -> None:
    for arm, seed in wanted:
        kept = {"data_sha256": verses.sha256, "vocab_used": verses.vocab}
        keep = lambda facts, arm=arm, kept=kept: harness.record(
            config.results, arm, {**facts, **kept}
        )
        try:
            run(arm, seed, verses, keep)
        except KeyboardInterrupt:
            raise UserError(
                ExitCode.INTERRUPTED,
                f"interrupted; finished stages are in {config.results}",
            ) from None


def _train_apart(config: Config, wanted) -> None:
    """Each run a process, --jobs at a time, on the devices in turn."""
    free = queue.SimpleQueue()
    for job in range(config.jobs):
        free.put(job % config.gpus)

    def one(arm: Config, seed: int) -> None:
        device, fields = free.get(), dataclasses.asdict(arm)
        fields |= {"seed": seed, "jobs": 1, "gpus": 1}
        options = [f"--{k}={v!s}" for k, v in fields.items() if v is not None]
        command = [sys.executable, "-m", "experiments.comera_pairs", *options]
        env = {"CUDA_VISIBLE_DEVICES": str(device), "COMERA_PAIRS_JOB": "1"}
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        # What seed 0 compiles serves the others.
        cache = {"JAX_COMPILATION_CACHE_DIR": "results/cache/xla"}
        done = subprocess.run(command, env=cache | os.environ | env)
        free.put(device)
        if done.returncode:
            known = done.returncode in [*ExitCode]  # else a crash, or it was killed
            raise UserError(
                ExitCode(done.returncode) if known else ExitCode.CONFIG,
                f"{arm.arm}, seed {seed} ended with {done.returncode}",
            )

    with concurrent.futures.ThreadPoolExecutor(config.jobs) as pool:
        runs = [pool.submit(one, arm, seed) for arm, seed in wanted]
        for finished in runs:
            finished.result()


def main(config: Config) -> None:
    """Trains what --results lacks, then shows the table and writes the picture."""
    from experiments import comera_pairs_report, verse_pairs

    verses = verse_pairs.load(config.data)
    wanted = missing(config, verses.sha256)
    if config.jobs > 1:
        _train_apart(config, wanted)
    else:
        _train_here(config, verses, wanted)
    if "COMERA_PAIRS_JOB" in os.environ:
        return
    found = found_in(config, verses.sha256)
    if not found:
        raise UserError(
            ExitCode.DATA, f"{config.results} holds no run with these settings"
        )
    tf_idf = verse_pairs.tf_idf_accuracy(verses, config.part)
    comera_pairs_report.show(found, tf_idf)
    harness.show_picture(comera_pairs_report.draw, found, config.image)
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
