"""Compares the memory of one compiled step, as XLA reports it, with the hand-written one, and counts
compilations."""

from __future__ import annotations

import jax
import numpy as np

import models
import replicax as rx

SIZES = (64, 256, 256, 10)
LARGE = (512, 2048, 2048, 10)


def main() -> None:
    """Prints bytes per device, and counts of compilations."""
    strategy = rx.MirroredStrategy()
    print("\nMemory of one step per device (arguments + outputs + temporaries - donated), bytes")
    for sizes in (SIZES, LARGE):
        hand = _peak(_hand_written(strategy, sizes))
        ours = _peak(_run(strategy, sizes))
        print(
            f"  {'-'.join(map(str, sizes)):18} by hand {hand:>12,}   strategy.run {ours:>12,}   × {ours / hand:.3f}"
        )
    _count_compilations(strategy)


def _peak(compiled) -> int:
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def _hand_written(strategy: rx.Strategy, sizes):
    mesh = strategy.topology.mesh
    step = models.hand_written_step(mesh, 128)
    return step.lower(models.initial_state(sizes), models.data(sizes, 128)).compile()


def _run(strategy: rx.Strategy, sizes):
    models.through_run(strategy, sizes, 128)(1)
    batch = [value.stored for value in models.distributed_batch(strategy, sizes, 128)]
    return strategy.runner.last_launcher.lower(batch).compile()


def _count_compilations(strategy: rx.Strategy) -> None:
    count = 0

    def listen(event: str, duration: float, **_: object) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    with strategy.scope():
        total = rx.Variable(0.0, aggregation="SUM")
    strategy.run(lambda: total.assign_add(1.0))

    def compilations(calls) -> int:
        before = count
        for call in calls:
            call()
        return count - before

    values = [strategy.replicate(np.full(8, i, np.float32)) for i in range(10)]
    wide = [strategy.replicate(np.full(9, i, np.float32)) for i in range(10)]

    def step(x):
        total.assign_add(x.sum())

    print("\nCompilations")
    print(
        f"  ten calls of one signature: {compilations([lambda v=v: strategy.run(step, (v,)) for v in values])}"
    )
    print(
        f"  ten more of a second one:   {compilations([lambda v=v: strategy.run(step, (v,)) for v in wide])}"
    )
    print(
        "  ten lambdas made anew:      "
        f"{compilations([lambda v=v: strategy.run(lambda: step(v)) for v in values])}"
    )
