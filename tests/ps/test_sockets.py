"""Streams on sockets of their own: who gets one, who is sent away, and what a client does that cannot have one."""

import errno
import os
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest
from echo_task import EchoTask, echo_server

from checks import message, needs_ipv6
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.layout import free_ports
from replicax._src.ps import sockets
from replicax._src.ps.buffers import Buffers
from replicax._src.ps.messages import Decoder, Message, encode
from replicax._src.ps.server import _Answers
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
    for stream_port in (0, None):
        with (
            echo_server(stream_port=stream_port) as server,
            TaskClient(server.address, TOKEN, "ps 0") as client,
        ):
            link = client.open()
            assert is_on_socket(link) is (stream_port is not None)
            assert link.call(Message({"op": "echo"}), 30).header["session"] == 1


@pytest.mark.parametrize(
    "why",
    [
        "behind a proxy",
        "nobody listens there",
        "another program listens there",
        "one that says nothing listens there",
        "something before it speaks TLS",
    ],
)
def test_who_cannot_reach_the_socket_has_a_stream_of_arrow_flight(why, monkeypatch):
    with (
        echo_server() as server,
        socket.create_server(("127.0.0.1", 0)) as other,
        Proxy("127.0.0.1", server.port) as proxy,
    ):
        address = server.address
        if why == "behind a proxy":  # that of the streams may not be passed on
            address = proxy.address
        elif why == "nobody listens there":
            server._listener.close()
        elif why != "something before it speaks TLS":
            monkeypatch.setattr(server._listener, "port", other.getsockname()[1])
            if "nothing" not in why:
                threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with TaskClient(address, TOKEN, "ps 0") as client:
            client._uses_tls = "TLS" in why  # what it sends must not go on unencrypted
            link = client.open(4.0)
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


def test_who_says_its_ticket_slowly_is_sent_away_in_time(monkeypatch):
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 0.3)
    with echo_server() as server, socket.create_connection(("127.0.0.1", server._listener.port)) as slow:
        slow.settimeout(0.1)
        said = None
        for _ in range(31):
            try:
                slow.sendall(b"x")
                said = slow.recv(1)
                break
            except TimeoutError:
                pass
            except ConnectionError:
                said = b""
                break
        assert said == b""


def test_a_server_that_had_no_descriptor_left_takes_streams_again():
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        listener = server._listener
        listener._listening = OutOfDescriptors(listener._listening)
        for _ in range(3):  # the first one is taken by the call that waits already
            link = client.open(30)
            assert is_on_socket(link)
            link.call(Message({}), 30)
        assert not listener._listening.errors


class OutOfDescriptors:
    """A socket that listens, and cannot accept for a time."""

    def __init__(self, listening):
        self.listening, self.errors = listening, [OSError(errno.EMFILE, "Too many open files")] * 2

    def accept(self):
        if self.errors:
            raise self.errors.pop()
        return self.listening.accept()

    def __getattr__(self, name):
        return getattr(self.listening, name)


@needs_ipv6
def test_a_task_of_all_networks_has_streams_by_both_kinds_of_addresses():
    with echo_server("0.0.0.0:0") as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        for host in ("127.0.0.1", "::1"):
            told = way_in(client)
            pipe = sockets.connected(host, told["port"], told["ticket"], 10)
            pipe.write(encode(Message({"op": "echo"})))
            (answer,) = pipe.receive(Decoder(Buffers()))
            assert answer.header["op"] == "echo"
            pipe.close()


def test_the_port_of_streams_can_be_chosen():
    port, other = free_ports(2)
    with echo_server(stream_port=port) as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        assert is_on_socket(link := client.open())
        assert link._pipe._connection.getpeername()[1] == port
        second = echo_server(f"127.0.0.1:{other}", stream_port=port)
        message(UnavailableError, second.start, f"cannot listen at 127.0.0.1:{port}", "in use")
        with echo_server(f"127.0.0.1:{other}"):  # nothing of the second is left
            pass


def test_many_streams_leave_no_descriptors_or_threads():
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        client.open().call(Message({}), 30)
        before = held()
        for turn in range(100):
            link = client.open()
            link.send_all([Message({"op": "echo"})] * 3, 30)
            if turn % 4 == 0:  # refused
                link._pipe._connection.sendall(b"no frame")
                with pytest.raises((MessageError, UnavailableError)):
                    [link.receive(30) for _ in range(4)]
            elif turn % 4 == 1:  # gone without a word, with answers on their way
                link._pipe._connection.close()
            link.close()
        until = time.monotonic() + 30
        while server.statistics()["streams"] > 1 or any(
            now > then for now, then in zip(held(), before, strict=True)
        ):
            assert time.monotonic() < until, (held(), before)
            time.sleep(0.02)
        assert server.statistics()["streams"] == client.statistics()["links"] == 1


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


# --- answers that are held ------------------------------------------------------------------------------


class Blocked:
    """A pipe whose peer takes nothing until ``go`` is set; then one write may fail."""

    def __init__(self, error=None):
        self.go, self.error, self.written = threading.Event(), error, []

    def write(self, message):
        self.go.wait(30)
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.written.append(message)


def test_a_peer_that_takes_nothing_does_not_hold_up_answers_to_others():
    stuck, other = Blocked(), Blocked()
    other.go.set()
    answers = [_Answers(stuck), _Answers(other)]
    for each in answers:
        each.hold(encode(Message({})))
        time.sleep(0.05)
    until = time.monotonic() + 20
    while not other.written:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not stuck.written
    stuck.go.set()
    for each in answers:
        each.end()


def test_a_stream_ends_when_a_held_answer_could_not_be_sent():
    pipe = Blocked(OSError(errno.ENOBUFS, "No buffer space available"))
    answers = _Answers(pipe)
    answers.hold(encode(Message({})))
    time.sleep(0.05)  # it is being sent
    pipe.go.set()
    with pytest.raises(OSError, match="No buffer space"):
        answers.send(encode(Message({})))
    answers.end()


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
    before = set(threading.enumerate())  # of which some may be ending

    def num():
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        return names.count("replicax link") + names.count("replicax links")

    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        for _ in range(3):
            client.open().call(Message({}), 30)
        assert num() == 4
        server.shutdown(30)
        until = time.monotonic() + 30
        while num():
            assert time.monotonic() < until
            time.sleep(0.01)
