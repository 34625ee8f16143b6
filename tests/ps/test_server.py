"""A server's streams: held answers, how streams end, and that they leave nothing."""

import errno
import os
import socket
import threading
import time

import numpy as np
import pytest

from checks import message, needs_ipv6
from echo_task import EchoTask, echo_server
from replicax._ps.transport import task_server, transport
from replicax._ps.transport.messages import Decoder, Encoded, Message, encode
from replicax._ps.transport.task_server import _MOST_HELD_BYTES, _Stream
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.wire import connection as connections
from replicax._src.wire.buffers import Buffers
from replicax._src.wire.frames import Kind, frame_parts
from replicax.errors import MessageError, UnavailableError

pytestmark = pytest.mark.timeout(180)
TOKEN = Credentials(token="secret")
MB = 2**20


@pytest.fixture(scope="module")
def task():
    with EchoTask() as task:
        yield task


def wait_until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {limit_s} s"
        time.sleep(0.005)


# --- answers that are held ----------------------------------------------------------------------------


class Blocked:
    """A connection whose peer reads nothing until ``go`` is set; then one write may fail."""

    bytes_in = bytes_out = 0

    def __init__(self, error=None):
        self.go, self.error, self.sent, self.num_writes = threading.Event(), error, [], 0

    def send_messages(self, messages, deadline):
        self.go.wait(30)
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.sent += [head for head, _ in messages]
        self.num_writes += 1


def stream_on(connection):
    return _Stream(connection, Decoder(Buffers()))


def answer_of(number, size=0):
    return encode(Message({"n": number, "pad": "x" * size}))


def test_peer_that_reads_nothing_does_not_delay_answers_to_others():
    stuck, other = Blocked(), Blocked()
    other.go.set()
    streams = [stream_on(stuck), stream_on(other)]
    for each in streams:
        each._hold(answer_of(0))
        time.sleep(0.05)
    wait_until(lambda: other.sent)
    assert not stuck.sent
    stuck.go.set()
    for each in streams:
        each.end()


def test_stream_ends_if_a_held_answer_cannot_be_sent():
    connection = Blocked(OSError(errno.ENOBUFS, "No buffer space available"))
    stream = stream_on(connection)
    stream._hold(answer_of(0))
    time.sleep(0.05)  # it is being sent
    connection.go.set()
    with pytest.raises(OSError, match="No buffer space"):
        stream._send(answer_of(1))
    assert not connection.sent
    stream.end()


@pytest.fixture
def long_hold(monkeypatch):
    """Answers are held for so long that only the caller's thread sends them."""
    monkeypatch.setattr(task_server, "_HELD_S", 60.0)


def test_held_answers_are_sent_in_order_and_together(long_hold):
    connection = Blocked()
    connection.go.set()
    stream = stream_on(connection)
    for number in range(5):
        stream._hold(answer_of(number))
    stream._send(answer_of(5))
    assert connection.sent == [answer_of(number).head for number in range(6)]
    assert connection.num_writes == 1
    assert stream.counts.messages == 6
    stream.end()


