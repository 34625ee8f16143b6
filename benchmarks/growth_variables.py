"""Measures how a training step, and a checkpoint, grow with the number of variables, on two virtual devices.

XLA's code generation is set to its lowest level: it is most of a first step otherwise, and no part of replicax.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator

_NUM_TIMES = 5


def measure(num_variables: int) -> Iterator[dict[str, list[float]]]:
    """Yields the values of rows of the table. The first step comes last: XLA takes minutes for 10,000 updates."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    rx.config.set_local_devices(2)
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        variables = [rx.Variable(np.ones(8, np.float32)) for _ in range(num_variables)]
    (batch,) = strategy.experimental_distribute_dataset([np.ones((4, 8), np.float32)])

    def step(rows: jax.Array) -> jax.Array:
        with rx.GradientTape() as tape:
            mean = rows.mean(0)
            loss = jnp.sum(jnp.stack([jnp.vdot(variable.value, mean) for variable in variables]))
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, variables))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    def run() -> None:
        jax.block_until_ready(strategy.experimental_local_results(strategy.run(step, args=(batch,))))

    yield {
        "trace, processor time": [processor_ms(lambda: strategy.lower(step, args=(batch,)))],
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = rx.Checkpoint(variables=variables)
        numbers = itertools.count()
        yield {
            "checkpoint: save, processor time": [
                processor_ms(lambda: checkpoint.write(f"{folder}/{next(numbers)}")) for _ in range(2)
            ]
        }
        yield {
            "checkpoint: restore, processor time": [
                processor_ms(lambda: checkpoint.read(f"{folder}/0")) for _ in range(2)
            ]
        }
    yield {"first step, processor time": [processor_ms(run)]}
    run()
    yield {"later steps, processor time": [processor_ms(run) for _ in range(_NUM_TIMES)]}


def processor_ms(call: Callable[[], object]) -> float:
    """Returns the processor time of a call, of all threads."""
    before = time.process_time()
    call()
    return 1e3 * (time.process_time() - before)
