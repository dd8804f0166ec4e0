"""Question: what loss does a Llama decoder reach on real text, and at what cost?

Command:   python -m experiments.pretrain --preset=tiny --optimizer=fp8_adamw
Hardware:  tiny: two CPU cores, about a minute. small and up: a GPU.
Expected:  experiments/README.md holds the measured losses with their seeds.
"""

import sys

from experiments import harness
from experiments.config import Config, resolve


def main(config: Config) -> None:
    """Trains, then appends the summary to the results file and prints it."""
    from experiments import loop  # imports JAX, which --help needn't wait for

    summary = loop.train(config)
    path = harness.record(config.results, resolve(config), summary)
    print(
        f"train loss {summary['train_loss']:.4f}  "
        f"held-out loss {summary['held_out_loss']:.4f}  "
        f"optimizer {summary['optimizer_bytes_per_parameter']:.3f} B/parameter  "
        f"step {summary['step_ms']:.0f} ms\nresults: {path}"
    )


if __name__ == "__main__":
    harness.quiet_failed_saves()
    sys.exit(harness.run_main(main, Config))
