"""``replicax launch`` and a strategy that fails on one worker: the named worker, and the launcher's exit code."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]

SCRIPT = """
import sys

import numpy as np
import replicax as rx

victim, how = sys.argv[1:]
strategy = rx.MultiWorkerMirroredStrategy()
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

def step(x):
    return rx.get_replica_context().all_reduce("SUM", x)

for number in range(100):
    if number == 5 and strategy.cluster_resolver.task_id == int(victim):
        if how == "exits":
            sys.exit(7)
        raise ValueError("a mistake of my own")
    strategy.run(step, args=(ones,))
"""


@pytest.mark.parametrize(
    ("victim", "how", "code"),
    [
        (0, "raises", 1),
        (1, "exits", 7),
        pytest.param(0, "exits", 7, marks=pytest.mark.long),
        pytest.param(1, "raises", 1, marks=pytest.mark.long),
    ],
)
def test_failing_worker_is_named_and_not_its_followers(tmp_path, victim, how, code):
    """This includes worker 0, whose process ends after the others', because they need the service beside it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", "2", str(path), str(victim), how],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert result.returncode == code, result.stderr
    assert f"worker {victim} exited with code {code}, the first to fail" in result.stderr
    last = result.stderr.partition("the first to fail. Its last lines:\n")[2]
    assert ("a mistake of my own" in last) == (how == "raises")
    assert "PeerFailureError" not in last
    other = [line for line in result.stdout.splitlines() if line.startswith(f"worker {1 - victim}")]
    assert any("PeerFailureError" in line for line in other)
