"""Scheduled functions on real servers, in separate processes, that are killed and stopped."""

import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import replicax as rx
from certificates import credentials_of_ca
from replicax.errors import CancelledError, ClosureInputError, OutOfRangeError, UnavailableError
from replicax.testing import server_cluster

JOIN_S = 120.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster():
    with server_cluster(workers=2, ps=1) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster):
    cluster.wait_for_servers()
    with rx.ParameterServerStrategy() as strategy, rx.coordinator.ClusterCoordinator(strategy) as coordinator:
        yield coordinator


def counter_in(coordinator):
    with coordinator.strategy.scope():
        return rx.Variable(np.int32(0))


def connected(coordinator, num=2):
    until = time.monotonic() + JOIN_S
    while sum(w["connected"] for w in coordinator.statistics()["workers"].values()) < num:
        assert time.monotonic() < until
        time.sleep(0.01)


def spin(x):
    return jax.lax.fori_loop(0, 5000, lambda _, a: a @ a * 0.001, jax.numpy.ones((100, 100)) * x)[0, 0]


def test_schedule_join_schedule_join(coordinator):
    counter = counter_in(coordinator)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.int32(2)] * 100))

    def step(iterator):
        element = next(iterator)
        counter.assign_add(element)
        return element * 3

    for expected in (10, 20):
        values = [coordinator.schedule(step, (iterator,)) for _ in range(5)]
        coordinator.join(JOIN_S)
        assert int(counter) == expected
        assert coordinator.done()
        assert coordinator.fetch(values) == [6] * 5


def test_a_dataset_that_ends_and_one_that_cannot_be_made(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.int32(2)] * 3))
    take = lambda iterator: next(iterator)  # noqa: E731

    def train():
        for _ in range(9):
            coordinator.schedule(take, (iterator,))  # which raises once one has failed
        coordinator.join(JOIN_S)

    with pytest.raises(OutOfRangeError, match="no more elements"):
        train()

    def broken():
        raise OSError("no such file")

    value = coordinator.schedule(take, (iter(coordinator.create_per_worker_dataset(broken)),))
    with pytest.raises(ClosureInputError, match="OSError: no such file"):
        coordinator.join(JOIN_S)
    with pytest.raises(ClosureInputError, match="OSError: no such file"):
        value.fetch(0)


def test_per_worker_values(coordinator):
    index = coordinator.create_per_worker_value(rx.coordinator.experimental_get_current_worker_index)
    values = [coordinator.schedule(lambda index: index, (index,)) for _ in range(10)]
    assert {int(value.fetch(JOIN_S)) for value in values} <= {0, 1}


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [3, pytest.param(30, marks=pytest.mark.timeout(600))])
def test_workers_are_killed_again_and_again_and_nothing_counts_twice(cluster, coordinator, num_kills):
    counter = counter_in(coordinator)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.int32(1)] * 100_000))

    def step(iterator):
        counter.assign_add(next(iterator))

    ended = threading.Event()

    def connections():
        return [coordinator.statistics()["workers"][f"worker {n}"]["connections"] for n in range(2)]

    def kill():
        random = np.random.default_rng(0)
        connected(coordinator)
        for n in range(num_kills):
            time.sleep(random.uniform(0.0, 0.2))
            before, until = connections()[n % 2], time.monotonic() + JOIN_S
            cluster.tasks["worker", n % 2].kill()
            cluster.restart("worker", n % 2)
            while connections()[n % 2] == before:  # its end may be noticed late
                assert time.monotonic() < until
                time.sleep(0.01)
        ended.set()

    thread = threading.Thread(target=kill)
    thread.start()
    num = 0
    while not ended.is_set():
        for _ in range(50):
            coordinator.schedule(step, (iterator,))
        num += 50
        coordinator.join(JOIN_S)
    thread.join()
    assert int(counter) == num
    assert sum(connections()) > num_kills


