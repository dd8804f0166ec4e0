"""Question: what does COAT save, and does training change?

Command:   python -m experiments.demo          (what `make demo` runs)
Hardware:  two CPU cores, four minutes.
Expected:  the loss falls from 7.7 to 4.0 on held-out text each time; the optimizer's
           bytes fall to 0.26, and with FP8 activations the bytes that are kept between
           forward and backward to 0.28. experiments/README.md has the runs.
"""

import dataclasses
import pathlib
import sys

from experiments import config as options
from experiments import harness, plot
from experiments.harness import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the three trainings: its heading, its options, a sentence about it."""

    heading: str
    options: dict[str, str]
    says: str


ARMS = {
    "adamw": Arm(
        heading="optax.adamw",
        options={"optimizer": "adamw"},
        says="optax.adamw keeps two float32 moments, 8 bytes a parameter",
    ),
    "fp8_adamw": Arm(
        heading="fp8_adamw",
        options={"optimizer": "fp8_adamw"},
        says="coat_jax.fp8_adamw keeps them in FP8, about 2 bytes a parameter",
    ),
    "coat": Arm(
        heading="full COAT",
        options={"optimizer": "fp8_adamw", "policy": "default"},
        says="full COAT: the same, FP8 products, and FP8 of what the backward needs",
    ),
}
_ROWS = (
    ("train loss (mean of the last 20 steps)", "train_loss", "{:.4f}"),
    ("held-out loss", "held_out_loss", "{:.4f}"),
    ("optimizer bytes", "optimizer_bytes", "{:,.0f}"),
    (
        "optimizer bytes per parameter",
        "optimizer_bytes_per_parameter",
        "{:.3f}",
    ),
    ("bytes kept for the backward per token", "kept_per_token", "{:,.0f}"),
    ("the same, predicted by the formula", "kept_predicted", "{:,.0f}"),
    ("step time (median, ms)", "step_ms", "{:.0f}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains one small model three times: AdamW, the FP8 optimizer, full COAT.

    Same seed, same weights at the start, same batches each time.
    """

    seed: int = option(0, "of the weights and of the data order, each time")
    steps: int = option(1000, "updates each; fewer are faster and learn less")
    preset: str = option("tiny", "model size, as in experiments.pretrain")
    data: str = option("stdlib", "folder of text files, or stdlib")
    out: str = option("results/demo", "folder of the runs and of the picture")
    cache: str = option("results/cache", "folder for tokenizers and tokens")
    results: str = option("results/demo.jsonl", "where the summaries are appended")


def _run_config(config: Config, name: str) -> options.Config:
    """The one config of all runs; only the arm's own options differ."""
    return options.resolve(
        options.Config(
            preset=config.preset,
            seed=config.seed,
            steps=config.steps,
            data=config.data,
            out=f"{config.out}/{name}",
            cache=config.cache,
            overwrite=True,
            save_every=0,
            **ARMS[name].options,
        )
    )


def _table(summaries: dict[str, dict]):
    from rich.table import Table

    base = summaries["adamw"]
    table = Table(title="the same training, three times (ratio to optax.adamw)")
    table.add_column("")
    for name in summaries:
        table.add_column(ARMS[name].heading, justify="right")
    for title, key, form in _ROWS:
        cells = [form.format(base[key])]
        for name in list(summaries)[1:]:
            value = summaries[name][key]
            cells.append(f"{form.format(value)} ({value / base[key]:.4f})")
        table.add_row(title, *cells)
    return table


def main(config: Config) -> None:
    """Trains all three, prints the table and the paths."""
    text = "the Python standard library's own sources and docstrings"
    print(
        f"Training a {config.preset} Llama decoder on "
        f"{text if config.data == 'stdlib' else config.data}.\n"
        "Whole files are held out; the loss on them is the held-out loss."
    )
    from rich.console import Console

    from experiments import activation_bytes, loop  # these import JAX

    summaries = {}
    for name, arm in ARMS.items():
        run = _run_config(config, name)
        print(f"\n{arm.says}: {run.steps} steps of {run.batch} x {run.seq} tokens")
        summaries[name] = loop.train(run) | activation_bytes.of_config(run)
        harness.record(config.results, run, summaries[name])
    folders = [f"{config.out}/{name}" for name in ARMS]
    title = f"{config.preset} Llama, seed {config.seed}: same weights, same batches"
    image = plot.compare(folders, f"{config.out}/curves.png", title=title)
    facts = summaries["coat"]
    print(
        f"\n{facts['parameters']:,} parameters, {facts['train_files']} files and "
        f"{facts['train_tokens']:,} tokens to train on, {facts['held_out_files']} "
        f"files held out. The loss was {facts['first_loss']:.2f} at the first step."
    )
    Console(width=110).print(_table(summaries))
    print(
        "This is one seed. Seeds differ by about 0.02, the optimizers' means over\n"
        "three seeds by less (experiments/README.md, 'Equal bytes'). On a CPU the\n"
        "FP8 steps are slower: their arithmetic costs more than its bytes save.\n"
    )
    print(f"curves:  {image}\nresults: {pathlib.Path(config.results)}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
