"""Processes on one host, each with its own GPUs: NCCL connects GPUs, gloo the CPU devices that replace them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checks import path_of_programs
from launched_jobs import LaunchedJob, getting_stuck
from replicax.testing import LocalCluster

pytestmark = [pytest.mark.rest, pytest.mark.timeout(280)]

MULTI_WORKER = Path(__file__).parents[1] / "multi_worker"


def training_on_a_device_of_its_own():
    import json
    import os

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[index]

    import jax

    from programs import training
    from replicax.testing import report

    training("37,8", "3,2")
    report(platforms=[device.platform for device in jax.local_devices()], number=len(jax.devices()))


@pytest.fixture
def environment(platform):
    chosen = {"JAX_PLATFORMS": "cuda,cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return {
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": path_of_programs(MULTI_WORKER, *filter(None, [os.environ.get("PYTHONPATH")])),
        **(chosen if platform == "gpu" else {}),
    }


def reports(environment, num_workers):
    with LocalCluster(num_workers, environment=environment, timeout_s=250) as cluster:
        cluster.start(training_on_a_device_of_its_own)
        results = cluster.wait()
        results.raise_if_failed()
    return [result.report for result in results.values()]


@pytest.mark.long  # with CPU devices, tests/multi_worker/test_multi_worker_mirrored.py has the same
def test_two_processes_train_as_one(environment, names, platform):
    if len(names) < 2:
        pytest.skip("needs two GPUs")
    (expected,) = reports(environment, 1)
    for got in reports(environment, 2):
        assert (got["platforms"], got["number"]) == ([platform], 2)
        for rows in ("37,8", "3,2"):
            np.testing.assert_allclose(got[rows]["losses"], expected[rows]["losses"], rtol=1e-4)
            for weight, wanted in zip(got[rows]["weights"], expected[rows]["weights"], strict=True):
                np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=1e-5)


def test_workers_that_hang_in_nccl_end_and_restart(environment, names, platform, tmp_path, monkeypatch):
    """Worker 0 waits in an all-reduce for worker 1, which is alive and does not come."""
    if platform != "gpu" or len(names) < 2:
        pytest.skip("needs two GPUs; tests/faults/test_stuck.py has the same on CPUs")
    for name, value in {**environment, "REPLICAX_STUCK_TIMEOUT_S": "10"}.items():
        monkeypatch.setenv(name, value)
    with LaunchedJob(tmp_path, getting_stuck, "", max_restarts=1, devices="--gpus-per-worker") as job:
        assert job.wait(250) == 0, job.text()
    assert sorted(job.printed("total")) == [("worker 0", "2.0"), ("worker 1", "2.0")]
    assert "which does not end: worker 1 is in its program number" in job.text(1000)
    assert "The waiting step cannot be interrupted, so this process ends." in job.text(1000)


LAUNCHED = """
import os
import jax, numpy as np
import replicax as rx
strategy = rx.MultiWorkerMirroredStrategy()
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
total = strategy.reduce("SUM", ones, axis=None)
devices = [device.platform for device in jax.local_devices()]
print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), *devices, "total", float(total), flush=True)
"""


def test_launch_gives_each_worker_its_own_gpu(environment, names, platform, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(LAUNCHED)
    num_workers = min(2, len(names))
    option = "--gpus-per-worker" if platform == "gpu" else "--devices-per-worker"
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", str(num_workers), option, "1", str(script)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.findall(rf"sees (\S+) {platform} total {float(num_workers)}", done.stdout)
    assert len(seen) == num_workers, done.stdout
    if platform == "gpu":
        assert len(set(seen)) == num_workers, "each has another GPU"
