"""``Waits``: what callers wait for, and when a wait ends."""

from __future__ import annotations

from typing import final

from replicax._ps.job.actions_out import EndWait
from replicax._ps.job.events_in import WaitBegan
from replicax._ps.job.resource_rules import ResourceRules
from replicax._ps.job.shared_state import JobState
from replicax._src.program_kit.errors import ContextError


@final
class Waits:
    """The waits that have not ended. A failure goes to the oldest wait that may raise it, and only to that one.

    Args:
      state: The state of the job.
      resources: The resources that workers make.
    """

    def __init__(self, state: JobState, resources: ResourceRules):
        self._state, self._queue, self._resources = state, state.queue, resources
        self._waits: dict[int, WaitBegan] = {}
        self._raised: tuple[int, BaseException] | None = None  # the last failure, and the wait that it ended

    @property
    def has_some(self) -> bool:
        return bool(self._waits)

    def began(self, event: WaitBegan) -> None:
        self._waits[event.wait] = event

    def given_up(self, wait: int) -> None:
        """Ends a wait whose caller is gone, perhaps without the failure that it was to raise."""
        if self._waits.pop(wait, None) is None and self._raised is not None and self._raised[0] == wait:
            self._queue.keep(self._raised[1])
            self._raised = None

    def look(self) -> None:
        """Ends the waits that are over, after each event."""
        for wait in list(self._waits.values()):
            end = self._end_of(wait)
            if end is not None:
                del self._waits[wait.wait]
                self._state.act(end)

    def fail(self, error: BaseException) -> None:
        """Ends all waits with an error."""
        for wait in self._waits:
            self._state.act(EndWait(wait, error))
        self._waits.clear()

    def _end_of(self, wait: WaitBegan) -> EndWait | None:
        """Returns the end of a wait; None if it goes on."""
        queue = self._queue
        match wait.kind:
            case "resource":
                outcome = self._resources.outcome(wait.resource)
                return None if outcome is None else EndWait(wait.wait, outcome.error, outcome.spec)
            case _ if queue.has_error:
                return self._end_with_failure(wait.wait) if queue.is_idle else None
            case "idle":
                return EndWait(wait.wait) if queue.is_idle else None
            case "done":
                return EndWait(wait.wait, value=queue.is_idle)
            case "room" if queue.is_closed:
                return EndWait(wait.wait, ContextError("This ClusterCoordinator is closed. Make a new one."))
            case "room":
                return None if queue.is_full else EndWait(wait.wait)

    def _end_with_failure(self, wait: int) -> EndWait:
        is_kept = not self._queue.is_broken  # a breakage ends every wait until it is mended
        error = self._queue.collect()
        if error is not None and is_kept:
            self._raised = wait, error
        return EndWait(wait, error)
