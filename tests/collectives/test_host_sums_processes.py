"""Sums over real processes: members are killed and stopped, survivors adopt their replicas, and no bit changes."""

import contextlib
import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crowds import SharedFiles
from sum_member import array_of, digest

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 90.0
SOON_S = 40.0  # what takes milliseconds on a quiet machine
SCRIPT = Path(__file__).with_name("sum_member.py")


class Job:
    """Some member processes, and the rules of a controller in short: who lives forms the next epoch.

    With ``pause_step`` they wait before this step until ``go_on``, so that no process is done before a victim is dead.
    """

    def __init__(self, transport, num_members, num_steps, length, pause_step=-1):
        self.num_steps, self.length, self.num_replicas = num_steps, length, num_members
        self.messages = queue.Queue()
        self.processes = {}
        self.addresses, self.digests, self.reports = {}, {}, {}
        self.epoch = 0
        for number in range(num_members):
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), transport, str(num_steps), str(length), str(pause_step)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.processes[number] = process
            threading.Thread(target=self._read, args=(number, process.stdout), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdin.close()

    def _read(self, number, lines):
        with contextlib.closing(lines):
            for line in lines:
                self.messages.put((number, json.loads(line)))
        self.messages.put((number, {"kind": "gone"}))

    def hear(self, until=None):
        """Takes the next message, and checks the sums in it."""
        left_s = LIMIT_S if until is None else max(0.0, until - time.monotonic())
        number, message = self.messages.get(timeout=left_s)
        if message["kind"] == "sum":
            self.digests.setdefault(message["step"], set()).add(message["digest"])
        elif message["kind"] == "address":
            self.addresses[number] = message["address"]
        elif message["kind"] in ("ended", "done"):
            self.reports[number, message["epoch"]] = message
        return number, message

    def reports_of(self, numbers, kinds=("ended", "done")):
        """Waits until each of ``numbers`` has said how the epoch ended for it."""
        until = time.monotonic() + LIMIT_S
        while any((number, self.epoch) not in self.reports for number in numbers):
            self.hear(until)
        reports = {number: self.reports[number, self.epoch] for number in numbers}
        assert {report["kind"] for report in reports.values()} <= set(kinds), reports
        return reports

    def start(self):
        until = time.monotonic() + LIMIT_S
        while len(self.addresses) < len(self.processes):
            self.hear(until)
        self.form(list(self.processes), step=0)

    def form(self, live, step):
        """The lowest live member adopts all replicas that nobody holds."""
        self.epoch += 1
        lost = sorted(set(range(self.num_replicas)) - set(live))
        members = [
            [number, self.addresses[number], sorted([number, *(lost if number == min(live) else [])])]
            for number in live
        ]
        for number in live:
            self.tell(number, kind="meet", epoch=self.epoch, number=number, step=step, members=members)

    def tell(self, to, **message):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self.processes[to].stdin, flush=True)

    def go_on(self):
        for number in self.processes:
            self.tell(number, kind="go on")

    def end(self, live, reason):
        """Ends the epoch, and gives the last messages of the live members."""
        for number in live:
            self.tell(number, kind="end", epoch=self.epoch, reason=reason)
        return self.reports_of(live)

    def check(self):
        """All members have the same sums of all steps, and those are the loop's."""
        for step in range(self.num_steps):
            total = array_of(step, 0, self.length)
            for replica in range(1, self.num_replicas):
                total = total + array_of(step, replica, self.length)
            assert self.digests[step] == {digest(total)}


@pytest.mark.parametrize("transport", ["shared memory", "connections"])
def test_processes_go_on_with_the_same_bits_after_a_kill(transport):
    files = SharedFiles()
    with Job(transport, 3, num_steps=30, length=100_003, pause_step=20) as job:
        job.start()
        while job.hear()[1] != {"kind": "step", "step": 10}:
            pass
        job.processes[1].kill()
        start = time.monotonic()
        job.go_on()
        heard = job.reports_of([0, 2], ["ended"])  # without any word of the controller
        assert time.monotonic() - start < SOON_S
        assert 1 in {message["lost"] for message in heard.values()}, heard
        job.form([0, 2], step=min(message["step"] for message in heard.values()))
        job.reports_of([0, 2], ["done"])
        job.check()
    files.check()


@pytest.mark.parametrize("transport", ["shared memory", "connections"])
def test_a_stopped_member_that_was_given_up_finds_its_world_closed(transport):
    with Job(transport, 3, num_steps=30, length=100_003, pause_step=20) as job:
        job.start()
        while job.hear()[1] != {"kind": "step", "step": 10}:
            pass
        job.processes[2].send_signal(signal.SIGSTOP)
        job.go_on()
        heard = job.end([0, 1], "worker 2 is silent")
        job.form([0, 1], step=min(message["step"] for message in heard.values()))
        job.reports_of([0, 1], ["done"])
        job.processes[2].send_signal(signal.SIGCONT)
        until = time.monotonic() + LIMIT_S
        while (2, 1) not in job.reports:
            job.hear(until)
        assert job.reports[2, 1]["kind"] == "ended"
        job.check()


@pytest.mark.rest
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 6))]
)
@pytest.mark.parametrize("transport", ["shared memory", "connections"])
def test_processes_go_on_with_the_same_bits_after_kills_at_random_moments(transport, seed):
    choice = random.Random(f"{transport} {seed}")
    length = choice.choice([5, 20_000, 1_100_000])
    with Job(transport, 4, num_steps=40, length=length) as job:
        job.start()
        live = list(job.processes)
        for _ in range(3):
            until = time.monotonic() + choice.uniform(0, 0.3)
            with contextlib.suppress(queue.Empty):
                while True:
                    job.hear(until)
            victim = live.pop(choice.randrange(len(live)))
            job.processes[victim].kill()
            heard = job.end(live, f"worker {victim} has died")
            job.form(live, step=min(message["step"] for message in heard.values()))
        job.reports_of(live, ["done"])
        job.check()
