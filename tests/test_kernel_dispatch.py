"""Which implementation runs: by name, by platform, by what a kernel refuses."""

import functools
import warnings

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.kernels import dispatch
from tests import toy_kernel as toy

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
FACTOR = jnp.full((1,), 3.0, jnp.float32)


def _run(implementation, *, refusal=None, kernels=None):
    """What ran: "reference" or the backend's name and whether interpreted."""
    ran = []

    def said(name):
        def call(x, interpret=None):
            ran.append((name, interpret))
            return x

        return call

    kernels = ("triton", "mosaic") if kernels is None else kernels
    calls = {name: said(name) for name in kernels}
    jax.jit(
        lambda x: dispatch.run(
            "f", implementation, refusal, calls, said("reference"), x
        )
    ).lower(X)
    return ran


def test_the_reference_runs_where_asked_or_where_a_kernel_refuses():
    assert _run("xla") == [("reference", None)]
    assert _run("xla", refusal="x is odd") == [("reference", None)]
    assert _run(None, refusal="x is odd") == [("reference", None)]
    assert _run(None, kernels=()) == [("reference", None)]


def test_none_is_the_first_kernel_on_cuda_and_the_reference_elsewhere():
    assert set(_run(None)) == {("triton", False), ("reference", None)}
    assert set(_run(None, kernels=("mosaic", "triton"))) == {
        ("mosaic", False),
        ("reference", None),
    }


@pytest.mark.parametrize("name", ["pallas", "triton", "mosaic"])
def test_a_named_kernel_is_interpreted_on_a_cpu(name):
    # Mosaic's interpret mode cannot stand in a branch, so that it alone is traced.
    want = {"mosaic": {("mosaic", True)}}
    assert set(_run(name)) == want.get(name, {("triton", False), ("triton", True)})


def test_mosaic_by_name_is_compiled_for_the_set_mesh(h200_mesh):
    with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
        said = []
        call = lambda x, interpret: said.append(interpret) or x
        run = lambda x: dispatch.run("f", "mosaic", None, {"mosaic": call}, abs, x)
        jax.eval_shape(run, X)
    assert set(said) == {False}


@pytest.mark.parametrize("name", ["pallas", "triton", "mosaic"])
def test_a_named_kernel_never_falls_back(name):
    with pytest.raises(ValueError, match=f"f: implementation='{name}'.*x is odd"):
        _run(name, refusal="x is odd")


def test_a_backend_without_a_kernel_or_without_pallas_is_said(monkeypatch):
    with pytest.raises(ValueError, match="xla, triton; got 'mosaic'"):
        _run("mosaic", kernels=("triton",))
    with pytest.raises(ValueError, match="None or one of xla, pallas, triton, mosaic"):
        _run("cuda")
    monkeypatch.setattr(dispatch, "_has", lambda backend: backend == "mosaic")
    assert _run("pallas") == [("mosaic", True)]
    with pytest.raises(NotImplementedError, match="needs jax.experimental.pallas.trit"):
        _run("triton")
    monkeypatch.setattr(dispatch, "_has", lambda backend: False)
    assert _run(None) == [("reference", None)]
    with pytest.raises(NotImplementedError, match="needs one of Pallas's backends"):
        _run("pallas")


def test_backends_are_looked_for_in_jax():
    assert dispatch.has_triton()  # jax 0.10 to 0.12
    assert dispatch.has_mosaic()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("implementation", [None, "xla", "pallas", "triton"])
def test_all_give_the_same(implementation, jit):
    op = functools.partial(toy.op, implementation=implementation)
    got = (jax.jit(op) if jit else op)(X, FACTOR)
    for g, w in zip(got, toy.judge(X, FACTOR), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_derivatives_are_those_of_the_reference(implementation):
    def loss(x, implementation):
        out, most = toy.op(x, FACTOR, implementation=implementation)
        return jnp.sum(out) + 2 * jnp.sum(most)

    got, want = (jax.grad(loss)(X, i) for i in (implementation, "xla"))
    np.testing.assert_array_equal(got, want)
    assert set(np.unique(want)) == {3.0, 5.0}


@pytest.mark.parametrize("implementation", [None, "xla", "triton"])
def test_the_platform_is_that_of_the_lowering(implementation, h200_compile):
    op = functools.partial(toy.op, implementation=implementation)
    text = h200_compile(op, *toy.shapes((4, 64))).as_text()
    assert (toy.NAME in text) == (implementation != "xla")
    here = jax.jit(op).lower(X, FACTOR).compile().as_text()
    assert "custom-call" not in here


def test_only_tritons_deprecation_is_silenced(h200_compile):
    h200_compile(toy.op, *toy.shapes((4, 64)))  # warnings are errors in tests
    with pytest.raises(DeprecationWarning, match="something else"):
        warnings.warn("something else", DeprecationWarning, stacklevel=1)
