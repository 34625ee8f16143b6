"""Measures the seconds from ``kill -9`` of one of two workers to the next step of all, and where they go:
``replicax launch``, with a loop and with Keras's ``fit``, is compared with torchrun and the same model, in
alternating rounds.

    python benchmarks/recovery.py --rounds 5 --torch PYTHON_WITH_TORCH

CPU seconds are those of one worker from its start to the first step. If the machine is busy, they say more
than seconds. Keras imports scikit-learn and matplotlib if they are installed; in that case ``fit`` is also
measured without them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import recovery_marks

HERE = Path(__file__).parent
NUM_WORKERS, LIMIT_S, GOAL_S, MOST_FAILURES = 2, 60.0, 3.0, 12
LOOP, FIT, BARE_FIT, TORCH = (
    "replicax, loop",
    "replicax, Keras fit",
    "  without plots etc.",
    "torchrun, DDP",
)
COLUMNS = ("total", *recovery_marks.PARTS, "CPU")


class NotRecoveredError(Exception):
    """A job did not train, or did not train again. (Some of torchrun's jobs do not: gloo asks for the
    addresses of workers that have died.)"""


@dataclass
class Contestant:
    """What is measured, and what was.

    Attributes:
      command: The job.
      seconds: Of each job that trained again, its parts.
      num_failures: How many jobs did not.
    """

    command: Sequence[str]
    seconds: list[dict[str, float]] = field(default_factory=list)
    num_failures: int = 0

    def measure(self, number: int) -> None:
        """Runs one more job; returns None once ``MOST_FAILURES`` jobs have not trained again."""
        while len(self.seconds) <= number and self.num_failures < MOST_FAILURES:
            try:
                self.seconds.append(recover(self.command, victim=number % NUM_WORKERS))
            except NotRecoveredError as error:
                self.num_failures += 1
                print(error, file=sys.stderr)


def main() -> None:
    """Prints medians and spread of each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch")
    arguments = parser.parse_args()
    contestants = {LOOP: Contestant(_launched("loop")), FIT: Contestant(_launched("fit"))}
    if any(importlib.util.find_spec(name) for name in recovery_marks.NOT_NEEDED):
        contestants[BARE_FIT] = Contestant(_launched("bare_fit"))
    if arguments.torch is not None:
        contestants[TORCH] = Contestant(_torchrun(arguments.torch))
    names = [*contestants]
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].measure(number)
    report(contestants)


def _launched(how: str) -> list[str]:
    command = [sys.executable, "-m", "replicax", "launch", "--plain", "--workers", str(NUM_WORKERS)]
    command += ["--devices-per-worker", "1", "--max-restarts", "1", "--checkpoint-dir", "FOLDER"]
    return [*command, str(HERE / "recovery_replicax.py"), how]


def _torchrun(python: str) -> list[str]:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_WORKERS)]
    return [*command, "--max-restarts", "1", str(HERE / "recovery_torch.py")]


def recover(command: Sequence[str], victim: int) -> dict[str, float]:
    """Starts a job, kills a worker when it trains, and ends the job when it trains again.

    Returns:
      The seconds of each part until the last worker had done it, the total, and the CPU seconds of a worker.
    """
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        marks.touch()
        job = subprocess.Popen(
            [folder if word == "FOLDER" else word for word in command],
            env=_environment(folder, marks),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            ready = _wait_for(marks, recovery_marks.READY, 0, job)
            os.kill(next(told["pid"] for told in ready if told["rank"] == victim), signal.SIGKILL)
            at = killed_at = time.monotonic()
            _wait_for(marks, recovery_marks.READY, 1, job)
            seconds = {}
            for part in recovery_marks.PARTS:
                told = _told(marks, part, 1)
                seconds[part] = max(each["at"] for each in told) - at
                at += seconds[part]
            return {
                **seconds,
                "total": at - killed_at,
                "CPU": statistics.mean(each["cpu"] for each in told),
            }
        finally:
            job.terminate()
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def _environment(folder: str, marks: Path) -> dict[str, str]:
    # Python keeps compiled files, as it does for installed packages.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ours = {recovery_marks.MARKS: str(marks), recovery_marks.FOLDER: folder, "OMP_NUM_THREADS": "1"}
    return {**kept, **ours, "KERAS_BACKEND": "jax"}


def _told(marks: Path, name: str, attempt: int) -> list[dict]:
    """The marks that the workers have written; complete lines only."""
    lines = marks.read_text().split("\n")[:-1]
    told = [json.loads(line) for line in lines]
    return [each for each in told if (each["name"], each["attempt"]) == (name, attempt)]


def _wait_for(marks: Path, name: str, attempt: int, job: subprocess.Popen) -> list[dict]:
    deadline = time.monotonic() + LIMIT_S
    while len(told := _told(marks, name, attempt)) < NUM_WORKERS:
        if job.poll() is not None or time.monotonic() > deadline:
            told = f"{job.args} ended with {job.poll()}, before {name} of attempt {attempt}."
            raise NotRecoveredError(told)
        time.sleep(0.01)
    return told


def report(contestants: dict[str, Contestant]) -> None:
    print(f"\nSeconds from kill -9 of one of {NUM_WORKERS} workers to the next step of all")
    print(f"  {'':22}{''.join(f'{name:>18}' for name in COLUMNS)}")
    for name, contestant in contestants.items():
        cells = [_cell([each[column] for each in contestant.seconds]) for column in COLUMNS]
        print(f"  {name:22}{''.join(f'{cell:>18}' for cell in cells)}")
        if contestant.num_failures:
            print(f"  {'':22}{contestant.num_failures} more did not train again")
    for name, contestant in contestants.items():
        if name != TORCH and contestant.seconds:
            median = statistics.median(each["total"] for each in contestant.seconds)
            print(f"  {name.strip()}: {'within' if median <= GOAL_S else 'over'} the goal of {GOAL_S:g} s")
    if TORCH in contestants and contestants[TORCH].seconds:
        totals = [[each["total"] for each in contestants[name].seconds] for name in (LOOP, TORCH)]
        print(f"  {LOOP} × {TORCH}: median of pairs {_cell([a / b for a, b in zip(*totals, strict=False)])}")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.2f} [{min(values):.2f}–{max(values):.2f}]"


if __name__ == "__main__":
    main()
