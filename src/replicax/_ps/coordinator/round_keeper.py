"""``RoundKeeper``: has the parameter servers apply the gradients of each complete round."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.rounds import Round
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool
    from replicax._ps.coordinator.server_monitor import ServerMonitor

_PAUSE_S = 0.2


@final
class RoundKeeper:
    """A thread that sends complete rounds to the servers. All get the same closures, so all apply the same gradients.

    It asks an unreachable server again until the server is back, or lost. A server that restarted and lost gradients
    applies the mean of those that it has.

    Args:
      session: The session with the tasks.
      pool: The pool that has the rounds.
      monitor: The monitor that learns which parameter server is unreachable.
    """

    def __init__(self, session: Session, pool: WorkerPool, monitor: ServerMonitor):
        self._session, self._pool, self._monitor = session, pool, monitor
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the pool was closed, without waiting for it."""
        self._is_over.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (complete := self._pool.next_round()) is not None:
            self._apply(complete)

    def _apply(self, complete: Round) -> None:
        low = self._pool.low_round
        while self._pool.is_due(complete):
            try:
                self._session.apply_round(complete.number, low, complete.ended)
            except UnavailableError as error:
                self._monitor.note_failure(error.task or None)
                self._is_over.wait(_PAUSE_S)
            except StaleCoordinatorError as error:
                self._pool.broke(error)
            except Exception as error:
                self._pool.round_failed(complete, error)
            else:
                self._session.renew()  # before any closure of the next round is sent
                self._pool.round_applied(complete)
