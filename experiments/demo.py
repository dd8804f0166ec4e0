"""Question: does training change when Adam's moments take 2 bytes instead of 8?

Command:   python -m experiments.demo          (what `make demo` runs)
Hardware:  two CPU cores, four minutes.
Expected:  the loss falls from 7.7 to 3.7 on held-out text with either optimizer; the
           optimizer's bytes fall to 0.26. experiments/README.md has the runs.
"""

import dataclasses
import pathlib
import sys

from experiments import config as options
from experiments import harness, plot
from experiments.harness import option

PAIR = ("adamw", "fp8_adamw")
_ROWS = (
    ("train loss (mean of the last 20 steps)", "train_loss", "{:.4f}"),
    ("held-out loss", "held_out_loss", "{:.4f}"),
    ("optimizer bytes", "optimizer_bytes", "{:,.0f}"),
    (
        "optimizer bytes per parameter",
        "optimizer_bytes_per_parameter",
        "{:.3f}",
    ),
    ("step time (median, ms)", "step_ms", "{:.0f}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains one small model twice, with optax.adamw and with coat_jax.fp8_adamw.

    Same seed, same weights at the start, same batches: what differs is the optimizer.
    """

    seed: int = option(0, "of the weights and of the data order, both times")
    steps: int | None = option(None, "updates each; fewer are faster and learn less")
    preset: str = option("tiny", "model size, as in experiments.pretrain")
    data: str = option("stdlib", "folder of text files, or stdlib")
    out: str = option("results/demo", "folder of both runs and of the picture")
    cache: str = option("results/cache", "folder for tokenizers and tokens")
    results: str = option("results/demo.jsonl", "where both summaries are appended")


def _run_config(config: Config, optimizer: str) -> options.Config:
    """The one config of both runs; only the optimizer's name differs."""
    return options.resolve(
        options.Config(
            preset=config.preset,
            optimizer=optimizer,
            seed=config.seed,
            steps=config.steps,
            data=config.data,
            out=f"{config.out}/{optimizer}",
            cache=config.cache,
            overwrite=True,
            save_every=0,
        )
    )


def _table(adamw: dict, fp8: dict):
    from rich.table import Table

    table = Table(title="the same training, twice")
    for name in ("", "optax.adamw", "coat_jax.fp8_adamw", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    for title, key, form in _ROWS:
        a, b = adamw[key], fp8[key]
        table.add_row(title, form.format(a), form.format(b), f"{b / a:.4f}")
    return table


def _announce(run: options.Config, optimizer: str) -> None:
    kept = {
        "adamw": "optax.adamw keeps two float32 moments, 8 bytes a parameter",
        "fp8_adamw": "coat_jax.fp8_adamw keeps them in FP8, about 2 bytes a parameter",
    }
    print(f"\n{kept[optimizer]}: {run.steps} steps of {run.batch} x {run.seq} tokens")


def main(config: Config) -> None:
    """Trains both, prints the table and the paths."""
    text = "the Python standard library's own sources and docstrings"
    print(
        f"Training a {config.preset} Llama decoder on "
        f"{text if config.data == 'stdlib' else config.data}.\n"
        "Whole files are held out; the loss on them is the held-out loss."
    )
    from rich.console import Console

    from experiments import loop  # imports JAX, which --help needn't wait for

    summaries = {}
    for optimizer in PAIR:
        run = _run_config(config, optimizer)
        _announce(run, optimizer)
        summaries[optimizer] = loop.train(run)
        harness.record(config.results, run, summaries[optimizer])
    folders = [f"{config.out}/{optimizer}" for optimizer in PAIR]
    title = f"{config.preset} Llama, seed {config.seed}: same weights, same batches"
    image = plot.compare(*folders, f"{config.out}/curves.png", title=title)
    facts = summaries["fp8_adamw"]
    print(
        f"\n{facts['parameters']:,} parameters, {facts['train_files']} files and "
        f"{facts['train_tokens']:,} tokens to train on, {facts['held_out_files']} "
        f"files held out. The loss was {facts['first_loss']:.2f} at the first step."
    )
    Console(width=100).print(_table(*(summaries[name] for name in PAIR)))
    print(
        "This is one seed. Seeds differ by about 0.02, the optimizers' means over\n"
        "three seeds by less (experiments/README.md, 'Equal bytes'). On a CPU the\n"
        "FP8 step is slower: its arithmetic costs more than its bytes save.\n"
    )
    print(f"curves:  {image}\nresults: {pathlib.Path(config.results)}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
