"""The coordinator writes variables that are on servers, and results of scheduled functions."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from event_files import scalars_in, summaries_in
from in_memory_servers import in_memory_strategy
from replicax.errors import ContextError, InvalidArgumentError
from replicax.experimental.partitioners import FixedShardsPartitioner


@pytest.fixture
def strategy():
    with in_memory_strategy(2, 2, FixedShardsPartitioner(2)) as strategy:
        yield strategy


@pytest.fixture
def coordinator(strategy):
    with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
        yield coordinator


def test_coordinator_writes_variables_and_results_of_scheduled_functions(strategy, coordinator, tmp_path):
    with strategy.scope():
        count = rx.Variable(0, aggregation="SUM")
        table = rx.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))

    def step(x):
        count.assign_add(1)
        return x * 2

    with rx.SummaryWriter(tmp_path, strategy=strategy) as writer:
        for number in range(4):
            writer.scalar("loss", coordinator.schedule(step, (jnp.float32(number),)), number)
        coordinator.join(60)
        writer.scalar("count", count, 4)
        writer.histogram("table", table, 4, buckets=2)
    assert scalars_in(tmp_path) == {"loss": {n: 2.0 * n for n in range(4)}, "count": {4: 4.0}}
    assert summaries_in(tmp_path)[-1][-1].tolist() == [[0, 3.5, 4], [3.5, 7, 4]]


def test_summary_in_a_scheduled_function_raises_and_results_are_checked_later(coordinator, tmp_path):
    writer = rx.SummaryWriter(tmp_path)
    with pytest.raises(ContextError, match=r"Return the value"):
        coordinator.schedule(lambda: writer.scalar("loss", 1.0, 0) and None)
    writer.scalar("loss", coordinator.schedule(lambda: jnp.zeros(3)), 0)
    with pytest.raises(InvalidArgumentError, match=r"takes one number, got shape \(3,\)"):
        writer.flush()
    writer.close()
