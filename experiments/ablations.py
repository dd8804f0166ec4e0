"""Question: what does each part of COAT cost in loss, against BF16 and against seeds?

Command:   python -m experiments.prepare --data=debian --out=results/debian.npz
           python -m experiments.ablations --data=results/debian.npz
Hardware:  one H200; some 12 minutes for all arms and three seeds.
Expected:  full COAT within 0.25 % of BF16's held-out loss: experiments/README.md has
           the measured table.

Every arm trains the same model from the same weights on the same batches, a seed
after the other, so that an arm's gap to BF16 is taken seed by seed. A line is appended
as each run ends. Runs that the file already holds aren't made again: start the same
command once more after a crash.
"""

import dataclasses
import sys
import time
from typing import Literal

from experiments import ablation_report, data, harness
from experiments import config as options
from experiments.harness import ExitCode, UserError, option

_FULL = {"optimizer": "fp8_adamw", "policy": "default"}
# What each arm changes in the run of the first.
ARMS = {
    "bf16": {"optimizer": "adamw"},
    "full": _FULL,
    "optimizer": {"optimizer": "fp8_adamw"},
    "activations": {"optimizer": "adamw", "policy": "default"},
    "paper": _FULL | {"policy": "paper"},
    "lean": _FULL | {"policy": "lean"},
    "memory": _FULL | {"policy": "memory"},
    "no-expansion": _FULL | {"expand": False},
    "group-16": _FULL | {"kept_group": 16},
    "e4m3-gradients": _FULL | {"gradient_format": "e4m3"},
    "e5m2-gradients": _FULL | {"gradient_format": "e5m2"},
    "fast-backward": _FULL | {"backward_accumulation": "fast"},
    "promoted-forward": _FULL | {"forward_accumulation": "promoted"},
    "fp8-attention": _FULL | {"attention_keeps": "fp8"},
    "vector": _FULL | {"gemm_scaling": "vector"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a Llama decoder once for each arm and seed, and compares held-out losses.

    The arms: bf16 (AdamW, plain layers), full (FP8 optimizer and default policy),
    optimizer and activations (each alone), paper, lean and memory (the presets of these
    names), and full with one thing changed: no-expansion, group-16, e4m3-gradients,
    e5m2-gradients, fast-backward, promoted-forward, fp8-attention, vector.
    """

    arms: str = option("all", "names with commas between them, or all")
    seeds: int = option(3, "seeds 0, 1, ... of each arm")
    data: str = option("results/debian.npz", "as in experiments.pretrain")
    preset: str = option("small", "model, as in experiments.pretrain")
    hidden: int | None = option(None, "width of the residual stream")
    ffn: int | None = option(None, "width of the gated MLP")
    layers: int | None = option(8, "decoder blocks; 8 make 28 M parameters of small")
    heads: int | None = option(None, "query heads")
    kv_heads: int | None = option(None, "key and value heads; must divide heads")
    vocab: int | None = option(None, "entries of the embedding table")
    steps: int = option(640, "updates in a run; 640 of 32 x 1024 are 21 M tokens")
    batch: int = option(32, "sequences in a batch")
    seq: int = option(1024, "tokens in a sequence")
    lr: float = option(2e-3, "highest learning rate, of every arm")
    b2: float = option(0.99, "decay of the second moment")
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "computes the model")
    attention: Literal["xla", "cudnn"] = option("cudnn", "attention implementation")
    eval_batches: int = option(32, "batches in a held-out loss")
    cache: str = option("results/cache", "folder for tokenizers and tokens")
    results: str = option("results/ablations.jsonl", "a line for every run")
    image: str = option("results/ablations.png", "the picture to write")

    def __post_init__(self):
        for name in ("seeds", "steps", "batch", "seq", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} must be at least 1, got {getattr(self, name)}"
                )
        unknown = [arm for arm in self.chosen() if arm not in ARMS]
        if unknown:
            raise ValueError(
                f"--arms has no {unknown[0]!r}; choose from {', '.join(ARMS)}"
            )

    def chosen(self) -> list[str]:
        """The arms to run, in the order given."""
        return list(ARMS) if self.arms == "all" else self.arms.split(",")


def run_config(config: Config, arm: str, seed: int) -> options.Config:
    """The config of one run.

    Raises:
      UserError: a value that no run could have meant; exit code 6.
    """
    own = {"arms", "seeds", "image"}
    fields = dataclasses.asdict(config)
    shared = {name: value for name, value in fields.items() if name not in own}
    try:
        return options.resolve(options.Config(**shared, **ARMS[arm], seed=seed))
    except ValueError as error:
        raise UserError(ExitCode.CONFIG, str(error)) from None


def distinct(config: Config) -> list[str]:
    """The chosen arms without those that compute what one before them does.

    One of the two gradient formats is the default policy's own.
    """
    from experiments import optimizers, policies

    seen, arms = [], []
    for arm in config.chosen():
        run = run_config(config, arm, 0)
        storage = optimizers.storage_of(run) if run.optimizer == "fp8_adamw" else None
        does = (storage, policies.policy_of(run))
        if does in seen:
            print(f"{arm} is what {arms[seen.index(does)]} is already: left out")
            continue
        seen.append(does)
        arms.append(arm)
    return arms


def _what_it_computes(config: dict) -> dict:
    # An option that is newer than the row: it ran with what is now the default.
    newer = {field.name: field.default for field in dataclasses.fields(options.Config)}
    ignored = {*options.FREE_TO_CHANGE} - {"eval_batches"}
    whole = newer | config
    return {name: value for name, value in whole.items() if name not in ignored}


def find(rows: list[dict], run: options.Config, tokens_sha256: str) -> dict | None:
    """The row of this very run, if there is one."""
    want = _what_it_computes(dataclasses.asdict(run))
    for row in rows:
        same = _what_it_computes(row["config"]) == want
        if same and row["tokens_sha256"] == tokens_sha256:
            return row
    return None


class _Runs:
    """The tokens on the device, and the arm whose functions are compiled."""

    def __init__(self, config: Config, tokens):
        import jax

        self.config, self.facts = config, tokens.facts()
        self.device = jax.devices()[0].device_kind
        self.ids, self.held = (jax.device_put(x) for x in (tokens.train, tokens.held))

    def arm(self, name: str, rows: list[dict]) -> None:
        """Every seed that is missing; nothing is compiled if none is."""
        from experiments import resident

        compiled = None
        for seed in range(self.config.seeds):
            run = run_config(self.config, name, seed)
            if find(rows, run, self.facts["tokens_sha256"]):
                print(f"{name}, seed {seed}: in {self.config.results} already")
                continue
            compiled = compiled or resident.make_arm(run)
            self._one(compiled, name, run)

    def _one(self, compiled, name: str, run: options.Config) -> None:
        from experiments import resident

        began = time.perf_counter()

        def show(step, loss):
            spent = time.perf_counter() - began
            text = f"{name}, seed {run.seed}: step {step}/{run.steps}"
            print(f"{text}  loss {loss:.4f}  {spent:.0f} s", flush=True)

        figures = resident.run(compiled, run, self.ids, self.held, on_look=show)
        row = {"arm": name, "device": self.device, **figures, **self.facts}
        harness.record(self.config.results, run, row)


def main(config: Config) -> None:
    """Runs what is missing, then prints the table and draws the picture."""
    arms = distinct(config)
    tokens = data.prepare(run_config(config, arms[0], 0))
    runs, began = _Runs(config, tokens), time.perf_counter()
    for count, arm in enumerate(arms, 1):
        print(f"arm {count} of {len(arms)}: {arm}", flush=True)
        runs.arm(arm, harness.results(config.results))
    rows, digest = harness.results(config.results), tokens.sha256
    made = {
        arm: [
            find(rows, run_config(config, arm, seed), digest)
            for seed in range(config.seeds)
        ]
        for arm in arms
    }
    print(f"\n{time.perf_counter() - began:.0f} s in all\n")
    print(ablation_report.table(made))
    harness.show_picture(ablation_report.draw, made, config.image)
    print(f"results: {config.results}")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
