"""``RemoteValue``: it is not the result, and says how to get it."""

import gc
import operator
import weakref

import numpy as np
import pytest

import replicax as rx
from checks import message
from in_memory_servers import in_memory_strategy
from memory_cluster import eventually
from replicax._ps.coordinator.remote_value import RemoteValue
from replicax.errors import InvalidArgumentError

USES = {
    "float": float,
    "int": int,
    "format": "{:.4f}".format,
    "unpack": lambda value: [*value],
    "index": operator.itemgetter("loss"),
    "add": lambda value: value + 1.0,
    "add to": lambda value: 1.0 + value,
    "sum": lambda value: sum([value, value]),
    "divide": lambda value: value / 2,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_of_a_result_that_was_not_fetched_says_how_to_fetch_it(use):
    message(InvalidArgumentError, lambda: use(RemoteValue("step", None)), "'step'", "value.fetch()")


def test_a_result_that_was_not_fetched_can_be_printed():
    assert f"{RemoteValue('step', None)}" == "<RemoteValue of 'step', waiting>"


def test_result_does_not_keep_the_arguments():
    """Programs keep the results of many steps, but not their batches."""
    with in_memory_strategy() as strategy, rx.coordinator.ClusterCoordinator(strategy) as coordinator:
        batches = [np.ones(10, np.float32) for _ in range(3)]
        for batch in batches:
            batch.flags.writeable = False  # otherwise they are copied
        alive = [weakref.ref(batch) for batch in batches[:2]]  # the worker may keep its last message
        values = [coordinator.schedule(lambda x: x + 1, (batch,)) for batch in batches]
        coordinator.join(60.0)
        del batch, batches
        eventually(lambda: gc.collect() >= 0 and not any(each() is not None for each in alive), 10.0)
        assert [value.fetch()[0] for value in values] == [2, 2, 2]