@pytest.mark.rest
@pytest.mark.parametrize("join", [True, False], ids=["after join", "in flight"])
def test_closing_a_strategy_closes_its_coordinator(cluster, caplog, join):
    cluster.wait_for_servers()
    before = threading.enumerate()
    strategy = rx.ParameterServerStrategy()
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    connected(coordinator)
    for _ in range(10):
        coordinator.schedule(spin, (np.float32(1),))
    if join:
        coordinator.join(JOIN_S)
    strategy.close()
    time.sleep(1.5)  # a heartbeat, and more
    coordinator.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    until = time.monotonic() + JOIN_S
    while left := [
        thread.name
        for thread in threading.enumerate()
        if thread not in before
        and thread.name.startswith(("replicax-worker", "replicax-ps", "replicax-heartbeats"))
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


LEAVES = """
import atexit, sys, threading
atexit.register(lambda: print("left", sorted({t.name for t in threading.enumerate()}), flush=True))
import jax, numpy as np, replicax as rx

strategy = rx.ParameterServerStrategy()
coordinator = rx.coordinator.ClusterCoordinator(strategy)

def spin(x):
    return jax.lax.fori_loop(0, 20_000, lambda _, a: a @ a * 0.001, jax.numpy.ones((100, 100)) * x)[0, 0]

values = [coordinator.schedule(spin, (np.float32(1),)) for _ in range(50)]
values[0].fetch(60)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("", 0, marks=pytest.mark.long),
        ("sys.exit(3)", 3),
        pytest.param("raise OSError('the user')", 1, marks=pytest.mark.long),
    ],
)
def test_program_with_functions_in_flight_exits_with_its_code(cluster, end, code):
    cluster.wait_for_servers()
    environment = {**os.environ, **cluster.environment_of("chief", 0)}
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES + end], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == code, ended.stderr
    assert "left ['MainThread'" in ended.stdout
    assert "replicax-worker" not in ended.stdout, "none may run into the end of Python"
    assert "replicax-heartbeats" not in ended.stdout
    assert "terminate" not in ended.stderr


@pytest.mark.rest
def test_job_continues_without_a_stopped_worker(cluster, coordinator):
    counter = counter_in(coordinator)

    def step():
        counter.assign_add(1)

    coordinator.schedule(step)
    coordinator.join(JOIN_S)
    connected(coordinator)
    task = cluster.tasks["worker", 0]
    task.stop()
    try:
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join(JOIN_S)
        assert int(counter) == 21
    finally:
        task.resume()
    connected(coordinator)
    coordinator.schedule(step)
    coordinator.join(JOIN_S)
    assert int(counter) == 22


@pytest.mark.long
def test_a_killed_parameter_server_is_named_in_time():
    with server_cluster(workers=1, ps=2) as cluster:
        with (
            rx.ParameterServerStrategy() as strategy,
            rx.coordinator.ClusterCoordinator(strategy) as coordinator,
        ):
            with strategy.scope():
                variables = [rx.Variable(np.zeros(4, np.float32)) for _ in range(2)]

            def step():
                for variable in variables:
                    variable.assign_add(np.ones(4, np.float32))

            coordinator.schedule(step)
            coordinator.join(JOIN_S)
            cluster.tasks["ps", 1].kill()
            began = time.monotonic()
            values = [coordinator.schedule(step) for _ in range(10)]
            with pytest.raises(UnavailableError, match="ps 1") as raised:
                coordinator.join(JOIN_S)
            assert time.monotonic() - began < JOIN_S / 2
            assert raised.value.task == "ps 1"
            for value in values:
                with pytest.raises((UnavailableError, CancelledError)):
                    value.fetch(JOIN_S)


@pytest.mark.rest
def test_tls_cluster_rejects_a_client_without_a_certificate(tmp_path, monkeypatch):
    ours = credentials_of_ca(tmp_path, "a")
    for name, path in {
        "CERTIFICATE": ours.certificate_file,
        "KEY": ours.key_file,
        "CA": ours.ca_file,
    }.items():
        monkeypatch.setenv(f"REPLICAX_TLS_{name}", path)
    with server_cluster(workers=1, ps=1):
        with (
            rx.ParameterServerStrategy() as strategy,
            rx.coordinator.ClusterCoordinator(strategy) as coordinator,
        ):
            counter = counter_in(coordinator)
            values = [coordinator.schedule(lambda: counter.assign_add(1)) for _ in range(5)]
            coordinator.join(JOIN_S)
            assert int(counter) == 5
            assert coordinator.fetch(values) == [1, 2, 3, 4, 5]
        monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "1")
        for name in ("CERTIFICATE", "KEY", "CA"):  # at last it speaks no TLS at all
            monkeypatch.delenv(f"REPLICAX_TLS_{name}")
            if name == "CERTIFICATE":
                continue
            with pytest.raises(UnavailableError, match=r"ps 0.* these REPLICAX_TLS settings"):
                rx.ParameterServerStrategy()
