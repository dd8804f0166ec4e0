"""The benchmark of tensor trains: its bounds, its launches, its commands."""

import dataclasses
import sys

import jax
from jax import numpy as jnp
import optax
import pytest

from benchmarks import comera, comera_step, h200, harness, launches
from benchmarks.launches import Launches
from coat_jax.models import encoder
from coat_jax.policy import BF16

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def results_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(harness, "_records", [])
    monkeypatch.setattr(harness, "LEAST", 0.0)
    return tmp_path


SEQUENCE = """\
000: kCommandBuffer [source       | next=016 (1)]
    001: kCustomKernel   [source       | next=003 (1)] fusion
    002: kDynamicSliceFusion [source | next=003 (1)] params=2
        003: kCublasLtMatmul [prev=002 (2) | next=006 (3)] kCublasLtMatmul
016: kConditional   [prev=000 (1) | next=000 (1)]
  false_branch:
    012: kCopy         [source       | next=013 (1)] kCopy
    013: kCustomCall   [prev=012 (1) | next=014 (1)] kCustomCall
  true_branch:
    015: kCustomKernel [source | sink] wrapped_transpose_2
017: kCustomKernel [prev=016 (1) | sink] fusion

"""


def test_launches_of_a_sequence():
    """A graph of two, a conditional of one (and its predicate's copy), a kernel."""
    assert launches.count(SEQUENCE) == Launches(kernels=5, launches=4, buffers=1)
    assert launches.count("") == launches.NONE


def test_a_folder_without_a_sequence_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must have left a"):
        launches.read(tmp_path)


def _chain(x, w):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x


def test_command_buffers_hold_the_same_kernels(h200_compile):
    """XLA's own lists, of one program with and without CUDA graphs."""
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    make = lambda options: h200.compile_for(_chain, shape, shape, options=options)
    _, graphs = launches.compiled(make)
    _, plain = launches.compiled(make, command_buffers=False)
    assert graphs.kernels == plain.kernels == plain.launches == 12
    assert (graphs.buffers, plain.buffers) == (1, 0)
    assert graphs.launches < 12


@pytest.mark.once
def test_galores_decompositions_stay_out_of_graphs(h200_compile):
    """The conditional of each matrix cuts the graph; its short branch counts."""
    tx = optax.contrib.galore(1e-3, rank=8)
    params = {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 64))}

    def step(grads, state):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(grads, state, params)

    make = lambda options: h200.compile_for(
        step, params, jax.eval_shape(tx.init, params), options=options
    )
    program, found = launches.compiled(make)
    assert "Svd" in program.as_text() or "svd" in program.as_text()
    assert 2 <= found.buffers < found.launches < found.kernels


def _linear(**changes):
    sizes = {"inputs": 4096, "outputs": 4096, "tokens": 16384}
    return comera.Linear(**(sizes | {"rank": None, "policy": "bf16"} | changes))


def test_bounds_are_those_of_the_roofline():
    """By hand: 16,384 tokens through 4096 x 4096, and its halves of rank 32."""
    operations = 2 * 16384 * 4096**2 / 989e12
    assert _linear().bound("forward") == pytest.approx(operations)
    assert _linear().bound("both") == pytest.approx(3 * operations)
    moved = 2 * 16384 * 2 * 4096
    train = _linear(rank=32)
    assert train.bound("forward") == pytest.approx(moved / 4.8e12)
    assert train.bound("both") == pytest.approx(2.5 * moved / 4.8e12)
    fp8 = dataclasses.replace(train, policy="FP8")
    assert fp8.bound("both") == pytest.approx(2.5 * moved / 4.8e12)
    assert _linear().bound("forward") / train.bound("forward") == pytest.approx(
        9.9, 0.01
    )


def test_calls_of_one_program_are_all_made(monkeypatch):
    """Each on its own parameters and inputs, whatever the barrier between them."""
    what = _linear(inputs=24, outputs=32, tokens=16, rank=4)
    make, key = comera.arguments(what, 3)
    given = make(key)
    got = jax.jit(comera.program(what, "both"))(*given)
    assert len(got) == 3
    for one, params, x, g in zip(got, *given, strict=True):
        want = what.run("both", params, x, g)
        y, (dparams, dx) = one[0], one[1:]
        assert y.shape == (16, 32)
        assert dx.shape == x.shape
        jax.tree.map(lambda a, b: None, dparams, params)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(want), strict=True):
            size = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
            error = a.astype(jnp.float32) - b.astype(jnp.float32)
            assert float(jnp.max(jnp.abs(error))) <= 2**-6 * size
    assert not jnp.array_equal(got[0][0], got[1][0])


def test_linear_maps_can_be_chosen_by_their_inputs(monkeypatch, capsys):
    assert comera.shapes_of("full", [4096, 768]) == [(768, 768), (4096, 4096)]
    assert comera.shapes_of("full", None) == [*comera.SIZES["full"][0]]
    monkeypatch.setattr(sys, "argv", ["benchmark", "--inputs", "768", "512"])
    with pytest.raises(SystemExit):
        comera.main()
    assert "must be of [768, 1024, 4096]" in capsys.readouterr().err


@pytest.mark.once
def test_the_commands_run(monkeypatch, capsys):
    """Linear maps and steps of the micro size, on the CPU; figures add up."""
    given = ["--size=micro", "--batch", "2", "--forms", "one call", "--repeats=1"]
    given += ["--kinds", "TT", "--layers=1"]
    monkeypatch.setattr(comera, "POLICIES", {"bf16": BF16})
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    ended = []
    monkeypatch.setattr(sys, "exit", ended.append)
    comera.main()
    assert ended == [0]
    shown = capsys.readouterr().out
    assert "merged 4 bf16" in shown
    found = {
        (row["benchmark"], row["implementation"], row["metric"]): row["value"]
        for row in harness._records
        if "forward" not in row["case"]
    }
    time = lambda name: found["comera", name, "time"]
    gain = found["comera", "TT 4 bf16", "gain"]
    assert gain == pytest.approx(time("dense bf16") / time("TT 4 bf16"), rel=1e-4)
    step = comera_step.Step(size="micro", kind="TT", layers=1)
    params = encoder.count_params(step.config, layers=step.made_of)
    state = found["comera_step", "TT", "state"] * 2**20
    assert 12 * params < state < 13 * params
    assert found["comera_step", "TT", "one call"] > 0
