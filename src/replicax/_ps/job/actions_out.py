"""The actions of a job, which its owner carries out in their order. Their outcomes are events.

Nobody changes an action. (A frozen one takes three times as long to make.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final


@final
@dataclass(eq=False, slots=True)
class Ask:
    """Send a request to a task, on a connection for requests. ``Answered`` or ``Failed`` comes, within ``timeout_s``.

    Attributes:
      request: The number of the request; never used again.
      task: The name of the task, as ``"worker 0"`` or ``"ps 1"``.
      op: The operation, as ``"heartbeat"``.
      header: The other fields. The owner adds the incarnation of the coordinator.
      timeout_s: The longest wait.
    """

    request: int
    task: str
    op: str
    header: Mapping[str, Any]
    timeout_s: float


OperationName = Literal["meet_worker", "restored", "use_primaries", "apply_round", "names_on", "renew"]


@final
@dataclass(eq=False, slots=True)
class Perform:
    """Carry out an operation of the session, which may take long. ``Answered`` or ``Failed`` comes.

    Attributes:
      request: The number of the request; never used again.
      operation: Its name.
      arguments: Its arguments.
    """

    request: int
    operation: OperationName
    arguments: tuple[Any, ...] = ()


@final
@dataclass(eq=False, slots=True)
class OpenWorker:
    """Open the connection for functions to a worker, before later requests are sent to it. ``WorkerBroke`` comes if it
    cannot be opened.

    Attributes:
      worker: The name of the worker.
      connection: The number of the connection; never used again.
      instance: The worker's process that was met, for checks in tests. Nothing is sent before a heartbeat on another
        connection has shown that this process answers.
    """

    worker: str
    connection: int
    instance: str


@final
@dataclass(eq=False, slots=True)
class CloseWorker:
    """Close the connection for functions to a worker. Nothing of it is an event any more."""

    worker: str
    connection: int


@final
@dataclass(eq=False, slots=True)
class ToWorker:
    """A request to a worker: the owner makes the message.

    Attributes:
      kind: "closure" runs a function, "program" and "constant" give what functions need, "resource" has it make one,
        "release" drops resources.
      what: The number of the function, the digest of the program, the name of the constant or of the resource, or the
        names of the resources to drop.
      header: Fields of the message, as ``low`` and ``round``.
    """

    kind: Literal["closure", "program", "constant", "resource", "release"]
    what: int | str | tuple[str, ...]
    header: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(eq=False, slots=True)
class SendToWorker:
    """Send requests on a connection for functions, in one write. If a message cannot be made or cannot travel, the
    owner leaves it out and answers it itself with the error, in its place in ``WorkerAnswered``.
    """

    worker: str
    connection: int
    requests: Sequence[ToWorker]


@final
@dataclass(eq=False, slots=True)
class MakeProgram:
    """Trace a function for elements of the shapes that a worker has met, or because its programs are stale.

    ``Answered`` comes with the ``FunctionNeeds`` that it has then, or ``Failed``.

    Attributes:
      request: The number of the request.
      function: The number of the function.
      signature: The shapes.
    """

    request: int
    function: int
    signature: str


@final
@dataclass(eq=False, slots=True)
class Settle:
    """End a function for its caller.

    Attributes:
      number: The number of the function.
      error: Its error. None if it has finished: its result is the arrays of that answer of ``worker``.
      worker: The worker that has finished it; empty if it failed.
      answer: The header of that answer.
    """

    number: int
    error: BaseException | None = None
    worker: str = ""
    answer: Mapping[str, Any] | None = None


@final
@dataclass(eq=False, slots=True)
class EndWait:
    """End a wait of a caller.

    Attributes:
      wait: The number of the wait.
      error: What the caller raises; None if what it waited for has come.
      value: For "resource", its spec; for "done", True if all functions have ended.
    """

    wait: int
    error: BaseException | None = None
    value: Any = None


@final
@dataclass(eq=False, slots=True)
class Log:
    """Write a line into the log.

    Attributes:
      level: The level, as in ``logging``.
      text: The line.
      error: An exception to show with it.
    """

    level: int
    text: str
    error: BaseException | None = None


Action = Ask | Perform | OpenWorker | CloseWorker | SendToWorker | MakeProgram | Settle | EndWait | Log
