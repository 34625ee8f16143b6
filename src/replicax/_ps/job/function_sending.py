"""``FunctionSending``: what a worker is sent before a function, and which functions travel together.

Answers come in the order of the requests. Programs, constants and resources are sent once on a connection, before the
first function that needs them. Small functions that need nothing else may travel together as a *message group*, in one
write. Each is a message of its own, and gets its own answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from replicax._ps.job.actions_out import SendToWorker, ToWorker
from replicax._ps.job.closures import Closure
from replicax._ps.job.events_in import FunctionNeeds
from replicax._ps.job.resource_rules import ResourceRules
from replicax._ps.job.shared_state import JobState
from replicax._ps.job.worker_state import WorkerState

_SMALL_BYTES: Final = 4096
_MOST_UNANSWERED_BYTES: Final = (
    8 * _SMALL_BYTES
)  # a connection buffers this much while its peer does not read


@final
class FunctionSending:
    """Sends functions and what they need to connected workers.

    Args:
      state: The state of the job.
      resources: The resources that workers make.
    """

    def __init__(self, state: JobState, resources: ResourceRules):
        self._state, self._queue, self._resources = state, state.queue, resources

    def send(self, worker: WorkerState, closures: Sequence[Closure]) -> list[tuple[Closure, Exception]]:
        """Sends functions that a worker has taken. Returns those that cannot run there, with their errors."""
        failed: list[tuple[Closure, Exception]] = []
        group: list[Closure] = []
        num_bytes = 0
        for closure in closures:
            needs: FunctionNeeds = closure.work
            is_small = self._is_small(worker, needs, num_bytes)
            if group and (not is_small or closure.travels_alone or len(group) >= worker.num_together):
                self._send_group(worker, group)
                group, num_bytes = [], 0
            if is_small:
                group.append(closure)
                num_bytes += needs.num_bytes
                if closure.travels_alone:
                    self._send_group(worker, group)
                    group, num_bytes = [], 0
            elif (error := self.send_whole(worker, closure)) is not None:
                failed.append((closure, error))
        if group:
            self._send_group(worker, group)
        return failed

    def send_whole(self, worker: WorkerState, closure: Closure) -> Exception | None:
        """Sends a function, and before it what the worker lacks. Returns an error if the worker cannot have that."""
        needs: FunctionNeeds = closure.work
        error = self._resources.error(needs.resources, worker.name)
        lacks = [name for name in needs.resources if name not in worker.resources]
        if error is None:
            error = self._resources.unknown(lacks)
        if error is not None:
            return error
        requests = [ToWorker("resource", name) for name in lacks]
        requests += [ToWorker("constant", name) for name in needs.constants if name not in worker.known]
        requests += [ToWorker("program", digest) for digest in needs.programs if digest not in worker.known]
        worker.resources.update(lacks)
        for request in requests[len(lacks) :]:
            worker.known.add(str(request.what))
            worker.refused.pop(str(request.what), None)
        self._send(worker, [*((each, None) for each in requests), (self._request(closure), closure)])
        return None

    def send_resources(self, worker: WorkerState) -> None:
        """Has a worker make the resources that it has not made yet."""
        names = [name for name in self._resources.names if name not in worker.resources]
        worker.resources.update(names)
        if names:
            self._send(worker, [(ToWorker("resource", name), None) for name in names])

    def release(self, worker: WorkerState, name: str) -> None:
        """Has a worker drop a resource, if it was told to make it."""
        if name in worker.resources:
            worker.resources.discard(name)
            self._send(worker, [(ToWorker("release", (name,)), None)])

    def _is_small(self, worker: WorkerState, needs: FunctionNeeds, num_bytes: int) -> bool:
        """True if a function may travel with others that have ``num_bytes``, and the worker has all that it needs."""
        size = needs.num_bytes
        if size > _SMALL_BYTES or worker.num_bytes_unanswered + num_bytes + size > _MOST_UNANSWERED_BYTES:
            return False
        if not worker.has_all(needs):
            return False
        return not needs.resources or self._resources.error(needs.resources, worker.name) is None

    def _send_group(self, worker: WorkerState, group: Sequence[Closure]) -> None:
        self._send(worker, [(self._request(closure), closure) for closure in group])

    def _request(self, closure: Closure) -> ToWorker:
        header: dict[str, Any] = {"low": self._queue.low}
        if closure.round is not None:
            header["round"] = closure.round
        return ToWorker("closure", closure.number, header)

    def _send(self, worker: WorkerState, requests: Sequence[tuple[ToWorker, Closure | None]]) -> None:
        assert worker.connection is not None
        group, now = worker.new_group(), self._state.now
        for request, closure in requests:
            worker.sent(request, closure, group, now)
        sent = tuple(request for request, _ in requests)
        self._state.act(SendToWorker(worker.name, worker.connection, sent))
