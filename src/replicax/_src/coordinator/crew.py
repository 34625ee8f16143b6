"""``Crew``: all tasks of the cluster as the coordinator sees them.

It does not know the coordinator, which may be dropped.
"""

from __future__ import annotations

import threading
import time
from typing import Any, final

from replicax._src.coordinator.closures import ClosureQueue
from replicax._src.coordinator.dispatch import Dispatch
from replicax._src.coordinator.prepared import Client, Session
from replicax._src.coordinator.ps_recovery import OnPsRestart, Recovery
from replicax._src.coordinator.ps_replication import Replication
from replicax._src.coordinator.ps_watch import PsWatch
from replicax._src.coordinator.resources import Resource, Resources
from replicax._src.coordinator.round_keeper import RoundKeeper
from replicax._src.coordinator.workers import Limits, RemoteWorker
from replicax._src.ps.errors import UnavailableError

_END_S = 15.0


@final
class Crew:
    """The threads that keep workers busy and watch parameter servers.

    Attributes:
      dispatch: The closures.
      resources: What workers make for themselves.
    """

    def __init__(
        self, session: Session, queue: ClosureQueue, limits: Limits, on_ps_restart: OnPsRestart = "continue"
    ):
        self.dispatch = Dispatch(queue)
        self._recovery = Recovery(session, self.dispatch, on_ps_restart)
        self.resources = Resources()
        self._lock = threading.Lock()
        self._given_up: dict[str, BaseException] = {}
        self._lost_ps: dict[str, BaseException] = {}
        self.workers = [
            RemoteWorker(
                number, session, self.dispatch, self.resources, limits, self._on_ps_trouble, self._on_given_up
            )
            for number in range(session.num_workers)
        ]
        comes_back = [0.0 if s is None else limits.reconnect_s for s in session.snapshot_intervals_s]
        self.watches = [
            PsWatch(number, session, limits, self, comes_back_s if session.groups is None else 0.0)
            for number, comes_back_s in enumerate(comes_back)
        ]
        self._replication = None
        if session.groups is not None:
            self._replication = Replication(session, self.dispatch, self._tell_primaries, min(comes_back))
        self._rounds = [RoundKeeper(session, self.dispatch, self._on_ps_trouble)] if queue.rounds else []

    def start(self) -> None:
        self._recovery.start(self.watches)
        for task in (*self.workers, *self.watches, *self._rounds):
            task.start()

    def add(self, resource: Resource) -> None:
        """Has all workers make something."""
        self.resources.add(resource)
        for worker in self.workers:
            worker.port.poke()

    def close(self) -> None:
        """Cancels all closures and ends the threads; does not wait for them. May be called again."""
        self.dispatch.close()
        self.resources.close()
        for task in (*self.workers, *self.watches, *self._rounds, self._recovery):
            task.close()

    def join(self, timeout_s: float = _END_S) -> None:
        """Waits for the threads to end."""
        until = time.monotonic() + timeout_s
        for task in (*self.workers, *self.watches, *self._rounds, self._recovery):
            task.join(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Closes, and waits for the threads."""
        self.close()
        self.join()

    def statistics(self) -> dict[str, Any]:
        """Of the closures, and of each task."""
        with self._lock:
            given_up = set(self._given_up)
        return {
            "closures": self.dispatch.statistics(),
            "workers": {
                worker.name: {**worker.statistics(), "given_up": worker.name in given_up}
                for worker in self.workers
            },
            "ps": {watch.name: watch.statistics() for watch in self.watches},
            "replication": None if self._replication is None else self._replication.statistics(),
        }

    # --- from the threads ------------------------------------------------------------------------------

    def _on_ps_trouble(self, task: str | None) -> bool:
        """A closure could not use a parameter server, or some. Returns whether it comes back after it died."""
        # (With replication it may have asked two.)
        any_of = task is None or self._replication is not None
        met = [watch for watch in self.watches if any_of or watch.name == task]
        for watch in met:
            self._pause(watch)  # until it has answered, so that nothing is tried in vain
            watch.look()
        return self._replication is not None or any(watch.comes_back_s for watch in met)

    def _tell_primaries(self) -> None:
        for worker in self.workers:
            worker.tell_primaries()

    def on_ps_silent(self, watch: PsWatch) -> None:
        self._pause(watch)
        if self._replication is not None and (error := self._replication.silent(watch)) is not None:
            self._broke(watch, error)

    def _pause(self, watch: PsWatch) -> None:
        """Nothing is sent to workers until it is there again, if it will be."""
        if watch.comes_back_s:
            self.dispatch.pause(watch.name)

    def on_ps_given_up(self, watch: PsWatch, client: Client) -> None:
        if self._replication is not None:
            self._replication.given_up(client)

    def on_ps_restarted(self, watch: PsWatch, client: Client) -> UnavailableError | None:
        return (self._replication or self._recovery).restarted(watch, client)

    def on_ps_lost(self, watch: PsWatch, error: BaseException) -> None:
        if self._replication is not None and isinstance(error, UnavailableError):
            left = self._replication.lost(watch, error)
            if left is None:
                return
            error = left
        self._broke(watch, error)

    def _broke(self, watch: PsWatch, error: BaseException) -> None:
        with self._lock:
            self._lost_ps[watch.name] = error
        self.dispatch.broke(error)

    def on_ps_back(self, watch: PsWatch) -> None:
        if self._replication is not None:
            self._replication.back(watch)
        self.dispatch.resume(watch.name)
        with self._lock:
            was_lost = self._lost_ps.pop(watch.name, None)
            left = list(self._lost_ps.values())
        if was_lost and not left:
            self.dispatch.mended()

    def _on_given_up(self, name: str, error: BaseException) -> None:
        with self._lock:
            self._given_up[name] = error
            is_last = len(self._given_up) == len(self.workers)
        if is_last or not isinstance(error, UnavailableError):
            self.dispatch.broke(error)
