"""``EventRecord``: the last events of a job, names and numbers without data, for the report of a bug."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from replicax._ps.job import events_in as events

NUM_EVENTS: Final = 200

_NUMBERS: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    events.Scheduled: lambda event: (event.number, event.error and _type_of(event.error)),
    events.WaitBegan: lambda event: (event.wait, event.kind, event.resource),
    events.WaitGivenUp: lambda event: (event.wait,),
    events.ResourceAdded: lambda event: (event.name,),
    events.ResourceDropped: lambda event: (event.name,),
    events.VariablesMade: lambda event: (event.num_made,),
    events.Closed: lambda event: (),
    events.WorkerAnswered: lambda event: (
        event.worker,
        event.connection,
        *[type(answer).__name__ if isinstance(answer, Exception) else None for answer in event.answers],
    ),
    events.WorkerBroke: lambda event: (event.worker, event.connection, _type_of(event.error)),
    events.Answered: lambda event: (event.request,),
    events.Failed: lambda event: (event.request, _type_of(event.error)),
    events.TimePassed: lambda event: (),
}


@final
class EventRecord:
    """The last ``NUM_EVENTS`` events of a job. It keeps no reference to what they carry."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=NUM_EVENTS)

    def add(self, event: events.Event, now: float) -> None:
        """Records an event."""
        kind = type(event)
        self._events.append((now, kind.__name__, _NUMBERS[kind](event)))

    def text(self) -> str:
        """Returns the events as lines, oldest first: the time, the event and its numbers."""
        return "\n".join(
            f"{now:.6f} {kind}({', '.join(map(repr, numbers))})" for now, kind, numbers in self._events
        )


def _type_of(value: object) -> str | None:
    """Returns the name of an error's type; None for something else."""
    return type(value).__name__ if isinstance(value, BaseException) else None
