"""Workers over real connections, plain and with TLS, and workers that answer what no worker should."""

import contextlib
import gc
import itertools
import os
import random
import threading
import time

import numpy as np
import pytest

from certificates import credentials_of_ca
from memory_cluster import MemoryCluster, Prepared, Session, eventually
from replicax._ps.transport.messages import Encoded, Message, encode
from replicax._ps.transport.transport import TaskClient, TaskServer
from replicax._src.cluster.credentials import Credentials
from replicax._src.vocabulary.errors import CancelledError, MessageError
from replicax._src.wire.frames import Kind, frame_parts
from replicax.coordinator import ClusterCoordinator

SOON_S = 20.0  # what takes milliseconds on a quiet machine
JOIN_S = 60.0

NO_MESSAGE = Encoded(b"none", ())

pytestmark = pytest.mark.timeout(120)


class SocketSession(Session):
    """A session that reaches workers over sockets."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self.addresses, self.credentials = [each.address for each in cluster.servers], cluster.credentials

    def connect(self, job, index):
        if job == "worker":
            return TaskClient(self.addresses[index], self.credentials, f"worker {index}")
        return super().connect(job, index)


class SocketCluster(MemoryCluster):
    """Workers that listen.

    Attributes:
      on_message: Gets the worker, the connection and the message before it is answered. What it returns is sent instead
        of the answer, unless it is None.
    """

    def __init__(self, num_workers, credentials):
        super().__init__(num_workers)
        self.credentials, self.on_message = credentials, lambda worker, connection, message: None
        self.servers = [self.served(worker) for worker in self.workers]

    def served(self, worker):
        def answer(message):
            if "ask" in message.header:
                return Message(worker.ask(message.header["ask"], message.header, 60.0))
            return worker.answer(message)

        server = TaskServer("127.0.0.1:0", answer, self.credentials)
        serve, make, mine = server._serve_stream, server._answer, threading.local()

        def serve_stream(connection):
            mine.connection = connection
            serve(connection)

        def answered(message):
            if "ask" not in message.header:
                instead = self.on_message(worker, mine.connection, message)
                if instead is not None:
                    return instead
            return make(message)

        server._serve_stream, server._answer = serve_stream, answered
        server.start()
        return server

    @property
    def session(self):
        return SocketSession(self)

    def end(self):
        for server in self.servers:
            server.shutdown()
        super().end()


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return credentials_of_ca(tmp_path_factory.mktemp("pki"), "a")


@pytest.fixture(params=["plain", "TLS"])
def cluster(request, fast, tls):
    cluster = SocketCluster(2, Credentials(token="secret") if request.param == "plain" else tls)
    yield cluster
    cluster.on_message = lambda worker, connection, message: None
    cluster.end()


@pytest.fixture
def coordinator(cluster):
    with ClusterCoordinator(cluster) as coordinator:
        yield coordinator


def add(call, x, *others):
    call.push()
    return np.int32(x)


def twice(call, x):
    return x + x


def twos(worker):
    return itertools.repeat(np.int32(2))


def connections_of(coordinator):
    return [each["connections"] for each in coordinator.statistics()["workers"].values()]


def connected(coordinator):
    eventually(lambda: all(w["connected"] for w in coordinator.statistics()["workers"].values()))


def once(kind, do):
    """Does something instead of the first answer of a kind: ``do(worker, connection)``."""
    left = [1]

    def on_message(worker, connection, message):
        if message.header["op"] == kind and left and left.pop():
            return do(worker, connection)
        return None

    return on_message


def raw(connection, data):
    connection._stream.write([data], time.monotonic() + 10)


def half_a_frame():
    head, body = encode(Message({"answer": 1}, [np.zeros(1 << 20, np.uint8)]))
    return b"".join(frame_parts(Kind.MESSAGE, head, body, is_checked=False))[: 1 << 19]


# --- workers that behave -------------------------------------------------------------------------------


def test_every_function_gets_its_own_result(coordinator):
    random_ = random.Random(0)
    sizes = [random_.choice([1, 1, 1, 10, 1000, 5000, 100_000, 1_000_000]) for _ in range(300)]
    values = [coordinator.schedule(twice, (np.full(size, n, np.int32),)) for n, size in enumerate(sizes)]
    for n, (size, value) in enumerate(zip(sizes, values, strict=True)):
        result = value.fetch(JOIN_S)
        assert result.shape == (size,)
        assert (result == 2 * n).all()


def test_a_function_whose_message_cannot_travel_fails_and_no_other_gets_its_answer(
    cluster, coordinator, monkeypatch
):
    class Bad(Prepared):
        def __init__(self, strategy, fn, args):
            super().__init__(strategy, fn, args)
            if args[0] < 0:
                self.named = {9: object()}

    monkeypatch.setattr("memory_cluster.Prepared", Bad)
    coordinator.schedule(add, (0,)).fetch(SOON_S)
    for bad in range(1, 25, 3):
        values = {}

        def schedule(bad=bad, values=values):
            for n in range(30):
                more = () if n % 4 else (np.zeros(10_000),)  # a thread sends it, and those after it
                values[n] = coordinator.schedule(add, (-1 if n == bad else n, *more))
            coordinator.join(JOIN_S)

        with pytest.raises(MessageError, match="not JSON"):
            schedule()
        with pytest.raises(MessageError, match="not JSON"):
            values.pop(bad).fetch(SOON_S)
        for n, value in values.items():
            with contextlib.suppress(CancelledError):
                assert value.fetch(SOON_S) == n
    assert connections_of(coordinator) == [1, 1]


def test_descriptors_are_used_again_by_other_connections(cluster, coordinator):
    """Workers end their connections all the time, each after some answers."""
    num_answers, lock = itertools.count(1), threading.Lock()

    def on_message(worker, connection, message):
        with lock:
            is_last = message.header["op"] == "closure" and next(num_answers) % 7 == 0
        if is_last:
            connection.cancel()

    cluster.on_message = on_message
    for _ in range(4):
        values = [coordinator.schedule(add, (n,)) for n in range(15)]
        coordinator.join(JOIN_S)
        assert [int(value.fetch(SOON_S)) for value in values] == list(range(15))
        gc.collect()
    assert cluster.ps[0].counter == 60
    assert sum(connections_of(coordinator)) > 4


# --- workers that do not -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["half a frame", "garbage", "nothing"])
def test_function_runs_elsewhere_if_its_connection_ends_without_an_answer(cluster, coordinator, how):
    def do(worker, connection):
        if how != "nothing":
            raw(connection, half_a_frame() if how == "half a frame" else bytes(200))
        if how != "garbage":
            connection.cancel()
        return NO_MESSAGE

    cluster.on_message = once("closure", do)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    coordinator.join(JOIN_S)
    assert [int(value.fetch(SOON_S)) for value in values] == list(range(20))
    assert cluster.ps[0].counter == 20


def test_half_a_frame_and_silence_wait_for_the_heartbeat(cluster, coordinator):
    """The worker lives until it is stopped, so its function may take any time. Nobody else waits for it."""
    go, is_half = threading.Event(), threading.Event()

    def do(worker, connection):
        raw(connection, half_a_frame())
        is_half.set()
        go.wait(60)

    connected(coordinator)
    cluster.on_message = once("closure", do)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    assert is_half.wait(SOON_S)
    eventually(lambda: coordinator.statistics()["closures"]["finished"] == 19)
    for worker in cluster.workers:
        worker.restart()  # another process answers the next heartbeat
    coordinator.join(JOIN_S)
    go.set()
    assert [int(value.fetch(SOON_S)) for value in values] == list(range(20))


def test_answer_that_is_no_message_fails_its_function_alone(cluster, coordinator):
    connected(coordinator)
    cluster.on_message = once("closure", lambda worker, connection: NO_MESSAGE)
    with pytest.raises(MessageError, match="4 bytes are not a message"):
        coordinator.schedule(add, (1,)).fetch(SOON_S)
    with pytest.raises(MessageError):
        coordinator.join(JOIN_S)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    assert [int(value.fetch(SOON_S)) for value in values] == list(range(20))


STRANGE = [
    {"need": "[]"},
    {"need": None, "end": None},
    {"need": [1], "end": {}},
    {"need": {}, "end": 5},
    {"error": None},
    {"error": 5},
    {"error": {}},
    {"error": []},
    {"error": {"type": 5, "text": None, "details": []}},
    {"error": {"type": "UnknownProgramError", "text": "x", "details": {}}},
    {"error": {"type": "UnknownProgramError", "text": "x", "details": {"digest": {}}}},
    {"error": {"type": "UnavailableError", "text": "x", "details": {"task": 5}}},
    {"error": {"type": "UnavailableError", "text": "x", "details": {"task": "ps 99"}}},
    {"error": {"type": "UnavailableError", "text": "x", "details": {"task": ["ps", 0]}}},
    {"error": {"type": "ClosureAbortedError", "text": 5, "details": {"name": 5}}},
    {"error": {"type": "KeyboardInterrupt", "text": "x", "details": {}}},
    {"signature": 5},
    {"signature": {}},
    {"spec": 5},
]


@pytest.mark.parametrize("kind", ["program", "closure"])
def test_answers_with_strange_fields_do_not_end_the_job(cluster, coordinator, kind):
    for header in STRANGE:
        connected(coordinator)
        cluster.on_message = once(kind, lambda worker, connection, header=header: encode(Message(header)))
        with contextlib.suppress(Exception):
            iterator = iter(coordinator.create_per_worker_dataset(twos))
            coordinator.schedule(lambda call, x: x, (iterator,)).fetch(SOON_S)
        with contextlib.suppress(Exception):
            coordinator.join(SOON_S)
        assert coordinator._loop._job.bug is None, header
        assert coordinator.schedule(add, (2,)).fetch(SOON_S) == 2
        coordinator.join(SOON_S)


def test_answers_without_a_request_cost_the_connection_at_most(cluster, coordinator):
    def stray(connection):
        connection.send_messages([encode(Message({"stray": n})) for n in range(3)], time.monotonic() + 10)

    connected(coordinator)
    cluster.on_message = once(
        "closure", lambda worker, connection: threading.Timer(0.2, stray, (connection,)).start()
    )
    assert coordinator.schedule(add, (1,)).fetch(SOON_S) == 1
    eventually(lambda: max(connections_of(coordinator)) == 2)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    assert [int(value.fetch(SOON_S)) for value in values] == list(range(20))


@pytest.mark.parametrize("then", ["it dies", "close"])
def test_worker_that_stops_reading_delays_nobody(cluster, then):
    go, is_stopped = threading.Event(), threading.Event()

    def do(worker, connection):
        is_stopped.set()
        go.wait(60)

    cluster.constants = {"large": np.zeros(64 << 20, np.uint8)}
    cluster.on_message = once("constant", do)
    coordinator = ClusterCoordinator(cluster)
    connected(coordinator)
    values = [coordinator.schedule(twice, (np.full(1 << 20, n, np.int32),)) for n in range(12)]
    assert is_stopped.wait(SOON_S)
    eventually(lambda: coordinator.statistics()["closures"]["finished"] >= 10)
    began = time.monotonic()
    coordinator.statistics()
    assert time.monotonic() - began < 2.0
    if then == "it dies":
        for worker in cluster.workers:
            worker.restart()
        coordinator.join(JOIN_S)
        assert [int(value.fetch(SOON_S)[0]) for value in values] == [2 * n for n in range(12)]
    began = time.monotonic()
    coordinator.close()
    assert time.monotonic() - began < SOON_S / 2
    assert not coordinator._loop._thread.is_alive()
    assert not coordinator._loop._threads._threads
    go.set()


def test_a_job_leaves_no_descriptor_and_no_thread(cluster):
    def run():
        with ClusterCoordinator(cluster) as coordinator:
            connected(coordinator)
            coordinator.schedule(add, (1,)).fetch(SOON_S)

    def num_descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def ours():
        return [
            each
            for each in threading.enumerate()
            if each.name in ("replicax-coordinator", "replicax-requests")
        ]

    run()
    eventually(lambda: not ours())
    time.sleep(0.3)  # the workers' ends of the connections
    before = num_descriptors()
    for _ in range(5):
        run()
    eventually(lambda: num_descriptors() <= before)
    eventually(lambda: not ours())
