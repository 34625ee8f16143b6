"""The queue of closures, without threads, sockets or clocks: what happens goes in, what is to be told comes out.

A *closure* is a scheduled function with its arguments. The rules, TensorFlow's ones but for the last five:

- Closures are taken in the order in which they were scheduled, by any worker. At most ``capacity`` are queued.
- A closure *ends* once: finished, failed, or cancelled. Only who has taken it, and has not been lost since, ends it:
  what others say of it is late, and counts for nothing.
- The first failure is kept, and cancels all that are queued. Nothing can be scheduled until it has been collected,
  which it can be when nothing is in flight: once, by whoever comes first. Then the queue is as good as new.
- What a lost worker had in flight is queued again, in front; or is cancelled, if a failure is kept.
- A closure that ran when its worker was lost, for the ``max_deaths``-th time, fails: it is what kills them. If one of
  its kind has finished before, workers may well die of something else: it has more lives, but not for ever.
- Closures may travel to a worker together, if one of their kind has finished before, and nothing has happened to them.
  When the worker is lost each of them may be the one that ran, so each has a death more, and travels alone from then
  on: it only ever fails for a death of its own.
- A worker that has something in flight takes no more if that leaves nothing for one that has nothing.
- With ``max_staleness=k`` a worker is in its n-th closure only if all workers that are there have ended n - 1 - k. Who
  comes back starts with the slowest.
- With ``replicas_to_aggregate=n`` closures with gradients are taken in rounds, whose rules are in ``rounds.py``.
- While there is a reason to *pause* nothing is taken.
- Something that all closures need may *break*, a parameter server say: all fail, and each collection says so until it
  is mended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.coordinator.rounds import Round, Rounds
from replicax._src.parameter_servers.errors import CancelledError, RemoteError

CAPACITY = 256 * 1024
MAX_DEATHS = 3
MAX_DEATHS_OF_PROVEN = 10

Worker = Hashable
Ended = list[tuple["Closure", BaseException]]


@final
@dataclass(eq=False, slots=True)
class Closure:
    """A scheduled function.

    Attributes:
      number: Its place in the order of scheduling.
      name: The function's, for people.
      kind: Equal for closures of one program.
      work: Whatever the caller needs to run it, and to tell whoever waits for it.
      num_deaths: The number of workers that were lost while it ran, or may have run.
      num_returns: The number of times it came back for another reason.
      num_asks: The number of times a worker asked for a program of it again.
      round_key: Equal for closures of the same rounds; None: it is not of rounds.
      round: In which it was taken.
      travels_alone: Since it was taken last: others neither wait for it nor die of it.
    """

    number: int
    name: str
    kind: Hashable
    work: Any
    num_deaths: int = 0
    num_returns: int = 0
    num_asks: int = 0
    round_key: Hashable = None
    round: int | None = None
    travels_alone: bool = True


@dataclass(slots=True)
class _Member:
    """The state of a worker.

    Attributes:
      in_flight: Closures that it has taken, by number, oldest first.
      clock: The number of closures that have ended here; raised to the slowest one's when it comes back.
    """

    is_here: bool = False
    in_flight: dict[int, Closure] = field(default_factory=dict)
    clock: int = 0


@dataclass(slots=True)
class Counts:
    """Numbers of closures, by what became of them.

    Attributes:
      retried: The number of times one was queued again.
    """

    scheduled: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0


@final
class ClosureQueue:
    """The state of all closures. Not thread-safe.

    Methods that can end closures without a result return these, each with its error: tell whoever waits for them.

    Args:
      capacity: The most closures that may be queued.
      max_deaths: With how many workers a closure may die before it fails.
      max_deaths_of_proven: The same, of one of a kind that has finished before.
      max_staleness: The most closures that a worker may be ahead of the slowest; None for no limit.
      first_number: The number of the first closure.
      replicas_to_aggregate: The number of closures whose gradients are averaged for an update; None: each is one.
      first_round: The number of the first round.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        max_deaths: int = MAX_DEATHS,
        max_deaths_of_proven: int = MAX_DEATHS_OF_PROVEN,
        max_staleness: int | None = None,
        first_number: int = 0,
        replicas_to_aggregate: int | None = None,
        first_round: int = 0,
    ):
        for name, value, least in (
            ("capacity", capacity, 1),
            ("max_deaths", max_deaths, 1),
            ("max_deaths_of_proven", max_deaths_of_proven, 1),
            ("max_staleness", max_staleness, 0),
            ("replicas_to_aggregate", replicas_to_aggregate, 1),
        ):
            if value is not None and value < least:
                raise InvalidArgumentError(f"{name} must be at least {least}, got {value}.")
        if max_staleness is not None and replicas_to_aggregate is not None:
            raise InvalidArgumentError(
                f"max_staleness={max_staleness} bounds how far apart workers are that do not wait for each other, and with "
                f"replicas_to_aggregate={replicas_to_aggregate} all compute with the same values. Give one of them."
            )
        self._capacity, self._max_staleness = capacity, max_staleness
        self._first_round = first_round
        self.rounds = None if replicas_to_aggregate is None else Rounds(replicas_to_aggregate, first_round)
        self._max_deaths, self._max_deaths_of_proven = max_deaths, max_deaths_of_proven
        self._proven: set[Hashable] = set()
        self._queued: deque[Closure] = deque()
        self._members: dict[Worker, _Member] = {}
        self._unfinished: set[int] = set()
        self._next_number = self._low = first_number
        self._num_in_flight = 0
        self._error: BaseException | None = None
        self._breakage: BaseException | None = None
        self._is_closed = False
        self._paused: set[Hashable] = set()
        self.counts = Counts()

    # --- what is so ------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, nothing is in flight, and no round is to be applied."""
        return not self._queued and self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """Nothing is in flight, and no round is to be applied: nothing happens to variables."""
        return not self._num_in_flight and self.complete_round is None

    @property
    def complete_round(self) -> Round | None:
        """A round that is to be applied now."""
        return None if self.rounds is None else self.rounds.complete

    @property
    def is_full(self) -> bool:
        return len(self._queued) >= self._capacity

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_broken(self) -> bool:
        return self._breakage is not None

    @property
    def has_error(self) -> bool:
        """A failure waits to be collected; nothing can be scheduled before."""
        return self._error is not None or self._breakage is not None

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def next_number(self) -> int:
        """The number of the next closure."""
        return self._next_number

    @property
    def next_round(self) -> int:
        """The number of the next round."""
        return self._first_round if self.rounds is None else self.rounds.next_number

    @property
    def low(self) -> int:
        """All closures below this number have ended."""
        while self._low < self._next_number and self._low not in self._unfinished:
            self._low += 1
        return self._low

    def in_flight(self, worker: Worker) -> int:
        """The number of closures that a worker has taken and that have not ended."""
        return len(self._members[worker].in_flight)

    def oldest(self, worker: Worker) -> Closure | None:
        """The closure that a worker runs now; None if it has none."""
        return next(iter(self._members[worker].in_flight.values()), None)

    def may_take(self, worker: Worker) -> bool:
        """True if there is a closure that the worker may have now."""
        if not self._queued or self._paused:
            return False
        member = self._members[worker]
        if not member.is_here or self._is_too_far_ahead(member):
            return False
        if member.in_flight and len(self._queued) <= self._num_waiting():
            return False
        return self.rounds is None or self._is_of_round(worker, member, self.rounds)

    # --- what happens ----------------------------------------------------------------------------------

    def schedule(self, name: str, work: Any, kind: Hashable = None, round_key: Hashable = None) -> Closure:
        """A closure is queued; ``kind`` is its name if not given.

        Only when the queue is open, not full, and has no error.
        """
        assert not self._is_closed
        assert not self.has_error
        assert not self.is_full
        closure = Closure(self._next_number, name, name if kind is None else kind, work)
        closure.round_key = round_key
        self._next_number += 1
        self._unfinished.add(closure.number)
        self._queued.append(closure)
        self.counts.scheduled += 1
        return closure

    def refuse(self, name: str, work: Any, error: BaseException) -> Ended:
        """A closure comes that nobody can run. Only when one could be scheduled."""
        closure = self.schedule(name, work)
        self._queued.pop()
        self._unfinished.discard(closure.number)
        return self._fail(closure, error)

    def take(self, worker: Worker) -> Closure | None:
        """Gives a worker the next closure; None if there is none for it now."""
        if not self.may_take(worker):
            return None
        closure = self._queued.popleft()
        self._members[worker].in_flight[closure.number] = closure
        self._num_in_flight += 1
        if self.rounds is not None:
            closure.round = self.rounds.take(worker, closure.round_key, closure.number)
        closure.travels_alone = not self._is_good_company(closure)
        return closure

    def finished(self, worker: Worker, closure: Closure) -> bool:
        """A worker has run a closure; False if that is late."""
        if not self._ends(worker, closure):
            return False
        self._members[worker].clock += 1
        self._proven.add(closure.kind)
        self.counts.finished += 1
        if self.rounds is not None:
            self.rounds.ended(closure.round_key, closure.round, closure.number)
        return True

    def failed(self, worker: Worker, closure: Closure, error: BaseException) -> Ended:
        """A closure raised at a worker."""
        if not self._ends(worker, closure):
            return []
        self._members[worker].clock += 1
        self._leave_rounds([closure])
        return self._fail(closure, error)

    def returned(self, worker: Worker, closure: Closure) -> Ended:
        """A worker could not run a closure, which may be no fault of either: it is to be tried again."""
        if not self._leaves(worker, closure):
            return []
        closure.num_returns += 1
        self._leave_rounds([closure])
        return self._requeue([closure])

    def back(self, worker: Worker) -> None:
        """A worker is there, for the first time or again."""
        slowest = self._slowest_clock()
        member = self._members.setdefault(worker, _Member())
        member.is_here = True
        member.clock = slowest if slowest is not None else member.clock

    def lost(self, worker: Worker, running: Sequence[Closure] = ()) -> Ended:
        """A worker is gone. ``running``: what it was at, where that is known; several, of which it was at one."""
        member = self._members.setdefault(worker, _Member())
        member.is_here = False
        held, member.in_flight = list(member.in_flight.values()), {}
        self._num_in_flight -= len(held)
        self._leave_rounds(held)
        ended: Ended = []
        for closure in running:
            if closure in held:
                closure.num_deaths += 1
                if len(running) == 1 and closure.num_deaths >= self._num_lives(closure):
                    held.remove(closure)
                    self._unfinished.discard(closure.number)
                    ended = self._fail(closure, self._killer(worker, closure))
        return ended + self._requeue(held)

    def pause(self, why: Hashable) -> None:
        """Nothing is taken, for one more reason; what is in flight ends, and what comes is queued."""
        self._paused.add(why)

    def resume(self, why: Hashable) -> None:
        """That is no reason any more."""
        self._paused.discard(why)

    def broke(self, error: BaseException) -> Ended:
        """Something that all closures need is gone: all end with ``error``, those in flight too."""
        self._breakage = error
        ended: Ended = [(c, error) for m in self._members.values() for c in m.in_flight.values()]
        for member in self._members.values():
            member.in_flight = {}
        self._num_in_flight = 0
        if self.rounds is not None:
            self.rounds.clear()
        self._unfinished.difference_update(closure.number for closure, _ in ended)
        self.counts.failed += len(ended)
        return ended + self._cancel_queued(f"It was in the queue when this happened: {error}")

    def round_failed(self, over: Round, error: BaseException) -> Ended:
        """The gradients of a round could not be applied, and are gone."""
        assert self.rounds is not None
        self.rounds.gone(over)
        if not self.has_error:
            self._error = error
        return self._cancel_queued(f"It was in the queue when gradients could not be applied: {error}")

    def mended(self) -> None:
        """Ends a breakage: what all closures need is there again."""
        self._breakage = None

    def close(self) -> Ended:
        """The end: what is queued is cancelled, and what is in flight too; nothing is scheduled or taken any more."""
        self._is_closed = True
        held = [closure for member in self._members.values() for closure in member.in_flight.values()]
        for member in self._members.values():
            member.in_flight = {}
        self._num_in_flight = 0
        if self.rounds is not None:
            self.rounds.clear()
        return self._cancel(held, _CLOSED) + self._cancel_queued(_CLOSED)

    def collect(self) -> BaseException | None:
        """Returns what ``schedule``, ``join`` or ``done`` raises now; a failure once, when nothing is in flight."""
        if self._breakage is not None:
            self._error = None
            return self._breakage
        if self._num_in_flight:
            return None
        error, self._error = self._error, None
        return error

    # --- the rules -------------------------------------------------------------------------------------

    def _leaves(self, worker: Worker, closure: Closure) -> bool:
        member = self._members.get(worker)
        if member is None or member.in_flight.pop(closure.number, None) is None:
            return False
        self._num_in_flight -= 1
        return True

    def _ends(self, worker: Worker, closure: Closure) -> bool:
        if not self._leaves(worker, closure):
            return False
        self._unfinished.discard(closure.number)
        return True

    def _fail(self, closure: Closure, error: BaseException) -> Ended:
        self.counts.failed += 1
        ended: Ended = [(closure, error)]
        if self._error is None and self._breakage is None:
            self._error = error
        return ended + self._cancel_queued(f"It was in the queue when '{closure.name}' failed: {error}")

    def _requeue(self, closures: list[Closure]) -> Ended:
        if self._is_closed or self.has_error:
            why = (
                _CLOSED
                if self._is_closed
                else f"It was on a worker that was lost, after this: {self._reason}"
            )
            return self._cancel(closures, why)
        self._queued.extendleft(reversed(closures))
        self.counts.retried += len(closures)
        return []

    def _cancel_queued(self, why: str) -> Ended:
        queued, self._queued = list(self._queued), deque()
        return self._cancel(queued, why)

    def _cancel(self, closures: list[Closure], why: str) -> Ended:
        self._unfinished.difference_update(closure.number for closure in closures)
        self.counts.cancelled += len(closures)
        return [(closure, _cancelled(closure, why)) for closure in closures]

    @property
    def _reason(self) -> BaseException | None:
        return self._breakage if self._breakage is not None else self._error

    def _num_lives(self, closure: Closure) -> int:
        return self._max_deaths_of_proven if closure.kind in self._proven else self._max_deaths

    def _is_good_company(self, closure: Closure) -> bool:
        has_been_back = closure.num_deaths or closure.num_returns or closure.num_asks
        return not has_been_back and closure.round is None and closure.kind in self._proven

    def _killer(self, worker: Worker, closure: Closure) -> RemoteError:
        return RemoteError(
            f"The scheduled function '{closure.name}' is what kills workers: {closure.num_deaths} of them died, or "
            f"were silent for too long, while they ran it (closure {closure.number}), the last one {worker}. "
            "Their logs say more; too little memory and a crash in a compiled program are common reasons.",
            type="",
            task=str(worker),
        )

    def _num_waiting(self) -> int:
        """The number of workers that have nothing in flight and could have something."""
        return sum(
            member.is_here and not member.in_flight and not self._is_too_far_ahead(member)
            for member in self._members.values()
        )

    def _is_of_round(self, worker: Worker, member: _Member, rounds: Rounds) -> bool:
        in_flight = [closure.round for closure in member.in_flight.values()]
        num_here = sum(each.is_here for each in self._members.values())
        num_idle = sum(each.is_here and not each.in_flight for each in self._members.values())
        return rounds.may_take(worker, self._queued[0].round_key, in_flight, num_idle, num_here)

    def _leave_rounds(self, closures: list[Closure]) -> None:
        if self.rounds is not None:
            for closure in closures:
                self.rounds.left(closure.round_key, closure.number)

    def _slowest_clock(self) -> int | None:
        return min((member.clock for member in self._members.values() if member.is_here), default=None)

    def _is_too_far_ahead(self, member: _Member) -> bool:
        if self._max_staleness is None:
            return False
        slowest = self._slowest_clock()
        assert slowest is not None  # the member itself is there
        return member.clock + len(member.in_flight) - slowest > self._max_staleness


_CLOSED = "The coordinator was closed before it ended."


def _cancelled(closure: Closure, why: str) -> CancelledError:
    # The beginning is TensorFlow's.
    return CancelledError(
        f"The corresponding function is cancelled. Please reschedule the function. '{closure.name}' did not run, or may "
        f"have run in part. {why}"
    )
