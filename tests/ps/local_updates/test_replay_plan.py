"""What the logs of groups say of a run: the rounds of pushes that a killed process sent, and runs that are refused."""

import pytest

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


def process(group, *records, **header):
    return ReplayOfProcess({**HEADER, "group": group, **header}, records)


def taken(number, tokens, step):
    return ReplayRecord(ReplayKind.TAKEN, step=step, number=number, tokens=tokens)


def landed(number, version, instance=7):
    return ReplayRecord(ReplayKind.LANDED, number=number, version=version, instance=instance, checksum=number)


def closed(version, members, tokens):
    return ReplayRecord(ReplayKind.CLOSED, version=version, instance=7, members=members, tokens=tokens)


ADOPTED = ReplayRecord(ReplayKind.ADOPTED, step=4, version=1, instance=7, checksum=9)
KILLED = process(0, taken(1, 5, 4), landed(1, 1), ADOPTED, taken(2, 6, 8))
NEXT = process(0, taken(1, 8, 4), landed(1, 3))
OTHER = [taken(1, 4, 4), landed(1, 1), taken(2, 3, 8), landed(2, 2), taken(3, 2, 12), landed(3, 3)]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([(1, 0b11, 9), (2, 0b11, 9), (3, 0b11, 10)], 2),
        ([(1, 0b11, 15), (2, 0b10, 3), (3, 0b11, 10)], 1),  # beside an answered push of its process
        ([(1, 0b11, 9), (2, 0b10, 3), (3, 0b11, 16)], 3),  # beside a push of the next process
        ([(1, 0b11, 9), (2, 0b10, 3), (3, 0b11, 10)], None),  # it did not arrive
    ],
)
def test_push_of_a_killed_process_is_in_the_round_that_lacks_its_rows(rounds, expected):
    other = process(1, *OTHER, *(closed(*each) for each in rounds))
    plan = ReplayPlan([[KILLED, NEXT], [other]])
    (push,) = [push for push in plan.versions_of if push.order == (0, 0, 2)] or [None]
    assert (push and plan.versions_of[push]) == expected
    if expected == 3:
        assert [(each.group, each.process) for each in plan.rounds[0, 3].pushes] == [(0, 0), (0, 1), (1, 0)]
    killed = plan.processes[0]
    assert [(call.call, call.step, len(call.events)) for call in killed.calls] == [
        (None, 0, 0),
        (GroupCall.STEP, 4, 2),
        (GroupCall.STEP, 8, 1),
    ]
    assert killed.finish_step is None


def test_rounds_that_no_push_fits_and_other_runs_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"round 1 of fragment 0.*9 rows of the groups \[0, 1\]"):
        ReplayPlan([[process(1, *OTHER, closed(1, 0b11, 9))]])
    with pytest.raises(
        InvalidArgumentError, match="every is 5 in the log of group 1, and 4 in that of group 0"
    ):
        ReplayPlan([[KILLED], [process(1, every=5)]])
    with pytest.raises(UnsupportedError, match="server of fragment 0 was restarted"):
        ReplayPlan([[KILLED], [process(1, taken(1, 4, 4), landed(1, 1, instance=8))]])
    with pytest.raises(UnsupportedError, match="group 1 had several processes"):
        ReplayPlan([[KILLED], [process(1, has_several_processes=True)]])
    with pytest.raises(InvalidArgumentError, match="no log"):
        ReplayPlan([])
