"""A new process takes the place of a dead one while the others train: it gets their state, and no bit changes.

The processes are threads here, with real sums and the real controller; the channels are in memory.
"""

import logging
import re
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from memory_job import LIMIT_S, Job, Killed
from number_steps import undisturbed
from replicax._src.cluster.failures import (
    ClusterStartError,
    PeerFailureError,
    ProgramMismatchError,
    StateMismatchError,
)
from replicax._src.fault_tolerance import survivors as survivors_module
from replicax._src.vocabulary.errors import UnsupportedError

pytestmark = pytest.mark.timeout(180)
NUM_STEPS = 6
LAST_WAIT = 4
"""The step after which the others still wait for a replacement that is to come."""


def entered(survivors, training):
    """The program of a replacement up to its first step: it takes the state of the others."""
    training.point("enter")
    content, (weights,) = survivors.enter()
    training.point("entered")
    training.weights, training.count = np.array(weights), content["count"]
    assert survivors._peers.taken["giver"] in range(len(survivors._names))


def boundary(survivors, training, *, waits=False):
    """The end of an iteration, where the chief admits replacements; with ``waits`` it waits until one comes."""
    job = survivors._rendezvous.job
    until = time.monotonic() + LIMIT_S
    while waits and survivors._member.is_chief and not survivors.is_asked and job.is_awaited():
        assert time.monotonic() < until
        time.sleep(0.002)
    if survivors.is_asked:
        training.point(f"admit {training.count}")
        survivors.admit(lambda: ({"count": training.count}, [training.weights]))


def train(number, survivors, training):
    """The program of each process."""
    if survivors.is_newcomer:
        entered(survivors, training)
    while training.count < NUM_STEPS:
        step = training.count
        assert survivors.run(training.step(), "to train") == len(training.weights) * len(survivors._names)
        training.point(f"gather {step}")
        survivors._channel.gather(f"step {step}", step)
        boundary(survivors, training, waits=step <= LAST_WAIT)
    training.point("finish")
    survivors.finish()
    return training.weights


def assert_undisturbed(job, results, numbers):
    assert sorted(results) == sorted(numbers)
    expected = undisturbed(len(job.names), NUM_STEPS, job.length)
    for number, weights in results.items():
        assert weights.tobytes() == expected.tobytes(), f"worker {number}"


POINTS = [
    "begin 1",
    "before 0 of 1",
    "before 0 of 1+",
    "between 0 and 1 of 1",
    "between 0 and 1 of 1+",
    "after 1 of 1",
    "before update 1",
    "after update 1",
    "gather 1",
    "gather 1+",
    "met 1",
    "begin 0",
]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_replacement_of_a_process_that_died_at_any_point_ends_with_the_bits_of_all(point, victim):
    job = Job(3, {victim: point}, [victim])
    assert_undisturbed(job, job.run(train), range(3))
    for survivors in job.survivors:
        described = survivors.describe()
        assert described["members"] == [0, 1, 2]
        assert (described["adopted"], described["num_replacements"]) == ({}, 1)
        assert survivors._member.is_chief == (survivors._number == 0), "the role has come back"


@pytest.mark.parametrize("point", ["before 0 of 1", "after update 1"])
def test_two_replacements_come_back_together_or_one_after_the_other(point):
    job = Job(4, {0: point, 2: point}, [0, 2])
    assert_undisturbed(job, job.run(train), range(4))
    assert {survivors.describe()["num_replacements"] for survivors in job.survivors} == {2}


def test_the_only_process_that_is_left_takes_all_others_back():
    job = Job(3, {0: "begin 1", 1: "before 0 of 1"}, [0, 1])
    assert_undisturbed(job, job.run(train), range(3))


def test_a_task_is_replaced_twice():
    job = Job(3, {1: "begin 1", (1, 1): "begin 3"}, [1, 1])
    assert_undisturbed(job, job.run(train), range(3))
    assert {survivors.describe()["num_replacements"] for survivors in job.survivors} == {2}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "point",
    ["enter", "meet", "met", "take", "entered", "begin", "before 0", "between 0 and 1"],
)
def test_a_replacement_that_dies_before_the_end_of_its_first_step_changes_no_bit(point, victim):
    """Nobody replaces it again, so one of the others has its replica at the end."""
    job = Job(3, {victim: "begin 1"}, [victim])
    follow(job, (victim, 1), point)
    others = [number for number in range(3) if number != victim]
    assert_undisturbed(job, job.run(train), others)
    for number in others:
        described = job.survivors[number].describe()
        assert (described["members"], described["num_replacements"]) == (others, 0)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["begin+", "after 1", "before update", "after update", "gather"])
