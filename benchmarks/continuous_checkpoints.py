"""Measures checkpoints without an interval beside Orbax's: the same state, the same steps, the same folder, asynchronous
saves, rounds in turn. Every job is killed with ``kill -9`` at a random moment, and a new one restores what it has left.

    python benchmarks/continuous_checkpoints.py            # prints the table of docs/reference/checkpoints.md

- A *stall* is what a pass of the loop in which a save begins takes longer than the median of the others, the call
  and the step after it, which may pay for arrays that are still held.
- *Written* is the state's bytes per second, from the call until the checkpoint is on the disk, without steps beside it;
  and the same divided by what ``dd conv=fsync`` does with a file of the same size just before.
- *Memory* is the peak during the saves above what the process had before it opened the directory, of the process with
  the most.
- *Restore* ends when the arrays are ready, and the files may be in the system's cache.
- *Lost* are the steps from the restored one to the kill; *two saves* is the largest number of steps from the beginning of
  a save to that of the second one after it, in the same job.

Each size has a time limit: no round begins that may not end within it, except the first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import continuous_process
from workers import free_addresses

OURS, PEER = "replicax", "orbax"
LIMIT_S = 600.0


@dataclass(frozen=True)
class Size:
    """A state, the number of saves in a job, and the seconds for all rounds."""

    name: str
    megabytes: float
    num_processes: int
    num_saves: int
    limit_s: float


SIZES = [
    Size("64 MB", 64, 1, 20, 170.0),
    Size("1 GB", 1024, 1, 6, 350.0),
    Size("1 GB, 2 processes", 1024, 2, 6, 350.0),
]


@dataclass
class Measured:
    """What was measured of one contestant, in seconds, bytes and steps."""

    stalls: list[float] = field(default_factory=list)
    first_stalls: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    two_saves: list[int] = field(default_factory=list)

    def add(self, saved: Sequence[dict[str, Any]], restored: Sequence[dict[str, Any]], log: Path) -> None:
        """Adds a job: the reports of its processes, and of those that have restored, and the log of the first."""
        stalls = [max(of_each) for of_each in zip(*(_stalls(each["passes"]) for each in saved), strict=True)]
        self.first_stalls.append(stalls[0])
        self.stalls += stalls
        size = sum(each["own"] for each in saved)
        dd = statistics.median(saved[0]["dd"])
        self.speeds += [size / seconds for seconds in saved[0]["writes"]]
        self.written += [dd / seconds for seconds in saved[0]["writes"]]
        self.memory.append(max(each["memory"] for each in saved) / (size / len(saved)))
        self.restores.append(max(each["seconds"] for each in restored))
        steps = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
        begun = [step for step, is_saved in steps if is_saved]
        self.lost.append(steps[-1][0] - restored[0]["step"])
        spans = [last - first for first, last in zip(begun, [*begun[2:], steps[-1][0]], strict=False)]
        self.two_saves.append(max(spans))


def _stalls(passes: Sequence[Sequence[Any]]) -> list[float]:
    """Returns the stall of each save, from the seconds of the step and of the call after it in each pass of the loop."""
    begins = [number for number, (*_, is_saved) in enumerate(passes) if is_saved]
    paying = {*begins, *(number + 1 for number in begins)}
    others = [step_s + call_s for number, (step_s, call_s, _) in enumerate(passes) if number not in paying]
    usual = statistics.median(others or [step_s for step_s, *_ in passes])
    # The last save has no step after it.
    return [passes[at][1] + passes[at + 1][0] - usual for at in begins if at + 1 < len(passes)]


# --- jobs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def job(contestant: str, size: Size, task: str, folder: Path, source: Path) -> Iterator[list[dict[str, Any]]]:
    """Starts the processes of a job, yields their reports, and kills them."""
    addresses = free_addresses(size.num_processes)
    processes: list[subprocess.Popen[str]] = []
    try:
        for index in range(size.num_processes):
            setting = {
                "contestant": contestant,
                "task": task,
                "folder": str(folder),
                "source": str(source),
                "megabytes": size.megabytes,
                "index": index,
                "addresses": addresses,
                "num_saves": size.num_saves,
                "num_writes": 3,
            }
            with (folder / f"{task}-{index}.log").open("w") as log:
                command = [sys.executable, continuous_process.__file__, json.dumps(setting)]
                environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
                )
            processes.append(process)
        yield [_report(process, folder / f"{task}-{i}.log") for i, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _report(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    line = next((line for line in process.stdout if line.startswith("{")), "")  # gloo prints too
    limit.cancel()
    if not line:
        raise SystemExit(f"a process ended without a report:\n{log.read_text()[-3000:]}")
    return json.loads(line)


def measure(contestant: str, size: Size, folder: Path, source: Path, measured: Measured) -> None:
    """Runs a job that saves and is killed at a random moment, and one that restores."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        with job(contestant, size, "save", here, source) as saved:
            time.sleep(random.random() * 2 * statistics.median(saved[0]["writes"]))
        with job(contestant, size, "restore", here, source) as restored:
            pass
        measured.add(saved, restored, here / "steps-0")


