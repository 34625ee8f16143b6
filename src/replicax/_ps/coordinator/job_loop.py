"""``JobLoop``: the thread that owns the ``Job`` of a coordinator. It hands events to it, and carries its actions out.

Callers, and threads that wait for tasks, put events into its queue. It sends and receives small messages of workers
itself. It waits for a task only briefly: up to 2 s while it sends a small message, or closes a connection.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, Final, TypeVar, final

from replicax._ps.client.request_threads import RequestThreads
from replicax._ps.client.session import Session
from replicax._ps.coordinator.coordinator_options import CoordinatorOptions
from replicax._ps.coordinator.readable import Readable
from replicax._ps.coordinator.remote_value import RemoteValue
from replicax._ps.coordinator.scheduled_work import Work
from replicax._ps.coordinator.task_requests import TaskRequests
from replicax._ps.coordinator.worker_link import Answer, WorkerLink
from replicax._ps.coordinator.worker_resource import Resource
from replicax._ps.job import actions_out as actions
from replicax._ps.job import events_in as events
from replicax._ps.job.job_servers import JobServers
from replicax._ps.job.limits import Limits
from replicax._ps.job.machine import Job
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.setup import Setup
from replicax._ps.transport.messages import Message
from replicax._ps.worker.resources import WORKER_INDEX
from replicax._src.program_kit.errors import CancelledError, WaitTimeoutError

log = logging.getLogger("replicax")

Value = TypeVar("Value")

_END_S: Final = 15.0
_STATISTICS_S: Final = 60.0
_LONGEST_SLEEP_S: Final = 1.0  # of the owner: Ctrl-C may interrupt a caller just before it rings
_NUM_AT_ONCE: Final = 64  # events, before the owner looks at its links
_NUM_AHEAD: Final = 1024  # events that the owner has not taken, before a caller waits for it
_NUM_BEFORE_YIELD: Final = 8


@final
class JobLoop:
    """Runs a job in a thread of its own, its *owner*. Any thread may call the methods up to ``put``.

    It does not refer to the coordinator, so that the coordinator can be dropped.

    Args:
      session: The session with the tasks.
      setup: The tasks and the options.
      instances, first_epoch: See ``JobServers``.

    Raises:
      InvalidArgumentError: The options do not fit each other, or the servers.

    Attributes:
      is_closed: True once ``close`` was called, or the owner has ended.
      servers: The parameter servers' side of the job. Use it after the end.
    """

    def __init__(self, session: Session, setup: Setup, instances: Sequence[str], first_epoch: int = 1):
        self._session = session
        self.servers: JobServers

        def servers_of(hooks: JobHooks) -> JobServers:
            self.servers = JobServers(hooks, instances, first_epoch)
            return self.servers

        self._job = Job(setup, servers_of)
        self._events: deque[events.Event | Callable[[], None]] = deque([self._begin])
        self._values: dict[int, RemoteValue] = {}
        self._works: dict[int, Work] = {}
        self._resources: dict[str, Resource] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._scheduling = threading.Lock()  # a function's number and its place in the queue are one step
        self._numbers, self._waits = count(setup.first_number), count(1)
        self._links: dict[str, WorkerLink] = {}
        self._watched: dict[int, WorkerLink] = {}
        self._by_header: dict[int, Message] = {}
        self._threads = RequestThreads("replicax-requests")
        self._requests = TaskRequests(session, self._threads, self.put)
        self._readable = Readable()
        self.is_closed = self._is_over = self._has_ended = False
        self._is_asleep = False
        self._after_end = threading.RLock()  # the owner has ended: callers own the job in turn
        self._thread = threading.Thread(target=self._run, name="replicax-coordinator", daemon=True)
        self._carry_out: dict[type, Callable[[Any], None]] = {
            actions.Ask: self._ask,
            actions.Perform: self._requests.perform,
            actions.OpenWorker: self._open,
            actions.CloseWorker: self._close_link,
            actions.SendToWorker: self._send,
            actions.MakeProgram: self._make_program,
            actions.Settle: self._settle,
            actions.EndWait: self._end_wait,
            actions.Log: _write,
        }

    # --- callers ---------------------------------------------------------------------------------------

    def schedule(
        self, name: str, value: RemoteValue, work: Work | None, error: BaseException | None = None
    ) -> None:
        """Queues a function. Waits while the queue is full. Raises the failure of an earlier function.

        Args:
          name: The name of the function.
          value: The future of its result.
          work: The function; None if it cannot run because of ``error``.
        """
        kind: Hashable = name
        round_key, needs = None, events.NO_NEEDS
        if work is not None:
            kind, needs = work.kind, work.sendable.needs
            round_key = work.sendable.prepared.round_key
        self.check()
        with self._scheduling:
            number = next(self._numbers)
            self._values[number] = value
            if work is not None:
                self._works[number] = work
            self._events.append(events.Scheduled(number, name, kind, needs, round_key, error))
        if self._has_ended:
            self._take_rest()
        elif self._is_asleep and (error is not None or not self._job.may_wait):
            self._wake()
        if not number % _NUM_BEFORE_YIELD and len(self._events) > _NUM_BEFORE_YIELD:
            time.sleep(0)  # otherwise the owner waits 5 ms for the interpreter lock

    def check(self) -> None:
        """Waits while the queue is full. Raises the failure of an earlier function, once nothing is in flight."""
        if len(self._events) >= min(self._job.room, _NUM_AHEAD):
            try:
                self._wait("room", "schedule()")
            except BaseException:
                self._session.renew()
                raise

    def join(self, timeout_s: float | None) -> None:
        """Waits until all functions have ended. Raises the failure of an earlier function."""
        self._wait("idle", "join()", timeout_s)

    def done(self) -> bool:
        """True if all functions have ended. Raises the failure of an earlier function."""
        return self._wait("done", "done()")

    def add(self, resource: Resource) -> None:
        """Has all workers make a resource."""
        self._resources[resource.name] = resource
        self.put(events.ResourceAdded(resource.name, resource.kind, resource.function))

    def spec(self, name: str, timeout_s: float) -> Any:
        """Waits for the first worker that has made a resource, and returns what the worker says of it.

        Raises:
          ClosureInputError: No worker could make it.
          WaitTimeoutError: ``timeout_s`` has passed.
        """
        return self._wait("resource", f"The wait for {name!r}", timeout_s, name)

    def drop(self, name: str) -> None:
        """Lets workers drop a resource. Garbage collection calls it, in any thread, so it takes no lock."""
        self._events.append(events.ResourceDropped(name))
        self._wake()

    def note_variables(self, num_made: int) -> None:
        """Says how many variables were created in the session."""
        self.put(events.VariablesMade(num_made))

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the functions and of each task."""
        return self._query(self._job.statistics)

    @property
    def num_waiting_gradients(self) -> int:
        """The number of gradients that wait for others of their round."""
        return self._query(lambda: self._job.num_waiting_gradients)

    @property
    def next_number(self) -> int:
        """The number of the first function of the next job. Read it after the end."""
        return self._job.next_number

    @property
    def next_round(self) -> int:
        """The number of the first round of the next job."""
        return self._job.next_round

    # --- life cycle ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the owner."""
        self._session.note_variables = self.note_variables
        self.note_variables(self._session.num_made)  # others may have been created since the job was made
        self._thread.start()

    def close(self) -> None:
        """Cancels all functions and ends the threads, without waiting for them. May be called again."""
        self.is_closed = True
        self.put(events.Closed())

    def join_threads(self, timeout_s: float = _END_S) -> None:
        """Waits for the threads to end; not in the owner, without which they do not."""
        until = time.monotonic() + timeout_s
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            self._threads.join(until)

    def end(self) -> None:
        """Closes the job, and waits for the threads."""
        self.close()
        self.join_threads()

    # --- the queue -------------------------------------------------------------------------------------

    def put(self, item: events.Event | Callable[[], None]) -> None:
        """Has the owner take an event, or call a function, after those that were put before."""
        self._events.append(item)
        if self._has_ended:
            self._take_rest()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self._readable.ring()

    def _wait(
        self, kind: events.WaitKind, what: str, timeout_s: float | None = None, resource: str = ""
    ) -> Any:
        number, waiting = next(self._waits), _Waiting()
        is_seen = False
        try:
            self._waiting[number] = waiting
            self.put(events.WaitBegan(number, kind, resource))
            if not waiting.is_over.wait(timeout_s):
                raise self._too_long(what, timeout_s)
            error = waiting.error if waiting.error is None else waiting.error.with_traceback(None)
            is_seen = True  # Python looks for Ctrl-C at calls: there is none from here on
            if error is not None:
                raise error
            return waiting.value
        finally:
            if not is_seen:  # too late, or Ctrl-C
                self._waiting.pop(number, None)
                self.put(events.WaitGivenUp(number))

    def _too_long(self, what: str, timeout_s: float | None) -> WaitTimeoutError:
        counts = self._job.num_in_flight, self._job.num_queued
        return WaitTimeoutError(
            f"{what} has waited for {timeout_s:g} s: {counts[0]} scheduled functions are in flight and {counts[1]} "
            "are queued. Wait longer, or look at coordinator.statistics()."
        )

    def _query(self, question: Callable[[], Value]) -> Value:
        """Returns what the owner answers."""
        if threading.current_thread() is self._thread:  # in a handler of the log
            return question()
        waiting = _Waiting()

        def answer() -> None:
            try:
                waiting.end(None, question())
            except Exception as error:
                waiting.end(error)

        self.put(answer)
        if not waiting.is_over.wait(_STATISTICS_S):
            raise WaitTimeoutError(f"The coordinator has not answered for {_STATISTICS_S:g} s.")
        if waiting.error is not None:
            raise waiting.error.with_traceback(None)
        return waiting.value

    # --- the owner -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                try:
                    self._step()
                except BaseException as error:
                    self._fail(error)
        finally:
            self._end()

    def _begin(self) -> None:
        self._act(self._job.start(time.monotonic()))

    def _step(self) -> None:
        wake_at = self._job.wake_at
        if wake_at is not None and wake_at <= time.monotonic():
            self._receive(events.TimePassed())
            wake_at = self._job.wake_at
        if not self._is_over:
            sleep_s = _LONGEST_SLEEP_S if wake_at is None else wake_at - time.monotonic()
            self._look_at_links(max(0.0, min(sleep_s, _LONGEST_SLEEP_S)))

    def _look_at_links(self, timeout_s: float) -> None:
        waiting = self._events
        self._is_asleep = True  # before the look at the queue: who puts an event there later rings
        ready = self._readable.wait(0.0 if waiting else timeout_s)
        self._is_asleep = False
        links = [(descriptor, self._watched.get(descriptor)) for descriptor in ready]
        # Events come before answers: a worker then takes several functions together.
        scheduled: list[events.Scheduled] = []
        for _ in range(min(len(waiting), _NUM_AT_ONCE)):
            item = waiting[0]
            if isinstance(item, events.Scheduled):
                scheduled.append(item)
                waiting.popleft()
                continue
            if scheduled:  # if this fails, the next event is still there
                self._act(self._job.receive_scheduled(scheduled, time.monotonic()))
                scheduled = []
            self._take(waiting.popleft())
        if scheduled:
            self._act(self._job.receive_scheduled(scheduled, time.monotonic()))
        for descriptor, link in links:
            if link is not None and self._watched.get(descriptor) is link:  # it may have ended since
                link.arrived()

    def _take(self, item: events.Event | Callable[[], None]) -> None:
        if callable(item):
            item()
            return
        if isinstance(item, events.Closed):
            self._is_over = True  # even if an action fails
        self._receive(item)
        if isinstance(item, events.ResourceDropped):
            self._resources.pop(item.name, None)

    def _receive(self, event: events.Event) -> None:
        self._act(self._job.receive(event, time.monotonic()))

    def _act(self, to_do: Sequence[actions.Action]) -> None:
        for action in to_do:
            self._carry_out[type(action)](action)

    def _fail(self, error: BaseException) -> None:
        """Ends the job because its owner has failed, which is a bug. A second bug ends the owner."""
        self._is_over = self._is_over or self._job.bug is not None
        try:
            self._act(self._job.fail(error))
        except BaseException:
            self._is_over = True
            with contextlib.suppress(Exception):  # the log may be what fails
                log.exception("The coordinator could not end its job after an error, a bug in replicax.")
        finally:
            self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        """Ends what the job does not know of, or takes for ended because the owner has not carried that out."""
        for number in list(self._values):
            self._settle(actions.Settle(number, error))
        for number in list(self._waiting):
            self._end_wait(actions.EndWait(number, error))

    def _end(self) -> None:
        self.is_closed = True
        try:
            for link in list(self._links.values()):
                link.close()
            self._threads.close()
            self._requests.close()
            self._readable.close()
            if self._session.note_variables == self.note_variables:
                self._session.note_variables = _nothing
        finally:
            self._has_ended = True
            self._take_rest()

    def _take_rest(self) -> None:
        """Takes the events that came too late for the owner."""
        with self._after_end:
            while self._events:
                try:
                    self._take(self._events.popleft())
                except Exception as error:
                    self._fail(error)
                except BaseException:  # Ctrl-C: the event may be another caller's
                    self._end_all(CancelledError("The coordinator is closed."))
                    raise

    # --- actions ---------------------------------------------------------------------------------------

    def _ask(self, ask: actions.Ask) -> None:
        link = self._links.get(ask.task)
        if link is None:
            self._requests.ask(ask)
        else:
            link.after_opening(lambda: self._requests.ask(ask))

    def _open(self, action: actions.OpenWorker) -> None:
        worker = action.worker
        self._links[worker] = WorkerLink(
            worker,
            action.connection,
            lambda timeout_s: self._requests.client(worker).open(timeout_s),
            self,
            self._threads,
        )

    def _close_link(self, action: actions.CloseWorker) -> None:
        link = self._links.get(action.worker)
        if link is not None and link.number == action.connection:
            del self._links[action.worker]
            link.close()

    def _send(self, action: actions.SendToWorker) -> None:
        link = self._links.get(action.worker)
        if link is not None and link.number == action.connection:
            works = [self._works[each.what] for each in action.requests if isinstance(each.what, int)]
            link.send([self._message(each, works) for each in action.requests])

    def _message(
        self, request: actions.ToWorker, works: Sequence[Work]
    ) -> Message | Mapping[str, Any] | Exception:
        """Returns the message of a request, or the answer to it if there is none.

        A program or a constant is for the one function of its write.
        """
        what, session = request.what, self._session
        arrays: Sequence[Any] = ()
        try:
            match request.kind:
                case "closure":
                    assert isinstance(what, int)
                    sendable = self._works[what].sendable
                    if sendable.is_stale(session):  # the job has it traced again
                        return {"need": sendable.signature, "end": None}
                    fields, arrays = sendable.fields(), sendable.arrays
                    fields["closure"] = session.incarnation, what
                    fields["epoch"] = session.epoch
                    fields |= request.header
                case "program":
                    fields, arrays = works[0].sendable.program(str(what))
                case "constant":
                    fields, arrays = {"op": "constant", "name": what}, [works[0].sendable.constant(str(what))]
                case "resource":
                    resource = self._resources[str(what)]
                    fields, arrays = resource.fields(session.devices_per_worker), [resource.pickle]
                case "release":
                    fields = {"op": "release", "names": what}
        except Exception as error:
            return error
        fields["incarnation"] = session.incarnation
        return Message(fields, arrays)

    def _make_program(self, action: actions.MakeProgram) -> None:
        work, request = self._works.get(action.function), action.request
        if work is None:
            self.put(events.Failed(request, CancelledError("The function has ended.")))
            return

        def make() -> events.FunctionNeeds:
            sendable = work.made(action.signature, self._session)
            self.put(functools.partial(setattr, work, "sendable", sendable))  # before the job learns of it
            return sendable.needs

        self._requests.carry_out(request, make)

    def _settle(self, action: actions.Settle) -> None:
        number = action.number
        value, work = self._values.get(number), self._works.get(number)
        if value is not None:
            if action.error is not None or work is None:
                value.settle((), action.error)
            else:
                answer = self._by_header[id(action.answer)]
                value.settle(answer.arrays, assemble=work.assemble_for(answer))
            del self._values[number]  # an error above ends it otherwise
        self._works.pop(number, None)

    def _end_wait(self, action: actions.EndWait) -> None:
        waiting = self._waiting.pop(action.wait, None)
        if waiting is not None:
            waiting.end(action.error, action.value)
        elif action.error is not None:  # Ctrl-C, before the caller could say that it is gone
            self.put(events.WaitGivenUp(action.wait))

    # --- links -----------------------------------------------------------------------------------------

    def watch(self, link: WorkerLink) -> None:
        descriptor = link.fileno()
        if descriptor < 0:  # it has just ended
            self.put(link.arrived)
            return
        self._forget(descriptor)  # of a link that has just ended
        self._readable.add(descriptor)
        self._watched[descriptor] = link
        link.watched_as = descriptor

    def watch_no_more(self, link: WorkerLink) -> None:
        if link.watched_as is not None:
            self._forget(link.watched_as)

    def _forget(self, descriptor: int) -> None:
        link = self._watched.pop(descriptor, None)
        if link is not None:
            link.watched_as = None
            self._readable.remove(descriptor)

    def answered(self, link: WorkerLink, answers: Sequence[Answer]) -> None:
        headers: list[Mapping[str, Any] | Exception] = []
        for answer in answers:
            if isinstance(answer, Message):
                self._by_header[id(answer.header)] = answer
                headers.append(answer.header)
            else:
                headers.append(answer)
        try:
            self._receive(events.WorkerAnswered(link.worker, link.number, headers))
        finally:
            self._by_header.clear()

    def broke(self, link: WorkerLink, error: Exception) -> None:
        self.put(events.WorkerBroke(link.worker, link.number, error))


