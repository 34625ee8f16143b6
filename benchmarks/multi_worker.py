"""Compares workers on one machine with JAX by hand, TensorFlow and torch: all-reduces, training steps and the
start.

``make bench`` runs it with the others; ``python benchmarks/multi_worker.py --help`` alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fit_process
import workers
from workers import Contestant

KIB, MIB = 2**10, 2**20
# Sizes in bytes, and the number of all-reduces of each size in a round.
ALL_REDUCES = {4: 200, 4 * KIB: 200, 64 * KIB: 200, MIB: 60, 4 * MIB: 30, 16 * MIB: 10, 64 * MIB: 5}
LARGEST_BESIDE_TORCH = 4 * MIB
MODELS = (next(iter(fit_process.DENSE)), fit_process.CNN, fit_process.DIGITS)
NUM_WORKERS = 2
ROWS_PER_WORKER = 64
NUM_STEPS = 64
NUM_STARTS = 5
START_LIMIT_S, START_BAR_S = 120.0, 10.0

OURS, BY_HAND, TENSORFLOW, TORCH = "replicax", "JAX by hand", "TensorFlow", "torch, gloo"
RUN, FIT, DDP = "replicax, strategy.run", "replicax, Keras fit", "torch DDP, gloo"
REDUCE, IN_FUNCTION, IN_RUN = "strategy.reduce", "reduce in rx.function", "all_reduce in run"
REDUCED = (4, 64 * KIB, 4 * MIB, 64 * MIB)
CUT, ONE_PROGRAM = "cut", "one program"
SYNCHRONIZED_DDP = "torch DDP, synchronized norm"
WHOLE = "replicax, Keras fit, global view"
SCRIPT = "worker_replicax.py"


def main(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Prints all parts."""
    for part in PARTS.values():
        part(num_rounds, tensorflow_python, torch_python)


