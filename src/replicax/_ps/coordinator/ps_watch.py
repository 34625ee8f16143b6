"""``PsWatch``: sends heartbeats to one parameter server, and notices if it is another process than before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.limits import Limits
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

log = logging.getLogger("replicax")


class PsEvents(Protocol):
    """Callbacks of watches, called in their threads."""

    def on_ps_silent(self, watch: PsWatch) -> None:
        """The server missed one heartbeat."""
        ...

    def on_ps_lost(self, watch: PsWatch, error: BaseException, *, may_come_back: bool) -> bool:
        """The server is lost; called once until it is back. A False result, if it may come back, makes the watch call
        again.
        """
        ...

    def on_ps_back(self, watch: PsWatch) -> None:
        """The server answers, as the same process."""
        ...

    def on_ps_given_up(self, watch: PsWatch, client: TaskClient) -> None:
        """A lost server answers, but has ended this coordinator's session; called at each heartbeat."""
        ...

    def on_ps_restarted(self, watch: PsWatch, client: TaskClient) -> UnavailableError | None:
        """The server is another process. Returns an error if it is lost, or None once its ``instance`` is accepted.

        Raises:
          Exception: The state is unknown; the watch calls again.
        """
        ...


@final
class PsWatch:
    """The heartbeats of one parameter server.

    Args:
      index: The server's number.
      session: The session with the tasks.
      limits: The timeouts.
      events: The callbacks.
      comes_back_s: The longest wait for a silent server; 0 if it has no snapshots.

    Attributes:
      num_updates: The number of updates in the server's last statistics.
    """

    def __init__(
        self, index: int, session: Session, limits: Limits, events: PsEvents, comes_back_s: float = 0.0
    ):
        self.name, self.index = f"ps {index}", index
        self._session, self._limits, self._events = session, limits, events
        self.comes_back_s = comes_back_s
        self.num_updates = 0
        self._instance: Any = None
        self._past: set[Any] = set()
        self._last_instance: Any = None
        self._num_restarts = 0
        self._is_lost = False
        self._is_closing = False
        self._hurry = threading.Event()
        self._heartbeat: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._watch, name=f"replicax-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def probe(self) -> None:
        """Sends a heartbeat now."""
        self._hurry.set()

    def knows(self, instance: Any) -> bool:
        """True if the server is, or was, the process with this instance id."""
        return instance == self._instance or instance in self._past

    def accept(self, instance: Any) -> None:
        """Accepts an instance as the server from now on."""
        self._past.add(self._instance)
        self._instance = instance

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._is_closing = True
        self._hurry.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def statistics(self) -> dict[str, Any]:
        """Returns whether it answers, how often it restarted, and its last statistics."""
        return {
            "connected": not self._is_lost,
            "restarts": self._num_restarts,
            "statistics": dict(self._heartbeat),
        }

    def _watch(self) -> None:
        client, missed, since = self._session.connect("ps", self.index), 0, 0.0
        try:
            while not self._is_closing:
                try:
                    header = {"incarnation": self._session.incarnation}
                    answer = client.ask("heartbeat", header, self._limits.heartbeat_timeout_s)
                    self._heard(answer, client)
                    missed = 0
                except StaleCoordinatorError as error:
                    if self._is_lost:
                        self._events.on_ps_given_up(self, client)
                    self._lose(error)
                except Exception as error:
                    missed += 1
                    since = time.monotonic() if missed == 1 else since
                    self._events.on_ps_silent(self)
                    if missed >= self._limits.ps_missed_heartbeats:
                        limit_s = self._waits_s(error)
                        may_come_back = time.monotonic() - since < limit_s
                        is_refused = not self._lose(
                            self._unavailable(error, limit_s), may_come_back=may_come_back
                        )
                        if is_refused and missed == self._limits.ps_missed_heartbeats:
                            log.warning(
                                "%s does not answer. Waiting up to %g s for it: %s", self.name, limit_s, error
                            )
                if self._hurry.wait(self._limits.heartbeat_s if not missed else self._limits.heartbeat_s / 4):
                    self._hurry.clear()
        finally:
            client.close()

    def _heard(self, answer: Mapping[str, Any], client: TaskClient) -> None:
        instance = answer.get("instance")
        self._num_restarts += self._last_instance not in (None, instance)
        self._last_instance = instance
        if self._instance is None:
            self._instance = instance
        if not self.knows(instance):
            error = self._events.on_ps_restarted(self, client)
            if error is not None:
                self._lose(error)
                return
        else:
            self._note(answer.get("statistics") or {})
        self._events.on_ps_back(self)  # first: a thread that sees it connected may use it
        self._is_lost = False

    def _note(self, statistics: Mapping[str, Any]) -> None:
        failure = statistics.get("snapshot_error")
        if failure and not self._heartbeat.get("snapshot_error"):
            log.warning("%s continues without a new snapshot, and will try again: %s", self.name, failure)
        self._heartbeat, self.num_updates = dict(statistics), statistics.get("updates", 0)

    def _waits_s(self, error: Exception) -> float:
        """Returns the longest wait for the server."""
        is_silent = isinstance(error, UnavailableError) and error.is_silent
        return max(self.comes_back_s, self._limits.ps_silence_s if is_silent else 0.0)

    def _unavailable(self, error: Exception, waited_s: float) -> UnavailableError:
        what = "Restart it and the program, from a checkpoint."
        if waited_s:
            what = f"The coordinator waited {waited_s:g} s for it. {what}"
        return UnavailableError(f"{self.name} is lost: {error} {what}{self.hint}", self.name)

    @property
    def hint(self) -> str:
        """Advice for a message, on how to avoid the loss the next time."""
        if self.comes_back_s:
            return ""
        return (
            " With snapshot_dir in its rx.ServerOptions (--snapshot-dir) it resumes from its last snapshot when it "
            "restarts, and the program continues."
        )

    def _lose(self, error: BaseException, *, may_come_back: bool = False) -> bool:
        if not self._is_lost and not self._is_closing:
            # Call this first: a thread that sees the lost state must get the error.
            self._is_lost = self._events.on_ps_lost(self, error, may_come_back=may_come_back)
        return self._is_lost
