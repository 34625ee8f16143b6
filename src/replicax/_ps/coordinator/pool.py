"""``WorkerPool``: connects the workers to the queue of closures.

The queue has the rules (``closures.py``); the pool has its lock and the waiting threads. The thread that schedules a
function sends it to an idle worker at once. A worker that has answered takes the next ones itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.closures import ClosureQueue
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.pool_worker import PoolWorker
from replicax._ps.coordinator.ps_recovery import OnPsRestart
from replicax._ps.coordinator.resources import Resource, Resources
from replicax._ps.coordinator.rounds import Round
from replicax._ps.coordinator.scheduled_work import Work, settle
from replicax._ps.coordinator.server_monitor import ServerMonitor
from replicax._src.program_kit.errors import ContextError, UnavailableError, WaitTimeoutError

# With this many closures queued, the scheduling thread lets the workers' threads run after every few closures.
_NUM_AHEAD, _NUM_BETWEEN = 32, 8
_NUM_AT_ONCE = 2  # closures that a worker gets one by one, before it has answered
_DRAIN_PAUSE_S = 0.01
_END_S: Final = 15.0


@final
class WorkerPool:
    """Hands closures from the scheduling threads to the workers, and returns their results. Monitors the parameter
    servers.

    It does not refer to the coordinator, so that the coordinator can be dropped.

    Args:
      queue: The rules.
      session: The session with the tasks.
      limits: The timeouts.
      on_ps_restart: See ``ClusterCoordinator``.

    Attributes:
      queue: The rules. Use it under the lock.
      resources: Datasets and values that each worker makes.
      workers: The workers, by number.
      servers: The monitor of the parameter servers.
    """

    def __init__(
        self, queue: ClosureQueue, session: Session, limits: Limits, on_ps_restart: OnPsRestart = "continue"
    ):
        self.queue = queue
        self.resources = Resources()
        self.lock = threading.Lock()
        self._room = threading.Condition(self.lock)  # for threads that schedule
        self._quiet = threading.Condition(self.lock)  # for threads that wait until all closures have ended
        self._complete = threading.Condition(self.lock)  # for the thread that applies rounds
        self._num_waiting_for_room = 0
        self._given_up: dict[str, BaseException] = {}
        self._broken: set[Hashable] = set()
        self.servers = ServerMonitor(session, self, limits, on_ps_restart)
        self.workers = [PoolWorker(number, session, self, limits) for number in range(session.num_workers)]

    # --- scheduling -------------------------------------------------------------------------------------

    def schedule(self, name: str, work: Work) -> None:
        """Queues a closure. Blocks while the queue is full. Raises the failure of an earlier closure."""
        round_key = None if work.prepared is None else work.prepared.round_key
        worker: PoolWorker | None = None
        try:
            with self.lock:
                self._wait_for_room()
                closure = self.queue.schedule(name, work, work.kind, round_key)
                worker = self._idlest()
                closures = [] if worker is None else worker.take()
                num_queued = self.queue.num_queued
            if worker is not None and closures:
                worker.send_soon(closures)
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C: it is unknown whether the taken closures were sent
            self._interrupted(worker, error)
            raise
        if num_queued > _NUM_AHEAD and not closure.number % _NUM_BETWEEN:
            time.sleep(0)  # otherwise each waits 5 ms for the interpreter lock

    def _interrupted(self, worker: PoolWorker | None, error: BaseException) -> None:
        if worker is not None:
            worker.interrupt(error)
        with self.lock:
            self.wake_hungry()

    def refuse(self, name: str, work: Work, error: BaseException) -> None:
        """Queues a closure that is known to fail."""
        with self.lock:
            self._wait_for_room()
            ended = self.queue.refuse(name, work, error)
            self.notify_waiting()
        settle(ended)

    def check(self) -> None:
        """Raises the failure of an earlier closure, once nothing is in flight."""
        with self.lock:
            self._raise_failure(None)

    def join(self, timeout_s: float | None) -> None:
        """Waits until all closures have ended. Raises the failure of an earlier closure."""
        with self.lock:
            self._wait(self._quiet, lambda: self.queue.is_idle, timeout_s, "join()")
            self._raise_failure(timeout_s)

    def done(self) -> bool:
        """True if all closures have ended. Raises the failure of an earlier one."""
        with self.lock:
            self._raise_failure(None)
            return self.queue.is_idle

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the closures and of each task."""
        with self.lock:
            given_up = set(self._given_up)
        return {
            "closures": self.closure_statistics(),
            "workers": {
                worker.name: {**worker.statistics(), "given_up": worker.name in given_up}
                for worker in self.workers
            },
            **self.servers.statistics(),
        }

    def closure_statistics(self) -> dict[str, Any]:
        """Returns the statistics of the queue."""
        with self.lock:
            queue, counts = self.queue, self.queue.counts
            return {
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
            }

    def _wait_for_room(self) -> None:
        queue = self.queue
        self._raise_failure(None)
        if queue.is_full:
            self._num_waiting_for_room += 1
            try:
                is_over = lambda: not queue.is_full or queue.has_error or queue.is_closed  # noqa: E731
                self._wait(self._room, is_over, None, "schedule()")
            finally:
                self._num_waiting_for_room -= 1
            self._raise_failure(None)
        if queue.is_closed:
            raise ContextError("This ClusterCoordinator is closed. Make a new one.")

    def _raise_failure(self, timeout_s: float | None) -> None:
        queue = self.queue
        if not queue.has_error:
            return
        self._wait(self._quiet, lambda: queue.is_idle or not queue.has_error, timeout_s, "A failure")
        error = queue.collect()
        if error is not None:
            raise error.with_traceback(None)

    def _wait(
        self, condition: threading.Condition, is_so: Callable[[], bool], timeout_s: float | None, what: str
    ) -> None:
        if not condition.wait_for(is_so, timeout_s):
            raise WaitTimeoutError(
                f"{what} has waited for {timeout_s:g} s: {self.queue.num_in_flight} scheduled functions are in "
                f"flight and {self.queue.num_queued} are queued. Wait longer, or look at coordinator.statistics()."
            )

    # --- events ----------------------------------------------------------------------------------------

    def broke(self, error: BaseException, why: Hashable = None) -> None:
        """Fails all closures because a resource that all need is lost, until ``mended`` is called with the same
        reason.
        """
        with self.lock:
            self._broken.add(why)
            ended = self.queue.broke(error)
            self.notify_waiting()
        settle(ended)

    def mended(self, why: Hashable) -> None:
        """Ends a breakage for this reason. The pool resumes if nothing else is broken."""
        with self.lock:
            if why in self._broken:
                self._broken.remove(why)
                if not self._broken:
                    self.queue.mended()

    def pause(self, why: Hashable) -> None:
        """Stops giving closures to workers, until ``resume`` with the same reason."""
        with self.lock:
            self.queue.pause(why)

    def resume(self, why: Hashable) -> None:
        """Removes a reason to pause. Workers get closures again if there is no other reason."""
        with self.lock:
            self.queue.resume(why)
            self.wake_hungry()

    @contextlib.contextmanager
    def drained(self) -> Iterator[bool]:
        """Returns a context in which no closure is in flight and no round is applied.

        It gives False if the pool broke or was closed before that state was reached.
        """
        why = object()
        self.pause(why)
        try:
            while not self.queue.is_quiet and not self._is_over:
                time.sleep(_DRAIN_PAUSE_S)
            yield not self._is_over
        finally:
            self.resume(why)

    @property
    def _is_over(self) -> bool:
        return self.queue.is_closed or self.queue.is_broken

    # --- life cycle -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads that connect to workers and monitor servers."""
        self.servers.start()
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        """Cancels all closures and ends the threads, without waiting for them. May be called again."""
        with self.lock:
            ended = self.queue.close()
            self.notify_waiting()
            for worker in self.workers:
                worker.wake.notify_all()
            self._complete.notify_all()
        settle(ended)
        self.resources.close()
        for task in (*self.workers, self.servers):
            task.close()

    def join_threads(self, timeout_s: float = _END_S) -> None:
        """Waits for the threads to end."""
        until = time.monotonic() + timeout_s
        for task in (*self.workers, self.servers):
            task.join(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Closes the pool, and waits for the threads."""
        self.close()
        self.join_threads()

    def add(self, resource: Resource) -> None:
        """Has all workers make a resource."""
        self.resources.add(resource)
        for worker in self.workers:
            worker.poke()

    def given_up(self, name: str, error: BaseException) -> None:
        """Records that the pool no longer tries to reach a worker. It breaks if that was the last one."""
        with self.lock:
            self._given_up[name] = error
            is_last = len(self._given_up) == len(self.workers)
        if is_last or not isinstance(error, UnavailableError):
            self.broke(error)

    # --- rounds ----------------------------------------------------------------------------------------

    @property
    def has_rounds(self) -> bool:
        """True if gradients are averaged."""
        return self.queue.rounds is not None

    @property
    def next_round_number(self) -> int:
        return self.queue.next_round

    @property
    def low_round(self) -> int:
        """A number below which all rounds are over."""
        with self.lock:
            return 0 if self.queue.rounds is None else self.queue.rounds.low

    @property
    def num_waiting_gradients(self) -> int:
        """The number of gradients that wait for others of their round."""
        with self.lock:
            return 0 if self.queue.rounds is None else self.queue.rounds.num_waiting

    def next_round(self) -> Round | None:
        """Waits for a round that can be applied; None once the pool is closed."""
        queue = self.queue
        with self.lock:
            self._complete.wait_for(lambda: queue.complete_round is not None or queue.is_closed)
            return None if queue.is_closed else queue.complete_round

    def is_due(self, complete: Round) -> bool:
        """True if a round still has to be applied."""
        with self.lock:
            return self.queue.rounds is not None and self.queue.rounds.is_due(complete)

    def round_applied(self, complete: Round) -> None:
        """Ends a round that has been applied, so that the next one begins."""
        with self.lock:
            if self.queue.rounds is not None:
                self.queue.rounds.applied(complete)
            self.notify_waiting()
            self.wake_hungry()

    def round_failed(self, complete: Round, error: BaseException) -> None:
        """Records that a round could not be applied."""
        with self.lock:
            ended = self.queue.round_failed(complete, error)
            self.notify_waiting()
            self.wake_hungry()
        settle(ended)

    @property
    def next_number(self) -> int:
        """The number of the next closure."""
        return self.queue.next_number

    @property
    def is_closed(self) -> bool:
        return self.queue.is_closed

    # --- the caller holds the lock -----------------------------------------------------------------------

    def notify_waiting(self) -> None:
        """Wakes threads that wait for a state that has been reached."""
        if self.queue.is_idle:
            self._quiet.notify_all()
        elif self.queue.complete_round is not None:
            self._complete.notify_all()
        if self._num_waiting_for_room and (not self.queue.is_full or self.queue.has_error):
            self._room.notify_all()

    def _idlest(self) -> PoolWorker | None:
        """Returns the least busy worker if it should get a new closure at once.

        A worker that has some closures, and will answer soon, takes the next ones together.
        """
        best = None
        for worker in self.workers:
            is_better = worker.is_hungry and (best is None or worker.num_in_flight < best.num_in_flight)
            if is_better and self.queue.may_take(worker.name):
                best = worker
        return None if best is None or best.num_in_flight >= _NUM_AT_ONCE else best

    def wake_hungry(self, but: PoolWorker | None = None) -> None:
        """Wakes workers that asked for closures in vain and may take some now."""
        for worker in self.workers:
            if worker.is_hungry and worker is not but and self.queue.may_take(worker.name):
                worker.is_hungry = False
                worker.wake.notify_all()
