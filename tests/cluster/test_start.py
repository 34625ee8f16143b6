"""Joining a cluster, up to where JAX would start: the limits, and the service of an earlier run."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from checks import message, needs_ipv6, path_of_programs
from replicax._src.cluster import start
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.machine_layout import free_ports
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec, Task, join_address, split_address
from replicax._src.wire.security import Security
from replicax.errors import ClusterStartError

pytestmark = pytest.mark.timeout(250)


class _Enough(Exception):
    pass


def member_of(number, *addresses):
    return Membership(ClusterSpec({"worker": list(addresses)}), Task("worker", number))


def test_a_part_of_a_second_counts_as_one_for_jax(monkeypatch):
    """JAX takes whole seconds, and 0 would be no time at all."""
    limits = []

    def join_processes(coordinator, num_processes, number, timeout_s):
        limits.append(timeout_s)
        raise _Enough

    monkeypatch.setattr(start.jax_compat, "join_processes", join_processes)
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "50.25")
    (port,) = free_ports(1)
    with pytest.raises(_Enough):
        start._LiveCluster(member_of(0, f"127.0.0.1:{port}"), 10.0)
    assert limits == [51]


def test_an_interrupt_after_jax_has_connected_leaves_no_client_that_waits_at_exit(monkeypatch):
    """JAX would shut the client down at exit, which takes 305 s if the service has gone by then."""

    def initialize(*args, **kwargs):
        start.jax_compat._distributed.global_state.client = object()
        raise KeyboardInterrupt

    monkeypatch.setattr(start.jax_compat, "join_processes", initialize)
    monkeypatch.setattr(start.jax_compat._distributed.global_state, "client", None)
    with pytest.raises(KeyboardInterrupt):
        start._LiveCluster(member_of(0, f"127.0.0.1:{free_ports(1)[0]}"), 10.0)
    assert start.jax_compat._distributed.global_state.client is None


@pytest.mark.parametrize(("answers", "serves"), [([None, {}], True), ([None, None], False)])
def test_service_that_misses_one_question_is_not_considered_stopped(answers, serves, monkeypatch):
    monkeypatch.setattr(start, "_ping", lambda *args: answers.pop(0))
    cluster = object.__new__(start._LiveCluster)
    cluster._security = Security()
    cluster._leader_address, cluster._channel = "127.0.0.1:1", types.SimpleNamespace(is_lost=False)
    assert cluster._is_serving() is serves
    assert not answers


@pytest.mark.rest
def test_the_service_of_an_earlier_run_is_waited_for():
    """Worker 0 was killed, and is started again while worker 1 is still there."""
    limits = {"silence_s": 60.0, "stall_s": 60.0, "timeout_s": 60.0}
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def service(wait_s):
        deadline = time.monotonic() + wait_s
        return start._start_service(member_of(0, *addresses), limits, Security(), deadline)

    earlier = service(60)
    members = [Channel(member_of(number, *addresses), Security()) for number in range(2)]
    for member in members:
        member.connect(time.monotonic() + 60)
    says = [f"worker 0 cannot listen at its own address {addresses[0]}", "an earlier run"]
    # nobody is gone: it is not ending
    message(ClusterStartError, lambda: service(60), "Another process is already worker 0", addresses[0])
    members[0].leave()
    assert members[1].wait_for_failure(60) is not None
    message(ClusterStartError, lambda: service(1), *says)  # it does not end in time
    timer = threading.Timer(1.5, members[1].leave)
    timer.start()
    now = service(60)
    assert earlier.wait(150) == 0
    timer.join()
    for process in (earlier, now):
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_service_of_an_earlier_run_may_end_just_before_it_is_asked(monkeypatch):
    answers = [(None, {"errno": errno.EADDRINUSE}), ("the service", {"coordinator": "there"})]
    monkeypatch.setattr(start, "_try_service", lambda settings: answers.pop(0))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    service = start._start_service(member_of(0, address), {}, Security(), time.monotonic())
    assert service == "the service"


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_both_services_are_reached(host, monkeypatch):
    """Also by an address that this machine has only for others; here of the documentation's network."""
    port = free_ports(1)[0]
    address = join_address("2001:db8::1" if host == "::1" else "192.0.2.1", port)
    limits = {"silence_s": 60.0, "stall_s": 60.0, "timeout_s": 60.0}
    monkeypatch.setenv("REPLICAX_ROUTES", json.dumps({address: join_address(host, port)}))
    service = start._start_service(member_of(0, address), limits, Security(), time.monotonic() + 60)
    channel = Channel(member_of(0, address), Security())
    coordinator = channel.connect(time.monotonic() + 60)["coordinator"]
    socket.create_connection((host, split_address(coordinator)[1]), timeout=60).close()
    channel.leave()
    assert service.wait(150) == 0
    service.stdin.close()
    service.stdout.close()


NEVER_COMES = """
import replicax as rx
make = rx.MultiWorkerMirroredStrategy
print("imported", flush=True)
make()
"""


def test_task_that_gives_up_waiting_tells_the_others_which_task_has_not_come(tmp_path):
    """Three processes of which the last does not exist. The time of worker 0 is over long before that of worker 1."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(3)]
    started = []
    try:
        for index, limit_s in ((1, 100), (0, 10)):
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps(config),
                "JAX_PLATFORMS": "cpu",
                "REPLICAX_START_TIMEOUT_S": str(limit_s),
                "PYTHONPATH": path_of_programs(),
            }
            command = [sys.executable, "-c", NEVER_COMES]
            with (tmp_path / str(index)).open("w") as file:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file)
                )
            assert started[-1].stdout.readline() == b"imported\n"
        assert [process.wait(150) for process in started] == [1, 1]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
    for index in (0, 1):
        last = (tmp_path / str(index)).read_text().partition("ClusterStartError: ")[2]
        assert "worker 2 (has not come)" in last
        assert "look for code" not in last
