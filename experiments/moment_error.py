"""Question: does range expansion lower the error of m / sqrt(v) as COAT's Table 1 says?

Trains the demo's model with float32 Adam, takes the moments at some of its steps, and
stores them in each of the 16 ways of COAT (arXiv 2410.19313) Table 1: first moments in
the rows, second moments in the columns. An entry is 1000 times the root mean square
of the error of m / (sqrt(v) + eps). The paper calls its entries MSE and gives no unit,
but their squares are what adds up over rows and columns; so they are roots.

Command:   python -m experiments.moment_error
Hardware:  two CPU cores, about a minute and a half.
Expected:  expansion lowers the error in all 16 comparisons, as in the paper, and from
           E4M3 alone to both expanded by a factor of 0.55 to 0.57 at step 20 and of
           0.58 to 0.60 at step 100 (seeds 0 to 2), as 20.10 to 12.31 in the paper,
           0.612. E4M3 alone is 26.1 to 26.9 at step 20, when m / sqrt(v) itself has
           an RMS of 0.9, and 6.5 to 6.8 at step 100, when it has 0.23: an entry's
           size is how far training is.
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal

import numpy as np

from experiments import harness
from experiments.harness import option

NAMES = ("E4M3", "E4M3+Exp", "E5M2", "E5M2+Exp")
PUBLISHED = np.array(
    [
        [20.10, 18.08, 25.65, 18.16],
        [15.13, 12.31, 21.96, 12.43],
        [37.02, 35.96, 40.30, 36.00],
        [17.79, 15.48, 23.84, 15.57],
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Remakes COAT's table of the error of m / sqrt(v) on moments of a real run."""

    preset: Literal["micro", "tiny", "small"] = option("tiny", "model, as in pretrain")
    at: str = option("20,100", "steps whose moments are measured, by commas")
    seed: int = option(0, "of the initial weights and the data order")
    group: int = option(128, "elements along the last axis that share a scale")
    data: str = option("stdlib", "folder of text files, or stdlib")
    tokenizer: Literal["bpe", "bytes"] = option("bpe", "byte pairs, or single bytes")
    cache: str = option("results/cache", "folder for tokenizers and tokens")
    states: str | None = option(None, "file (.npz) to keep the moments in")
    results: str = option("results/moment_error.jsonl", "where tables are appended")

    def __post_init__(self):
        if self.group < 1:
            raise ValueError(f"--group must be at least 1, got {self.group}")
        self.steps()

    def steps(self) -> list[int]:
        """`at` as numbers, rising."""
        parts = self.at.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(
                f"--at must be steps from 1 joined by commas, got {self.at!r}"
            )
        return sorted({int(part) for part in parts})


def run_moments(config: Config):
    """Yields (step, m, v), trees of NumPy arrays, from the demo's AdamW run."""
    import jax

    from experiments import config as pretrain
    from experiments import data, job

    names = ("preset", "seed", "data", "tokenizer", "cache")
    chosen = {name: getattr(config, name) for name in names}
    job_config = pretrain.resolve(pretrain.Config(optimizer="adamw", **chosen))
    batches = data.train_batches(data.prepare(job_config), job_config)
    run = job.build(job_config)
    state = run.state
    for step in range(1, max(config.steps()) + 1):
        state, _ = run.step(state, run.put(next(batches)))
        if step in config.steps():
            yield step, *jax.tree.map(np.asarray, _adam_moments(state.opt_state))


def _adam_moments(opt_state):
    import optax

    return tuple(optax.tree.get(opt_state, name) for name in ("mu", "nu"))


def large_leaves(tree) -> dict[str, Any]:
    """{path: leaf} of those that the library would store in FP8."""
    import jax

    from coat_jax import moments

    storage = moments.Storage()
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {moments.leaf_path(key_path): leaf for key_path, leaf in leaves}
    return {p: x for p, x in named.items() if storage.compresses(p, x.shape)}


def error_table(m, v, *, group: int, eps: float = 1e-8) -> np.ndarray:
    """1000 sqrt(update_mse) of trees m and v: (4, 4), first moments in the rows."""
    import jax

    from coat_jax import telemetry

    ways_of_m, ways_of_v = (_stored_ways(tree, group) for tree in (m, v))
    measure = jax.jit(lambda *trees: telemetry.update_mse(*trees, eps=eps))
    rows = [[measure(m, v, a, b) for b in ways_of_v] for a in ways_of_m]
    return 1000 * np.sqrt(np.array(rows, np.float64))


