"""``ReplayPlan``: what the logs of all groups say of a run, in the form in which it is repeated. Pure.

A *round* has the pushes that the server had added when it closed. A push whose process was killed before the answer is
in the round that lacks so many rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, final

from replicax._ps.local_updates.fragment_programs import MAX_TOKENS
from replicax._ps.local_updates.replay_file import (
    MOST_MEMBERS,
    GroupCall,
    ReplayKind,
    ReplayOfProcess,
    ReplayRecord,
)
from replicax._src.program_kit.errors import InvalidArgumentError, UnsupportedError

_NAME: Final = "rx.testing.replay_groups"


@final
@dataclass(frozen=True)
class LoggedPush:
    """A push that a process took.

    Attributes:
      group: The number of its group.
      process: The number of its process among those of the group.
      fragment, number, tokens: As in the log.
    """

    group: int
    process: int
    fragment: int
    number: int
    tokens: int

    @property
    def order(self) -> tuple[int, int, int]:
        """The order in which a server has added the pushes of one group; of different groups it does not matter."""
        return self.group, self.process, self.number


@final
@dataclass(frozen=True)
class LoggedAdoption:
    """Outer parameters that a process adopted: see ``UnmergedProgress.adopt``."""

    fragment: int
    version: int
    keeps: tuple[int, ...]
    drops: bool


@final
@dataclass(frozen=True)
class LoggedCall:
    """A call of a group's program in which it exchanged.

    Attributes:
      call: The method; None for ``attach``.
      step: The steps that the process had counted.
      events: What it did, in order.
    """

    call: GroupCall | None
    step: int
    events: list[LoggedPush | LoggedAdoption]


@final
@dataclass(frozen=True)
class LoggedProcess:
    """A process of a group.

    Attributes:
      group: The number of the group.
      process: Its number among those of the group.
      header: That of the log.
      calls: Where it exchanged, in order. The first is ``attach``.
      created: The fragments that it has created.
    """

    group: int
    process: int
    header: Mapping[str, Any]
    calls: Sequence[LoggedCall]
    created: frozenset[int]

    @property
    def finish_step(self) -> int | None:
        """The number of steps after which it called ``finish``; None if it did not."""
        return next((each.step for each in self.calls if each.call is GroupCall.FINISH), None)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"group {self.group}" + (f" (process {self.process + 1})" if self.process else "")


@final
@dataclass(frozen=True)
class LoggedRound:
    """A round of a fragment: ``version`` is the version that it made."""

    fragment: int
    version: int
    is_flush: bool
    pushes: Sequence[LoggedPush]


@final
class ReplayPlan:
    """What a run did.

    Args:
      logs: The parts of the logs of all groups: for each log, those of its processes.

    Attributes:
      processes: All processes, those of one group in the order of their starts.
      num_groups: The number of groups.
      rounds: The rounds by fragment and version.
      outer_checksums: The checksums of outer parameters by fragment and version, each with the process that logged it.
      push_checksums: The checksums of the pushes that were answered.
      versions_of: The version that has a push, for pushes that are in one.
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
        self.rounds: dict[tuple[int, int], LoggedRound] = {}
        self.outer_checksums: defaultdict[tuple[int, int], list[tuple[LoggedProcess, int]]] = defaultdict(
            list
        )
        self.push_checksums: dict[LoggedPush, int] = {}
        self.versions_of: dict[LoggedPush, int] = {}
        self.num_adoptions: Counter[tuple[int, int]] = Counter()
        self._taken: dict[LoggedPush, None] = {}
        self._closed: dict[tuple[int, int], ReplayRecord] = {}
        self._instances: defaultdict[int, set[int]] = defaultdict(set)
        counts: Counter[int] = Counter()
        processes: list[LoggedProcess] = []
        for part in parts:
            group = part.header["group"]
            processes.append(self._read(group, counts[group], part))
            counts[group] += 1
        self.processes: Sequence[LoggedProcess] = processes
        self._check_servers()
        self._find_rounds()

    def _read(self, group: int, process: int, part: ReplayOfProcess) -> LoggedProcess:
        calls = [LoggedCall(None, 0, [])]
        taken: dict[tuple[int, int], LoggedPush] = {}
        keeps: list[int] = []
        outer: list[tuple[tuple[int, int], int]] = []
        created: set[int] = set()
        for record in part.records:
            fragment = record.fragment
            if record.instance:
                self._instances[fragment].add(record.instance)
            match record.kind:
                case ReplayKind.CALLED:
                    calls.append(LoggedCall(GroupCall(record.is_special), record.step, []))
                case ReplayKind.CREATED:
                    created.add(fragment)
                case ReplayKind.TAKEN:
                    tokens = min(record.tokens, MAX_TOKENS)
                    push = LoggedPush(group, process, fragment, record.number, tokens)
                    taken[fragment, record.number] = push
                    self._taken[push] = None
                    _call_at(calls, record.step).events.append(push)
                case ReplayKind.KEPT:
                    keeps.append(record.number)
                case ReplayKind.GIVEN:
                    raise UnsupportedError(_RESTARTED.format(_NAME, fragment))
                case ReplayKind.ADOPTED:
                    event = LoggedAdoption(fragment, record.version, tuple(keeps), bool(record.is_special))
                    keeps = []
                    _call_at(calls, record.step).events.append(event)
                    self.num_adoptions[fragment, record.version] += 1
                    outer.append(((fragment, record.version), record.checksum))
                case ReplayKind.LANDED:
                    push = taken[fragment, record.number]
                    self.push_checksums[push] = record.checksum
                    self.versions_of[push] = record.version
                case ReplayKind.CLOSED:
                    self._closed.setdefault((fragment, record.version), record)
        read = LoggedProcess(group, process, part.header, calls, frozenset(created))
        for key, checksum in outer:
            self.outer_checksums[key].append((read, checksum))
        return read

    def _check_servers(self) -> None:
        creations = Counter(fragment for each in self.processes for fragment in each.created)
        for fragment, instances in self._instances.items():
            if len(instances) > 1 or creations[fragment] > 1:
                raise UnsupportedError(_RESTARTED.format(_NAME, fragment))

    def _find_rounds(self) -> None:
        landed: defaultdict[tuple[int, int], list[LoggedPush]] = defaultdict(list)
        for push, version in self.versions_of.items():
            landed[push.fragment, version].append(push)
        unanswered = self._unanswered()
        for key, record in sorted(self._closed.items()):
            fragment, version = key
            known = landed.pop(key, [])
            candidates = [push for push in unanswered if push.fragment == fragment]
            found = next((some for some in _subsets(candidates) if _fits(record, [*known, *some])), None)
            if found is None:
                raise InvalidArgumentError(
                    f"{_NAME}: round {version} of fragment {fragment} has rows that no push in the logs has: it has "
                    f"{record.tokens} rows of the groups {_groups_of(record.members)}, and the logs have pushes of "
                    f"{[(each.group, each.tokens) for each in known]} (group, rows). Give the logs of all groups."
                )
            for push in found:
                unanswered.remove(push)
                self.versions_of[push] = version
            pushes = sorted([*known, *found], key=lambda each: each.order)
            self.rounds[key] = LoggedRound(fragment, version, bool(record.is_special), pushes)

    def _unanswered(self) -> list[LoggedPush]:
        """The last pushes of processes without an answer."""
        last: dict[tuple[int, int, int], LoggedPush] = {}
        for push in self._taken:
            last[push.group, push.process, push.fragment] = push
        return [push for push in last.values() if push not in self.versions_of]


