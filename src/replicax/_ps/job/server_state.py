"""``ServerState``: what a job knows of one parameter server. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class ServerState:
    """One parameter server, and the processes that it has been.

    A server is *replaced* from the moment at which another process than the accepted one has answered, or may have
    another state, until an instance is accepted. Answers of an earlier instance, which come late, then count no more.

    Args:
      index: The server's number.
      instance: The id of the process that has the job's variables.
      comes_back_s: The longest wait for the server; 0 if it has no snapshots of its own.

    Attributes:
      instance: The accepted process.
      last_instance: The newest process that has answered.
      is_replaced: See above.
      is_lost: True from its loss until it is back.
      is_broken: True if the job is broken because of it.
      num_silent: The number of heartbeats in a row that had no answer.
      changed_at: The time of the first answer of the newest process; 0 while only one process has answered.
      num_updates: The number of updates in its last statistics.
    """

    def __init__(self, index: int, instance: str, comes_back_s: float = 0.0):
        self.name, self.index, self.comes_back_s = f"ps {index}", index, comes_back_s
        self.instance = self.last_instance = instance
        self.is_replaced = self.is_lost = self.is_broken = False
        self.num_silent = self.num_updates = 0
        self.changed_at = 0.0
        self.heartbeat: Mapping[str, Any] = {}
        self._seen = {instance}
        self._accepted = {instance}
        self._num_restarts = 0

    @property
    def seen(self) -> frozenset[str]:
        """The instances of all processes that have answered."""
        return frozenset(self._seen)

    def knows(self, instance: str) -> bool:
        """True if the server is, or was, the process with this instance id, with the job's variables."""
        return instance in self._accepted

    def answered(self, instance: str, now: float) -> None:
        """Records which process has answered. A late answer, of a process before the last one, is ignored."""
        if instance in self._seen and instance != self.last_instance:
            return
        if instance not in self._seen:
            self._seen.add(instance)
            self.changed_at = now
        if instance != self.last_instance:
            self._num_restarts += 1
            self.last_instance = instance
        if not self.knows(instance):
            self.is_replaced = True

    def accept(self, instance: str) -> None:
        """Takes a process as the server from now on."""
        self._seen.add(instance)
        self._accepted.add(instance)
        self.instance = instance
        self.is_replaced = False

    def note(self, statistics: Mapping[str, Any]) -> str:
        """Records the statistics of a heartbeat. Returns an error of its snapshots if that is new; "" otherwise."""
        failure = statistics.get("snapshot_error") or ""
        is_new = failure and not self.heartbeat.get("snapshot_error")
        self.heartbeat, self.num_updates = dict(statistics), statistics.get("updates", 0)
        return failure if is_new else ""

    def statistics(self) -> dict[str, Any]:
        """Returns whether it answers, how often it restarted, and its last statistics."""
        return {
            "connected": not self.is_lost,
            "restarts": self._num_restarts,
            "statistics": dict(self.heartbeat),
        }

    @property
    def hint(self) -> str:
        """Advice for a message, on how to avoid the loss the next time."""
        if self.comes_back_s:
            return ""
        return (
            " With snapshot_dir in its rx.ServerOptions (--snapshot-dir) it resumes from its last snapshot when it "
            "restarts, and the program continues."
        )
