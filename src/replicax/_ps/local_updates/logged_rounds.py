"""``FragmentLog``: which pushes each round of a fragment had, found from the logs of all groups. Pure.

Most pushes have an answer in the log, which says the version that has them. If the process died before the answer, the
next process of its group says which version has the push. If there is none, it is in the round that lacks its rows. A
server that was restarted came back with the rounds and the pushes of its snapshot: each process has logged up to which
of its pushes, and those of others are in the round that lacks their rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final, final

from replicax._ps.local_updates.fragment_programs import MAX_TOKENS
from replicax._ps.local_updates.logged_events import LoggedPush, LoggedRound, ServedVersion
from replicax._ps.local_updates.replay_file import ReplayRecord
from replicax._src.program_kit.errors import InvalidArgumentError

_NAME: Final = "rx.testing.replay_groups"


@final
class FragmentLog:
    """What all groups have logged of one fragment. Give it the records of one process after the other.

    Args:
      fragment: Its number.

    Attributes:
      rounds: After ``find_rounds`` the rounds.
      origins: After it the versions with which servers came back, by the number of restarts.
    """

    def __init__(self, fragment: int):
        self.rounds: dict[ServedVersion, LoggedRound] = {}
        self.origins: dict[int, ServedVersion] = {}
        self._fragment = fragment
        self._closed: dict[ServedVersion, ReplayRecord] = {}
        self._least_adopted: dict[int, int] = {}  # by restarts
        self._claims: dict[
            tuple[int, int, int], int
        ] = {}  # by restarts, group and process: the last push there
        self._landed: defaultdict[int, dict[LoggedPush, int]] = defaultdict(dict)  # by restarts
        self._pending: defaultdict[int, list[LoggedPush]] = defaultdict(list)  # perhaps added, by restarts
        # The process that is read.
        self._restarts: int | None = None
        self._unanswered: LoggedPush | None = None

    # --- the records of one process -----------------------------------------------------------------

    def claimed(self, group: int, process: int, restarts: int, number: int) -> None:
        """The process has its slot, and the server has its pushes up to a number."""
        self._claims[restarts, group, process] = number
        self._note_pending()
        self._restarts = restarts

    def took_over(self, group: int, process: int, restarts: int, number: int, version: int) -> None:
        """The slot was that of an earlier process of the group, whose last push there has that number, and that version
        has it; 0 if none has it.
        """
        key = restarts, group, process
        if key not in self._claims:
            self._claims[key] = number  # it has not met this server, which came back with its pushes
        pending = [
            (each, push)
            for each, pushes in self._pending.items()
            for push in pushes
            if (push.group, push.process) == (group, process)
        ]
        for each, push in pending:
            if each == restarts:
                self._pending[each].remove(push)
            if push.number == number and version:
                self._landed[restarts][push] = version

    def taken(self, push: LoggedPush) -> None:
        """The process has taken a push."""
        self._unanswered = push

    def landed(self, push: LoggedPush, version: int) -> None:
        """The server has answered that a version has the push."""
        assert self._restarts is not None
        self._unanswered = None
        self._landed[self._restarts][push] = version

    def adopted(self, served: ServedVersion) -> None:
        """The process has adopted a version."""
        least = self._least_adopted.get(served.restarts, served.version)
        self._least_adopted[served.restarts] = min(least, served.version)

    def closed(self, served: ServedVersion, record: ReplayRecord) -> None:
        """A round has closed."""
        self._closed.setdefault(served, record)

    def ended(self) -> None:
        """The log of the process has ended."""
        self._note_pending()
        self._restarts = self._unanswered = None

    def _note_pending(self) -> None:
        """The server may have added a push without an answer."""
        if self._unanswered is not None and self._restarts is not None:
            self._pending[self._restarts].append(self._unanswered)

    # --- the rounds ---------------------------------------------------------------------------------

    def find_rounds(self, num_servers: int) -> None:
        """Finds all rounds.

        Raises:
          InvalidArgumentError: No pushes have the rows of a round.
        """
        versions = {0: ServedVersion(0, 0)}  # those of the server, wherever they were made
        entered: dict[LoggedPush, int] = {}  # the version that has a push, on this server
        candidates: list[tuple[LoggedPush, int | None]] = []  # pushes that it may have, and in which version
        for restarts in range(num_servers):
            candidates = [
                (push, version)
                for push, version in candidates
                if version not in versions
                and not self._knows(restarts, push)
                and not _is_past(push, versions, entered)
            ]
            candidates += [(push, None) for push in self._pending[restarts]]
            if restarts:
                origin = self._origin(restarts, versions, entered)
                self.origins[restarts] = versions[origin]
                versions = {each: served for each, served in versions.items() if each <= origin}
                versions[origin] = ServedVersion(restarts, origin)
                later = {push: version for push, version in entered.items() if version > origin}
                for push, version in later.items():
                    if not self._is_there(restarts, num_servers, push):
                        del entered[push]
                        if not self._knows(restarts, push):
                            candidates.append((push, version))
            entered |= self._landed[restarts]
            for served in sorted(each for each in self._closed if each.restarts == restarts):
                if served.version in versions:
                    continue
                self._find_round(served, entered, candidates)
                versions[served.version] = served

    def _knows(self, restarts: int, push: LoggedPush) -> bool:
        """True if the process of a push has met a server."""
        return (restarts, push.group, push.process) in self._claims

    def _is_there(self, restarts: int, num_servers: int, push: LoggedPush) -> bool:
        """True if a server came back with a push: its process has met this server, or a later one, that has it."""
        keys = ((each, push.group, push.process) for each in range(restarts, num_servers))
        last = next((self._claims[key] for key in keys if key in self._claims), 0)
        return push.number <= last

    def _origin(
        self, restarts: int, versions: dict[int, ServedVersion], entered: dict[LoggedPush, int]
    ) -> int:
        """Returns the version with which a server came back; or an earlier one, if its next rounds were the same."""
        bounds = [max(versions)]
        if restarts in self._least_adopted:
            bounds.append(self._least_adopted[restarts])
        bounds += [version - 1 for version in self._landed[restarts].values()]
        for push, version in entered.items():
            last = self._claims.get((restarts, push.group, push.process))
            if last is not None and push.number > last:
                bounds.append(version - 1)
        for version, served in versions.items():
            one, other = self._closed.get(served), self._closed.get(ServedVersion(restarts, version))
            if one is not None and other is not None and _rows(one) != _rows(other):
                bounds.append(version - 1)
        return max(each for each in versions if each <= max(0, min(bounds)))

    def _find_round(
        self,
        served: ServedVersion,
        entered: dict[LoggedPush, int],
        candidates: list[tuple[LoggedPush, int | None]],
    ) -> None:
        record, version = self._closed[served], served.version
        known = [push for push, each in entered.items() if each == version]
        possible = [
            each
            for each in candidates
            if each[1] in (None, version) and each[0] not in known and _in_order(each[0], version, entered)
        ]
        possible.sort(key=lambda each: each[0].order)
        found = next(
            (some for some in _subsets(possible) if _fits(record, [*known, *(push for push, _ in some)])),
            None,
        )
        if found is None:
            raise InvalidArgumentError(
                f"{_NAME}: round {served} of fragment {self._fragment} has rows that no push in the logs has: it has "
                f"{list(record.rows)} rows of groups 0 to {len(record.rows) - 1}, and the logs have pushes of "
                f"{[(each.group, each.tokens) for each in known]} (group, rows). Give the logs of all groups."
            )
        for each in found:
            candidates.remove(each)
            entered[each[0]] = version
        pushes = sorted([*known, *(push for push, _ in found)], key=lambda each: each.order)
        self.rounds[served] = LoggedRound(self._fragment, served, bool(record.is_special), pushes)


def _rows(record: ReplayRecord) -> tuple[int, tuple[int, ...]]:
    return record.is_special, record.rows


def _subsets(
    candidates: Sequence[tuple[LoggedPush, int | None]],
) -> Iterator[tuple[tuple[LoggedPush, int | None], ...]]:
    for size in range(len(candidates) + 1):
        yield from combinations(candidates, size)


def _fits(record: ReplayRecord, pushes: Sequence[LoggedPush]) -> bool:
    """True if a round with these pushes has the rows of the record."""
    rows: Counter[int] = Counter()
    for push in pushes:
        rows[push.group] = min(rows[push.group] + push.tokens, MAX_TOKENS)
    return +rows == +Counter(dict(enumerate(record.rows)))


def _in_order(push: LoggedPush, version: int, entered: Mapping[LoggedPush, int]) -> bool:
    """True if a version may have a push: a server adds the pushes of a group in their order."""
    return all(
        each.order < push.order if there < version else each.order > push.order
        for each, there in entered.items()
        if each.group == push.group and there != version
    )


def _is_past(push: LoggedPush, closed: Container[int], entered: Mapping[LoggedPush, int]) -> bool:
    """True if a server without a push has not had it: a version has closed that has a later push of the group."""
    return any(
        each.group == push.group and each.order > push.order and version in closed
        for each, version in entered.items()
    )
