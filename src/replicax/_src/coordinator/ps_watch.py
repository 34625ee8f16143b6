"""``PsWatch``: asks one parameter server whether it is alive, and whether it is still the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from replicax._src.coordinator.prepared import Session
from replicax._src.coordinator.workers import Limits
from replicax._src.ps.errors import StaleCoordinatorError, UnavailableError

_MISSED_BEATS = 3


@final
class PsWatch:
    """The beats of one parameter server.

    Args:
      on_lost: Told once why it is lost; ``on_back`` when it answers again as the same process.
    """

    def __init__(
        self,
        index: int,
        session: Session,
        limits: Limits,
        on_lost: Callable[[str, BaseException], None],
        on_back: Callable[[str], None],
    ):
        self.name = f"ps {index}"
        self._index, self._session, self._limits = index, session, limits
        self._on_lost, self._on_back = on_lost, on_back
        self._instance: Any = None
        self._is_lost = False
        self._is_closing = False
        self._hurry = threading.Event()
        self._beat: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._watch, name=f"replicax-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Asks now."""
        self._hurry.set()

    def close(self) -> None:
        """Ends the thread; does not wait for it."""
        self._is_closing = True
        self._hurry.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def statistics(self) -> dict[str, Any]:
        """Whether it answers, and what it last said of itself."""
        return {"connected": not self._is_lost, "statistics": dict(self._beat)}

    def _watch(self) -> None:
        client, missed = self._session.connect("ps", self._index), 0
        try:
            while not self._is_closing:
                try:
                    header = {"incarnation": self._session.incarnation}
                    answer = client.ask("beat", header, self._limits.beat_timeout_s)
                except StaleCoordinatorError as error:
                    self._lose(error)
                except Exception as error:
                    missed += 1
                    if missed >= _MISSED_BEATS:
                        self._lose(self._unavailable(error))
                else:
                    missed = 0
                    self._heard(answer)
                if self._hurry.wait(self._limits.beat_s if not missed else self._limits.beat_s / 4):
                    self._hurry.clear()
        finally:
            client.close()

    def _heard(self, answer: Any) -> None:
        self._beat = dict(answer.get("statistics") or {})
        instance = answer.get("instance")
        if self._instance is None:
            self._instance = instance
        if instance != self._instance:
            self._lose(
                UnavailableError(
                    f"{self.name} is another process than before: the variables that it had are gone. Start the program again, "
                    "from a checkpoint.",
                    self.name,
                )
            )
        elif self._is_lost:
            self._is_lost = False
            self._on_back(self.name)

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.name} is lost: {error} Start it and the program again, from a checkpoint.", self.name
        )

    def _lose(self, error: BaseException) -> None:
        if not self._is_lost and not self._is_closing:
            self._is_lost = True
            self._on_lost(self.name, error)
