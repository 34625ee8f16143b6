"""Iterators of real workers end."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.coordinator import ClusterCoordinator
from replicax.errors import OutOfRangeError
from replicax.testing import server_cluster

pytestmark = pytest.mark.timeout(180)
WAIT_S = 60


@pytest.mark.timeout(300)
def test_real_workers_evaluate_to_the_end_also_after_one_was_killed():
    """In separate processes: each pass has its own iterators, and a worker that was killed starts with new ones."""
    rows = np.arange(11, dtype=np.float32)

    def evaluate(iterator, key):
        total, worker = jnp.float32(0), rx.coordinator.experimental_get_current_worker_index()
        for _ in range(4):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                return total, worker, None, key
            total += jnp.sum(optional.get_value())
        return total, worker, jax.random.bits(key), jax.random.split(key)

    with (
        server_cluster(workers=2, ps=1) as cluster,
        rx.ParameterServerStrategy() as strategy,
        ClusterCoordinator(strategy) as coordinator,
    ):
        dataset = coordinator.create_per_worker_dataset(lambda: rx.data.from_arrays(rows).batch(2))
        key, connections = jax.random.key(1), 1
        for is_killed in (False, True):
            if is_killed:
                cluster.tasks["worker", 1].kill()
                cluster.restart("worker", 1)
                connections = 2
            until = time.monotonic() + WAIT_S
            while coordinator.statistics()["workers"]["worker 1"]["connections"] < connections:
                assert time.monotonic() < until
                time.sleep(0.05)
            iterator = iter(dataset)
            totals, ends = {0: 0.0, 1: 0.0}, {0: 0, 1: 0}
            while not all(ends.values()):
                assert time.monotonic() < until
                values = [coordinator.schedule(evaluate, (iterator, key)) for _ in range(4)]
                coordinator.join(WAIT_S)
                for total, worker, bits, keys in coordinator.fetch(values):
                    totals[int(worker)] += float(total)
                    ends[int(worker)] += bits is None
                    expected = key if bits is None else jax.random.split(key)
                    assert bits is None or bits == jax.random.bits(key)
                    assert (jax.random.key_data(keys) == jax.random.key_data(expected)).all()
            assert totals == {0: rows.sum(), 1: rows.sum()}
            coordinator.schedule(lambda iterator: next(iterator), (iterator,))
            with pytest.raises(OutOfRangeError):
                coordinator.join(WAIT_S)
