"""A network that damages frames: messages arrive exact, and damage looks like a task that cannot be reached for a
moment."""

import itertools
import random

import numpy as np
import pytest

from damaging_proxy import DamagingProxy
from echo_task import EchoTask
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax.errors import UnavailableError

pytestmark = pytest.mark.timeout(180)
TOKEN = Credentials(token="secret")
NUM_MESSAGES = 2000


@pytest.fixture(scope="module")
def task():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REPLICAX_CHECKSUMS", "1")
        with EchoTask() as task:
            yield task


def sent_as(number):
    """The message of a number: mostly small ones, some with a body."""
    random_ = random.Random(number)
    size = random_.choice([0, 1, 10, 100, 1000, 10_000, 100_000] + [3_000_000] * (number % 50 == 0))
    arrays = [np.frombuffer(random_.randbytes(size), np.uint8), np.full(3, number)]
    return Message({"op": "echo", "number": number}, arrays[: random_.randrange(3)])


def assert_is_echo(answer, number):
    sent = sent_as(number)
    assert answer.header["number"] == number
    for ours, theirs in zip(answer.arrays, sent.arrays, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def retried(call):
    """The final result of ``call``, and how often it could not reach the task; no other error is allowed."""
    for num_failed in itertools.count():
        assert num_failed < 100
        try:
            return call(), num_failed
        except UnavailableError:
            pass


def echoed(client, numbers, most_together):
    """Sends messages in groups and checks their answers. A group without an answer is sent again."""
    num_failed, link, numbers = 0, None, list(numbers)

    def answers_of(group):
        nonlocal link
        try:
            link = link or client.open(30)
            link.send_all([sent_as(number) for number in group], 30)
            answers = []
            while len(answers) < len(group):
                answers += link.receive_all(30)
            return answers
        except UnavailableError:
            link = None
            raise

    while numbers:
        size = 1 + numbers[0] % most_together
        group, numbers = numbers[:size], numbers[size:]
        answers, failed = retried(lambda group=group: answers_of(group))
        num_failed += failed
        for answer, number in zip(answers, group, strict=True):
            assert_is_echo(answer, number)
    return num_failed


def test_messages_through_a_network_that_damages_frames_come_back_exact(task, monkeypatch):
    monkeypatch.setenv("REPLICAX_CHECKSUMS", "1")
    with DamagingProxy("127.0.0.1", task.port) as proxy, TaskClient(proxy.address, TOKEN, "ps 0") as client:
        num_failed = echoed(client, range(NUM_MESSAGES), most_together=5)
        assert proxy.num_frames >= 2 * NUM_MESSAGES
        assert proxy.num_damaged == proxy.num_frames // 50
        # Two of them may lie in one group.
        assert proxy.num_damaged / 2 < num_failed <= proxy.num_damaged


def test_asks_through_a_network_that_damages_frames_are_answered(task):
    with DamagingProxy("127.0.0.1", task.port, every=10) as proxy:
        with TaskClient(proxy.address, TOKEN, "ps 0") as client:
            num_failed = 0
            for number in range(300):
                text = "x" * (number % 7) ** 5
                answer, failed = retried(
                    lambda number=number, text=text: client.ask("n", {"n": number, "t": text}, 30)
                )
                assert (answer["n"], answer["t"]) == (number, text)
                num_failed += failed
            assert num_failed == proxy.num_damaged > 60


def test_without_checksums_damage_of_bodies_would_come_through(monkeypatch):
    """This shows that the checksums detect the damage, and that the proxy does damage bodies."""
    monkeypatch.delenv("REPLICAX_CHECKSUMS", raising=False)
    with EchoTask() as task, DamagingProxy("127.0.0.1", task.port, every=5, in_headers=0) as proxy:
        with TaskClient(proxy.address, TOKEN, "ps 0") as client:
            link = client.open()
            sent = np.zeros(3_000_000, np.uint8)
            num_wrong = sum(link.call(Message({}, [sent]), 30).arrays[0].any() for _ in range(20))
            assert num_wrong == proxy.num_damaged == 8
