"""``Syncers``: one group's connections to the parameter servers through which groups exchange.

All groups share one session, which no coordinator begins: the first group that comes begins it on each server, and it
ends when all groups have left, or are silent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._ps.client.tasks import ask_each
from replicax._ps.client.wait_rules import Awaited
from replicax._ps.client.waiting import wait_for
from replicax._ps.local_updates.group_settings import GroupSettings
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import InvalidArgumentError, StaleCoordinatorError, UnavailableError

log = logging.getLogger("replicax")
_SESSION: Final = "groups"
_SETTINGS_KEY: Final = "local updates/settings"
_HEARTBEAT_S: Final = 5.0
_REQUEST_S: Final = 30.0
_GREETING_S: Final = 5.0
_SNAPSHOT_S: Final = 300.0
_LEAVE_S: Final = 2.0
_LOOK_S: Final = 0.05


@final
class Syncers:
    """The servers of the fragments, and the session on them. ``close`` ends its thread and its connections.

    Args:
      addresses: Their addresses, in the same order in all groups.
      member: The number of the group.
      num_members: The number of groups.
    """

    def __init__(self, addresses: Sequence[str], member: int, num_members: int):
        credentials = Credentials.from_environment(os.environ)
        self._addresses = tuple(addresses)
        self._clients = [
            TaskClient(address, credentials, f"syncer {index}") for index, address in enumerate(addresses)
        ]
        self._name = f"group {member}"
        members = [f"group {each}" for each in range(num_members)]
        self._described = {"incarnation": _SESSION, "member": self._name, "members": members}
        self._greeted: dict[int, Mapping[str, Any]] = {}  # what each server has answered first
        self._closing = threading.Event()
        self._heartbeats = threading.Thread(target=self._beat, name="replicax group heartbeats", daemon=True)

    def __len__(self) -> int:
        return len(self._clients)

    def greet(self, limit_s: float) -> None:
        """Joins the session on all servers. Logs which ones it waits for.

        Raises:
          UnavailableError: A server does not answer in time.
          UnauthenticatedError: They have other credentials.
          StaleCoordinatorError: A server serves the coordinator of another job.
        """
        greeted = self._greeted

        def missing() -> Awaited | None:
            lacking = ask_each(self._clients, "hello", self._hello, greeted)
            if not lacking:
                return None
            first, why = next(iter(lacking.items()))
            names = [f"syncer {index} ({self._addresses[index]})" for index in lacking]
            return Awaited(
                ", ".join(names),
                f"{why} Check that `replicax server` runs there, and that REPLICAX_SYNCERS names it in all groups.",
                f"syncer {first}",
            )

        wait_for(missing, self._name, limit_s)
        self._heartbeats.start()

    def agree(self, settings: GroupSettings) -> None:
        """Stores the settings on servers that have none, and compares them with those of the group that was first.

        Raises:
          InvalidArgumentError: They differ.
        """
        text = np.frombuffer(settings.encoded(), np.uint8)
        shard = {"key": _SETTINGS_KEY, "shape": [text.size], "dtype": "uint8", "initial": "array"}
        for index in range(len(self)):
            ask = self.asking(index)
            if not ask(Message({"op": "find", "keys": [_SETTINGS_KEY]})).header["found"]:
                try:
                    ask(Message({"op": "create", "shards": [shard], "if_absent": True}, [text]))
                except (
                    InvalidArgumentError
                ) as error:  # another group came first, with a text of another length
                    log.debug("%s", error)
            pull = {"op": "step", "closure": None, "program": None, "pull": [[_SETTINGS_KEY, None]]}
            stored = np.asarray(ask(Message(pull)).arrays[0])
            settings.check_like(GroupSettings.decoded(stored.tobytes()))

    def asking(self, index: int) -> Callable[[Message], Message]:
        """Returns the function that asks one server, and joins its session again if it has restarted."""
        client = self._clients[index]

        def ask(message: Message) -> Message:
            sent = Message({**message.header, "incarnation": _SESSION}, message.arrays)
            try:
                return client.call(sent, _REQUEST_S)
            except (UnavailableError, StaleCoordinatorError):
                if self._closing.is_set():
                    raise
                client.ask("hello", self._hello, _GREETING_S)
            return client.call(sent, _REQUEST_S)

        return ask

    def snapshot(self) -> None:
        """Has the servers that keep snapshots write one now: what the next run begins from."""
        for index, client in enumerate(self._clients):
            if self._greeted[index]["snapshots"] is not None:
                try:
                    client.ask("snapshot", {"incarnation": _SESSION, "epoch": 0}, _SNAPSHOT_S)
                except Exception as error:
                    log.warning(
                        "Syncer %d has not written its last snapshot. Another run begins from an earlier one: %s",
                        index,
                        error,
                    )

    def statistics(self) -> dict[str, int]:
        """Counts bytes in both directions."""
        counts = [client.statistics() for client in self._clients]
        return {way: sum(each[way] for each in counts) for way in ("bytes_in", "bytes_out")}

    def leave(self, *, waits: bool) -> None:
        """Tells the servers, which drop all values when the last group has left, and ends the connections.

        Args:
          waits: True to wait a moment for the other groups, which leave too. A group that begins again before that
            would join the session that ends.
        """
        self._end_heartbeats()
        before = self._instances() if waits else {}
        self._ask_all("leave")
        give_up_at = time.monotonic() + _LEAVE_S
        while waits and before.items() & self._instances().items() and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Ends the connections. The group may come back."""
        self._end_heartbeats()
        for client in self._clients:
            client.close()

    def _end_heartbeats(self) -> None:
        self._closing.set()
        if self._heartbeats.ident is not None:
            self._heartbeats.join(2 * _GREETING_S)

    def _instances(self) -> dict[int, str]:
        """Returns the instances of the servers that answer. A server that has dropped all values is another one."""
        told: dict[int, Mapping[str, Any]] = {}
        ask_each(self._clients, "status", {}, told)
        return {index: each["instance"] for index, each in told.items()}

    @property
    def _hello(self) -> dict[str, Any]:
        return {**self._described, "ps": list(self._addresses), "again": True}

    def _beat(self) -> None:
        while not self._closing.wait(_HEARTBEAT_S):
            self._ask_all("heartbeat")

    def _ask_all(self, what: str) -> None:
        for client in self._clients:
            try:
                client.ask(what, self._described, _GREETING_S)
            except Exception as error:
                log.debug("%s", error)  # the next exchange gets the error