def test_a_replacement_that_dies_after_its_first_step_is_a_death_like_others(point, victim):
    job = Job(3, {victim: "begin 1"}, [victim])
    follow(job, (victim, 1), point)
    assert_undisturbed(job, job.run(train), [number for number in range(3) if number != victim])


@pytest.mark.parametrize("point", ["meet", "met", "give", "give+", "admit"])
@pytest.mark.parametrize("victim", [1, 2])
def test_the_chief_dies_while_it_admits_and_the_next_one_admits(point, victim):
    """Worker 0 dies where it gives, and is replaced itself. The next chief lets both enter."""
    job = Job(3, {victim: "begin 1"}, [victim, 0])
    follow(job, 0, point, after="admit")
    assert_undisturbed(job, job.run(train), range(3))


def follow(job, who, name, after=""):
    """Lets a process die at the first point whose name begins with this, from the first one on that begins with
    ``after``.
    """
    is_soon, name, point = name.endswith("+"), name.removesuffix("+"), job.point
    reached = []

    def pointed(number, here, incarnation=0):
        if who == ((number, incarnation) if incarnation else number) and who not in job.kills:
            if here.startswith(after):
                reached.append(here)
            if reached and here.startswith(name):
                job.kills[who] = f"{here}+" if is_soon else here
        point(number, here, incarnation)

    job.point = pointed


# --- a replacement that differs ------------------------------------------------------------------------


def errors_of_replacement(job, change):
    """The errors of replacements that ``change`` does something to, and the results of the others."""
    errors = []

    def program(number, survivors, training):
        if not survivors.is_newcomer:
            return train(number, survivors, training)
        try:
            return change(survivors, training)
        except Exception as error:
            errors.append(error)
            job.kill(number, survivors._channel.incarnation)  # the process ends
            raise Killed from None

    results = job.run(program)
    return errors, results


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda training, step: setattr(training, "weights", np.nextafter(training.weights, 9)),
            StateMismatchError,
            "worker 2, a replacement, has other values than worker 0 in the state that it reads to train: weights. A "
            "variable that the program's checkpoint lacks? Give all that a step reads to rx.Checkpoint.",
        ),
        (
            lambda training, step: setattr(step, "program", "another step"),
            ProgramMismatchError,
            "worker 2, a replacement, would run another program than worker 0 to train: ",
        ),
        (
            lambda training, step: setattr(step, "number", 0),
            StateMismatchError,
            "worker 2, a replacement, has another batch than worker 0 to train (rows): the program's checkpoint lacks the "
            "position of the data",
        ),
    ],
)
def test_a_replacement_that_differs_ends_with_both_names_and_the_others_go_on(change, kind, text):
    def differing(survivors, training):
        entered(survivors, training)
        step = training.step()
        change(training, step)
        survivors.run(step, "to train")
        raise AssertionError("it has taken part")

    job = Job(3, {2: "begin 1"}, [2])
    (error,), results = errors_of_replacement(job, differing)
    assert_undisturbed(job, results, [0, 1])
    assert type(error) is kind
    assert str(error).startswith(text), str(error)
    assert job.channels[2].errors == [f"{kind.__name__}: {error}"], "the others hear of it at once"


def test_a_replacement_with_other_versions_ends_before_it_has_the_state(monkeypatch):
    job = Job(3, {2: "begin 1"}, [2])
    own = survivors_module.versions()

    def entering(survivors, training):
        check = survivors_module.check_versions
        monkeypatch.setattr(
            survivors_module,
            "check_versions",
            lambda found: check([(found[0][0], {**found[0][1], "jax": "0.1"}), found[1]]),
        )
        survivors.enter()

    (error,), results = errors_of_replacement(job, entering)
    assert_undisturbed(job, results, [0, 1])
    assert isinstance(error, ClusterStartError)
    assert f"worker 0 has jax 0.1, python {own['python']}, and worker 2 has jax {own['jax']}" in str(error)


def test_a_replacement_that_steps_before_it_has_entered_is_told_where_it_enters():
    class Whole:
        reductions, num_rows = (), 96

        def update(self, sums):
            return "outputs"

    def stepping(survivors, training):
        assert survivors.run(Whole(), "to predict") == "outputs"
        own = np.arange(3)
        assert survivors.broadcast([own])[0] is own
        survivors.run(training.step(), "to train")

    job = Job(3, {2: "begin 1"}, [2])
    (error,), results = errors_of_replacement(job, stepping)
    assert_undisturbed(job, results, [0, 1])
    assert isinstance(error, UnsupportedError)
    assert re.search(r"replacement of worker 2.*restore_or_initialize.*CheckpointCallback", str(error))


