"""``RoundKeeper``: has the parameter servers apply the gradients of each round that is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from replicax._src.coordinator.dispatch import Dispatch
from replicax._src.coordinator.prepared import Session
from replicax._src.coordinator.rounds import Round
from replicax._src.ps.errors import StaleCoordinatorError, UnavailableError

_PAUSE_S = 0.2


@final
class RoundKeeper:
    """A thread. All servers are told the same closures, so that all apply the same gradients.

    A server that is away is asked again until it is back, or lost. One that has lost gradients, because it was started
    again, applies the mean of those that it has.

    Args:
      on_ps_trouble: Told which parameter server is not there, None for one of them.
    """

    def __init__(self, session: Session, dispatch: Dispatch, on_ps_trouble: Callable[[str | None], object]):
        self._session, self._dispatch, self._on_ps_trouble = session, dispatch, on_ps_trouble
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after the dispatch was closed; does not wait for it."""
        self._is_over.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (complete := self._dispatch.next_round()) is not None:
            self._apply(complete)

    def _apply(self, complete: Round) -> None:
        low = self._dispatch.low_round
        while self._dispatch.is_due(complete):
            try:
                self._session.apply_round(complete.number, low, complete.ended)
            except UnavailableError as error:
                self._on_ps_trouble(error.task or None)
                self._is_over.wait(_PAUSE_S)
            except StaleCoordinatorError as error:
                self._dispatch.broke(error)
            except Exception as error:
                self._dispatch.round_failed(complete, error)
            else:
                self._session.renew()  # before anything of the next round is sent
                self._dispatch.round_applied(complete)
