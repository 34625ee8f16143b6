"""Parameter servers with two copies, in separate processes: one dies, is stopped or cut off, and nothing is lost."""

import contextlib
import json
import os
import random
import threading
import time

import numpy as np
import pytest

import replicax as rx
from checks import message
from faulty_network import faulty_server_cluster
from replicax._ps.store.snapshots import Snapshot
from replicax._ps.strategy import coordinator_form
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax.coordinator import ClusterCoordinator
from replicax.errors import InvalidArgumentError, UnavailableError
from replicax.testing import server_cluster

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

pytestmark = pytest.mark.timeout(250)

JOIN_S = 120.0
GOES_ON_S = 25.0  # a second or two on a quiet machine; whoever waits for a silent server waits 60 s


def until(is_so, what, timeout_s=60.0):
    """Waits until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


class Job:
    """A strategy with two copies, its coordinator, a counter on each parameter server, and a small model with Adam."""

    def __init__(self, cluster, num_ps=2, **options):
        self.cluster = cluster
        self.strategy = rx.ParameterServerStrategy(cluster.resolver, replication=2, **options)
        self.coordinator = ClusterCoordinator(self.strategy)
        self.num_scheduled = 0
        with self.strategy.scope():
            self.counters = [rx.Variable(np.float32(0.0), name=f"counter_{n}") for n in range(num_ps)]
            keras.utils.set_random_seed(0)
            self.model = keras.Sequential(
                [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
            )
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)
        self.add, self.train = rx.function(self._add), rx.function(self._train)
        self.x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def _add(self):
        for counter in self.counters:
            counter.assign_add(1.0)

    def _train(self, x):
        with rx.GradientTape() as tape:
            loss = ((self.model(x) - x.sum(axis=1, keepdims=True)) ** 2).mean()
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self._add()

    def schedule(self, count=1):
        for _ in range(count):
            self.coordinator.schedule(self.add)
        self.num_scheduled += count

    def steps(self, count, first=0):
        for n in range(first, first + count):
            self.coordinator.schedule(self.train, args=(self.x[n % 8 * 8 : n % 8 * 8 + 8],))
        self.num_scheduled += count

    def join(self, timeout_s=JOIN_S):
        self.coordinator.join(timeout_s)

    def goes_on(self):
        """One more function is scheduled and ends, within the promised time."""
        started = time.monotonic()
        self.schedule()
        self.join()
        took_s = time.monotonic() - started
        assert took_s < GOES_ON_S, f"it took {took_s:.1f} s to go on"

    @property
    def counts(self):
        return [float(counter.numpy()) for counter in self.counters]

    def check(self):
        assert self.counts == [self.num_scheduled] * len(self.counters)

    @property
    def state(self):
        return [np.array(v.value) for v in (*self.model.variables, *self.optimizer.variables)]

    def assign(self, state):
        for variable, value in zip((*self.model.variables, *self.optimizer.variables), state, strict=True):
            variable.assign(value)

    @property
    def replication(self):
        return self.coordinator.statistics()["replication"]

    def until_protected(self):
        until(lambda: not self.replication["unprotected"], "all is on two servers again")

    def ps(self, index):
        return self.cluster.tasks["ps", index]

    def close(self):
        self.coordinator.close()
        self.strategy.close()


@pytest.fixture(scope="module")
def tasks():
    with server_cluster(workers=1, ps=2) as cluster:
        yield cluster


@pytest.fixture
def servers(tasks):
    """A worker and two parameter servers, all running; tests may leave them in any state."""
    dead = [task for task in tasks.servers if not task.is_running]
    for task in dead:
        task.restart()
    if dead:
        tasks.wait_for_servers()
    return tasks


@pytest.fixture
def job(servers):
    with contextlib.closing(Job(servers)) as job:
        yield job


def warnings_of(caplog, part):
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def test_a_primary_is_killed_and_nothing_is_lost(job, caplog):
    """One worker, so that the updates have one order: after a kill the model is bit-identical."""
    first = job.state
    job.steps(60)
    job.join()
    expected = job.state
    job.assign(first)
    job.steps(30)
    until(lambda: job.coordinator.statistics()["closures"]["finished"] >= 70, "some have run")
    job.ps(0).kill()
    job.steps(30, first=30)
    job.goes_on()
    for got, wanted in zip(job.state, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert int(job.optimizer.iterations.value) == 60
    job.check()
    assert job.replication == {"primaries": [1, 1], "unprotected": [0, 1], "lost": []}
    (warning,) = warnings_of(caplog, "is lost. No acknowledged")
    assert warning.startswith("ps 0 is lost. No acknowledged update is lost")
    assert "on ps 1" in warning


@pytest.mark.long
def test_returning_server_gets_the_full_state_and_takes_over(job, caplog):
    job.steps(5)
    job.join()
    job.ps(1).kill()
    job.goes_on()
    over = threading.Event()

    def go_on():
        while not over.is_set():
            job.steps(5)
            job.join()

    going = threading.Thread(target=go_on)
    going.start()
    job.cluster.restart("ps", 1)
    job.until_protected()
    over.set()
    going.join()
    assert warnings_of(caplog, "on two parameter servers again")
    assert job.coordinator.check_copies() == []
    job.check()
    before = job.state
    job.ps(0).kill()
    job.goes_on()
    for got, wanted in zip(job.state, before, strict=True):
        np.testing.assert_array_equal(got, wanted)
    job.check()
    job.cluster.restart("ps", 0)
    job.until_protected()
    job.ps(0).kill()  # before anybody has used it
    job.ps(1).kill()
    job.schedule()
    error = message(UnavailableError, job.join, "is lost, and ps ")
    assert "ps 0" in error
    assert "ps 1" in error


def snapshots_in(folder, interval_s=1000):
    return ["--snapshot-dir", folder, "--snapshot-interval", interval_s]


def num_snapshots(job):
    """The counts of each parameter server, of both groups together, at its last heartbeat."""
    ps = job.coordinator.statistics()["ps"]
    return [ps[f"ps {n}"]["statistics"].get("num_snapshots", 0) for n in range(2)]


def newest_snapshots(folder, group):
    """For each server, the position and the number of updates of its newest snapshot of a group, and the file."""
    found = []
    for ps in range(2):
        path = max((folder / f"ps-{ps}" / f"group-{group}").glob("*.rxps"))
        with contextlib.closing(Snapshot.opened(path, int(path.stem[-10:]))) as snapshot:
            content = snapshot.content
        found.append((tuple(content["position"]), content["updates"], path))
    return found


@pytest.mark.rest
def test_both_killed_servers_resume_from_the_newer_snapshot(tmp_path, caplog):
    """Two groups; for one of them each server has the newer snapshot. The lost updates are those that the job reports,
    and no more."""
    with (
        server_cluster(workers=1, ps=2, server_arguments=snapshots_in(tmp_path, 4)) as cluster,
        contextlib.closing(Job(cluster)) as job,
    ):
        assert job.counts == [0.0, 0.0]
        until(lambda: min(num_snapshots(job)) >= 2, "each server has a snapshot of both groups")
        for _ in range(2):
            wanted = min(num_snapshots(job)) + 2
            job.schedule(20)
            job.join()
            until(lambda wanted=wanted: min(num_snapshots(job)) >= wanted, "changes are in snapshots")
        job.schedule(10)
        job.join()
        until(
            lambda: (
                sum(
                    part["updates"]
                    for ps in job.coordinator.statistics()["ps"].values()
                    for part in ps["statistics"]["groups"].values()
                    if part["role"] == "primary"
                )
                == 100
            ),
            "the last heartbeats say all updates",
        )
        for n in range(2):
            job.ps(n).kill()
        for group in range(2):
            newest_snapshots(tmp_path, group)[group][2].unlink()  # that of the first primary
        expected = []
        for group in range(2):
            found = newest_snapshots(tmp_path, group)
            assert found[1 - group][0] > found[group][0]
            expected.append(float(found[1 - group][1]))
        assert all(20 <= count <= 50 for count in expected)
        for n in range(2):
            cluster.restart("ps", n)
        job.schedule(5)
        job.join()
        assert job.counts == [count + 5.0 for count in expected]
        warnings = warnings_of(caplog, "resume from the newest snapshot")
        num_gone = {int(text.split("variables of ps ")[1][0]): text for text in warnings}
        for group, text in num_gone.items():
            assert f"snapshot, on ps {1 - group}" in text
            assert f": about {50 - int(expected[group])} acknowledged updates" in text
        assert len(num_gone) == 2
        job.until_protected()
        assert job.coordinator.check_copies() == []
        job.schedule(5)
        job.join()
        assert job.counts == [count + 10.0 for count in expected]
        job.ps(0).kill()  # copies are what they were before
        job.goes_on()
        assert job.counts == [count + 11.0 for count in expected]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_both_are_killed_at_random_while_they_write_snapshots(tmp_path, caplog):
    """Nothing counts twice, at least the reported updates are lost, and the copies are equal afterwards."""
    chance, over = random.Random(2), threading.Event()
    with (
        server_cluster(workers=2, ps=2, server_arguments=snapshots_in(tmp_path, 0.3)) as cluster,
        contextlib.closing(Job(cluster)) as job,
    ):
        assert job.counts == [0.0, 0.0]
        until(lambda: min(num_snapshots(job)) >= 2, "each server has a snapshot of both groups")
        failures = []
        gone = lambda: warnings_of(caplog, "resume from the newest snapshot")  # noqa: E731

        def go_on():
            try:
                while not over.is_set():
                    job.steps(20)
                    job.schedule(20)
                    job.join()
            except Exception as error:
                failures.append(error)

        going = threading.Thread(target=go_on)
        going.start()
        for number in range(1, 5):
            time.sleep(chance.uniform(0.5, 2.0))
            for n in chance.sample(range(2), 2):
                job.ps(n).kill()
            for n in chance.sample(range(2), 2):
                cluster.tasks["ps", n].restart()
            until(lambda n=2 * number: failures or len(gone()) == n, "both groups go on", 90.0)
            until(lambda: failures or not job.replication["unprotected"], "all is on two servers again", 90.0)
        over.set()
        going.join()
        assert not failures
        assert job.coordinator.check_copies() == []
        for group, count in enumerate(job.counts):
            texts = [text for text in gone() if f"variables of ps {group} resume" in text]
            num_gone = sum(int(text.split(" acknowledged updates")[0].rsplit(" ", 1)[1]) for text in texts)
            assert count <= job.num_scheduled - num_gone
        before = job.counts
        job.schedule(10)
        job.join()
        assert job.counts == [count + 10.0 for count in before]


def test_too_few_servers_and_partial_snapshots_raise():
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    told = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": told})
    make = lambda **options: rx.ParameterServerStrategy(resolver, **options)  # noqa: E731
    message(InvalidArgumentError, lambda: make(replication=2), "needs 2 parameter servers", "has 1", "--ps 2")
    message(InvalidArgumentError, lambda: make(replication=3), "got 3", "or 2")
    message(InvalidArgumentError, lambda: make(replication=2, is_coordinator=False), "needs a coordinator")
    message(
        InvalidArgumentError,
        lambda: coordinator_form.begin_groups(None, [None, 60.0]),
        "ps 0 take(s) no snapshots",
        "--snapshot-dir",
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_servers_are_killed_at_random_with_time_to_come_back():
    chance, over = random.Random(1), threading.Event()
    with server_cluster(workers=2, ps=3) as cluster, contextlib.closing(Job(cluster, num_ps=3)) as job:
        failures = []

        def go_on():
            try:
                while not over.is_set():
                    job.steps(20)
                    job.schedule(20)
                    job.join()
            except Exception as error:
                failures.append(error)

        going = threading.Thread(target=go_on)
        going.start()
        for _ in range(8):
            time.sleep(chance.uniform(0.0, 2.0))
            cluster.restart("ps", chance.randrange(3))
            until(lambda: failures or job.replication["unprotected"], "it is missed")
            until(
                lambda: failures or not job.replication["unprotected"], "all is on two servers again", 120.0
            )
        over.set()
        going.join()
        assert not failures
        assert job.coordinator.check_copies() == []
        job.check()
        assert int(job.optimizer.iterations.value) <= job.num_scheduled


@pytest.mark.long
def test_stopped_primary_rejects_requests_when_it_wakes(job):
    job.steps(20)
    job.join()
    job.steps(200)
    job.ps(0).stop()  # amid what it is asked
    started = time.monotonic()
    job.join()
    assert time.monotonic() - started < 2 * GOES_ON_S
    assert job.replication["primaries"] == [1, 1]
    job.check()
    job.schedule(50)
    job.join()
    job.ps(0).resume()
    job.until_protected()
    assert job.replication["primaries"] == [1, 1]
    assert job.coordinator.check_copies() == []
    job.check()
    job.ps(1).kill()
    job.goes_on()
    job.check()


@pytest.mark.long
@pytest.mark.parametrize("apart_s", [0.0, 6.0])
def test_training_resumes_after_both_servers_were_silent_for_20_s(job, apart_s):
    job.steps(20)
    job.schedule()  # its program is on the servers then
    job.join()
    job.steps(100)
    job.ps(0).stop()
    time.sleep(apart_s)
    job.ps(1).stop()
    job.schedule(20)
    time.sleep(20)
    job.ps(1).resume()
    time.sleep(apart_s / 2)
    job.ps(0).resume()
    job.schedule(20)
    job.join()
    job.check()
    job.until_protected()
    assert job.coordinator.check_copies() == []


@pytest.mark.long
def test_a_backup_is_stopped(job):
    """It is the primary of others at the same time; with three servers the first one is neither."""
    job.steps(20)
    job.join()
    job.steps(100)
    job.ps(1).stop()
    started = time.monotonic()
    job.join()
    assert time.monotonic() - started < 2 * GOES_ON_S
    assert job.replication["primaries"] == [0, 0]
    job.ps(1).resume()
    job.until_protected()
    assert job.coordinator.check_copies() == []
    job.check()


@pytest.mark.long
@pytest.mark.parametrize("how", ["blackhole", "cut"])
def test_partition_between_two_servers_that_all_others_reach(how):
    with (
        faulty_server_cluster(workers=1, ps=2) as (cluster, network),
        contextlib.closing(Job(cluster)) as job,
    ):
        job.steps(20)
        job.join()
        network.partition("ps", 1, how=how, from_job="ps")
        started = time.monotonic()
        job.steps(20)
        job.join()
        assert time.monotonic() - started < 2 * GOES_ON_S
        assert job.replication["unprotected"] == [0, 1]
        assert job.replication["primaries"] == [0, 1]
        job.check()
        network.heal()
        job.until_protected()
        assert job.coordinator.check_copies() == []
        job.ps(0).kill()
        job.goes_on()
        job.check()


@pytest.mark.long
def test_shards_and_embeddings(servers):
    """One worker: a kill changes no bit of a sharded table whose rows are sent, nor of its slots."""
    partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
    with contextlib.closing(Job(servers, variable_partitioner=partitioner)) as job:
        with job.strategy.scope():
            keras.utils.set_random_seed(1)
            table = keras.layers.Embedding(1000, 8)
            table.build()
            optimizer = keras.optimizers.Adagrad(0.1)
            optimizer.build(table.trainable_variables)

        @rx.function
        def look_up(ids):
            with rx.GradientTape() as tape:
                loss = (table(ids) ** 2).sum()
            gradients = tape.gradient(loss, table.trainable_variables)
            optimizer.apply_gradients(zip(gradients, table.trainable_variables))

        ids = np.random.default_rng(0).integers(0, 1000, (60, 16)).astype(np.int32)
        variables = [*table.variables, *optimizer.variables]
        first = [np.array(v.value) for v in variables]

        def run(start, stop):
            for n in range(start, stop):
                job.coordinator.schedule(look_up, args=(ids[n],))

        run(0, 60)
        job.join()
        expected = [np.array(v.value) for v in variables]
        for variable, value in zip(variables, first, strict=True):
            variable.assign(value)
        run(0, 30)
        job.ps(1).kill()
        run(30, 60)
        job.goes_on()
        for variable, wanted in zip(variables, expected, strict=True):
            np.testing.assert_array_equal(np.array(variable.value), wanted)
        job.cluster.restart("ps", 1)
        job.until_protected()


@pytest.mark.long
def test_fit_continues(servers):
    with contextlib.closing(Job(servers)) as job:

        class Kill(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    job.ps(0).kill()

        with job.strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        x = np.tile(job.x, (4, 1))
        history = model.fit(x, x.sum(axis=1), batch_size=8, epochs=6, verbose=0, callbacks=[Kill()]).history
        assert int(model.optimizer.iterations.value) == 6 * 32
        assert history["loss"][-1] < history["loss"][0]
        job.cluster.restart("ps", 0)
        job.until_protected()
