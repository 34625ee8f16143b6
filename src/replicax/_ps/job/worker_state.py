"""``WorkerState``: what is known of one worker: its connection, what it has, and what it has not answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from replicax._ps.job.actions_out import ToWorker
from replicax._ps.job.closures import Closure
from replicax._ps.job.events_in import NO_NEEDS, FunctionNeeds

_DEPTHS: Final = 2, 32  # functions in flight: more for faster ones, so that all are done within _FLIGHT_S
_FLIGHT_S, _SLOW_S = 0.008, 0.1  # of slow ones only one is in flight
_WEIGHT, _MOST_WEIGHT = 0.1, 0.5


class Unanswered(NamedTuple):
    """A request that a worker has not answered.

    Attributes:
      request: The request.
      closure: The function, if it is one.
      group: The number of its message group. Requests that travelled together have the same number.
      sent_at: The time at which it was sent.
      needs: What the function needed then; those of ``closure`` may be others by now.
    """

    request: ToWorker
    closure: Closure | None
    group: int
    sent_at: float
    needs: FunctionNeeds


@final
@dataclass(eq=False, slots=True)
class WorkerState:
    """A worker.

    Attributes:
      name: Its name, as ``"worker 0"``.
      connection: The number of the open connection for functions; None if there is none.
      is_ready: True if the process that was met has that connection, so that functions may be sent.
      refusal: The error because of which the last connection could not be opened.
      instance: The process that was met last; None if none was.
      description: Its answer to ``hello``.
      heartbeat: The statistics in its last heartbeat.
      num_connections, num_restarts: Counts.
      is_given_up: True if nobody tries to reach it any more.
      unanswered: What it was sent on this connection, oldest first.
      num_bytes_unanswered: The bytes of their arrays.
      known: The programs and constants that it was sent on this connection.
      refused: The errors of those that it did not take.
      own_resources: The resources that it has and never makes.
      resources: Those, and the resources that it was told to make on this connection.
      depth: The most functions that it may have at a time.
    """

    name: str
    own_resources: frozenset[str] = frozenset()
    connection: int | None = None
    is_ready: bool = False
    refusal: BaseException | None = None
    instance: str | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    heartbeat: Mapping[str, Any] = field(default_factory=dict)
    num_connections: int = 0
    num_restarts: int = 0
    is_given_up: bool = False
    unanswered: deque[Unanswered] = field(default_factory=deque)
    num_bytes_unanswered: int = 0
    known: set[str] = field(default_factory=set)
    refused: dict[str, Exception] = field(default_factory=dict)
    resources: set[str] = field(default_factory=set)
    depth: int = 1
    _took_s: float = _SLOW_S
    _answered_at: float = 0.0
    _num_groups: int = 0

    # --- connections -----------------------------------------------------------------------------------

    def met(self, description: Mapping[str, Any]) -> None:
        """Records the answer to ``hello``."""
        instance = description.get("instance")
        if self.description and self.description.get("instance") != instance:
            self.num_restarts += 1
            self.heartbeat = {}
        self.description, self.instance = description, instance

    def opened(self, connection: int) -> None:
        """Records a connection that is being opened. The worker has nothing yet."""
        self.connection, self.refusal = connection, None
        self.unanswered, self.num_bytes_unanswered = deque(), 0
        self.known, self.refused, self.resources = set(), {}, set(self.own_resources)

    def ready(self, now: float) -> None:
        """Records that the process that was met has the connection."""
        self.is_ready = True
        self.num_connections += 1
        self.depth, self._took_s, self._answered_at = 1, _SLOW_S, now

    def ended(self) -> None:
        """Records that the connection has ended. What it was sent can still be read."""
        self.connection, self.is_ready = None, False

    def statistics(self, function: str | None, num_in_flight: int) -> dict[str, Any]:
        """Returns the state of the connection, and the last statistics of the worker."""
        return {
            "connected": self.is_ready,
            "function": function,
            "in_flight": num_in_flight,
            "depth": self.depth,
            "connections": self.num_connections,
            "restarts": self.num_restarts,
            "task": dict(self.description),
            "statistics": dict(self.heartbeat),
            "given_up": self.is_given_up,
        }

    # --- requests --------------------------------------------------------------------------------------

    def new_group(self) -> int:
        """Returns the number of the next message group."""
        self._num_groups += 1
        return self._num_groups

    def sent(self, request: ToWorker, closure: Closure | None, group: int, now: float) -> None:
        """Records a request."""
        needs: FunctionNeeds = NO_NEEDS if closure is None else closure.work
        self.unanswered.append(Unanswered(request, closure, group, now, needs))
        self.num_bytes_unanswered += needs.num_bytes

    def answered(self) -> Unanswered:
        """Returns the oldest request, which is answered."""
        oldest = self.unanswered.popleft()
        self.num_bytes_unanswered -= oldest.needs.num_bytes
        return oldest

    def running(self) -> list[Closure]:
        """Returns the function that ran when the connection ended, or several that came together, of which one ran."""
        first = self._first_work()
        if first is None or first.closure is None:
            return []
        return [
            each.closure for each in self.unanswered if each.closure is not None and each.group == first.group
        ]

    def making(self) -> str | None:
        """Returns the resource that the worker made when the connection ended; None if it did something else."""
        first = self._first_work()
        return None if first is None or first.closure is not None else str(first.request.what)

    def _first_work(self) -> Unanswered | None:
        return next((each for each in self.unanswered if each.request.kind in ("closure", "resource")), None)

    def has_all(self, needs: FunctionNeeds) -> bool:
        """True if the worker was sent all that a function needs."""
        return (
            self.known.issuperset(needs.programs)
            and self.known.issuperset(needs.constants)
            and self.resources.issuperset(needs.resources)
        )

    def forget(self, name: str) -> Exception | None:
        """Records that the worker lacks a program or a constant. Returns the error if it had refused it.

        Without an error it is sent again with the next function that needs it.
        """
        self.known.discard(name)
        return self.refused.get(name)

    # --- depth -----------------------------------------------------------------------------------------

    @property
    def num_together(self) -> int:
        """The most functions that travel together. The worker runs these while it is sent as many others."""
        return max(1, self.depth // 2)

    def num_wanted(self, num_in_flight: int) -> int:
        """Returns how many functions the worker may get now.

        One that has some gets as many as travel together, or none.
        """
        if not num_in_flight:
            return self.depth
        return self.num_together if num_in_flight + self.num_together <= self.depth else 0

    def measure(self, num_functions: int, sent_at: float, now: float) -> None:
        """Adapts the depth: fast functions are sent ahead so that a worker does not wait, but slow ones leave work to
        others.

        Args:
          num_functions: The number of functions that were answered together.
          sent_at: The time at which the first of them was sent.
          now: The time of their answers.
        """
        took_s = now - max(self._answered_at, sent_at)
        self._answered_at = now
        self._took_s += min(num_functions * _WEIGHT, _MOST_WEIGHT) * (took_s / num_functions - self._took_s)
        least, most = _DEPTHS
        if self._took_s > _SLOW_S:
            self.depth = 1
        else:
            self.depth = min(max(least, int(_FLIGHT_S / max(self._took_s, 1e-6))), most)
