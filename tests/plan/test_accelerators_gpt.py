"""The plan of ``examples/small_gpt.py`` with seven billion parameters, whose layouts nobody wrote."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "small_gpt.py"
NUM_PARAMETERS = 32 * 12 * 4096**2 + 2 * 32_000 * 4096  # without norms, biases and places, which are few
GIB = 1 << 30


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "memory"), [("h100:32x8", 79 * GIB), ("v5p:4x8x8", 95 * GIB)])
def test_seven_billion_parameters_fit_on_256_devices(topology, memory):
    options = ["--json", "--limit", "800", "--topology", topology, "--global-batch", "256"]
    of_script = [str(SCRIPT), "train", "--size", "7b", "--devices-per-replica", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "plan", *options, *of_script],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["num_devices"], facts["rows_per_replica"]) == (256, 4)
    held = sum(array["device_bytes"] for array in facts["arrays"] if array["role"] == "variable")
    even = 3 * 4 * NUM_PARAMETERS / 256  # Adam has two slots of each
    assert even < held < 1.06 * even
    assert facts["memory"]["peak"] < memory
