"""``PreemptionWatcher``: tells a program that a task of its cluster is preempted; the program decides what to do."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, final

from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.drawing.text import printable
from replicax._src.preemption.signals import PreemptionSignals
from replicax._src.preemption.termination import TerminationConfig

_LOOK_S = 0.1


@final
class PreemptionWatcher:
    """Watches for SIGTERM to this process, or to another one of its cluster that has a watcher or a handler too.

    Create it in the main thread, after the strategy; in a worker of Ray Train, where it watches for Ray's signal that
    the node is taken away, in any thread. SIGTERM no longer ends the process until the watcher is closed,
    its ``with`` block ends, or it is garbage-collected.

    Raises:
      ContextError: This is not the main thread.

    Source: TensorFlow, ``tf.distribute.experimental.PreemptionWatcher``.
    """

    def __init__(self) -> None:
        self._peers = joined_peers()
        self._seen = _Seen(self._peers)
        signals = PreemptionSignals(TerminationConfig(), self._seen.on_signal)
        self._close = weakref.finalize(self, _close, self._seen, signals)
        self._close.atexit = False

    @property
    def preemption_message(self) -> str | None:
        """The first preempted task and the reason, such as ``"worker 1: SIGTERM"``; None if there is none. Any thread
        may read it.
        """
        return self._seen.text

    def block_until_worker_exit(self, timeout_s: float = 600.0) -> None:
        """Waits until another task that is preempted has ended. Returns at once if there is none.

        Args:
          timeout_s: The longest wait.
        """
        deadline = time.monotonic() + timeout_s
        while self._seen.is_of_other and time.monotonic() < deadline:
            if self._peers is None or self._peers.failure is not None:
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stops watching. Call it in the main thread. It may be called twice."""
        self._close()

    def __enter__(self) -> PreemptionWatcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@final
class _Seen:
    """The first preemption that a thread has reported."""

    def __init__(self, peers: Peers | None):
        self.text: str | None = None
        self.is_of_other = False
        self._peers, self._lock = peers, threading.Lock()
        self._end_hearing = None if peers is None else peers.listen_for_saving(self._hear)

    def on_signal(self, text: str) -> None:
        """Records that this process is preempted, and tells the other tasks."""
        if self._peers is None:
            self._note(f"this process: {text}", is_of_other=False)
        else:
            self._note(f"{self._peers.names[self._peers.number]}: {text}", is_of_other=False)
            self._peers.send_about_saving({"kind": "told", "text": text})

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "preempted" and self._peers is not None:
            number = message["member"]
            text = printable(message["text"])
            self._note(f"{self._peers.names[number]}: {text}", is_of_other=number != self._peers.number)

    def _note(self, text: str, *, is_of_other: bool) -> None:
        with self._lock:
            if self.text is None:
                self.text, self.is_of_other = text, is_of_other

    def close(self) -> None:
        if self._end_hearing is not None:
            self._end_hearing()


def _close(seen: _Seen, signals: PreemptionSignals) -> None:
    signals.close()
    seen.close()
