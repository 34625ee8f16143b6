"""When processes compare the program that they are about to run. The channel is replaced: the values of the other
process are given."""

import pytest

from checks import message
from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import ClusterSpec, Task


class Channel:
    """The other process offers the values of this one, unless told otherwise."""

    has_threads, program_thread = False, None

    def note_thread(self):
        pass

    def __init__(self):
        self.gathered, self.begun, self.ended, self.other = [], [], [], None

    def gather(self, key, value, timeout_s, **how):
        self.gathered.append((key, value[1], value[2]))
        return [value, self.other or value]

    def begin(self, position, program):
        self.begun.append((position, program))

    def end(self, is_done):
        self.ended.append(is_done)

    def check(self, position=None):
        pass

    def wait_for_failure(self, timeout_s):
        pass


@pytest.fixture
def channel():
    return Channel()


@pytest.fixture
def peers(channel):
    return Peers(channel, Membership(ClusterSpec({"worker": ["a:1", "b:1"]}), Task("worker", 0)), 600.0)


def run(peers, *names):
    for name in names:
        with peers.running(peers.agree(name, f"code of {name}"), is_new=False):
            pass


def test_programs_that_followed_each_other_before_cost_no_message(channel, peers):
    run(peers, "f", "f", "g", "f")
    assert channel.gathered == [
        ("program 0", "f", 0),
        ("program 1", "f", 1),
        ("program 2", "g", 2),
        ("program 3", "f", 3),
    ]
    run(peers, *"ffgfgf" * 10)
    assert len(channel.gathered) == 4
    run(peers, "g", "g")
    assert channel.gathered[4:] == [("program 4", "g", 65)]
    assert [label for _, label in channel.begun[:4]] == ["#0 f", "#0 f", "#1 g", "#0 f"]


def test_process_that_is_ahead_is_a_mismatch(channel, peers):
    run(peers, "f", "f")
    digest = peers._digests["#0 f"]
    channel.other = [digest, "f", 7, "train.py:3 in loop"]
    says = [
        "worker 0: g, as program number 2",
        f"at {__file__}:",
        "worker 1: f, as program number 7",
        "at train.py:3 in loop",
        "in the same order",
    ]
    message(ProgramMismatchError, lambda: run(peers, "g"), *says)


def test_equal_code_is_one_program_under_any_name(channel, peers):
    assert peers.agree("f", "code") == peers.agree("another name", "code") == "#0 f"
    assert len(channel.gathered) == 1


def test_program_is_done_when_its_results_exist(channel, peers):
    run(peers, "f")
    with pytest.raises(ZeroDivisionError), peers.running(peers.agree("f", "code of f"), is_new=False):
        1 / 0
    peers.waits = False  # it goes on, on the devices
    run(peers, "f")
    assert channel.ended == [True, False, False]
