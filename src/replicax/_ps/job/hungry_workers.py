"""``HungryWorkers``: the workers that want functions, least busy first. Choosing loops over many only in rounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from replicax._ps.job.closures import ClosureQueue
from replicax._ps.job.worker_state import WorkerState


@final
class HungryWorkers:
    """Ordered sets of workers: idle ones, those with one function, and those with more.

    Busy workers that have waited longest come first. Of the idle ones, that which became idle last comes first: its
    processor's caches still have what functions need. A worker that must wait for the slowest one is put aside until
    that one is further.
    """

    def __init__(self, queue: ClosureQueue):
        self._queue = queue
        self._by_load: tuple[OrderedDict[WorkerState, None], ...] = (
            OrderedDict(),
            OrderedDict(),
            OrderedDict(),
        )
        self._ahead: OrderedDict[WorkerState, None] = OrderedDict()
        self._place_of: dict[WorkerState, OrderedDict[WorkerState, None]] = {}
        self._slowest: int | None = None  # when those ahead were put aside

    def put(self, worker: WorkerState, num_in_flight: int, *, is_new: bool = False) -> None:
        """Adds a worker: an idle one before the other idle ones, if it is not new, and a busy one behind the others."""
        self._move(worker, self._by_load[num_in_flight if num_in_flight < 2 else 2])
        if not num_in_flight and not is_new:
            self._by_load[0].move_to_end(worker, last=False)

    def _move(self, worker: WorkerState, to: OrderedDict[WorkerState, None]) -> None:
        before = self._place_of.get(worker)
        if before is not None:
            del before[worker]
        self._place_of[worker] = to
        to[worker] = None

    def remove(self, worker: WorkerState) -> None:
        """Removes a worker, if it is there."""
        place = self._place_of.pop(worker, None)
        if place is not None:
            del place[worker]

    @property
    def has_idle(self) -> bool:
        """True if a worker that has at most one function wants more."""
        return bool(self._by_load[0] or self._by_load[1])

    def next(self, *, only_idle: bool) -> WorkerState | None:
        """Returns a worker that may take a function now; None if there is none.

        Args:
          only_idle: True if the worker must have at most one function. A busier one answers soon, and takes the next
            ones together.
        """
        if not self._queue.has_work:
            return None
        if self._ahead:
            self._return_those_ahead()
        for load, workers in enumerate(self._by_load[: 2 if only_idle else 3]):
            if not workers:
                continue
            found, aside = self._first(workers, all_alike=load > 0 and self._queue.rounds is None)
            if aside:
                self._slowest = self._queue.slowest_clock
            for worker in aside:
                self._move(worker, self._ahead)
            if found is not None:
                return found
        return None

    def _first(
        self, workers: OrderedDict[WorkerState, None], *, all_alike: bool
    ) -> tuple[WorkerState | None, list[WorkerState]]:
        """Returns the first worker that may take a function, and those before it that are too far ahead."""
        aside: list[WorkerState] = []
        for worker in workers:
            if self._queue.may_take(worker.name):
                return worker, aside
            if self._queue.is_too_far_ahead(worker.name):
                aside.append(worker)
            elif all_alike:  # the queue leaves the rest to idle workers
                break
        return None, aside

    def _return_those_ahead(self) -> None:
        if self._queue.slowest_clock != self._slowest:
            for worker in list(self._ahead):
                self.put(worker, self._queue.in_flight(worker.name))
