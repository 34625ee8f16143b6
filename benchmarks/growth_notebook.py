"""Measures how many compiled programs are kept if the cells of a notebook are run again and again."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

_TIMES = (1, 10, 100)

_STEP = """
def step(rows):
    total.assign_add(rows.sum(0) * {factor})
    return rows.mean()

strategy.run(step, args=(batch,))
"""
_FIT = """
strategy = rx.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=4, verbose=0)
"""


def measure(num_times: int) -> Iterator[dict[str, dict[int, list[float]]]]:
    """Yields the number of programs for rows of the table, by the number of times."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    import replicax as rx

    rx.config.set_local_devices(2)

    import jax
    import keras
    import numpy as np

    x = np.ones((4, 2), np.float32)
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        total = rx.Variable(np.zeros(2, np.float32), aggregation="SUM")
    (batch,) = strategy.experimental_distribute_dataset([x])
    names = {"strategy": strategy, "total": total, "batch": batch, "rx": rx, "keras": keras, "x": x}

    def run_again(source_of: Callable[[int], str]) -> dict[int, list[float]]:
        namespace: dict[str, Any] = dict(names)
        counts: dict[int, list[float]] = {}
        before = 0
        for number in range(1, num_times + 1):
            exec(compile(source_of(number), f"<cell {number}>", "exec"), namespace)
            if number == 1:
                before = _num_executables() - 1
            if number in _TIMES:
                counts[number] = [_num_executables() - before]
        return counts

    def _num_executables() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    yield {"a cell that defines and runs a step": run_again(lambda number: _STEP.format(factor=1))}
    yield {"the same, edited each time": run_again(lambda number: _STEP.format(factor=number))}
    yield {"a cell that makes a strategy and a model, and calls fit": run_again(lambda number: _FIT)}
