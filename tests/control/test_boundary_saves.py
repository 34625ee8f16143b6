"""Survivors of a failure save the newest boundary, in any order of events: the rules, without sockets or threads."""

from collections import deque

import hypothesis
from hypothesis import strategies as st

from checks import examples
from replicax._src.control.boundary_saves import BoundarySaves
from replicax._src.control.controller import Controller

ANSWER_S, LIMIT_S = 5.0, 600.0


class Members:
    """Members that have a boundary each; messages arrive in order, at times that the test chooses."""

    def __init__(self, versions):
        self.rules = BoundarySaves(answer_s=ANSWER_S, limit_s=LIMIT_S)
        self.versions = list(versions)
        self.up = [deque() for _ in versions]
        self.down = [deque() for _ in versions]
        self.is_here = [True] * len(versions)
        self.is_saving = [False] * len(versions)
        self.saved = []  # (member, version), in order
        self.over = {}  # what members were told, by number
        self.now = 0.0
        for number in range(len(versions)):
            assert self.rules.receive(number, {"kind": "keeps"}) == []

    def send(self, outbox):
        for to, message in outbox:
            if self.is_here[to]:
                self.down[to].append(message)

    def fail(self):
        self.send(self.rules.begin(self.now))

    # Possible events.

    def to_rules(self, number):
        if self.up[number]:
            self.send(self.rules.receive(number, self.up[number].popleft()))

    def from_rules(self, number):
        if not self.down[number]:
            return
        message = self.down[number].popleft()
        match message["kind"]:
            case "freeze":
                self.up[number].append({"kind": "frozen", "version": self.versions[number]})
            case "save_boundary":
                assert self.versions[number] is not None
                assert not any(self.is_saving), "two members save at once"
                self.is_saving[number] = True
            case "boundaries_over":
                assert number not in self.over
                self.over[number] = message["version"], message["saver"]

    def save(self, number):
        self._end_save(number, True)

    def fail_to_save(self, number):
        self._end_save(number, False)

    def _end_save(self, number, is_saved):
        if self.is_saving[number]:
            self.is_saving[number] = False
            self.up[number].append({"kind": "boundary_saved", "is_saved": is_saved})
            if is_saved:
                self.saved.append((number, self.versions[number]))

    def die(self, number):
        if self.is_here[number]:
            self.is_here[number] = self.is_saving[number] = False
            self.up[number].clear()
            self.down[number].clear()
            self.send(self.rules.lose(number))

    def run_to_the_end(self):
        for _ in range(100):
            for number in range(len(self.versions)):
                self.from_rules(number)
                self.to_rules(number)
                self.save(number)


def happenings(num_members):
    who = st.integers(0, num_members - 1)
    steady = st.tuples(st.sampled_from(["to_rules", "from_rules", "save"]), who)
    rare = st.tuples(st.sampled_from(["die", "fail_to_save"]), who)
    return st.lists(st.one_of(steady, steady, steady, rare), max_size=60)


VERSIONS = st.one_of(st.none(), st.integers(7, 8))


@examples(400, short=150)
@hypothesis.given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(st.lists(VERSIONS, min_size=n, max_size=n), happenings(n)))
)
def test_newest_boundary_of_a_survivor_is_saved_whoever_dies_meanwhile(case):
    """All who are left are told, and nobody waits forever."""
    versions, happening = case
    members = Members(versions)
    members.fail()
    refused = set()
    for what, number in happening:
        if what == "fail_to_save" and members.is_saving[number]:
            refused.add(number)
        getattr(members, what)(number)
    members.run_to_the_end()
    assert not members.rules.is_active
    left = [n for n, is_here in enumerate(members.is_here) if is_here]
    assert set(members.over) >= {*left}
    could = [members.versions[n] for n in left if n not in refused and members.versions[n] is not None]
    if could and not members.saved:
        raise AssertionError(f"{versions}: a survivor has a boundary, and nobody has saved")
    if could:
        assert members.saved[-1][1] >= max(could)
    told = {members.over[n] for n in left}
    assert len(told) <= 1
    if told and members.saved:
        ((version, saver),) = told
        assert (saver, version) in members.saved


