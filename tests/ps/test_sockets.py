"""Streams on sockets of their own: who gets one, who is sent away, and what a client does that cannot have one."""

import os
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest
from echo_task import EchoTask, echo_server

from checks import message
from replicax._src.ps import sockets
from replicax._src.ps.buffers import Buffers
from replicax._src.ps.credentials import Credentials
from replicax._src.ps.messages import Decoder, Message, encode
from replicax._src.ps.sockets import _BUFFER_BYTES, _MOST_STRANGERS, SocketPipe, Tickets
from replicax._src.ps.transport import TaskClient
from replicax._src.testing.proxy import Proxy
from replicax.errors import MessageError, UnavailableError

pytestmark = pytest.mark.timeout(180)
TOKEN = Credentials(token="secret")
MB = 2**20


def is_on_socket(link):
    return isinstance(link._pipe, SocketPipe)


def way_in(client):
    return client.ask("", {}, 30)


@pytest.fixture(scope="module")
def task():
    with EchoTask() as task:
        yield task


@pytest.fixture
def pipes():
    ours, theirs = _tcp_pair()
    with ours, theirs:
        yield SocketPipe(ours), SocketPipe(theirs)


def _tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    return ours, theirs


# --- frames -------------------------------------------------------------------------------------------


def test_messages_of_all_sizes_come_back_whichever_way_the_bytes_are_cut(pipes):
    sender, receiver = pipes
    random_ = random.Random(0)
    edges = [
        0,
        1,
        63,
        64,
        16_000,
        16_384,
        65_000,
        _BUFFER_BYTES - 1,
        _BUFFER_BYTES,
        _BUFFER_BYTES + 1,
        3 * MB,
    ]
    sent = [
        Message({"n": n, "pad": "x" * random_.choice([0, 100, 20_000, 200_000])}, arrays)
        for n in range(60)
        for arrays in [
            [
                np.frombuffer(random_.randbytes(random_.choice(edges)), np.uint8)
                for _ in range(random_.randrange(4))
            ]
        ]
    ]
    writing = threading.Thread(target=lambda: [sender.write(encode(each)) for each in sent])
    writing.start()
    decoder = Decoder(Buffers())
    for each in sent:
        (got,) = receiver.receive(decoder)
        assert got.header == each.header
        for ours, theirs in zip(got.arrays, each.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.size == 0 or ours.ctypes.data % 64 == 0
    writing.join()
    assert decoder.num_bytes == sum(encode(each).num_bytes for each in sent)


def test_more_arrays_than_one_call_of_the_system_takes(pipes):
    sender, receiver = pipes
    arrays = [np.full(700, n, np.int32) for n in range(3000)]
    writing = threading.Thread(target=lambda: sender.write(encode(Message({}, arrays))))
    writing.start()
    (got,) = receiver.receive(Decoder(Buffers()))
    assert all((ours == theirs).all() for ours, theirs in zip(got.arrays, arrays, strict=True))
    writing.join()


class Reluctant:
    """A socket that takes less than it is given."""

    def __init__(self, connection, most):
        self.connection, self.most = connection, most

    def sendmsg(self, parts):
        return self.connection.send(b"".join(parts)[: self.most])


@pytest.mark.parametrize("most", [7, 64, 1000])
def test_what_the_system_does_not_take_at_once_is_sent_after_it(pipes, most):
    sender, receiver = pipes
    sender._connection = Reluctant(sender._connection, most)
    arrays = [np.arange(n, dtype=np.uint8) for n in (3, 64, 130, 0, 200)] + [np.arange(20_000)]
    sent = Message({"op": "echo"}, arrays)
    writing = threading.Thread(target=lambda: sender.write(encode(sent)))
    writing.start()
    (got,) = receiver.receive(Decoder(Buffers()))
    for ours, theirs in zip(got.arrays, arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    writing.join()


@pytest.mark.parametrize("frame", [b"x" + struct.pack("<I", 3) + b"abc", b"m" + struct.pack("<I", 2**31)])
def test_what_is_no_frame_is_refused_before_memory_is_taken(pipes, frame):
    sender, receiver = pipes
    sender._connection.sendall(frame)
    message(MessageError, lambda: receiver.receive(Decoder(Buffers())), "A frame of kind")


# --- who gets one -------------------------------------------------------------------------------------


def test_a_link_is_on_a_socket_of_its_own_unless_the_server_has_none():
    for uses_sockets in (True, False):
        with (
            echo_server(uses_sockets=uses_sockets) as server,
            TaskClient(server.address, TOKEN, "ps 0") as client,
        ):
            link = client.open()
            assert is_on_socket(link) is uses_sockets
            assert link.call(Message({"op": "echo"}), 30).header["session"] == 1


@pytest.mark.parametrize("why", ["behind a proxy", "nobody listens there", "another program listens there"])
def test_who_cannot_reach_the_socket_has_a_stream_of_arrow_flight(why, monkeypatch):
    with echo_server() as server, socket.create_server(("127.0.0.1", 0)) as other:
        address = server.address
        if why == "behind a proxy":  # that of the streams may not be passed on
            proxy = Proxy("127.0.0.1", server.port)
            address = proxy.address
        elif why == "nobody listens there":
            server._listener.close()
        else:
            monkeypatch.setattr(server._listener, "port", other.getsockname()[1])
            threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with TaskClient(address, TOKEN, "ps 0") as client:
            link = client.open()
            assert not is_on_socket(link)
            link.call(Message({}, [np.zeros(MB)]), 30)


def test_a_ticket_is_good_for_one_stream_and_a_minute():
    tickets = Tickets()
    first, second = tickets.issue(0.0), tickets.issue(0.0)
    assert first != second
    assert tickets.take(first, 59.0)
    assert not tickets.take(first, 59.0)
    assert not tickets.take(second, 61.0)
    assert not tickets.take(b"", 0.0)
    oldest = tickets.issue(0.0)
    for _ in range(2000):
        tickets.issue(0.0)
    assert not tickets.take(oldest, 1.0)


def test_without_a_ticket_a_stranger_is_sent_away_and_costs_nothing(task):
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        told = way_in(client)
        port, used = told["port"], bytes.fromhex(told["ticket"])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(used)
            assert connection.recv(100) == b"replicax"
        before, rejected = task.memory(), client.ask("statistics", {}, 30)["rejected"]
        for first in (os.urandom(32), used, b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b""):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.settimeout(30)
                try:
                    connection.sendall(first)
                    connection.shutdown(socket.SHUT_WR)
                    connection.sendall(bytes(MB)) if first else None
                    assert connection.recv(100) == b""
                except ConnectionError:
                    pass
        assert client.ask("statistics", {}, 30)["rejected"] == rejected + 4
        assert task.memory() < before + 20 * MB
        client.open().call(Message({}), 30)


def test_many_who_say_nothing_do_not_keep_others_out():
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        silent = [
            socket.create_connection(("127.0.0.1", server._listener.port))
            for _ in range(_MOST_STRANGERS + 10)
        ]
        client.open().call(Message({}), 30)  # by Arrow Flight meanwhile
        for each in silent:
            each.close()
        until = time.monotonic() + 30
        while not is_on_socket(link := client.open()):
            link.close()
            assert time.monotonic() < until
            time.sleep(0.05)


def test_random_frames_of_one_with_a_ticket_end_the_stream_and_leave_nothing(task):
    random_ = random.Random(1)
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        before = 0
        for turn in range(150):
            told = way_in(client)
            with socket.create_connection(("127.0.0.1", told["port"]), timeout=30) as connection:
                connection.sendall(bytes.fromhex(told["ticket"]))
                assert connection.recv(8, socket.MSG_WAITALL) == b"replicax"
                connection.sendall(_frame(random_))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):
                    pass
            if turn == 40:
                before = task.memory()
        assert task.memory() < before + 60 * MB
        client.open().call(Message({}, [np.zeros(MB)]), 30)


def _frame(random_):
    head = bytearray(encode(Message({"op": "echo"}, [np.zeros(random_.choice([3, 30_000]))])).head)
    for _ in range(random_.randrange(4)):
        head[random_.randrange(len(head))] = random_.randrange(256)
    head = bytes(head[: random_.choice([len(head), random_.randrange(len(head))])])
    size = random_.choice([len(head), len(head), random_.randrange(2**32)])
    whole = random_.choice([b"m", b"m", b"m", b"r", b"?"]) + struct.pack("<I", size) + head
    return random_.choice([whole, whole + random_.randbytes(1000), random_.randbytes(50)])


def test_a_large_message_is_announced_and_does_not_come(task):
    """Its memory is not touched, and goes with the stream."""
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        before = task.memory()
        link = client.open()
        head = encode(Message({}, [np.zeros(2**30, np.uint8)])).head
        link._pipe._connection.sendall(b"m" + struct.pack("<I", len(head)) + head + bytes(1000))
        assert client.ask("hello", {}, 10)
        assert task.memory() < before + 60 * MB
        link.close()
        client.open().call(Message({}), 30)


# --- how it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drains_s", [0.0, 2.0])
def test_a_refusal_is_read_although_the_client_is_still_writing(drains_s, monkeypatch):
    monkeypatch.setattr(sockets, "_DRAIN_S", drains_s)
    with echo_server(max_message_bytes=MB) as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        link = client.open()
        large = Message({}, [np.zeros(64 * MB, np.uint8)])
        with pytest.raises(MessageError, match="at most 1048576 are taken"):
            link.call(large, 60)
        message(UnavailableError, lambda: link.send(Message({})), "at most 1048576 are taken")


def test_a_stream_that_waits_for_a_stopped_task_to_take_a_message_can_be_closed(task):
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        link = client.open()
        link.call(Message({}), 30)
        with task.stopped():
            threading.Timer(0.3, link.close).start()
            started = time.monotonic()
            large = Message({}, [np.zeros(64 * MB, np.uint8)])
            message(UnavailableError, lambda: link.send(large, 60), "was closed")
            assert time.monotonic() - started < 20


def test_threads_of_streams_end_with_them():
    def num():
        return sum(thread.name in ("replicax link", "replicax links") for thread in threading.enumerate())

    before = num()
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        for _ in range(3):
            client.open().call(Message({}), 30)
        assert num() == before + 4
        server.shutdown(30)
        until = time.monotonic() + 30
        while num() > before:
            assert time.monotonic() < until
            time.sleep(0.01)
