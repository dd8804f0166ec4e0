"""Settings under which every test and doctest runs: devices, promotion, checked shapes.

It stands at the root, not in tests/, because the library's doctests need it too.
"""

import importlib.util
import os
import sys

import pytest

# Before JAX is imported: it reads both once. What the user has set stays.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import jax  # noqa: E402

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _check_shapes():
    """Has jaxtyping and beartype check every annotated call of the library."""
    missing = [n for n in ("jaxtyping", "beartype") if not importlib.util.find_spec(n)]
    if missing and os.environ.get("CI") == "true":
        raise pytest.UsageError(f"CI must check shapes, but has no {missing}")
    if missing:
        return
    if "coat_jax" in sys.modules:
        raise pytest.UsageError(
            "coat_jax was imported before its checks were installed"
        )
    import jaxtyping

    jaxtyping.install_import_hook("coat_jax", "beartype.beartype")


_check_shapes()
pytest.register_assert_rewrite("tests.helpers", "tests.h200")


@pytest.fixture(autouse=True)
def _doctest_promotion(request):
    """A doctest shows what a user sees, so it runs under JAX's own defaults."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
