"""Variables with a separate value on each worker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from in_memory_servers import in_memory_strategy
from replicax.coordinator import ClusterCoordinator
from replicax.errors import TraceError, VariableError
from replicax.experimental import PerWorkerVariable
from replicax.experimental.partitioners import FixedShardsPartitioner

NUM_WORKERS = 3


@pytest.fixture(params=[None, FixedShardsPartitioner(2)], ids=["whole", "shards"])
def strategy(request):
    with in_memory_strategy(workers=NUM_WORKERS, ps=2, partitioner=request.param) as strategy:
        yield strategy


def test_each_worker_has_its_own(strategy, caplog):
    with strategy.scope():
        steps = PerWorkerVariable(lambda: np.int32(10), name="steps")
        mean = PerWorkerVariable([0.0, 1.0])

    def step(x):
        def replica_fn(x):
            steps.assign_add(3)
            steps.assign_sub(2)
            mean.assign(mean * 0.5 + x)
            return rx.coordinator.experimental_get_current_worker_index(), steps.value, mean + 0

        return strategy.run(replica_fn, args=(x,))

    with ClusterCoordinator(strategy) as coordinator:
        values = [coordinator.schedule(step, args=(np.float32(n),)) for n in range(60)]
        coordinator.join()
        seen = {n: [] for n in range(NUM_WORKERS)}
        for x, (index, count, now) in enumerate(coordinator.fetch(values)):
            seen[int(index)].append((x, int(count), now))
        for runs in seen.values():
            expected = np.float32([0, 1])
            for number, (x, count, now) in enumerate(sorted(runs, key=lambda run: run[1])):
                assert count == 11 + number
                expected = expected * np.float32(0.5) + np.float32(x)
                np.testing.assert_allclose(now, expected, rtol=1e-6)
        counts = [int(count) for count in steps.read_all()]
        assert counts == [10 + len(seen[n]) for n in range(NUM_WORKERS)]
        assert sum(counts) == 60 + 10 * NUM_WORKERS
        steps.assign(0)
        assert [int(count) for count in steps.read_all()] == [0] * NUM_WORKERS
        mean.assign([4, 5])
        np.testing.assert_array_equal(mean.read_all(), [[4, 5]] * NUM_WORKERS)
    assert not [
        r for r in caplog.records if r.name == "replicax"
    ]  # no server gets a whole new value, of which another worker's might be lost


def test_value_is_the_workers_inside_jax_traces_too(strategy):
    with strategy.scope():
        v = PerWorkerVariable(2.0)

    def step(x):
        slope = jax.grad(lambda x: x**2 * v.value)(x)
        total, _ = jax.lax.scan(lambda total, n: (total + v.value * n, None), jnp.float32(0), jnp.arange(3.0))
        return slope, total

    with ClusterCoordinator(strategy) as coordinator:
        assert tuple(map(float, coordinator.schedule(step, args=(np.float32(3),)).fetch())) == (12.0, 6.0)


def test_replicas_of_one_worker_cannot_assign_it():
    with in_memory_strategy(devices_per_worker=2) as strategy, ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = PerWorkerVariable(0.0)

        def step():
            strategy.run(lambda: v.assign_add(1.0))

        message(TraceError, lambda: coordinator.schedule(step), "on 2 replicas", "after run")


def test_unsupported_uses(strategy):
    with strategy.scope():
        v = PerWorkerVariable(np.zeros(2), name="v")
    assert repr(v) == "PerWorkerVariable('v', shape=(2,), dtype=float32, num_workers=3)"
    message(VariableError, lambda: v + 1, "'v'", "outside of a scheduled function", "read_all()")
    message(VariableError, lambda: v.assign(np.zeros(5)), "(5,)", "shapes cannot change")
    message(
        VariableError, lambda: PerWorkerVariable(1.0), "scope of a ParameterServerStrategy", "rx.Variable"
    )
