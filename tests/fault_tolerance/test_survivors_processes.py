"""Survivors over real processes: any of them is killed, worker 0 too, and the others end with the same bits."""

import contextlib
import hashlib
import json
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from number_steps import undisturbed
from replicax._src.cluster.machine_layout import free_ports

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 90.0
SCRIPT = Path(__file__).with_name("surviving_member.py")


class Processes:
    """Some processes of one training, and what they say.

    Attributes:
      says: Their messages, by number.
      killed_at: The times of kills, on the clock that the processes share.
    """

    def __init__(self, num_workers, num_steps, length, waits=()):
        """
        Args:
          waits: The steps after which the chief waits until a replacement asks to enter.
        """
        self.num_steps, self.length = num_steps, length
        addresses = json.dumps([f"127.0.0.1:{port}" for port in free_ports(num_workers)])
        self.arguments = [addresses, num_steps, length, *waits]
        self.says = [[] for _ in range(num_workers)]
        self.messages = queue.Queue()
        self.killed_at = {}
        self.processes, self.errors, self.threads = [None] * num_workers, [[] for _ in range(num_workers)], []
        for number in range(num_workers):
            self.start(number)

    def start(self, number):
        """Starts a task; again, if it has died."""
        addresses, *others = self.arguments
        environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        process = self.processes[number] = subprocess.Popen(
            [sys.executable, str(SCRIPT), addresses, str(number), *map(str, others)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "JAX_PLATFORMS": "cpu"},
        )
        for read, stream in ((self.read, process.stdout), (self.read_errors, process.stderr)):
            self.threads.append(threading.Thread(target=read, args=(number, stream), daemon=True))
            self.threads[-1].start()

    def start_again(self, number):
        """Starts a task that was killed. It has to end well again."""
        self.processes[number].wait(LIMIT_S)
        del self.killed_at[number]
        self.start(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        for thread in self.threads:
            thread.join(LIMIT_S)

    def read(self, number, stream):
        with contextlib.closing(stream) as lines:
            for line in lines:
                self.messages.put((number, json.loads(line)))

    def read_errors(self, number, stream):
        with contextlib.closing(stream) as lines:
            self.errors[number] += lines

    def wait_for(self, number, **says):
        """Waits until a process says something."""
        until = time.monotonic() + LIMIT_S
        while not any(says.items() <= message.items() for message in self.says[number]):
            try:
                sender, message = self.messages.get(timeout=until - time.monotonic())
            except queue.Empty:
                raise AssertionError("\n".join(map("".join, self.errors))) from None
            self.says[sender].append(message)

    def kill(self, number):
        self.killed_at[number] = time.monotonic()
        self.processes[number].kill()

    def check_the_end(self):
        """All that were not killed end well, with the bits of the run that nothing disturbed."""
        expected = undisturbed(len(self.processes), self.num_steps, self.length)
        digest = hashlib.sha256(expected.tobytes()).hexdigest()
        for number, process in enumerate(self.processes):
            if number not in self.killed_at:
                self.wait_for(number, digest=digest)
                code = process.wait(LIMIT_S)
                assert code == 0, "".join(self.errors[number])
        for thread in self.threads:
            thread.join(LIMIT_S)  # they read the rest of the log

    def first_after_kills(self):
        """The time until a step was committed in a later epoch, in seconds."""
        ends = [
            message for says in self.says for message in says if "ends" in message and message["epoch"] > 1
        ]
        return min(message["at"] for message in ends) - min(self.killed_at.values())


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.rest)])
def test_two_processes_finish_the_training_of_three_with_the_same_bits(victim):
    with Processes(3, num_steps=60, length=20_000) as job:
        job.wait_for(victim, begins=20)
        job.kill(victim)
        job.check_the_end()
        chief = 1 if victim == 0 else 0
        text = "".join(job.errors[chief])
        assert f"orker {victim} died " in text, text
        assert f"orker {chief if victim else 1} adopted its replica" in text
        print(f"A step was committed {job.first_after_kills():.3f} s after the kill.")


@pytest.mark.rest
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_processes_that_are_killed_at_random_moments_leave_the_same_bits(seed):
    choice = random.Random(seed)
    with Processes(4, num_steps=80, length=choice.choice([5, 20_000, 400_000])) as job:
        victims = choice.sample(range(4), choice.choice([2, 3]))
        for victim in victims:
            job.wait_for(victim, begins=choice.randrange(1, 60))
            time.sleep(choice.choice([0, 0.001, 0.01]))
            job.kill(victim)
        job.check_the_end()


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.rest)])
def test_a_task_that_is_killed_and_started_again_by_hand_takes_its_replica_back(victim):
    with Processes(3, 60, 20_000, waits=[40]) as job:
        job.wait_for(victim, begins=20)
        job.kill(victim)
        job.start_again(victim)
        job.check_the_end()
        assert any("enters" in message for message in job.says[victim])
        chief = 1 if victim == 0 else 0
        text = "".join(job.errors[chief])
        adopter = chief if victim else 1
        assert re.search(
            rf"orker {victim} is back in the step to train: it took replica {victim} back from worker {adopter} ",
            text,
        ), text
        assert job.says[victim][-1]["members"] == [0, 1, 2]


@pytest.mark.rest
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_processes_that_are_killed_and_started_again_at_random_moments_leave_the_same_bits(seed):
    choice = random.Random(seed)
    with Processes(4, 120, choice.choice([5, 20_000, 400_000]), waits=[50, 100]) as job:
        for step in (1, 51):
            victim = choice.randrange(4)
            job.wait_for(victim, begins=step + choice.randrange(40))
            time.sleep(choice.choice([0, 0.001, 0.01]))
            job.kill(victim)
            job.start_again(victim)
        job.check_the_end()
