"""Plans for TPUs and GPUs need their compilers, which `make test-plan` installs. Tests here import ``logical_training``
from this folder."""

import importlib.util
import os
import sys
from pathlib import Path

from replicax._src.devices.hardware import GPU_VARIABLE

sys.path.insert(0, str(Path(__file__).parent))

MISSING = [name for name in ("libtpu", "jax_cuda12_plugin") if importlib.util.find_spec(name) is None]
IS_LEFT_OUT = bool(MISSING) or not os.environ.get(GPU_VARIABLE)

collect_ignore_glob = ["test_accelerators*.py"] if IS_LEFT_OUT else []


def pytest_report_collectionfinish() -> str | list[str]:
    return "tests/plan is without TPUs and GPUs, which run with `make test-plan`" if IS_LEFT_OUT else []
