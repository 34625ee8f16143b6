"""``JobState``: what all rules of a job share: the functions, the procedures, the reasons to stop, the actions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, final

from replicax._ps.job.actions_out import Action, Log, Settle
from replicax._ps.job.closures import ClosureQueue, Ended
from replicax._ps.job.procedures import Procedures
from replicax._ps.job.setup import Setup


@final
class JobState:
    """The ``JobHooks`` of a job.

    Attributes:
      setup: The tasks and the options.
      queue: The functions.
      procedures: The procedures of the whole job.
      now: The time of the event that is being handled.
      num_made: The number of variables that were created in the session.
      has_new_primaries: True if the workers must be told.
      unsettled: The numbers of the functions that were scheduled and have no ``Settle``. A rule that raises may have
        taken a function out of the queue before.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.queue = ClosureQueue(
            setup.capacity,
            max_staleness=setup.max_staleness,
            first_number=setup.first_number,
            replicas_to_aggregate=setup.replicas_to_aggregate,
            first_round=setup.first_round,
        )
        self.procedures = Procedures()
        self.now = 0.0
        self.num_made = setup.num_made
        self.has_new_primaries = False
        self.unsettled: set[int] = set()
        self._broken: set[Hashable] = set()

    # --- actions ---------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Adds an action, after those that were decided before."""
        if isinstance(action, Settle):
            self.unsettled.discard(action.number)
        self.procedures.actions.append(action)

    def taken_actions(self) -> list[Action]:
        """Returns the actions since the last call."""
        actions = self.procedures.actions
        self.procedures.actions = []
        return actions

    def settle(self, ended: Ended) -> None:
        """Ends functions without a result."""
        for closure, error in ended:
            self.act(Settle(closure.number, error))

    def log(self, level: int, text: str, *arguments: Any, error: BaseException | None = None) -> None:
        self.act(Log(level, text % arguments, error))

    # --- reasons to stop -------------------------------------------------------------------------------

    def pause(self, why: Hashable) -> None:
        self.queue.pause(why)

    def resume(self, why: Hashable) -> None:
        self.queue.resume(why)

    def broke(self, error: BaseException, why: Hashable = None) -> None:
        self._broken.add(why)
        self.settle(self.queue.broke(error))

    def mended(self, why: Hashable) -> None:
        if why in self._broken:
            self._broken.remove(why)
            if not self._broken:
                self.queue.mended()

    @property
    def is_quiet(self) -> bool:
        return self.queue.is_quiet

    @property
    def has_half_done(self) -> bool:
        return self.queue.has_half_done

    @property
    def num_in_flight(self) -> int:
        return self.queue.num_in_flight

    @property
    def is_over(self) -> bool:
        return self.queue.is_closed or self.queue.is_broken

    # --- numbers ---------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        return self.queue.next_number

    @property
    def unfinished(self) -> list[int]:
        return self.queue.unfinished

    @property
    def num_finished(self) -> int:
        return self.queue.counts.finished

    def tell_workers_primaries(self) -> None:
        self.has_new_primaries = True
