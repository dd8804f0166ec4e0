"""Question: does a DLRM with 50 times fewer parameters rank clicks as well?

Command:   python -m experiments.clicks --dataset=flights   (once, with a network)
           python -m experiments.comera_dlrm --dataset=flights
           python -m experiments.comera_dlrm --dataset=movies  (after its clicks file)
Hardware:  one GPU with 24 GB, some 10 minutes for each data set.
Expected:  tt at 1/50 of dense's parameters or less and within 0.002 of its AUC; at most
           a fifth of its peak memory. experiments/README.md holds what was measured: so
           it is, three seeds.

The data stand in for Criteo's logs: late flights and well-rated films, with hashed
crosses in tables of 1,048,576 rows each. Real values fill a few percent of those rows
(`rows_seen` in the results), so most of what a tensor train saves there is empty, and
the arm `hashed`, a dense model with tables of 1/64 of the rows, says what the simplest
remedy reaches.

An arm is a kind of tables and an optimizer:
  dense         tables as they are, optax.adamw
  fp8           the same with coat_jax.fp8_adamw
  galore        the same, moments projected to a rank on each matrix's shorter side, as
                in GaLore's published code; large tables too
  galore_optax  optax.contrib.galore, which projects the longer side; large tables have
                Adam's moments, as it would need their whole SVD
  hashed        crosses hashed into 1/64 of the rows, optax.adamw
  tt            large tables as tensor trains of fixed ranks; with --linear_rank wide
                linear maps too
  tt_early      ranks adapt to the loss and the size, weighed
  tt_late       tt_early for the first half of the steps, then trained towards a size

Ids are memorised in an epoch or two, after which every arm gets worse. So each arm has
its rate chosen on the validation part with seed 0, and each run the quarter of an epoch
at which it is judged; the figures are of the test part, which chooses nothing.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
import sys
import time
from typing import Literal

from experiments import harness
from experiments.harness import ExitCode, UserError, option

ARMS = (
    "dense", "fp8", "galore", "galore_optax", "hashed", "tt", "tt_early", "tt_late",
)  # fmt: skip
_HEADINGS = (
    "arm", "AUC", "lowest to highest", "to dense", "log loss", "parameters", "fewer",
    "state", "peak", "epoch", "rate", "seeds",
)  # fmt: skip
_HASHED = 64  # by how much fewer rows `hashed` has
# What may differ between runs that stand in one table.
_NOT_SETTINGS = ("data", "results", "image", "seeds", "arm", "rates", "chosen")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains click models, one an arm, rate and seed, and compares the arms.

    Each run is appended to --results as it ends, and is not run again. The table and
    the picture are of all runs there with the same settings; --seeds=0 shows what there
    is. Exit codes: 0 done, 130 stopped by Ctrl-C, 3 loss not finite, 5 bad data, 6
    wrong option.
    """

    arm: str = option("all", f"all, or some of {','.join(ARMS)}")
    dataset: Literal["flights", "movies"] = option("flights", "what is ranked")
    split: Literal["random", "time"] = option(
        "random", "held-out rows: drawn, or the latest"
    )
    seeds: int = option(3, "runs an arm: seeds 0, 1, ...")
    rates: str = option("1,2,4,8", "of the learning rates: what seed 0 tries")
    size: Literal["micro", "small", "full"] = option("full", "of the model")
    width: int | None = option(None, "of an embedding, else the size's own")
    rows: int = option(1 << 20, "of each cross's table")
    least: int = option(2, "training rows that a cross must have for a row of its own")
    rank: int = option(64, "of the tables' trains")
    order: int = option(2, "cores of a table's train")
    linear_rank: int = option(0, "of wide linear maps' trains; 0 leaves them dense")
    epochs: int = option(1, "passes over the training part")
    pieces: int = option(4, "of an epoch, after each of which all parts are judged")
    epoch_steps: int | None = option(None, "updates an epoch, fewer than all rows'")
    batch: int = option(1024, "rows in a batch")
    lr: float = option(1e-3, "highest learning rate of what is no train (cosine)")
    core_lr: float = option(1e-3, "of the trains' cores")
    diagonal_lr: float = option(0.05, "of the diagonals, constant; no rate changes it")
    final_lr: float = option(0.1, "last learning rate as a share of the highest")
    weight_decay: float = option(0.0, "of what is no train")
    core_decay: float = option(0.0, "of the trains' cores")
    dropout: float = option(0.1, "of what enters the top MLP")
    objective: Literal["paper", "code", "decoupled"] = option(
        "paper", "how the size counts in tt_early and tt_late"
    )
    gamma: float = option(0.01, "weight of the size; 0.1 leaves one rank a table")
    delay: int = option(32, "steps at the start in which the size has no weight")
    w_size: float = option(0.2, "weight in tt_late of the size against the loss")
    rho: float = option(0.02, "weight in tt_late of what is not the worse one")
    beta: float = option(0.0, "weight of the cores' norm")
    threshold: float = option(0.1, "of objective decoupled: soft threshold a rate")
    target_ratio: float = option(0.7, "size that tt_late aims at, of the early stage's")
    loss_average: float = option(0.98, "decay of the loss's average, for tt_late")
    galore_rank: int = option(16, "of projected moments")
    galore_gap: int = option(200, "steps between two projections")
    data: str = option("", "the clicks file, or results/clicks-DATASET.npz")
    results: str = option("results/comera_dlrm.jsonl", "where each run is appended")
    image: str = option("", "the picture, or results/comera_dlrm-DATASET-SPLIT.png")

    def __post_init__(self):
        least = dict.fromkeys(("rows", "least", "rank", "order", "epochs"), 1)
        least |= dict.fromkeys(("pieces", "batch", "galore_rank", "galore_gap"), 1)
        least |= dict.fromkeys(("seeds", "delay", "gamma", "beta", "rho", "w_size"), 0)
        for name, most in least.items():
            if getattr(self, name) < most:
                raise ValueError(
                    f"--{name} must be at least {most}, got {getattr(self, name)}"
                )
        for name in ("lr", "core_lr", "diagonal_lr", "target_ratio"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        unknown = set(self.arm.split(",")) - {"all", *ARMS}
        if unknown:
            raise ValueError(
                f"--arm must be all, or some of {','.join(ARMS)}, got {self.arm!r}"
            )
        rates_of(self)


def rates_of(config: Config) -> list[float]:
    """The multiples that are tried.

    Raises:
      ValueError: if there's none, or one is no positive number.
    """
    try:
        rates = [float(text) for text in config.rates.split(",")]
        fine = all(0 < rate < math.inf for rate in rates)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(
            f"--rates must be positive numbers with commas, got {config.rates!r}"
        )
    return rates


def arms(config: Config) -> list[Config]:
    """One config for each arm that is asked for."""
    asked = config.arm.split(",")
    names = ARMS if "all" in asked else [name for name in ARMS if name in asked]
    made = []
    for name in names:
        rows = max(config.rows // _HASHED, 1) if name == "hashed" else config.rows
        made.append(dataclasses.replace(config, arm=name, rows=rows))
    return made


def load(config: Config):
    """The data of one arm."""
    from experiments import clicks

    path = config.data or f"results/clicks-{config.dataset}.npz"
    how = {"rows": config.rows, "split": config.split, "least": config.least}
    found = clicks.load(path, **how)
    if found.facts["dataset"] != config.dataset:
        raise UserError(
            ExitCode.DATA,
            f"{path} holds {found.facts['dataset']}; give --data the file of "
            f"{config.dataset}",
        )
    return found


def run(config: Config, arm, seed: int, rate: float, data, bytes_of) -> dict:
    """One training of an `Arm`: figures at every mark, and at the one that is chosen.

    A mark is the end of a piece of an epoch. Chosen is the one with the highest
    validation AUC; of tt_late, of the late stage.
    """
    import jax

    from experiments import comera_dlrm_arm

    began, key = time.monotonic(), jax.random.key(seed)
    state, marks, curve = arm.start(key, rate), [], []
    count = config.epochs * config.pieces
    late_at = count // 2 if config.arm == "tt_late" else count
    for place in range(count):
        if place == late_at:
            state = arm.late(state)
        jax.block_until_ready(state.params)
        start = time.monotonic()
        epoch, piece = divmod(place, config.pieces)
        order = jax.random.fold_in(jax.random.fold_in(key, 2), epoch)
        state, figures = arm.piece(state, order, piece)
        loss = float(figures["loss"].mean())
        seconds = time.monotonic() - start
        if not math.isfinite(loss):
            raise UserError(
                ExitCode.NON_FINITE,
                f"{config.arm}, seed {seed}: the loss is {loss} in epoch {epoch + 1}; "
                "lower --rates",
            )
        curve += [
            float(x) for x in figures["size"][:: max(len(figures["size"]) // 20, 1)]
        ]
        marks.append(
            {
                "epoch": (place + 1) / config.pieces,
                "train_loss": loss,
                "seconds": seconds,
                "late": place >= late_at,
                "parameters": comera_dlrm_arm.alive(state.params),
                "ranks": comera_dlrm_arm.ranks_alive(state.params),
                **_scores(arm, state.params, data),
            }
        )
    able = [mark for mark in marks if mark["late"]] or marks
    best = max(able, key=lambda mark: mark["validation_auc"])
    cut = arm.logits(comera_dlrm_arm.truncated(state.params))
    whole = arm.logits(state.params)
    moved = max(float(abs(cut[part] - whole[part]).max()) for part in whole)
    median = statistics.median(mark["seconds"] for mark in marks)
    return {
        "seed": seed,
        "rate": rate,
        **{name: best[name] for name in best if name not in ("seconds", "ranks")},
        "epoch_seconds": config.pieces * median,
        "step_ms": 1e3 * config.pieces * median / arm.steps,
        "moved_by_truncation": moved,
        "marks": marks,
        "size_by_step": curve if any(curve) else None,
        "seconds": time.monotonic() - began,
        **bytes_of,
        "device": jax.devices()[0].device_kind,
        "tables": dict(zip(data.names, data.tables, strict=True)),
        "data": data.facts,
    }


def _scores(arm, params, data) -> dict[str, float]:
    from experiments import clicks

    found, logits = {}, arm.logits(params)
    for name, part in (("validation", clicks.VALIDATION), ("test", clicks.TEST)):
        labels = data.of(part)[2]
        found[f"{name}_auc"] = clicks.auc(labels, logits[part])
        found[f"{name}_log_loss"] = clicks.log_loss(labels, logits[part])
    return found


def finished(config: Config) -> dict[str, list[dict]]:
    """By arm: the runs in --results with this config's settings."""
    found, rows = {}, harness.results(config.results)
    for arm in arms(dataclasses.replace(config, arm="all")):
        wanted = {
            k: v
            for k, v in dataclasses.asdict(arm).items()
            if k == "arm" or k not in _NOT_SETTINGS
        }
        same = lambda row, wanted=wanted: wanted.items() <= row["config"].items()
        mine = [row for row in rows if same(row)]
        if mine:
            found[arm.arm] = mine
    return found


def chosen(runs: list[dict]) -> list[dict]:
    """The runs at the rate whose seed 0 has the highest validation AUC, by seed."""
    first = [row for row in runs if row["seed"] == 0]
    if not first:
        return []
    rate = max(first, key=lambda row: row["validation_auc"])["rate"]
    mine = {row["seed"]: row for row in runs if row["rate"] == rate}
    return [mine[seed] for seed in sorted(mine)]


def table(found: dict[str, list[dict]]) -> str:
    """Test figures and bytes of each arm, beside dense's."""
    rows = [_HEADINGS]
    base = chosen(found.get("dense", []))
    for name, all_runs in found.items():
        runs = chosen(all_runs)
        if runs:
            rows.append((name, *_cells(runs, base)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True))
    return "\n".join(pad(row) for row in rows)


def _mean(runs, name: str) -> float:
    return statistics.fmean(row[name] for row in runs)


def _cells(runs: list[dict], base: list[dict]) -> list[str]:
    scores = [row["test_auc"] for row in runs]
    fewer, gap = "-", "-"
    if base:
        fewer = f"{_mean(base, 'parameters') / _mean(runs, 'parameters'):.1f} x"
        gap = f"{_mean(runs, 'test_auc') - _mean(base, 'test_auc'):+.4f}"
    held = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return [
        f"{statistics.fmean(scores):.4f}",
        f"{min(scores):.4f} to {max(scores):.4f}",
        gap,
        f"{_mean(runs, 'test_log_loss'):.4f}",
        f"{_mean(runs, 'parameters'):,.0f}",
        fewer,
        f"{sum(_mean(runs, name) for name in held) / 2**20:,.0f} MiB",
        f"{_mean(runs, 'peak_bytes') / 2**20:,.0f} MiB",
        f"{_mean(runs, 'epoch_seconds'):.2f} s",
        f"{runs[0]['rate']:g}",
        str(len(runs)),
    ]


def draw(found: dict[str, list[dict]], image: str) -> str:
    """Writes the picture: AUC against parameters and peak memory, and sizes by step.

    Returns its path.
    """
    import matplotlib

    matplotlib.use("agg")  # no window, no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    colours = pyplot.get_cmap("tab10")
    for place, name in enumerate(n for n in ARMS if chosen(found.get(n, []))):
        runs, colour = chosen(found[name]), colours(place)
        scores = [row["test_auc"] for row in runs]
        for axis, quantity in zip(axes, ("parameters", "peak_bytes"), strict=False):
            sizes = [row[quantity] for row in runs]
            axis.plot(sizes, scores, "o", color=colour, alpha=0.6, label=name)
        for row in runs:
            if row["size_by_step"]:
                steps = range(len(row["size_by_step"]))
                axes[2].plot(steps, row["size_by_step"], color=colour, alpha=0.7)
    for axis, words in zip(axes, ("parameters", "peak bytes of a step"), strict=False):
        axis.set(xscale="log", xlabel=words, ylabel="test AUC (a dot a seed)")
    axes[2].set(xlabel="place in the run", ylabel="parameters in the cores")
    axes[0].legend(frameon=False)
    path = pathlib.Path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def _missing(config: Config, arm: Config):
    """Rate and seed of the next run of an arm that --results lacks, while there's one.

    Seed 0 tries all rates; the others have the best of them.
    """
    rates = rates_of(config)
    wanted = [(rate, 0) for rate in rates if config.seeds]
    while True:
        runs = finished(config).get(arm.arm, [])
        have = {(row["rate"], row["seed"]) for row in runs}
        left = [run for run in wanted if run not in have]
        if left:
            yield left[0]
            continue
        best = chosen([row for row in runs if row["rate"] in rates])
        after = [(best[0]["rate"], s) for s in range(1, config.seeds)] if best else []
        if set(after) <= have:
            return
        wanted = after


def _train_all(config: Config) -> None:
    from experiments import (
        comera_dlrm_arm,
    )  # imports JAX, which --help needn't wait for

    load_once = functools.cache(
        lambda rows: load(dataclasses.replace(config, rows=rows))
    )
    for arm in arms(config):
        built, bytes_of = None, {}
        for rate, seed in _missing(config, arm):
            data = load_once(arm.rows)
            if built is None:
                built = comera_dlrm_arm.build(arm, data)
                bytes_of = built.measure()
            summary = run(arm, built, seed, rate, data, bytes_of)
            harness.record(config.results, arm, summary)
            print(
                f"{arm.arm}  rate {rate:g}  seed {seed}  "
                f"validation {summary['validation_auc']:.4f}  test "
                f"{summary['test_auc']:.4f}  {summary['parameters']:,} parameters  "
                f"{summary['seconds']:.1f} s",
                flush=True,
            )


def main(config: Config) -> None:
    """Trains what isn't in --results, then shows the table and writes the picture."""
    try:
        _train_all(config)
    except KeyboardInterrupt:
        raise UserError(
            ExitCode.INTERRUPTED, f"interrupted; finished runs are in {config.results}"
        ) from None
    found = {name: runs for name, runs in finished(config).items() if chosen(runs)}
    if not found:
        raise UserError(
            ExitCode.DATA, f"{config.results} holds no run with these settings"
        )
    print(table(found))
    image = config.image or f"results/comera_dlrm-{config.dataset}-{config.split}.png"
    harness.show_picture(draw, found, image)
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
