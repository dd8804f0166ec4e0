"""The benchmarks of layers and training steps run, at a size for a CPU, and add up."""

import gzip
import json
import math
import sys

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from benchmarks import accumulation, device_profile, harness, layer, train_step
from coat_jax.models import llama

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def results_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(harness, "_records", [])
    monkeypatch.setattr(harness, "LEAST", 0.0)
    return tmp_path


def _command(monkeypatch, module, *arguments):
    """Runs a benchmark's command; what it recorded, by implementation and metric."""
    monkeypatch.setattr(sys, "argv", ["benchmark", "--size=micro", *arguments])
    ended = []
    monkeypatch.setattr(sys, "exit", ended.append)
    module.main()
    assert not any(ended)
    rows = harness._records
    assert {row["unit"] for row in rows} <= {
        "ms", "MiB", "GiB", "TFLOP/s", "tokens/s", ""
    }  # fmt: skip
    return {(row["implementation"], row["metric"]): row["value"] for row in rows}


def test_a_layer(monkeypatch, capsys):
    given = ("--batch", "1", "--layers", "1", "--repeats", "1", "--policy")
    found = _command(monkeypatch, layer, *given, "bf16", "default")
    assert found["bf16", "of bf16"] == 1
    for name in ("bf16", "default"):
        assert found[name, "time"] > 0
        assert found[name, "temporaries"] > 0
    assert "default" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.once
@pytest.mark.parametrize(
    ("policy", "least"), [("bf16 remat", 1 - 1e-6), ("flax fp8_ops", 0.98)]
)
def test_the_peers_compute_what_bf16_does(policy, least):
    """The same block in Flax, and with rematerialisation: gradients by x agree."""
    x, weight = (jax.random.normal(jax.random.key(i), (1, 32, 64)) for i in (1, 2))
    weight = weight * x.size  # flax's first scale of gradients is 1
    plain, other = (layer.make("micro", name, 2) for name in ("bf16", policy))
    params = plain.draw()
    given = _in_flax(params, other) if policy == "flax fp8_ops" else params
    want = jax.jit(plain.gradients)(params, x, weight)[1][1]
    got = jax.jit(other.gradients)(given, x, weight)[1][1]
    cosine = np.vdot(got, want) / (np.linalg.norm(got) * np.linalg.norm(want))
    assert cosine > least


def _in_flax(params, other):
    """The parameters under Flax's names."""
    flat = {"attention_norm": {"scale": params["attention"]["norm"]["scale"]}}
    flat["mlp_norm"] = {"scale": params["mlp"]["norm"]["scale"]}
    for block in ("attention", "mlp"):
        flat |= {k: dict(v) for k, v in params[block].items() if k != "norm"}
    drawn = other.draw()
    assert jax.tree.map(jnp.shape, flat) == jax.tree.map(jnp.shape, drawn["params"])
    return dict(drawn) | {"params": flat}


def test_operations_are_six_a_parameter_and_token():
    config = llama.PRESETS["llama2-7b"]
    one = layer.operations(config, 1, 2048)
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert one == 6 * 2048 * matrices + 6 * 2048**2 * 4096
    head = 6 * 2048 * 4096 * 32000
    norms = 6 * 2048 * 4096 * 65
    assert train_step.operations(config, 1, 2048) == 32 * one + head + norms


@pytest.mark.once
def test_a_training_step(monkeypatch):
    given = ("--batch", "1", "--repeats", "1", "--policy", "bf16")
    found = _command(monkeypatch, train_step, *given, "--step=chunked")
    name = "bf16, chunked"
    assert found[name, "rate"] == pytest.approx(64e3 / found[name, "time"], 1e-4)
    params = 4 * llama.count_params(llama.PRESETS["micro"])
    state = found[name, "arguments"] * 2**30
    assert 3 * params < state < 3.01 * params


