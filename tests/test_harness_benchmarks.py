"""The benchmarks' harness: what it times, counts, records and prints."""

import json
import time

import jax
from jax import numpy as jnp
import pytest

from benchmarks import harness, report

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def results_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(harness, "_records", [])
    return tmp_path


def _row(**changes):
    row = {"benchmark": "b", "case": "c", "implementation": "i", "metric": "time"}
    return harness.record(**(row | {"value": 1.5, "unit": "ms"} | changes))


def test_a_time_is_one_calls(monkeypatch):
    monkeypatch.setattr(harness, "LEAST", 0.01)

    def slow(x):
        time.sleep(2e-3)
        return x

    slow.lower = None  # as a jitted function has one, so that it is called as it is
    assert 2e-3 <= harness.time(slow, jnp.ones(3), repeats=3) < 2e-2


def test_donated_arguments_get_their_results():
    """An optimizer's loop: each call takes what the last one gave."""
    step = jax.jit(lambda p, g, m: (p - g, m + 1, jnp.sum(p)), donate_argnums=(0, 2))
    seen = []

    def counted(p, g, m):
        results = step(p, g, m)
        seen.append(results[1])
        return results

    counted.lower = None
    args = [jnp.zeros(4, jnp.float32), jnp.ones(4, jnp.float32)]
    harness.time(counted, *args, jnp.zeros(2, jnp.float32), donate=(0, 2), repeats=2)
    assert args[0].is_deleted()
    assert float(seen[-1][0]) == len(seen) > 4


@pytest.mark.parametrize("one", [True, False], ids=["an array", "a tuple"])
def test_a_plain_function_is_jitted_with_its_donation(one):
    fn = (lambda x: x + 1.0) if one else (lambda x: (x + 1.0, x.sum()))
    x = jnp.zeros(1000, jnp.float32)
    assert harness.time(fn, x, donate=(0,), repeats=2, calls=3) > 0
    assert x.is_deleted()


def test_bytes_of_a_program():
    fn = jax.jit(lambda x, y: (x + 1.0, y @ y), donate_argnums=0)
    x, y = jnp.zeros(64, jnp.float32), jnp.zeros((16, 16), jnp.float32)
    found = harness.memory_of(fn.lower(x, y).compile())
    assert found["arguments"] == 64 * 4 + 256 * 4
    assert found["reused"] == 64 * 4
    assert found["total"] == 2 * 256 * 4 + 64 * 4 + 16 + found["temporaries"]


def test_a_failure_is_shown_and_passed_over(capsys):
    def fails():
        raise ValueError("x is odd")

    assert harness.attempt("a case", lambda: None)
    assert not harness.attempt("a case", fails)
    assert capsys.readouterr().out == "a case: FAILED, ValueError: x is odd\n"


def test_ceilings_are_positive_and_recorded():
    small = {"repeats": 2}
    assert harness.copy_rate(shape=(8, 64), **small) > 0
    assert harness.in_place_rate(shape=(8, 64), **small) > 0
    for kind in ("bf16", "fp8"):
        assert harness.product_rate(kind, shape=(16, 32, 48), **small) > 0


def test_a_record_has_the_keys_and_is_appended(results_folder):
    row = _row(value=1 / 3)
    assert tuple(row) == harness.KEYS
    assert row["value"] == 0.333333
    assert row["jax"] == jax.__version__
    _row(device="NVIDIA H200")
    _row(device="NVIDIA H200")
    lines = (results_folder / "nvidia-h200.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["device"] == "NVIDIA H200"
    assert (results_folder / "cpu.jsonl").exists()


def test_the_table_is_compact_and_shows_the_last_figure():
    _row(value=9)
    _row(value=2)
    _row(metric="rate", value=12345.6, unit="GB/s")
    _row(implementation="other", value=0.123456)
    assert harness.table("b").splitlines() == [
        "case  implementation  time [ms]  rate [GB/s]",
        "c     i                       2       12,346",
        "c     other              0.1235",
    ]
    assert "other" not in harness.table("another benchmark")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (float("nan"), "nan"), (3.0, "3"), (0.00012345, "0.0001234")],
)
def test_figures(value, text):
    assert harness.shown(value) == text


def test_the_flag_is_added_unless_it_is_given(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--other=1")
    harness.prepare()
    harness.prepare()
    flags = "--other=1 --xla_gpu_enable_triton_gemm=false"
    assert harness.os.environ["XLA_FLAGS"] == flags
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    harness.prepare()
    assert harness.os.environ["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=true"


def test_a_report_has_the_newest_run_of_each_figure(results_folder, capsys):
    for value, implementation in ((5.0, "xla"), (2.0, "triton"), (1.0, "triton")):
        _row(value=value, implementation=implementation, device="NVIDIA H200")
    _row(metric="rate", implementation="triton", value=3.5, unit="TB/s", device="x")
    report.main(
        [str(results_folder / name) for name in ("nvidia-h200.jsonl", "x.jsonl")]
    )
    text = capsys.readouterr().out
    assert "## b\n" in text
    assert "| case | implementation | time [ms] |" in text
    assert "| c | triton | 1 |" in text
    assert "| c | triton | 2 |" not in text
    assert text.index("NVIDIA H200") < text.index("TB/s")


def test_the_figures_of_the_docs_are_drawn(results_folder):
    """Of what is recorded: here two of the three."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    how = {"benchmark": "quantize", "case": "T", "device": "x"}
    _row(**how, metric="rate", value=2.1, unit="TB/s", implementation="triton")
    _row(**how, metric="rate", value=1.05, unit="TB/s", implementation="xla")
    how = {"benchmark": "optimizer", "case": "leaf", "device": "x"}
    _row(**how, metric="traffic", value=4200.0, unit="GB/s", implementation="triton")
    _row(benchmark="layer", case="7b", value=24.0, device="x")
    file = str(results_folder / "x.jsonl")
    assert [
        r["value"] for r in report.shares(report.read([results_folder / "x.jsonl"]))
    ] == [50.0, 25.0, 100.0]
    for folder in (results_folder / "one", results_folder / "two"):
        report.main([file, f"--plots={folder}"])
        assert sorted(p.name for p in folder.iterdir()) == ["kernels.svg", "layer.svg"]
    text = (folder / "kernels.svg").read_text()
    assert "share of 4.2 TB/s" in text
    assert "optimizer leaf" in text
    assert text == (results_folder / "one" / "kernels.svg").read_text()
    with pytest.raises(SystemExit):
        report.main([file, "--benchmark=none", f"--plots={results_folder}"])


def test_a_report_can_be_drawn(results_folder):
    pytest.importorskip("matplotlib", reason="plots are an extra")
    for implementation, value in (("xla", 5.0), ("triton", 2.0)):
        _row(value=value, implementation=implementation, device="NVIDIA H200")
    folder = results_folder / "plots"
    given = [str(results_folder / "nvidia-h200.jsonl"), f"--plots={folder}"]
    report.main([*given, "--metric=b:time"])
    assert [path.name for path in folder.iterdir()] == ["b-time.svg"]
