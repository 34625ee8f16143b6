"""The queue of closures as pure rules, without threads, sockets or clocks: events go in, decisions come out.

A *closure* is a scheduled function with its arguments. All rules but the last five are TensorFlow's:

- Workers take closures in the order in which they were scheduled. At most ``capacity`` are queued.
- A closure *ends* once: it finishes, fails, or is cancelled. Only the worker that has taken it, and has not been lost
  since, can end it. Later answers of other workers are ignored.
- The first failure is kept, and cancels all queued closures. Nothing can be scheduled until the failure has been
  collected. That is possible once nothing is in flight, and only the first caller gets it. Then the queue works
  again.
- The in-flight closures of a lost worker return to the front of the queue. They are cancelled if a failure is kept.
- A closure fails if it was running at the loss of ``max_deaths`` workers, because it probably kills them. If a closure
  of its kind has finished before, another cause is likely, and the limit is higher.
- Closures travel to a worker together if one of their kind has finished before and they have never been requeued. If
  the worker is lost, any of them may have been running. So each counts a death and travels alone from then
  on, and a closure only ever fails for a death of its own.
- A worker that has something in flight takes no more if that leaves nothing for an idle worker.
- With ``max_staleness=k`` a worker may be in its n-th closure only if all connected workers have ended n - 1 - k. A
  worker that reconnects starts with the count of the slowest.
- With ``replicas_to_aggregate=n`` closures with gradients are taken in rounds, whose rules are in ``rounds.py``.
- While there is a reason to *pause*, no closure is taken.
- A resource that all closures need, such as a parameter server, may *break*. Then all closures fail, and each
  collection raises that error until the resource is mended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from replicax._ps.job.rounds import Round, Rounds
from replicax._ps.job.worker_clocks import WorkerClocks
from replicax._src.program_kit.errors import CancelledError, InvalidArgumentError, RemoteError

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
      name: The name of the function, for messages.
      kind: A key that is equal for closures of one program.
      work: The data that the caller needs to run it and to deliver its result.
      num_deaths: The number of workers that were lost while it ran, or may have run.
      num_returns: The number of times it was requeued for another reason.
      num_asks: The number of times a worker asked again for a program of it.
      round_key: A key that is equal for closures of the same rounds; None if it belongs to no round.
      round: The round in which it was taken.
      travels_alone: True if it was last taken alone, so that no other closure waits for it or fails with it.
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
      in_flight: The closures that it has taken, by number, oldest first.
      clock: The number of closures that have ended here. It is raised to the slowest worker's when the worker
        reconnects.
    """

    is_here: bool = False
    in_flight: dict[int, Closure] = field(default_factory=dict)
    clock: int = 0


@dataclass(slots=True)
class Counts:
    """The numbers of closures by outcome.

    Attributes:
      retried: The number of times a closure was requeued.
    """

    scheduled: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0


