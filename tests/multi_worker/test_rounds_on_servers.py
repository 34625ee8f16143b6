"""Rounds on real servers, in separate processes: a worker is stopped or killed, or a parameter server comes back."""

import time

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._ps.coordinator import cluster_coordinator
from replicax._ps.job.limits import Limits
from replicax.coordinator import ClusterCoordinator
from replicax.testing import server_cluster

JOIN_S = 60.0

pytestmark = pytest.mark.timeout(180)


class Job:
    """Variables that decrease by 1 in each round, on all servers, and a count of function runs."""

    def __init__(self, strategy, coordinator):
        self.strategy, self.coordinator = strategy, coordinator
        with strategy.scope():
            self.variables = [keras.Variable(np.zeros(64, np.float32)) for _ in range(2)]
            self.count = rx.Variable(np.int32(0))
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build(self.variables)

    def step(self):
        def replica_fn():
            values = jnp.stack([v.value[0] for v in self.variables])
            self.count.assign_add(1)
            self.optimizer.apply([jnp.ones(64)] * 2, self.variables)
            return values

        return self.strategy.run(replica_fn)

    def train(self, num):
        """The values of the variables that each function has seen."""
        values = [self.coordinator.schedule(self.step) for _ in range(num)]
        self.coordinator.join(JOIN_S)
        return np.stack(self.coordinator.fetch(values))

    def held(self):
        return [float(v.value[0]) for v in self.variables]

    def counts(self):
        closures = self.coordinator.statistics()["closures"]
        return closures["rounds"], closures["gradients_dropped"]

    def wait_until(self, is_so):
        until = time.monotonic() + JOIN_S
        while not is_so(self.coordinator.statistics()):
            assert time.monotonic() < until
            time.sleep(0.01)

    def wait_for_workers(self):
        self.wait_until(lambda told: all(w["connected"] for w in told["workers"].values()))


@pytest.fixture(scope="module")
def cluster():
    with server_cluster(workers=3, ps=2) as cluster:
        yield cluster


@pytest.mark.rest
def test_a_stopped_worker_is_not_waited_for_and_its_gradient_is_dropped(cluster, monkeypatch):
    monkeypatch.setattr(
        cluster_coordinator, "Limits", lambda **more: Limits(heartbeat_timeout_s=JOIN_S, **more)
    )
    with (
        rx.ParameterServerStrategy() as strategy,
        ClusterCoordinator(strategy, replicas_to_aggregate=2) as coordinator,
    ):
        job = Job(strategy, coordinator)
        job.wait_for_workers()
        job.train(2)
        stopped = cluster.tasks["worker", 0]
        stopped.stop()
        try:
            for _ in range(40):
                coordinator.schedule(job.step)
            # It has a function of the first round, as a backup or not; the others run the rest. The slower one may
            # have a backup.
            job.wait_until(lambda told: told["closures"]["finished"] == 2 + 39)
            job.wait_until(lambda told: told["closures"]["rounds"] == (41 - job.counts()[1]) // 2)
            rounds, num_late = job.counts()
            assert rounds >= 14  # of three workers one at most is late in a round
            assert job.held() == [-rounds, -rounds]
        finally:
            stopped.resume()
        coordinator.join(JOIN_S)
        assert job.counts() == (rounds, num_late + 1)
        assert job.held() == [-rounds, -rounds]
        assert int(job.count) == 42
        assert int(job.optimizer.iterations.value) == rounds


@pytest.mark.rest
def test_workers_that_are_killed_in_rounds_do_not_hang_them_and_nothing_counts_twice(cluster):
    cluster.wait_for_servers()
    with (
        rx.ParameterServerStrategy() as strategy,
        ClusterCoordinator(strategy, replicas_to_aggregate=3) as coordinator,
    ):
        job = Job(strategy, coordinator)
        job.wait_for_workers()
        seen = [job.train(3)]
        for n in range(2):
            values = [coordinator.schedule(job.step) for _ in range(60)]
            cluster.tasks["worker", n].kill()
            cluster.restart("worker", n)
            coordinator.join(JOIN_S)
            seen.append(np.stack(coordinator.fetch(values)))
        assert job.counts() == (41, 0)
        assert job.held() == [-41, -41]
        assert int(job.count) == 123
        assert int(job.optimizer.iterations.value) == 41
        seen = np.concatenate(seen)
        np.testing.assert_array_equal(seen[:, 0], seen[:, 1])  # the same round on both servers
        assert sorted(seen[:, 0]) == sorted(-float(n // 3) for n in range(123))


@pytest.mark.long
def test_a_parameter_server_that_comes_back_does_not_hang_a_round(tmp_path):
    arguments = ["--snapshot-dir", tmp_path, "--snapshot-interval", 1]
    with (
        server_cluster(workers=2, ps=2, server_arguments=arguments) as cluster,
        rx.ParameterServerStrategy() as strategy,
        ClusterCoordinator(strategy, replicas_to_aggregate=2) as coordinator,
    ):
        job = Job(strategy, coordinator)
        num_before = 0
        while not has_snapshots(coordinator, 3):  # the last one has all variables
            job.train(2)
            num_before += 1
        job.train(1)  # its gradient waits on both
        cluster.tasks["ps", 1].kill()
        cluster.restart("ps", 1)
        job.train(39)
        assert job.counts() == (num_before + 20, 0)
        assert job.held()[0] == -(num_before + 20)
        assert -(num_before + 20) <= job.held()[1] <= -20


def has_snapshots(coordinator, num):
    told = coordinator.statistics()["ps"].values()
    return all(ps["statistics"].get("num_snapshots", 0) >= num for ps in told)
