"""One group's rules, one event after another. Three groups, one fragment; this group is member 0, its process 7."""

import pytest

from replicax._ps.local_updates.exchange_actions import (
    AdoptOuter,
    ClaimSlot,
    ExchangeDone,
    ExchangeSlow,
    FetchOuter,
    LostPushes,
    NoteLanding,
    ReadRound,
    SendClose,
    SendPush,
    ServerSilent,
    SlotReplaced,
    TakeProgress,
)
from replicax._ps.local_updates.fragment_rules import (
    LONG_ROUND,
    MAX_UNMERGED,
    SLOW_BOUNDARIES,
    ExchangeOptions,
)
from replicax._ps.local_updates.member_rules import MemberRules
from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState

ME = 7
OTHER = MemberState(owner=8)


def state(version=0, me=None, others=(OTHER, OTHER), *, stops=0, birth=1):
    return RoundState(version, stops, birth, (MemberState(owner=ME) if me is None else me, *others))


def mine(pushed=0, landed=0, tokens=0, has_finished=0):
    return MemberState(ME, pushed, landed, tokens, has_finished)


class Driven:
    """The rules, with a clock."""

    def __init__(self, **options):
        options = {"quorum": 2, "grace_s": 1.0, "patience_s": 30.0, **options}
        self.now = 0.0
        self.rules = MemberRules(0, 3, 1, ME, ExchangeOptions(**options), self.now)

    def answer(self, answer, instance="a"):
        return self.rules.answered(0, instance, answer, self.now)

    def tick(self, now=None):
        self.now = self.now if now is None else now
        return self.rules.tick(self.now)

    def boundary(self, tokens=10):
        return self.rules.boundary(0, tokens, self.now)

    def begin(self):
        assert self.tick() == [ClaimSlot(0, MemberState())]
        assert self.answer(state()) == [FetchOuter(0)]
        assert self.answer(state()) == [AdoptOuter(0, "a", 0, (), (), True)]
        assert self.rules.has_begun
        return self

    def push(self, number=1, version=0, **more):
        """Pushes at a boundary; the server adds it to an open version."""
        actions = self.boundary()
        assert TakeProgress(0, number) in actions
        return self.answer(state(version, mine(number, version, 10), **more))


def test_group_begins_with_outer_parameters_of_its_slot_and_takes_the_slot_of_a_dead_process():
    driven = Driven()
    assert not driven.rules.has_begun
    assert driven.tick() == [ClaimSlot(0, MemberState())]
    assert driven.tick() == []  # one request at a time
    assert driven.answer(state(me=MemberState(owner=3, pushed=9))) == [
        ClaimSlot(0, MemberState(owner=3, pushed=9))
    ]
    assert driven.answer(state(4)) == [FetchOuter(0)]
    assert driven.answer(state(4)) == [AdoptOuter(0, "a", 4, (), (), True)]


def test_push_that_the_server_did_not_add_is_sent_again_at_the_next_tick():
    driven = Driven().begin()
    driven.boundary(10)
    assert driven.answer(state(0, mine(0))) == []  # another request came first, and `after` was wrong
    assert driven.tick() == [SendPush(0, 1, 0, 10, False, False)]
    assert driven.answer(state(0, mine(1, 0, 10))) == [NoteLanding(0, 1, 1)]


def test_values_are_adopted_between_boundaries_and_merged_says_when_all_pushes_are_there():
    driven = Driven().begin()
    assert driven.rules.is_merged
    driven.push()
    assert not driven.rules.is_merged
    assert driven.rules.adopt(0) == []  # nothing has arrived
    assert driven.tick() == [ReadRound(0)]
    assert driven.answer(state(1, mine(1, 0))) == [FetchOuter(0)]
    assert driven.answer(state(1, mine(1, 0))) == []
    assert driven.rules.is_merged
    assert driven.rules.fetched == [0]
    assert driven.rules.adopt(0) == [AdoptOuter(0, "a", 1, (), (), False)]
    assert (driven.rules.fetched, driven.rules.version) == ([], 1)


def test_boundary_of_a_group_that_takes_no_values_pushes_and_it_adopts_later():
    driven = Driven().begin()
    driven.push()
    driven.tick()
    driven.answer(state(1, mine(1, 0)))
    driven.answer(state(1, mine(1, 0)))
    assert driven.rules.boundary(0, 10, driven.now, adopts=False)[0] == TakeProgress(0, 2)
    assert driven.rules.adopt(0) == [AdoptOuter(0, "a", 1, (2,), (), False)]


def test_push_without_answer_for_many_boundaries_is_said_once_and_not_while_the_first_is_under_way():
    driven = Driven().begin()
    driven.boundary(10)
    for _ in range(SLOW_BOUNDARIES):
        assert driven.boundary(10) == []  # the server compiles the program
    driven.answer(state(0, mine(1, 0, 10)))
    driven.tick()
    driven.answer(state(1, mine(1, 0)))
    driven.answer(state(1, mine(1, 0)))
    assert TakeProgress(0, 2) in driven.boundary(10)
    said = []
    for _ in range(2 * SLOW_BOUNDARIES):
        driven.now += 0.5
        said += driven.boundary(10)
    assert said == [ExchangeSlow(0, SLOW_BOUNDARIES, 0.5)]


