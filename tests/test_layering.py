"""A module imports only from the layers below it; the folders keep to themselves."""

import ast
import pathlib

import pytest

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = [
    {"typing", "optax_fields", "clipping"},
    {"formats", "rounding"},
    {"groups"},
    {"kernels"},
    {"quantize"},
    {"factorize", "tt_svd"},
    {"expand", "tensor_train"},
    {"contraction", "lookup", "train_tree"},
    {"moments"},
    {"telemetry", "adam_step", "train_cut", "rank_objective", "train_stacks"},
    {
        "optimizer",
        "decay",
        "rank_control",
        "policy",
        "rope",
        "losses",
    },
    {"residuals", "matmul"},
    {"linear"},
    {"recompute", "einsum", "lowrank"},
    {"norms", "activations", "attention"},
    {"fused", "convolution"},
    {"fp8_state", "sharding", "interop", "layerwise", "truncation"},
    {"nn", "linen"},
    {"models"},
    {"serialization"},
    {"memory", "checkpoint", "training"},
]
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
PACKAGES = {"kernels", "linen", "models", "nn"}  # their files may import one another
# Which of the project's folders each may import, besides itself.
FOLDERS = {
    "coat_jax": set(),
    "experiments": {"coat_jax"},
    "benchmarks": {"coat_jax"},
    "notebooks": {"coat_jax"},
}


def imported(source: str) -> list[str]:
    """Dotted names of everything imported anywhere; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(name: str, source: str) -> list[str]:
    """What module `name` of coat_jax imports from its own layer or above."""
    wrong = []
    for dotted in imported(source):
        package, _, rest = dotted.partition(".")
        if package != "coat_jax":
            continue
        other = rest.partition(".")[0]
        if other == name and name in PACKAGES:
            continue
        if other not in DEPTH or DEPTH[other] >= DEPTH[name]:
            wrong.append(dotted)
    return wrong


def astray(folder: str, source: str) -> list[str]:
    """What a file of `folder` imports from a folder it must not know."""
    others = (FOLDERS.keys() | {"tests"}) - FOLDERS[folder] - {folder}
    return [name for name in imported(source) if name.partition(".")[0] in others]


def _modules():
    for path in sorted((ROOT / "coat_jax").rglob("*.py")):
        name = path.relative_to(ROOT / "coat_jax").parts[0].removesuffix(".py")
        if name != "__init__":
            yield pytest.param(path, name, id=str(path.relative_to(ROOT)))


def _files():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield pytest.param(path, folder, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("path", "name"), [*_modules()])
def test_a_module_imports_only_from_lower_layers(path, name):
    assert name in DEPTH, f"{path}: give {name} a layer in LAYERS"
    assert upward(name, path.read_text()) == []


@pytest.mark.parametrize(("path", "folder"), [*_files()])
def test_a_folder_imports_only_the_library(path, folder):
    assert astray(folder, path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("quantize", "from coat_jax.formats import E4M3", []),
        ("quantize", "from coat_jax import formats", []),
        ("kernels", "from coat_jax.kernels import cases", []),
        ("expand", "from coat_jax import tensor_train", ["coat_jax.tensor_train"]),
        ("formats", "import coat_jax.optimizer", ["coat_jax.optimizer"]),
        ("moments", "from coat_jax.optimizer import f", ["coat_jax.optimizer.f"]),
        ("moments", "import coat_jax", ["coat_jax"]),
        ("moments", "def f():\n  from coat_jax import nn", ["coat_jax.nn"]),
    ],
)
def test_the_layer_check_sees_planted_imports(name, source, wrong):
    assert upward(name, source) == wrong


@pytest.mark.parametrize(
    ("folder", "source", "wrong"),
    [
        ("experiments", "from experiments import harness\nimport coat_jax", []),
        ("coat_jax", "from experiments import harness", ["experiments.harness"]),
        ("benchmarks", "import experiments.demo", ["experiments.demo"]),
        ("notebooks", "from tests.helpers import f", ["tests.helpers.f"]),
    ],
)
def test_the_folder_check_sees_planted_imports(folder, source, wrong):
    assert astray(folder, source) == wrong
