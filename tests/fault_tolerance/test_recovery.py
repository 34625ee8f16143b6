"""The line of the log about a failure."""

import json

import pytest

from replicax._src.control.epoch_member import Begin
from replicax._src.control.epochs import replicas_of
from replicax._src.fault_tolerance.recovery import OpenRecovery
from replicax._src.fault_tolerance.step_counts import StepCounts

NAMES = [f"worker {number}" for number in range(6)]
STEP = "step 1,204 of train_step"


def holders(members, num_replicas):
    held = replicas_of(num_replicas, members)
    return {replica: number for number, replicas in held.items() for replica in replicas}


def line(
    gone,
    before,
    now,
    *,
    num_replicas=4,
    step=STEP,
    after="step 1,203 of train_step",
    num_rows=96,
    source=None,
):
    recovery = OpenRecovery(0.0, step, after, 0)
    recovery.gone = [(number, how, "") for number, how in gone]
    recovery.reason = "worker 1 was late"
    now, before = holders(now, num_replicas), holders(before, num_replicas)
    return recovery.describe(NAMES, before, now, num_rows, source, 0.049)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "Worker 2 died in step 1,204 of train_step. Worker 0 adopted its replica; the step was repeated with all of its 96 rows "
            "(0.05 s).",
            {"gone": [(2, "died")], "before": [0, 1, 2, 3], "now": [0, 1, 3]},
        ),
        (
            "Worker 2 died after step 1,203 of train_step. Worker 0 adopted its replica (0.05 s).",
            {"gone": [(2, "died")], "before": [0, 1, 2, 3], "now": [0, 1, 3], "step": None},
        ),
        (
            "Worker 0 went silent before the first step. Worker 1 adopted its replica (0.05 s).",
            {
                "gone": [(0, "silent")],
                "before": [0, 1],
                "now": [1],
                "step": None,
                "after": None,
                "num_replicas": 2,
            },
        ),
        (
            "Worker 1 and worker 2 died in step 1,204 of train_step. Worker 0 adopted replica 1 and worker 3 adopted replica 2; the "
            "step was repeated with all of its 96 rows (0.05 s).",
            {"gone": [(2, "died"), (1, "died")], "before": [0, 1, 2, 3], "now": [0, 3]},
        ),
        (
            "Worker 1 died and worker 2 raised an error in step 1,204 of train_step. Worker 0 adopted their 2 replicas; the step was "
            "repeated with its only row (0.05 s).",
            {
                "gone": [(2, "raised"), (1, "died")],
                "before": [0, 1, 2],
                "now": [0],
                "num_replicas": 3,
                "num_rows": 1,
            },
        ),
        (
            "Worker 0 died in step 1,204 of train_step. Worker 1 adopted its 2 replicas; the step was repeated (0.05 s).",
            {"gone": [(0, "died")], "before": [0, 1], "now": [1], "num_replicas": 3, "num_rows": None},
        ),
        (
            "Worker 0 ended its program early in step 1,204 of train_step. Worker 1 adopted its replica; worker 3 had the sums of the step, "
            "and gave them (0.05 s).",
            {"gone": [(0, "left")], "before": [0, 1, 2, 3], "now": [1, 2, 3], "source": 3},
        ),
        (
            "An exchange failed (worker 1 was late) in step 1,204 of train_step. The step was repeated with all of its 96 rows (0.05 s).",
            {"gone": [], "before": [0, 1, 2, 3], "now": [0, 1, 2, 3]},
        ),
        (
            "An exchange failed (worker 1 was late) after step 1,203 of train_step. All continue (0.05 s).",
            {"gone": [], "before": [0, 1, 2, 3], "now": [0, 1, 2, 3], "step": None},
        ),
    ],
)
def test_the_line_says_who_is_gone_who_adopts_and_what_happened_to_the_step(text, arguments):
    assert line(**arguments) == text


def begin(members, entering=(), gone=()):
    return Begin(
        2, tuple(members), ("",) * len(members), tuple((n, "died", "") for n in gone), tuple(entering)
    )


@pytest.mark.parametrize(
    ("text", "before", "now", "num_replicas"),
    [
        (
            "Worker 2 is back in step 1,205 of train_step: it took replica 2 back from worker 0 (0.05 s).",
            [0, 1, 3],
            [0, 1, 2, 3],
            4,
        ),
        (
            "Worker 2 is back in step 1,205 of train_step: it took replicas 2 and 3 back from worker 0 (0.05 s).",
            [0],
            [0, 2],
            4,
        ),
        (
            "Worker 2 is back in step 1,205 of train_step: it took replica 2 back from worker 0 and replica 5 back from worker 1 "
            "(0.05 s).",
            [0, 1],
            [0, 1, 2],
            6,
        ),
        ("Worker 2 is back in step 1,205 of train_step (0.05 s).", [0, 1, 2], [0, 1, 2], 3),
    ],
)
def test_the_line_about_a_replacement_says_what_it_took_back(text, before, now, num_replicas):
    recovery = OpenRecovery(0.0, None, None, 0, is_opening=True)
    recovery.begin(begin(now, entering=[2]))
    assert recovery.entered == (2,)
    assert not recovery.is_of_failure
    described = recovery.describe_return(
        NAMES, 2, "step 1,205 of train_step", holders(before, num_replicas), holders(now, num_replicas), 0.049
    )
    assert described == text


def test_a_replacement_that_dies_before_its_first_step_is_a_failure_and_nobody_is_back():
    recovery = OpenRecovery(0.0, None, None, 0, is_opening=True)
    recovery.begin(begin([0, 1, 2], entering=[1]))
    assert not recovery.is_over_between_steps
    recovery.begin(begin([0, 2], gone=[1]))
    assert (recovery.entered, recovery.is_of_failure, recovery.is_over_between_steps) == ((), True, True)


def test_an_opening_into_which_nobody_comes_has_no_line():
    recovery = OpenRecovery(0.0, None, None, 0, is_opening=True)
    recovery.begin(begin([0, 2]))
    assert not recovery.is_of_failure
    assert not recovery.entered


def test_steps_have_numbers_among_those_of_their_names():
    counts = StepCounts()
    assert counts.last is None
    for what in (
        "to run train_step",
        "to run test_step",
        "to take the values of the chief",
        "to run train_step",
    ):
        said = counts.next(what)
        assert counts.commit(what) == counts.last == said
    assert counts.last == "step 2 of train_step"
    assert counts.next("to run test_step") == "step 2 of test_step"
    assert counts.next("to take the values of the chief") == "the step to take the values of the chief"
    other = StepCounts()
    other.take(json.loads(json.dumps(counts.as_json())))
    assert (other.last, other.next("to run train_step")) == ("step 2 of train_step", "step 3 of train_step")
