"""Measures fault tolerance: a step of ``fit`` without failures beside the same program without fault tolerance, in
alternating rounds; and the seconds from ``kill -9`` of a worker to the end of the repeated step.

``make bench`` runs it with the others; ``python benchmarks/survivors.py --help`` alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import final

sys.path.insert(0, str(Path(__file__).parent))

import fit_process
import multi_worker
import workers
from workers import Contestant

HERE = Path(__file__).parent
TOLERANT, TODAY = "fault tolerance", "JAX's own engine, gloo"
MODELS = {next(iter(fit_process.DENSE)): 1.1, fit_process.LARGE: 1.0, fit_process.NORMALIZED: 1.5}  # the bars
NUM_WORKERS = 4  # of a job whose workers are killed until one is left
LIMIT_S, MEDIAN_BAR_S, P99_BAR_S = 120.0, 0.15, 1.0
LOGGED = re.compile(r"Worker \d+ died (?:in|after) step .*\(([\d.]+) s\)")


def main(num_rounds: int) -> None:
    """Prints both parts."""
    for part in PARTS.values():
        part(num_rounds)


def steps(num_rounds: int) -> None:
    """Two workers, nobody dies. The bars are those of medians: 1.1, 1.0 and 1.5 times the time without fault tolerance."""
    for model, bar in MODELS.items():
        setting = {
            "contestant": "replicax",
            "task": "fit",
            "model": model,
            "rows": multi_worker.ROWS_PER_WORKER * multi_worker.NUM_WORKERS,
        }
        contestants = {
            TOLERANT: Contestant(sys.executable, multi_worker.SCRIPT, {**setting, "fault_tolerance": True}),
            TODAY: Contestant(sys.executable, multi_worker.SCRIPT, {**setting, "implementation": "RING"}),
        }
        num_steps = multi_worker.NUM_STEPS
        timings = workers.compare(contestants, {model: (num_steps, {})}, num_rounds)[model]
        title = f"One step of fit, {multi_worker.ROWS_PER_WORKER} rows per worker, two workers, Adam: {model}"
        workers.report(title, timings, TODAY)
        workers.print_bar(timings, TOLERANT, TODAY, bar)


def recovery(num_rounds: int) -> None:
    """Jobs of four workers, of which three are killed one after the other. The bars: a median of 0.15 s, a 99th
    percentile of 1 s."""
    from_outside: list[float] = []
    from_log: list[float] = []
    for number in range(num_rounds):
        with tempfile.TemporaryDirectory() as folder, _Job(Path(folder)) as job:
            victims = list(range(NUM_WORKERS))
            random.Random(number).shuffle(victims)
            for num_killed in range(NUM_WORKERS - 1):
                outside, logged = job.kill(victims[num_killed], victims[num_killed + 1 :])
                from_outside.append(outside)
                from_log.append(logged)
    print(f"\nFrom kill -9 of one of {NUM_WORKERS} workers to the repeated step, MLP 64-256-256-10, Adam, ms")
    for name, seconds in (("from outside", from_outside), ("from the log", from_log)):
        by_size = sorted(seconds)
        median, p99 = by_size[len(by_size) // 2], by_size[min(len(by_size) - 1, 99 * len(by_size) // 100)]
        is_met = median <= MEDIAN_BAR_S and p99 <= P99_BAR_S
        print(
            f"  {name:14} median {1e3 * median:6.0f}, p99 {1e3 * p99:6.0f}, best {1e3 * by_size[0]:6.0f}, worst "
            f"{1e3 * by_size[-1]:6.0f}, {len(by_size)} kills "
            f"(bars: {1e3 * MEDIAN_BAR_S:g} and {1e3 * P99_BAR_S:g}): {workers.replication(is_met)}"
        )


@final
class _Job:
    """``replicax launch`` with ``survivors_worker.py``, which writes the time of the end of each step."""

    def __init__(self, folder: Path):
        self._folder = folder
        command = [sys.executable, "-m", "replicax", "launch", "--plain", "--workers", str(NUM_WORKERS)]
        self._process = subprocess.Popen(
            [*command, "--devices-per-worker", "1", str(HERE / "survivors_worker.py"), str(folder)],
            env={**os.environ, "KERAS_BACKEND": "jax"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._logged: queue.Queue[float] = queue.Queue()
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if found := LOGGED.search(line):
                self._logged.put(float(found[1]))

    def kill(self, victim: int, survivors: list[int]) -> tuple[float, float]:
        """Kills a worker when all train; returns the seconds to the end of the repeated step, and those of the log."""
        first = {number: len(self._ends(number)) for number in [victim, *survivors]}
        self._wait(lambda: all(len(self._ends(n)) > have + 50 for n, have in first.items()))
        time.sleep(random.uniform(0, 0.02))  # another moment of a step
        killed_at = time.monotonic()
        os.kill(int((self._folder / f"pid-{victim}").read_text()), signal.SIGKILL)
        try:
            logged = self._logged.get(timeout=LIMIT_S)
        except queue.Empty:
            raise SystemExit(f"no step was repeated:\n{''.join(self._lines[-40:])}") from None
        here = {number: len(self._ends(number)) for number in survivors}
        self._wait(lambda: all(len(self._ends(n)) > have + 20 for n, have in here.items()))
        return max(self._end_of_longest_step(n, killed_at) for n in survivors) - killed_at, logged

    def _end_of_longest_step(self, number: int, since: float) -> float:
        ends = self._ends(number)
        pairs = [(b - a, b) for a, b in itertools.pairwise(ends) if since < b < since + LIMIT_S]
        return max(pairs)[1]

    def _ends(self, number: int) -> list[float]:
        path = self._folder / f"ends-{number}"
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def _wait(self, is_true) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_true():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a job does not train:\n{''.join(self._lines[-40:])}")
            time.sleep(0.05)

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


PARTS = {"steps": steps, "recovery": recovery}


def _command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rounds", type=int, default=6, help="alternating rounds, or jobs (default 6)")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds")
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.rounds)


if __name__ == "__main__":
    _command_line()
