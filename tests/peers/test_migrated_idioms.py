"""TensorFlow programs, and their translations by `replicax migrate`, print the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IDIOMS = sorted((Path(__file__).parents[1] / "migrate" / "idioms").glob("*/printed.txt"))
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("program", ["before.py", "after.py"])
@pytest.mark.parametrize("printed", IDIOMS, ids=lambda path: path.parent.name)
def test_an_idiom_prints_what_is_recorded(printed, program):
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, str(printed.with_name(program))], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == printed.read_text()
