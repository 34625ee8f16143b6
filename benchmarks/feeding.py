"""Compares a step fed by a distributed dataset with the same step whose batch is on the devices, and several
steps in one call with single steps."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import models
import replicax as rx
import rounds
from peer_process import PeerProcess

BATCH, NUM_BATCHES = 128, 64  # in memory
MLP = (64, 256, 256, 10)  # a step of about 1 ms
SMALL = (64, 128, 10)  # 9,610 parameters


def main(num_rounds: int, tensorflow_python: str | None, torch_python: str | None) -> None:
    """Prints steps, batches read alone, several steps in one call, and memory over many steps."""
    strategy = rx.MirroredStrategy()
    fed_steps(strategy, num_rounds)
    reading(strategy, num_rounds, tensorflow_python, torch_python)
    several_steps(strategy, num_rounds)
    memory_over_steps(strategy)


def fed_steps(strategy: rx.Strategy, num_rounds: int) -> None:
    """The bar is at most 1.15 times the step whose batch is on the devices."""
    contestants = {
        "already placed": _steps(
            strategy, MLP, itertools.repeat(models.distributed_batch(strategy, MLP, BATCH))
        ),
        "fed, arrays": _steps(strategy, MLP, iter(_dataset(strategy, MLP))),
        "fed, arrays shuffled": _steps(strategy, MLP, iter(_dataset(strategy, MLP, shuffles=True))),
    }
    timings = rounds.compare(contestants, rounds=num_rounds, steps=150)
    rounds.report(
        "One step, batch 128, MLP 64-256-256-10, Adam, 2 virtual devices", timings, "already placed"
    )


def reading(
    strategy: rx.Strategy, num_rounds: int, tensorflow_python: str | None, torch_python: str | None
) -> None:
    """Reads batches without a step. TensorFlow's and ours are on two devices; torch's are on the host."""
    for shuffles in (False, True):
        iterator = iter(_dataset(strategy, MLP, shuffles=shuffles))
        contestants: dict[str, Callable[[int], None]] = {"replicax": lambda n, it=iterator: _consume(it, n)}
        setting = {"features": MLP[0], "rows": BATCH * NUM_BATCHES, "batch": BATCH, "shuffles": shuffles}
        with contextlib.ExitStack() as peers:
            for name, python, script in (
                ("TensorFlow, distributed", tensorflow_python, "tensorflow_reading.py"),
                ("torch DataLoader", torch_python, "torch_reading.py"),
            ):
                if python:
                    peer = peers.enter_context(contextlib.closing(PeerProcess(python, script, setting)))
                    contestants[name] = peer.run
            timings = rounds.compare(contestants, rounds=num_rounds, steps=500)
        rows = "rows shuffled" if shuffles else "rows in order"
        rounds.report(f"Reading alone, batch 128 × 64 features and labels, {rows}", timings, "replicax")
        for name, timing in timings.items():
            print(f"  {name}: {BATCH / timing.median:,.0f} rows/s")
        hungry = statistics.median(_cpu_us(iterator, 0.0) for _ in range(num_rounds))
        waiting = statistics.median(_cpu_us(iterator, 5e-4) for _ in range(num_rounds))
        sleeping = statistics.median(_cpu_us(itertools.repeat(None), 5e-4) for _ in range(num_rounds))
        print(
            f"  replicax: {waiting - sleeping:.0f} µs of CPU per batch where the loop takes one every 0.5 ms,"
        )
        print(f"  {hungry:.0f} µs where it waits for each (two threads that wake each other up)")


def several_steps(strategy: rx.Strategy, num_rounds: int) -> None:
    """The bar is at least 3 times the steps/s of ``run``, for a model of 10 k parameters."""
    step = models.keras_step(strategy, SMALL, BATCH)
    iterator = iter(_dataset(strategy, SMALL))

    def together(steps: int) -> None:
        loss = None
        for _ in range(steps // 100):
            loss = strategy.run_steps(step, iterator, 100)
        jax.block_until_ready(loss.stored)

    contestants = {
        "run, batch already placed": _steps(
            strategy, SMALL, itertools.repeat(models.distributed_batch(strategy, SMALL, BATCH))
        ),
        "run, fed": _steps(strategy, SMALL, iter(_dataset(strategy, SMALL))),
        "run_steps, 100 in one call, fed": together,
    }
    timings = rounds.compare(contestants, rounds=num_rounds, steps=300, warm_up=200)
    rounds.report(
        "Several steps in one call, 10 k parameters, batch 128", timings, "run_steps, 100 in one call, fed"
    )


def memory_over_steps(strategy: rx.Strategy) -> None:
    """Resident memory of the process while a fed loop runs."""
    run = _steps(strategy, SMALL, iter(_dataset(strategy, SMALL, shuffles=True)))
    print("\nResident memory over fed steps, MiB")
    done = 0
    for steps in (1000, 2000, 5000, 10000):
        run(steps - done)
        done = steps
        print(f"  after {steps:6} steps: {_resident_bytes() / 2**20:.1f}")


def _dataset(strategy: rx.Strategy, sizes: Sequence[int], *, shuffles: bool = False) -> Any:
    rows = rx.data.from_arrays(models.data(sizes, BATCH * NUM_BATCHES))
    rows = rows.shuffle(seed=0) if shuffles else rows
    return strategy.experimental_distribute_dataset(rows.batch(BATCH).repeat())


def _steps(strategy: rx.Strategy, sizes: Sequence[int], batches: Iterator[Any]) -> Callable[[int], None]:
    step = models.keras_step(strategy, sizes, BATCH)

    def run(steps: int) -> None:
        loss = None
        for batch in itertools.islice(batches, steps):
            loss = strategy.run(step, args=(batch,))
        jax.block_until_ready(strategy.experimental_local_results(loss))

    return run


def _consume(iterator: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(iterator, count):
        pass


def _cpu_us(iterator: Iterator[Any], pause_s: float, batches: int = 1000) -> float:
    """CPU time of the process per batch, for a loop that sleeps after each."""
    start = time.process_time()
    for _ in itertools.islice(iterator, batches):
        if pause_s:
            time.sleep(pause_s)
    return (time.process_time() - start) / batches * 1e6


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
