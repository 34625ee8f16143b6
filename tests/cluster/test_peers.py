"""When processes compare the program that they are about to run. The channel is replaced: the values of the other
process are given."""

import json

import pytest

from checks import message
from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.leading import value_of_leader
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.control.dates import date_of, first_at
from replicax._src.control.epoch_member import EpochMember
from replicax._src.control.standing import Moment


class Channel:
    """The other process offers the values of this one, unless told otherwise."""

    has_threads, program_thread, min_workers, moment = False, None, None, Moment()
    standing, members = None, (0, 1)

    def note_thread(self):
        pass

    def __init__(self):
        self.gathered, self.begun, self.ended, self.other = [], [], [], None
        self.dates = []

    def serve_here(self):
        pass

    def gather(self, key, value, timeout_s, **how):
        self.dates.append(how["date"])
        self.gathered.append((key, value[1], value[2]))
        return GatheredValues([value, self.other or value], (0, 1), ("worker 0", "worker 1"), 0)

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


# --- fault tolerance ----------------------------------------------------------------------------------


@pytest.fixture
def tolerant(channel):
    channel.min_workers = 1
    return Peers(channel, Membership(ClusterSpec({"worker": ["a:1", "b:1"]}), Task("worker", 0)), 600.0)


def test_all_gathers_count_within_the_present_date(channel, tolerant):
    for moment in (Moment(0), Moment(0), Moment(4), Moment(4), Moment(5)):
        channel.moment = moment
        tolerant.gather("t", [1, 2, 3], "to test")
    assert [key for key, *_ in channel.gathered] == ["t 0.0", "t 0.1", "t 4.0", "t 4.1", "t 5.0"]


def test_topic_keeps_the_date_at_which_it_was_made(channel, tolerant):
    channel.moment = Moment(4)
    topics = [tolerant.new_topic("data"), tolerant.new_topic("data")]
    channel.moment = Moment(9)
    for topic in (*topics, topics[0]):
        tolerant.gather(topic, [1, 2, 3], "to test")
    assert [key for key, *_ in channel.gathered] == ["data 4.0 4.0", "data 4.1 4.0", "data 4.0 4.1"]
    assert channel.dates == [4, 4, 4]


def test_newcomer_gathers_alone_and_what_it_has_opened_alone_stays_its_own(channel, tolerant):
    channel.moment = Moment(4, is_solo=True)
    topic, save = tolerant.new_topic("data"), tolerant.moment()
    assert (tolerant.is_solo, tolerant.members, tolerant.is_leader) == (True, (0,), False)
    assert tolerant.agree("f", "code") == "#0 f"
    values = tolerant.gather("t", (1, 2), "to test")
    assert (values, values.numbers, values.own) == ([[1, 2]], (0,), 0)
    channel.moment = Moment(5)
    assert tolerant.gather(topic, 1, "to test") == [1]
    assert tolerant.gather_once("k", 1, "to test", since=save) == [1]
    assert channel.gathered == []
    tolerant.gather("t", [1, 2, 3], "to test")
    assert [key for key, *_ in channel.gathered] == ["t 5.0"]


def test_position_of_a_program_does_not_depend_on_the_past_of_a_process(channel, tolerant):
    for date, num_steps in ((0, 3), (7, 1), (8, 2)):
        channel.moment = Moment(date)
        for _ in range(num_steps):
            with tolerant.stepping("f"):
                pass
    counted = [(date_of(position), position - first_at(date_of(position))) for position, _ in channel.begun]
    assert counted == [(0, 0), (0, 1), (0, 2), (7, 0), (8, 0), (8, 1)]


def test_newcomer_takes_over_which_programs_are_agreed(channel, tolerant):
    tolerant.agree("f", "code of f")
    channel.gathered.clear()
    newcomer = Peers(channel, Membership(ClusterSpec({"worker": ["a:1", "b:1"]}), Task("worker", 1)), 600.0)
    channel.moment = Moment(4, is_solo=True)
    newcomer.agree("its own", "code of its own")
    newcomer.take_state(json.loads(json.dumps(tolerant.state_for_newcomers())))
    channel.moment = Moment(5)
    assert newcomer.agree("f", "code of f") == "#0 f"
    assert channel.gathered == []
    newcomer.agree("its own", "code of its own")
    assert len(channel.gathered) == 1


@pytest.mark.parametrize("is_solo", [True, False])
def test_value_of_the_leader_is_chosen_by_a_newcomer_for_itself(channel, tolerant, is_solo):
    channel.moment = Moment(4, is_solo=is_solo)
    channel.standing = EpochMember(0)
    channel.standing.participants = (0, 1)
    chosen = []

    def gather(value):
        return tolerant.gather("t", value(), "to test")

    channel.gather = lambda key, value, *_, **__: GatheredValues([value, None], (0, 1), ("a", "b"), 0)
    assert value_of_leader(gather, lambda: tolerant.is_leader, lambda: chosen.append(1) or "it") == "it"
    assert chosen == [1]
