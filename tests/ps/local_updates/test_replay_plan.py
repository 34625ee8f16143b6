"""What the logs of groups say of a run: the rounds of pushes that a killed process sent, and runs that are refused."""

import pytest

from replicax._ps.local_updates.logged_events import ServedVersion
from replicax._ps.local_updates.replay_file import GroupCall, ReplayKind, ReplayOfProcess, ReplayRecord
from replicax._ps.local_updates.replay_plan import ReplayPlan
from replicax.errors import InvalidArgumentError, UnsupportedError

HEADER = {
    "num_groups": 2,
    "every": 4,
    "compression": None,
    "sgd": [1.0, 0.5, True],
    "fragments": [{"size": 3}],
    "has_several_processes": False,
}


def claimed(instance=7, number=0, birth=3, before=0, before_number=0, before_version=0):
    has = {"before": before, "before_number": before_number, "before_version": before_version}
    return ReplayRecord(ReplayKind.CLAIMED, instance=instance, number=number, birth=birth, **has)


def process(group, *records, claims=None, **header):
    return ReplayOfProcess({**HEADER, "group": group, "owner": 1, **header}, [claims or claimed(), *records])


def taken(number, tokens, step):
    return ReplayRecord(ReplayKind.TAKEN, step=step, number=number, tokens=tokens)


def landed(number, version, instance=7):
    return ReplayRecord(ReplayKind.LANDED, number=number, version=version, instance=instance, checksum=number)


def closed(version, *rows, instance=7):
    return ReplayRecord(ReplayKind.CLOSED, version=version, instance=instance, rows=rows)


ADOPTED = ReplayRecord(ReplayKind.ADOPTED, step=4, version=1, instance=7, checksum=9)
KILLED = process(0, taken(1, 5, 4), landed(1, 1), ADOPTED, taken(2, 6, 8))
NEXT = process(0, taken(1, 8, 4), landed(1, 3))
OTHER = [taken(1, 4, 4), landed(1, 1), taken(2, 3, 8), landed(2, 2), taken(3, 2, 12), landed(3, 3)]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([(1, 5, 4), (2, 6, 3), (3, 8, 2)], 2),
        ([(1, 11, 4), (2, 0, 3), (3, 8, 2)], 1),  # beside an answered push of its process
        ([(1, 5, 4), (2, 0, 3), (3, 14, 2)], 3),  # beside a push of the next process
        ([(1, 5, 4), (2, 0, 3), (3, 8, 2)], None),  # it did not arrive
    ],
)
def test_push_of_a_killed_process_is_in_the_round_that_lacks_its_rows(rounds, expected):
    other = process(1, *OTHER, *(closed(*each) for each in rounds))
    plan = ReplayPlan([[KILLED, NEXT], [other]])
    (push,) = [push for push in plan.versions_of if push.order == (0, 0, 2)] or [None]
    assert (push and plan.versions_of[push].version) == expected
    if expected == 3:
        pushes = plan.rounds[0, ServedVersion(0, 3)].pushes
        assert [(each.group, each.process) for each in pushes] == [(0, 0), (0, 1), (1, 0)]
    killed = plan.processes[0]
    assert [(call.call, call.step, len(call.events)) for call in killed.calls] == [
        (None, 0, 0),
        (GroupCall.STEP, 4, 2),
        (GroupCall.STEP, 8, 1),
    ]
    assert killed.finish_step is None


def test_rounds_that_no_push_fits_and_other_runs_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"round 1 of fragment 0.*\[5, 4\] rows of groups 0 to 1"):
        ReplayPlan([[process(1, *OTHER, closed(1, 5, 4))]])
    with pytest.raises(
        InvalidArgumentError, match="every is 5 in the log of group 1, and 4 in that of group 0"
    ):
        ReplayPlan([[KILLED], [process(1, every=5)]])
    with pytest.raises(UnsupportedError, match="server of fragment 0 came back without a snapshot"):
        ReplayPlan([[KILLED], [process(1, claimed(8, birth=4))]])
    with pytest.raises(UnsupportedError, match="in which order the restarts of the server of fragment 0"):
        ReplayPlan([[process(0, claimed(8))], [process(1, claimed(9))]])
    with pytest.raises(UnsupportedError, match="group 1 had several processes"):
        ReplayPlan([[KILLED], [process(1, has_several_processes=True)]])
    with pytest.raises(InvalidArgumentError, match="no log"):
        ReplayPlan([])