@pytest.mark.soak
@pytest.mark.once
def test_a_training_steps_loss_falls():
    step = train_step.make("micro", "default", "layerwise")
    run, state = jax.jit(step, donate_argnums=0), step.draw()
    windows = jax.random.randint(jax.random.key(0), (2, 65), 0, 512)
    losses = []
    for _ in range(20):
        state, loss = run(state, windows)
        losses.append(float(loss))
    assert losses[0] < 1.5 * math.log(512)
    assert losses[-1] < losses[0] - 0.2
    assert int(state.count) == 20


def test_a_step_that_does_not_fit_is_recorded(monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(train_step, "compiled", full)
    given = ("--batch", "1", "--policy", "default")
    assert (
        _command(monkeypatch, train_step, *given)["default, layerwise", "time"]
        == math.inf
    )


@pytest.mark.once
def test_sums_over_micro_batches_are_the_whole():
    what = layer.make("micro", "bf16", 1)
    keys = jax.random.split(jax.random.key(1), 2)
    inputs = [jax.random.normal(key, (4, 16, 64)) for key in keys]
    params = what.draw()
    want = jax.jit(what.gradients)(params, *inputs)[1][0]
    for how in accumulation.SUMS:
        run = jax.jit(lambda p, *a, how=how: accumulation.summed(what, how, 2, p, *a))
        found = accumulation.compare(run(params, *inputs), want)
        assert abs(found["slope"] - 1) < (1e-2 if how == "bfloat16 sum" else 1e-5)
        assert found["cosine"] > 1 - 1e-4


def test_products_over_tokens(monkeypatch):
    sizes = {"micro": (16, 24, (32,), 2, (1,))}
    monkeypatch.setattr(accumulation, "SIZES", sizes)
    found = _command(monkeypatch, accumulation, "--only=products", "--repeats=1")
    for name in ("fast", "promoted"):
        assert abs(found[name, "slope"] - 1) < 1e-3  # a CPU adds in float32
        assert 0 < found[name, "relative error"] < 4e-3  # of bfloat16


@pytest.fixture
def traced(tmp_path):
    """A trace as JAX's profiler writes it, with the lanes that repeat the kernels."""
    lane = lambda pid, tid, kind, name: {
        "ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}
    }  # fmt: skip
    ran = lambda pid, tid, name, dur: {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 0, "dur": dur
    }  # fmt: skip
    events = [
        lane(1, 0, "process_name", "/device:GPU:0"),
        lane(1, 13, "thread_name", "Stream #13(Compute)"),
        lane(1, 99, "thread_name", "XLA Ops"),
        lane(7, 0, "process_name", "/host:CPU"),
        lane(7, 13, "thread_name", "python"),
        ran(1, 13, "nvjet_qqtst_128", 60.0),
        ran(1, 13, "nvjet_qqtst_128", 40.0),
        ran(1, 13, "coat_adam", 50.0),
        ran(1, 13, "loop_fusion_3", 10.0),
        ran(1, 99, "coat_adam", 50.0),
        ran(7, 13, "PjitFunction", 500.0),
        {},
    ]
    path = tmp_path / "plugins/profile/now/host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return tmp_path


def test_a_profile_counts_kernels_once(traced):
    found = device_profile.kernels(device_profile.read(traced))
    assert found == {
        "nvjet_qqtst_128": (2, 100.0),
        "coat_adam": (1, 50.0),
        "loop_fusion_3": (1, 10.0),
    }
    lines = device_profile.summary(found, turns=2, most=2).splitlines()
    assert lines[0].split() == "80.0 us altogether, in kernels".split()
    assert lines[2].split() == ["50.0", "62.5", "1.0", "products,", "FP8"]
    assert lines[-1].split() == ["25.0", "31.2", "0.5", "coat_adam"]


def test_a_profile_without_a_trace_says_so(tmp_path):
    with pytest.raises(ValueError, match="must have left a"):
        device_profile.read(tmp_path)
    with pytest.raises(ValueError, match="was a GPU traced"):
        device_profile.kernels([])
