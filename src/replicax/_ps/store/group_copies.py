"""``GroupCopies``: the copies of groups that one parameter server holds for one coordinator, by group number."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._ps.store.group_copy import GroupCopy
from replicax._ps.store.group_rules import View
from replicax._ps.store.log import DEFAULT_LOG_BYTES
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

_FROM_PRIMARY = frozenset({"forward", "copy"})
_HELD = ("shards", "bytes", "programs", "gradient_bytes", "num_snapshots")


@final
class GroupCopies:
    """The copies of groups on one server. It is empty until the coordinator assigns some.

    Args:
      task: The number of this server.
      incarnation: The session id of the coordinator.
      connect: Returns a client of a parameter server, given its number and its address.
      log_bytes: The most memory that each group uses for updates that its backup lacks.
      keep: Makes the snapshot keeper of a group's copy; its bool says if the keeper restores. None turns
        snapshots off.

    Attributes:
      incarnation: The session id of the coordinator.
    """

    def __init__(
        self,
        task: int,
        incarnation: str,
        connect: Callable[[int, str], TaskClient],
        log_bytes: int = DEFAULT_LOG_BYTES,
        keep: Callable[[int, bool, GroupCopy], SnapshotKeeper] | None = None,
    ):
        self.incarnation = incarnation
        self._task, self._connect = task, connect
        self._log_bytes, self._keep = log_bytes, keep
        self._lock = threading.Lock()
        self._copies: dict[int, GroupCopy] = {}
        self._addresses: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._copies)

    def take(self, view: View, addresses: list[str]) -> None:
        """Applies the coordinator's decision about which servers hold a group.

        Args:
          view: The servers that hold the group.
          addresses: The addresses of all parameter servers, in order.

        Raises:
          InvalidArgumentError: This server lacks data that its role in the view needs.
        """
        with self._lock:
            self._addresses = addresses
            copy = self._copies.get(view.group) or self._add(view.group)
        copy.take(view)

    def restore(self, group: int) -> None:
        """Restores a group from the snapshots of this coordinator.

        Raises:
          SnapshotError: No snapshot can be read.
        """
        with self._lock:
            self._add(group, restores=True)

    @property
    def restored(self) -> dict[str, Any]:
        """Returns a description of the restored snapshot of each group."""
        return {
            str(group): copy.restored for group, copy in self._copies.items() if copy.restored is not None
        }

    def _add(self, group: int, *, restores: bool = False) -> GroupCopy:
        connect = lambda task: self._connect(task, self._addresses[task])  # noqa: E731
        keep = None if self._keep is None else functools.partial(self._keep, group, restores)
        copy = GroupCopy(group, self._task, self.incarnation, connect, self._log_bytes, keep)
        self._copies[group] = copy
        return copy

    def answer(self, message: Message) -> Message:
        """Executes a request of a client or of the primary of a group. Other errors than the one below are the
        store's.

        Raises:
          UnavailableError: This server does not hold the group, or does not serve it.
        """
        group = message.header["group"]
        copy = self._copies.get(group)
        if copy is None:
            raise UnavailableError(f"ps {self._task} does not hold group {group} in its newest view.")
        if message.header.get("op") in _FROM_PRIMARY:
            return copy.forwarded(message)
        return copy.answer(message)

    def statistics(self) -> dict[str, Any]:
        """Sums what all stores hold and what the stores that this server serves have done. ``groups`` has its
        role in each.
        """
        counts: Counter[str] = Counter()
        served: list[dict[str, Any]] = []
        error = ""
        for copy in list(self._copies.values()):
            statistics = copy.statistics()
            names = statistics if copy.is_primary else _HELD
            counts.update({name: statistics[name] for name in names if type(statistics.get(name)) is int})
            served += [statistics] if copy.is_primary else []
            error = error or statistics.get("snapshot_error", "")
        staleness = max((each["staleness"] for each in served), key=lambda s: s["num"], default=None)
        told = {"updates": 0, **counts, "staleness": staleness, "groups": self.described()}
        return told if self._keep is None else {**told, "snapshot_error": error}

    def described(self) -> Mapping[str, Any]:
        """Returns the role of this server in each group."""
        return {str(group): copy.described() for group, copy in sorted(self._copies.items())}

    def close_keepers(self) -> None:
        """Takes a last snapshot of each group, while the stores still exist."""
        for copy in list(self._copies.values()):
            copy.close_keeper()

    def close(self) -> None:
        """Closes and drops all copies."""
        with self._lock:
            copies, self._copies = self._copies, {}
        for copy in copies.values():
            copy.close()