def test_no_more_than_64_kb_of_answers_are_held(long_hold):
    connection = Blocked()
    connection.go.set()
    stream = stream_on(connection)
    for number in range(3):
        stream._hold(answer_of(number, _MOST_HELD_BYTES // 2))
    assert len(connection.sent) == 2
    stream._send(answer_of(3))
    assert len(connection.sent) == 4
    stream.end()


def test_an_ended_stream_sends_nothing(long_hold):
    connection = Blocked()
    connection.go.set()
    stream = stream_on(connection)
    stream._hold(answer_of(0))
    stream.end()
    stream._send(answer_of(1))
    time.sleep(0.05)
    assert not connection.sent


# --- how streams end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("last_words_s", [0.0, 2.0])
def test_rejection_is_read_while_the_client_is_still_writing(last_words_s, monkeypatch):
    """This works if the server reads the rest of the message. Otherwise the worst case is an end without a reason."""
    monkeypatch.setattr(connections, "_LAST_WORDS_S", last_words_s)
    allowed = (MessageError,) if last_words_s else (MessageError, UnavailableError)
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        link = client.open()
        with monkeypatch.context() as patch:
            patch.setattr(transport, "encode", lambda message: Encoded(b"wrong", [bytes(64 * MB)]))
            with pytest.raises(allowed) as refused:
                link.call(Message({}), 60)
        assert not last_words_s or "5 bytes are not a message" in str(refused.value)
        with pytest.raises(UnavailableError):
            link.send(Message({}))


def test_stream_blocked_by_a_stopped_task_can_be_closed(task):
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        link = client.open()
        link.call(Message({}), 30)
        with task.stopped():
            threading.Timer(0.3, link.close).start()
            started = time.monotonic()
            large = Message({}, [np.zeros(64 * MB, np.uint8)])
            message(UnavailableError, lambda: link.send(large, 60), "was closed")
            assert time.monotonic() - started < 20


@pytest.mark.parametrize("kind", [Kind.END, Kind.REFUSAL])
def test_frame_of_another_kind_ends_only_its_stream(kind):
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        link, other = client.open(), client.open()
        link._connection.send([(kind, b"{}", ())], time.monotonic() + 10)
        with pytest.raises((MessageError, UnavailableError)):
            link.receive(10)
        other.call(Message({}), 10)
        wait_until(lambda: server.statistics()["streams"] == 1)


def test_damaged_frame_ends_only_its_stream():
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        link, other = client.open(), client.open()
        frame = bytearray(b"".join(frame_parts(Kind.MESSAGE, encode(Message({"op": "echo"})).head)))
        frame[10] ^= 1
        link._connection._socket.sendall(frame)
        message(UnavailableError, lambda: link.receive(10), "ps 0 at")
        other.call(Message({}), 10)
        wait_until(lambda: server.statistics()["streams"] == 1)


def test_answers_before_a_damaged_one_are_received():
    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        link = client.open()
        connection = link._connection
        link.send_all([Message({"n": n}) for n in range(3)], 30)
        wait_until(lambda: connection._socket.recv(10_000, socket.MSG_PEEK).count(b"RX") == 3)
        taken = connection._taken

        def damaged(size, deadline):  # the last header, once all have been read from the socket
            data = taken(size, deadline)
            connection._taken = taken
            coming = connection._buffer[connection._start : connection._end]
            coming[bytes(coming).rindex(b"RX") + 4] ^= 1
            return data

        connection._taken = damaged
        assert [answer.header["n"] for answer in link.receive_all(30)] == [0, 1]
        message(UnavailableError, lambda: link.receive_all(30), "ps 0 at")


# --- what streams leave -------------------------------------------------------------------------------


def test_many_streams_leave_no_descriptors_or_threads():
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        client.open().call(Message({}), 30)
        wait_until(lambda: server.statistics()["messages"] == 1)
        before = held()
        for turn in range(100):
            link = client.open()
            link.send_all([Message({"op": "echo"})] * 3, 30)
            if turn % 4 == 0:  # refused
                link._connection._socket.sendall(bytes(30))
                with pytest.raises((MessageError, UnavailableError)):
                    [link.receive(30) for _ in range(4)]
            elif turn % 4 == 1:  # gone without a word, with answers on their way
                link._connection._socket.close()
            link.close()
        wait_until(lambda: server.statistics()["streams"] == client.statistics()["links"] == 1)
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_threads_of_streams_end_with_them():
    before = set(threading.enumerate())  # of which some may be ending

    def num():
        return sum(
            thread.name.startswith("replicax") for thread in threading.enumerate() if thread not in before
        )

    with echo_server() as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        for _ in range(3):
            client.open().call(Message({}), 30)
        assert num() >= 4
        server.shutdown(30)
        wait_until(lambda: not num())


def test_large_message_is_announced_but_not_sent(task):
    """Its memory is not touched, and is freed with the stream."""
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        assert client.ask("hello", {}, 10)
        before = task.memory()
        link = client.open()
        head, body = encode(Message({}, [np.zeros(2**30, np.uint8)]))
        announced = frame_parts(Kind.MESSAGE, head, body)[0]
        link._connection._socket.sendall(announced + bytes(1000))
        wait_until(lambda: client.ask("statistics", {}, 10)["bytes_in"] > 2**30)  # it waits for them now
        assert task.memory() < before + 60 * MB
        link.close()
        client.open().call(Message({}), 30)


@needs_ipv6
def test_a_task_of_all_networks_is_reached_by_both_kinds_of_addresses():
    with echo_server("0.0.0.0:0") as server:
        for host in ("127.0.0.1", "[::1]"):
            with TaskClient(f"{host}:{server.port}", TOKEN, "ps 0") as client:
                assert client.ask("hello", {}, 10)
                client.open().call(Message({}), 10)
