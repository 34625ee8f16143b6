"""Steps that several processes take together: each has its own rows, and the sizes of all. Threads stand for processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicax._src.cluster.gathered import GatheredValues
from replicax._src.devices.autoshard import AutoShardPolicy, WorkerShare
from replicax._src.input.agreed_steps import agreed
from replicax._src.input.pipeline import from_arrays
from replicax._src.input.sources import open_source

NUM_WORKERS, NUM_REPLICAS = 2, 4


class InMemory:
    """The other processes, as threads that meet in each all-gather."""

    names = ("worker 0", "worker 1")

    def __init__(self, number, met, values):
        self.number, self._met, self._values = number, met, values

    def __len__(self):
        return len(self.names)

    def new_topic(self, name):
        return name

    def gather(self, topic, value, what, is_cancelled=None):
        self._values[self.number] = value
        self._met.wait(timeout=30)
        values = list(self._values)
        self._met.wait(timeout=30)
        return GatheredValues(values, (0, 1), self.names, self.number)


def steps_of_all(num_rows):
    """Returns the steps of each worker, whose own data have so many rows in batches of 7."""
    met, values = threading.Barrier(NUM_WORKERS), [None] * NUM_WORKERS

    def steps_of(worker):
        rows = from_arrays(np.arange(num_rows[worker])).batch(7)
        share = WorkerShare(NUM_WORKERS, worker, NUM_REPLICAS)
        source = open_source(rows, share=share, policy=AutoShardPolicy.OFF)
        return list(agreed(source, source.iterate(), InMemory(worker, met, values)))

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        return list(pool.map(steps_of, range(NUM_WORKERS)))


@pytest.mark.timeout(60)
def test_all_processes_know_the_sizes_of_all_replicas_in_the_order_of_the_processes():
    first, second = steps_of_all([7, 7])
    assert [(step.sizes, step.all_sizes) for step in first] == [
        ((2, 2), (2, 2, 2, 1)),
        ((2, 1), (2, 1, 2, 2)),
    ]
    assert [(step.sizes, step.all_sizes) for step in second] == [
        ((2, 1), (2, 2, 2, 1)),
        ((2, 2), (2, 1, 2, 2)),
    ]


@pytest.mark.timeout(60)
def test_a_process_whose_data_have_ended_takes_part_without_rows_until_all_have():
    first, second = steps_of_all([14, 7])
    assert [step.all_sizes for step in first] == [step.all_sizes for step in second]
    assert [step.all_sizes for step in second][2:] == [(2, 2, 0, 0), (2, 1, 0, 0)]
    assert [len(step.arrays[0]) for step in second] == [3, 4, 0, 0]