def ratio_rms(m, v, *, eps: float = 1e-8) -> float:
    """The root mean square of m / (sqrt(v) + eps) itself."""
    import jax
    from jax import numpy as jnp

    from coat_jax import telemetry

    nothing = jax.tree.map(jnp.zeros_like, m)
    return float(telemetry.update_mse(m, v, nothing, v, eps=eps)) ** 0.5


def lost_share(v, *, group: int) -> float:
    """The share of second moments that E4M3 without expansion makes zero."""
    import jax
    from jax import numpy as jnp

    from coat_jax import telemetry

    whole = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
    plain = _stored_ways(v, group)[0]
    return float(telemetry.underflow_share(whole(v), whole(plain)))


def _stored_ways(tree, group: int) -> list[Any]:
    """The tree as it is read back, rounded to nearest, in the order of NAMES."""
    import jax

    import coat_jax

    def stored(x, format, expand):
        e = coat_jax.expand_quantize(x, format=format, group=group, expand=expand)
        return coat_jax.expand_dequantize(e, group=group)

    read_back = jax.jit(stored, static_argnums=(1, 2))
    ways = [(f, e) for f in (coat_jax.E4M3, coat_jax.E5M2) for e in (False, True)]
    return [jax.tree.map(lambda x, w=way: read_back(x, *w), tree) for way in ways]


def lowered(table: np.ndarray) -> int:
    """In how many of 16 comparisons expanding one of the moments lowers the error."""
    plain, expanded = slice(0, None, 2), slice(1, None, 2)
    rows = table[expanded] < table[plain]
    columns = table[:, expanded] < table[:, plain]
    return int(rows.sum() + columns.sum())


def summary(table: np.ndarray) -> dict[str, Any]:
    """The table as JSON values and what is claimed of it, the paper's beside ours."""
    shape, published = table / table[0, 0], PUBLISHED / PUBLISHED[0, 0]
    return {
        "table": table.round(4).tolist(),
        "factor": table[1, 1] / table[0, 0],
        "published_factor": PUBLISHED[1, 1] / PUBLISHED[0, 0],
        "lowered": lowered(table),
        "published_lowered": lowered(PUBLISHED),
        "furthest_cell": float(np.exp(np.abs(np.log(shape / published)).max()) - 1),
    }


def show(table: np.ndarray) -> str:
    """Our entries with the published ones in brackets, in the paper's layout."""
    lines = ["m \\ v      " + "".join(f"{name:>18}" for name in NAMES)]
    for name, ours, theirs in zip(NAMES, table, PUBLISHED, strict=True):
        pairs = zip(ours, theirs, strict=True)
        lines.append(f"{name:<11}" + "".join(f"{a:>9.2f} ({b:5.2f})" for a, b in pairs))
    facts = summary(table)
    lines.append(
        f"E4M3 to both E4M3+Exp: {table[0, 0]:.2f} -> {table[1, 1]:.2f}, factor "
        f"{facts['factor']:.3f} (20.10 -> 12.31, {facts['published_factor']:.3f}); "
        f"expansion lowers {facts['lowered']} of 16 (16)"
    )
    return "\n".join(lines)


def _keep_states(path: pathlib.Path, states) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{step}:{moment}:{name}": leaf
        for step, trees in states.items()
        for moment, leaves in zip("mv", trees, strict=True)
        for name, leaf in leaves.items()
    }
    np.savez(path, **arrays)


def main(config: Config) -> dict[int, dict[str, Any]]:
    """Prints and records one table a step; returns their summaries."""
    results, states = {}, {}
    for step, *trees in run_moments(config):
        m, v = states[step] = tuple(large_leaves(tree) for tree in trees)
        table = error_table(m, v, group=config.group)
        lost = lost_share(v, group=config.group)
        more = {"ratio_rms": ratio_rms(m, v), "lost_second_moments": lost}
        results[step] = summary(table) | more
        size = sum(leaf.size for leaf in m.values())
        print(f"\n1000 x RMS error of m / sqrt(v), step {step}, {size:,} elements")
        print(show(table))
        print(
            f"RMS of m / sqrt(v) itself: {1000 * more['ratio_rms']:.0f}; E4M3 alone "
            f"makes {lost:.1e} of v zero"
        )
        facts = {"step": step, "elements": size, **results[step]}
        path = harness.record(config.results, config, facts)
    if config.states:
        _keep_states(pathlib.Path(config.states), states)
    print(f"\nresults: {path}")
    return results


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))
