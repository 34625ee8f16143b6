"""``ReplayPlan``: what the logs of all groups say of a run, in the form in which it is repeated. Pure.

A *round* has the pushes that the server had added when it closed: ``logged_rounds.py`` finds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Final, final

from replicax._ps.local_updates.fragment_programs import MAX_TOKENS
from replicax._ps.local_updates.logged_events import (
    LoggedAdoption,
    LoggedCall,
    LoggedProcess,
    LoggedPush,
    LoggedRound,
    ServedVersion,
)
from replicax._ps.local_updates.logged_rounds import FragmentLog
from replicax._ps.local_updates.replay_file import GroupCall, ReplayKind, ReplayOfProcess
from replicax._src.program_kit.errors import InvalidArgumentError, UnsupportedError

_NAME: Final = "rx.testing.replay_groups"


@final
class ReplayPlan:
    """What a run did.

    Args:
      logs: The parts of the logs of all groups: for each log, those of its processes.

    Attributes:
      processes: All processes, those of one group in the order of their starts.
      num_groups: The number of groups.
      instances: By fragment the instances of its server, each with the number of restarts before it.
      rounds: The rounds by fragment and version.
      origins: The version with which a server came back, by the fragment and the number of restarts.
      outer_checksums: The checksums of outer parameters by fragment and version, each with the process that logged it.
      push_checksums: The checksums of the pushes that were answered.
      versions_of: The first version that has a push, for pushes that are in one.
      num_rounds_of: The number of rounds that have a push: a restarted server may repeat a round.
      num_adoptions: How often a version of a fragment was adopted.

    Raises:
      InvalidArgumentError: The logs are not those of one run.
      UnsupportedError: The run cannot be repeated.
    """

    def __init__(self, logs: Sequence[Sequence[ReplayOfProcess]]):
        parts = [part for log in logs for part in log]
        if not parts:
            raise InvalidArgumentError(f"{_NAME} got no log. Give the logs of all groups of a run.")
        self.num_groups = _checked_headers(parts)
        self.outer_checksums: defaultdict[tuple[int, ServedVersion], list[tuple[LoggedProcess, int]]]
        self.outer_checksums = defaultdict(list)
        self.push_checksums: dict[LoggedPush, int] = {}
        self.num_adoptions: Counter[tuple[int, ServedVersion]] = Counter()
        self.instances = _restarts_before(parts)
        self._fragments = {fragment: FragmentLog(fragment) for fragment in self.instances}
        counts: Counter[int] = Counter()
        self._process_of: dict[tuple[int, int], int] = {}  # by group and owner of a slot
        processes: list[LoggedProcess] = []
        for part in parts:
            group = part.header["group"]
            self._process_of[group, part.header["owner"]] = counts[group]
            processes.append(self._read(group, counts[group], part))
            counts[group] += 1
        self.processes: Sequence[LoggedProcess] = processes
        self._check_creations()
        self.rounds: dict[tuple[int, ServedVersion], LoggedRound] = {}
        self.origins: dict[tuple[int, int], ServedVersion] = {}
        self.versions_of: dict[LoggedPush, ServedVersion] = {}
        for fragment, log in self._fragments.items():
            log.find_rounds(len(self.instances[fragment]))
            self.rounds |= {(fragment, served): each for served, each in log.rounds.items()}
            self.origins |= {(fragment, restarts): origin for restarts, origin in log.origins.items()}
        for key in sorted(self.rounds):
            for push in self.rounds[key].pushes:
                self.versions_of.setdefault(push, key[1])
        self.num_rounds_of = Counter(push for each in self.rounds.values() for push in each.pushes)

    def _read(self, group: int, process: int, part: ReplayOfProcess) -> LoggedProcess:
        calls = [LoggedCall(None, 0, [])]
        taken: dict[tuple[int, int], LoggedPush] = {}
        keeps: list[int] = []
        returns: list[int] = []
        outer: list[tuple[tuple[int, ServedVersion], int]] = []
        created: set[int] = set()
        for record in part.records:
            fragment = record.fragment
            restarts = self.instances.get(fragment, {}).get(record.instance, 0)
            served = ServedVersion(restarts, record.version)
            match record.kind:
                case ReplayKind.CALLED:
                    calls.append(LoggedCall(GroupCall(record.is_special), record.step, []))
                case ReplayKind.CREATED:
                    created.add(fragment)
                case ReplayKind.CLAIMED:
                    self._fragments[fragment].claimed(group, process, restarts, record.number)
                    before = self._process_of.get((group, record.before))
                    if before not in (None, process):
                        has = record.before_number, record.before_version
                        self._fragments[fragment].took_over(group, before, restarts, *has)
                case ReplayKind.TAKEN:
                    tokens = min(record.tokens, MAX_TOKENS)
                    push = LoggedPush(group, process, fragment, record.number, tokens)
                    taken[fragment, record.number] = push
                    self._fragments[fragment].taken(push)
                    _call_at(calls, record.step).events.append(push)
                case ReplayKind.KEPT:
                    keeps.append(record.number)
                case ReplayKind.GIVEN:
                    returns.append(record.number)
                case ReplayKind.ADOPTED:
                    event = LoggedAdoption(
                        fragment, served, tuple(keeps), tuple(returns), bool(record.is_special)
                    )
                    keeps, returns = [], []
                    _call_at(calls, record.step).events.append(event)
                    self.num_adoptions[fragment, served] += 1
                    self._fragments[fragment].adopted(served)
                    outer.append(((fragment, served), record.checksum))
                case ReplayKind.LANDED:
                    push = taken[fragment, record.number]
                    self.push_checksums[push] = record.checksum
                    self._fragments[fragment].landed(push, record.version)
                case ReplayKind.CLOSED:
                    self._fragments[fragment].closed(served, record)
        for each in self._fragments.values():
            each.ended()
        read = LoggedProcess(group, process, part.header, calls, frozenset(created))
        for key, checksum in outer:
            self.outer_checksums[key].append((read, checksum))
        return read

    def _check_creations(self) -> None:
        creations = Counter(fragment for each in self.processes for fragment in each.created)
        for fragment, number in creations.items():
            if number > 1:
                raise UnsupportedError(_BEGAN_ANEW.format(_NAME, fragment))


def _restarts_before(parts: Sequence[ReplayOfProcess]) -> dict[int, dict[int, int]]:
    """Returns by fragment the instances of its server, each with the number of restarts before it."""
    before: defaultdict[int, dict[int, set[int]]] = defaultdict(dict)
    births: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for part in parts:
        for record in part.records:
            if record.kind is not ReplayKind.CLAIMED:
                continue
            fragment, key = record.fragment, (part.header["group"], record.fragment)
            if births.setdefault(fragment, record.birth) != record.birth:
                raise UnsupportedError(_BEGAN_ANEW.format(_NAME, fragment))
            earlier = before[fragment].setdefault(record.instance, set())
            if last.setdefault(key, record.instance) != record.instance:
                earlier.add(last[key])
            last[key] = record.instance
    restarts: dict[int, dict[int, int]] = {}
    for fragment, graph in before.items():
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError:
            raise UnsupportedError(_UNORDERED.format(_NAME, fragment)) from None
        if any(one not in graph[other] for one, other in pairwise(order)):
            raise UnsupportedError(_UNORDERED.format(_NAME, fragment))
        restarts[fragment] = {instance: number for number, instance in enumerate(order)}
    return restarts


def _call_at(calls: list[LoggedCall], step: int) -> LoggedCall:
    """The call that a record of this step belongs to."""
    if calls[-1].step != step:
        calls.append(LoggedCall(GroupCall.STEP, step, []))
    return calls[-1]


def _checked_headers(parts: Sequence[ReplayOfProcess]) -> int:
    """Checks that all parts are of one run. Returns the number of groups."""
    first = parts[0].header
    for part in parts:
        for name in ("num_groups", "every", "compression", "sgd", "fragments"):
            if part.header[name] != first[name]:
                raise InvalidArgumentError(
                    f"{_NAME}: the logs are of different runs: {name} is {part.header[name]} in the log of group "
                    f"{part.header['group']}, and {first[name]} in that of group {first['group']}."
                )
        if part.header["has_several_processes"]:
            raise UnsupportedError(
                f"{_NAME}: group {part.header['group']} had several processes. A replay is one process, and sums that several "
                "processes compute together have other last bits in one. Replay runs whose groups have one process each; it may "
                "have several devices."
            )
    return first["num_groups"]


_BEGAN_ANEW: Final = (
    "{}: the server of fragment {} came back without a snapshot that has it, and began with the parameters of some group; or "
    "the logs have two runs. Write snapshots more often, and give each run logs of its own."
)
_UNORDERED: Final = (
    "{}: the logs do not say in which order the restarts of the server of fragment {} came: no group has met both of two "
    "servers. Replay a run in which some group trained through all restarts, and give each run logs of its own."
)
