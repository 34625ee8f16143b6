"""What a worker's connection for functions sends in its owner, what in a thread, and the order of the answers."""

import queue
import threading
from collections import deque

import numpy as np
import pytest

from memory_cluster import eventually
from replicax._ps.coordinator import worker_link
from replicax._ps.coordinator.worker_link import WorkerLink
from replicax._ps.transport.messages import Message, encode
from replicax._src.vocabulary.errors import MessageError, UnavailableError

pytestmark = pytest.mark.timeout(60)
LARGE = np.zeros(worker_link._BUFFERED_BYTES + 1, np.uint8)


class Threads:
    """Threads that run when the test says so."""

    def __init__(self):
        self.functions, self.are_left = deque(), True

    def call(self, function):
        if self.are_left:
            self.functions.append(function)
        return self.are_left

    def run(self):
        self.functions.popleft()()


class Owner:
    """An owner whose queue the test empties."""

    def __init__(self):
        self.soon, self.answers, self.error, self.watched = deque(), [], None, []

    def put(self, function):
        self.soon.append(function)

    def run(self):
        while self.soon:
            self.soon.popleft()()

    def watch(self, link):
        self.watched.append(link)

    def watch_no_more(self, link):
        if link in self.watched:
            self.watched.remove(link)

    def answered(self, link, answers):
        self.answers += answers

    def broke(self, link, error):
        self.error = error


class Link:
    """A connection to a worker that answers each message with its number.

    Attributes:
      sent: The numbers of the messages of each write.
      arrived: The answers that are here.
      has_part: True if only a part of the next answer is here.
      error: The error with which the connection ends.
    """

    def __init__(self):
        self.sent, self.arrived = [], queue.SimpleQueue()
        self.has_part, self.is_closed, self.error = False, False, None
        self.sends_in = []
        self.after_send = lambda: None

    def fileno(self):
        return 7

    def send_all(self, messages, timeout_s=60.0):
        for each in messages:
            encode(each)
        if self.error is not None:
            raise self.error
        self.sent.append([each.header["n"] for each in messages])
        self.sends_in.append(threading.current_thread())
        for each in messages:
            self.arrived.put(Message({"answer": each.header["n"]}))
        self.after_send()

    def receive_arrived(self):
        if self.has_part:
            return None
        return self.receive_all(0)

    def receive_all(self, timeout_s):
        if self.error is not None:
            raise self.error
        self.has_part = False
        answers = []
        while not self.arrived.empty():
            answers.append(self.arrived.get())
        return answers

    def has_bytes(self):
        return self.has_part

    def close(self):
        self.is_closed = True


class Connected:
    """A connection that is open."""

    def __init__(self):
        self.owner, self.threads, self.peer = Owner(), Threads(), Link()
        self.link = WorkerLink("worker 0", 1, lambda timeout_s: self.peer, self.owner, self.threads)

    def open(self):
        self.threads.run()
        self.owner.run()
        return self

    @property
    def answers(self):
        """The numbers of the answers that the owner has got, and the types of the errors."""
        self.owner.run()
        return [
            type(each).__name__
            if isinstance(each, Exception)
            else each.header["answer"]
            if isinstance(each, Message)
            else dict(each)
            for each in self.owner.answers
        ]


@pytest.fixture
def connected():
    return Connected().open()


def number(n, *arrays):
    return Message({"n": n}, arrays)


def unsendable(n):
    return Message({"n": n, "bad": object()})


def test_small_messages_are_sent_at_once_by_the_owner(connected):
    connected.link.send([number(1), number(2)])
    assert connected.peer.sent == [[1, 2]]
    assert not connected.threads.functions
    connected.link.arrived()
    assert connected.answers == [1, 2]


def test_a_large_message_is_sent_by_a_thread_and_later_ones_after_it(connected):
    connected.link.send([number(1, LARGE)])
    connected.link.send([number(2)])
    connected.link.send([number(3)])
    assert connected.peer.sent == []
    connected.threads.run()
    connected.owner.run()
    assert connected.peer.sent == [[1]]
    connected.threads.run()
    connected.owner.run()
    assert connected.peer.sent == [[1], [2], [3]]
    connected.link.arrived()
    assert connected.answers == [1, 2, 3]
    connected.link.send([number(4)])  # all that was large is answered
    assert connected.peer.sent[-1] == [4]


def test_many_small_messages_without_answers_go_to_a_thread(connected):
    """A worker whose answers are not read reads nothing, so the owner must not wait until it reads."""
    num_bytes = worker_link._BUFFERED_BYTES // 2
    for n in range(3):
        connected.link.send([number(n, np.zeros(num_bytes, np.uint8))])
    assert connected.peer.sent == [[0]]
    connected.threads.run()
    assert connected.peer.sent == [[0], [1]]
    connected.link.arrived()
    connected.owner.run()
    connected.threads.run()
    assert connected.peer.sent == [[0], [1], [2]]


