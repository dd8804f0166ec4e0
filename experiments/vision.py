"""Question: do a ViT and a CNN classify as well when activations and moments are FP8?

Command:   python -m experiments.vision --model=vit
           python -m experiments.vision --model=cnn
Hardware:  one GPU, some 20 seconds a run, 18 runs a model. --data=FOLDER needs no
           network.
Expected:  test accuracy above 0.89 (ViT) and 0.92 (CNN) in every arm, arms closer to
           each other than seeds. experiments/README.md holds what was measured.

An arm is a model, a policy and an optimizer. Within a model all arms have the same
weights, order and augmentation for the same seed. The accuracy is that after the last
epoch, not the best of all epochs: nothing is chosen by the test set.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
import time
from typing import Literal

from experiments import harness
from experiments.harness import ExitCode, UserError, option

MODELS = ("vit", "cnn")
POLICIES = ("bf16", "default", "paper")
OPTIMIZERS = ("adamw", "fp8_adamw")
# What trains a model unless an option says.
RECIPES = {"vit": {"epochs": 20, "lr": 1e-3}, "cnn": {"epochs": 10, "lr": 2e-3}}
# What may differ between runs that stand in one table.
_NOT_SETTINGS = ("data", "cache", "results", "image", "seeds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains classifiers of Fashion-MNIST, one an arm and seed, and compares the arms.

    Each run is appended to --results as it ends; the table and the picture are of all
    runs there with the same settings, so that arms may be run by several commands and
    --seeds=0 shows what there is. Exit codes: 0 done, 130 stopped by Ctrl-C, 3 loss not
    finite, 5 bad data, 6 wrong option.
    """

    model: Literal["all", "vit", "cnn"] = option("all", "what is trained")
    policy: Literal["all", "bf16", "default", "paper"] = option(
        "all", "FP8 of products and of what layers keep; bf16 has none of it"
    )
    optimizer: Literal["all", "adamw", "fp8_adamw"] = option(
        "all", "what updates the parameters"
    )
    seeds: int = option(3, "runs an arm: seeds 0, 1, ...")
    size: Literal["micro", "full"] = option("full", "of the models; micro is for tests")
    epochs: int | None = option(None, "passes over the training images")
    epoch_steps: int | None = option(None, "updates an epoch, fewer than all images'")
    batch: int = option(256, "images in a batch")
    lr: float | None = option(None, "highest learning rate (cosine, 5 % warm-up)")
    weight_decay: float = option(0.05, "of matrices only; norms and biases have none")
    augment: bool = option(True, "shift and mirror the training images")
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "computes the model")
    data: str = option("debian", "folder of the four IDX.gz files, or debian: fetch it")
    cache: str = option("results/cache", "folder for the fetched files")
    results: str = option("results/vision.jsonl", "where each run is appended")
    image: str = option("results/vision.png", "the picture to write")

    def __post_init__(self):
        for name in ("epochs", "epoch_steps", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.seeds < 0:
            raise ValueError(f"--seeds must be 0 or more, got {self.seeds}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be above 0 and finite, got {self.lr}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"--weight_decay must be 0 or more, got {self.weight_decay}"
            )


def arms(config: Config) -> list[Config]:
    """One config for each arm that is asked for, nothing in it left open."""
    pick = lambda value, all_of_them: all_of_them if value == "all" else (value,)
    chosen = itertools.product(
        pick(config.model, MODELS),
        pick(config.policy, POLICIES),
        pick(config.optimizer, OPTIMIZERS),
    )
    made = []
    for model, policy, optimizer in chosen:
        recipe = RECIPES[model]
        left = {k: v for k, v in recipe.items() if getattr(config, k) is None}
        names = {"model": model, "policy": policy, "optimizer": optimizer}
        made.append(dataclasses.replace(config, **names, **left))
    return made


def run(config: Config, arm, seed: int, images) -> dict:
    """One training of an `Arm`, from its first weights to its test accuracy."""
    import jax

    began, key = time.monotonic(), jax.random.key(seed)
    state, curve, marks = arm.start(key), [], []
    for epoch in range(config.epochs):
        order = jax.random.fold_in(jax.random.fold_in(key, 2), epoch)
        state, losses = arm.epoch(state, order)
        loss = float(losses.mean())
        if not math.isfinite(loss):
            raise UserError(
                ExitCode.NON_FINITE,
                f"{name_of(config)}, seed {seed}: the loss is {loss} in epoch "
                f"{epoch + 1}; lower --lr",
            )
        marks.append(time.monotonic())
        curve.append(int(arm.evaluate(state.params)) / len(images.test_images))
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    return {
        "seed": seed,
        "test_accuracy": curve[-1],
        "test_accuracy_by_epoch": curve,
        "train_loss": loss,
        "parameters": sum(sizes),
        "optimizer_bytes_per_parameter": state_bytes / sum(sizes),
        "kept_bytes_per_image": arm.kept,
        "step_ms": _step_ms(marks, arm.steps),
        "seconds": time.monotonic() - began,
        "device": jax.devices()[0].device_kind,
        **images.facts(),
    }


def _step_ms(marks: list[float], steps: int) -> float | None:
    """Of epochs after the first, which compiles; evaluation is in it."""
    times = [b - a for a, b in itertools.pairwise(marks)]
    return 1e3 * statistics.median(times) / steps if times else None


def name_of(config: Config) -> str:
    """The arm as people call it."""
    return f"{config.model} {config.policy} {config.optimizer}"


def comparable(config: Config, sha256: str) -> dict[str, dict[int, dict]]:
    """By arm and seed: the runs in --results with this config's settings and data.

    Of two runs of one arm and seed, the later one.
    """
    found, rows = {}, harness.results(config.results)
    for arm in arms(config):
        settings = dataclasses.asdict(arm)
        same = lambda row, wanted=settings: all(
            row["config"].get(k) == v
            for k, v in wanted.items()
            if k not in _NOT_SETTINGS
        )
        runs = [r for r in rows if same(r) and r["data_sha256"] == sha256]
        if runs:
            found[name_of(arm)] = {row["seed"]: row for row in runs}
    return found


def table(found: dict[str, dict[int, dict]]):
    """Mean and spread of the test accuracy of each arm."""
    from rich.table import Table

    shown = Table(title="test accuracy after the last epoch")
    headings = ("arm", "mean", "lowest to highest", "seeds", "B/param", "kept kB/image")
    for heading in (*headings, "step, ms"):
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, by_seed in found.items():
        runs = list(by_seed.values())
        scores = [row["test_accuracy"] for row in runs]
        step = runs[-1]["step_ms"]
        shown.add_row(
            name,
            f"{statistics.fmean(scores):.4f}",
            f"{min(scores):.4f} to {max(scores):.4f}",
            str(len(scores)),
            f"{runs[-1]['optimizer_bytes_per_parameter']:.2f}",
            f"{runs[-1]['kept_bytes_per_image'] / 1e3:.0f}",
            "-" if step is None else f"{step:.2f}",
        )
    return shown


def draw(found: dict[str, dict[int, dict]], image: str) -> pathlib.Path:
    """Writes the picture: a panel a model, a dot a run, a bar for an arm's mean."""
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    models = [m for m in MODELS if any(name.split()[0] == m for name in found)]
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(1 + 5 * len(models), 4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, model in zip(axes[0], models, strict=True):
        mine = {n: runs for n, runs in found.items() if n.split()[0] == model}
        for place, runs in enumerate(mine.values()):
            scores = [row["test_accuracy"] for row in runs.values()]
            axis.plot([place] * len(scores), scores, "o", color="#0072b2", alpha=0.6)
            middle = statistics.fmean(scores)
            axis.plot([place - 0.25, place + 0.25], [middle] * 2, color="#d55e00")
        labels = [name.partition(" ")[2].replace(" ", "\n") for name in mine]
        axis.set_xticks(range(len(mine)), labels)
        axis.set_title(model)
    axes[0][0].set_ylabel("test accuracy (dots: seeds, bar: mean)")
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _train_all(config: Config, images) -> None:
    from experiments import vision_arm  # imports JAX, which --help needn't wait for

    done = 0
    try:
        for arm in arms(config) if config.seeds else ():
            built = vision_arm.build(arm, images)
            for seed in range(config.seeds):
                summary = run(arm, built, seed, images)
                harness.record(config.results, arm, summary)
                done += 1
                print(
                    f"{name_of(arm)}  seed {seed}  accuracy "
                    f"{summary['test_accuracy']:.4f}  {summary['seconds']:.1f} s",
                    flush=True,
                )
    except KeyboardInterrupt:
        raise UserError(
            ExitCode.INTERRUPTED,
            f"interrupted; {done} finished runs are in {config.results}",
        ) from None


def main(config: Config) -> None:
    """Trains every arm, then shows the table and writes the picture."""
    harness.results(config.results)  # refused now if it can't be written
    from rich.console import Console

    from experiments import fashion_mnist

    images = fashion_mnist.load(config.data, config.cache)
    _train_all(config, images)
    found = comparable(config, images.sha256)
    if not found:
        raise UserError(
            ExitCode.DATA, f"{config.results} holds no run with these settings"
        )
    Console(width=100).print(table(found))
    harness.show_picture(draw, found, config.image)
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
