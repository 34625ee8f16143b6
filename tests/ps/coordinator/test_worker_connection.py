"""Which messages are sent on a connection to a worker, and when that could block."""

from types import SimpleNamespace

import numpy as np
import pytest

from replicax._ps.coordinator.closures import Closure
from replicax._ps.coordinator.worker_connection import WorkerConnection
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import MessageError, UnavailableError


class Link:
    """A connection to a worker that answers when ``answers`` is set."""

    def __init__(self):
        self.sent, self.answers, self.error = [], [], None

    def send_all(self, messages, timeout_s):
        if self.error is not None:
            raise self.error
        self.sent.append([message.header["closure"][1] for message in messages])

    def receive_all(self, timeout_s):
        answers, self.answers = self.answers, []
        return answers

    def close(self):
        pass


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def connection(link):
    session = SimpleNamespace(incarnation="me", epoch=0)
    return WorkerConnection("worker 0", None, link, 1, session, None)


def closure(number, num_bytes=8):
    prepared = SimpleNamespace(
        programs={}, constants={}, iterators=(), named={}, arguments=[np.zeros(num_bytes, np.uint8)]
    )
    made = Closure(number, "f", "f", SimpleNamespace(prepared=prepared))
    made.travels_alone = False
    return made


def send_now(connection, closures):
    """Sends as much as possible without blocking; returns the rest."""
    return closures[connection.send(connection.small(closures, 0, 8), may_block=False) :]


def test_nothing_is_sent_without_blocking_with_many_unanswered_requests(connection, link):
    """A worker whose own answer is not read reads nothing, so the thread that reads answers must not wait for it."""
    small = [closure(number) for number in (1, 2)]
    connection.send(connection.whole(closure(0, 2**20), 0))
    assert send_now(connection, small) == small
    link.answers = [Message({})]
    assert [each.number for each, _ in connection.receive()[0]] == [0]
    assert send_now(connection, small) == []
    assert link.sent == [[0], [1, 2]]


def test_unsent_requests_are_not_awaited_if_others_are_answered(connection, link):
    """The first of several frames was sent."""
    send_now(connection, [closure(0)])

    def partly(messages, timeout_s):
        link.answers = [Message({}), Message({})]  # to closure 0, and to the first of these
        connection.receive()
        raise UnavailableError("broke", "worker 0")

    link.send_all = partly
    with pytest.raises(UnavailableError, match="broke"):
        send_now(connection, [closure(1), closure(2)])
    assert connection.running() == []


def test_unsendable_request_is_left_to_the_blocking_thread(connection, link):
    link.error = MessageError("too large")
    assert send_now(connection, [closure(0)]) != []
    with pytest.raises(MessageError):
        connection.send(connection.whole(closure(0), 0))
    assert connection.running() == []


def test_nothing_is_sent_without_blocking_while_another_thread_sends(connection, link):
    def others_send():
        assert send_now(connection, [closure(0)]) != []
        yield from connection.small([closure(1)], 0, 8)

    assert connection.send(others_send()) == 1
    assert link.sent == [[1]]
