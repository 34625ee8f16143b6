"""``GroupCopies``: the copies of groups that one parameter server has for one coordinator, by number of the group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.ps.errors import UnavailableError
from replicax._src.ps.group_copy import GroupCopy
from replicax._src.ps.group_rules import View
from replicax._src.ps.log import DEFAULT_LOG_BYTES
from replicax._src.ps.messages import Message
from replicax._src.ps.requests import field_of
from replicax._src.ps.server_stream import PsClient

_FROM_PRIMARY = frozenset({"forward", "copy"})
_HELD = ("pieces", "bytes", "programs", "gradient_bytes")


@final
class GroupCopies:
    """None, until the coordinator has said that there are some.

    Args:
      task: The number of this server.
      incarnation: Of the coordinator.
      connect: Gives a client of a parameter server, by its number and its address.
      log_bytes: The most memory that each group uses for updates that its backup lacks.
    """

    def __init__(
        self,
        task: int,
        incarnation: str,
        connect: Callable[[int, str], PsClient],
        log_bytes: int = DEFAULT_LOG_BYTES,
    ):
        self._task, self._incarnation, self._connect = task, incarnation, connect
        self._log_bytes = log_bytes
        self._lock = threading.Lock()
        self._copies: dict[int, GroupCopy] = {}
        self._addresses: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._copies)

    def take(self, view: View, addresses: list[str]) -> None:
        """The coordinator has decided who has a group.

        Args:
          addresses: Of all parameter servers, in order.

        Raises:
          InvalidArgumentError: This server does not have what it would need.
        """
        with self._lock:
            self._addresses = addresses
            copy = self._copies.get(view.group)
            if copy is None:
                connect = lambda task: self._connect(task, self._addresses[task])  # noqa: E731
                copy = GroupCopy(view.group, self._task, self._incarnation, connect, self._log_bytes)
                self._copies[view.group] = copy
        copy.take(view)

    def answer(self, message: Message) -> Message:
        """Does what a client, or the primary of a group, asks.

        Raises:
          UnavailableError: This server does not have the group, or does not serve it.
          Other errors are the store's.
        """
        group = field_of(message.header, "group", int)
        copy = self._copies.get(group)
        if copy is None:
            raise UnavailableError(f"ps {self._task} does not have group {group}, as far as it knows.")
        if message.header.get("op") in _FROM_PRIMARY:
            return copy.forwarded(message)
        return copy.answer(message)

    def statistics(self) -> dict[str, Any]:
        """Of all stores together what is held; what was done of those that it serves; and ``groups``: what part it has
        in each.
        """
        counts: Counter[str] = Counter()
        served: list[dict[str, Any]] = []
        for copy in list(self._copies.values()):
            statistics = copy.statistics()
            names = statistics if copy.is_primary else _HELD
            counts.update({name: statistics[name] for name in names if type(statistics[name]) is int})
            served += [statistics] if copy.is_primary else []
        staleness = max((each["staleness"] for each in served), key=lambda s: s["num"], default=None)
        return {"updates": 0, **counts, "staleness": staleness, "groups": self.described()}

    def described(self) -> Mapping[str, Any]:
        """By group, the part that this server has."""
        return {str(group): copy.described() for group, copy in sorted(self._copies.items())}

    def close(self) -> None:
        """Drops all."""
        with self._lock:
            copies, self._copies = self._copies, {}
        for copy in copies.values():
            copy.close()
