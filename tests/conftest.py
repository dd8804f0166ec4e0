"""Fixtures of all tests, and how many cases hypothesis draws."""

import os

import jax
import pytest

from tests import h200

try:
    import hypothesis
except ImportError:  # a GPU machine may hold fewer packages; only the drawn cases skip
    hypothesis = None

if hypothesis is not None:
    # No deadline: the first call of a jitted function compiles. CI draws the same cases
    # each time, so that it is not flaky; the soak run looks for new ones.
    _settings = hypothesis.settings
    _settings.register_profile("dev", deadline=None)
    _settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    _settings.register_profile("soak", deadline=None, max_examples=20_000)
    _default = "ci" if os.environ.get("CI") == "true" else "dev"
    _settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", _default))


@pytest.fixture
def optax_promotion():
    """Standard promotion: optax's bias correction computes float ** int32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def h200_compile():
    """`tests.h200.compile_for`, where it can run."""
    h200.require()
    return h200.compile_for


@pytest.fixture(scope="session")
def h200_mesh():
    """`tests.h200.mesh`, where it can run."""
    h200.require()
    return h200.mesh
