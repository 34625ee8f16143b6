"""``GuardedSteps``: steps of a training between which all its tasks can save, and end, together."""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from replicax._src.checkpoint import processes
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.peers import Peers
from replicax._src.input.dataset import num_elements_taken
from replicax._src.preemption.barrier import PreemptionBarrier
from replicax._src.preemption.signals import PreemptionSignals
from replicax._src.preemption.termination import TerminationConfig, exit_preempted

log = logging.getLogger("replicax")
# Until the deadline: the steps that may have begun, and a save as long as the first one, twice.
_STEPS_LEFT = 6
_SAVES_LEFT = 2
_STEPS_KEPT = 20
_LOOK_S = 0.1


@final
class GuardedSteps:
    """Steps that all tasks count alike. Call it from one thread, that of the training.

    With each step: ``begin``, which says whether to save, and ``end``. Where it is to be saved: ``save``. Or, where a
    loop is somebody else's: ``end_and_save`` after each of its steps.

    Args:
      peers: The other tasks, all of which make one too, if there are any.
      config: How it is noticed, and what is done.
    """

    def __init__(self, peers: Peers | None, config: TerminationConfig):
        self._peers, self._config = peers, config
        self._clock = _Clock()
        names = ("This process",) if peers is None else peers.names
        barrier = self._barrier = PreemptionBarrier(peers, functools.partial(_say, names, set()))
        try:
            self._signals = PreemptionSignals(config, _Countdown(barrier, self._clock, config.grace_s).begin)
        except BaseException:
            barrier.close()
            raise
        self._has_ended = False
        self._began_at = time.monotonic()
        self._num_taken = num_elements_taken()
        self._finalizer = weakref.finalize(self, _close_elsewhere, self._signals, self._barrier)
        self._finalizer.atexit = False  # until the process has ended a second SIGTERM does no harm

    def begin(self) -> bool:
        """Before a step: it begins, or it is now that all save. Waits milliseconds while that is agreed on.

        Returns:
          Whether to save.

        Raises:
          ClusterFailureError: Another task is gone.
        """
        self._signals.check()
        is_to_save = not self._has_ended and not self._barrier.begin()
        self._began_at = time.monotonic()
        return is_to_save

    def end(self) -> None:
        """After a step."""
        self._clock.note_step(time.monotonic() - self._began_at)
        self._num_taken = num_elements_taken()

    def end_and_save(self, save: Callable[[], Any]) -> None:
        """After a step, and before the next one, with nothing between: where a callback of a loop is called, say.

        It counts as the end of one and the beginning of the other; if all are to save, ``save`` is called as ``save``
        does.
        """
        self.end()
        while self.begin():
            self.save(save)

    def must_run_first(self) -> bool:
        """Where all are to save before a step: whether its data has been read already, in any task.

        What is saved then would say that the data has been used. So all run the step, and save after it.
        """
        has_read = num_elements_taken() != self._num_taken
        if self._peers is not None:
            has_read = any(self._peers.gather("preemption: data read", has_read, "to save"))
        if has_read:
            self._barrier.count_step()
        return has_read

    def save(self, save: Callable[[], Any]) -> None:
        """Saves, with all others. Does not return if they end then.

        Raises:
          SystemExit: This task has saved, and ends: exit code 42, if nothing else was chosen.
          CheckpointError: Another task could not save.
          ClusterFailureError: Another task is gone.
        """
        began_at = time.monotonic()
        is_final = self._barrier.is_final
        self._save_together(save, is_final=is_final)
        self._clock.note_save(time.monotonic() - began_at)
        self._barrier.note_saved()
        self._num_taken = num_elements_taken()
        if is_final:
            self._has_ended = True
            (self._config.exit_fn or exit_preempted)()

    def _save_together(self, save: Callable[[], Any], *, is_final: bool) -> None:
        """Nobody ends before all have saved; where one could not, nobody has."""
        if self._peers is None:
            save()
            return
        saved: list[bool] = []
        try:
            processes.together("saving before a task ends", lambda: saved.append(save() is None))
        except ClusterFailureError as failure:
            if not (saved and is_final):
                raise
            log.warning("This task has saved, and ends. Another one: %s", failure)

    def close(self) -> None:
        """Watches no longer. SIGTERM does what it did before. May be called twice."""
        if self._finalizer.detach() is not None:
            _close(self._signals, self._barrier)


def _say(names: Sequence[str], known: set[int], number: int, text: str) -> None:
    if number not in known:
        known.add(number)
        log.warning("%s is to end (%s): all tasks save before their next step.", names[number], text)


def _close(signals: PreemptionSignals, barrier: PreemptionBarrier) -> None:
    signals.close()
    barrier.close()


def _close_elsewhere(signals: PreemptionSignals, barrier: PreemptionBarrier) -> None:
    """Garbage may be collected while a lock is held that this needs."""
    with contextlib.suppress(RuntimeError):  # no thread begins any more: Python ends
        threading.Thread(target=_close, args=(signals, barrier), name="replicax-close", daemon=True).start()


@final
class _Clock:
    """How long steps and saving take."""

    def __init__(self) -> None:
        self._is_first = True
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.save_s: float | None = None

    def note_step(self, step_s: float) -> None:
        if not self._is_first:  # that one was compiled
            self._steps_s.append(step_s)
        self._is_first = False

    def note_save(self, save_s: float) -> None:
        self.save_s = max(save_s, self.save_s or 0.0)

    @property
    def margin_s(self) -> float:
        """How long before the deadline the last save has to begin."""
        steps_s = list(self._steps_s)  # another thread appends
        step_s = statistics.median(steps_s) if steps_s else 0.0
        return _STEPS_LEFT * step_s + _SAVES_LEFT * (self.save_s or 0.0)


@final
class _Countdown:
    """From the notice to this task on: all save; and once more, and end, before its grace period is over."""

    def __init__(self, barrier: PreemptionBarrier, clock: _Clock, grace_s: float):
        self._barrier, self._clock, self._grace_s = barrier, clock, grace_s

    def begin(self, text: str) -> None:
        self._barrier.signal(text, is_final=not self._grace_s)
        if self._grace_s:
            deadline = time.monotonic() + self._grace_s
            threading.Thread(
                target=self._wait, args=(text, deadline), name="replicax-grace-period", daemon=True
            ).start()

    def _wait(self, text: str, deadline: float) -> None:
        """The margin is not known before the first save has ended."""
        while (left_s := deadline - self._clock.margin_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        self._barrier.signal(f"{text}, {self._grace_s:g} s ago", is_final=True)
