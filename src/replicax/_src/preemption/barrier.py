"""``PreemptionBarrier``: each task waits here before a step while the tasks agree where to save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.cluster.peers import Peers
from replicax._src.cluster.save_points import AtPoint, SavePoints
from replicax._src.control.save_rounds import SaveRounds
from replicax._src.drawing.text import printable

_LOOK_S = 0.05
Message = Mapping[str, Any]


@final
class PreemptionBarrier:
    """Applies the rules of ``save_points.py`` in the training thread. Messages of the controller arrive in another
    thread.

    Args:
      peers: The other tasks. None if there are none: this process is then its own controller.
      on_preempted: Called in any thread, with the number of the preempted task and the reason.
    """

    def __init__(self, peers: Peers | None, on_preempted: Callable[[int, str], None]):
        self._peers, self._on_preempted = peers, on_preempted
        self._points = SavePoints()
        self._changed = threading.Condition()
        self._own_controller = SaveRounds(1) if peers is None else None
        self._end_hearing = None if peers is None else peers.listen_for_saving(self._hear)
        self._tell({"kind": "watching"})

    def signal(self, text: str, *, is_final: bool) -> None:
        """Reports that this task is preempted. May be called from any thread; does not block.

        Args:
          text: The reason.
          is_final: True if all tasks end after they have saved; False if they continue.
        """
        self._tell({"kind": "signal", "is_final": is_final, "text": text})

    def begin(self) -> bool:
        """Starts a step, unless all tasks must save now. Waits milliseconds while the tasks agree on the step to save
        after.

        Returns:
          True if the step may run; False if all tasks must save now.

        Raises:
          ClusterFailureError: Another task is gone.
        """
        while True:
            with self._changed:
                found = self._points.begin(self._date)
                if found is AtPoint.WAIT:
                    self._changed.wait(_LOOK_S)
            if found is not AtPoint.WAIT:
                return found is AtPoint.RUN
            if self._peers is not None:
                self._peers.check()
                self._peers.serve()

    def count_step(self) -> None:
        """Counts one more step that every task runs before it saves."""
        with self._changed:
            self._points.started += 1

    @property
    def is_final(self) -> bool:
        """True if the tasks end after the save they are at."""
        return self._points.is_final

    def note_saved(self) -> None:
        """Reports that this task has saved. Its steps may start again."""
        with self._changed:
            message = self._points.save()
        self._tell(message)

    @property
    def _date(self) -> int:
        return 0 if self._peers is None else self._peers.moment().date

    def close(self) -> None:
        """Leaves the barrier: the other tasks no longer wait for this one."""
        if self._end_hearing is not None:
            self._end_hearing()
        self._tell({"kind": "closed"})

    def _tell(self, message: Message) -> None:
        if self._peers is not None:
            self._peers.send_about_saving(message)
        elif self._own_controller is not None:
            with self._changed:
                outbox = self._own_controller.receive(0, message)
            for _, told in outbox:
                answer = self._hear(told)
                if answer is not None:
                    self._tell(answer)

    def _hear(self, message: Message) -> Message | None:
        if message["kind"] == "preempted":
            self._on_preempted(message["member"], printable(message["text"]))
            return None
        with self._changed:
            answer = self._points.receive(message, self._date)
            self._changed.notify_all()
            return answer
