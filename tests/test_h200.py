"""The compiler for an absent H200 sees what a CPU cannot, or says why it cannot run."""

import importlib.metadata

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from tests import h200

LAYERS = 4
H = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
W = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def _silu_keeping_fp8(*, pinned):
    """SiLU whose backward keeps its input as raw E4M3, pinned by a barrier or not."""

    @jax.custom_vjp
    def silu(x):
        return jax.nn.silu(x)

    def forward(x):
        codes = x.astype(jnp.float8_e4m3fn)
        return jax.nn.silu(x), lax.optimization_barrier(codes) if pinned else codes

    def backward(codes, dy):
        return jax.vjp(jax.nn.silu, codes.astype(jnp.bfloat16))[1](dy)

    silu.defvjp(forward, backward)
    return silu


def _gradient(silu):
    def loss(w, h):
        for _ in range(LAYERS):
            h = silu(h @ w)
        return jnp.sum(h.astype(jnp.float32))

    return jax.grad(loss)


def test_an_fp8_residual_is_kept_only_behind_a_barrier(h200_compile):
    pinned, bare = (
        h200_compile(_gradient(_silu_keeping_fp8(pinned=pinned)), W, H)
        for pinned in (True, False)
    )
    assert "f8e4m3fn[8192,1024]" in pinned.as_text()
    assert "f8e4m3fn" not in bare.as_text()  # XLA has cancelled the pair of casts
    saved = (
        bare.memory_analysis().temp_size_in_bytes
        - pinned.memory_analysis().temp_size_in_bytes
    )
    assert saved > (LAYERS - 2) * H.size  # a byte an element of all but the last layers


def test_an_fp8_product_becomes_a_cublaslt_call(h200_compile):
    x, w = (jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn) for _ in range(2))
    product = lambda x, w: lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
    )
    assert "__cublas$lt$matmul$f8" in h200_compile(product, x, w).as_text()


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_program_for_eight_devices_gathers_nothing_it_need_not(
    h200_compile, h200_mesh, explicit
):
    on = h200_mesh(8, explicit=explicit)
    split = NamedSharding(on, P("x", None))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=split)
    local = h200_compile(lambda x: x * 2, x, on=on)
    assert "all-gather" not in local.as_text()
    assert local.memory_analysis().argument_size_in_bytes == 4 * x.size // 8
    whole = h200_compile(
        lambda x: x * 2, x, on=on, out_shardings=NamedSharding(on, P())
    )
    assert "all-gather" in whole.as_text()


def test_donation_aliases_the_buffer(h200_compile):
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    step = lambda x: x + 1
    donated = h200_compile(step, x, donate=(0,)).memory_analysis()
    assert donated.alias_size_in_bytes == 4 * x.size
    assert h200_compile(step, x).memory_analysis().alias_size_in_bytes == 0


def test_what_jax_0_10_does_not_know_is_left_out():
    new, old = h200.target_config("0.11.2"), h200.target_config("0.10.2")
    for field in h200.UNKNOWN_TO_0_10:
        assert field in new
        assert field not in old
    assert len(new.splitlines()) - len(old.splitlines()) == len(h200.UNKNOWN_TO_0_10)


def _absent(package):
    raise importlib.metadata.PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"installed": _absent}, "pip install 'jax\\[cuda13-local\\]=="),
        ({"installed": lambda package: "0.1"}, "is 0.1, but must be jax's own"),
        ({"installed": lambda package: jax.__version__, "folder": None}, "nvcc"),
        (
            {"installed": lambda package: jax.__version__, "folder": "/nowhere"},
            "no bin/ptxas in /nowhere",
        ),
    ],
    ids=["absent", "other version", "no folder", "no ptxas"],
)
def test_an_absent_prerequisite_skips_with_its_reason_and_fails_in_ci(
    arguments, reason
):
    found = h200.missing(**arguments)
    with pytest.raises(pytest.skip.Exception, match=reason):
        h200.require(found, ci=False)
    with pytest.raises(pytest.fail.Exception, match=reason):
        h200.require(found, ci=True)


def test_a_ptxas_that_does_not_run_is_reported(tmp_path):
    (tmp_path / "nvvm/libdevice").mkdir(parents=True)
    (tmp_path / "nvvm/libdevice/libdevice.10.bc").touch()
    (tmp_path / "bin").mkdir()
    ptxas = tmp_path / "bin/ptxas"
    ptxas.write_text("#!/bin/sh\nexit 1\n")
    ask = lambda: h200.missing(installed=lambda _: jax.__version__, folder=tmp_path)
    assert "may not be executed" in ask()
    ptxas.chmod(0o755)
    assert "does not run" in ask()