# --- the end, and the log ------------------------------------------------------------------------------


def test_a_replacement_that_comes_too_late_ends_well_with_one_line(caplog):
    job = Job(3, {2: "finish"}, [2])
    ends = []

    def program(number, survivors, training):
        try:
            return train(number, survivors, training)
        except SystemExit as end:
            ends.append(end.code)
            raise Killed from None

    assert_undisturbed(job, job.run(program), [0, 1])
    assert ends == [0]
    assert [record.getMessage() for record in caplog.records if "needed" in record.getMessage()] == [
        "The others have finished; this replacement of worker 2 is not needed."
    ]


def test_a_replacement_may_enter_after_the_last_step():
    job = Job(3, {2: "after update 5"}, [2])

    def program(number, survivors, training):
        if survivors.is_newcomer:
            entered(survivors, training)
        for _ in range(training.count, NUM_STEPS):
            survivors.run(training.step(), "to train")
        while job.replacements:
            survivors._channel.wait_for_message(0.01)
            survivors.serve()
        boundary(survivors, training, waits=True)
        survivors.finish()
        return training.weights

    assert_undisturbed(job, job.run(program), range(3))


def test_a_replacement_that_waits_ends_with_the_error_of_the_others():
    """Worker 1 dies while the replacement of worker 2 waits, and fewer are left than must be."""
    job = Job(3, {2: "begin 1"}, [2], min_workers=2)
    errors = []

    def program(number, survivors, training):
        try:
            if survivors.is_newcomer:
                survivors.enter()
            while True:
                survivors.run(training.step(), "to train")
                if number == 1 and survivors._member.waiting:
                    job.kill(1)
                    raise Killed
        except PeerFailureError as error:
            errors.append((number, str(error)))
            raise Killed from None

    assert job.run(program) == {}
    assert sorted(number for number, _ in errors) == [0, 2]
    assert all("min_workers" in text for _, text in errors)


@pytest.mark.parametrize(("victim", "adopter"), [(0, 1), (2, 0)])
def test_one_line_of_the_log_says_that_the_replacement_is_back(victim, adopter, caplog):
    job = Job(3, {victim: "begin 1"}, [victim])
    assert_undisturbed(job, job.run(train), range(3))
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2, lines
    died = rf"Worker {victim} died (in|after) the step to train\. Worker {adopter} adopted its replica"
    assert re.match(died, lines[0])
    took = f"it took replica {victim} back from worker {adopter}"
    assert re.fullmatch(rf"Worker {victim} is back in the step to train: {took} \([\d.]+ s\)\.", lines[1])


def test_the_status_follows_the_chief(monkeypatch):
    served = []
    monkeypatch.setattr(survivors_module, "take_status_over", lambda: served.append("takes"))
    monkeypatch.setattr(survivors_module, "hand_status_over", lambda: served.append("hands over"))
    job = Job(2, {0: "begin 1"}, [0])
    assert_undisturbed(job, job.run(train), range(2))
    assert served[0] == "takes", "worker 1, after the death"
    assert sorted(served[1:]) == ["hands over", "takes"], "from worker 1 to worker 0"


# --- at random ------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_deaths_and_replacements_at_any_points_leave_the_same_bits(data):
    num_workers = data.draw(st.integers(2, 4))
    numbers = st.integers(0, num_workers - 1)
    victims = data.draw(st.sets(numbers, min_size=1, max_size=num_workers - 1))
    times = st.builds(int.__mul__, st.integers(4, 90), st.sampled_from([1, -1]))
    kills = {victim: data.draw(times) for victim in sorted(victims)}
    again = data.draw(st.sets(st.sampled_from(sorted(victims)), max_size=1))
    kills.update({(victim, 1): data.draw(times) for victim in sorted(again)})
    job = Job(
        num_workers,
        kills,
        [*sorted(victims), *sorted(again)],
        length=data.draw(st.sampled_from([3, 1000, 30_000])),
        shares=data.draw(st.booleans()),
    )
    ends = []

    def program(number, survivors, training):
        try:
            return train(number, survivors, training)
        except SystemExit:
            ends.append(number)
            raise Killed from None

    results = job.run(program)
    assert results
    assert_undisturbed(job, results, sorted(results))
