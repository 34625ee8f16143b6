"""Setup of the tests of GPUs, which `make test-gpu` runs with REPLICAX_TEST_PLATFORM=gpu; otherwise virtual CPU
devices replace the GPUs."""

import os
import sys
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "keras"), str(TESTS / "multi_worker")]
PLATFORM = os.environ.get("REPLICAX_TEST_PLATFORM", "cpu")


@pytest.fixture(scope="session")
def platform():
    return PLATFORM


@pytest.fixture(scope="session")
def names(platform):
    """The names of the devices under test: all GPUs, or three virtual CPU devices."""
    devices = jax.local_devices(backend=platform)
    return [f"{platform}:{index}" for index in range(len(devices) if platform == "gpu" else 3)]


@pytest.fixture(autouse=True)
def full_float32():
    """GPUs multiply float32 matrices with 10 bits of mantissa by default; here results are compared with those of a
    CPU."""
    with jax.default_matmul_precision("highest"):
        yield
