"""Compares ``Model.fit`` on two devices with Keras on one, Keras's DataParallel and TensorFlow's
MirroredStrategy."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fit_process
import rounds
from peer_process import PeerProcess

MLP, SMALL = fit_process.DENSE
CNN = fit_process.CNN
BATCHES = {MLP: 128, SMALL: 128, CNN: 64}
NUM_STEPS = {MLP: 128, SMALL: 256, CNN: 32}
GENERATIONS = 3

OURS, ONE_DEVICE, DATA_PARALLEL = "replicax", "Keras, one device", "Keras DataParallel"
TF_MIRRORED, TF_ONE_DEVICE = "TensorFlow Mirrored", "TensorFlow, one device"

Run = Callable[[int], Any]


def main(num_rounds: int, tensorflow_python: str | None) -> None:
    """Prints steps, several steps in one call, first steps, uneven epochs and memory over epochs."""
    pythons = dict.fromkeys((OURS, ONE_DEVICE, DATA_PARALLEL), sys.executable)
    if tensorflow_python:
        pythons |= dict.fromkeys((TF_MIRRORED, TF_ONE_DEVICE), tensorflow_python)
    else:
        print("\n(TensorFlow's fit: give --tensorflow PYTHON, a Python that has TensorFlow 2.21)")
    steps(pythons, num_rounds)
    several_steps(num_rounds)
    first_step(pythons, min(num_rounds, 5))
    uneven_epochs(pythons, num_rounds)
    memory_over_epochs()


def steps(pythons: Mapping[str, str], num_rounds: int, models: Sequence[str] = (MLP, CNN)) -> None:
    """The bars are 0.9 of DataParallel's time per step, for a small model twice that of one device, and at least twice
    TensorFlow's steps/s."""
    for model in models:
        settings = {name: _setting(name, model) for name in pythons}
        timings = _compare(pythons, settings, num_rounds, NUM_STEPS[model])
        rounds.report(f"fit, one step, batch {BATCHES[model]}, Adam: {model}", timings, OURS)
        _print_bar(timings, OURS, DATA_PARALLEL, at_most=0.9)
        if model == SMALL:
            _print_bar(timings, OURS, ONE_DEVICE, at_most=2.0)
        if TF_MIRRORED in timings:
            _print_bar(timings, OURS, TF_MIRRORED, at_least=2.0)


def several_steps(num_rounds: int) -> None:
    """The bars: 16 steps in one call are at least 1.3 times as fast as 1 for a small model, and no slower for
    the CNN."""
    for model, at_least in ((SMALL, 1.3), (CNN, 1.0)):
        settings = {
            f"{name}, {count} in one call": _setting(name, model, steps_per_execution=count)
            for name in (OURS, ONE_DEVICE)
            for count in (1, 16)
        }
        pythons = dict.fromkeys(settings, sys.executable)
        timings = _compare(pythons, settings, num_rounds, NUM_STEPS[model])
        one, several = f"{OURS}, 1 in one call", f"{OURS}, 16 in one call"
        rounds.report(f"fit, steps_per_execution, batch {BATCHES[model]}, Adam: {model}", timings, one)
        _print_bar(timings, several, one, at_least=at_least)


def first_step(pythons: Mapping[str, str], num_rounds: int) -> None:
    """Times ``fit`` with one step, in a process that has only made the model."""

    def started(name: str) -> Run:
        setting = _setting(name, MLP, task="first step", rows=BATCHES[MLP])

        def run(num_steps: int) -> Any:
            with contextlib.closing(_process(pythons[name], setting)) as process:
                return process.run(num_steps)

        return run

    contestants = {name: started(name) for name in pythons}
    timings = rounds.compare(contestants, rounds=num_rounds, steps=1, warm_up=0)
    rounds.report(f"fit, the first step of a process: {MLP}", timings, OURS, unit="ms", per_second=1e3)


def uneven_epochs(pythons: Mapping[str, str], num_rounds: int) -> None:
    """Times complete epochs, with the costs at their start and end."""
    title = f"fit, epochs of 199 rows in batches of 64, 64, 64 and 7: {MLP}"
    options: dict[str, Any] = {"rows": 199, "batch": 64}
    settings = {
        name: _setting(name, MLP, task="epochs", **options) for name in pythons if name != DATA_PARALLEL
    }
    timings = _compare(pythons, settings, num_rounds, 5)
    rounds.report(title, timings, OURS, unit="µs per epoch")
    refused = _setting(DATA_PARALLEL, MLP, task="attempt", **options)
    with contextlib.closing(_process(pythons[DATA_PARALLEL], refused)) as process:
        error = process.run(1)
    print(f"  {DATA_PARALLEL}: {'raises ' + error if error else 'runs it too'}")


def memory_over_epochs() -> None:
    """Resident memory of the process over repeated epochs of ``fit``."""
    print(f"\nfit, resident memory of the process, 8 steps per epoch, MiB: {SMALL}")
    for name in (OURS, ONE_DEVICE):
        setting = _setting(name, SMALL, task="memory", rows=8 * BATCHES[SMALL])
        with contextlib.closing(_process(sys.executable, setting)) as process:
            early, late = process.run(20), process.run(180)
        print(
            f"  {name:34} after 20 epochs {early / 2**20:.1f}, after 200 {late / 2**20:.1f}"
            f" ({(late - early) / 180 / 1024:+.1f} KiB per epoch)"
        )


def _setting(
    contestant: str,
    model: str,
    *,
    task: str = "steps",
    steps_per_execution: int = 1,
    rows: int | None = None,
    batch: int | None = None,
) -> dict[str, Any]:
    batch = BATCHES[model] if batch is None else batch
    return {
        "contestant": contestant,
        "task": task,
        "model": model,
        "rows": 3 * NUM_STEPS[model] * batch if rows is None else rows,
        "batch": batch,
        "steps_per_execution": steps_per_execution,
    }


def _process(python: str, setting: dict[str, Any]) -> PeerProcess:
    return PeerProcess(python, "fit_process.py", setting)


def _compare(
    pythons: Mapping[str, str], settings: Mapping[str, dict[str, Any]], num_rounds: int, num_steps: int
) -> dict[str, rounds.Timing]:
    """Runs each setting in a separate process; the processes of one generation alternate.

    One program can be a tenth faster in one process than in the next, for the process's whole life. The
    rounds are therefore spread over several generations of processes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for generation in range(min(GENERATIONS, num_rounds)):
        with contextlib.ExitStack() as closing:
            contestants = {
                name: closing.enter_context(contextlib.closing(_process(pythons[name], setting))).run
                for name, setting in settings.items()
            }
            share = len(range(generation, num_rounds, GENERATIONS))
            timings = rounds.compare(contestants, rounds=share, steps=num_steps, warm_up=num_steps)
        for name, timing in timings.items():
            seconds[name] += timing.seconds
    return {name: rounds.Timing(values) for name, values in seconds.items()}


def _print_bar(
    timings: Mapping[str, rounds.Timing],
    name: str,
    other: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> None:
    """The bar is for the median over pairs of rounds: an upper bound on the time per step, and a lower bound
    on the steps/s."""
    ratio = statistics.median(
        a / b for a, b in zip(timings[name].seconds, timings[other].seconds, strict=True)
    )
    if at_most is not None:
        print(f"  {name}: {ratio:.2f} × the time per step of {other} (bar: at most {at_most})")
    if at_least is not None:
        print(f"  {name}: {1 / ratio:.2f} × the steps/s of {other} (bar: at least {at_least})")