def begin_job(
    session: Session, options: CoordinatorOptions, limits: Limits, before: JobLoop | None
) -> JobLoop:
    """Returns the loop of a new job of a session. It goes on where ``before``, the session's last job, has ended.

    A server remembers the numbers of functions that it has applied for as long as the session lasts.
    """
    if before is not None:
        before.end()
    setup = Setup(
        num_workers=session.num_workers,
        num_servers=session.num_ps,
        limits=limits,
        incarnation=session.incarnation,
        ps_addresses=tuple(session.ps_addresses),
        snapshot_intervals_s=tuple(session.snapshot_intervals_s),
        groups=session.groups,
        max_staleness=options.max_staleness,
        replicas_to_aggregate=options.replicas_to_aggregate,
        on_ps_restart=options.on_ps_restart,
        first_number=0 if before is None else before.next_number,
        first_round=0 if before is None else before.next_round,
        num_made=session.num_made,
        last_epoch=0 if before is None else before.servers.last_epoch,
        own_resources=frozenset({WORKER_INDEX}),
    )
    if before is None:
        return JobLoop(session, setup, session.instances)
    return JobLoop(session, setup, before.servers.instances, before.servers.next_epoch)


@final
class _Waiting:
    """A caller that waits, and what it gets."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: BaseException | None = None
        self.value: Any = None

    def end(self, error: BaseException | None, value: Any = None) -> None:
        self.error, self.value = error, value
        self.is_over.set()


def _write(action: actions.Log) -> None:
    log.log(action.level, "%s", action.text, exc_info=action.error)


def _nothing(_: int) -> None:
    """Nobody wants to know how many variables were created."""
