"""Survivors without processes: all members of a training that goes on after a death are threads of this process, and
compute their replicas of one step at the same time. Their arrays are added as real ones add them."""

import concurrent.futures
import contextlib
import json
import threading

import jax
import numpy as np

from replicax import MultiWorkerMirroredStrategy
from replicax._src.cluster import chief
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.collectives.host_sums.ordered_addition import HostOp, combine
from replicax._src.devices.topology import Topology
from replicax._src.strategies import surviving
from replicax.cluster_resolver import ClusterSpec, SimpleClusterResolver

LIMIT_S = 60


class Cut(Exception):
    """The connections between the members were cut."""


class OwnPeers:
    """The control channel of one live member among ``num_tasks``."""

    def __init__(self, num_tasks):
        self.names, self.number, self.is_leader = [f"worker {i}" for i in range(num_tasks)], 0, True
        self.agreed, self.tolerates_failures = [], True
        self.is_solo, self.admission, self.last_entry = False, None, None

    def __len__(self):
        return len(self.names)

    def gather(self, topic, value, what, **_):
        return GatheredValues([json.loads(json.dumps(value))], [0], self.names, 0)

    def agree(self, name, text):
        self.agreed.append((name, text))

    @contextlib.contextmanager
    def stepping(self, name):
        yield


class Members:
    """``assignments``: for each attempt of a step, the replicas of each member. An attempt with ``None`` behind the
    replicas is cut in a round in the middle; the next attempt repeats the step. The last assignment stays."""

    def __init__(self, num_replicas, assignments=()):
        self._assignments = list(assignments) or [[list(range(num_replicas))]]
        self.num_replicas, self.steps, self.num_cuts = num_replicas, [], 0

    @property
    def replicas(self):
        return tuple(self._assignments[0][0])

    def run(self, step, what):
        self.steps.append((what, len(step.reductions)))
        if not step.reductions:
            return step.update(())
        while True:
            assignment = self._assignments[0]
            is_cut = assignment[-1] is None
            members = [replicas for replicas in assignment if replicas is not None]
            if len(self._assignments) > 1:
                self._assignments.pop(0)
            exchange = _Exchange(step.reductions, self.num_replicas, len(members), is_cut=is_cut)
            with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
                all_sums = [pool.submit(step.sums, replicas, exchange.of(replicas)) for replicas in members]
                try:
                    sums, *others = [each.result(LIMIT_S) for each in all_sums]
                except Cut:
                    self.num_cuts += 1
                    continue
            for other in others:
                jax.tree.map(np.testing.assert_array_equal, sums, other)
            return step.update(sums)

    def broadcast(self, arrays):
        raise AssertionError("one process has no other values")


class _Exchange:
    def __init__(self, reductions, num_replicas, num_members, *, is_cut):
        self._reductions = reductions
        self._cut_before = len(reductions) // 2 if is_cut else None
        self._parts = [[None] * num_replicas for _ in reductions]
        self._all_are_here = threading.Barrier(num_members, timeout=LIMIT_S)

    def of(self, replicas):
        def combine_round(round_index, parts):
            if round_index == self._cut_before:
                raise Cut
            for replica, buffers in zip(replicas, parts, strict=True):
                self._parts[round_index][replica] = buffers
            self._all_are_here.wait()
            results = []
            for op, *arrays in zip(self._reductions[round_index], *self._parts[round_index], strict=True):
                results.append(np.empty_like(arrays[0]))
                combine(HostOp(op), arrays, results[-1])
            return results

        return combine_round


def strategy_of(members, monkeypatch, *, fault_tolerance=True, peers=None, **options):
    """The strategy of the worker 0 of all, or of the one with these peers."""
    monkeypatch.setattr(chief, "_roles", [])
    addresses = [f"127.0.0.1:{20000 + i}" for i in range(members.num_replicas)]
    peers = OwnPeers(members.num_replicas) if peers is None else peers
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": addresses}), task_type="worker", task_id=peers.number
    )
    topology = Topology.of_survivors(jax.devices()[0], peers, members.num_replicas, members)
    monkeypatch.setattr(surviving, "join", lambda *_: topology)
    return MultiWorkerMirroredStrategy(resolver, fault_tolerance=fault_tolerance, **options)
