"""The processes of one group, here threads that gather in memory: they agree on what the leader decides, or all fail."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from replicax._ps.local_updates import group_processes
from replicax._ps.local_updates.group_processes import GroupProcesses
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.vocabulary.errors import ContextError, InvalidArgumentError, RemoteError

WAIT_S = 60
NAMES = ("worker 0", "worker 1")


class Gathering:
    """All-gathers of two threads."""

    def __init__(self):
        self.values, self.all_are_here = [None, None], threading.Barrier(2, timeout=WAIT_S)

    def peers(self, number):
        def gather(topic, value, what):
            self.values[number] = value
            self.all_are_here.wait()
            gathered = GatheredValues(self.values, (0, 1), NAMES, number)
            self.all_are_here.wait()
            return gathered

        return SimpleNamespace(number=number, names=NAMES, tolerates_failures=False, gather=gather)


def in_both(call):
    """Returns what ``call`` returns or raises in two processes of a group, given the processes and their number."""
    gathering = Gathering()

    def run(number):
        try:
            return call(GroupProcesses(SimpleNamespace(peers=gathering.peers(number))), number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_all_get_what_the_leader_decides_and_learn_of_a_wish_of_any():
    results = in_both(
        lambda all_, number: all_.agreed_with_wish(lambda: [number, 7], "step", wish=number == 1)
    )
    assert results == [([0, 7], True)] * 2


def test_processes_that_call_different_methods_fail_with_the_names_of_both():
    calls = ("groups.step after step 4", "groups.finish after step 4")
    results = in_both(lambda all_, number: all_.agreed(lambda: 0, calls[number]))
    for error in results:
        assert isinstance(error, ContextError)
        for name, call in zip(NAMES, calls, strict=True):
            assert f"{name}: {call}" in str(error)


@pytest.mark.parametrize("is_long", [False, True])
def test_error_of_the_leader_is_named_in_the_others(is_long):
    def fail():
        raise InvalidArgumentError("It is wrong.")

    def call(all_, _):
        return (all_.awaited if is_long else all_.agreed)(fail, "step")

    own, other = in_both(call)
    assert isinstance(own, InvalidArgumentError)
    assert isinstance(other, RemoteError)
    assert "worker 0, which exchanges for this group, failed: InvalidArgumentError: It is wrong" in str(other)


def test_leader_that_waits_long_says_so_again_and_again(monkeypatch):
    monkeypatch.setattr(group_processes, "_TICK_S", 0.001)
    ending = threading.Event()

    def call(all_, number):
        gathering = all_._peers.gather

        def gather(*args):
            counts[number] += 1
            if counts[0] == 5:
                ending.set()
            return gathering(*args)

        all_._peers.gather = gather
        return all_.awaited(lambda: ending.wait(WAIT_S), "finish")

    counts = [0, 0]
    results = in_both(call)
    assert results == [True, True]
    assert counts[0] == counts[1] > 5
