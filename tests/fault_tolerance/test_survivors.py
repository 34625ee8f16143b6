"""Processes that die at every point of a training: the others finish it, and no bit changes.

The processes are threads here, with real sums and the real controller; the channels are in memory.
"""

import concurrent.futures
import threading

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from memory_job import LIMIT_S, Job, Killed
from number_steps import undisturbed
from replicax._src.cluster.failures import PeerFailureError, ProgramMismatchError, StateMismatchError
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.gifts import Gift
from replicax._src.vocabulary.errors import UnsupportedError

pytestmark = pytest.mark.timeout(180)
NUM_STEPS = 4


def train(number, survivors, training):
    """The program of each process."""
    channel = survivors._channel
    for step in range(NUM_STEPS):
        assert survivors.run(training.step(), "to train") == len(training.weights) * len(survivors._names)
        training.point(f"gather {step}")
        channel.gather(f"step {step}", step)
    training.point("finish")
    survivors.finish()
    return training.weights


def assert_undisturbed(job, results, num_victims):
    assert len(results) == len(job.names) - num_victims
    expected = undisturbed(len(job.names), NUM_STEPS, job.length)
    for number, weights in results.items():
        assert weights.tobytes() == expected.tobytes(), f"worker {number}"


def test_a_run_without_deaths_has_one_epoch():
    job = Job(3)
    assert_undisturbed(job, job.run(train), 0)
    assert {survivors.describe()["epoch"] for survivors in job.survivors} == {1}


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
    "after update 3",
    "finish",
    "finish+",
    "met 1",
    "begin 0",
]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_the_others_finish_with_the_same_bits_after_a_death_at(point, victim):
    job = Job(3, {victim: point})
    results = job.run(train)
    if victim not in results:
        assert_undisturbed(job, results, 1)
        described = [job.survivors[number].describe() for number in results]
        assert all(
            (each["epoch"], each["members"]) in [(2, sorted(results)), (1, [0, 1, 2])] for each in described
        )
        assert point.startswith("finish") or all(each["epoch"] == 2 for each in described)
    else:
        assert point.endswith("+")  # it had finished before
        assert_undisturbed(job, results, 0)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_while_a_step_waits_in_an_all_gather_costs_one_epoch(victim):
    """A step may compare its programs between its first lines and its first round; the replicas change meanwhile."""

    def program(number, survivors, training):
        for count in range(NUM_STEPS):
            step, has_agreed = training.step(), []

            def sums(replicas, combine, count=count, sums=step.sums, has_agreed=has_agreed):
                training.point(f"agree {count}")
                if not has_agreed:
                    has_agreed.append(survivors._channel.gather(f"program {count}", count))
                return sums(replicas, combine)

            step.sums = sums
            survivors.run(step, "to train")
        survivors.finish()
        return training.weights

    job = Job(3, {victim: "agree 2"}, pause_s=0.05)
    assert_undisturbed(job, job.run(program), 1)
    assert {survivors.describe()["epoch"] for survivors in job.survivors if survivors.members} == {1, 2}
    assert {job.survivors[number].describe()["epoch"] for number in range(3) if number != victim} == {2}


LAST_FRAME = 24
"""The point of worker 1 before the last frame of its second step: worker 0 has all frames then, and worker 2 lacks one."""


def job_with_a_death_between_frames(number, others=()):
    """Worker 1 dies at the point with this number, at `LAST_FRAME` after worker 0 has committed the step."""
    awaited = (0, "after update 1") if number == LAST_FRAME else None
    return Job(3, {1: number, **dict(others)}, pause_s=0.02, awaited=awaited)


def test_every_death_between_the_frames_of_a_step_leaves_the_same_bits_and_some_leave_a_member_behind():
    num_behind = 0
    for number in range(16, 32):  # the points of worker 1 in its second step and around it
        job = job_with_a_death_between_frames(number)
        assert_undisturbed(job, job.run(train), 1)
        num_behind += sum(name.startswith("take") for _, name in job.points)
    assert num_behind


