"""Procedures: what takes several requests, one after another, is a generator that yields requests and gets answers.

    def meet(self) -> Procedure[str]:
        hello = yield Request("worker 0", "hello", {}, 5.0)     # the answer's header; raises the request's error
        yield Pause(0.1)                                        # resumes when that time has passed
        return hello["instance"]

A procedure decides nothing from what it saw before a ``yield`` without looking again: other events come in between.

The keys of procedures: ``("worker", name)``, ``("tell", name)``, ``("trace", number, name)`` and ``"rounds"``. Those of
the parameter servers' side begin with ``"ps"``.
"""

from __future__ import annotations

import heapq
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


@dataclass(eq=False, slots=True)
class _Running:
    """A procedure at its present step.

    Attributes:
      request: The number of the request whose answer it waits for; None if it waits for something else.
      until: The time at which its pause ends; None if it does not pause.
    """

    key: Hashable
    generator: Procedure[Any]
    request: int | None = None
    until: float | None = None


@final
class Procedures:
    """The procedures of a job, each under a key. Answers for a procedure that was stopped are ignored.

    An event costs the same however many procedures there are, but for conditions, which are all looked at.

    Attributes:
      actions: The requests to send. The job takes them after each event.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._running: dict[Hashable, _Running] = {}
        self._by_request: dict[int, _Running] = {}
        # A heap. Pauses that have ended stay until their time.
        self._pauses: list[tuple[float, int, _Running]] = []
        self._conditions: dict[_Running, Callable[[], bool]] = {}
        self._numbers = count(1)

    def __contains__(self, key: object) -> bool:
        return key in self._running

    @property
    def wake_at(self) -> float | None:
        """The next time at which a pause ends; None if there is none."""
        while self._pauses and not _is_pausing(self._pauses[0]):
            heapq.heappop(self._pauses)
        return self._pauses[0][0] if self._pauses else None

    @property
    def has_conditions(self) -> bool:
        """True if a procedure waits for a condition, which what the job does next may bring about."""
        return bool(self._conditions)

    def start(self, key: Hashable, procedure: Procedure[Any], now: float) -> None:
        """Starts a procedure, in place of another procedure with this key."""
        self.stop(key)
        self._running[key] = running = _Running(key, procedure)
        self._resume(running, now, lambda: next(procedure))

    def stop(self, key: Hashable) -> None:
        """Ends a procedure where it is. Its ``finally`` clauses run. A procedure that runs now must not stop itself."""
        running = self._running.pop(key, None)
        if running is not None:
            self._waits_no_more(running)
            running.generator.close()

    def stop_all(self) -> None:
        """Ends all procedures."""
        for key in list(self._running):
            self.stop(key)

    def answered(self, request: int, answer: Any, now: float) -> None:
        """Hands an answer to the procedure that waits for it."""
        running = self._by_request.get(request)
        if running is not None:
            self._resume(running, now, lambda: running.generator.send(answer))

    def failed(self, request: int, error: Exception, now: float) -> None:
        """Raises the error of a request in the procedure that waits for it."""
        running = self._by_request.get(request)
        if running is not None:
            self._resume(running, now, lambda: running.generator.throw(error))

    def hurry(self, key: Hashable, now: float) -> None:
        """Ends the pause of a procedure, if it pauses."""
        running = self._running.get(key)
        if running is not None and running.until is not None and running.until > now:
            self._pause(running, now)

    def wake(self, now: float) -> bool:
        """Resumes the procedures whose pause is over, and those whose condition holds, until none is left.

        Returns True if there was one.
        """
        if not self._conditions and (not self._pauses or self._pauses[0][0] > now):
            return False  # nearly always
        has_resumed = False
        while (running := self._due(now)) is not None:
            generator, has_resumed = running.generator, True
            self._resume(running, now, lambda generator=generator: next(generator))
        return has_resumed

    def _due(self, now: float) -> _Running | None:
        while self._pauses and self._pauses[0][0] <= now:
            pause = heapq.heappop(self._pauses)
            if _is_pausing(pause):
                return pause[2]
        return next((running for running, is_true in self._conditions.items() if is_true()), None)

    def _resume(self, running: _Running, now: float, resume: Callable[[], Step]) -> None:
        self._waits_no_more(running)
        try:
            step = resume()
        except StopIteration:
            del self._running[running.key]
            return
        match step:
            case Pause(seconds):
                self._pause(running, now + seconds)
            case Until(is_true):
                self._conditions[running] = is_true
            case Request(task, op, header, timeout_s):
                self._send(running, lambda number: Ask(number, task, op, header, timeout_s))
            case Operation(name, arguments):
                self._send(running, lambda number: Perform(number, name, arguments))
            case Tracing(function, signature):
                self._send(running, lambda number: MakeProgram(number, function, signature))

    def _waits_no_more(self, running: _Running) -> None:
        if running.request is not None:
            del self._by_request[running.request]
        self._conditions.pop(running, None)
        running.request = running.until = None

    def _pause(self, running: _Running, until: float) -> None:
        running.until = until
        heapq.heappush(self._pauses, (until, next(self._numbers), running))

    def _send(self, running: _Running, action: Callable[[int], Action]) -> None:
        running.request = number = next(self._numbers)
        self._by_request[number] = running
        self.actions.append(action(number))


def _is_pausing(pause: tuple[float, int, _Running]) -> bool:
    return pause[2].until == pause[0]
