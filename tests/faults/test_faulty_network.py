"""The tools of other tests: faulty proxies, and a ``LocalCluster`` on a network of them."""

import os
import socket
import threading
import time

import pytest

from faulty_network import FaultyNetwork
from faulty_proxy import Fault, Proxy
from replicax._src.cluster.machine_layout import free_ports

LIMIT_S = 100
pytestmark = pytest.mark.timeout(250)


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


# Worker 0 echoes; the others ask it repeatedly, and print how long the answer took, or the error.
TALK = """
import json, os, socket, threading, time
config = json.loads(os.environ["TF_CONFIG"])
address = config["cluster"]["worker"][0]
if config["task"]["index"] == 0:
    def echo(connection):
        while data := connection.recv(100):
            connection.sendall(data)
    server = socket.create_server(("127.0.0.1", int(address.split(":")[1])))
    while True:
        threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
host, port = json.loads(os.environ["REPLICAX_ROUTES"])[address].split(":")
while True:
    try:
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(0.2)
            number = 0
            while True:
                began = time.monotonic()
                connection.sendall(b"%d;" % number)
                answer = b""
                while not answer.endswith(b"%d;" % number):
                    try:
                        shard = connection.recv(100)
                    except TimeoutError:
                        print("silence")
                        continue
                    if not shard:
                        raise ConnectionError
                    answer += shard
                print("answer", "slow" if time.monotonic() - began > 0.15 else "fast")
                number += 1
                time.sleep(0.02)
    except ConnectionError:
        print("cut")
        time.sleep(0.02)
"""


def says_next(task, word):
    """Waits until a task prints a new line with a text."""
    before = len(task.output)
    until(lambda: any(word in line for line in task.output[before:]), f"{task.task} says {word}")


def test_partitions_and_delays(local_cluster):
    cluster = local_cluster(3)
    with FaultyNetwork(cluster) as network:
        cluster.start(TALK)
        parted_and_delayed(cluster, network)
        statistics = {ends: proxy.statistics() for ends, proxy in network.proxies.items()}
    assert len(statistics) == 6
    assert statistics[("worker", 1), ("worker", 0)]["num_connections"] >= 2
    assert statistics[("worker", 0), ("worker", 1)]["num_connections"] == 0


def parted_and_delayed(cluster, network):
    parted, other = cluster.tasks["worker", 1], cluster.tasks["worker", 2]
    for task in (parted, other):
        says_next(task, "answer fast")
    network.partition("worker", 1)
    says_next(parted, "silence")
    says_next(other, "answer fast")
    num_cuts = sum("cut" in line for line in parted.output)
    network.heal()
    says_next(parted, "answer fast")
    assert sum("cut" in line for line in parted.output) == num_cuts, "a blackhole has cut a connection"
    network.partition("worker", 0, how="cut")
    says_next(parted, "cut")
    says_next(other, "cut")
    assert parted.is_running
    network.heal()
    says_next(parted, "answer fast")
    network.delay("worker", 1, 0.1)
    says_next(parted, "answer slow")
    says_next(other, "answer fast")


@pytest.fixture
def echo():
    """The address of a server that returns all received bytes at the end."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                data = b""
                while shard := connection.recv(65536):
                    data += shard
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def connected(proxy):
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def all_of(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_proxy_passes_all_bytes_and_ends(echo):
    data = os.urandom(5_000_000)
    with Proxy(*echo) as proxy:
        for _ in range(2):
            with connected(proxy) as connection:
                threading.Thread(
                    target=lambda c=connection: (c.sendall(data), c.shutdown(socket.SHUT_WR))
                ).start()
                assert all_of(connection) == data
        until(lambda: proxy.statistics()["num_open"] == 0, "its connections ended")
        assert proxy.statistics() == {"num_connections": 2, "num_open": 0, "num_bytes": 4 * len(data)}
    with pytest.raises(ConnectionError):
        connected(proxy)
    assert not [thread for thread in threading.enumerate() if thread.name == "replicax-proxy"]


def test_a_proxy_that_cuts_refuses_until_it_is_healed(echo):
    with Proxy(*echo) as proxy:
        with connected(proxy) as connection:
            until(lambda: proxy.statistics()["num_open"] == 1, "the connection")
            proxy.set("cut")
            assert connection.recv(1) == b""
        with connected(proxy) as connection:
            assert connection.recv(1) == b""
        proxy.set()
        with connected(proxy) as connection:
            connection.sendall(b"x")
            connection.shutdown(socket.SHUT_WR)
            assert all_of(connection) == b"x"
        assert proxy.statistics()["num_connections"] == 2


def test_a_blackhole_holds_even_the_end_of_a_connection(echo):
    with Proxy(*echo) as proxy, connected(proxy) as connection:
        until(lambda: proxy.statistics()["num_open"] == 1, "the connection")
        proxy.set(Fault.BLACKHOLE)
        connection.sendall(b"abc")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert proxy.statistics()["num_bytes"] == 0
        proxy.set()
        connection.settimeout(LIMIT_S)
        assert all_of(connection) == b"abc"


def test_proxy_without_a_target_ends_connections():
    with Proxy("127.0.0.1", *free_ports(1)) as proxy, connected(proxy) as connection:
        assert connection.recv(1) == b""
