"""``RemoteWorker``: keeps one worker busy: connects, sends closures and takes answers, notices its death, connects
again.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.coordinator.closures import Closure
from replicax._src.coordinator.dispatch import Dispatch, Port
from replicax._src.coordinator.prepared import Client, Session
from replicax._src.coordinator.resources import Resources
from replicax._src.coordinator.stream import WorkerStream
from replicax._src.input.dataset import OutOfRangeError
from replicax._src.ps.errors import (
    ClosureAbortedError,
    RemoteError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)
from replicax._src.ps.messages import Message

log = logging.getLogger("replicax")

_DEPTH = 2  # closures in flight; 1 if they are slow
_FAST_DEPTHS = 8, 32  # the more the faster they are, so many that they are done within a time
_FAST_S, _SLOW_S, _FLIGHT_S = 0.001, 0.1, 0.008
_WEIGHT, _MOST_WEIGHT = 0.1, 0.5
_HELLO_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_JOIN_S = 10.0
_MAX_ASKS = 16


@final
@dataclass(frozen=True)
class Limits:
    """When a task counts as lost, and for how long a lost one is waited for.

    Attributes:
      beat_s: Between two questions whether it is alive.
      beat_timeout_s: How long an answer may take.
      missed_beats: How many in a row make it lost.
      ps_silence_s: How long a parameter server that does not answer, and may only be stopped or cut off, is waited for.
        After so long it gives this coordinator up.
      reconnect_s: How long a worker is tried to be reached again, or at first.
      ps_retries: How often a closure is tried again that could not reach a parameter server.
      ps_restart_retries: The same, of a parameter server that comes back after it died: nothing is tried while it is
        away.
    """

    beat_s: float = 1.0
    beat_timeout_s: float = 2.0
    missed_beats: int = 2
    ps_silence_s: float = 60.0
    reconnect_s: float = 3600.0
    ps_retries: int = 3
    ps_restart_retries: int = 30


@final
class RemoteWorker:
    """One worker, as the coordinator sees it. Two threads: one connects and sends, the other one receives.

    Args:
      index: Of the worker.
      on_ps_trouble: Told which parameter server a closure could not use, None for one of them; says whether it comes
        back.
      on_given_up: Told why the worker is not tried to be reached any more.
    """

    def __init__(
        self,
        index: int,
        session: Session,
        dispatch: Dispatch,
        resources: Resources,
        limits: Limits,
        on_ps_trouble: Callable[[str | None], bool],
        on_given_up: Callable[[str, BaseException], None],
    ):
        self.name = f"worker {index}"
        self._index, self._session, self._limits = index, session, limits
        self._dispatch, self._resources = dispatch, resources
        self._on_ps_trouble, self._on_given_up = on_ps_trouble, on_given_up
        self.port: Port = dispatch.port(self.name)
        self._closing = threading.Event()
        self._stream: WorkerStream | None = None
        self._num_connections = self._num_restarts = 0
        self._told: dict[str, Any] = {}
        self._beat: dict[str, Any] = {}
        self._took_s = _SLOW_S
        self._thread = threading.Thread(target=self._live, name=f"replicax-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the threads; does not wait for them."""
        self._closing.set()
        if (stream := self._stream) is not None:
            stream.end(None)
        self.port.poke()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def statistics(self) -> dict[str, Any]:
        """Of the connection, and what the worker last said of itself."""
        stream = self._stream
        return {
            "connected": stream is not None and not stream.over.is_set(),
            "connections": self._num_connections,
            "restarts": self._num_restarts,
            "function": self.port.function,
            "in_flight": self.port.num_in_flight,
            "depth": self.port.depth,
            "task": dict(self._told),
            "statistics": dict(self._beat),
        }

    def tell_primaries(self) -> None:
        """Other parameter servers than before serve some variables: the worker, if it is there, need not find out.

        Does not wait.
        """
        if (stream := self._stream) is not None and not stream.over.is_set():
            self._started(self._say_new_primaries, stream)

    def _say_new_primaries(self, stream: WorkerStream) -> None:
        try:
            self._say_primaries(stream.client)
        except Exception as error:
            log.debug("%s: %s", self.name, error)  # who is no primary says so itself

    def _say_primaries(self, client: Client) -> None:
        groups = self._session.groups
        if groups is not None:
            views = [view.described() for view in groups.views]
            header = {"incarnation": self._session.incarnation, "views": views}
            client.ask("primaries", header, _HELLO_S)

    # --- one connection after the other ----------------------------------------------------------------

    def _live(self) -> None:
        while not self._closing.is_set():
            stream = self._connect()
            if stream is None:
                return
            try:
                self._serve(stream)
            except Exception as error:
                log.exception("What keeps %s busy has failed: this is a bug of replicax.", self.name)
                self._dispatch.broke(error)
                return
            finally:
                stream.end(None)
                stream.client.close()

    def _connect(self) -> WorkerStream | None:
        """Tries until the worker is there; None if it is given up, or all is closed."""
        until = time.monotonic() + self._limits.reconnect_s
        pause_s = _PAUSE_S
        while not self._closing.is_set():
            try:
                return self._open()
            except UnavailableError as error:
                if time.monotonic() > until:
                    self._on_given_up(self.name, self._unreachable(error))
                    return None
            except Exception as error:
                self._on_given_up(self.name, error)
                return None
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _unreachable(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"{self.name} could not be reached for {self._limits.reconnect_s:g} s, and is given up: {error}",
            self.name,
        )

    def _open(self) -> WorkerStream:
        client = self._session.connect("worker", self._index)
        try:
            header = {"incarnation": self._session.incarnation, "ps": list(self._session.ps_addresses)}
            told = dict(client.ask("hello", header, _HELLO_S))
            if self._told and self._told.get("instance") != told.get("instance"):
                self._num_restarts += 1
                self._beat = {}
            self._told = told
            self._session.meet_worker(self.name, told)
            self._say_primaries(client)
            link = client.open()
        except BaseException:
            client.close()
            raise
        instance = self._told.get("instance")
        return WorkerStream(self.name, client, link, instance, self._session, self._resources)

    def _serve(self, stream: WorkerStream) -> None:
        self._num_connections += 1
        self._stream = stream
        if self._closing.is_set():
            return
        self._took_s, self.port.depth = _SLOW_S, 1
        self._resources.back(self.name)
        self.port.back(lambda closures: self._send_soon(stream, closures), stream.interrupt)
        others = [self._started(self._receive, stream), self._started(self._watch, stream)]
        try:
            self._send(stream)
        except UnavailableError as error:
            stream.end(error)
        finally:
            stream.end(None)
            for thread in others:
                thread.join(_JOIN_S)
            self._resources.lost(self.name)
            making = stream.making()
            if making is not None and stream.reason is not None:
                self._resources.killed(making.name, self.name)
            self.port.lost(stream.running() if stream.reason is not None else ())
        if stream.reason is not None and not self._closing.is_set():
            log.warning(
                "%s is lost: %s What it was at is run again. It is waited for, for up to %g s.",
                self.name,
                stream.reason,
                self._limits.reconnect_s,
            )

    def _started(self, target: Callable[[WorkerStream], None], stream: WorkerStream) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=(stream,), name=f"replicax-{self.name}-{target.__name__}", daemon=True
        )
        thread.start()
        return thread

    # --- sending ---------------------------------------------------------------------------------------

    def _send(self, stream: WorkerStream) -> None:
        while not stream.over.is_set() and not self._dispatch.is_closed:
            stream.send_resources(self._resources.all())
            while stream.needs:
                self._make(stream, *stream.needs.popleft())
            while stream.unsent:
                self._send_closure(stream, stream.unsent.popleft())
            left = self.port.wait()
            while left:
                left = stream.try_send(left, self.port.low, self.port.num_together)
                if left:
                    self._send_closure(stream, left[0])
                    left = left[1:]

    def _send_soon(self, stream: WorkerStream, closures: Sequence[Closure]) -> None:
        """At once if that is quick, else by the thread that sends: nobody else may wait for a peer that takes
        nothing.
        """
        try:
            left = stream.try_send(closures, self.port.low, self.port.num_together)
        except UnavailableError as error:
            stream.end(error)
            return
        if left:
            stream.unsent.extend(left)
            self.port.poke()

    def _send_closure(self, stream: WorkerStream, closure: Closure) -> None:
        try:
            prepared = closure.work.prepared
            error = None if prepared is None else stream.input_error(prepared)
            if prepared is None:  # it has ended meanwhile
                return
            if error is not None:
                self.port.failed(closure, error)
                return
            stream.send(closure, self.port.low)
        except UnavailableError:
            raise
        except Exception as error:
            self.port.failed(closure, error)

    def _make(self, stream: WorkerStream, closure: Closure, signature: str, end: str | None) -> None:
        """Traces a closure for the elements that a worker has met."""
        prepared = closure.work.prepared
        if prepared is None:
            return
        try:
            prepared.make(signature)
        except OutOfRangeError as error:
            self.port.failed(closure, OutOfRangeError(f"{end} {error}"))
        except Exception as error:
            self.port.failed(closure, error)
        else:
            self._send_closure(stream, closure)

    # --- receiving -------------------------------------------------------------------------------------

    def _receive(self, stream: WorkerStream) -> None:
        try:
            last = time.monotonic()
            while not stream.over.is_set():
                answers, sent_at = stream.receive()
                now = time.monotonic()
                self._measure(now - max(last, sent_at), len(answers))
                last = now
                self._take_answers(stream, answers)
        except BaseException as error:
            stream.end(error)
        finally:
            self.port.poke()

    def _measure(self, took_s: float, count: int) -> None:
        """Fast ones are sent ahead, so that a worker does not wait; behind a slow one nothing waits that others could
        run.
        """
        self._took_s += min(count * _WEIGHT, _MOST_WEIGHT) * (took_s / count - self._took_s)
        least, most = _FAST_DEPTHS
        if self._took_s < _FAST_S:
            self.port.depth = min(max(least, int(_FLIGHT_S / max(self._took_s, 1e-6))), most)
        else:
            self.port.depth = 1 if self._took_s > _SLOW_S else _DEPTH

    def _take_answers(
        self, stream: WorkerStream, answers: Sequence[tuple[Closure, Message | Exception]]
    ) -> None:
        finished: list[tuple[Closure, Message]] = []
        for closure, answer in answers:
            if isinstance(answer, Message) and "need" not in answer.header:
                finished.append((closure, answer))
                continue
            self._finished(stream, finished)
            finished = []
            if isinstance(answer, Message):
                self._needed(stream, closure, answer.header)
            else:
                self._failed(stream, closure, answer)
        self._finished(stream, finished)

    def _finished(self, stream: WorkerStream, finished: Sequence[tuple[Closure, Message]]) -> None:
        if not finished:
            return
        counts = self.port.finished([closure for closure, _ in finished])
        for (closure, answer), does_count in zip(finished, counts, strict=True):
            if does_count:
                work = closure.work
                assemble = None
                if (signature := answer.header.get("signature")) is not None:
                    assemble = functools.partial(work.prepared.assemble, signature=signature)
                work.value.settle(answer.arrays, assemble=assemble)
                work.prepared = work.keeps = None
        following = self.port.following()
        if following:
            self._send_soon(stream, following)

    def _needed(self, stream: WorkerStream, closure: Closure, header: Mapping[str, Any]) -> None:
        if self._may_ask(closure):
            stream.needs.append((closure, header["need"], header["end"]))
            self.port.poke()

    def _may_ask(self, closure: Closure) -> bool:
        """Whether a worker may ask for more of a closure; one that never has enough is broken."""
        closure.num_asks += 1
        if closure.num_asks <= _MAX_ASKS:
            return True
        text = f"{self.name} asked for a program of '{closure.name}' {closure.num_asks} times, and was sent it each time."
        self.port.failed(closure, RemoteError(text, "", self.name))
        return False

    def _failed(self, stream: WorkerStream, closure: Closure, error: Exception) -> None:
        prepared = closure.work.prepared
        input_error = None if prepared is None else stream.input_error(prepared)
        if isinstance(error, UnknownProgramError) and self._session.has_update(error.digest):
            if self._is_tried_again(closure, None):
                return
        elif isinstance(error, UnknownProgramError):
            refusal = stream.forget(error.digest)
            if refusal is None:
                if self._may_ask(closure):
                    stream.unsent.append(closure)
                    self.port.poke()
                return
            error = refusal
        elif isinstance(error, StaleCoordinatorError):
            self._dispatch.broke(error)
            return
        elif isinstance(error, UnavailableError):
            if self._is_tried_again(closure, error.task):
                return
        elif _is(error, ClosureAbortedError):
            self.port.returned(closure)
            return
        self.port.failed(closure, input_error or error)

    def _is_tried_again(self, closure: Closure, ps: str | None) -> bool:
        """A parameter server is not there, or not what it was."""
        limits = self._limits
        most = limits.ps_restart_retries if self._on_ps_trouble(ps) else limits.ps_retries
        if closure.num_returns < most:
            self.port.returned(closure)
            return True
        return False

    # --- watching --------------------------------------------------------------------------------------

    def _watch(self, stream: WorkerStream) -> None:
        """Asks whether the worker is alive; a closure, or its compilation, may take as long as it takes."""
        limits, missed = self._limits, 0
        header = {"incarnation": self._session.incarnation}
        while not stream.over.wait(limits.beat_s):
            try:
                answer = stream.client.ask("beat", header, limits.beat_timeout_s)
            except StaleCoordinatorError as error:
                self._dispatch.broke(error)
                stream.end(error)
            except Exception as error:
                missed += 1
                if missed >= limits.missed_beats:
                    stream.end(error)
            else:
                missed = 0
                self._beat = dict(answer.get("statistics") or {})
                if answer.get("instance") != stream.instance:
                    stream.end(UnavailableError(f"{self.name} is another process than before.", self.name))


def _is(error: Exception, kind: type) -> bool:
    return isinstance(error, kind) or (isinstance(error, RemoteError) and error.type == kind.__name__)
