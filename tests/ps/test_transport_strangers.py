"""Unauthenticated peers, and peers with damaged bytes, at a live task: its memory returns to normal, and it continues
to serve."""

import contextlib
import os
import random
import resource
import socket
import struct
import time
import zlib

import numpy as np
import pytest

from certificates import credentials_of_ca
from checks import message
from echo_task import EchoTask
from replicax._ps.transport.messages import Message, encode
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.wire.client import connect
from replicax._src.wire.frames import HEADER_BYTES, LARGEST_HEAD, Kind, frame_parts
from replicax.errors import UnauthenticatedError, UnavailableError

pytestmark = pytest.mark.timeout(250)
TOKEN = Credentials(token="secret")
MB = 2**20
KEPT = 60 * MB  # of threads and arenas; not of what was sent
WITH_TOKEN = TOKEN.security()


@pytest.fixture(scope="module")
def task():
    with EchoTask() as task:
        assert_serves(task)
        yield task


def assert_serves(task, credentials=TOKEN, within_s=30):
    """Checks that the task serves a client with the token."""
    started = time.monotonic()
    with TaskClient(task.address, credentials, "ps 0") as client:
        sent = np.arange(10**6)
        with client.open(within_s) as link:
            np.testing.assert_array_equal(link.call(Message({}, [sent]), 30).arrays[0], sent)
        assert client.ask("hello", {"a": 1}, 30)["a"] == 1
    assert time.monotonic() - started < within_s


def statistics_at_rest(task):
    """The task's statistics after it has seen the end of all other streams."""
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        until = time.monotonic() + 60
        while (statistics := client.ask("statistics", {}, 30))["streams"] > 1:
            assert time.monotonic() < until
            time.sleep(0.01)
    return statistics


# --- random and damaged frames ------------------------------------------------------------------------


def damaged(random_, data):
    """Bytes of which some are changed or cut off."""
    data = bytearray(data)
    for _ in range(random_.randrange(4)):
        if data:
            data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data[: random_.choice([len(data), len(data), random_.randrange(len(data) + 1)])])


def some_head(random_):
    """The head of a frame: of a message or an ask, usually damaged; or random bytes."""
    array = np.zeros(random_.choice([3, 30_000]), np.uint8)
    return random_.choice(
        [
            lambda: encode(Message({"op": "echo"}, [array])).head,
            lambda: damaged(random_, encode(Message({"op": "echo"}, [array])).head),
            lambda: damaged(random_, encode(Message({"ask": "hello", "a": 1})).head),
            lambda: encode(Message(random_.choice([{}, {"ask": 3}, {"ask": [1], "op": {}}]))).head,
            lambda: struct.pack("<II", *(random_.randrange(2**32) for _ in range(2))) + bytes(20),
            lambda: random_.randbytes(random_.randrange(200)),
        ]
    )()


def some_frame(random_):
    """Bytes like those of a frame: complete, with a wrong head; of wrong lengths; damaged; or random."""
    kind = random_.choice([Kind.MESSAGE, Kind.MESSAGE, Kind.MESSAGE, Kind.END, Kind.REFUSAL])
    head = some_head(random_)
    body = [bytes(random_.choice([1, 64, 100_000]))] if random_.random() < 0.3 else []
    whole = b"".join(frame_parts(kind, head, body, is_checked=random_.random() < 0.2))
    return random_.choice(
        [
            lambda: whole,
            lambda: damaged(random_, whole),
            lambda: damaged(random_, whole[:HEADER_BYTES]) + whole[HEADER_BYTES:],
            lambda: header_of(random_) + random_.randbytes(random_.randrange(100)),
            lambda: random_.randbytes(random_.randrange(300)),
            lambda: whole + some_head(random_),
        ]
    )()


def header_of(random_):
    """A header with a good checksum and lengths that are small, too large, or at the limit."""
    sizes = [0, 10, 10**6, LARGEST_HEAD, 2**32 - 1]
    header = struct.pack(
        "<2sBxIQI",
        b"RX",
        random_.choice([1, 1, 2, 9]),
        random_.choice(sizes),
        random_.choice([*sizes, 2**34, 2**63]),
        random_.randrange(2**32),
    )
    return header + struct.pack("<I", zlib.crc32(header))


def say(connection, data):
    """Sends the bytes, ends, and reads the answer."""
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass
    except OSError as error:  # it was cut while it wrote
        if isinstance(error, TimeoutError):
            raise


def say_as_peer(task, random_):
    """A peer with the token sends one frame, or several, after a good one."""
    connection = connect("127.0.0.1", task.port, WITH_TOKEN, time.monotonic() + 30)
    try:
        connection._socket.settimeout(30)
        say(connection._socket, b"".join(some_frame(random_) for _ in range(random_.choice([1, 1, 3]))))
    finally:
        connection.close()


