"""What every source keeps to: one door for FP8, a first line, a size, few imports."""

import ast
import pathlib
import sys

import pytest

from tests import fp8_door
from tests.test_layering import imported

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
DOOR = "coat_jax/formats.py"
CORE = {"coat_jax", "flax", "jax", "ml_dtypes", "numpy", "optax", "orbax"}
# Packages that one file looks for, and does without or names with its extra.
OPTIONAL = {
    "typing.py": {"import jaxtyping"},
    "safetensors_file.py": {"import safetensors"},
    "gguf_file.py": {"import gguf"},
}
UNSAFE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
MOST_LINES = 500


def _paths(*folders):
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in found]


LIBRARY = _paths("coat_jax")
PROGRAMS = _paths("coat_jax", "experiments", "benchmarks", "notebooks")
ALL = [
    *PROGRAMS,
    *_paths("tests"),
    pytest.param(ROOT / "conftest.py", id="conftest.py"),
]


def unlike_the_house(source: str) -> list[str]:
    """What a source text does that no file of the project may do."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(level=level) if level > 0:
                wrong.append("a relative import")
            case ast.ImportFrom(module="__future__"):
                wrong.append("a future import")
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                wrong.append("__all__")
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                wrong.append(f"{name}()")
    unsafe = {name.partition(".")[0] for name in imported(source)} & UNSAFE
    return wrong + [f"import {name}" for name in sorted(unsafe)]


def unlike_a_library(source: str) -> list[str]:
    """What a text of the library does that tests and experiments may do."""
    tops = {name.partition(".")[0] for name in imported(source)}
    foreign = tops - CORE - set(sys.stdlib_module_names)
    wrong = [f"import {name}" for name in sorted(foreign)]
    if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source))):
        wrong.append("assert")
    return wrong


@pytest.mark.parametrize("path", PROGRAMS)
def test_only_the_door_casts_to_fp8(path):
    found = fp8_door.casts(path.read_text())
    if path == ROOT / DOOR:
        assert found, "the door itself is not recognised"
    else:
        assert found == [], f"{path}: use coat_jax.formats.cast"


@pytest.mark.parametrize("path", ALL)
def test_the_first_line_says_what_the_file_is_for(path):
    first = path.read_text().partition("\n")[0]
    if path.is_relative_to(ROOT / "notebooks"):
        assert first.startswith("#")
    else:
        assert first.startswith(('"""', 'r"""'))
        assert len(first) > len('""""""')


@pytest.mark.parametrize("path", ALL)
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", ALL)
def test_no_file_leaves_the_house_style(path):
    assert unlike_the_house(path.read_text()) == []
    assert path.name != "utils.py"


@pytest.mark.parametrize("path", LIBRARY)
def test_the_library_imports_only_its_dependencies_and_never_asserts(path):
    wrong = unlike_a_library(path.read_text())
    assert set(wrong) <= OPTIONAL.get(path.name, set())


@pytest.mark.parametrize(
    "source",
    [
        "y = x.astype(jnp.float8_e4m3fn)",
        "y = x.astype('float8_e5m2')",
        "y = x.astype(format.dtype)",
        "y = x.astype(dtype=self.storage.v_format.dtype)",
        "y = x.astype(formats.E4M3.dtype)",
        "y = x.astype(q.codes.dtype)",
        "y = x.astype(state.mu.codes['w'].dtype)",
        "y = lax.convert_element_type(x, fmt.dtype)",
        "y = jnp.asarray(x, dtype=jnp.float8_e5m2)",
        "y = jnp.full((2,), 0.1, format.dtype)",
        "y = lax.dot(a, b, preferred_element_type=format.dtype)",
        "y = jnp.float8_e4m3fn(0.1)  # a scalar type is a cast too",
        "y = x.astype(jnp.dtype('float8_e4m3fn'))",
        "from ml_dtypes import float8_e4m3fn",
        "d = format.dtype\ny = x.astype(d)",
        "def f(x, format):\n  d: type = format.dtype\n  return x.astype(d)",
        "TABLE = {'e4m3': jnp.float8_e4m3fn}\ny = x.astype(TABLE['e4m3'])",
        "wide, narrow = jnp.float32, jnp.float8_e5m2\ny = x.astype(narrow)",
        "self.to = format.dtype\ny = x.astype(self.to)",
        "for d in (jnp.float32, format.dtype):\n  y = x.astype(d)",
        "to = functools.partial(jnp.asarray, dtype=format.dtype)",
        "y = x.astype(getattr(jnp, 'float8_e4m3fn'))",
        "y = lax.reduce_precision(x, 4, 3)",
    ],
)
def test_the_door_check_sees_planted_casts(source):
    assert fp8_door.casts(source)


@pytest.mark.parametrize(
    "source",
    [
        "y = x.astype(jnp.float32)",
        "y = update.astype(gradient.dtype)",
        "codes = formats.cast(x, format)",
        "y = jnp.zeros(x.shape, format.dtype)",
        "y = lax.bitcast_convert_type(bits, format.dtype)",
        "y = jax.ShapeDtypeStruct(x.shape, storage.m_format.dtype)",
        "same = codes.dtype == format.dtype",
        "def f():\n  d = format.dtype\ndef g(x, d):\n  return x.astype(d)",
        "d = format.dtype\ndef f(x, d):\n  return x.astype(d)",
        "y = q.codes.astype(jnp.float32)",
    ],
)
def test_the_door_check_passes_what_casts_nothing(source):
    assert fp8_door.casts(source) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from . import formats", ["a relative import"]),
        ("from __future__ import annotations", ["a future import"]),
        ("__all__ = ['f']", ["__all__"]),
        ("y = eval(text)", ["eval()"]),
        ("import pickle", ["import pickle"]),
        ("model.eval()", []),
    ],
)
def test_the_style_check_sees_planted_faults(source, wrong):
    assert unlike_the_house(source) == wrong


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import numpy as np\nimport json\nfrom orbax import checkpoint", []),
        ("def f():\n  import torch", ["import torch"]),
        ("from jaxtyping import Float", ["import jaxtyping"]),
        ("assert x > 0", ["assert"]),
    ],
)
def test_the_library_check_sees_planted_faults(source, wrong):
    assert unlike_a_library(source) == wrong
