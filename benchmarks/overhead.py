"""Measures what ``run`` adds to JAX's own dispatch of the same compiled program, with 20 and with 1,000
variables."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

import replicax as rx
import rounds


def main(num_rounds: int) -> None:
    """Prints µs per call."""
    strategy = rx.MirroredStrategy()
    for count in (20, 1000):
        timings = rounds.compare(contestants(strategy, count), rounds=num_rounds, steps=50)
        rounds.report(
            f"A program that only adds to {count} variables [10]", timings, "compiled program alone"
        )
        added = timings["strategy.run"].median - timings["compiled program alone"].median
        best = timings["strategy.run"].best - timings["compiled program alone"].best
        print(f"  run adds {added * 1e6:.0f} µs (medians), {best * 1e6:.0f} µs (best rounds)")


def contestants(strategy: rx.Strategy, count: int) -> dict[str, Callable[[int], None]]:
    """``run``, and the compiled program that it launches, called with its state threaded by hand."""
    with strategy.scope():
        variables = [rx.Variable(np.zeros(10, np.float32)) for _ in range(count)]
    one = strategy.replicate(np.ones(10, np.float32))

    def step(x):
        for variable in variables:
            variable.assign_add(x)
        return x[0]

    def run(steps: int) -> None:
        result = None
        for _ in range(steps):
            result = strategy.run(step, args=(one,))
        jax.block_until_ready(strategy.experimental_local_results(result))

    run(1)
    launcher = strategy.runner.last_launcher
    topology = strategy.topology
    state = [jax.device_put(np.zeros(10, np.float32), topology.replicated) for _ in range(count)]

    def alone(steps: int) -> None:
        nonlocal state
        outs = None
        for _ in range(steps):
            state, _, outs, _ = launcher.compiled(state, [], launcher.consts, [], [one.stored])
        jax.block_until_ready(outs)

    return {"compiled program alone": alone, "strategy.run": run}
