"""One arm of `experiments.finetune`: its problems, compiled functions, and a run."""

import dataclasses
import hashlib
import json
import math
import pathlib
import statistics
import time
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import optax

from coat_jax import training
from coat_jax.models import llama
from experiments import config as options
from experiments import gsm, optimizers, policies, smollm
from experiments.harness import ExitCode, UserError


def _tokenizer_sha256(pieces: dict[str, Any]) -> str:
    text = json.dumps([pieces.get("ggml.tokens"), pieces.get("ggml.merges")])
    return hashlib.sha256(text.encode()).hexdigest()


def problems_of(config, model):
    """The problems in --data, made and written there first if they aren't there.

    Raises:
      UserError: problems of another tokenizer, or fewer than one batch; exit code 5.
    """
    sizes = {"seq": config.seq, "train": config.train_items, "held": config.held_items}
    name = "problems-" + "-".join(str(size) for size in sizes.values()) + ".npz"
    path, made_with = pathlib.Path(config.data, name), _tokenizer_sha256(model.pieces)
    if not path.exists():
        made = gsm.make(smollm.tokenizer(model.pieces), smollm.SENTENCE, **sizes)
        made.facts["tokenizer_sha256"] = made_with
        gsm.write(path, made)
    problems = gsm.read(path)
    fewest = min(len(problems.train.ids), len(problems.held.ids))
    if problems.facts["tokenizer_sha256"] != made_with or fewest < config.batch:
        raise UserError(
            ExitCode.DATA,
            f"{path} must hold --batch={config.batch} problems of each part, encoded "
            f"for these weights; it has {fewest}; change --data or --batch",
        )
    return problems


def orders(count: int, config, seed: int):
    """Rows of each batch: every problem once before any comes again."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int64)
    for _ in range(config.steps):
        while len(left) < config.batch:
            left = np.concatenate([left, rng.permutation(count)])
        yield left[: config.batch]
        left = left[config.batch :]


def answer_sums(apply):
    """(params, (windows, counted)) -> cross-entropy summed over the counted; how many.

    windows int32 (B, T + 1), counted float32 (B, T).
    """

    def sums(params, batch):
        windows, counted = batch
        logits = apply(params, windows[:, :-1]).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return jnp.sum(each * counted), jnp.sum(counted)

    return sums


class Arm:
    """One policy and optimizer: compiled once, run for each seed."""

    def __init__(self, config, chosen: options.Config, model, problems):
        self.config, self.model, self.problems = config, model, problems
        sizes = dataclasses.replace(model.config, dtype=jnp.dtype(config.dtype))
        unchanged = dict.fromkeys(options.POLICY_KNOBS)
        plain = dataclasses.replace(chosen, policy="bf16", **unchanged)
        sums = answer_sums(llama.make_apply(sizes, layers=policies.layers_of(chosen)))
        self.evaluations = {"": jax.jit(sums), "plain_": jax.jit(sums)}
        if chosen != plain:
            layers = policies.layers_of(plain)
            plain_sums = answer_sums(llama.make_apply(sizes, layers=layers))
            self.evaluations["plain_"] = jax.jit(plain_sums)

        def loss(params, batch, key):
            del key
            total, count = sums(params, batch)
            return total / count

        self.tx = optimizers.make_optimizer(chosen)
        self.step = training.make_train_step(loss, self.tx)

    def held_out(self, params, when: str) -> dict[str, float]:
        """Loss an answer's token: in the arm's own arithmetic, and in plain layers'."""
        part, size = self.problems.held, self.config.batch
        rows = range(0, len(part.ids) - size + 1, size)
        found = {}
        for kind, evaluate in self.evaluations.items():
            sums = [evaluate(params, part.batch(slice(i, i + size))) for i in rows]
            total, count = (
                math.fsum(float(x) for x in s) for s in zip(*sums, strict=True)
            )
            found[f"{kind}held_out_loss_{when}"] = total / count
        return found

    def run(self, seed: int) -> dict[str, Any]:
        """One fine-tune from the published weights, and what came of it.

        Raises:
          UserError: the loss isn't finite; exit code 3.
        """
        params = jax.tree.map(jnp.array, self.model.params)  # a step gives them away
        found = {"seed": seed, **self.held_out(params, "before")}
        state = training.init_state(params, self.tx, jax.random.key(seed))
        del params
        state, losses, seconds = self._train(state, seed)
        found |= self.held_out(state.params, "after")
        used = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
        count = sum(x.size for x in jax.tree.leaves(state.params))
        return found | {
            "train_loss": statistics.fmean(losses[-20:]),
            "step_ms": 1000 * seconds / max(self.config.steps - 1, 1),
            "seconds": seconds,
            "parameters": count,
            "optimizer_bytes": used,
            "optimizer_bytes_per_parameter": used / count,
            "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
            "weights_sha256": self.model.sha256,
            **self.problems.facts,
        }

    def _train(self, state, seed: int):
        """All steps: the last state, every loss, seconds of all steps but the first."""
        losses, began = [], 0.0
        for rows in orders(len(self.problems.train.ids), self.config, seed):
            state, figures = self.step(state, self.problems.train.batch(rows))
            losses.append(figures["loss"])
            if len(losses) == 1:  # compiling isn't the step's time
                jax.block_until_ready(state)
                began = time.perf_counter()
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        losses = [float(loss) for loss in losses]
        if not all(map(math.isfinite, losses)):
            raise UserError(
                ExitCode.NON_FINITE,
                f"the loss is not finite at seed {seed}; lower --lr",
            )
        return state, losses, seconds