@final
class ClosureQueue:
    """The state of all closures. Not thread-safe.

    Methods that end closures without a result return these, each with its error. The caller must deliver the errors.

    Args:
      capacity: The most closures that may be queued.
      max_deaths: The number of workers that a closure may lose before it fails.
      max_deaths_of_proven: The same for a closure of a kind that has finished before.
      max_staleness: The most closures that a worker may be ahead of the slowest; None for no limit.
      first_number: The number of the first closure.
      replicas_to_aggregate: The number of closures whose gradients are averaged for one update; None for no
        averaging.
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
                f"max_staleness={max_staleness} limits how far apart asynchronous workers may be, but with "
                f"replicas_to_aggregate={replicas_to_aggregate} all compute with the same values. Give only "
                "one of them."
            )
        self._capacity, self._max_staleness = capacity, max_staleness
        self._first_round = first_round
        self.rounds = None if replicas_to_aggregate is None else Rounds(replicas_to_aggregate, first_round)
        self._max_deaths, self._max_deaths_of_proven = max_deaths, max_deaths_of_proven
        self._proven: set[Hashable] = set()
        self._queued: deque[Closure] = deque()
        self._members: dict[Worker, _Member] = {}
        self._clocks = WorkerClocks()
        self._unfinished: set[int] = set()
        self._requeued: set[int] = set()  # the numbers of closures that a worker has had
        self._next_number = self._low = first_number
        self._num_in_flight = 0
        self._error: BaseException | None = None
        self._breakage: BaseException | None = None
        self._is_closed = False
        self._paused: set[Hashable] = set()
        self.counts = Counts()

    # --- state -----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued, nothing is in flight, and no round waits to be applied."""
        return not self._queued and self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """True if nothing is in flight and no round waits to be applied."""
        return not self._num_in_flight and self.complete_round is None

    @property
    def has_half_done(self) -> bool:
        """True if a closure that has not ended was requeued. Some servers may have its updates, and others not yet."""
        self._requeued &= self._unfinished
        return bool(self._requeued)

    @property
    def complete_round(self) -> Round | None:
        """A round that can be applied now; None if there is none."""
        return None if self.rounds is None else self.rounds.complete

    @property
    def is_full(self) -> bool:
        return not self.room

    @property
    def room(self) -> int:
        """The number of closures that may be queued now."""
        return max(0, self._capacity - len(self._queued))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_broken(self) -> bool:
        return self._breakage is not None

    @property
    def has_error(self) -> bool:
        """True if a failure waits to be collected. Nothing can be scheduled until then."""
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
        """A number below which all closures have ended."""
        while self._low < self._next_number and self._low not in self._unfinished:
            self._low += 1
        return self._low

    def in_flight(self, worker: Worker) -> int:
        """Returns the number of closures that a worker has taken and that have not ended."""
        return len(self._members[worker].in_flight)

    @property
    def slowest_clock(self) -> int | None:
        """The number of closures that the slowest connected worker has ended; None if no worker is connected."""
        return self._clocks.slowest

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the closures that have not ended, in their order."""
        return sorted(self._unfinished)

    @property
    def has_work(self) -> bool:
        """True if a closure is queued that some worker may take now, as far as it does not depend on the worker."""
        if not self._queued or self._paused:
            return False
        return self.rounds is None or self.rounds.is_open(self._queued[0].round_key, self._clocks.num_here)

    def has_taken(self, worker: Worker, closure: Closure) -> bool:
        """True if a worker has taken a closure, and it has not ended."""
        return closure.number in self._members[worker].in_flight

    def is_too_far_ahead(self, worker: Worker) -> bool:
        """True if a connected worker must wait for the slowest one."""
        return self._is_too_far_ahead(self._members[worker])

    def oldest(self, worker: Worker) -> Closure | None:
        """Returns the closure that a worker runs now; None if it has none."""
        return next(iter(self._members[worker].in_flight.values()), None)

    def may_take(self, worker: Worker) -> bool:
        """True if there is a closure that the worker may take now."""
        if not self._queued or self._paused:
            return False
        member = self._members[worker]
        if not member.is_here or self._is_too_far_ahead(member):
            return False
        if member.in_flight and len(self._queued) <= self._num_waiting():
            return False
        return self.rounds is None or self._is_of_round(worker, member, self.rounds)

    # --- events ----------------------------------------------------------------------------------------

    def add(self, closure: Closure) -> None:
        """Queues a closure that has its number. It may be over the capacity, if it was made before the queue was full.

        Call it only if the queue is open and has no error.
        """
        assert not self._is_closed
        assert not self.has_error
        self._count(closure)
        self._unfinished.add(closure.number)
        self._queued.append(closure)

    def add_failed(self, closure: Closure, error: BaseException) -> Ended:
        """Adds a closure that cannot run, and fails it. Call it only when ``add`` may be called."""
        assert not self._is_closed
        assert not self.has_error
        self._count(closure)
        return self._fail(closure, error)

    def add_cancelled(self, closure: Closure) -> Ended:
        """Adds a closure that comes too late: the queue is closed or has an error. It is cancelled."""
        self._count(closure)
        return self._cancel(
            [closure], _CLOSED if self._is_closed else f"It was scheduled after this: {self._reason}"
        )

    def take(self, worker: Worker) -> Closure | None:
        """Returns the next closure for a worker; None if there is none for it now."""
        if not self.may_take(worker):
            return None
        closure = self._queued.popleft()
        member = self._members[worker]
        if not member.in_flight:
            self._clocks.took(member.clock)
        member.in_flight[closure.number] = closure
        self._num_in_flight += 1
        if self.rounds is not None:
            closure.round = self.rounds.take(worker, closure.round_key, closure.number)
        closure.travels_alone = not self._is_good_company(closure)
        return closure

    def finished(self, worker: Worker, closure: Closure) -> bool:
        """Records that a worker has finished a closure. Returns False if the answer is too late to count."""
        if not self._ends(worker, closure):
            return False
        self._proven.add(closure.kind)
        self.counts.finished += 1
        if self.rounds is not None:
            self.rounds.ended(closure.round_key, closure.round, closure.number)
        return True

    def failed(self, worker: Worker, closure: Closure, error: BaseException) -> Ended:
        """Records that a closure raised an error on a worker."""
        if not self._ends(worker, closure):
            return []
        self._leave_rounds([closure])
        return self._fail(closure, error)

    def returned(self, worker: Worker, closure: Closure) -> Ended:
        """Requeues a closure that a worker could not run, perhaps through no fault of either."""
        if not self._leaves(worker, closure):
            return []
        closure.num_returns += 1
        self._leave_rounds([closure])
        return self._requeue([closure])

    def back(self, worker: Worker) -> None:
        """Records that a worker is connected, for the first time or again."""
        slowest = self._clocks.slowest
        member = self._members.setdefault(worker, _Member())
        self._left(member)
        member.is_here = True
        member.clock = slowest if slowest is not None else member.clock
        self._came(member)

    def lost(self, worker: Worker, running: Sequence[Closure] = ()) -> Ended:
        """Records that a worker is lost. ``running`` has its running closure, or several of which one ran, if known."""
        member = self._members.setdefault(worker, _Member())
        self._left(member)
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
        """Adds a reason to pause. No closure is taken then, but in-flight closures end and new ones are queued."""
        self._paused.add(why)

    def resume(self, why: Hashable) -> None:
        """Removes a reason to pause."""
        self._paused.discard(why)

    def broke(self, error: BaseException) -> Ended:
        """Ends all closures with ``error``, in-flight ones too, because a resource that all need is lost."""
        self._breakage = error
        ended: Ended = [(c, error) for m in self._members.values() for c in m.in_flight.values()]
        self._drop_in_flight()
        if self.rounds is not None:
            self.rounds.clear()
        self._unfinished.difference_update(closure.number for closure, _ in ended)
        self.counts.failed += len(ended)
        return ended + self._cancel_queued(f"It was queued when this happened: {error}")

    def round_failed(self, over: Round, error: BaseException) -> Ended:
        """Records that the gradients of a round could not be applied, and are lost."""
        assert self.rounds is not None
        self.rounds.forget(over)
        if not self.has_error:
            self._error = error
        return self._cancel_queued(f"It was queued when gradients could not be applied: {error}")

    def mended(self) -> None:
        """Ends a breakage, because the resource that all closures need is available again."""
        self._breakage = None

    def close(self) -> Ended:
        """Closes the queue: cancels queued and in-flight closures, and allows no others."""
        self._is_closed = True
        held = [closure for member in self._members.values() for closure in member.in_flight.values()]
        self._drop_in_flight()
        if self.rounds is not None:
            self.rounds.clear()
        return self._cancel(held, _CLOSED) + self._cancel_queued(_CLOSED)

    def collect(self) -> BaseException | None:
        """Returns the error to raise now, if any. A failure is returned once, when nothing is in flight."""
        if self._breakage is not None:
            self._error = None
            return self._breakage
        if self._num_in_flight:
            return None
        error, self._error = self._error, None
        return error

    def keep(self, error: BaseException) -> None:
        """Takes back a failure that ``collect`` has returned, because nobody has seen it."""
        if not self.has_error:
            self._error = error

    # --- the rules -------------------------------------------------------------------------------------

    def _leaves(self, worker: Worker, closure: Closure, num_ended: int = 0) -> bool:
        member = self._members.get(worker)
        if member is None or closure.number not in member.in_flight:
            return False
        del member.in_flight[closure.number]
        if member.is_here:
            self._clocks.ended(member.clock, num_ended, is_idle=not member.in_flight)
        member.clock += num_ended
        self._num_in_flight -= 1
        return True

    def _ends(self, worker: Worker, closure: Closure) -> bool:
        if not self._leaves(worker, closure, 1):
            return False
        self._unfinished.discard(closure.number)
        return True

    def _count(self, closure: Closure) -> None:
        """Counts a closure as scheduled. Numbers between the last one and its own are never used."""
        assert closure.number >= self._next_number, f"closure {closure.number} after {self._next_number - 1}"
        self._next_number = closure.number + 1
        self.counts.scheduled += 1

    def _left(self, member: _Member) -> None:
        """Takes a worker out of the counts, before it changes."""
        if member.is_here:
            self._clocks.leave(member.clock, is_idle=not member.in_flight)

    def _came(self, member: _Member) -> None:
        """Puts a worker into the counts again, after its change."""
        if member.is_here:
            self._clocks.enter(member.clock, is_idle=not member.in_flight)

    def _drop_in_flight(self) -> None:
        for member in self._members.values():
            self._left(member)
            member.in_flight = {}
            self._came(member)
        self._num_in_flight = 0

    def _fail(self, closure: Closure, error: BaseException) -> Ended:
        self.counts.failed += 1
        ended: Ended = [(closure, error)]
        if self._error is None and self._breakage is None:
            self._error = error
        return ended + self._cancel_queued(f"It was queued when '{closure.name}' failed: {error}")

    def _requeue(self, closures: list[Closure]) -> Ended:
        if self._is_closed or self.has_error:
            why = (
                _CLOSED
                if self._is_closed
                else f"It was on a worker that was lost, after this: {self._reason}"
            )
            return self._cancel(closures, why)
        self._queued.extendleft(reversed(closures))
        self._requeued &= self._unfinished  # only they count
        self._requeued.update(closure.number for closure in closures)
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
            f"The scheduled function '{closure.name}' probably kills workers: {closure.num_deaths} of them died or "
            f"were silent for too long while they ran it (closure {closure.number}), last {worker}. "
            "See their logs. Common reasons are too little memory and a crash in a compiled program.",
            type="",
            task=str(worker),
        )

    def _num_waiting(self) -> int:
        """The number of workers that have nothing in flight and may take a closure."""
        clocks, slowest = self._clocks, self._clocks.slowest
        if self._max_staleness is None or slowest is None:
            return clocks.num_idle
        return clocks.num_idle_until(slowest + self._max_staleness)

    def _is_of_round(self, worker: Worker, member: _Member, rounds: Rounds) -> bool:
        in_flight = [closure.round for closure in member.in_flight.values()]
        clocks = self._clocks
        return rounds.may_take(worker, self._queued[0].round_key, in_flight, clocks.num_idle, clocks.num_here)

    def _leave_rounds(self, closures: list[Closure]) -> None:
        if self.rounds is not None:
            for closure in closures:
                self.rounds.left(closure.round_key, closure.number)

    def _is_too_far_ahead(self, member: _Member) -> bool:
        if self._max_staleness is None:
            return False
        slowest = self._clocks.slowest
        assert slowest is not None  # the member itself is there
        return member.clock + len(member.in_flight) - slowest > self._max_staleness


_CLOSED = "The coordinator was closed before it ended."


def _cancelled(closure: Closure, why: str) -> CancelledError:
    # TensorFlow's message begins like this.
    return CancelledError(
        f"The corresponding function is cancelled. Please reschedule the function. '{closure.name}' did not run, "
        f"or ran only in part. {why}"
    )
