"""``WorkerRules``: the life of each worker: it is met, connected, watched by heartbeats, lost, and met again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from logging import DEBUG, WARNING
from typing import Any, Final, final

from replicax._ps.job.actions_out import CloseWorker, OpenWorker
from replicax._ps.job.events_in import ResourceAdded, WorkerAnswered, WorkerBroke
from replicax._ps.job.function_rules import FunctionRules
from replicax._ps.job.procedures import Operation, Pause, Procedure, Request
from replicax._ps.job.resource_rules import ResourceRules
from replicax._ps.job.server_side import ServerSide
from replicax._ps.job.shared_state import JobState
from replicax._ps.job.worker_state import WorkerState
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

_HELLO_S: Final = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


@final
class WorkerRules:
    """Connects the workers, and reconnects to those that were lost.

    Args:
      state: The state of the job.
      functions: Takes and requeues the functions of a worker.
      servers: The parameter servers' side, which knows the primaries.
      resources: The resources that workers make.
    """

    def __init__(
        self, state: JobState, functions: FunctionRules, servers: ServerSide, resources: ResourceRules
    ):
        self._state, self._limits = state, state.setup.limits
        self._functions, self._servers, self._resources = functions, servers, resources
        names = [f"worker {n}" for n in range(state.setup.num_workers)]
        self._workers = {name: WorkerState(name, state.setup.own_resources) for name in names}
        self._connections = count(1)
        self._num_given_up = 0
        for name in self._workers:
            state.queue.lost(name)  # it is not connected yet

    def start(self) -> None:
        """Begins to connect."""
        for worker in self._workers.values():
            self._begin(worker)

    def close(self) -> None:
        """Closes all connections. The procedures have been stopped before."""
        for worker in self._workers.values():
            if worker.connection is not None:
                self._close(worker)

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of each worker, by name."""
        queue = self._state.queue
        functions = {name: queue.oldest(name) for name in self._workers}
        return {
            name: worker.statistics(
                None if (oldest := functions[name]) is None else oldest.name, queue.in_flight(name)
            )
            for name, worker in self._workers.items()
        }

    # --- resources and primaries -----------------------------------------------------------------------

    def add_resource(self, resource: ResourceAdded) -> None:
        """Has all workers make a resource."""
        self._resources.add(resource)
        for worker in self._workers.values():
            if worker.is_ready:
                self._functions.sending.send_resources(worker)

    def drop_resource(self, name: str) -> None:
        """Has all workers drop a resource."""
        self._resources.drop(name)
        for worker in self._workers.values():
            if worker.is_ready:
                self._functions.sending.release(worker, name)

    def tell_primaries(self) -> None:
        """Tells all workers that have been met which parameter servers serve which variables."""
        for worker in self._workers.values():
            if worker.connection is not None:
                self._state.procedures.start(
                    ("tell", worker.name), self._send_primaries(worker), self._state.now
                )

    def _send_primaries(self, worker: WorkerState) -> Procedure[None]:
        try:
            yield from self._primaries(worker)
        except Exception as error:  # a server that is not the primary says so itself
            self._state.log(DEBUG, "%s: %s", worker.name, error)

    def _primaries(self, worker: WorkerState) -> Procedure[Sequence[Mapping[str, Any]] | None]:
        views = self._servers.primaries_for_workers()
        if views is not None:
            yield Request(worker.name, "primaries", {"views": views}, _HELLO_S)
        return views

    # --- what comes on connections ---------------------------------------------------------------------

    def answered(self, event: WorkerAnswered) -> None:
        """Takes answers, unless the connection is an older one."""
        worker = self._workers[event.worker]
        if worker.is_ready and worker.connection == event.connection:
            error = self._functions.answered(worker, event.answers)
            if error is not None:
                self._lose(worker, error)
                self._begin(worker)

    def broke(self, event: WorkerBroke) -> None:
        """Handles the end of a connection, unless it is an older one."""
        worker = self._workers[event.worker]
        if worker.connection != event.connection:
            return
        if worker.is_ready:
            self._lose(worker, event.error)
            self._begin(worker)
        else:
            worker.refusal = event.error
            self._close(worker)  # the procedure that opens it sees that

    # --- the life of a worker --------------------------------------------------------------------------

    def _begin(self, worker: WorkerState) -> None:
        self._state.procedures.start(("worker", worker.name), self._live(worker), self._state.now)

    def _live(self, worker: WorkerState) -> Procedure[None]:
        while (yield from self._connect(worker)):
            error = yield from self._watch(worker)
            self._lose(worker, error)

    def _connect(self, worker: WorkerState) -> Procedure[bool]:
        """Tries to connect until the worker answers. Returns False if it is given up."""
        until = self._state.now + self._limits.reconnect_s
        pause_s = _PAUSE_S
        while True:
            try:
                yield from self._open(worker)
                return True
            except UnavailableError as error:
                if self._state.now > until:
                    self._give_up(worker, self._unreachable(worker, error))
                    return False
            except Exception as error:
                self._give_up(worker, error)
                return False
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self, worker: WorkerState) -> Procedure[None]:
        """Connects to a worker. Functions are sent only if the process that was met has the connection."""
        addresses = list(self._state.setup.ps_addresses)
        description = yield Request(worker.name, "hello", {"ps": addresses}, _HELLO_S)
        worker.met(dict(description))
        yield Operation("meet_worker", (worker.name, worker.description))
        views = yield from self._primaries(worker)
        number = next(self._connections)
        worker.opened(number)
        self._state.act(OpenWorker(worker.name, number, str(worker.instance)))
        try:
            is_same = yield from self._heartbeat(worker)
            if worker.refusal is not None:
                raise worker.refusal
            if not is_same or worker.connection != number:
                raise UnavailableError(f"{worker.name} has restarted while it was connected.", worker.name)
        except BaseException:
            if worker.connection == number:
                self._close(worker)
            raise
        worker.ready(self._state.now)
        self._resources.back(worker.name)
        self._functions.back(worker)
        if self._servers.primaries_for_workers() != views:
            self._state.tell_workers_primaries()

    def _watch(self, worker: WorkerState) -> Procedure[BaseException]:
        """Sends heartbeats until the worker does not answer, or is another process. Returns the reason.

        A worker answers them while it runs or compiles a function, so a function may take any time.
        """
        num_missed = 0
        while True:
            yield Pause(self._limits.heartbeat_s)
            try:
                is_same = yield from self._heartbeat(worker)
            except StaleCoordinatorError as error:
                self._state.broke(error)
                return error
            except Exception as error:
                num_missed += 1
                if num_missed >= self._limits.missed_heartbeats:
                    return error
            else:
                num_missed = 0
                if not is_same:
                    return UnavailableError(f"{worker.name} is another process than before.", worker.name)

    def _heartbeat(self, worker: WorkerState) -> Procedure[bool]:
        """Returns True if the process that was met last answers."""
        answer = yield Request(worker.name, "heartbeat", {}, self._limits.heartbeat_timeout_s)
        worker.heartbeat = dict(answer.get("statistics") or {})
        return answer.get("instance") == worker.instance

    def _lose(self, worker: WorkerState, error: BaseException) -> None:
        """Ends the connection of a worker. What it ran is requeued, or fails if it probably kills workers."""
        making = worker.making()
        self._close(worker)
        self._resources.lost(worker.name)
        if making is not None:
            self._resources.killed(making, worker.name)
        self._functions.lost(worker)
        self._state.log(
            WARNING,
            "Lost %s: %s Its in-flight functions will be rescheduled; reconnecting for up to %g s.",
            worker.name,
            error,
            self._limits.reconnect_s,
        )

    def _close(self, worker: WorkerState) -> None:
        assert worker.connection is not None
        self._state.act(CloseWorker(worker.name, worker.connection))
        worker.ended()

    def _give_up(self, worker: WorkerState, error: Exception) -> None:
        """Tries to reach a worker no longer. The job breaks if it was the last one, or is not one of this job."""
        worker.is_given_up = True
        self._num_given_up += 1
        is_last = self._num_given_up == len(self._workers)
        if is_last:
            self._resources.given_up(error)
        if is_last or not isinstance(error, UnavailableError):
            self._state.broke(error)

    def _unreachable(self, worker: WorkerState, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"Could not reach {worker.name} for {self._limits.reconnect_s:g} s, and gave it up: {error}",
            worker.name,
        )
