"""Annotations are checked in tests, and cost a user without jaxtyping nothing."""

import importlib.util
import sys

import jax
from jax import numpy as jnp
import pytest

from coat_jax import typing
from coat_jax.quantize import quantize


def test_the_tests_check_annotations():
    jaxtyping = pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")
    pytest.importorskip("beartype", reason="beartype is not installed")
    with pytest.raises(jaxtyping.TypeCheckError, match="quantize"):
        quantize("no array")


@pytest.fixture
def inert(monkeypatch):
    """The module as it is where jaxtyping is not installed."""
    monkeypatch.setitem(sys.modules, "jaxtyping", None)
    spec = importlib.util.spec_from_file_location("inert", typing.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_jaxtyping_every_annotation_can_still_be_written(inert):
    names = [name for name in vars(typing) if name[0].isupper()]
    assert {"Array", "Float", "PRNGKeyArray", "PyTree"} <= set(names)
    for name in names:
        annotation = getattr(inert, name)
        assert annotation | None is not None
        if name not in {"Array", "ArrayLike", "PRNGKeyArray"}:
            assert annotation[inert.Array, "rows columns"] is jax.Array


def test_with_jaxtyping_a_shape_is_part_of_the_type():
    jaxtyping = pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")
    assert typing.Float is jaxtyping.Float
    matrix = typing.Float[typing.Array, "rows columns"]
    assert isinstance(jnp.ones((2, 3)), matrix)
    assert not isinstance(jnp.ones(3), matrix)
