"""Workers and parameter servers that die, stop or are slow, in separate processes; this process is the coordinator."""

import contextlib
import functools
import os
import random
import resource
import threading
import time

import numpy as np
import pytest

import replicax as rx
from checks import message
from faulty_network import faulty_server_cluster
from replicax._ps.coordinator import cluster_coordinator
from replicax._ps.job import limits, worker_state
from replicax.coordinator import ClusterCoordinator
from replicax.errors import (
    CancelledError,
    OutOfRangeError,
    StaleCoordinatorError,
    UnauthenticatedError,
    UnavailableError,
)
from replicax.testing import LocalCluster, server_cluster
from slowed_tasks import slowed

pytestmark = pytest.mark.timeout(250)

JOIN_S = 120.0
LOST_S = 45.0


def until(is_so, what, timeout_s=60.0):
    """Waits until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def slow_dataset(delay_s=0.3, count=1_000_000, files=None):
    """The dataset of each worker: each element takes this time; a file in ``files`` says which worker has started to
    make it."""

    def dataset_fn():
        class Slow:
            def __iter__(self):
                if files is not None:
                    with open(os.path.join(files, str(os.getpid())), "w"):
                        pass
                    time.sleep(1.0)
                for _ in range(count):
                    time.sleep(delay_s)
                    yield np.float32(1.0)

        return Slow()

    return dataset_fn


def held_dataset(path, count=1_000_000):
    """The dataset of each worker: one element at once, the others and the end when a file exists at ``path``."""

    def dataset_fn():
        class Held:
            def __iter__(self):
                yield np.float32(1.0)
                while not os.path.exists(path):
                    time.sleep(0.02)
                for _ in range(count - 1):
                    yield np.float32(1.0)

        return Held()

    path = str(path)
    return dataset_fn


class Job:
    """A strategy, its coordinator, and a counter on each parameter server."""

    def __init__(self, cluster, **options):
        self.cluster = cluster
        self.strategy = rx.ParameterServerStrategy(cluster.resolver)
        self.coordinator = ClusterCoordinator(self.strategy, **options)
        with self.strategy.scope():
            self.counters = [rx.Variable(0.0, name=f"counter_{n}") for n in range(2)]
        self.add = rx.function(self._add)
        self.take = rx.function(self._take)

    def _add(self, x):
        for counter in self.counters:
            counter.assign_add(x)
        return x

    def _take(self, iterator):
        return self._add(next(iterator))

    def schedule(self, count=1):
        return [self.coordinator.schedule(self.add, args=(1.0,)) for _ in range(count)]

    def slow(self, count, delay_s=0.3):
        """Functions that take long, each on an element of a slow dataset."""
        return self.take_of(slow_dataset(delay_s), count)

    def take_of(self, dataset, count):
        iterator = iter(self.coordinator.create_per_worker_dataset(dataset))
        return [self.coordinator.schedule(self.take, args=(iterator,)) for _ in range(count)]

    def join(self, timeout_s=JOIN_S):
        self.coordinator.join(timeout_s)

    @property
    def counts(self):
        return [float(counter.numpy()) for counter in self.counters]

    def worker(self, index):
        return self.coordinator.statistics()["workers"][f"worker {index}"]

    def until_connected(self, *indices):
        until(lambda: all(self.worker(i)["connected"] for i in indices), "workers are connected")

    def until_in_flight(self, *indices):
        until(lambda: all(self.worker(i)["in_flight"] for i in indices), "workers have something to do")

    def close(self):
        self.coordinator.close()
        self.strategy.close()


@pytest.fixture(scope="module")
def servers():
    """Two workers and two parameter servers, which tests leave unchanged."""
    with server_cluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def job(servers):
    with contextlib.closing(Job(servers)) as job:
        job.until_connected(0, 1)
        yield job
    dead = [task for task in servers.servers if not task.is_running]
    for task in dead:
        task.restart()
    servers.wait_for_servers()
    assert not dead


def back(cluster, index, job=None):
    """Starts a worker again."""
    cluster.restart("worker", index)
    cluster.tasks["worker", index].wait_for_output(" listens at ", since_start=True)
    if job is not None:
        job.until_connected(index)


def test_a_worker_is_killed_between_functions(job):
    first = job.schedule(2)
    job.join()
    job.cluster.tasks["worker", 0].kill()
    assert [value.fetch() for value in first] == [1.0, 1.0]  # results that are there stay
    assert float(first[0].get()) == 1.0
    assert job.counts == [2.0, 2.0]  # and variables are read, whoever of the workers is down
    job.schedule(2)
    job.join()
    assert job.counts == [4.0, 4.0]
    back(job.cluster, 0)


@pytest.mark.rest
def test_workers_are_killed_in_functions(job, tmp_path):
    """One worker is killed repeatedly, then both at once: their functions run again, and count once."""
    values = []
    for killed in ([0], [0, 1]):
        values += job.take_of(held_dataset(tmp_path / str(killed)), 8)  # one of each worker's, and no more
        job.until_in_flight(0, 1)
        for index in killed:
            job.cluster.tasks["worker", index].kill()
        for index in killed:
            job.cluster.restart("worker", index)
        (tmp_path / str(killed)).touch()
        job.until_connected(0, 1)
    job.join()
    assert job.counts == [16.0, 16.0]
    assert [value.fetch() for value in values] == [1.0] * 16
    assert job.coordinator.statistics()["closures"]["retried"] >= 3


@pytest.mark.long
def test_one_worker_is_killed_while_another_stays_down(job):
    job.cluster.tasks["worker", 1].kill()
    values = job.slow(4)
    for _ in range(2):
        job.until_in_flight(0)
        back(job.cluster, 0, job)
    job.join()
    assert job.counts == [4.0, 4.0]
    assert [value.fetch() for value in values] == [1.0] * 4
    assert not job.worker(1)["connected"]
    back(job.cluster, 1, job)


@pytest.mark.parametrize("is_function", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.rest
def test_a_worker_is_killed_while_it_makes_a_dataset(job, tmp_path, is_function):
    dataset = slow_dataset(0.01, files=str(tmp_path))
    iterator = iter(job.coordinator.create_per_worker_dataset(dataset if is_function else dataset()))
    pids = [job.cluster.tasks["worker", index].pid for index in range(2)]
    until(
        lambda: {path.name for path in tmp_path.iterdir()} >= set(map(str, pids)), "datasets are being made"
    )
    job.cluster.tasks["worker", 0].kill()
    back(job.cluster, 0)
    for _ in range(6):
        job.coordinator.schedule(job.take, args=(iterator,))
    job.join()
    assert job.counts == [6.0, 6.0]
    until(
        lambda: str(job.cluster.tasks["worker", 0].pid) in {p.name for p in tmp_path.iterdir()}, "made again"
    )


@pytest.mark.rest
def test_a_function_fails_while_a_worker_is_killed(job, tmp_path):
    """The error belongs to the function, not to the worker; then everything continues."""
    values = job.take_of(held_dataset(tmp_path / "ends", count=1), 30)
    job.until_in_flight(0, 1)
    job.cluster.tasks["worker", 0].kill()
    (tmp_path / "ends").touch()
    message(OutOfRangeError, job.join, "no more elements")
    with pytest.raises(CancelledError, match="Please reschedule the function"):
        values[-1].fetch()
    before = job.counts
    assert max(before) <= 2.0  # what was cancelled with the dead worker may have run in part
    back(job.cluster, 0, job)
    job.schedule(3)
    job.join()
    assert job.counts == [count + 3.0 for count in before]


@pytest.mark.rest
def test_stopped_worker_is_lost_and_its_late_updates_are_rejected(job, tmp_path):
    values = job.take_of(held_dataset(tmp_path / "goes on"), 12)
    until(lambda: job.counts == [2.0, 2.0], "each worker waits for its second element")
    job.until_in_flight(0, 1)
    job.cluster.tasks["worker", 0].stop()
    try:
        (tmp_path / "goes on").touch()
        job.join()  # the other one has run what this one was at
        assert job.counts == [12.0, 12.0]
        assert [value.fetch() for value in values] == [1.0] * 12
        assert not job.worker(0)["connected"]
        duplicates = lambda: sum(  # noqa: E731
            each["statistics"].get("duplicates", 0) for each in job.coordinator.statistics()["ps"].values()
        )
    finally:
        job.cluster.tasks["worker", 0].resume()
    until(lambda: job.worker(0)["connected"] and duplicates() >= 2, "its pushes are refused")
    assert job.counts == [12.0, 12.0]
    job.schedule(4)
    job.join()
    assert job.counts == [16.0, 16.0]


@pytest.mark.rest
def test_others_continue_beside_a_slow_worker(job):
    def dataset_fn():
        is_slow = '"index": 0' in os.environ["TF_CONFIG"]
        return Slow(2.0 if is_slow else 0.02)

    class Slow:
        def __init__(self, delay_s):
            self.delay_s = delay_s

        def __iter__(self):
            while True:
                time.sleep(self.delay_s)
                yield np.float32(1.0)

    iterator = iter(job.coordinator.create_per_worker_dataset(dataset_fn))
    with slowed(job.cluster.tasks["worker", 0], 0.2):
        for _ in range(30):
            job.coordinator.schedule(job.take, args=(iterator,))
        job.join()
        ran = lambda index: job.worker(index)["statistics"]["num_closures"]  # noqa: E731
        until(lambda: ran(0) + ran(1) == 30, "heartbeats tell who ran what")
    assert job.counts == [30.0, 30.0]
    assert ran(1) >= 20  # by turns it would be 15
    assert job.worker(0)["connections"] == 1


def kill_at_random(job, num_kills, seed, at_once=20, is_enough=lambda: True):
    """Workers are killed at random moments, and more often until there are enough kills.

    Returns:
      The numbers of scheduled functions and of killed workers.
    """
    chance, over = random.Random(seed), threading.Event()
    count, killed, connections = 0, [], [0, 0]

    def until_back(index):
        """The worker is connected again, not by the connection to the killed process, whose end may be noticed late."""
        until(lambda: job.worker(index)["connections"] > connections[index], "it is connected again")
        job.until_connected(index)

    def kills():
        try:
            while len(killed) < num_kills or not (is_enough() or len(killed) > num_kills + 20):
                time.sleep(chance.uniform(0.0, 0.5))
                index = chance.randrange(2)
                until_back(index)
                connections[index] = job.worker(index)["connections"]
                job.cluster.restart("worker", index)
                killed.append(index)
            for index in range(2):
                until_back(index)
        finally:
            over.set()

    killer = threading.Thread(target=kills)
    killer.start()
    while not over.is_set():
        job.schedule(at_once)
        count += at_once
        job.join()
    killer.join()
    job.cluster.wait_for_servers()
    assert len(killed) >= num_kills
    return count, len(killed)


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.timeout(600))])
@pytest.mark.long
def test_the_counter_is_exact(job, num_kills):
    count, _ = kill_at_random(job, num_kills, seed=num_kills)
    assert job.counts == [count, count]


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
@pytest.mark.rest
def test_the_counter_is_exact_when_workers_are_killed_amid_functions_that_travel_together(
    job, num_kills, monkeypatch
):
    monkeypatch.setattr(worker_state, "_DEPTHS", (8, 32))  # they are quick, however busy the machine is
    monkeypatch.setattr(worker_state, "_SLOW_S", 10.0)
    amid, running = [], worker_state.WorkerState.running

    def noted(self):
        amid.append(len(running(self)))
        return running(self)

    monkeypatch.setattr(worker_state.WorkerState, "running", noted)
    job.schedule(10)  # what has finished once may travel with others
    job.join()
    scheduled, num_killed = kill_at_random(
        job, num_kills, seed=num_kills, at_once=200, is_enough=lambda: max(amid, default=0) > 1
    )
    assert job.counts == [10 + scheduled] * 2
    assert len(amid) >= num_killed  # on a machine that is busy one may be lost without being killed
    assert max(amid) > 1, "no worker was killed amid several"


# --- parameter servers ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("what", ["stop", "partition"])
def test_training_resumes_after_all_parameter_servers_were_silent_for_20_s(what):
    with (
        faulty_server_cluster(workers=2, ps=2) as (cluster, network),
        contextlib.closing(Job(cluster)) as job,
    ):
        job.until_connected(0, 1)
        job.schedule(50)
        job.join()
        job.schedule(400)
        for index in range(2):
            cluster.tasks["ps", index].stop() if what == "stop" else network.partition("ps", index)
        job.schedule(50)
        time.sleep(20)
        for index in range(2):
            cluster.tasks["ps", index].resume() if what == "stop" else None
        if what == "partition":
            network.heal()
        job.schedule(50)
        job.join()
        assert job.counts == [550.0, 550.0]
        assert job.coordinator.statistics()["ps"]["ps 0"]["restarts"] == 0


@pytest.mark.rest
def test_stopped_parameter_server_is_named_until_it_resumes(servers, monkeypatch):
    monkeypatch.setattr(cluster_coordinator, "Limits", functools.partial(limits.Limits, ps_silence_s=8.0))
    with contextlib.closing(Job(servers)) as job:
        _is_named_until_it_goes_on(job)


def _is_named_until_it_goes_on(job):
    job.schedule(1)
    job.join()
    job.cluster.tasks["ps", 1].stop()
    started = time.monotonic()
    job.schedule(2)
    message(UnavailableError, lambda: job.join(LOST_S), "ps 1", "--snapshot-dir")
    assert time.monotonic() - started < LOST_S
    message(UnavailableError, job.schedule, "ps 1")
    message(UnavailableError, job.coordinator.done, "ps 1")
    job.cluster.tasks["ps", 1].resume()
    until(lambda: job.coordinator.statistics()["ps"]["ps 1"]["connected"], "it is back")
    before = job.counts
    job.schedule(2)
    job.join()
    assert job.counts == [count + 2.0 for count in before]


@pytest.mark.rest
def test_a_parameter_server_that_is_killed_is_named():
    with server_cluster(workers=2, ps=2) as cluster, contextlib.closing(Job(cluster)) as job:
        job.until_connected(0, 1)
        cluster.tasks["worker", 0].kill()  # a worker that is being recovered does not change it
        job.slow(40, delay_s=0.2)  # most of which are cancelled
        job.until_in_flight(1)
        cluster.tasks["ps", 0].kill()
        started = time.monotonic()
        error = message(UnavailableError, lambda: job.join(LOST_S), "ps 0")
        assert time.monotonic() - started < LOST_S
        assert "--snapshot-dir" in error
        message(UnavailableError, job.schedule, "ps 0")
        cluster.restart("ps", 0)
        cluster.wait_for_servers()
        until(
            lambda: job.coordinator.statistics()["ps"]["ps 0"]["restarts"] == 0,
            "it is not taken for the old one",
        )
        message(UnavailableError, job.schedule, "ps 0")
        job.close()
        with contextlib.closing(Job(cluster)) as again:  # who starts again can use it
            again.schedule(2)
            again.join()
            assert again.counts == [2.0, 2.0]


def snapshots_in(folder, interval_s=1000):
    return ["--snapshot-dir", folder, "--snapshot-interval", interval_s]


def ps_statistics(job, index):
    return job.coordinator.statistics()["ps"][f"ps {index}"]["statistics"]


def until_snapshots(job):
    until(
        lambda: all(ps_statistics(job, ps).get("num_snapshots", 0) for ps in range(2)),
        "parameter servers have taken snapshots",
    )


def until_in_epoch(job):
    """All variables are in an epoch: parameter servers also take their own snapshots until the first request for one."""
    together = job.coordinator._loop.servers._together
    num_made = job.strategy.session.num_made
    until(lambda: together._num_made == num_made, "all that was made is in an epoch")


def until_updates(job, count):
    until(lambda: all(ps_statistics(job, ps)["updates"] >= count for ps in range(2)), "updates are counted")


def warnings_of(caplog, part):
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.mark.rest
def test_a_parameter_server_comes_back_with_its_snapshot(tmp_path, caplog):
    arguments = snapshots_in(tmp_path)
    with (
        server_cluster(workers=2, ps=2, server_arguments=arguments) as cluster,
        contextlib.closing(Job(cluster)) as job,
    ):
        assert job.counts == [0.0, 0.0]
        until_snapshots(job)
        job.schedule(6)
        job.join()
        until_updates(job, 6)
        values = job.slow(8, delay_s=0.5)
        job.until_in_flight(0, 1)
        cluster.tasks["ps", 1].kill()
        values += job.schedule(2)
        cluster.restart("ps", 1)
        assert job.counts[0] >= 6.0  # who reads waits
        job.join()
        assert [value.fetch() for value in values] == [1.0] * 10
        counts = job.counts
        assert counts[0] == 16.0
        (warning,) = warnings_of(caplog, "restarted from its last snapshot")
        assert warning.startswith("ps 1 restarted")
        num_gone = int(warning.split(": about ")[1].split()[0])
        assert (
            "its variables are as they were then: counter_1; of 16 scheduled functions they include the updates of the first 0"
            in (warning.replace("Its", "its"))
        )
        # Updates since its last heartbeat are not among them; functions scheduled after the kill are not lost.
        assert 6 <= num_gone <= 16.0 - counts[1] <= 14.0
        assert job.coordinator.statistics()["ps"]["ps 1"]["restarts"] == 1
        job.schedule(3)  # programs that it had before, and new ones
        job.coordinator.schedule(rx.function(lambda: job.counters[1].assign_add(10.0)))
        job.join()
        assert job.counts == [counts[0] + 3.0, counts[1] + 13.0]


@pytest.mark.long
def test_all_parameter_servers_rewind_together(tmp_path, caplog):
    arguments = snapshots_in(tmp_path, 1000)
    with (
        server_cluster(workers=2, ps=2, server_arguments=arguments) as cluster,
        contextlib.closing(Job(cluster, on_ps_restart="rewind")) as job,
    ):
        assert job.counts == [0.0, 0.0]
        until_in_epoch(job)
        job.schedule(3)
        job.join()
        with job.strategy.scope():
            more = rx.Variable(5.0)
        assert more.numpy() == 5.0
        until_in_epoch(job)  # soon after a variable was made
        values = job.schedule(6)
        job.join()
        more.assign(7.0)
        assert job.counts == [9.0, 9.0]
        cluster.restart("ps", 0)
        until(lambda: warnings_of(caplog, "went back"), "it is back")
        (warning,) = warnings_of(caplog, "went back")
        assert "6 scheduled functions" in warning
        assert [*job.counts, more.numpy()] == [3.0, 3.0, 5.0]
        assert [value.fetch() for value in values] == [1.0] * 6
        job.schedule(4)
        job.join()
        assert job.counts == [7.0, 7.0]


@pytest.mark.long
def test_job_continues_without_room_for_snapshots(tmp_path, caplog):
    """A limit on the size of a process's files replaces the full disk."""
    arguments = snapshots_in(tmp_path, 0.2)
    with (
        server_cluster(workers=1, ps=2, server_arguments=arguments) as cluster,
        contextlib.closing(Job(cluster)) as job,
    ):
        assert job.counts == [0.0, 0.0]
        until_snapshots(job)
        pid = cluster.tasks["ps", 0].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        for _ in range(4):
            job.schedule(2)
            job.join()
            time.sleep(0.5)
        assert job.counts == [8.0, 8.0]
        until(lambda: ps_statistics(job, 0)["snapshot_error"], "it says so")
        (warning,) = warnings_of(caplog, "continues without a new snapshot")
        assert warning.startswith("ps 0")
        assert "File too large" in warning
        assert (
            len([line for line in cluster.tasks["ps", 0].output if "No snapshot could be written" in line])
            == 1
        )
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        until(lambda: not ps_statistics(job, 0)["snapshot_error"], "there is room again")
        cluster.restart("ps", 0)
        until(lambda: job.coordinator.statistics()["ps"]["ps 0"]["restarts"], "it is back")
        assert job.counts == [8.0, 8.0]


