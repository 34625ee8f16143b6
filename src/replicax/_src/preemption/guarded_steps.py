"""``GuardedSteps``: training steps between which all tasks can save and end together."""

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

from replicax._src.checkpoint import agreement
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.peers import Peers
from replicax._src.input.dataset import num_elements_taken
from replicax._src.preemption.barrier import PreemptionBarrier
from replicax._src.preemption.signals import PreemptionSignals
from replicax._src.preemption.termination import TerminationConfig, exit_preempted

log = logging.getLogger("replicax")
# The time reserved before the deadline: steps that may have started, and twice the duration of a save.
_STEPS_LEFT = 6
_SAVES_LEFT = 2
_STEPS_KEPT = 20
_LOOK_S = 0.1


@final
class GuardedSteps:
    """Counts steps in the same way in all tasks. Call it from the training thread only.

    Call ``begin`` before each step and ``end`` after it. If ``begin`` returns True, call ``save``. In a loop that other
    code owns, call ``end_and_save`` after each step instead.

    Args:
      peers: The other tasks, which create a ``GuardedSteps`` too. None if there are none.
      config: The source of the preemption signal, and the reaction to it.
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
        self._finalizer.atexit = False  # a second SIGTERM must do no harm until the process ends

    def begin(self) -> bool:
        """Starts a step, unless all tasks must save now. Waits milliseconds while they agree.

        Returns:
          True if all tasks must save now.

        Raises:
          ClusterFailureError: Another task is gone.
        """
        self._signals.check()
        is_to_save = not self._has_ended and not self._barrier.begin()
        self._began_at = time.monotonic()
        return is_to_save

    def end(self) -> None:
        """Ends a step."""
        self._clock.note_step(time.monotonic() - self._began_at)
        self._num_taken = num_elements_taken()

    def end_and_save(self, save: Callable[[], Any]) -> None:
        """Ends a step and starts the next one, for example in the callback of a loop.

        If all tasks must save, it calls ``save`` as the method ``save`` does.
        """
        self.end()
        while self.begin():
            self.save(save)

    def must_run_first(self) -> bool:
        """Returns True if a task has read the data of the next step already, so that all run this step before they
        save.

        A checkpoint before the step would count that data as used. Call it when all tasks must save.
        """
        has_read = num_elements_taken() != self._num_taken
        if self._peers is not None:
            has_read = any(self._peers.gather("preemption: data read", has_read, "to save"))
        if has_read:
            self._barrier.count_step()
        return has_read

    def save(self, save: Callable[[], Any]) -> None:
        """Saves together with all other tasks. Does not return if the tasks end then.

        Raises:
          SystemExit: This task has saved, and ends with exit code 42 unless ``exit_fn`` does something else.
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
        """Saves so that no task ends before all have saved. If one fails to save, none counts as saved."""
        if self._peers is None:
            save()
            return
        saved: list[bool] = []
        try:
            agreement.together("saving before a task ends", lambda: saved.append(save() is None))
        except ClusterFailureError as failure:
            if not (saved and is_final):
                raise
            log.warning("This task has saved, and ends. Another task failed: %s", failure)

    def close(self) -> None:
        """Stops watching: SIGTERM has its former effect again. May be called twice."""
        if self._finalizer.detach() is not None:
            _close(self._signals, self._barrier)


def _say(names: Sequence[str], known: set[int], number: int, text: str) -> None:
    if number not in known:
        known.add(number)
        log.warning("%s is preempted (%s): all tasks save before their next step.", names[number], text)


def _close(signals: PreemptionSignals, barrier: PreemptionBarrier) -> None:
    signals.close()
    barrier.close()


def _close_elsewhere(signals: PreemptionSignals, barrier: PreemptionBarrier) -> None:
    """Closes in a separate thread: the garbage collector may run while the calling thread holds a lock needed here."""
    with contextlib.suppress(RuntimeError):  # Python is exiting and starts no threads
        threading.Thread(target=_close, args=(signals, barrier), name="replicax-close", daemon=True).start()


@final
class _Clock:
    """Measures how long steps and saves take."""

    def __init__(self) -> None:
        self._is_first = True
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.save_s: float | None = None

    def note_step(self, step_s: float) -> None:
        if not self._is_first:  # the first step includes compilation
            self._steps_s.append(step_s)
        self._is_first = False

    def note_save(self, save_s: float) -> None:
        self.save_s = max(save_s, self.save_s or 0.0)

    @property
    def margin_s(self) -> float:
        """The time before the deadline at which the last save must start."""
        steps_s = list(self._steps_s)  # a copy: another thread appends
        step_s = statistics.median(steps_s) if steps_s else 0.0
        return _STEPS_LEFT * step_s + _SAVES_LEFT * (self.save_s or 0.0)


@final
class _Countdown:
    """Makes all tasks save at the preemption signal, then save again and end before the grace period is over."""

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
        """Waits until the last save must start. The margin changes: it is unknown until the first save has ended."""
        while (left_s := deadline - self._clock.margin_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        self._barrier.signal(f"{text}, {self._grace_s:g} s ago", is_final=True)
