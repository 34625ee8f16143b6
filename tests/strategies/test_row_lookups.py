"""Lookups in tables that are sharded over the replicas: the numbers of one device, and the table never moves."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close
from replicax._src.plan.hlo import read_hlo

ROWS, WIDTH = 8192, 32  # 1 MiB
CPUS = [f"cpu:{i}" for i in range(8)]
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
FIRST = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
# Rows of all shards, twice on one replica and on several ones, the first and the last row, and a negative id.
IDS = np.array([[0, 5], [5, 5], [ROWS - 1, 1023], [1024, 2], [4096, 0], [7, -1], [3000, 6000]], np.int32)
BATCHES = {"even": [IDS[:4], IDS[2:6]], "uneven": [IDS[:6], IDS[3:7], IDS[:3], IDS[:5]]}


def trained(strategy, optimizer, batches, look_up):
    """Trains a table.

    Returns:
      The variables, the losses, and the bytes of the largest collective of each step.
    """
    with strategy.scope():
        table = keras.Variable(FIRST, name="table")
        scale = keras.Variable(np.linspace(0.5, 1, WIDTH, dtype=np.float32))
        optimizer = OPTIMIZERS[optimizer]()
        optimizer.build([table, scale])

    def step(ids):
        with rx.GradientTape() as tape:
            rows = look_up(table, ids)
            losses = jnp.sum((rows * scale.value) ** 2, (1, 2))
            loss = rx.nn.compute_average_loss(losses)
        optimizer.apply(tape.gradient(loss, [table, scale]), [table, scale])
        return loss

    losses, sizes = [], []
    for ids in batches:
        (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((ids,)).batch(len(ids)))
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)))
        sizes.append(largest_collective(strategy, batch))
    return [table, scale, *optimizer.variables], losses, sizes


LOOKUPS = {
    "lookup": rx.experimental.lookup,
    "embedding_lookup": rx.nn.embedding_lookup,
    "index": lambda table, ids: table.value[ids],
    "bfloat16": lambda table, ids: table.value.astype(jnp.bfloat16)[ids].astype(jnp.float32),
    "twice": lambda table, ids: rx.experimental.lookup(table, ids) + 2 * rx.experimental.lookup(table, ids + 1),
}


@functools.cache
def on_one_device(optimizer, batches, look_up):
    with jax.default_device(jax.devices()[0]):
        variables, losses, _ = trained(rx.MirroredStrategy(CPUS[:1]), optimizer, BATCHES[batches], LOOKUPS[look_up])
        return losses, [np.asarray(v.value) for v in variables]


@pytest.mark.parametrize(
    ("optimizer", "batches", "look_up", "num_replicas", "size"),
    [
        ("sgd", "even", "lookup", 4, 4),
        ("adam", "even", "embedding_lookup", 4, 4),
        ("adagrad", "even", "index", 4, 2),
        ("adam", "uneven", "lookup", 4, 4),
        ("sgd", "uneven", "embedding_lookup", 4, 2),
        ("sgd", "even", "bfloat16", 2, 2),
        ("sgd", "uneven", "twice", 8, 8),
    ],
)
def test_training_equals_one_device_and_moves_rows(optimizer, batches, look_up, num_replicas, size):
    strategy = rx.MirroredStrategy(CPUS[:num_replicas], shard_state="all", shard_size=size)
    variables, losses, sizes = trained(strategy, optimizer, BATCHES[batches], LOOKUPS[look_up])
    values = [np.asarray(v.value) for v in variables]
    wanted = on_one_device(optimizer, batches, look_up)
    tolerance = 1e-2 if look_up == "bfloat16" else 1e-5
    assert_close([losses, values], list(wanted), tolerance, tolerance)
    for variable in variables:
        if variable.shape == FIRST.shape:
            held = {shard.data.shape for shard in variable.value.addressable_shards}
            assert held == {(ROWS // size, WIDTH)}
    assert max(sizes) < FIRST.nbytes / 64


def largest_collective(strategy, batch):
    """Returns the most bytes that a collective of the last program moves."""
    compiled = strategy.runner.last_launcher.lower([getattr(leaf, "stored", leaf) for leaf in batch]).compile()
    found = read_hlo(compiled.as_text(), strategy.num_replicas_in_sync).collectives
    return max((c.bytes for c in found), default=0)