def say_as_stranger(task, random_):
    """An unauthenticated peer sends a frame, or a hello and a possible continuation."""
    hello = b"RPLX" + struct.pack("<HH", 2, random_.randrange(4)) + bytes(48)
    hello += struct.pack("<I", zlib.crc32(hello))
    start = random_.choice([b"", hello, damaged(random_, hello), hello + random_.randbytes(36)])
    with socket.create_connection(("127.0.0.1", task.port), timeout=30) as connection:
        say(connection, start + some_frame(random_))


def attacked(task, num_frames, seed):
    """Half of the frames come from a peer with the token, the others from unauthenticated peers."""
    with TaskClient(task.address, TOKEN, "ps 0") as friend, friend.open() as link:
        # The first peers create threads and arenas.
        before = 0
        random_ = random.Random(seed)
        warm_up = min(200, num_frames // 4)
        for number in range(num_frames):
            if number == warm_up:
                before = task.memory()
            (say_as_peer if number % 2 else say_as_stranger)(task, random_)
            if number % 50 == 0:  # another stream of the task goes on meanwhile
                assert link.call(Message({"n": number}, [np.full(100, number)]), 30).arrays[0][99] == number
        assert friend.ask("hello", {"a": 1}, 30)["a"] == 1
        assert friend.statistics()["messages"] == len(range(0, num_frames, 50)) + 1
    assert_serves(task)
    assert task.process.poll() is None
    assert task.memory() < before + KEPT
    assert statistics_at_rest(task)["rejected"] > num_frames / 2


def test_two_thousand_random_frames(task):
    attacked(task, 2000, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_frames(task):
    seed = int.from_bytes(os.urandom(4))
    print(f"{seed=}")
    attacked(task, 100_000, seed)


@pytest.mark.rest
def test_random_frames_under_tls(tmp_path):
    """A peer sends them, correctly encrypted."""
    credentials = credentials_of_ca(tmp_path, "a")
    security, random_ = credentials.security(), random.Random(2)
    with EchoTask(credentials=credentials) as task:
        for _ in range(100):
            connection = connect("127.0.0.1", task.port, security, time.monotonic() + 30)
            with contextlib.suppress(OSError):
                connection._stream.write([some_frame(random_)], time.monotonic() + 30)
            connection.close()
        assert_serves(task, credentials)


# --- unauthenticated peers ------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [pytest.param(None, marks=pytest.mark.rest), "wrong"])
def test_unauthenticated_peer_costs_no_memory(task, token):
    assert_serves(task)
    before = task.memory("VmHWM")
    with TaskClient(task.address, Credentials(token=token), "ps 0") as client:
        for _ in range(50):
            message(UnauthenticatedError, client.open, "token")
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", task.port), timeout=30) as connection:
            say(connection, b"RPLX" + bytes(2 * MB))
    assert task.memory("VmHWM") < before + 20 * MB
    assert_serves(task)
    assert statistics_at_rest(task)["rejected"] >= 100


@pytest.mark.rest
def test_task_without_descriptors_waits_and_continues():
    with EchoTask() as task, contextlib.ExitStack() as strangers:
        assert_serves(task)
        num_open = len(os.listdir(f"/proc/{task.process.pid}/fd"))
        resource.prlimit(task.process.pid, resource.RLIMIT_NOFILE, (num_open + 5, num_open + 5))
        for _ in range(20):
            strangers.enter_context(socket.create_connection(("127.0.0.1", task.port)))
        time.sleep(0.3)
        used = processor_s(task)
        with TaskClient(task.address, TOKEN, "ps 0") as client:
            message(UnavailableError, lambda: client.open(0.5), "ps 0 at")
        assert processor_s(task) - used < 0.25  # it does not try as fast as it can
        strangers.close()
        assert_serves(task)


def processor_s(task):
    with open(f"/proc/{task.process.pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.rest
def test_300_idle_unauthenticated_peers_do_not_block_a_task():
    """None of them is cut meanwhile, but the oldest ones for new ones."""
    with (
        EchoTask(handshake_s=200.0) as task,
        TaskClient(task.address, TOKEN, "ps 0") as friend,
        friend.open() as link,
    ):
        assert_serves(task)
        before = task.memory()
        with contextlib.ExitStack() as strangers:
            used = processor_s(task)
            for _ in range(300):
                strangers.enter_context(socket.create_connection(("127.0.0.1", task.port)))
            assert_serves(task)
            link.call(Message({}), 30)
            assert task.memory() < before + KEPT
            assert processor_s(task) - used < 2
        assert_serves(task)
