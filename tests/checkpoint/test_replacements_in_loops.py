"""A replacement of a dead worker enters a loop of the user's own at any boundary, and ends with the bits of the others."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replacements import Admission, strategy_as

R, ROWS, BATCH = 2, 20, 6  # four batches, the last one of two rows


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def two_networks(strategy, directory):
    """A step of two programs: the second one alone reads a count that Python assigns after each iteration."""
    with strategy.scope():
        count, rate = rx.Variable(0, trainable=False), rx.Variable(0.1, trainable=False)
        first, second = rx.Variable(np.ones((3, 1), "float32")), rx.Variable(np.ones((3, 1), "float32"))
        total = rx.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    data = rx.data.from_arrays(rows()).shuffle(ROWS, seed=3).batch(BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = rx.Checkpoint(count=count, rate=rate, first=first, second=second, total=total, data=iterator)
    checkpoint.random = rx.checkpoint.HostRandomState()
    checkpoint.key = jax.random.key(1)
    manager = rx.CheckpointManager(
        checkpoint, directory, step_counter=count, checkpoint_interval=3, max_to_keep=2
    )

    def loss_of(weights, batch):
        x, y = batch
        return rx.nn.compute_average_loss((x @ weights.value - y)[:, 0] ** 2)

    def update(weights, batch, rate):
        with rx.GradientTape() as tape:
            loss = loss_of(weights, batch)
        (gradient,) = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [weights]))
        weights.assign_sub(rate * gradient)
        total.assign_add(loss)

    def first_step(batch):
        update(first, batch, 0.1)

    def second_step(batch):
        update(second, batch, rate.value / (1.0 + count.value))

    manager.restore_or_initialize()
    drawn = []
    while int(count) < 6:
        batch = next(iterator, None)
        if batch is None:
            iterator.initialize()
            continue
        strategy.run(first_step, args=(batch,))
        strategy.run(second_step, args=(batch,))
        drawn.append((float(np.random.random()), random.random()))
        checkpoint.key, _ = jax.random.split(checkpoint.key)
        count.assign_add(1)
        rate.assign(rate * 0.9)
        manager.save()
    manager.wait()
    values = [np.asarray(v.read_value()).tobytes() for v in (first, second, total, count, rate)]
    key = np.asarray(jax.random.key_data(checkpoint.key)).tobytes()
    return [*values, key, float(np.random.random()), random.random(), manager._counts()]


def handled(strategy, directory):
    """``PreemptionCheckpointHandler.run`` marks the boundaries."""
    with strategy.scope():
        weights = rx.Variable(np.ones((3, 1), "float32"))
    data = rx.data.from_arrays(rows()).repeat().batch(BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = rx.Checkpoint(weights=weights, data=iterator)

    def step(batch):
        x, y = batch
        gradient = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights.value)
        weights.assign_sub(0.1 * rx.get_replica_context().all_reduce("MEAN", gradient))

    with rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, directory
    ) as handler:
        for _ in range(handler.total_run_calls, 5):
            handler.run(strategy.run, step, args=(next(iterator),))
        return [np.asarray(weights.read_value()).tobytes(), handler.total_run_calls]


@pytest.mark.parametrize("program", [two_networks, handled], ids=lambda each: each.__name__)
def test_replacement_ends_with_the_bits_of_the_others(program, monkeypatch, tmp_path):
    np.random.seed(4)
    random.seed(4)
    live = Admission()
    strategy, peers = strategy_as(monkeypatch, live, number=0, num_tasks=R)
    expected = program(strategy, tmp_path)
    num = len(live.gifts)
    assert num == len(set(live.versions)), "one boundary in each iteration"
    for at in range(num - 1):
        admission, version = Admission(live.gifts[at], is_asked=False), live.versions[at]
        strategy, replaced = strategy_as(monkeypatch, admission, number=1, num_tasks=R, version=version)
        replaced.last_entry, replaced.counts_of_others = version, live.counts_before
        assert program(strategy, tmp_path) == expected, f"boundary {at}"
        own = [key for key in replaced.keys if key[0] > version and key[1] != "checkpoint counts"]
        assert own == [key for key in peers.keys if key[0] > version], f"all-gathers of boundary {at}"
