"""``ServerMonitor``: watches the parameter servers for the worker pool, and pauses or ends the job when they are
lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.ps_recovery import OnPsRestart, Recovery
from replicax._ps.coordinator.ps_replication import Replication
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._ps.coordinator.round_keeper import RoundKeeper
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool


@final
class ServerMonitor:
    """Watches each parameter server, and decides what the pool does when one is silent, lost, restarted or back.

    Args:
      session: The session with the tasks.
      pool: The pool to pause, resume, or end.
      limits: The timeouts.
      on_ps_restart: See ``ClusterCoordinator``.
    """

    def __init__(self, session: Session, pool: WorkerPool, limits: Limits, on_ps_restart: OnPsRestart):
        self._pool = pool
        self._recovery = Recovery(session, pool, on_ps_restart)
        comes_back = [0.0 if s is None else limits.reconnect_s for s in session.snapshot_intervals_s]
        self._watches = [
            PsWatch(number, session, limits, self, comes_back_s if session.groups is None else 0.0)
            for number, comes_back_s in enumerate(comes_back)
        ]
        self._replication = None
        if session.groups is not None:
            self._replication = Replication(session, pool, self._tell_primaries, min(comes_back))
        self._rounds = [RoundKeeper(session, pool, self)] if pool.has_rounds else []

    def start(self) -> None:
        """Starts the threads."""
        self._recovery.start(self._watches)
        for task in (*self._watches, *self._rounds):
            task.start()

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        for task in (*self._watches, *self._rounds, self._recovery):
            task.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads to end."""
        until = time.monotonic() + timeout_s
        for task in (*self._watches, *self._rounds, self._recovery):
            task.join(max(0.0, until - time.monotonic()))

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of each parameter server, and of the replication."""
        return {
            "ps": {watch.name: watch.statistics() for watch in self._watches},
            "replication": None if self._replication is None else self._replication.statistics(),
        }

    # --- callbacks of the threads ----------------------------------------------------------------------

    def note_failure(self, task: str | None) -> bool:
        """Handles a closure that could not use a parameter server; None if it is unknown which.

        Returns True if the server or its other copy may come back. The closure is then retried more often.
        """
        any_of = task is None or self._replication is not None
        met = [watch for watch in self._watches if any_of or watch.name == task]
        for watch in met:
            self._pause(watch)  # until the server has answered, so that no closure is tried in vain
            watch.probe()
        return self._replication is not None or any(watch.comes_back_s for watch in met)

    def _tell_primaries(self) -> None:
        for worker in self._pool.workers:
            worker.send_primaries()

    def on_ps_silent(self, watch: PsWatch) -> None:
        self._pause(watch)
        if self._replication is not None and (error := self._replication.silent(watch)) is not None:
            self._broke(watch, error)

    def _pause(self, watch: PsWatch) -> None:
        """Stops sending closures to workers until the server is back, if it can come back."""
        if watch.comes_back_s:
            self._pool.pause(watch.name)

    def on_ps_given_up(self, watch: PsWatch, client: TaskClient) -> None:
        if self._replication is not None:
            self._replication.given_up(client)

    def on_ps_restarted(self, watch: PsWatch, client: TaskClient) -> UnavailableError | None:
        return (self._replication or self._recovery).restarted(watch, client)

    def on_ps_lost(self, watch: PsWatch, error: BaseException, *, may_come_back: bool) -> bool:
        if self._replication is not None and isinstance(error, UnavailableError):
            left = self._replication.lost(watch, error)
            if left is None:
                return True
            error = left
        if may_come_back:
            self._pool.pause(watch.name)
            return False
        self._broke(watch, error)
        return True

    def _broke(self, watch: PsWatch, error: BaseException) -> None:
        self._pool.broke(error, watch.name)

    def on_ps_back(self, watch: PsWatch) -> None:
        if self._replication is not None:
            self._replication.back(watch)
        self._pool.resume(watch.name)
        self._pool.mended(watch.name)
