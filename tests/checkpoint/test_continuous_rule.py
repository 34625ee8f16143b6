"""When continuous saves begin: the rule, with processes that pass boundaries and end saves in every order."""

import itertools
import random

import hypothesis
import hypothesis.strategies as st

from replicax._src.checkpoint.continuous_rule import MOST_SKIPPED, ContinuousRule


class Process:
    """A process of the simulated cluster: ``passed`` grows, and a save is copied, written, told and agreed on."""

    def __init__(self):
        self.rule = ContinuousRule()
        self.began = []  # boundaries at which saves began
        self.told = None  # the number that it told after its save ended
        self.num_ended = 0

    @property
    def is_writing(self):
        return len(self.began) > self.num_ended

    def may_pass(self):
        """It waits after one more boundary than it has told."""
        return self.told is None or self.rule.num_passed <= self.told

    def pass_boundary(self):
        self.rule.pass_boundary()

    def begin_if_due(self):
        if self.told is None and self.rule.is_due:
            assert not self.is_writing, "two saves at once"
            self.began.append(self.rule.num_passed)
            self.rule.begin()


def simulate(count, choose, num_events):
    """Returns the processes, and the numbers that were told after each save, after that many events in chosen order."""
    processes, rounds = [Process() for _ in range(count)], []
    for _ in range(num_events):
        lowest = min(process.rule.num_passed for process in processes)
        events = []
        for process in processes:
            # A step of training has collectives, so no process is more than one boundary ahead.
            if process.rule.num_passed <= lowest and process.may_pass():
                events.append(("pass", process))
        is_written = all(len(process.began) == len(rounds) + 1 for process in processes)
        if is_written:  # durable with the parts of all: each thread tells its number
            events += [("tell", process) for process in processes if process.told is None]
        if events:
            what, process = choose(events)
            if what == "pass":
                process.pass_boundary()
                process.begin_if_due()
            else:
                process.told = process.rule.num_passed
        told = [process.told for process in processes if process.told is not None]
        if len(told) == count:
            rounds.append(told)
            for process in processes:
                process.rule.end(told, is_durable=True)
                process.num_ended, process.told = process.num_ended + 1, None
                process.begin_if_due()  # one that waited at a boundary
    return processes, rounds


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(count=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_all_processes_begin_the_next_save_at_the_first_boundary_that_none_has_passed(count, seed):
    processes, rounds = simulate(count, random.Random(seed).choice, 100)
    longest = max((process.began for process in processes), key=len)
    for process in processes:
        assert process.began == longest[: len(process.began)]
        assert len(longest) - len(process.began) <= 1
    assert longest[:1] in ([], [1])
    for told, began in zip(rounds, longest[1:], strict=False):
        assert began == max(told) + 1
    assert len(rounds) <= len(longest) <= len(rounds) + 1


@hypothesis.given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=20))
def test_one_process_saves_at_the_first_boundary_after_the_last_save_is_durable(lengths):
    """Each save takes so many boundaries until it is durable."""
    rule, began = ContinuousRule(), []
    for length in lengths:
        rule.pass_boundary()
        assert rule.is_due
        began.append(rule.num_passed)
        rule.begin()
        for _ in range(length):
            rule.pass_boundary()
            assert not rule.is_due, "two saves at once"
        rule.end([rule.num_passed], is_durable=True)
        assert not rule.is_due, "a save that ended between two boundaries"
    assert began == [1 + i + sum(lengths[:i]) for i in range(len(lengths))]


def test_failed_saves_wait_longer_and_longer_but_not_longer_than_the_failure_has_lasted():
    rule, attempts = ContinuousRule(), []
    for number in range(1, 6000):
        rule.num_passed = number
        if rule.is_due:
            attempts.append(number)
            rule.begin()
            rule.end([number], is_durable=False)
    assert attempts[:5] == [1, 3, 7, 15, 31]
    pauses = [after - before for before, after in itertools.pairwise(attempts)]
    assert max(pauses) == MOST_SKIPPED
    assert all(pause <= before + 1 for pause, before in zip(pauses, attempts, strict=False))
    rule.num_passed = 9000
    rule.begin()
    rule.end([9000], is_durable=True)
    rule.num_passed = 9001
    assert rule.is_due


def test_replacement_takes_the_counts():
    rule, replacement = ContinuousRule(), ContinuousRule()
    rule.num_passed = 7
    rule.begin()
    rule.end([7, 8], is_durable=False)
    replacement.take_counts(rule.counts())
    assert replacement.counts() == [7, 10, 1]
