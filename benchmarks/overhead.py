"""Measures what replicax adds where programs are short: what ``run`` adds to JAX's own dispatch of the same compiled
program, what it takes to read results, and the step of ``fit`` for small models."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fit
import replicax as rx
import rounds

ALONE, RUN = "compiled program alone", "strategy.run"
READS = 50


def main(num_rounds: int) -> None:
    """Prints µs per call and per step."""
    strategy = rx.MirroredStrategy()
    for count in (20, 1000):
        what_run_adds(strategy, count, num_rounds)
    reading_results(strategy, num_rounds)
    pythons = dict.fromkeys((fit.OURS, fit.ONE_DEVICE, fit.DATA_PARALLEL), sys.executable)
    fit.steps(pythons, num_rounds, (fit.SMALL, fit.MLP, fit.CNN))


def what_run_adds(strategy: rx.Strategy, count: int, num_rounds: int) -> None:
    """The bars are 80 µs for 20 variables and 300 µs for 1,000.

    The processor time of the thread that calls says more if other programs use the machine.
    """
    for clock, name in (
        (time.perf_counter, "time"),
        (time.thread_time, "processor time of the calling thread"),
    ):
        timings = rounds.compare(contestants(strategy, count, clock), rounds=num_rounds, steps=50)
        rounds.report(f"A program that only adds to {count} variables [10], {name}", timings, ALONE)
        added = timings[RUN].median - timings[ALONE].median
        best = timings[RUN].best - timings[ALONE].best
        print(f"  run adds {added * 1e6:.0f} µs (medians), {best * 1e6:.0f} µs (best rounds)")


def contestants(
    strategy: rx.Strategy, count: int, clock: Callable[[], float]
) -> dict[str, Callable[[int], float]]:
    """``run``, and the compiled program that it launches, called with its state threaded by hand."""
    with strategy.scope():
        variables = [rx.Variable(np.zeros(10, np.float32)) for _ in range(count)]
    one = strategy.replicate(np.ones(10, np.float32))

    def step(x):
        for variable in variables:
            variable.assign_add(x)
        return x[0]

    def run(steps: int) -> float:
        start, result = clock(), None
        for _ in range(steps):
            result = strategy.run(step, args=(one,))
        jax.block_until_ready(strategy.experimental_local_results(result))
        return clock() - start

    run(1)
    launcher = strategy.runner.last_launcher
    topology = strategy.topology
    state = [jax.device_put(np.zeros(10, np.float32), topology.replicated) for _ in range(count)]

    def alone(steps: int) -> float:
        nonlocal state
        start, outs = clock(), None
        for _ in range(steps):
            state, _, outs, _ = launcher.compiled(state, [], launcher.consts, [], [one.stored])
        jax.block_until_ready(outs)
        return clock() - start

    return {ALONE: alone, RUN: run}


def reading_results(strategy: rx.Strategy, num_rounds: int) -> None:
    """Reads results that are computed already. The bars are 30 µs for a value that is equal on all replicas, and 150 µs
    for a sum of the replicas' values."""
    by_hand = jax.jit(lambda rows: jnp.sum(rows, axis=0), out_shardings=strategy.topology.replicated)
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(x: Any) -> tuple[Any, Any]:
        return x + 1, rx.get_replica_context().all_reduce("sum", x)

    def reading(read: Callable[[Any, Any], float]) -> Callable[[int], float]:
        def run(steps: int) -> float:
            results = [strategy.run(step, args=(numbers,)) for _ in range(steps)]
            jax.block_until_ready([value.stored for result in results for value in result])
            start = time.perf_counter()
            for result in results:
                read(*result)
            return time.perf_counter() - start

        return run

    timings = rounds.compare(
        {
            "float(array), one device": reading(lambda own, equal: float(equal.stored.addressable_data(0))),
            "float(equal value)": reading(lambda own, equal: float(equal)),
            "float(sum by hand, jit)": reading(lambda own, equal: float(by_hand(own.stored))),
            "float(strategy.reduce)": reading(
                lambda own, equal: float(strategy.reduce("SUM", own, axis=None))
            ),
        },
        rounds=num_rounds,
        steps=READS,
    )
    rounds.report("Reading a result of run that is computed", timings, "float(array), one device", unit="µs")
