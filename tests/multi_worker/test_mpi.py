"""Workers that communicate by MPI, started by mpirun, if it is installed and MPITRAMPOLINE_LIB names its wrapper
(docs/how_to/mpi.md)."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(
        shutil.which("mpirun") is None or "MPITRAMPOLINE_LIB" not in os.environ,
        reason="needs mpirun and MPITRAMPOLINE_LIB",
    ),
]

PROGRAM = """
import logging, os, signal, sys
import numpy as np
import replicax as rx

logging.getLogger("replicax").addHandler(logging.StreamHandler())
logging.getLogger("replicax").setLevel(logging.INFO)
fault, victim = sys.argv[1:]
strategy = rx.MultiWorkerMirroredStrategy()
is_victim = strategy.cluster_resolver.task_id == int(victim)
numbers = strategy.experimental_distribute_values_from_function(
    lambda context: np.arange(3, dtype=np.float32) + context.replica_id_in_sync_group
)
for step in range(30):
    if step == 20 and is_victim and fault == "raises":
        raise ValueError("a mistake of my own")
    if step == 20 and is_victim and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    total = strategy.reduce("SUM", numbers, axis=None)
sys.stdout.write(f"total {np.asarray(total).tolist()}\\n")  # in one shard: mpirun mixes shards
sys.stdout.flush()
sys.exit(5 * (fault == "code"))
"""


def mpirun(tmp_path, *arguments, **environment):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "program.py"]
    return subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env={**os.environ, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def test_collectives_by_mpi(tmp_path):
    done = mpirun(tmp_path, "none", "0")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("total [1.0, 3.0, 5.0]") == 2, done.stdout
    assert done.stdout.count("collectives by MPI.") == 2, done.stdout
    assert "MPI_FINALIZE" not in done.stdout


def test_the_exit_code_is_kept(tmp_path):
    done = mpirun(tmp_path, "code", "0")
    assert done.returncode == 5, done.stdout
    # mpirun may lose the last lines of the other process when it ends it.
    assert "total [1.0, 3.0, 5.0]" in done.stdout, done.stdout
    assert "MPI_FINALIZE" not in done.stdout


@pytest.mark.parametrize("victim", ["0", "1"])
@pytest.mark.parametrize(("fault", "code"), [("raises", 1), ("killed", 128 + 9)])
def test_end_of_one_process_ends_all(tmp_path, fault, code, victim):
    done = mpirun(tmp_path, fault, victim)
    assert done.returncode == code, done.stdout
    assert "total" not in done.stdout
    if fault == "raises":
        assert "ValueError: a mistake of my own" in done.stdout


def test_two_devices_in_a_process_are_an_error(tmp_path):
    done = mpirun(tmp_path, "none", "0", JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 1, done.stdout
    assert "ClusterStartError: Each worker has 2 CPU devices" in done.stdout