@pytest.mark.parametrize(
    "points", [("begin 1", "begin 1"), ("send 3", "met 2"), ("gather 1", "meet 2"), ("finish", "finish")]
)
def test_two_deaths_at_once_or_one_during_the_recovery_of_the_other(points):
    first, second = points
    job = Job(4, {0: first, 3: second})
    assert_undisturbed(job, job.run(train), 2)
    assert {tuple(job.survivors[number].members) for number in (1, 2)} == {(1, 2)} or first == "finish"


def test_the_source_dies_while_it_gives_the_sums():
    """The sums are lost with the source, and the step is repeated."""
    num_gifts = 0
    for number in range(18, 30):
        job = job_with_a_death_between_frames(number, {0: "give 2", 2: "give 0"})
        results = job.run(train)
        gifts = [name for _, name in job.points if name.startswith("give")]
        num_gifts += len(gifts)
        assert_undisturbed(job, results, 1 + len(gifts))
    assert num_gifts


@pytest.mark.parametrize("content", [{}, {"version": 2, "rounds": [1, 1]}, {"version": 2, "rounds": "all"}])
def test_a_gift_that_is_not_of_this_step_ends_the_epoch_and_the_next_one_gives_again(content):
    other_has_committed = threading.Event()

    def program(number, survivors, training):
        meet = survivors._rendezvous.meet

        def meet_badly(epoch, *arguments):
            world = meet(epoch, *arguments)
            if epoch == 2:
                take = world.take
                world.take = lambda source: Gift(content, take(source).arrays)
            return world

        for count in range(NUM_STEPS):
            step = training.step()
            if (number, count) == (1, 1):
                survivors._rendezvous.meet = meet_badly

                def sums(replicas, combine, sums=step.sums):
                    result = sums(replicas, combine)
                    if survivors._member.epoch == 1:
                        assert other_has_committed.wait(LIMIT_S)
                        raise EpochEnded(1, "the last sum is lost")
                    return result

                step.sums = sums
            survivors.run(step, "to train")
            if (number, count) == (0, 1):
                other_has_committed.set()
        survivors.finish()
        return training.weights

    job = Job(2)
    assert_undisturbed(job, job.run(program), 0)
    assert {survivors.describe()["epoch"] for survivors in job.survivors} == {3}


def test_the_last_one_finishes_alone():
    job = Job(3, {0: "begin 1", 1: "between 0 and 1 of 2"})
    results = job.run(train)
    assert_undisturbed(job, results, 2)
    assert job.survivors[2].describe() | {"recovery_s": None} == {
        "epoch": 3,
        "members": [2],
        "adopted": {"0": 2, "1": 2},
        "num_recoveries": 2,
        "num_replacements": 0,
        "recovery_s": None,
    }


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_a_run_with_deaths_at_any_points_ends_with_the_same_bits(data):
    num_workers = data.draw(st.integers(2, 4))
    victims = data.draw(st.sets(st.integers(0, num_workers - 1), min_size=1, max_size=num_workers - 1))
    kills = {
        victim: data.draw(st.integers(4, 75)) * data.draw(st.sampled_from([1, -1]))
        for victim in sorted(victims)
    }
    length = data.draw(st.sampled_from([3, 1000, 30_000]))
    job = Job(num_workers, kills, length=length, shares=data.draw(st.booleans()))
    results = job.run(train)
    assert_undisturbed(job, results, num_workers - len(results))
    assert set(range(num_workers)) - results.keys() <= set(kills)


# --- broadcasts and steps without rounds ---------------------------------------------------------------


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_a_broadcast_gives_the_bits_of_one_chief_to_all(victim):
    arrays = {
        number: [
            np.array([-0.0, np.nan, number], np.float32),
            np.array(number, np.int8),
            np.zeros((0, 3)),
            np.array([[True, False]]),
            np.array([1.5, number], ml_dtypes.bfloat16),
        ]
        for number in range(3)
    }

    def program(number, survivors, training):
        values = survivors.broadcast(arrays[number])
        survivors.run(training.step(), "to train")
        again = survivors.broadcast(values)
        survivors.finish()
        assert all(bits(one) == bits(other) for one, other in zip(values, again, strict=True))
        return values

    results = Job(3, {} if victim is None else {victim: "send 2"}).run(program)
    chief = int(results[2][0][2])
    assert chief == 0 if victim != 0 else chief in (0, 1)
    for values in results.values():
        for value, expected in zip(values, arrays[chief], strict=True):
            assert value.dtype == expected.dtype
            assert value.shape == expected.shape
            assert bits(value) == bits(expected)


