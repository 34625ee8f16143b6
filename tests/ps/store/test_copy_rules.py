"""One copy of a group: what the primary sends to its backup, and what a joining backup takes, one order after another.

Updates are strings: the rules never look into them.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from checks import message
from group_network import GROUP, ME, ONE, Network
from replicax._ps.store.ack_patience import ACK_S, LONGEST_WRITE_S, AckPatience
from replicax._ps.store.copy_rules import CopyPlace, CopyRules, NextStep, is_last_round, rounds
from replicax._ps.store.group_rules import Partner, Refusal, View
from replicax._ps.store.log import START, Position
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import MessageError, UnavailableError

PAIR = View(0, 1, 0, 1)
ALONE = View(0, 2, 0, None)
JOINS = View(0, 3, 0, 1, is_joining=True)


@dataclass
class Update:
    position: Position
    outcome: str | None = ""

    def agrees(self, outcome):
        return self.outcome in (None, outcome)


def copy_of(task, *views, log_bytes=100):
    rules = CopyRules(0, task, log_bytes)
    for view in views:
        assert rules.take(view)
    return rules


def update(rules, outcome=""):
    ordered = rules.order(0.0, is_change=True)
    rules.log.append(ordered.position, Update(ordered.position, outcome))
    return ordered


# --- the primary: an answer to a client ---------------------------------------------------------------------------


def test_client_is_answered_when_the_backup_has_the_update_and_one_thread_reads():
    rules = copy_of(0, PAIR)
    first, second = update(rules), update(rules)
    assert first.is_sent
    assert rules.next_step(first.place, 1.0, can_read=False) is NextStep.WAIT
    assert rules.next_step(first.place, 1.0, can_read=True) is NextStep.READ
    assert rules.next_step(second.place, 1.0, can_read=True) is NextStep.WAIT
    rules.has_read()
    assert rules.acknowledged(1, 1, "", 0.0, writes=False)
    assert rules.next_step(first.place, 1.0, can_read=True) is NextStep.ANSWER
    assert rules.next_step(second.place, 1.0, can_read=True) is NextStep.READ
    message(UnavailableError, lambda: rules.next_step(second.place, 0.0, can_read=True), "not acknowledged")
    rules.is_closed = True
    message(UnavailableError, lambda: rules.next_step(first.place, 1.0, can_read=True), "has ended")


def test_acknowledgment_of_a_backup_that_was_dropped_changes_nothing():
    rules = copy_of(0, PAIR)
    update(rules)
    rules.lose(1, "it is silent")
    rules.take(ALONE)
    update(rules)
    rules.take(JOINS)
    assert rules.acknowledged(
        1, 1, "InvalidArgumentError", 0.0, writes=True
    )  # it differs, and is of no use now
    assert rules.acknowledged(1, 2, "", 0.0, writes=True)
    assert rules.log.is_on
    assert [entry.position.seq for entry in rules.lacking(3, 0)] == [1, 2]
    assert rules.patience.ack_s(0.0) == ACK_S
    rules.refused(1, Refusal.INCOMPLETE)
    rules.refused(2, Refusal.DEPOSED)
    rules.lose(1, "its connection broke")
    assert rules.role.is_primary
    assert (rules.role.partner, rules.error) == (Partner.JOINING, "it is silent")


def test_backup_that_differs_is_lost_and_gets_the_state_whatever_position_it_says():
    rules = copy_of(0, PAIR)
    for _ in range(3):
        update(rules)
    assert not rules.acknowledged(1, 2, "InvalidArgumentError", 0.0, writes=False)
    assert rules.role.partner is Partner.LOST
    assert "Message 2 gave 'InvalidArgumentError'" in rules.error
    assert not rules.log.is_on
    rules.take(ALONE)
    rules.take(JOINS)
    assert rules.bring(3, CopyPlace(Position(1, 3), ()), 0) == (Position(1, 3), True)
    rules.lose(3, "it died while it was copied, and restarts from its own snapshot")
    rules.take(View(0, 4, 0, None))
    rules.take(View(0, 5, 0, 1, is_joining=True))
    assert rules.bring(
        5, CopyPlace(Position(1, 3), ()), 0
    ).is_state  # the log begins there, and it still differs
    update(rules)
    assert rules.synced(5, 4)
    rules.take(View(0, 6, 0, None))
    update(rules)
    rules.take(View(0, 7, 0, 1, is_joining=True))
    assert not rules.bring(7, CopyPlace(Position(5, 4), ()), 0).is_state


def test_log_drops_updates_that_the_backup_had_already_when_it_joined():
    rules = copy_of(0, PAIR)
    update(rules)
    update(rules)
    rules.lose(1, "its acknowledgments were lost with the connection")
    rules.take(ALONE)
    rules.take(JOINS)
    assert rules.bring(3, CopyPlace(Position(1, 2), ()), 0) == (Position(1, 2), False)
    assert rules.lacking(3, 2) == []
    assert not rules.synced(2, 2)  # of an earlier view
    assert [entry.position.seq for entry in rules.lacking(3, 0)] == [1, 2]
    assert rules.synced(3, 2)
    assert rules.lacking(3, 0) == []
    assert rules.log.reaches(Position(1, 2))


def test_primary_says_that_the_other_copy_differs_until_it_is_copied():
    rules = copy_of(0, PAIR)
    update(rules)
    assert not rules.role.described()["differs"]
    rules.acknowledged(1, 1, "InvalidArgumentError", 0.0, writes=False)
    rules.take(ALONE)
    assert rules.role.described()["differs"]
    rules.take(JOINS)
    assert rules.role.described()["differs"]
    assert rules.synced(3, 1)
    assert not rules.role.described()["differs"]


def test_copy_that_differs_gets_the_state_although_a_new_primary_has_its_position():
    backup, primary = copy_of(1, PAIR), CopyRules(0, 0, 100)
    for seq in range(1, 4):
        backup.applied(Position(1, seq))
    primary.restored(Position(1, 3), ())
    primary.take(View(0, 3, 0, None, since=Position(1, 3)))
    joins = View(0, 4, 0, 1, is_joining=True, is_differing=True)
    for rules in (backup, primary):
        rules.take(joins)
    said = backup.says_where(4)
    assert primary.bring(4, said, 0).is_state
    assert backup.begins_state(4, Position(1, 3))
    assert backup.has_state(4, Position(1, 3))
    assert backup.lacks == ()


def test_connection_to_a_backup_in_sync_is_opened_once_per_epoch():
    rules = copy_of(0, PAIR)
    assert rules.opens(1) == 1
    assert rules.opens(1) is None
    rules.take(ALONE)
    assert rules.opens(1) is rules.opens(2) is None


# --- the primary: a backup that joins -----------------------------------------------------------------------------


def joined(lacks=(), log_bytes=100):
    """A primary with three updates, whose backup joins."""
    rules = copy_of(0, PAIR, log_bytes=log_bytes)
    rules.lose(1, "it is silent")
    rules.take(ALONE)
    for _ in range(3):
        update(rules)
    rules.take(JOINS)
    return rules


def test_joining_backup_gets_updates_if_the_log_reaches_its_position():
    rules = joined()
    assert rules.brings
    assert rules.bring(3, CopyPlace(Position(2, 2), ()), 0) == (Position(2, 2), False)
    assert [entry.position.seq for entry in rules.lacking(3, 2)] == [3]
    assert joined().bring(3, CopyPlace(Position(2, 2), ("d",)), 1) == (Position(2, 2), False)
    for place, num_at_hand in [
        (CopyPlace(Position(2, 2), None), 0),  # it lacks more than programs
        (CopyPlace(Position(2, 2), ("d",)), 0),  # and so does this server
        (CopyPlace(Position(1, 2), ()), 0),  # its update was of another epoch
        (CopyPlace(Position(2, 9), ()), 0),
    ]:
        rules = joined()
        assert rules.bring(3, place, num_at_hand) == (Position(2, 3), True)
        assert rules.lacking(3, 3) == []


def test_later_view_ends_a_copy():
    rules = joined()
    entry = rules.lacking(3, 0)[0]
    rules.take(View(0, 4, 0, None))
    for call in (
        lambda: rules.check(3),
        lambda: rules.bring(3, CopyPlace(START, ()), 0),
        lambda: rules.lacking(3, 0),
        lambda: rules.brought(3, entry, ""),
    ):
        message(UnavailableError, call, "newer view")
    assert not rules.synced(3, 3)
    assert rules.role.partner is Partner.NONE
    assert len(rules.log.after(0)) == 3


def test_backup_that_differs_while_it_joins_gets_no_more():
    rules = joined()
    entry = rules.lacking(3, 0)[0]
    message(MessageError, lambda: rules.brought(3, entry, "duplicate"), "Message 1 gave 'duplicate'")
    message(UnavailableError, lambda: rules.lacking(3, 0), "newer view")
    assert rules.bring(3, CopyPlace(Position(2, 3), ()), 0).is_state


def test_full_log_loses_the_backup_and_slows_clients_before():
    rules = joined()
    assert rules.charge(1, 40) is None
    assert not rules.has_much_waiting
    assert rules.charge(2, 40) is None
    assert rules.has_much_waiting
    assert rules.charge(3, 40) == 3
    rules.lose(3, "too much")
    assert (rules.role.partner, rules.error) == (Partner.FAILED, "too much")
    assert not rules.has_much_waiting


def test_last_updates_are_sent_in_order():
    assert list(rounds()) == [3, 2, 1, 0]
    assert [is_last_round(left, n) for left, n in [(3, 5), (3, 4), (0, 500)]] == [False, True, True]


# --- the backup that joins ----------------------------------------------------------------------------------------


def joining(lacks=("d",)):
    """A server that starts from a snapshot at (1, 9), and joins."""
    rules = CopyRules(0, 1, 100)
    rules.restored(Position(1, 9), lacks)
    rules.take(JOINS)
    return rules


def test_joining_backup_resumes_from_the_position_that_it_said():
    rules = joining()
    assert rules.says_where(3) == (Position(1, 9), ("d",))
    assert rules.takes_program(3, Position(1, 9))
    assert rules.forwarded(3, 10) is Refusal.INCOMPLETE
    assert rules.resumes(3, Position(1, 9))
    assert rules.lacks == ()
    assert rules.forwarded(3, 10) is True
    assert not rules.takes_program(3, Position(1, 9))


def test_refused_message_changes_nothing_of_a_joining_backup():
    rules = joining()
    rules.take(View(0, 5, 0, 1, is_joining=True))
    assert rules.says_where(3) is None
    assert not rules.takes_program(3, Position(1, 9))
    assert not rules.resumes(3, Position(1, 9))
    assert not rules.resumes(5, Position(1, 8))
    assert rules.says_where(5) == (Position(1, 9), ("d",))  # it lacks as much as before
    assert not rules.begins_state(3, Position(2, 20))
    assert rules.role.position == Position(1, 9)
    assert rules.forwarded(3, 10) is Refusal.INCOMPLETE


def test_copy_that_is_dropped_after_its_position_was_said_is_not_resumed():
    rules = joining()
    said = rules.says_where(3)
    assert rules.begins_state(3, Position(2, 20))
    assert not rules.resumes(3, said.position)
    assert not rules.resumes(3, START)  # a state is arriving
    assert not rules.takes_program(3, START)
    assert rules.says_where(3) == (START, ())


def test_parts_belong_to_the_state_that_is_arriving():
    rules, old, new = joining(), Position(2, 20), Position(4, 30)
    assert rules.begins_state(3, old)
    assert rules.takes_part(3, old)
    assert not rules.takes_part(3, new)
    rules.take(View(0, 5, 0, 1, is_joining=True))
    assert not rules.takes_part(3, old)
    assert not rules.takes_part(5, new)  # it has not begun
    assert rules.begins_state(5, new)
    assert not rules.has_state(3, old)
    assert not rules.has_state(5, old)
    assert rules.has_state(5, new)
    assert rules.role.position == new
    assert not rules.takes_part(5, new)  # it has all, and updates follow


def test_new_primary_keeps_the_updates_after_the_last_that_it_applied_as_a_backup():
    rules = copy_of(1, PAIR)
    assert rules.forwarded(1, 1) is True
    rules.take(View(0, 2, 1, None))  # while it applies that
    rules.applied(Position(1, 1))
    update(rules)
    assert rules.forwarded(1, 2) is Refusal.DEPOSED
    assert [position for position, _ in rules.log.after(0)] == [Position(2, 2)]


# --- patience -----------------------------------------------------------------------------------------------------


def test_patience_is_longer_after_slow_updates_and_while_the_backup_writes():
    patience = AckPatience()
    patience.took(1.0, 100.0)
    assert patience.ack_s(100.0) == ACK_S
    patience.took(10.0, 100.0)
    assert patience.ack_s(100.0) == ACK_S + 40.0
    assert patience.ack_s(145.0) == ACK_S
    patience.order_snapshot(7, 200.0)
    patience.said(6, 201.0, writes=False)  # an update before it
    assert patience.ack_s(200.0) == LONGEST_WRITE_S + ACK_S
    patience.said(7, 210.0, writes=True)
    assert patience.ack_s(210.0) == LONGEST_WRITE_S + ACK_S
    patience.said(8, 211.0, writes=False)
    assert patience.ack_s(211.0) == ACK_S


# --- the same with stores -----------------------------------------------------------------------------------------


@pytest.fixture
def network():
    network = Network()
    yield network
    for server in network.servers:
        server.close()


def test_joining_backup_does_not_execute_what_the_primary_has_refused(network):
    """It has what the primary lacked then: here a shard, in practice a program of its snapshot."""
    network.create(x=np.zeros(3, np.float32))
    network.view(2, 0, None)
    own = network.servers[1]._copies[GROUP]._state.store
    own.put("y", 1, np.zeros(3, np.float32))
    described = {"keys": ["y"], "number": [ME, 0], "low": 0}
    with pytest.raises(Exception, match='no shard "y"'):
        network.ask(0, "assign", [np.ones(3, np.float32)], **described)
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    np.testing.assert_array_equal(own._contents.shards["y"].view(), np.zeros(3, np.float32))


def test_part_of_an_earlier_state_does_not_reach_a_later_one(network):
    network.create(x=np.ones(3, np.float32))
    network.view(2, 0, None)
    backup = network.servers[1]

    def part(epoch, at, what, arrays=(), **more):
        header = {
            "op": "copy",
            "group": GROUP,
            "epoch": epoch,
            "seq": 0,
            "position": at,
            "part": what,
            **more,
        }
        return backup.answer(Message({"incarnation": ME, **header}, list(arrays))).header

    content = network.servers[0]._copies[GROUP]._state.store.state().content
    for epoch in (3, 4):
        network.view(epoch, 0, 1, is_joining=True, to=[1])
        assert part(epoch, [epoch - 1, 5], "state", content=content)["applied"] == 5
    assert part(3, [2, 5], "shard", [ONE], key="late", number=1)["refused"]
    assert part(4, [2, 5], "shard", [ONE], key="late", number=1)["refused"]
    assert part(3, [2, 5], "end")["refused"]
    assert part(4, [3, 5], "shard", [ONE], key="x", number=1)["applied"] == 5
    assert part(4, [3, 5], "end")["applied"] == 5
    assert list(backup._copies[GROUP]._state.store._contents.shards) == ["x"]
