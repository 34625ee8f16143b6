"""Tests with libraries that replicax never depends on: TensorFlow, torch, Hugging Face datasets, keras_hub, tuners."""

import importlib.util
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

LIBRARIES = ("tensorflow", "torch", "torchdata", "datasets")
OTHERS = {"test_keras_hub.py": ("keras_hub",), "test_tuners.py": ("keras_tuner", "optuna")}
NEEDS = {
    path.name: OTHERS.get(path.name, LIBRARIES) for path in pathlib.Path(__file__).parent.glob("test_*.py")
}
MISSING = [name for name in (*LIBRARIES, *sum(OTHERS.values(), ())) if importlib.util.find_spec(name) is None]

collect_ignore = [file for file, names in NEEDS.items() if set(names) & set(MISSING)]


def pytest_report_collectionfinish() -> str | list[str]:
    if not MISSING:
        return []
    return (
        f"of tests/peers {len(collect_ignore)} files are left out, as {', '.join(MISSING)} are not installed: they run with "
        "`make test-peers`"
    )


@pytest.fixture
def strategy():
    """Two virtual devices."""
    import replicax as rx

    return rx.MirroredStrategy(["cpu:0", "cpu:1"])
