"""A task in a separate process that is killed, stopped and restarted."""

import threading
import time

import numpy as np
import pytest

from checks import message
from echo_task import EchoTask
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax.errors import UnavailableError

pytestmark = pytest.mark.timeout(250)
TOKEN = Credentials(token="secret")
SOON_S = 30
LARGE = [np.zeros(64 * 2**20, np.uint8)]


@pytest.fixture(scope="module")
def task():
    """One process that lives for all tests of this file."""
    with EchoTask() as task:
        yield task


@pytest.fixture
def client(task):
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        yield client


def seconds_until_unavailable(call):
    started = time.monotonic()
    message(UnavailableError, call, "ps 0 at 127.0.0.1:")
    return time.monotonic() - started


def test_messages_are_sent_between_processes(client):
    link = client.open()
    sent = [np.random.default_rng(0).random(10**6), np.float32(2)]
    got = link.call(Message({"op": "echo"}, sent), 60).arrays
    np.testing.assert_array_equal(got[0], sent[0])
    assert got[1] == 2


@pytest.mark.rest
def test_wait_for_a_stopped_task_raises_in_time(task, client):
    link, other = client.open(), client.open()
    with task.stopped():
        assert 0.9 < seconds_until_unavailable(lambda: link.call(Message({}), 1.0)) < SOON_S
        assert 0.9 < seconds_until_unavailable(lambda: client.ask("hello", {}, 1.0)) < SOON_S
        assert seconds_until_unavailable(lambda: client.open(1.0)) < SOON_S
    assert client.ask("hello", {}, 60)
    other.call(Message({}), 60)
    client.open().call(Message({}), 60)


def test_send_to_a_stopped_task_raises_in_time(task, client):
    link = client.open()
    link.call(Message({}), 60)
    with task.stopped():
        assert (
            0.9 < seconds_until_unavailable(lambda: link.send(Message({"op": "echo"}, LARGE), 1.0)) < SOON_S
        )
        assert seconds_until_unavailable(lambda: link.send(Message({}), 60)) < SOON_S
    client.open().call(Message({"op": "echo"}, LARGE), 60)


@pytest.mark.rest
def test_new_client_notices_a_stopped_task_in_time(task):
    with task.stopped(), TaskClient(task.address, TOKEN, "ps 0") as client:
        assert seconds_until_unavailable(lambda: client.ask("hello", {}, 1.0)) < SOON_S
        assert seconds_until_unavailable(lambda: client.open(1.0)) < SOON_S


def test_clients_of_a_stopped_task_can_be_closed(task):
    client = TaskClient(task.address, TOKEN, "ps 0")
    link = client.open()
    waiting = threading.Thread(
        target=lambda: message(UnavailableError, lambda: link.receive(60), "was closed")
    )
    waiting.start()
    with task.stopped():
        started = time.monotonic()
        client.close()
        waiting.join(60)
        assert time.monotonic() - started < SOON_S
        assert not waiting.is_alive()


def test_task_continues_if_a_client_is_killed_in_the_middle_of_a_message(task, client):
    before = client.ask("statistics", {}, 60)["streams"]
    with TaskClient(task.address, TOKEN, "ps 0") as other:
        link = other.open()
        link.call(Message({}), 60)  # from here on the task knows of the stream
        assert client.ask("statistics", {}, 60)["streams"] == before + 1
        link.send(Message({"op": "echo"}, [np.zeros(2**20, np.uint8)]))
        link.send(Message({"op": "echo"}, [np.zeros(2**20, np.uint8)]))
    deadline = time.monotonic() + 60
    while client.ask("statistics", {}, 60)["streams"] > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    client.open().call(Message({}), 60)


@pytest.mark.rest
def test_killed_task_is_noticed_at_once_and_found_again_at_its_address():
    with EchoTask() as task, TaskClient(task.address, TOKEN, "ps 0") as client:
        link, idle = client.open(), client.open()
        link.send(Message({"op": "sleep", "s": 60}))
        threading.Timer(0.3, task.process.kill).start()
        assert seconds_until_unavailable(lambda: link.receive(60)) < SOON_S
        assert seconds_until_unavailable(lambda: idle.call(Message({}), 60)) < SOON_S
        assert seconds_until_unavailable(lambda: client.ask("hello", {}, 60)) < SOON_S
        assert seconds_until_unavailable(client.open) < SOON_S
        time.sleep(
            2
        )  # while nobody is there the client waits longer each time before it tries again, up to a second
        seconds_until_unavailable(lambda: client.ask("hello", {}, 60))
        with EchoTask(task.address):
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert client.ask("hello", {}, 5)
                    break
                except UnavailableError:
                    assert time.monotonic() < deadline, "it is there again, and was not found"
                    time.sleep(0.05)
            assert seconds_until_unavailable(lambda: link.call(Message({}), 60)) < SOON_S
            client.open().call(Message({"op": "echo"}, LARGE), 60)