def test_boundary_pushes_and_the_answer_says_which_version_has_it():
    driven = Driven().begin()
    assert driven.boundary(10) == [TakeProgress(0, 1), SendPush(0, 1, 0, 10, False, False)]
    assert driven.answer(state(0, mine(1, 0, 10))) == [NoteLanding(0, 1, 1)]
    assert driven.boundary(0) == []  # no rows: nothing to push


def test_server_without_answer_delays_pushes_and_not_the_group_and_what_waits_is_one_push():
    driven = Driven().begin()
    driven.boundary(10)
    assert driven.rules.failed(0) == [ServerSilent(0)]
    for _ in range(5):
        assert driven.boundary(10) == []
    assert driven.tick() == [SendPush(0, 1, 0, 10, False, False)]
    assert driven.rules.failed(0) == []  # said once
    assert driven.tick() == [SendPush(0, 1, 0, 10, False, False)]
    assert driven.answer(state(3, mine(1, 3, 10))) == [NoteLanding(0, 1, 4), FetchOuter(0)]
    assert driven.boundary(10)[0] == TakeProgress(0, 2)
    assert driven.answer(state(3, mine(1, 3, 10))) == [SendPush(0, 2, 1, 60, False, False)]


def test_group_has_a_few_pushes_at_most_that_are_in_no_adopted_version():
    driven = Driven().begin()
    for number in range(1, MAX_UNMERGED + 1):
        driven.push(number)
    assert driven.boundary() == []


def test_round_with_a_quorum_closes_after_the_grace_or_when_all_have_pushed():
    driven = Driven().begin()
    pushed = OTHER._replace(tokens=5)
    assert driven.push(others=(pushed, OTHER)) == [NoteLanding(0, 1, 1)]
    assert driven.tick(0.9) == [ReadRound(0)]
    assert driven.answer(state(0, mine(1, 0, 10), (pushed, OTHER))) == []
    assert driven.tick(1.1) == [SendClose(0, 0, 2, False)]
    driven = Driven().begin()
    assert driven.push(others=(pushed, pushed)) == [NoteLanding(0, 1, 1), SendClose(0, 0, 2, False)]


def test_round_without_a_quorum_stays_open():
    driven = Driven(quorum=3).begin()
    driven.push(others=(OTHER._replace(tokens=5), OTHER))
    assert driven.tick(20.0) == [ReadRound(0)]


@pytest.mark.parametrize(("period_s", "grace_s"), [(8.0, 6.0), (100.0, 30.0)])
def test_grace_is_three_quarters_of_the_time_between_boundaries_and_at_most_the_patience(period_s, grace_s):
    driven = Driven(grace_s=None).begin()
    driven.boundary(0)
    driven.now = period_s
    both = (OTHER._replace(tokens=5, pushed=1), OTHER)
    driven.push(others=both)
    others = (both[0], OTHER._replace(owner=9))  # it is heard of
    driven.tick()
    driven.answer(state(0, mine(1, 0, 10), others))
    for after, expected in ((0.95, ReadRound(0)), (1.0, SendClose(0, 0, 2, False))):
        assert driven.tick(period_s + after * grace_s) == [expected]
        driven.answer(state(0, mine(1, 0, 10), others))


def test_member_that_is_silent_does_not_count_until_it_is_heard_of_again():
    driven = Driven(quorum=3).begin()
    one = OTHER._replace(tokens=5, pushed=1)
    driven.push(others=(one, OTHER))
    driven.tick(29.0)
    assert driven.answer(state(0, mine(1, 0, 10), (one._replace(pushed=2), OTHER))) == []
    assert driven.tick(31.0) == [SendClose(0, 0, 2, False)]
    driven.answer(state(1, mine(1, 0, 0), (one._replace(tokens=0, pushed=2), OTHER._replace(pushed=1))))
    driven.answer(state(1, mine(1, 0, 0), (one._replace(tokens=0, pushed=2), OTHER._replace(pushed=1))))
    assert driven.boundary()[:2] == [AdoptOuter(0, "a", 1, (), (), False), TakeProgress(0, 2)]
    back = (one._replace(pushed=3), OTHER._replace(pushed=1))
    assert driven.answer(state(1, mine(2, 1, 10), back)) == [NoteLanding(0, 2, 2)]  # it waits for three


def test_push_that_arrived_after_the_close_is_kept_when_the_version_is_adopted():
    driven = Driven().begin()
    driven.boundary()
    assert driven.answer(state(1, mine(1, 1, 10))) == [NoteLanding(0, 1, 2), FetchOuter(0)]
    driven.answer(state(1, mine(1, 1, 10)))
    assert driven.boundary()[0] == AdoptOuter(0, "a", 1, (1,), (), False)


