"""A launcher on each host restarts its own task, and the runs do not mix."""

import subprocess
import sys

import pytest

from replicax._src.cluster.machine_layout import free_ports

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]
LIMIT_S = 150

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
index = strategy.cluster_resolver.task_id
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

def step():
    run = strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(ones,))
    return float(strategy.reduce("MEAN", run, axis=None))

print("the sum is", step())
if os.environ["REPLICAX_RESTART_COUNT"] == "0":
    if index == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(6)  # it is here still when the other starts again
    step()
"""


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_launchers_on_two_hosts_start_again_one_by_one(tmp_path, victim):
    """Each failure costs each launcher one restart, and no more."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    options = ["--hosts", hosts, "--max-restarts", "1", "--plain", "--devices-per-worker", "1"]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "replicax", "launch", *options]
            + ["--task-index", str(index), str(script), str(victim)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for launcher in launchers:
            printed, _ = launcher.communicate(timeout=LIMIT_S)
            assert launcher.returncode == 0, printed
            assert printed.rstrip().endswith("the sum is 2.0"), printed
            assert printed.count("Starting all tasks again: restart 1 of 1") == 1
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
            launcher.stdout.close()
