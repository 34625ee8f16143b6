"""The launcher ends the servers of a script."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(180)
SCRIPT_WITHOUT_ELSE = """
import atexit, sys, time
import jax, jax.numpy as jnp
import replicax as rx

resolver = rx.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = rx.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id)
    atexit.register(print, "atexit")
    server.join()
print("the coordinator's part", flush=True)
strategy = rx.ParameterServerStrategy(resolver)
with strategy.scope():
    scale = rx.Variable(0.1)

def long_step():
    scaled = lambda _, x: jnp.sin(x * scale.value)
    return jax.lax.fori_loop(0, 1_000_000_000, scaled, jnp.ones((64, 64))).sum()

coordinator = rx.coordinator.ClusterCoordinator(strategy)
coordinator.schedule(long_step)
while not any(worker["in_flight"] for worker in coordinator.statistics()["workers"].values()):
    time.sleep(0.05)
time.sleep(1)
import os
os._exit(0)
"""


@pytest.mark.rest
def test_launcher_ends_the_servers_of_a_script_in_order(tmp_path):
    """Also a worker that runs a long program, which nothing can interrupt."""
    (tmp_path / "train.py").write_text(SCRIPT_WITHOUT_ELSE)
    command = ["launch", "--plain", "--workers", "1", "--ps", "1", "--script-in", "all"]
    done = subprocess.run(
        [sys.executable, "-m", "replicax", *command, str(tmp_path / "train.py")],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "WARNING" not in line]
    assert lines.pop(0) == "chief 0  | the coordinator's part"
    assert sorted(line for line in lines if "did not end within" not in line) == [
        "ps 0     | atexit",
        "worker 0 | atexit",
    ]
    assert "first to fail" not in done.stderr