def all_reduces(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """The bars, by medians: faster than TensorFlow at every size, and at most 1.3 times torch's gloo up to 4
    MiB."""
    task = {"task": "all_reduce"}
    contestants = {
        OURS: Contestant(sys.executable, SCRIPT, {"contestant": "replicax", **task}),
        BY_HAND: Contestant(sys.executable, SCRIPT, {"contestant": "by hand", **task}),
        TENSORFLOW: Contestant(tensorflow_python, "worker_tensorflow.py", task),
        TORCH: Contestant(torch_python, "worker_torch.py", task),
    }
    turns = {size: (count, {"size": size}) for size, count in ALL_REDUCES.items()}
    for size, timings in workers.compare(contestants, turns, num_rounds).items():
        workers.report(f"All-reduce over two workers, {_in_words(size)} of float32", timings, OURS)
        workers.print_bar(timings, OURS, TENSORFLOW, 1.0)
        if size <= LARGEST_BESIDE_TORCH:
            workers.print_bar(timings, OURS, TORCH, 1.3)


def reduces(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """The ways to sum per-replica values. The bar: ``strategy.reduce`` takes at most as long as torch's gloo."""
    del tensorflow_python

    def ours(task: str) -> Contestant:
        return Contestant(sys.executable, SCRIPT, {"contestant": "replicax", "task": task})

    contestants = {
        REDUCE: ours("reduce"),
        IN_FUNCTION: ours("reduce in function"),
        IN_RUN: ours("all_reduce"),
        BY_HAND: Contestant(sys.executable, SCRIPT, {"contestant": "by hand", "task": "all_reduce"}),
        TORCH: Contestant(torch_python, "worker_torch.py", {"task": "all_reduce"}),
    }
    turns = {size: (ALL_REDUCES[size], {"size": size}) for size in REDUCED}
    for size, timings in workers.compare(contestants, turns, num_rounds).items():
        workers.report(f"A sum over two workers, {_in_words(size)} of float32", timings, REDUCE)
        workers.print_bar(timings, REDUCE, TORCH, 1.0)
        workers.print_bar(timings, REDUCE, BY_HAND, 1.0)


def cuts(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Steps that are cut at their sums, which the hosts add, beside the same steps as one program with gloo."""
    del tensorflow_python, torch_python
    for model in (*MODELS, fit_process.LARGE, fit_process.NORMALIZED):
        rows = ROWS_PER_WORKER * NUM_WORKERS
        settings = {
            f"{task}, {name}": {
                "contestant": "replicax",
                "task": task,
                "model": model,
                "rows": rows,
                "implementation": implementation,
            }
            for task in ("fit", "steps")
            for name, implementation in ((CUT, "AUTO"), (ONE_PROGRAM, "RING"))
        }
        contestants = {
            name: Contestant(sys.executable, SCRIPT, setting) for name, setting in settings.items()
        }
        timings = workers.compare(contestants, {model: (NUM_STEPS, {})}, num_rounds)[model]
        title = f"One step, {ROWS_PER_WORKER} rows per worker, {NUM_WORKERS} workers, Adam: {model}"
        workers.report(title, timings, f"fit, {ONE_PROGRAM}")
        for task in ("fit", "steps"):
            workers.print_bar(timings, f"{task}, {CUT}", f"{task}, {ONE_PROGRAM}", 1.0)


def steps(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Two workers with one device each. The bars: 1.5 times TensorFlow's steps/s, and at most 0.8 times DDP's
    time per step (CNNs: 1.0).

    All have their batch ready, and none sums the loss, except ``fit``, which also reads its batches and
    updates its metrics. The bars use medians, so that a single fast step does not count.
    """
    for model in MODELS:
        task = {"task": "steps", "model": model, "rows": ROWS_PER_WORKER * NUM_WORKERS}
        contestants = {
            **_ours(model, NUM_WORKERS),
            TENSORFLOW: Contestant(tensorflow_python, "worker_tensorflow.py", task),
            DDP: Contestant(torch_python, "worker_torch.py", task),
        }
        if model in fit_process.DENSE:
            contestants[BY_HAND] = Contestant(sys.executable, SCRIPT, {"contestant": "by hand", **task})
        if model == fit_process.DIGITS:  # DDP alone normalizes each process's rows, which is less work
            task = {**task, "synchronized": True}
            contestants[SYNCHRONIZED_DDP] = Contestant(torch_python, "worker_torch.py", task)
        timings = workers.compare(contestants, {model: (NUM_STEPS, {})}, num_rounds)[model]
        workers.report(
            f"One step, {ROWS_PER_WORKER} rows per worker, {NUM_WORKERS} workers, Adam: {model}", timings, RUN
        )
        for name in (RUN, FIT):
            workers.print_bar(timings, name, TENSORFLOW, 1 / 1.5)
            if model != fit_process.DIGITS:
                workers.print_bar(timings, name, DDP, 0.8 if model in fit_process.DENSE else 1.0)
        workers.print_bar(timings, FIT, SYNCHRONIZED_DDP, 1.1)


def shapes(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """1, 2 and 4 workers with 1 and 2 virtual devices; torch's DDP, with one device per process, is compared
    with those of one."""
    for model, num_workers, num_devices in itertools.product(MODELS[:2], (1, 2, 4), (1, 2)):
        contestants = _ours(model, num_workers, num_devices)
        if num_devices == 1:
            task = {"task": "steps", "model": model, "rows": ROWS_PER_WORKER * num_workers}
            contestants[DDP] = Contestant(torch_python, "worker_torch.py", task, num_workers)
        timings = workers.compare(contestants, {model: (NUM_STEPS, {})}, num_rounds)[model]
        title = f"{num_workers} worker(s) of {num_devices} device(s), {ROWS_PER_WORKER} rows per worker, Adam: {model}"
        workers.report(title, timings, RUN)


def by_rows(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Compares steps of ``fit`` split by rows with those that the partitioner splits. The bar: 1.5 times as
    fast for a CNN."""
    del tensorflow_python, torch_python
    for model in MODELS:
        setting = {"contestant": "replicax", "model": model, "rows": ROWS_PER_WORKER * NUM_WORKERS}
        contestants = {
            FIT: Contestant(sys.executable, SCRIPT, {**setting, "task": "fit"}, NUM_WORKERS),
            WHOLE: Contestant(sys.executable, SCRIPT, {**setting, "task": "fit whole"}, NUM_WORKERS),
        }
        timings = workers.compare(contestants, {model: (NUM_STEPS, {})}, num_rounds)[model]
        workers.report(f"One step of fit, {ROWS_PER_WORKER} rows per worker, Adam: {model}", timings, FIT)
        workers.print_bar(timings, FIT, WHOLE, 1 / 1.5)


def _ours(model: str, num_workers: int, num_devices: int = 1) -> dict[str, Contestant]:
    """``run`` and ``fit``."""
    setting = {
        "contestant": "replicax",
        "model": model,
        "rows": ROWS_PER_WORKER * num_workers,
        "devices_per_worker": num_devices,
    }
    return {
        RUN: Contestant(sys.executable, SCRIPT, {**setting, "task": "steps"}, num_workers),
        FIT: Contestant(sys.executable, SCRIPT, {**setting, "task": "fit"}, num_workers),
    }


def start_up(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Times from ``replicax launch --workers 2`` to the end of the first step. The bar: at most 10 s.
    replicax only."""
    seconds = [_started() for _ in range(min(num_rounds, NUM_STARTS))]
    each = ", ".join(f"{s:.2f}" for s in seconds)
    print(f"\nreplicax launch --workers {NUM_WORKERS}, s to the end of the first step: {MODELS[0]}")
    print(
        f"  median {statistics.median(seconds):.2f}, best {min(seconds):.2f}, worst {max(seconds):.2f}: {each}"
    )
    is_met = max(seconds) <= START_BAR_S
    print(
        f"  the worst is {max(seconds):.2f} s (bar: at most {START_BAR_S:g}): {workers.replication(is_met)}"
    )


def _started() -> float:
    script = str(Path(__file__).parent / "start_up_worker.py")
    command = [sys.executable, "-m", "replicax", "launch", "--workers", str(NUM_WORKERS), "--plain", script]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False)
    ended = [float(text) for text in re.findall(r"first step ended at ([\d.]+)", done.stdout)]
    if done.returncode or len(ended) != NUM_WORKERS:
        raise SystemExit(f"{script} failed under replicax launch:\n{done.stdout}{done.stderr}")
    return max(ended) - start


def _in_words(size: int) -> str:
    if size >= MIB:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size >= KIB else f"{size} B"


PARTS = {
    "all_reduce": all_reduces,
    "reduce": reduces,
    "cuts": cuts,
    "steps": steps,
    "shapes": shapes,
    "by_rows": by_rows,
    "start_up": start_up,
}


def _command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rounds", type=int, default=6, help="alternating rounds (default 6)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow 2.21")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch 2.13")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds")
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.rounds, arguments.tensorflow, arguments.torch)


if __name__ == "__main__":
    _command_line()
