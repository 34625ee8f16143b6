"""Gradients of micro-batches are exchanged once."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._plan.hlo import read_hlo
from replicax._src.tracing import gathers

CPUS = [f"cpu:{i}" for i in range(4)]


def lowered(number, rows, strategy, width=256):
    with strategy.scope():
        layers = [rx.Variable(np.ones((width, width), np.float32) / width) for _ in range(3)]

    def loss_and_gradients(x):
        with rx.GradientTape() as tape:
            h = x
            for layer in layers:
                h = jnp.tanh(h @ layer.value)
            loss = jnp.sum(h**2)
        return (loss, tape.gradient(loss, layers)), x.shape[0]

    accumulated = rx.experimental.accumulate(number)(loss_and_gradients)

    def step(x):
        loss, gradients = accumulated(x)
        for layer, total in zip(layers, rx.get_replica_context().all_reduce("SUM", gradients), strict=True):
            layer.assign_sub(0.1 * total)
        return loss

    (batch,) = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones((rows, width), np.float32)).batch(rows)
    )
    strategy.run(step, args=(batch,))
    return strategy.runner.last_launcher.lower([batch.stored]).compile()


@pytest.mark.parametrize("options", [{}, {"shard_state": "all"}])
def test_one_exchange_and_less_memory(options, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    of_gradients = 3 * 256 * 256 * 4
    temporaries = []
    for number in 1, 8:
        compiled = lowered(number, 8192, rx.MirroredStrategy(CPUS[:2], **options))
        collectives = read_hlo(compiled.as_text(), 2).collectives
        reduced = sum(c.bytes * c.count for c in collectives if c.kind in ("all-reduce", "reduce-scatter"))
        assert reduced <= of_gradients + 64  # the gradients, and the count
        if options:
            gathered = sum(c.bytes * c.count for c in collectives if c.kind == "all-gather")
            assert (
                gathered <= 2 * of_gradients + (number == 1) * of_gradients
            )  # not once for each micro-batch
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    # 4096 rows of 256 floats in 3 layers and their gradients, or 512 of them.
    assert temporaries[1] < temporaries[0] - 2 * 4096 * 256 * 4
