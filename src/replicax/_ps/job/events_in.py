"""The events of a job: what callers ask, what tasks answer, and that time has passed.

``Job.receive(event, now)`` takes them one by one, in the thread that owns the job. ``now`` is in seconds, on any clock
that only goes forward. Nobody changes an event. (A frozen one takes three times as long to make.)

A new event needs a rule in ``machine.py`` and a line in ``report.py``. A new action needs a function in
``coordinator/job_loop.py``, and in the simulated coordinator.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

# --- from callers ---------------------------------------------------------------------------------


@final
@dataclass(eq=False, slots=True)
class FunctionNeeds:
    """What a worker must have before it runs a function.

    Attributes:
      programs: The digests of its programs.
      constants: The names of its constants.
      resources: The names of the datasets and values that it takes, as in ``ResourceAdded``, or as in the
        ``own_resources`` of ``Setup``.
      num_bytes: The number of bytes of the arrays that travel with it.
    """

    programs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    num_bytes: int = 0


NO_NEEDS: Final = FunctionNeeds()


@final
@dataclass(eq=False, slots=True)
class Scheduled:
    """A caller schedules a function. ``Settle`` ends it, with its ``number``, which the caller assigns.

    Attributes:
      number: The place of the function in the order of scheduling. Numbers grow. One may be missing, if Ctrl-C
        interrupted its caller.
      name: Its name, for messages.
      kind: A key that is equal for functions of one program.
      needs: What a worker must have first.
      round_key: A key that is equal for functions whose gradients are averaged together; None if it has none.
      error: An error because of which it cannot run: it fails when it would be queued. None if it can.
    """

    number: int
    name: str
    kind: Hashable
    needs: FunctionNeeds
    round_key: Hashable = None
    error: BaseException | None = None


WaitKind = Literal["room", "done", "idle", "resource"]


@final
@dataclass(eq=False, slots=True)
class WaitBegan:
    """A caller begins to wait. ``EndWait`` answers, at once or later.

    Attributes:
      wait: The number of the wait; never used again.
      kind: What it waits for. "room": a function may be queued. "done": a kept failure may be raised; ends at once
        if there is none, and says if all functions have ended. "idle": all functions have ended. "resource": a worker
        has made ``resource``, or none can.
      resource: The name of the resource, if ``kind`` is "resource".
    """

    wait: int
    kind: WaitKind
    resource: str = ""


@final
@dataclass(eq=False, slots=True)
class WaitGivenUp:
    """A caller waits no longer: its time is over, or Ctrl-C. If ``EndWait`` has ended the wait meanwhile, the caller
    has not seen that: a failure that came with it is kept for the next wait.
    """

    wait: int


@final
@dataclass(eq=False, slots=True)
class ResourceAdded:
    """Each worker shall make a resource.

    Attributes:
      name: A name that is never used again.
      kind: "dataset" or "value", for messages.
      function: The name of the function that makes it, for messages.
    """

    name: str
    kind: str
    function: str


@final
@dataclass(eq=False, slots=True)
class ResourceDropped:
    """Nobody can use a resource any more."""

    name: str


@final
@dataclass(eq=False, slots=True)
class VariablesMade:
    """Variables were created: ``num_made`` of them until now, in the whole session."""

    num_made: int


@final
@dataclass(eq=False, slots=True)
class Closed:
    """The coordinator is closed."""


# --- from a connection to a worker ----------------------------------------------------------------


@final
@dataclass(eq=False, slots=True)
class WorkerAnswered:
    """Answers of a worker to the oldest unanswered requests of ``SendToWorker``, in their order.

    Attributes:
      worker: The name of the worker, as ``"worker 0"``.
      connection: The number of the connection that ``OpenWorker`` gave.
      answers: For each request an answer: the header of a message, or an error. The loop keeps the arrays.
    """

    worker: str
    connection: int
    answers: Sequence[Mapping[str, Any] | Exception]


@final
@dataclass(eq=False, slots=True)
class WorkerBroke:
    """A connection to a worker has ended, or could not be used."""

    worker: str
    connection: int
    error: BaseException


# --- from requests to tasks, and from long operations ---------------------------------------------


@final
@dataclass(eq=False, slots=True)
class Answered:
    """A task has answered an ``Ask``, or a ``Perform`` or ``MakeProgram`` has ended.

    Attributes:
      request: The number of the request.
      answer: The answer's header, or the operation's result.
    """

    request: int
    answer: Any


@final
@dataclass(eq=False, slots=True)
class Failed:
    """An ``Ask``, a ``Perform`` or a ``MakeProgram`` has failed. A task may have been silent."""

    request: int
    error: Exception


# --- time -------------------------------------------------------------------------------------------


@final
@dataclass(eq=False, slots=True)
class TimePassed:
    """It is ``Job.wake_at``, or later."""


Event = (
    Scheduled
    | WaitBegan
    | WaitGivenUp
    | ResourceAdded
    | ResourceDropped
    | VariablesMade
    | Closed
    | WorkerAnswered
    | WorkerBroke
    | Answered
    | Failed
    | TimePassed
)
