"""``Job``: the machine of a coordinator. It hands each event to the rules for it, and has no rules itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import ERROR
from typing import Any, Final, final

from replicax._ps.job import events_in as events
from replicax._ps.job.actions_out import Action, EndWait, Settle
from replicax._ps.job.function_rules import FunctionRules
from replicax._ps.job.report import EventRecord
from replicax._ps.job.resource_rules import ResourceRules
from replicax._ps.job.round_rules import RoundRules
from replicax._ps.job.server_side import JobHooks, ServerSide
from replicax._ps.job.setup import Setup
from replicax._ps.job.shared_state import JobState
from replicax._ps.job.waits import Waits
from replicax._ps.job.worker_rules import WorkerRules

_BUG: Final = (
    "The rules of this job have failed, which is a bug in replicax. The job has ended. Please report it with these "
    "lines, the last events:\n%s"
)


@final
class Job:
    """A coordinator's job: functions and their callers, workers, and parameter servers. Not thread-safe.

    If a rule raises, the job ends: all functions and waits get that error, and ``bug`` has it.

    Args:
      setup: The tasks and the options.
      make_servers: Makes the parameter servers' side.

    Attributes:
      bug: The error of a rule, with the last events in a note; None if there was none.
    """

    def __init__(self, setup: Setup, make_servers: Callable[[JobHooks], ServerSide]):
        self._state = state = JobState(setup)
        self._servers = make_servers(state)
        self._resources = ResourceRules()
        self._functions = FunctionRules(state, self._servers, self._resources)
        self._workers = WorkerRules(state, self._functions, self._servers, self._resources)
        self._rounds = RoundRules(state, self._servers)
        self._waits = Waits(state, self._resources)
        self._record = EventRecord()
        self.bug: BaseException | None = None
        procedures = state.procedures
        self._rules: dict[type, Callable[[Any], object]] = {
            events.WaitBegan: lambda event: None,
            events.WaitGivenUp: lambda event: self._waits.given_up(event.wait),
            events.ResourceAdded: self._workers.add_resource,
            events.ResourceDropped: lambda event: self._workers.drop_resource(event.name),
            events.VariablesMade: self._note_variables,
            events.Closed: self._close,
            events.WorkerAnswered: self._workers.answered,
            events.WorkerBroke: self._workers.broke,
            events.Answered: lambda event: procedures.answered(event.request, event.answer, state.now),
            events.Failed: lambda event: procedures.failed(event.request, event.error, state.now),
            events.TimePassed: lambda event: None,
        }

    @property
    def wake_at(self) -> float | None:
        """The time at which the job wants ``TimePassed``; None if it waits for other events only."""
        return None if self.bug is not None else self._state.procedures.wake_at

    def start(self, now: float) -> list[Action]:
        """Begins to connect to all tasks. Call it once, before all events."""
        self._state.now = now
        try:
            self._servers.start(now)
            self._workers.start()
        except Exception as error:
            self._end_with(error)
        return self._state.taken_actions()

    def receive(self, event: events.Event, now: float) -> list[Action]:
        """Takes an event, and returns the actions to carry out, in their order.

        Args:
          event: The event.
          now: The time, in seconds, at least that of the previous event.
        """
        if isinstance(event, events.Scheduled):
            return self.receive_scheduled((event,), now)
        if self.bug is not None:
            return [EndWait(event.wait, self.bug)] if isinstance(event, events.WaitBegan) else []
        self._state.now = now
        if isinstance(event, events.WaitBegan):
            self._waits.began(event)  # so that it ends even if a rule raises
        try:
            self._record.add(event, now)
            self._rules[type(event)](event)
            self._follow()
        except Exception as error:
            self._end_with(error)
        return self._state.taken_actions()

    def receive_scheduled(self, several: Sequence[events.Scheduled], now: float) -> list[Action]:
        """Takes functions that were scheduled one after another, and returns the actions as ``receive`` does.

        It looks once, at the end, for what else is possible, such as the end of a wait.
        """
        if self.bug is not None:
            return [Settle(event.number, self.bug) for event in several]
        self._state.now = now
        self._state.unsettled.update([event.number for event in several])
        try:
            for event in several:
                self._record.add(event, now)
                self._functions.scheduled(event)
                self._functions.feed(only_idle=True)
            self._follow(only_idle=True)
        except Exception as error:
            self._end_with(error)
        return self._state.taken_actions()

    def fail(self, error: BaseException) -> list[Action]:
        """Ends the job because its owner has failed, as if a rule had raised. Returns the actions."""
        if self.bug is None:
            self._end_with(error)
        return self._state.taken_actions()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the functions and of each task."""
        queue, counts = self._state.queue, self._state.queue.counts
        return {
            "closures": {
                "scheduled": counts.scheduled,
                "finished": counts.finished,
                "failed": counts.failed,
                "cancelled": counts.cancelled,
                "retried": counts.retried,
                "queued": queue.num_queued,
                "in_flight": queue.num_in_flight,
                "rounds": 0 if queue.rounds is None else queue.rounds.num_applied,
                "gradients_dropped": 0 if queue.rounds is None else queue.rounds.num_dropped,
                "low": queue.low,
            },
            "workers": self._workers.statistics(),
            **self._servers.statistics(),
        }

    @property
    def room(self) -> int:
        """The number of functions that may be scheduled now, without a wait for room. Any thread may ask."""
        queue = self._state.queue
        return 0 if self.bug is not None or queue.is_closed or queue.has_error else queue.room

    @property
    def may_wait(self) -> bool:
        """True if a function that is scheduled now may wait until another event comes: no worker wants it sooner."""
        return self.bug is None and self._functions.may_wait

    @property
    def num_in_flight(self) -> int:
        """The number of functions that workers have taken and that have not ended. Any thread may ask."""
        return self._state.queue.num_in_flight

    @property
    def num_queued(self) -> int:
        """The number of functions that no worker has taken. Any thread may ask."""
        return self._state.queue.num_queued

    @property
    def num_waiting_gradients(self) -> int:
        """The number of gradients that wait for others of their round."""
        rounds = self._state.queue.rounds
        return 0 if rounds is None else rounds.num_waiting

    @property
    def next_number(self) -> int:
        """The number of the next function."""
        return self._state.queue.next_number

    @property
    def next_round(self) -> int:
        """The number of the next round."""
        return self._state.queue.next_round

    def _follow(self, *, only_idle: bool = False) -> None:
        """Does what an event has made possible."""
        state, procedures, queue = self._state, self._state.procedures, self._state.queue
        procedures.wake(state.now)
        while True:
            if queue.num_queued:
                self._functions.feed(only_idle=only_idle)
            if queue.rounds is not None:
                self._rounds.look()
            if state.has_new_primaries:
                state.has_new_primaries = False
                self._workers.tell_primaries()
            if not (procedures.has_conditions and procedures.wake(state.now)):
                break
        if self._waits.has_some:
            self._waits.look()

    def _note_variables(self, event: events.VariablesMade) -> None:
        self._state.num_made = event.num_made

    def _close(self, _: events.Closed) -> None:
        state = self._state
        if not state.queue.is_closed:
            state.settle(state.queue.close())
            state.procedures.stop_all()
            self._workers.close()
            self._resources.close()
            self._servers.close()

    # --- a bug -------------------------------------------------------------------------------------------

    def _end_with(self, error: BaseException) -> None:
        """Ends the job because a rule has raised. It relies on as few rules as possible."""
        self.bug = error
        state, report = self._state, self._record.text()
        error.add_note(f"The last events of the job:\n{report}")
        state.log(ERROR, _BUG, report, error=error)
        for number in sorted(state.unsettled):
            state.act(Settle(number, error))
        self._waits.fail(error)
        self._workers.close()
