"""The demo's three trainings, and the bytes that a decoder keeps for its backward."""

import dataclasses
import json
import pathlib
import shutil
import sysconfig

from flax import nnx
import jax
from jax import numpy as jnp
import pytest

from coat_jax import policy as presets
from coat_jax.models import llama
from experiments import activation_bytes, corpus, demo, harness, metrics, plot, policies
from experiments import config as options
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once

SMALLER = dataclasses.replace(
    llama.PRESETS["micro"], hidden=32, ffn=32, layers=1, heads=2
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of real text of which, at the demo's 5 % of the files, some is held out.

    Of a dozen files none would be: two more are written, under names that are.
    """
    root = tmp_path_factory.mktemp("text")
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = sorted([*source.glob("json/*.py"), *source.glob("wsgiref/*.py")])
    for path in paths:
        (root / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    names = (f"more{i}.py" for i in range(1000))
    held = [name for name in names if corpus.is_held_out(name, 0.05)][:2]
    for name, path in zip(held, paths[-2:], strict=True):
        shutil.copy(path, root / name)
    return root


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The config of a demo that went to its end."""
    root = tmp_path_factory.mktemp("demo")
    config = demo.Config(
        preset="micro",
        steps=3,
        data=str(text),
        cache=str(root / "cache"),
        out=str(root / "demo"),
        results=str(root / "demo.jsonl"),
    )
    arguments = [f"--{k}={v}" for k, v in dataclasses.asdict(config).items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(llama.PRESETS, "micro", SMALLER)  # less to compile
        code = harness.run_main(demo.main, demo.Config, arguments)
    assert code == ExitCode.DONE
    return config


def test_the_demo_trains_three_times_from_the_same_weights(finished):
    rows = _rows(finished)
    arms = [(row["config"]["optimizer"], row["config"]["policy"]) for row in rows]
    assert arms == [
        ("adamw", "bf16"),
        ("fp8_adamw", "bf16"),
        ("fp8_adamw", "default"),
    ]
    first = [
        float(
            metrics.read_rows(pathlib.Path(finished.out, name, "metrics.csv"))[0][
                "loss"
            ]
        )
        for name in demo.ARMS
    ]
    assert first[0] == first[1]  # the same weights and batch; products are FP8 in the
    assert first[2] != first[0]  # third, which moves a loss of ln 512 by little
    assert first[2] == pytest.approx(first[0], abs=0.01)


def _rows(config) -> list[dict]:
    lines = pathlib.Path(config.results).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_fp8_keeps_fewer_bytes_and_the_formula_says_how_many(finished):
    base, optimizer, coat = _rows(finished)
    # The embedding is in FP8; all else in so small a model isn't.
    assert optimizer["optimizer_bytes"] < 0.5 * base["optimizer_bytes"]
    assert coat["optimizer_bytes"] == optimizer["optimizer_bytes"]
    assert optimizer["kept_per_token"] == base["kept_per_token"]
    assert coat["kept_per_token"] < base["kept_per_token"]
    for row in (base, optimizer, coat):
        assert row["kept_per_token"] == row["kept_predicted"]


def test_the_demo_shows_a_table_and_a_picture(finished, capsys):
    rows = dict(zip(demo.ARMS, _rows(finished), strict=True))
    from rich.console import Console

    Console(width=110).print(demo._table(rows))
    shown = capsys.readouterr().out
    kept, base = rows["coat"]["kept_per_token"], rows["adamw"]["kept_per_token"]
    for text in (f"{kept:,.0f} ({kept / base:.4f})", "held-out loss", "full COAT"):
        assert text in shown
    image = pathlib.Path(finished.out, "curves.png")
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_two_or_three_runs_of_different_names(finished, tmp_path):
    folders = [f"{finished.out}/{name}" for name in demo.ARMS]
    path = plot.compare(folders[:2], str(tmp_path / "two.png"), title="two")
    assert path.exists()
    for wrong in (folders[:1], [folders[0]] * 2, [*folders, folders[0]]):
        with pytest.raises(UserError, match="in folders of different names") as caught:
            plot.compare(wrong, str(tmp_path / "x.png"), title="")
        assert caught.value.code == ExitCode.CONFIG


# --- bytes kept -----------------------------------------------------------------------

MODELS = {
    "float32": llama.PRESETS["micro"],
    "bfloat16": dataclasses.replace(llama.PRESETS["micro"], dtype=jnp.bfloat16),
    # Groups that end in the middle, one key head a query head, a head of its own.
    "odd": dataclasses.replace(
        llama.PRESETS["micro"], hidden=200, ffn=300, heads=4, kv_heads=4, tied=False
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"policy": "default"},
        {"policy": "paper"},
        {"policy": "default", "attention_keeps": "fp8", "kept_group": 32},
        {"policy": "default", "gemm_scaling": "vector"},
    ],
    ids=str,
)
def test_the_formula_gives_what_the_program_keeps(model, given):
    config = options.Config(**given)
    layers, policy = policies.layers_of(config), policies.policy_of(config)
    got = activation_bytes.measured_bytes_kept(model, layers, seq=24)
    assert got == activation_bytes.predicted_bytes_kept(model, policy, seq=24)


@pytest.mark.parametrize("preset", ["tiny", "small", "125m", "llama2-7b"])
def test_a_decoder_under_the_default_policy_keeps_a_third_or_less(preset):
    model = dataclasses.replace(llama.PRESETS[preset], dtype=jnp.bfloat16)
    kept = lambda policy: activation_bytes.predicted_bytes_kept(model, policy, seq=256)
    assert kept(presets.DEFAULT) <= kept(presets.BF16) / 3


class Wasteful(nnx.RMSNorm):
    def __call__(self, x):
        y = super().__call__(x)
        return y * jnp.sin(y)  # keeps y, and sine and cosine of it


def test_the_measurement_sees_what_else_is_kept():
    model, wasteful = llama.PRESETS["micro"], llama.Layers(final_norm=Wasteful)
    plain = activation_bytes.measured_bytes_kept(model, llama.Layers(), seq=8)
    more = activation_bytes.measured_bytes_kept(model, wasteful, seq=8)
    assert more - plain == 3 * 4 * model.hidden


def test_the_formula_refuses_remat():
    model = dataclasses.replace(llama.PRESETS["micro"], remat=True)
    with pytest.raises(ValueError, match="must be without remat"):
        activation_bytes.predicted_bytes_kept(model, presets.DEFAULT, seq=8)


def test_nothing_is_computed_for_a_large_model(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *a, **k: pytest.fail("compiled"))
    model, layers = llama.PRESETS["llama2-7b"], llama.Layers()
    got = activation_bytes.measured_bytes_kept(model, layers, seq=64)
    assert got == activation_bytes.predicted_bytes_kept(model, presets.BF16, seq=64)
