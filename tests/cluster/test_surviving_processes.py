"""Real processes that tolerate failures: they gather values, and some of them are killed. They compute nothing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checks import path_of_programs
from replicax._src.cluster.machine_layout import free_ports

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux"),
]
PATIENCE_S = 100
TESTS = Path(__file__).parents[1]

GATHERS = """
import os, sys, time
from pathlib import Path
from epoch_owner import EpochOwner
from replicax._src.cluster.detect import choose_resolver
from replicax._src.strategies.joining import join_survivors
import replicax as rx

until, raises_at = Path(os.environ["UNTIL"]), int(os.environ.get("RAISES_AT", -1))
peers = join_survivors(choose_resolver().membership, 60.0, 1)
owner = EpochOwner(peers.channel, peers.number)
peers.at_end = owner.finish
if peers.channel.is_newcomer:
    owner.enter()
else:
    owner.start()
is_over, step = False, owner.member.version
while not is_over:
    peers.serve()
    if peers.channel.standing.waiting and rx.is_chief():
        owner.admit()
    if peers.is_solo:  # its first step; the others gather without it before theirs
        owner.commit()
        step += 1
    gathered = peers.gather("step", [step, until.exists()], "to test")
    assert all(theirs == step for theirs, _ in gathered), gathered
    is_over = all(wants_end for _, wants_end in gathered)
    print(step, *gathered.numbers, "chief" * rx.is_chief(), flush=True)
    if step == raises_at:
        raise ValueError("a bug")
    if owner.member.must_compare:
        print("entered", flush=True)
    owner.commit()
    step += 1
    time.sleep(0.02)
