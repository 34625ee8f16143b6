"""``PreemptionBarrier``: each task waits here before a step while the tasks agree where to save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.cluster.peers import Peers
from replicax._src.cluster.save_points import AtPoint, SavePoints
from replicax._src.cluster.save_rounds import SaveRounds

_LOOK_S = 0.05
Message = Mapping[str, Any]


@final
class PreemptionBarrier:
    """The rules of ``save_points.py``, for the thread that trains. What the controller says comes in another thread.

    Args:
      peers: The other tasks; None: there are none, and this process is its own controller.
      on_preempted: Called in some thread, with the number of the task that is to end, and why.
    """

    def __init__(self, peers: Peers | None, on_preempted: Callable[[int, str], None]):
        self._peers, self._on_preempted = peers, on_preempted
        self._points = SavePoints()
        self._changed = threading.Condition()
        self._own_controller = SaveRounds(1) if peers is None else None
        self._end_hearing = None if peers is None else peers.hear_of_saving(self._hear)
        self._tell({"kind": "watching"})

    def signal(self, text: str, *, is_final: bool) -> None:
        """This task is to end. From any thread; does not block.

        Args:
          text: Why.
          is_final: Whether all end after having saved, or go on.
        """
        self._tell({"kind": "signal", "is_final": is_final, "text": text})

    def begin(self) -> bool:
        """Before a step. Waits, milliseconds, while the tasks agree after which step they save.

        Returns:
          Whether the step has begun. If not, it is now that all save.

        Raises:
          ClusterFailureError: Another task is gone.
        """
        with self._changed:
            while (found := self._points.begin()) is AtPoint.WAIT:
                if self._peers is not None:
                    self._peers.check()
                self._changed.wait(_LOOK_S)
            return found is AtPoint.RUN

    def count_step(self) -> None:
        """A step more is run before saving: by all."""
        with self._changed:
            self._points.started += 1

    @property
    def is_final(self) -> bool:
        """Where all save: whether they end then."""
        return self._points.is_final

    def note_saved(self) -> None:
        """This task has saved. Steps begin again."""
        with self._changed:
            message = self._points.save()
        self._tell(message)

    def close(self) -> None:
        """Nobody waits for this task any more when they agree."""
        if self._end_hearing is not None:
            self._end_hearing()
        self._tell({"kind": "closed"})

    def _tell(self, message: Message) -> None:
        if self._peers is not None:
            self._peers.tell_of_saving(message)
        elif self._own_controller is not None:
            with self._changed:
                outbox = self._own_controller.receive(0, message)
            for _, told in outbox:
                answer = self._hear(told)
                if answer is not None:
                    self._tell(answer)

    def _hear(self, message: Message) -> Message | None:
        if message["kind"] == "preempted":
            self._on_preempted(message["member"], message["text"])
            return None
        with self._changed:
            answer = self._points.receive(message)
            self._changed.notify_all()
            return answer