# --- the table ----------------------------------------------------------------------------------------------


def _spread(values: Sequence[float], scale: float, digits: int = 0) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median * scale:,.{digits}f} ({least * scale:,.{digits}f}–{most * scale:,.{digits}f})"


def _p99(values: Sequence[float]) -> float:
    by_size = sorted(values)
    return by_size[min(len(by_size) - 1, 99 * len(by_size) // 100)]


ROWS: dict[str, Callable[[Measured], str]] = {
    "stall per save, ms": lambda one: _spread(one.stalls, 1e3),
    "its 99th percentile": lambda one: f"{_p99(one.stalls) * 1e3:,.0f}",
    "the first save of a process": lambda one: _spread(one.first_stalls, 1e3),
    "written, MB/s": lambda one: _spread(one.speeds, 1e-6),
    "written, part of `dd`": lambda one: _spread(one.written, 1, 2),
    "memory, times the state": lambda one: _spread(one.memory, 1, 2),
    "restore, s": lambda one: _spread(one.restores, 1, 2),
    "steps lost at a kill": lambda one: ", ".join(map(str, one.lost)),
    "steps of two saves": lambda one: ", ".join(map(str, one.two_saves)),
}


def report(size: Size, measured: dict[str, Measured]) -> None:
    """Prints a table as the docs have it, and the bars."""
    names = list(measured)
    num_saves = len(measured[names[0]].stalls)
    print(f"\n**{size.name}**, medians (least–most) of {num_saves} saves:\n")
    print(f"| | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    for row, cell in ROWS.items():
        print(f"| {row} | {' | '.join(cell(measured[name]) for name in names)} |")
    if PEER not in measured:
        return
    ours, peer = measured[OURS], measured[PEER]
    bars = {
        "stall p99": _p99(ours.stalls) <= _p99(peer.stalls),
        "restore": statistics.median(ours.restores) <= statistics.median(peer.restores),
        "memory": statistics.median(ours.memory) <= statistics.median(peer.memory),
        "steps lost": all(lost <= two for lost, two in zip(ours.lost, ours.two_saves, strict=True)),
    }
    print("\nbars: " + ", ".join(f"{name} {'met' if is_met else 'MISSED'}" for name, is_met in bars.items()))


def main(num_rounds: int, sizes: Sequence[Size] = SIZES, directory: str | None = None) -> None:
    """Prints a table for each size."""
    names = [OURS] + ([PEER] if importlib.util.find_spec("orbax.checkpoint") else [])
    for size in sizes:
        measured = {name: Measured() for name in names}
        with tempfile.TemporaryDirectory(dir=directory) as name:
            folder = Path(name)
            source = folder / "source"
            with source.open("wb") as file:
                for _ in range(math.ceil(size.megabytes)):
                    file.write(os.urandom(1 << 20))
            began, longest_s = time.monotonic(), 0.0
            for number in range(num_rounds):
                round_began = time.monotonic()
                if number and round_began - began + longest_s > size.limit_s:
                    break
                for contestant in names[number % len(names) :] + names[: number % len(names)]:
                    measure(contestant, size, folder, source, measured[contestant])
                longest_s = max(longest_s, time.monotonic() - round_began)
        report(size, measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="the most jobs of each contestant, in turn (default 5)"
    )
    parser.add_argument("--only", choices=[size.name for size in SIZES], help="one size")
    parser.add_argument("--megabytes", type=float, help="another state, to try the program")
    parser.add_argument("--directory", help="a folder on the disk to measure")
    arguments = parser.parse_args()
    chosen = [size for size in SIZES if arguments.only in (None, size.name)]
    if arguments.megabytes is not None:
        chosen = [dataclasses.replace(size, megabytes=arguments.megabytes) for size in chosen]
    main(arguments.rounds, chosen, arguments.directory)