def test_highest_version_is_saved_by_the_lowest_number():
    members = Members([7, None, 8, 8])
    members.fail()
    for number in range(4):
        members.from_rules(number)
        members.to_rules(number)
    assert members.is_saving == [False] * 4
    members.from_rules(2)
    assert members.is_saving == [False, False, True, False]


def test_death_of_the_saver_makes_the_next_one_save():
    members = Members([8, 7, 7])
    members.fail()
    for number in range(3):
        members.from_rules(number)
        members.to_rules(number)
    members.from_rules(0)
    members.die(0)
    members.run_to_the_end()
    assert members.saved == [(1, 7)]
    assert members.over == {1: (7, 1), 2: (7, 1)}


def test_member_that_does_not_answer_is_left_out_in_time():
    members = Members([8, 7])
    members.fail()
    members.from_rules(1)
    members.to_rules(1)
    assert members.rules.tick(ANSWER_S) == []
    assert members.rules.tick(ANSWER_S + 1) == [(1, {"kind": "save_boundary"})]
    assert members.rules.receive(0, {"kind": "frozen", "version": 8}) == []  # too late


def test_a_save_that_never_ends_has_a_limit():
    members = Members([8])
    members.fail()
    members.from_rules(0)
    members.to_rules(0)
    assert members.rules.is_active
    assert members.rules.tick(LIMIT_S + 1) == [
        (0, {"kind": "boundaries_over", "version": None, "saver": None})
    ]
    assert not members.rules.is_active


def test_there_is_one_round_and_only_for_members_that_keep_boundaries():
    rules = BoundarySaves()
    assert rules.begin(0.0) == []
    rules.receive(0, {"kind": "keeps"})
    rules.receive(1, {"kind": "keeps"})
    rules.receive(1, {"kind": "keeps_none"})
    assert rules.begin(0.0) == [(0, {"kind": "freeze"})]
    assert rules.begin(0.0) == []


# --- in the controller --------------------------------------------------------------------------------------


def controller_of(num_members, **options):
    controller = Controller([f"worker {n}" for n in range(num_members)], **options)
    for number in range(num_members):
        assert controller.join(number, now=0.0) is None
        assert controller.receive(number, {"kind": "keeps"}, now=0.0) == []
    return controller


def status(**more):
    return {"status": {"position": 0, "program": None, "doing": "between"}, **more}


def kinds(outbox):
    return [(to, message["kind"]) for to, message in outbox]


def test_members_freeze_before_they_hear_of_a_death():
    controller = controller_of(3)
    outbox = controller.disconnect(1, now=1.0)
    assert kinds(outbox) == [(0, "freeze"), (2, "freeze"), (0, "gone"), (2, "gone")]
    assert controller.is_saving


def test_a_member_that_raised_or_gave_up_may_still_save():
    controller = controller_of(2)
    raised = {"kind": "raised", "text": "ValueError", **status()}
    assert (0, "freeze") in kinds(controller.receive(1, raised, now=1.0))
    gave_up = {"kind": "gave_up", "text": "worker 1 raised", **status()}
    controller.receive(0, gave_up, now=1.1)
    assert controller.receive(0, {"kind": "frozen", "version": 4}, now=1.2) == []
    assert kinds(controller.receive(1, {"kind": "frozen", "version": 5}, now=1.2)) == [(1, "save_boundary")]
    assert kinds(controller.disconnect(1, now=1.3)) == [(0, "save_boundary")]
    over = controller.receive(0, {"kind": "boundary_saved", "is_saved": True}, now=1.4)
    assert over == [(0, {"kind": "boundaries_over", "version": 4, "saver": 0})]
    assert not controller.is_saving


def test_a_silent_member_is_not_asked():
    controller = controller_of(2, silence_s=60.0)
    controller.receive(0, {"kind": "heartbeat", **status()}, now=60.0)
    outbox = controller.tick(now=61.0)
    assert [to for to, kind in kinds(outbox) if kind == "freeze"] == [0]


def test_an_orderly_end_and_a_mismatch_save_nothing():
    controller = controller_of(2)
    assert "freeze" not in dict(
        map(reversed, kinds(controller.receive(1, {"kind": "left", **status()}, now=1.0)))
    )
    assert not controller.is_saving
