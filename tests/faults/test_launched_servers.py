"""`replicax launch` with parameter servers: any task is killed at any moment, and the final counts are exact."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checks import path_of_programs

pytestmark = pytest.mark.rest

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server_survives.py"


class Launched:
    """`replicax launch` of a script, its lines, and its tasks."""

    def __init__(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": path_of_programs(), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "replicax", "launch", "--plain", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.lines = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def said(self, text):
        return [line for line in list(self.lines) if text in line]

    def until(self, is_so, timeout_s=120.0):
        deadline = time.monotonic() + timeout_s
        while True:
            if is_over := self.process.poll() is not None:
                self._reading.join(10.0)
            if is_so():
                return
            assert not is_over, self.lines[-30:]
            assert time.monotonic() < deadline, self.lines[-30:]
            time.sleep(0.02)

    def pid(self, job, index=0):
        """The number of a task, which is the child of its guard; None if there is none."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        for pid, parent in parents.items():
            if parents.get(parent) != self.process.pid:
                continue
            with contextlib.suppress(OSError, StopIteration, ValueError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                config = next(v for v in variables if v.startswith(b"TF_CONFIG=")).partition(b"=")[2]
                if json.loads(config)["task"] == {"type": job, "index": index}:
                    return pid
        return None

    def kill(self, job, index=0):
        found = []
        self.until(lambda: found.append(self.pid(job, index)) or found[-1] is not None)
        os.kill(found[-1], signal.SIGKILL)

    def wait(self, timeout_s=120.0):
        """Returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self._reading.join(10.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reading.join(10.0)


@pytest.mark.timeout(200)
def test_a_worker_and_the_coordinator_are_killed(tmp_path):
    options = ["--workers", 2, "--ps", 2, "--max-restarts", 1, "--checkpoint-dir", tmp_path]
    with Launched(*options, EXAMPLE, "--rounds", 30) as job:
        job.until(lambda: job.said("round 2,"))
        job.kill("worker", 1)
        job.until(lambda: job.said("worker 1 was killed") and job.said("round 4,"))
        job.kill("chief")
        assert job.wait() == 0, job.lines
    assert job.lines[-1] == "chief 0  | 600 steps in 30 rounds", job.lines
    begins = [line for line in job.said("begins with round") if line.startswith("chief 0")]
    assert len(begins) == 2
    assert int(begins[1].split("round ")[1].split(",")[0]) >= 3
    assert job.said("this restart is not counted")
    assert len(job.said(" listens at ")) == 5  # the worker came back; and all waited for the next coordinator


COUNTS = """
import os, sys
import replicax as rx

strategy = rx.ParameterServerStrategy()
coordinator = rx.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    counts = [rx.Variable(0) for _ in range(3)]
    rounds = rx.Variable(0)
checkpoint = rx.Checkpoint(counts=counts, rounds=rounds)
manager = rx.CheckpointManager(checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2)
manager.restore_or_initialize()
print("begins with round", int(rounds), flush=True)

@rx.function
def step():
    for count in counts:
        count.assign_add(1)

while not os.path.exists(sys.argv[1]):
    for _ in range(10):
        coordinator.schedule(step)
    coordinator.join()
    rounds.assign_add(1)
    manager.save()
    print("round", int(rounds), flush=True)
manager.close()
print("counted", {int(count) - 10 * int(rounds) for count in counts}, flush=True)
coordinator.close()
"""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_any_task_is_killed_repeatedly(tmp_path):
    """Fifty times: workers, the coordinator and parameter servers, at random moments, also while they start."""
    script, stop, chance = tmp_path / "counts.py", tmp_path / "stop", random.Random(50)
    script.write_text(COUNTS)
    options = ["--workers", 2, "--ps", 2, "--max-restarts", 50, "--server-restarts", 50, "--grace", 3]
    tasks = [("worker", 0), ("worker", 1), ("chief", 0), ("ps", 0), ("ps", 1)]
    killed = []
    with Launched(*options, "--checkpoint-dir", tmp_path / "saved", script, stop) as job:
        job.until(lambda: job.said("| round"))
        while len(killed) < 50:
            if chance.random() < 0.8:  # else it may be that nothing was gained since the last one
                num_rounds = len(job.said("| round"))
                job.until(lambda: len(job.said("| round")) > num_rounds)  # noqa: B023
            time.sleep(chance.uniform(0.0, 1.0))
            task = chance.choices(tasks, [3, 3, 2, 1, 1])[0]
            with contextlib.suppress(ProcessLookupError):
                job.kill(*task)
                killed.append(task)
        stop.write_text("")
        assert job.wait(300.0) == 0, job.lines[-50:]
    assert job.lines[-1] == "chief 0  | counted {0}", job.lines[-50:]
    assert {job for job, _ in killed} == {"worker", "chief", "ps"}
    print(len(job.said("begins with round")), "starts,", job.said("| round")[-1])