# --- the coordinator ------------------------------------------------------------------------------------


@pytest.mark.rest
def test_later_coordinator_takes_over(job):
    job.schedule(2)
    job.join()
    iterator = iter(job.coordinator.create_per_worker_dataset(slow_dataset(0.1)))
    with contextlib.closing(Job(job.cluster)) as later:
        later.schedule(3)
        later.join()
        assert later.counts == [3.0, 3.0]
        until(lambda: raises(StaleCoordinatorError, job.join), "the earlier one is told")
        message(StaleCoordinatorError, lambda: job.coordinator.schedule(job.take, args=(iterator,)))
        message(StaleCoordinatorError, lambda: job.counts)
        assert later.counts == [3.0, 3.0]


def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


CHIEF = """
import replicax as rx, time
from replicax.coordinator import ClusterCoordinator
from replicax.testing import report

strategy = rx.ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    counter = rx.Variable(0.0)
add = rx.function(lambda: counter.assign_add(1.0))
coordinator.schedule(add)
coordinator.join()
report(count=float(counter.numpy()))
while True:
    coordinator.schedule(add)
    coordinator.join()
"""


@pytest.mark.rest
def test_tasks_end_when_their_coordinator_is_killed():
    arguments = ["--on-coordinator-loss", "exit", "--silence-timeout", 5]
    with LocalCluster(1, chief=True, num_ps=1, server_arguments=arguments) as cluster:
        cluster.start_servers()
        cluster.start(CHIEF)
        until(lambda: cluster.tasks["chief", 0].reports, "the program runs")
        cluster.tasks["chief", 0].kill()
        for task in cluster.servers:
            assert task.wait(60.0).exit_code == 0
            assert any("lost its coordinator" in line for line in task.output)


@pytest.mark.long
def test_tasks_wait_for_the_next_coordinator():
    with LocalCluster(1, chief=True, num_ps=1) as cluster:
        cluster.start_servers()
        cluster.start(CHIEF)
        for run in range(2):
            until(lambda: len(cluster.tasks["chief", 0].reports) > run, "the program runs")  # noqa: B023
            cluster.tasks["chief", 0].kill()
            if not run:
                cluster.restart("chief", 0)
        assert [each["count"] for each in cluster.tasks["chief", 0].reports] == [1.0, 1.0]
        assert all(task.is_running for task in cluster.servers)


def test_the_wrong_token(servers, monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", "of somebody else")
    started = time.monotonic()
    message(UnauthenticatedError, lambda: rx.ParameterServerStrategy(servers.resolver), "ps 0", "token")
    assert time.monotonic() - started < LOST_S


@pytest.mark.rest
def test_nothing_is_left():
    with server_cluster(workers=1, ps=1) as cluster:
        before = set(threading.enumerate())
        job = Job(cluster)
        job.until_connected(0)
        job.slow(3)
        cluster.tasks["worker", 0].kill()
        job.close()
        until(lambda: set(threading.enumerate()) <= before, "threads end")
    for pid in cluster.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