def test_a_step_without_rounds_needs_no_others_and_counts_as_no_step():
    class Whole:
        reductions, num_rows = (), 96

        def update(self, sums):
            assert not sums
            return "outputs"

    def program(number, survivors, training):
        if number:
            return survivors.run(Whole(), "to predict"), survivors._member.version
        return None

    assert Job(2).run(program)[1] == ("outputs", 0)


# --- errors: typed, at once, with names -----------------------------------------------------------------


def errors_of(job, program):
    """The error of each process that did not die or end well."""
    errors = {}

    def noted(number, survivors, training):
        try:
            return program(number, survivors, training)
        except Exception as error:
            errors[number] = error
            raise Killed from None

    job.run(noted)
    return errors


def test_too_few_members_end_with_an_error_that_names_the_dead_ones():
    errors = errors_of(Job(3, {1: "begin 1", 2: "begin 1"}, min_workers=2), train)
    assert list(errors) == [0]
    assert isinstance(errors[0], PeerFailureError)
    assert "min_workers" in str(errors[0])


def test_a_death_at_the_start_ends_all():
    job = Job(3)
    job.kill(1)
    for future in [job.pool.submit(job.process, number, train) for number in (0, 2)]:
        with pytest.raises(PeerFailureError, match="worker 1 ended before all tasks had started"):
            future.result(LIMIT_S)
    job.close()


def test_members_that_run_different_steps_get_an_error_with_both_names():
    def program(number, survivors, training):
        survivors.run(training.step(), "to train")
        step = training.step()
        if number == 1:
            step.num_rows = 95
        survivors.run(step, "to train")

    errors = errors_of(Job(2), program)
    assert {type(error) for error in errors.values()} <= {ProgramMismatchError}
    assert "worker 0" in str(errors[0])
    assert "worker 1" in str(errors[0])


def test_members_whose_sums_differ_in_one_bit_get_an_error_with_both_names():
    all_have_committed = threading.Barrier(3)

    def program(number, survivors, training):
        survivors.run(training.step(), "to train")
        if number == 1:
            (largest,), (total, count) = survivors._last_sums
            survivors._last_sums = [[largest], [np.nextafter(total, 9, dtype=np.float32), count]]
        all_have_committed.wait(LIMIT_S)
        survivors.run(training.step(), "to train")

    errors = errors_of(Job(3, {2: "begin 1"}), program)
    assert {type(error) for error in errors.values()} == {StateMismatchError}
    assert "worker 0 and worker 1" in str(errors[0])


def test_the_wait_for_reports_is_bounded_and_names_the_late_member():
    has_failed = threading.Event()
    job = Job(3, {2: "begin 1"})

    def program(number, survivors, training):
        survivors._timeout_s = 2  # all are here
        try:
            survivors.run(training.step(), "to train")
            if number == 1:  # it does something else for long
                while not has_failed.wait(0.05):
                    job.tick()
                raise Killed
            survivors.run(training.step(), "to train")
        finally:
            if number == 0:
                has_failed.set()

    errors = errors_of(job, program)
    assert isinstance(errors[0], PeerFailureError)
    assert "worker 0 waited 2 s to train for worker 1. " in str(errors[0])