def _call_at(calls: list[LoggedCall], step: int) -> LoggedCall:
    """The call that a record of this step belongs to."""
    if calls[-1].step != step:
        calls.append(LoggedCall(GroupCall.STEP, step, []))
    return calls[-1]


def _subsets(candidates: Sequence[LoggedPush]) -> Iterator[tuple[LoggedPush, ...]]:
    for size in range(len(candidates) + 1):
        yield from combinations(candidates, size)


def _fits(record: ReplayRecord, pushes: Sequence[LoggedPush]) -> bool:
    """True if a round with these pushes has the rows, and the groups, of the record."""
    tokens: Counter[int] = Counter()
    for push in pushes:
        tokens[push.group] = min(tokens[push.group] + push.tokens, MAX_TOKENS)
    members = sum(1 << group for group, rows in tokens.items() if rows and group < MOST_MEMBERS)
    return members == record.members and tokens.total() == record.tokens


def _groups_of(members: int) -> list[int]:
    return [group for group in range(MOST_MEMBERS) if members >> group & 1]


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
                f"{_NAME}: group {part.header['group']} had several processes. A replay has one process for all groups, "
                "which computes other bits than several. Replay runs whose groups have one process each."
            )
    return first["num_groups"]


_RESTARTED: Final = (
    "{}: the server of fragment {} was restarted, or the logs have two runs. Replay a run whose servers lived to its end, "
    "and give each run logs of its own."
)
