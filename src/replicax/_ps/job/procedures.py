"""Procedures: what takes several requests, one after another, is a generator that yields requests and gets answers.

    def meet(self) -> Procedure[str]:
        hello = yield Request("worker 0", "hello", {}, 5.0)     # the answer's header; raises the request's error
        yield Pause(0.1)                                        # goes on when that time has passed
        return hello["instance"]

A procedure decides nothing from what it saw before a ``yield`` without looking again: other events come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, final

from replicax._ps.job.actions_out import Action, Ask, MakeProgram, OperationName, Perform

Result = TypeVar("Result")


@final
@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A request to a task; ``Ask`` without its number."""

    task: str
    op: str
    header: Mapping[str, Any]
    timeout_s: float


@final
@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """An operation of the session; ``Perform`` without its number."""

    name: OperationName
    arguments: tuple[Any, ...] = ()


@final
@dataclass(frozen=True, eq=False, slots=True)
class Tracing:
    """A program to make; ``MakeProgram`` without its number."""

    function: int
    signature: str


@final
@dataclass(frozen=True, eq=False, slots=True)
class Pause:
    """A wait of this many seconds, unless ``Procedures.hurry`` ends it earlier."""

    seconds: float


@final
@dataclass(frozen=True, eq=False, slots=True)
class Until:
    """A wait until a condition of the job holds; it is looked at after each event."""

    is_true: Callable[[], bool]


Step = Request | Operation | Tracing | Pause | Until
Procedure = Generator[Step, Any, Result]


@dataclass(slots=True)
class _Running:
    """A procedure at its present step.

    Attributes:
      request: The number of the request whose answer it waits for; None if it waits for something else.
      until: The time at which its pause ends; None if it does not pause.
      condition: What it waits for; None if it waits for nothing like that.
    """

    generator: Procedure[Any]
    request: int | None = None
    until: float | None = None
    condition: Callable[[], bool] | None = None


@final
class Procedures:
    """The procedures of a job, each under a key. Answers of a procedure that was stopped are ignored.

    Attributes:
      actions: The requests to send. The job takes them after each event.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._running: dict[Hashable, _Running] = {}
        self._by_request: dict[int, Hashable] = {}
        self._numbers = count(1)

    def __contains__(self, key: object) -> bool:
        return key in self._running

    @property
    def wake_at(self) -> float | None:
        """The next time at which a pause ends; None if there is none."""
        return min((each.until for each in self._running.values() if each.until is not None), default=None)

    def start(self, key: Hashable, procedure: Procedure[Any], now: float) -> None:
        """Starts a procedure, in place of the one that has this key."""
        self.stop(key)
        self._running[key] = _Running(procedure)
        self._resume(key, now, lambda: next(procedure))

    def stop(self, key: Hashable) -> None:
        """Ends a procedure where it is. Its ``finally`` clauses run. A procedure that runs now must not stop itself."""
        running = self._running.pop(key, None)
        if running is not None:
            if running.request is not None:
                del self._by_request[running.request]
            running.generator.close()

    def stop_all(self) -> None:
        """Ends all procedures."""
        for key in list(self._running):
            self.stop(key)

    def answered(self, request: int, answer: Any, now: float) -> None:
        """Hands an answer to the procedure that waits for it."""
        key = self._by_request.pop(request, None)
        if key is not None:
            generator = self._running[key].generator
            self._resume(key, now, lambda: generator.send(answer))

    def failed(self, request: int, error: Exception, now: float) -> None:
        """Raises the error of a request in the procedure that waits for it."""
        key = self._by_request.pop(request, None)
        if key is not None:
            generator = self._running[key].generator
            self._resume(key, now, lambda: generator.throw(error))

    def hurry(self, key: Hashable, now: float) -> None:
        """Ends the pause of a procedure, if it pauses."""
        running = self._running.get(key)
        if running is not None and running.until is not None:
            running.until = now

    def wake(self, now: float) -> None:
        """Resumes the procedures whose pause is over, and those whose condition holds, until none is left."""
        while True:
            due = [key for key, each in self._running.items() if _is_due(each, now)]
            if not due:
                return
            for key in due:
                running = self._running.get(key)
                if running is not None and _is_due(running, now):
                    generator = running.generator
                    self._resume(key, now, lambda generator=generator: next(generator))

    def _resume(self, key: Hashable, now: float, resume: Callable[[], Step]) -> None:
        running = self._running[key]
        running.request = running.until = running.condition = None
        try:
            step = resume()
        except StopIteration:
            if self._running.get(key) is running:
                del self._running[key]
            return
        match step:
            case Pause(seconds):
                running.until = now + seconds
            case Until(is_true):
                running.condition = is_true
            case Request(task, op, header, timeout_s):
                self._send(key, running, lambda number: Ask(number, task, op, header, timeout_s))
            case Operation(name, arguments):
                self._send(key, running, lambda number: Perform(number, name, arguments))
            case Tracing(function, signature):
                self._send(key, running, lambda number: MakeProgram(number, function, signature))

    def _send(self, key: Hashable, running: _Running, action: Callable[[int], Action]) -> None:
        running.request = number = next(self._numbers)
        self._by_request[number] = key
        self.actions.append(action(number))


def _is_due(running: _Running, now: float) -> bool:
    if running.until is not None:
        return running.until <= now
    return running.condition is not None and running.condition()
