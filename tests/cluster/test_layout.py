"""The tasks of a launched cluster, their environments, and free ports."""

import json
import socket

import pytest

from checks import message
from replicax._src.cluster import machine_layout
from replicax._src.cluster.errors import ClusterEnvironmentError, ClusterError
from replicax._src.cluster.machine_layout import (
    ClusterLayout,
    device_environment,
    free_ports,
    server_environment,
    tf_config,
)
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import ClusterSpec, Task


def test_tasks_and_their_configurations():
    everybody = ClusterLayout(2, chief=True, num_ps=1, evaluator=True)
    assert [str(task) for task in everybody.tasks] == [
        "chief 0",
        "worker 0",
        "worker 1",
        "ps 0",
        "evaluator 0",
    ]
    cluster = everybody.on_this_machine([1, 2, 3, 4])
    assert cluster == {
        "chief": ["127.0.0.1:1"],
        "worker": ["127.0.0.1:2", "127.0.0.1:3"],
        "ps": ["127.0.0.1:4"],
    }
    for task in everybody.tasks:
        config = json.loads(tf_config(cluster, task))
        assert config == {"cluster": cluster, "task": {"type": task.type, "index": task.index}}
        Membership(ClusterSpec(config["cluster"]), Task(**config["task"]))  # the strategies accept it


def test_layouts_that_make_no_sense():
    message(ClusterError, lambda: ClusterLayout(0), "at least one worker, or a chief")
    message(ClusterError, lambda: ClusterLayout(-1), "-1 workers", "at least 0")
    message(ClusterError, lambda: ClusterLayout(1, num_ps=-2), "-2 parameter servers")


def test_ports_are_different_and_free():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def system_gives(monkeypatch, tmp_path, text):
    """Replaces the system's range of ports for outgoing connections; None for no information."""
    file = tmp_path / "ip_local_port_range"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine_layout, "_PORT_RANGE_FILE", file)


@pytest.mark.parametrize("given", ["15000\t60000\n", "18000\t65535\n", "32768\t60999\n"])
def test_ports_are_outside_the_ephemeral_range(monkeypatch, tmp_path, given):
    system_gives(monkeypatch, tmp_path, given)
    low, high = map(int, given.split())
    ports = free_ports(50)
    assert not [port for port in ports if low <= port <= high or port < 15_000]


@pytest.mark.parametrize("given", [None, "not numbers", "1024\t65000\n"])
def test_system_chooses_ports_if_its_range_is_unknown_or_nearly_everything(monkeypatch, tmp_path, given):
    system_gives(monkeypatch, tmp_path, given)
    assert set(machine_layout._static_ports()) == {0}
    assert len(set(free_ports(50))) == 50


def test_ports_in_use_are_left_out(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine_layout, "_static_ports", lambda: [port, 0])
        assert free_ports(1) != [port]


def test_kept_ports_keep_their_place_unless_another_program_listens_there():
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first[1])):
        kept = free_ports(3, first)
    assert (kept[0], kept[2]) == (first[0], first[2])
    assert kept[1] not in first


def test_connections_of_an_earlier_run_do_not_take_its_port():
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)) as server:
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # the side that closes first is remembered for a minute
            assert client.recv(1) == b""
    assert free_ports(1, [port]) == [port]


@pytest.mark.parametrize(
    ("num_devices", "environment", "expected"),
    [
        (1, {}, {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}),
        (2, {}, {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}),
        (2, {"JAX_PLATFORMS": "cuda,cpu", "PJRT_NPROC": "64"}, {"JAX_NUM_CPU_DEVICES": "2"}),
        (
            1,
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=4"},
            {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "--xla_a=1"},
        ),
    ],
)
def test_environment_of_devices(num_devices, environment, expected):
    assert device_environment(num_devices, environment) == expected


@pytest.mark.parametrize(
    ("said", "kept"), [(None, ""), ("glibc.malloc.check=3", "glibc.malloc.check=3:"), ("", "")]
)
def test_memory_of_servers(said, kept):
    environment = {} if said is None else {"GLIBC_TUNABLES": said}
    memory = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8388608:glibc.malloc.trim_threshold=67108864"
    assert server_environment(environment) == {"GLIBC_TUNABLES": kept + memory}


def test_memory_of_servers_is_as_the_user_says():
    said = "glibc.malloc.trim_threshold=1:glibc.malloc.hugetlb=0"
    given = server_environment({"GLIBC_TUNABLES": said})
    assert given == {"GLIBC_TUNABLES": f"{said}:glibc.malloc.mmap_threshold=8388608"}
    assert server_environment(given) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"a:1": 3}'])
def test_invalid_routes(text):
    environment = {"REPLICAX_ROUTES": text}
    message(
        ClusterEnvironmentError,
        lambda: routed_address("a:1", environment),
        "REPLICAX_ROUTES",
        text,
        '{"host:port": "host:port"',
    )


def test_routes_in_a_file_may_change(tmp_path):
    file = tmp_path / "routes"
    environment = {"REPLICAX_ROUTES": str(file)}
    message(ClusterEnvironmentError, lambda: routed_address("a:1", environment), str(file), "no such file")
    for now in ("b:2", "c:3"):
        file.write_text(json.dumps({"a:1": now}))
        assert routed_address("a:1", environment) == now
    file.write_text("{")
    message(ClusterEnvironmentError, lambda: routed_address("a:1", environment), "is not JSON", str(file))


def test_a_route_is_taken():
    environment = {"REPLICAX_ROUTES": '{"a:1": "b:2"}'}
    assert routed_address("a:1", environment) == "b:2"
    assert routed_address("b:2", environment) == "b:2"
