"""Networks that damage bytes, and unauthenticated peers at every port, while jobs run."""

import contextlib
import random
import socket
import threading
import time

import numpy as np
import pytest

import replicax as rx
from damaging_proxy import DamagingProxy
from faulty_network import faulty_server_cluster
from replicax.coordinator import ClusterCoordinator
from replicax.testing import LocalCluster, server_cluster

pytestmark = pytest.mark.timeout(280)
JOIN_S = 120.0


class Job:
    """A counter on each of two servers, and a linear model with Adam that all functions train with the same gradients."""

    def __init__(self, cluster):
        self.strategy = rx.ParameterServerStrategy(cluster.resolver)
        self.coordinator = ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.counters = [rx.Variable(0, dtype="int32", name=f"counter_{n}") for n in range(2)]
            self.weights = rx.Variable(np.zeros((300, 300), np.float32), name="weights")
        self.step = rx.function(self._step)
        self.num_scheduled = 0

    def _step(self, x):
        for counter in self.counters:
            counter.assign_add(1)
        self.weights.assign_add(x)  # 360 KB travel as the body of a frame
        return x.sum()

    def schedule(self, count):
        x = np.ones((300, 300), np.float32)
        values = [self.coordinator.schedule(self.step, args=(x,)) for _ in range(count)]
        self.num_scheduled += count
        return values

    def check(self, values):
        self.coordinator.join(JOIN_S)
        assert [float(value) for value in self.coordinator.fetch(values)] == [90_000.0] * len(values)
        assert [int(counter.numpy()) for counter in self.counters] == [self.num_scheduled] * 2
        np.testing.assert_array_equal(
            self.weights.numpy(), np.full((300, 300), self.num_scheduled, np.float32)
        )

    def close(self):
        self.coordinator.close()
        self.strategy.close()


@pytest.mark.rest
def test_counts_and_values_are_exact_if_every_50th_frame_is_damaged(monkeypatch):
    monkeypatch.setenv("REPLICAX_CHECKSUMS", "1")
    with (
        faulty_server_cluster(workers=2, ps=2, make_proxy=DamagingProxy) as (cluster, network),
        contextlib.closing(Job(cluster)) as job,
    ):
        for _ in range(4):
            job.check(job.schedule(150))
    assert sum(proxy.num_damaged for proxy in network.proxies.values()) > 30


def fit_on_two(pause_s):
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((64, 8), np.float32)
    time.sleep(float(pause_s))  # the attack has its time
    losses = model.fit(x, x[:, :4], batch_size=8, epochs=3, verbose=0).history["loss"]
    report(losses=losses)


@pytest.mark.rest
def test_unauthenticated_peers_at_every_port_do_not_disturb_a_job():
    """300 idle peers at each port, and others that send random bytes."""
    with (
        server_cluster(workers=1, ps=2) as cluster,
        contextlib.closing(Job(cluster)) as job,
    ):
        addresses = [address for job_ in ("worker", "ps") for address in cluster.cluster[job_]]
        with strangers(addresses, num_attacks=3000) as num_sent:
            started = time.monotonic()
            while num_sent() < 3000 and time.monotonic() < started + 120:
                job.check(job.schedule(20))
        assert num_sent() >= 3000
        job.check(job.schedule(20))


def connected(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


@contextlib.contextmanager
def strangers(addresses, *, num_attacks):
    """Idle connections, and a thread for each address that sends random bytes, until the block ends."""
    is_over, counts = threading.Event(), [0] * len(addresses)
    idle = [connected(address) for address in addresses for _ in range(300)]

    def attack(number, address):
        chance = random.Random(number)
        while not is_over.is_set() and sum(counts) < num_attacks:
            with contextlib.suppress(OSError), connected(address) as stranger:
                start = chance.choice([b"", b"RPLX\x01\x00", b"RX", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"])
                frames = b"".join(start + chance.randbytes(chance.randrange(100)) for _ in range(64))
                counts[number] += 1
                stranger.sendall(frames)
                stranger.recv(100)

    threads = [threading.Thread(target=attack, args=each, daemon=True) for each in enumerate(addresses)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(counts)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
        for connection in idle:
            connection.close()


@pytest.mark.long
def test_unauthenticated_peers_at_the_controller_do_not_disturb_workers():
    losses = []
    for is_attacked in (False, True):
        with LocalCluster(2, timeout_s=JOIN_S) as cluster:
            address = cluster.cluster["worker"][0]
            cluster.start(fit_on_two, ("10" if is_attacked else "0",))
            with contextlib.ExitStack() as attack:
                if is_attacked:
                    wait_until_it_listens(address)
                    num_sent = attack.enter_context(strangers([address], num_attacks=2000))
                losses.append([result.report for result in cluster.wait().values()])
                if is_attacked:
                    assert num_sent() > 100
    assert losses[0] == losses[1]
    assert [len(report["losses"]) for report in losses[0]] == [3, 3]


def wait_until_it_listens(address):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), connected(address):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)
