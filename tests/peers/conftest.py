"""Tests with libraries that replicax never depends on: TensorFlow, torch, Hugging Face datasets."""

import importlib.util
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

LIBRARIES = ("tensorflow", "torch", "torchdata", "datasets")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_collectionfinish() -> str | list[str]:
    if not MISSING:
        return []
    return (
        f"tests/peers is left out, as {', '.join(MISSING)} are not installed: it runs with `make test-peers`"
    )


@pytest.fixture
def strategy():
    """Two virtual devices."""
    import replicax as rx

    return rx.MirroredStrategy(["cpu:0", "cpu:1"])
