"""Failures change no number, in any order of events: seeds of the simulated world."""

import pytest

from simulation import runs
from simulation.survivors import LateReplacement, Replacements, Survivors


def check_survivors(first):
    failed, outcomes = runs.first_failure(Survivors, range(first, first + 100))
    assert failed is None, runs.report(Survivors, failed)
    assert outcomes["finished"] > 40


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_runs_with_failures_end_with_the_state_of_a_run_without(first):
    check_survivors(first)


def test_run_in_which_a_member_dies_that_had_finished_an_earlier_epoch():
    # The first seed that finds the planted fault finished-in-old-epoch-counts.
    done = runs.run(Survivors, 1508)
    assert done.error is None, runs.report(Survivors, done)


@pytest.mark.rest
@pytest.mark.parametrize("first", range(500, 2000, 100))
def test_more_runs_with_failures_end_with_the_state_of_a_run_without(first):
    check_survivors(first)


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_replacements_take_their_places_whatever_fails_meanwhile(first):
    failed, outcomes = runs.first_failure(Replacements, range(first, first + 100))
    assert failed is None, runs.report(Replacements, failed)
    assert outcomes["finished"] > 40


def test_replacement_that_does_not_come_to_its_first_step_is_given_up_and_the_others_finish():
    done = [runs.run(LateReplacement, seed) for seed in range(10)]
    assert {(each.error, each.outcome) for each in done} == {(None, "finished")}
    ends = [
        process.why for each in done for process in each.world.processes.values() if process.exit_code == 1
    ]
    assert ends.count("given_up") > 5


def test_run_repeats_from_its_seed():
    one, other = (runs.run(Survivors, 4, is_traced=True) for _ in range(2))
    assert len(one.trace) > 1000
    assert one.trace == other.trace


def test_run_without_faults_needs_one_epoch():
    done = runs.run(Survivors, 4, faults=[])
    assert (done.error, done.outcome) == (None, "finished")


class Restored(Survivors):
    """Its first worker has restored a later checkpoint than the others."""

    def first_version(self, number):
        return int(number == 0)

    def check_lost(self, world, message):
        assert message["reason"] == "differs"
        assert 0 in message["members"]

    def check(self, world):
        assert not self.forms


def test_workers_that_begin_with_different_versions_do_not_train():
    done = runs.run(Restored, 4, faults=[])
    assert (done.error, done.outcome) == (None, "lost: differs")


class Forgetful(Survivors):
    """Its workers forget what they know of an epoch's end when a connection is cut."""

    def inject(self, world, fault):
        super().inject(world, fault)
        if fault.kind == "cut":
            for process in self.workers:
                process.ended = 0
                process.member.receive = lambda message: []


def test_failing_run_is_shortened_to_the_fault_that_it_needs():
    failed, _ = runs.first_failure(Forgetful, range(100))
    assert failed is not None
    assert [fault.kind for fault in runs.shortened(Forgetful, failed).faults] == ["cut"]
    text = runs.report(Forgetful, failed)
    assert f"seed {failed.seed}" in text
    assert "1 of " in text
