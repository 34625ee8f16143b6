"""Measures large models: the processor time of the first step, the number of kernels that XLA compiles, and
the time of a step.

``make bench`` runs it with the others; ``python benchmarks/compiling.py --help`` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rounds
from compiling_process import (
    BY_HAND,
    DATA_PARALLEL,
    DATA_PARALLEL_ON_BATCH,
    FIT,
    MODELS,
    ON_BATCH,
    OWN_THREADS,
    RUN,
)
from peer_process import PeerProcess

BESIDE = {RUN: BY_HAND, FIT: DATA_PARALLEL, ON_BATCH: DATA_PARALLEL_ON_BATCH}
FIRST_STEP_BAR, STEP_BARS = 1.1, {RUN: 1.0, FIT: 0.9, ON_BATCH: 0.9}
NUM_STEPS = 10


def main(num_rounds: int, layers: int = 24, models: Sequence[str] = tuple(MODELS)) -> None:
    """Prints first steps and steps of each model."""
    for model in models:
        first_steps(model, layers, min(num_rounds, 3))
        steps(model, layers, num_rounds)


def first_steps(
    model: str,
    layers: int,
    num_rounds: int,
    names: Sequence[str] = (BY_HAND, RUN, FIT, DATA_PARALLEL, OWN_THREADS),
) -> None:
    """Each runs in a process that has only made the model. The bar: at most 1.1 times the neighbour's
    processor time."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    kernels = dict.fromkeys(names, 0)
    for number in range(num_rounds):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            with contextlib.closing(_process(name, model, layers)) as process:
                seconds[name].append(process.run(1)[1])
                kernels[name] = process.run(0, counts_kernels=True)
    timings = {name: rounds.Timing(values) for name, values in seconds.items()}
    unit = "ms of processor time"
    rounds.report(f"First step: {_title(model, layers)}", timings, BY_HAND, unit=unit, per_second=1e3)
    print("  kernels: " + ", ".join(f"{name} {count}" for name, count in kernels.items()))
    for name in [name for name in (RUN, FIT) if name in names]:
        _print_bar(timings, name, FIRST_STEP_BAR, "processor time")


def steps(model: str, layers: int, num_rounds: int) -> None:
    """The bars are those of ``STEP_BARS``, relative to the neighbour's time."""
    names = [*BESIDE, *BESIDE.values(), OWN_THREADS]
    with contextlib.ExitStack() as closing:
        processes = {
            name: closing.enter_context(contextlib.closing(_process(name, model, layers))) for name in names
        }
        for process in processes.values():
            process.run(1)
        contestants = {
            name: lambda count, process=process: process.run(count)[0] for name, process in processes.items()
        }
        timings = rounds.compare(contestants, rounds=num_rounds, steps=NUM_STEPS, warm_up=NUM_STEPS)
    rounds.report(f"One step, Adam, 2 virtual devices: {_title(model, layers)}", timings, DATA_PARALLEL)
    for name, bar in STEP_BARS.items():
        _print_bar(timings, name, bar, "time per step")


def _process(contestant: str, model: str, layers: int) -> PeerProcess:
    setting = {"contestant": contestant, "model": model, "layers": layers}
    return PeerProcess(sys.executable, "compiling_process.py", setting)


def _title(model: str, layers: int) -> str:
    return f"{model}, {layers} layers" if model == "GPT" else model


def _print_bar(timings: dict[str, rounds.Timing], name: str, bar: float, what: str) -> None:
    other = BESIDE[name]
    pairs = zip(timings[name].seconds, timings[other].seconds, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"  {name}: {ratio:.2f} × the {what} of {other} (bar: at most {bar})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--layers", type=int, default=24, help="of the GPT (default 24)")
    parser.add_argument("--model", choices=MODELS, help="one model")
    parser.add_argument("--first", action="store_true", help="only first steps, of strategy.run and by hand")
    arguments = parser.parse_args()
    if arguments.first:
        for model in [arguments.model] if arguments.model else MODELS:
            first_steps(model, arguments.layers, arguments.rounds, [BY_HAND, RUN])
        raise SystemExit
    main(arguments.rounds, arguments.layers, [arguments.model] if arguments.model else tuple(MODELS))