def test_a_member_that_leaves_a_step_with_an_error_ends_and_the_others_adopt_its_replica_at_once():
    class Mistake(Exception):
        pass

    others_are_done = threading.Barrier(3)

    def program(number, survivors, training):
        survivors.run(training.step(), "to train")
        step = training.step()
        if number == 1:
            step.update = lambda sums: raise_(Mistake())
            with pytest.raises(Mistake):
                survivors.run(step, "to train")
            for use in (lambda: survivors.run(training.step(), "to train"), survivors.finish):
                with pytest.raises(PeerFailureError, match="has left a step with an error"):
                    use()
            others_are_done.wait(LIMIT_S)  # this process does not end before
            return None
        survivors.run(step, "to train")
        survivors.run(training.step(), "to train")
        survivors.finish()
        others_are_done.wait(LIMIT_S)
        return training.weights

    results = Job(3).run(program)
    assert bits(results[0]) == bits(results[2]) == bits(undisturbed(3, 3))


def test_a_member_that_is_interrupted_while_it_meets_the_others_ends_and_the_others_go_on():
    """Ctrl-C may come between two steps, in an all-gather in which the others meet again after a death."""
    are_between_steps, others_are_done = threading.Barrier(3), threading.Barrier(2)

    def program(number, survivors, training):
        survivors.run(training.step(), "to train")
        if number == 1:
            survivors._rendezvous.meet = lambda *arguments: raise_(KeyboardInterrupt())
        are_between_steps.wait(LIMIT_S)
        if number == 1:
            with pytest.raises(KeyboardInterrupt):
                survivors._channel.gather("step 0", 0)  # which nobody else makes before the next step
            with pytest.raises(PeerFailureError, match="has left an agreement of the tasks with an error"):
                survivors.run(training.step(), "to train")
            others_are_done.wait(LIMIT_S)
            return None
        weights = train(number, survivors, training)
        others_are_done.wait(LIMIT_S)
        return weights

    results = Job(3, {0: "begin 1"}).run(program)
    assert bits(results[2]) == bits(undisturbed(3, 1 + NUM_STEPS))


def test_a_member_that_goes_on_to_the_next_epoch_inside_of_a_step_counts_the_step_once():
    def program(number, survivors, training):
        for count in range(NUM_STEPS):
            step = training.step()
            if (number, count) == (1, 1):

                def sums(replicas, combine, sums=step.sums):
                    result = sums(replicas, combine)
                    while survivors._member.epoch < 2:
                        survivors._channel.wait_for_message(LIMIT_S)
                        survivors.serve()
                    return result

                step.sums = sums
            survivors.run(step, "to train")
        survivors.finish()
        return training.weights

    assert_undisturbed(job := Job(3, {0: "before update 1"}), job.run(program), 1)


def test_another_thread_may_end_the_program():
    def program(number, survivors, training):
        survivors.run(training.step(), "to train")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(survivors.finish).result(LIMIT_S)
        return training.weights

    for weights in Job(2).run(program).values():
        assert bits(weights) == bits(undisturbed(2, 1))


def test_an_error_before_the_first_round_leaves_the_training_as_it_was():
    def program(number, survivors, training):
        step = training.step()
        step.sums = lambda replicas, combine: raise_(ValueError("no batch"))
        with pytest.raises(ValueError, match="no batch"):
            survivors.run(step, "to train")
        return train(number, survivors, training)

    job = Job(2)
    assert_undisturbed(job, job.run(program), 0)


def test_a_process_that_was_cut_off_or_given_up_ends():
    for message, match in ((None, "lost its connection"), ({"kind": "given_up"}, "must end")):

        def program(number, survivors, training, message=message, match=match):
            survivors.run(training.step(), "to train")
            if number == 1:
                survivors._channel.deliver(message)
                for _ in range(2):
                    with pytest.raises(PeerFailureError, match=match):
                        survivors.run(training.step(), "to train")
                survivors._rendezvous.job.kill(1)
                return None
            survivors.run(training.step(), "to train")
            survivors.finish()
            return training.weights

        results = Job(2).run(program)
        assert bits(results[0]) == bits(undisturbed(2, 2))


def test_steps_in_another_thread_are_refused():
    def program(number, survivors, training):
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            pytest.raises(UnsupportedError, match="thread"),
        ):
            pool.submit(survivors.run, training.step(), "to train").result()
        return train(number, survivors, training)

    job = Job(2)
    assert_undisturbed(job, job.run(program), 0)


def raise_(error):
    raise error


def bits(array):
    return np.ascontiguousarray(array).tobytes()