def test_messages_wait_for_the_opening():
    connected, opened = Connected(), []
    connected.link.send([number(1)])
    connected.link.after_opening(lambda: opened.append(True))
    assert connected.peer.sent == []
    assert not opened
    connected.open()
    assert opened
    connected.threads.run()
    assert connected.peer.sent == [[1]]
    assert connected.owner.watched == [connected.link]


def test_a_connection_that_cannot_be_opened_is_an_error_and_ends_the_waits_for_it():
    connected, ended = Connected(), []
    error = UnavailableError("no", "worker 0")

    def refuse(timeout_s):
        raise error

    threads = Threads()
    link = WorkerLink("worker 0", 1, refuse, connected.owner, threads)
    link.after_opening(lambda: ended.append(True))
    threads.run()
    connected.owner.run()
    assert connected.owner.error is error
    assert ended
    link.send([number(1)])
    assert not threads.functions


def test_a_connection_that_opens_after_it_was_closed_is_closed():
    connected = Connected()
    connected.link.close()
    connected.open()
    assert connected.peer.is_closed
    assert connected.owner.watched == []
    assert connected.owner.error is None


def test_own_answers_keep_their_places(connected):
    connected.link.send([{"mine": 0}, number(1), {"mine": 2}, number(3), {"mine": 4}])
    assert connected.peer.sent == [[1, 3]]
    assert connected.answers == [{"mine": 0}]
    connected.link.arrived()
    assert connected.answers == [{"mine": 0}, 1, {"mine": 2}, 3, {"mine": 4}]


def test_one_message_of_a_group_cannot_travel(connected):
    connected.link.send([number(1), unsendable(2), number(3)])
    assert connected.peer.sent == [[1], [3]]
    connected.link.arrived()
    assert connected.answers == [1, "MessageError", 3]
    assert connected.owner.error is None


def test_answers_that_come_while_a_thread_still_sends_belong_to_their_requests(connected):
    """The first message cannot travel, and the second one is answered before the thread has sent the third one."""
    connected.peer.after_send = connected.link.arrived
    connected.link.send([number(0, LARGE)])
    connected.link.send([unsendable(1), number(2)])
    connected.link.send([number(3)])
    connected.threads.run()
    connected.owner.run()
    connected.threads.run()
    assert connected.answers == [0, "MessageError", 2, 3]


def test_a_message_that_cannot_travel_is_answered_although_nothing_else_is_sent(connected):
    connected.link.send([unsendable(1)])
    assert connected.answers == ["MessageError"]
    connected.link.send([Message({"n": 2, "bad": object()}, [LARGE])])
    connected.threads.run()
    assert connected.answers == ["MessageError", "MessageError"]


def test_a_part_of_an_answer_is_left_to_a_thread(connected):
    connected.link.send([number(1)])
    connected.peer.has_part = True
    connected.link.arrived()
    assert connected.owner.watched == []
    assert connected.answers == []
    connected.threads.run()
    assert connected.answers == [1]
    assert connected.owner.watched == [connected.link]


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_answer_that_is_no_message_is_the_error_of_its_request_and_ends_the_connection(
    connected, in_thread
):
    connected.link.send([number(1)])
    connected.peer.has_part = in_thread
    if in_thread:
        connected.link.arrived()
    connected.peer.error = MessageError("no message")
    if in_thread:
        connected.threads.run()
    else:
        connected.link.arrived()
    assert connected.answers == ["MessageError"]
    assert isinstance(connected.owner.error, UnavailableError)
    assert connected.peer.is_closed


@pytest.mark.parametrize("large", [False, True])
def test_a_send_that_fails_ends_the_connection(connected, large):
    connected.peer.error = UnavailableError("broke", "worker 0")
    connected.link.send([number(1, LARGE) if large else number(1)])
    connected.link.send([number(2, LARGE)])
    if large:
        connected.threads.run()
    connected.owner.run()
    assert connected.owner.error is connected.peer.error
    assert connected.peer.is_closed
    assert connected.owner.watched == []
    assert not connected.threads.functions


def test_nothing_is_heard_of_a_closed_connection(connected):
    connected.link.send([number(1, LARGE)])
    connected.threads.run()
    connected.link.send([number(2), {"mine": 3}])
    connected.link.close()
    connected.link.close()
    connected.peer.error = UnavailableError("closed", "worker 0")
    assert connected.answers == []
    assert connected.owner.error is None
    assert not connected.threads.functions


def test_a_real_thread_sends_large_messages():
    """The fakes of this file agree with the real threads."""
    from replicax._ps.client.request_threads import RequestThreads

    threads, owner, peer = RequestThreads("test"), Owner(), Link()
    link = WorkerLink("worker 0", 1, lambda timeout_s: peer, owner, threads)

    def is_sent():
        owner.run()
        return len(peer.sent) == 2

    link.send([number(1, LARGE)])
    link.send([number(2, LARGE)])
    eventually(is_sent)
    assert threading.current_thread() not in peer.sends_in
    threads.close()
