"""Measures how a training step grows with the number of virtual devices; the batch of a replica stays the same."""

from __future__ import annotations

import itertools
import os
from typing import Any

from growth_variables import processor_ms

_SIZES = (64, 64, 64, 10)
_ROWS_PER_REPLICA = 16
_NUM_TIMES = 5


def measure(num_replicas: int) -> dict[str, list[float]]:
    """Returns the values of each row of the table."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    import replicax as rx

    rx.config.set_local_devices(num_replicas)

    import jax
    import jax.numpy as jnp
    import numpy as np

    strategy = rx.MirroredStrategy()
    with strategy.scope():
        weights = [rx.Variable(np.ones(shape, np.float32)) for shape in itertools.pairwise(_SIZES)]
    rows = np.ones((_ROWS_PER_REPLICA * num_replicas, _SIZES[0]), np.float32)
    (batch,) = strategy.experimental_distribute_dataset([rows])

    def step(x: jax.Array) -> jax.Array:
        with rx.GradientTape() as tape:
            for weight in weights:
                x = jnp.tanh(x @ weight.value)
            loss = rx.nn.compute_average_loss(jnp.mean(x, axis=1))
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    lowered: list[Any] = []

    def run() -> None:
        jax.block_until_ready(strategy.experimental_local_results(strategy.run(step, args=(batch,))))

    strategy.lower(step, args=(batch,))  # JAX's own caches are filled
    values = {
        "trace, processor time": [
            processor_ms(lambda: lowered.append(strategy.lower(step, args=(batch,)))) for _ in range(3)
        ],
        "compile, processor time": [processor_ms(lambda: lowered[0].compile())],
    }
    run()
    run()
    values["later steps, processor time for a replica"] = [
        processor_ms(run) / num_replicas for _ in range(_NUM_TIMES)
    ]
    return values
