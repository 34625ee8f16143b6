"""What a store accepts, what it applies once, and which versions its shards have, one order of events after another."""

import pytest

from checks import message
from replicax._ps.store.acceptance_rules import Closure, StoreRules, absent
from replicax._src.vocabulary.errors import UnavailableError


@pytest.fixture
def rules():
    rules = StoreRules("i")
    assert rules.hello("me")
    return rules


def test_only_the_owner_is_answered_and_another_starts_empty(rules):
    rules.check("me")
    rules.did(Closure("me", 0))
    assert not rules.hello("me")
    assert rules.has_done(Closure("me", 0), 0)
    assert rules.hello("another")
    message(UnavailableError, lambda: rules.check("me"), "coordinator another", "coordinator me")
    message(UnavailableError, lambda: rules.check(None), "coordinator None")
    assert not rules.has_done(Closure("me", 0), 0)
    rules.leave("j")
    assert rules.instance == "j"
    for sender in ("another", None):
        message(UnavailableError, lambda sender=sender: rules.check(sender), "variables of coordinator None")


def test_call_runs_once_and_a_refused_one_may_come_again(rules):
    call = Closure("me", 3)
    assert not rules.has_done(call, 0)
    assert not rules.has_done(call, 0)  # it was refused: it is not recorded
    rules.did(call)
    assert rules.has_done(call, 0)
    assert not rules.has_done(Closure("a worker", 3), 0)
    assert not rules.has_done(None, 0)
    rules.did(None)


def test_call_below_the_mark_has_ended_and_a_late_mark_changes_nothing(rules):
    assert not rules.has_done(Closure("me", 5), 4)
    assert rules.has_done(Closure("me", 3), 4)
    assert rules.has_done(Closure("me", 3), 0)
    rules.raise_low(Closure("me", 9), 2)
    assert not rules.has_done(Closure("me", 4), 0)
    rules.raise_low(None, 100)


def test_calls_that_were_unfinished_before_a_restore_are_forgotten_as_they_end(rules):
    before = rules.described()
    rules.end("me", 9, [3, 5, 8])
    for low, missing in ((0, [3, 5, 8]), (5, [5, 8]), (9, [])):
        rules.raise_low(Closure("another", 0), 100)
        rules.raise_low(Closure("me", 10), low)
        assert rules._ended is not None
        assert sorted(rules._ended[2]) == missing
        rules.take(before, "restored again")
        assert [number for number in range(9) if not rules.has_done(Closure("me", number), 0)] == missing


def test_gradients_of_a_round_that_was_applied_are_late(rules):
    closure = Closure("me", 7)
    assert rules.holds(closure, 2)
    rules.did(Closure("me", 2))  # a closure, and not a round
    assert rules.holds(closure, 2)
    assert not rules.has_done(Closure("me", 2).round_closure, 0)
    rules.did(Closure("me", 2).round_closure)
    assert not rules.holds(closure, 2)
    assert rules.holds(closure, 3)


def test_version_numbers_are_never_used_again(rules):
    first = rules.created()
    second = rules.created()
    assert first < second
    for _ in range(5):
        first = rules.changed(first)
    third = rules.created()  # of a key that was dropped
    assert third > first > second
    assert (rules.num_created, rules.num_changes) == (3, 8)
    rules.hello("another")
    assert rules.created() > third


def test_versions_of_another_store_are_sent_and_say_nothing_of_staleness(rules):
    assert not rules.is_new(4, ("i", 4))
    assert rules.is_new(5, ("i", 4))
    assert rules.is_new(4, ("j", 4))
    assert rules.is_new(4, None)
    assert rules.staleness([(7, ("i", 4)), (9, ("i", 9))]) == 3
    assert rules.staleness([(7, ("j", 4)), (9, None)]) is None
    assert rules.staleness([(7, ("j", 1)), (7, ("i", 7))]) == 0


def test_restored_store_continues_with_other_versions(rules):
    rules.did(Closure("me", 3))
    number = rules.changed(rules.created())
    again = StoreRules("j")
    again.take(rules.described(), "k")
    again.check("me")
    assert again.has_done(Closure("me", 3), 0)
    assert again.is_new(number, ("i", number))
    assert again.created() > number
    rules.did(Closure("me", 4))
    assert not again.has_done(Closure("me", 4), 0)


def test_all_shards_are_created_or_none():
    def refuse(key, kind):
        return ValueError(f"{key} {kind}")

    held = {"x": 1}
    assert absent([("x", 1), ("y", 2)], held, refuse, if_absent=True) == [False, True]
    for new, if_absent in [([("y", 2), ("x", 1)], False), ([("y", 2), ("x", 2)], True)]:
        with pytest.raises(ValueError, match="x"):
            absent(new, held, refuse, if_absent=if_absent)