def test_server_that_lost_pushes_gets_those_that_the_group_still_has_and_names_the_others():
    driven = Driven().begin()
    driven.push()
    driven.tick()
    driven.answer(state(1, mine(1, 0)))
    driven.answer(state(1, mine(1, 0)))
    assert driven.boundary()[0] == AdoptOuter(0, "a", 1, (), (), False)  # push 1 is in
    driven.answer(state(1, mine(2, 1, 10)))  # push 2 is not
    driven.tick()
    assert driven.answer(state(0, mine(0)), "b") == [LostPushes(0, 1, 1, False), FetchOuter(0)]
    driven.answer(state(0, mine(0)), "b")
    assert driven.boundary(5) == [
        AdoptOuter(0, "b", 0, (), (2,), False), TakeProgress(0, 3), SendPush(0, 3, 0, 15, False, False),
    ]  # fmt: skip


def test_outer_parameters_of_a_server_that_went_back_since_are_not_adopted():
    driven = Driven().begin()
    driven.push()
    driven.tick()
    driven.answer(state(1, mine(1, 0)))
    driven.answer(state(1, mine(1, 0)))  # version 1 is fetched
    driven.tick()
    assert driven.answer(state(0, mine(0)), "b") == [FetchOuter(0)]
    assert driven.boundary(5)[0] == TakeProgress(0, 2)
    driven.answer(state(0, mine(0)), "b")
    assert driven.boundary(5)[0] == AdoptOuter(0, "b", 0, (2,), (1,), False)


def test_server_without_the_fragment_gets_it_again_and_all_pushes_are_named():
    driven = Driven().begin()
    driven.push()
    driven.tick()
    assert driven.rules.failed(0, is_absent=True) == []
    assert driven.tick() == [ClaimSlot(0, MemberState())]
    assert driven.answer(state(birth=2), "b") == [LostPushes(0, 1, 1, False), FetchOuter(0)]


def test_push_that_is_not_finite_is_named_and_the_group_begins_again_with_outer_parameters():
    driven = Driven().begin()
    driven.boundary()
    refused = mine(1, REFUSED)
    assert driven.answer(state(0, refused)) == [LostPushes(0, 1, 1, True), FetchOuter(0)]
    assert driven.boundary() == []  # it would be refused too
    driven.answer(state(0, refused))
    assert driven.boundary() == [AdoptOuter(0, "a", 0, (), (), True)]


def test_another_process_with_the_slot_ends_the_exchange():
    driven = Driven().begin()
    driven.tick()
    assert driven.answer(state(me=MemberState(owner=9))) == [SlotReplaced(0)]
    assert driven.tick() == []


def test_finish_pushes_the_rest_waits_for_the_others_and_flushes():
    driven = Driven(quorum=3).begin()
    driven.boundary(10)
    assert driven.rules.finish(driven.now) == []
    last = [TakeProgress(0, 2), SendPush(0, 2, 1, 0, True, False)]
    assert driven.answer(state(0, mine(1, 0, 10))) == [NoteLanding(0, 1, 1), *last]
    assert driven.answer(state(0, mine(2, 0, 10, 1))) == [NoteLanding(0, 2, 1)]
    assert driven.tick() == [ReadRound(0)]
    ended = (OTHER._replace(has_finished=1, tokens=3), OTHER._replace(has_finished=1))
    assert driven.answer(state(0, mine(2, 0, 10, 1), ended)) == [SendClose(0, 0, 1, True)]
    after = state(1, mine(2, 0, 0, 1), tuple(each._replace(tokens=0) for each in ended))
    assert driven.answer(after) == [FetchOuter(0)]
    adopted, *rest = driven.answer(after)
    assert adopted == AdoptOuter(0, "a", 1, (), (), False)
    assert rest[-1] == ExchangeDone()
    assert driven.tick() == []


def test_stop_travels_with_the_next_push_and_reaches_all():
    driven = Driven().begin()
    driven.rules.stop()
    assert driven.boundary()[-1] == SendPush(0, 1, 0, 10, False, True)
    driven = Driven().begin()
    assert not driven.rules.stops
    driven.tick()
    driven.answer(state(stops=1))
    assert driven.rules.stops


@pytest.mark.parametrize(
    ("rows", "is_long"), [(10 * LONG_ROUND, False), (10 * LONG_ROUND + 1, True)], ids=["usual", "long"]
)
def test_round_with_many_more_rows_than_the_last_ones_adds_its_mean_as_it_is(rows, is_long):
    """As after an outage of the server. Later rounds are compared with those that were not long."""
    driven = Driven(quorum=1, grace_s=0.0).begin()

    def close_of(version, rows):
        driven.rules.boundary(0, rows, driven.now)
        (close,) = [
            each
            for each in driven.answer(state(version, mine(version + 1, version, rows)))
            if isinstance(each, SendClose)
        ]
        driven.answer(state(version + 1, mine(version + 1, version)))
        driven.answer(state(version + 1, mine(version + 1, version)))  # of the fetch
        return close

    usual = [close_of(version, 10) for version in range(4)]
    assert [close.is_flush for close in usual] == [False] * 4
    assert close_of(4, rows) == SendClose(0, 4, 1, is_long)
    assert not close_of(5, 10).is_flush
    assert close_of(6, rows) == SendClose(0, 6, 1, is_long)