def adopted(version, step, instance=7):
    return ReplayRecord(ReplayKind.ADOPTED, step=step, version=version, instance=instance, checksum=9)


def test_restarted_server_repeats_rounds_with_the_pushes_of_its_snapshot():
    """Its snapshot has round 1, and of round 2 the push of group 1. Both groups go on with a third push."""
    given = ReplayRecord(ReplayKind.GIVEN, number=2)
    before = [closed(1, 5, 4), closed(2, 6, 3)]
    again = [closed(1, 5, 4, instance=8), closed(2, 11, 3, instance=8)]
    pushes = [taken(1, 5, 4), landed(1, 1), taken(2, 6, 8), landed(2, 2)]
    lost = process(
        0, *pushes, *before, claimed(8, 1), given, adopted(1, 9, 8), taken(3, 11, 12), landed(3, 2, 8), *again
    )
    kept = process(1, taken(1, 4, 4), landed(1, 1), taken(2, 3, 8), landed(2, 2), claimed(8, 2), *again)
    plan = ReplayPlan([[lost], [kept]])
    assert plan.origins == {(0, 1): ServedVersion(0, 1)}
    numbers = {
        key[1]: [(push.group, push.number) for push in each.pushes] for key, each in plan.rounds.items()
    }
    assert numbers == {
        ServedVersion(0, 1): [(0, 1), (1, 1)],
        ServedVersion(0, 2): [(0, 2), (1, 2)],
        ServedVersion(1, 2): [(0, 3), (1, 2)],
    }
    assert [plan.num_rounds_of[push] for push in plan.rounds[0, ServedVersion(1, 2)].pushes] == [1, 2]
    adoption = next(
        event for call in plan.processes[0].calls for event in call.events if hasattr(event, "returns")
    )
    assert (adoption.served, adoption.returns) == (ServedVersion(1, 1), (2,))


def test_push_is_not_in_a_round_before_those_of_earlier_pushes():
    """Two processes of group 0 were killed before an answer, each after a push of 6 rows; the first push did not arrive."""
    first = process(0, taken(1, 6, 4))
    second = process(0, taken(1, 6, 4), landed(1, 1), taken(2, 6, 8))
    third = process(0, taken(1, 1, 4), landed(1, 2))
    other = process(1, taken(1, 4, 4), landed(1, 1), closed(1, 6, 4), closed(2, 7))
    plan = ReplayPlan([[first, second, third], [other]])
    pushes = plan.rounds[0, ServedVersion(0, 2)].pushes
    assert [(each.process, each.number) for each in pushes] == [(1, 2), (2, 1)]


@pytest.mark.parametrize(("has_first", "expected"), [(1, (0, 1)), (0, (1, 1))])
def test_next_process_says_if_the_server_had_the_push_of_one_that_was_killed(has_first, expected):
    """Two processes of group 0 were killed before an answer to their push of 6 rows. One of the pushes arrived."""
    first = process(0, taken(1, 6, 4))
    has = {"before_number": has_first, "before_version": has_first}
    second = process(0, taken(1, 6, 4), owner=2, claims=claimed(before=1, **has))
    has = {"before_number": 1 - has_first, "before_version": 1 - has_first}
    third = process(0, owner=3, claims=claimed(before=2, **has))
    other = process(1, taken(1, 4, 4), landed(1, 1), closed(1, 6, 4))
    plan = ReplayPlan([[first, second, third], [other]])
    pushes = plan.rounds[0, ServedVersion(0, 1)].pushes
    assert [(each.process, each.number) for each in pushes if each.group == 0] == [expected]
