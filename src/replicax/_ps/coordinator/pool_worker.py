"""``PoolWorker``: keeps one worker busy: takes closures from the queue, sends them, and takes the answers.

``WorkerConnector`` connects to it, and reconnects after it was lost.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.closures import Closure, Ended
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.scheduled_work import settle
from replicax._ps.coordinator.worker_connection import WorkerConnection
from replicax._ps.coordinator.worker_connector import WorkerConnector
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.data import OutOfRangeError
from replicax._src.program_kit.errors import (
    ClosureAbortedError,
    RemoteError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")

_DEPTH = 2  # closures in flight; 1 if they are slow
_FAST_DEPTHS = 8, 32  # more for faster ones, so that all are done within _FLIGHT_S
_FAST_S, _SLOW_S, _FLIGHT_S = 0.001, 0.1, 0.008
_WEIGHT, _MOST_WEIGHT = 0.1, 0.5
_JOIN_S = 10.0
_MAX_ASKS = 16


@final
class PoolWorker:
    """One worker of the pool. It has two threads: one connects and sends, the other one receives.

    Args:
      index: The worker's number.
      session: The session with the tasks.
      pool: The pool that it belongs to.
      limits: The timeouts.

    Attributes:
      wake: A condition that is notified when there is something to send.
      is_hungry: True if it has asked for closures and got fewer than it could have.
      depth: The most closures that it may have at a time.
    """

    def __init__(self, index: int, session: Session, pool: WorkerPool, limits: Limits):
        self.name = f"worker {index}"
        self._session, self._limits = session, limits
        self._pool, self._queue, self._resources = pool, pool.queue, pool.resources
        self.wake = threading.Condition(pool.lock)
        self.is_hungry = self._is_poked = False
        self.depth = 1
        self._low = 0  # all closures below this number had ended when it last took some
        with pool.lock:
            self._queue.lost(self.name)  # it is not connected yet
        self._closing = threading.Event()
        self._connector = WorkerConnector(self.name, index, session, pool, limits, self._closing)
        self._connection: WorkerConnection | None = None
        self._took_s = _SLOW_S
        self._thread = threading.Thread(target=self._live, name=f"replicax-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        self._closing.set()
        if (connection := self._connection) is not None:
            connection.end(None)
        self.poke()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the connection, and the last statistics of the worker."""
        connection = self._connection
        return {
            "connected": connection is not None and not connection.over.is_set(),
            "function": self._function,
            "in_flight": self.num_in_flight,
            "depth": self.depth,
            **self._connector.statistics(),
        }

    def send_primaries(self) -> None:
        """Tells a connected worker about new primaries, so that it need not find out itself. Does not wait."""
        if (connection := self._connection) is not None and not connection.over.is_set():
            self._started(self._connector.send_primaries, connection)

    # --- its share of the queue ------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return self._queue.in_flight(self.name)

    @property
    def _num_together(self) -> int:
        """The most closures that travel together. The worker runs these while it is sent as many others."""
        return max(1, self.depth // 2)

    @property
    def _function(self) -> str | None:
        """The name of the function that the worker runs now."""
        with self._pool.lock:
            closure = self._queue.oldest(self.name)
        return None if closure is None else closure.name

    def _wait(self) -> list[Closure]:
        """Returns closures to send; none if it was poked or the pool was closed."""
        with self._pool.lock:
            while not self._is_poked and not self._queue.is_closed:
                closures = self.take()
                if closures:
                    self._pool.notify_waiting()
                    return closures
                self.wake.wait()
            self._is_poked = False
            return []

    def poke(self) -> None:
        """Ends a ``_wait``, or the next one."""
        with self._pool.lock:
            self._is_poked = True
            self.wake.notify_all()

    def _failed_here(self, closure: Closure, error: BaseException) -> None:
        """Fails a closure that raised an error, or that cannot be sent."""
        self._ended(lambda: self._queue.failed(self.name, closure, error))

    def _returned(self, closure: Closure) -> None:
        """Requeues a closure that could not run."""
        self._ended(lambda: self._queue.returned(self.name, closure))

    def _ended(self, event: Callable[[], Ended], is_hungry: bool = True) -> None:
        with self._pool.lock:
            ended = event()
            self.is_hungry = is_hungry
            self._pool.notify_waiting()
            self._pool.wake_hungry()
        settle(ended)

    def take(self) -> list[Closure]:
        """Takes closures to send to the worker now. The caller holds the lock.

        A worker that has some closures gets as many as travel together, or none.
        """
        queue, worker = self._queue, self.name
        taken: list[Closure] = []
        most = self._num_wanted()
        while len(taken) < most and (closure := queue.take(worker)) is not None:
            taken.append(closure)
        self.is_hungry = self._num_wanted() > 0
        self._low = queue.low
        return taken

    def _num_wanted(self) -> int:
        has = self.num_in_flight
        if not has:
            return self.depth
        return self._num_together if has + self._num_together <= self.depth else 0

    # --- connections -----------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._closing.is_set():
            connection = self._connector.connect()
            if connection is None:
                return
            try:
                self._serve(connection)
            except Exception as error:
                log.exception("The thread of %s has failed: this is a bug in replicax.", self.name)
                self._pool.broke(error)
                return
            finally:
                connection.end(None)
                connection.client.close()

    def _serve(self, connection: WorkerConnection) -> None:
        self._connection = connection
        if self._closing.is_set():
            return
        self._took_s, self.depth = _SLOW_S, 1
        self._resources.back(self.name)
        with self._pool.lock:
            self._queue.back(self.name)
        others = [self._started(self._receive, connection), self._started(self._connector.watch, connection)]
        try:
            self._send(connection)
        except UnavailableError as error:
            connection.end(error)
        finally:
            connection.end(None)
            for thread in others:
                thread.join(_JOIN_S)
            self._resources.lost(self.name)
            making = connection.making()
            if making is not None and connection.reason is not None:
                self._resources.killed(making.name, self.name)
            running = connection.running() if connection.reason is not None else ()
            self._ended(lambda: self._queue.lost(self.name, running), is_hungry=False)
        if connection.reason is not None and not self._closing.is_set():
            log.warning(
                "Lost %s: %s Its in-flight functions will be rescheduled; reconnecting for up to %g s.",
                self.name,
                connection.reason,
                self._limits.reconnect_s,
            )

    def _started(
        self, target: Callable[[WorkerConnection], None], connection: WorkerConnection
    ) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=(connection,), name=f"replicax-{self.name}-{target.__name__}", daemon=True
        )
        thread.start()
        return thread

    # --- sending ---------------------------------------------------------------------------------------

    def _send(self, connection: WorkerConnection) -> None:
        while not connection.over.is_set() and not self._pool.is_closed:
            connection.send(connection.changed(self._resources.all()))
            while connection.needs:
                self._make(connection, *connection.needs.popleft())
            while connection.unsent:
                self._send_closure(connection, connection.unsent.popleft())
            left = self._wait()
            while left:
                small = connection.small(left, self._low, self._num_together)
                left = left[connection.send(small, may_block=False) :]
                if left:
                    self._send_closure(connection, left[0])
                    left = left[1:]

    def send_soon(self, closures: Sequence[Closure]) -> None:
        """Sends taken closures: at once if that does not block, else by the sending thread. Safe from any thread.

        No other thread may wait for a peer that does not read.
        """
        connection = self._connection
        if connection is None:
            return
        try:
            small = connection.small(closures, self._low, self._num_together)
            left = closures[connection.send(small, may_block=False) :]
        except UnavailableError as error:
            connection.end(error)
            return
        if left:
            connection.unsent.extend(left)
            self.poke()

    def interrupt(self, error: BaseException) -> None:
        """Ends the connection, because a thread was interrupted while it sent closures and may have sent them in
        part.
        """
        if (connection := self._connection) is not None:
            connection.interrupt(error)

    def _send_closure(self, connection: WorkerConnection, closure: Closure) -> None:
        try:
            prepared = closure.work.prepared
            error = None if prepared is None else connection.input_error(prepared)
            if prepared is None:  # it has ended in the meantime
                return
            if error is not None:
                self._failed_here(closure, error)
                return
            connection.send(connection.whole(closure, self._low))
        except UnavailableError:
            raise
        except Exception as error:
            self._failed_here(closure, error)

    def _make(self, connection: WorkerConnection, closure: Closure, signature: str, end: str | None) -> None:
        """Traces a closure for elements of the shapes that a worker has met."""
        prepared = closure.work.prepared
        if prepared is None:
            return
        try:
            prepared.make(signature)
        except OutOfRangeError as error:
            self._failed_here(closure, OutOfRangeError(f"{end} {error}"))
        except Exception as error:
            self._failed_here(closure, error)
        else:
            self._send_closure(connection, closure)

    # --- receiving -------------------------------------------------------------------------------------

    def _receive(self, connection: WorkerConnection) -> None:
        try:
            last = time.monotonic()
            while not connection.over.is_set():
                answers, sent_at = connection.receive()
                now = time.monotonic()
                self._measure(now - max(last, sent_at), len(answers))
                last = now
                self._take_answers(connection, answers)
        except BaseException as error:
            connection.end(error)
        finally:
            self.poke()

    def _measure(self, took_s: float, count: int) -> None:
        """Adapts the depth: fast closures are sent ahead so that a worker does not wait, but slow ones leave work to
        others.
        """
        self._took_s += min(count * _WEIGHT, _MOST_WEIGHT) * (took_s / count - self._took_s)
        least, most = _FAST_DEPTHS
        if self._took_s < _FAST_S:
            self.depth = min(max(least, int(_FLIGHT_S / max(self._took_s, 1e-6))), most)
        else:
            self.depth = 1 if self._took_s > _SLOW_S else _DEPTH

    def _take_answers(
        self, connection: WorkerConnection, answers: Sequence[tuple[Closure, Message | Exception]]
    ) -> None:
        finished: list[tuple[Closure, Message]] = []
        for closure, answer in answers:
            if isinstance(answer, Message) and "need" not in answer.header:
                finished.append((closure, answer))
                continue
            self._finished(finished)
            finished = []
            if isinstance(answer, Message):
                self._needed(connection, closure, answer.header)
            else:
                self._failed(connection, closure, answer)
        self._finished(finished)

    def _finished(self, finished: Sequence[tuple[Closure, Message]]) -> None:
        if not finished:
            return
        with self._pool.lock:
            counts = [self._queue.finished(self.name, closure) for closure, _ in finished]
        for (closure, answer), does_count in zip(finished, counts, strict=True):
            if does_count:
                work = closure.work
                assemble = None
                if (signature := answer.header.get("signature")) is not None:
                    assemble = functools.partial(work.prepared.assemble, signature=signature)
                work.value.settle(answer.arrays, assemble=assemble)
                work.prepared = work.keeps = None
        with self._pool.lock:
            following = self.take()
            self._pool.notify_waiting()
            self._pool.wake_hungry(self)
        if following:
            self.send_soon(following)

    def _needed(self, connection: WorkerConnection, closure: Closure, header: Mapping[str, Any]) -> None:
        if self._may_ask(closure):
            connection.needs.append((closure, header["need"], header["end"]))
            self.poke()

    def _may_ask(self, closure: Closure) -> bool:
        """True if a worker may ask again for a program of a closure. A worker that asks forever is broken."""
        closure.num_asks += 1
        if closure.num_asks <= _MAX_ASKS:
            return True
        text = (
            f"{self.name} asked {closure.num_asks} times for a program of '{closure.name}' that it was sent."
        )
        self._failed_here(closure, RemoteError(text, "", self.name))
        return False

    def _failed(self, connection: WorkerConnection, closure: Closure, error: Exception) -> None:
        prepared = closure.work.prepared
        input_error = None if prepared is None else connection.input_error(prepared)
        if isinstance(error, UnknownProgramError) and self._session.has_update(error.digest):
            if self._is_tried_again(closure, None):
                return
        elif isinstance(error, UnknownProgramError):
            refusal = connection.forget(error.digest)
            if refusal is None:
                if self._may_ask(closure):
                    connection.unsent.append(closure)
                    self.poke()
                return
            error = refusal
        elif isinstance(error, StaleCoordinatorError):
            self._pool.broke(error)
            return
        elif isinstance(error, UnavailableError):
            if self._is_tried_again(closure, error.task):
                return
        elif _is(error, ClosureAbortedError):
            self._returned(closure)
            return
        self._failed_here(closure, input_error or error)

    def _is_tried_again(self, closure: Closure, ps: str | None) -> bool:
        """Requeues a closure that a parameter server did not serve. Returns False if it has no retries left."""
        limits = self._limits
        most = limits.ps_restart_retries if self._pool.servers.note_failure(ps) else limits.ps_retries
        if closure.num_returns < most:
            self._returned(closure)
            return True
        return False


def _is(error: Exception, kind: type) -> bool:
    return isinstance(error, kind) or (isinstance(error, RemoteError) and error.type == kind.__name__)
