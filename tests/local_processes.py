"""Processes that run a step as local programs, each with its own state. Here they are threads of one process, and the
sums between the programs are added in NumPy, in the order of the replicas."""

import concurrent.futures
import threading

import jax
import numpy as np
import pytest

from replicax._src.devices.topology import Topology
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.held_state import HeldState

LIMIT_S = 60
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Cut(Exception):
    """The connections of a process were cut."""


def one_device():
    return Topology.of(jax.devices()[:1])


def combined(buffers, parts):
    """The buffers of a round, combined over the replicas in order. ``parts``: [replica][buffer]."""
    results = []
    for buffer, *arrays in zip(buffers, *parts, strict=True):
        total = arrays[0].copy()
        assert total.dtype == buffer.dtype
        assert total.shape == (buffer.size,)
        for array in arrays[1:]:
            total = COMBINE[buffer.reduction](total, array)
        results.append(total)
    return results


class Exchanges:
    """The exchanges of one step. ``cut_before``: the number of the round whose exchange fails in all processes, or the
    number of rounds to lose the last sums."""

    def __init__(self, rounds, num_replicas, num_processes, cut_before=None):
        self._rounds, self._cut_before = rounds, cut_before
        self._parts = [[None] * num_replicas for _ in rounds]
        self._all_are_here = threading.Barrier(num_processes, timeout=LIMIT_S)

    def sums(self):
        """The sums of all rounds, as they come over the wire."""
        sums = [combined(*each) for each in zip(self._rounds, self._parts, strict=True)]
        return [[np.frombuffer(total.tobytes(), total.dtype) for total in buffers] for buffers in sums]

    def of(self, replicas, *, loses_the_last=False):
        """Returns the ``CombineRound`` of a process. One that ``loses_the_last`` sends its parts and never gets the last sums."""

        def combine(round_index, parts):
            if round_index == self._cut_before:
                raise Cut
            for replica, buffers in zip(replicas, parts, strict=True):
                self._parts[round_index][replica] = buffers
            self._all_are_here.wait()
            results = combined(self._rounds[round_index], self._parts[round_index])
            if round_index + 1 == len(self._rounds) and (
                loses_the_last or self._cut_before == len(self._rounds)
            ):
                raise Cut
            return results

        return combine


class Team:
    """Processes that train together. ``state``: a function that returns new lists of equal arrays."""

    def __init__(self, step, state, num_replicas, assignment):
        self.step, self.num_replicas, self.assignment = step, num_replicas, assignment
        self.held = [HeldState(one_device()) for _ in assignment]
        for held in self.held:
            held.hold(state())

    def programs(self, batch):
        return self.step.programs(self.held[0], DatasetBatch(batch))

    def assign(self, assignment):
        """Gives the replicas to the first processes; the others are dead."""
        self.assignment = assignment
        del self.held[len(assignment) :]

    def run(self, batch, cut_before=None, behind=()):
        """Runs a step in all processes. Returns the outputs of each.

        The processes ``behind`` lose the last sums. Afterwards they get the sums of all rounds from another process.
        """
        rounds = self.programs(batch).rounds
        exchanges = Exchanges(rounds, self.num_replicas, len(self.assignment), cut_before)

        def run(held, replicas):
            batches = [DatasetBatch(batch)] * len(replicas)
            is_behind = any(held is self.held[process] for process in behind)
            combine = exchanges.of(replicas, loses_the_last=is_behind)
            if not is_behind:
                return run_step(self.step, held, batches, replicas, combine)
            with pytest.raises(Cut):
                run_step(self.step, held, batches, replicas, combine)
            return self.step.programs(held, batches[0]).update(held, batches[0], exchanges.sums())

        with concurrent.futures.ThreadPoolExecutor(len(self.assignment)) as pool:
            futures = list(map(lambda *each: pool.submit(run, *each), self.held, self.assignment))
            return [future.result(LIMIT_S) for future in futures]

    def values(self, process=0):
        """The state of a process on the host."""
        return [np.array(value) for value in self.held[process].values()]


def run_step(step, held, batches, replicas, combine, *, donates=True):
    """Runs a step in one process. If ``combine`` raises, the state is unchanged."""
    programs = step.programs(held, batches[0], donates=donates)
    own(held, programs)
    return programs.update(held, batches[0], programs.sums(held, batches, replicas, combine))


def own(held, programs):
    held.adopt(programs.written, lambda: [None] * len(held.values()))


def assert_same_bits(got, expected):
    """Of lists of arrays."""
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
