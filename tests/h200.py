"""Compiling for NVIDIA H200s in tests: `benchmarks.h200`, or a reason to skip."""

import os

import pytest

from benchmarks.h200 import TARGET as TARGET
from benchmarks.h200 import UNKNOWN_TO_0_10 as UNKNOWN_TO_0_10
from benchmarks.h200 import compile_for as compile_for
from benchmarks.h200 import mesh as mesh
from benchmarks.h200 import missing as missing
from benchmarks.h200 import target_config as target_config


def require(reason: str | None = None, *, ci: bool | None = None):
    """Skips the test where nothing can be compiled; in CI that is a failure."""
    reason = reason or missing()
    if reason is None:
        return
    if os.environ.get("CI") == "true" if ci is None else ci:
        pytest.fail(f"CI must compile for the H200, but: {reason}")
    pytest.skip(f"cannot compile for the H200: {reason}")
