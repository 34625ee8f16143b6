"""What is sent on a connection to a worker, and when that could block."""

from types import SimpleNamespace

import numpy as np
import pytest

from replicax._src.parameter_servers.coordinator.closures import Closure
from replicax._src.parameter_servers.coordinator.worker_connection import WorkerConnection
from replicax._src.parameter_servers.errors import UnavailableError
from replicax._src.parameter_servers.transport.messages import Message


class Link:
    """A connection to a worker that answers when ``answers`` says so."""

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
def stream(link):
    session = SimpleNamespace(incarnation="me", epoch=0)
    return WorkerConnection("worker 0", None, link, 1, session, None)


def closure(number, num_bytes=8):
    prepared = SimpleNamespace(
        programs={}, constants={}, iterators=(), named={}, arguments=[np.zeros(num_bytes, np.uint8)]
    )
    made = Closure(number, "f", "f", SimpleNamespace(prepared=prepared))
    made.travels_alone = False
    return made


def test_beside_much_that_is_unanswered_nothing_is_sent_by_who_may_not_block(stream, link):
    """A worker whose own answer is not taken takes nothing: who takes answers must not wait for it."""
    small = [closure(number) for number in (1, 2)]
    stream.send(closure(0, 2**20), 0)
    assert stream.try_send(small, 0, 8) == small
    link.answers = [Message({})]
    assert [each.number for each, _ in stream.receive()[0]] == [0]
    assert stream.try_send(small, 0, 8) == []
    assert link.sent == [[0], [1, 2]]


def test_what_could_not_be_sent_is_not_awaited_though_some_of_it_is_answered(stream, link):
    """The first of several frames got through."""
    stream.try_send([closure(0)], 0, 8)

    def partly(messages, timeout_s):
        link.answers = [Message({}), Message({})]  # to closure 0, and to the first of these
        stream.receive()
        raise UnavailableError("broke", "worker 0")

    link.send_all = partly
    with pytest.raises(UnavailableError, match="broke"):
        stream.try_send([closure(1), closure(2)], 0, 8)
    assert stream.running() == []