"""


class Job:
    """The processes of a job, by number, with what they have printed."""

    def __init__(self, folder):
        self.folder, self.until = folder, folder / "until"
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.processes = {}

    def start(self, number, program=GATHERS, **environment):
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": number}}
        of_process = {
            **os.environ,
            "TF_CONFIG": json.dumps(task),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONPATH": os.pathsep.join([path_of_programs(), str(TESTS)]),
            "UNTIL": str(self.until),
            **environment,
        }
        with self._file(number).open("w") as file:
            self.processes[number] = subprocess.Popen(
                [sys.executable, "-u", "-c", program], env=of_process, stdout=file, stderr=subprocess.STDOUT
            )

    def text(self, number):
        return self._file(number).read_text()

    def wait_for_gather(self, number, *members, step=r"\d+", is_chief=False):
        """Waits until a process has gathered values with these members; in this step, or in any."""
        line = " ".join([step, *map(str, members), "chief" if is_chief else ""])
        self.wait_for_line(number, line)

    def wait_for_line(self, number, line):
        """Waits for a complete line: that of members 1 and 2 is also the end of that of 0, 1 and 2."""
        until = time.monotonic() + PATIENCE_S
        while not re.search(f"^{line}$", self.text(number), re.MULTILINE):
            assert time.monotonic() < until, f"worker {number} does not print {line!r}: {self.text(number)}"
            time.sleep(0.05)

    def wait(self, number):
        return self.processes[number].wait(PATIENCE_S)

    def wait_for_end(self, number):
        assert self.wait(number) == 0, f"worker {number} ends with {self.wait(number)}: {self.text(number)}"

    def has_no_controller(self):
        """Waits until the job's controller has ended."""
        until = time.monotonic() + PATIENCE_S
        while self._has_controller():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def _has_controller(self):
        """Looks for a controller with a variable of this job."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_controller = b"controller_process" in (entry / "cmdline").read_bytes()
                if is_controller and str(self.until).encode() in (entry / "environ").read_bytes():
                    return True
        return False

    def _file(self, number):
        return self.folder / f"{number}.txt"


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for process in job.processes.values():
        process.kill()
        process.wait()
    assert job.has_no_controller(), "the controller stays behind"


def test_processes_continue_when_others_are_killed_worker_0_too(job):
    for number in range(3):
        job.start(number)
    job.wait_for_gather(2, 0, 1, 2, step="3")
    job.processes[0].kill()
    job.wait_for_gather(1, 1, 2, is_chief=True)
    job.processes[1].kill()
    job.wait_for_gather(2, 2, is_chief=True)
    job.until.touch()
    job.wait_for_end(2)
    assert job.has_no_controller()
    steps = [int(line.split()[0]) for line in job.text(2).splitlines() if line[:1].isdigit()]
    assert steps == list(range(len(steps)))


@pytest.mark.rest
def test_error_of_worker_0_is_its_own(job):
    job.start(0, RAISES_AT="3")
    for number in (1, 2):
        job.start(number)
    assert job.wait(0) == 1  # at once, although the others still need the controller
    assert "ValueError: a bug" in job.text(0)
    for number in (1, 2):
        job.wait_for_gather(number, 1, 2, is_chief=number == 1)
    job.until.touch()
    for number in (1, 2):
        job.wait_for_end(number)


@pytest.mark.rest
def test_nothing_is_left_of_a_job_that_is_killed(job):
    for number in range(3):
        job.start(number)
    job.wait_for_gather(2, 0, 1, 2, step="3")
    for process in job.processes.values():
        process.kill()
    assert job.has_no_controller()


@pytest.mark.rest
def test_process_that_was_stopped_ends_itself_when_it_wakes(job):
    for number in range(3):
        job.start(number, REPLICAX_SILENCE_TIMEOUT_S="3")
    job.wait_for_gather(2, 0, 1, 2, step="3")
    job.processes[1].send_signal(signal.SIGSTOP)
    job.wait_for_gather(0, 0, 2, is_chief=True)
    job.processes[1].send_signal(signal.SIGCONT)
    assert job.wait(1) == 1
    assert "PeerFailureError: worker 1 was silent for too long" in job.text(1)
    job.until.touch()
    for number in (0, 2):
        job.wait_for_end(number)


@pytest.mark.rest
def test_start_without_a_worker_names_it(job):
    for number in (0, 1):
        job.start(number, REPLICAX_START_TIMEOUT_S="6" if number == 0 else "60")
    assert [job.wait(number) for number in (0, 1)] == [1, 1]
    assert "ClusterStartError: worker 0 waited" in job.text(0)
    assert "worker 2 (has not come)" in job.text(0)
    assert "ClusterStartError: worker 0 ended before all tasks had started" in job.text(1)


@pytest.mark.rest
@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.long)])
def test_new_process_in_the_place_of_a_dead_one_enters_and_takes_part(job, late):
    others = sorted({0, 1, 2} - {late})
    for number in range(3):
        job.start(number)
    job.wait_for_gather(2, 0, 1, 2, step="3")
    job.processes[late].kill()
    job.wait_for_gather(2, *others)
    job.processes[late].wait()
    job.start(late)
    for number in range(3):
        if number == late:
            job.wait_for_gather(number, 0, 1, 2, is_chief=number == 0)
        else:
            job.wait_for_line(number, "entered")
    job.until.touch()
    for number in range(3):
        job.wait_for_end(number)
    last = [[*map(str.split, job.text(number).splitlines())][-1] for number in range(3)]
    assert [each[1:] for each in last] == [["0", "1", "2", "chief"], ["0", "1", "2"], ["0", "1", "2"]]


@pytest.mark.rest
def test_replacement_that_comes_after_the_end_ends_with_an_error(job):
    for number in range(3):
        job.start(number)
    job.wait_for_gather(2, 0, 1, 2, step="3")
    job.processes[0].kill()
    job.processes[0].wait()
    job.until.touch()
    for number in (1, 2):
        job.wait_for_end(number)
    job.start(0, REPLICAX_REPLACEMENT="1", REPLICAX_START_TIMEOUT_S="5")
    assert job.wait(0) == 1
    assert "ClusterStartError: worker 0 waited" in job.text(0)
