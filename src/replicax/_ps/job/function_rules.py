"""``FunctionRules``: which worker gets a scheduled function, and what its answer means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from replicax._ps.job.actions_out import Settle
from replicax._ps.job.closures import Closure
from replicax._ps.job.events_in import FunctionNeeds, Scheduled
from replicax._ps.job.function_sending import FunctionSending
from replicax._ps.job.hungry_workers import HungryWorkers
from replicax._ps.job.procedures import Procedure, Tracing
from replicax._ps.job.resource_rules import ResourceRules
from replicax._ps.job.server_side import ServerSide
from replicax._ps.job.shared_state import JobState
from replicax._ps.job.worker_state import Unanswered, WorkerState
from replicax._src.program_kit.data import OutOfRangeError
from replicax._src.program_kit.errors import (
    ClosureAbortedError,
    RemoteError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)

_MAX_ASKS: Final = 16


@final
class FunctionRules:
    """Hands functions to workers, and takes their answers.

    Args:
      state: The state of the job.
      servers: The parameter servers' side, which learns which one a function could not use.
      resources: The resources that workers make.
    """

    def __init__(self, state: JobState, servers: ServerSide, resources: ResourceRules):
        self._state, self._queue, self._servers, self._resources = state, state.queue, servers, resources
        self._hungry = HungryWorkers(state.queue)
        self.sending = FunctionSending(state, resources)

    def scheduled(self, event: Scheduled) -> None:
        """Queues a function. It is cancelled if the caller does not know of a failure yet, or of the end."""
        queue = self._queue
        closure = Closure(event.number, event.name, event.kind, event.needs, round_key=event.round_key)
        if queue.is_closed or queue.has_error:
            self._state.settle(queue.add_cancelled(closure))
        elif event.error is not None:
            self._state.settle(queue.add_failed(closure, event.error))
        else:
            queue.add(closure)

    @property
    def may_wait(self) -> bool:
        """True if no worker takes a function before another event comes, such as the answer of a worker."""
        return not self._hungry.has_idle and bool(self._queue.num_in_flight)

    # --- handing out -----------------------------------------------------------------------------------

    def back(self, worker: WorkerState) -> None:
        """Gives functions to a worker that is connected, for the first time or again."""
        self._queue.back(worker.name)
        self.sending.send_resources(worker)
        self._place(worker, is_new=True)

    def lost(self, worker: WorkerState) -> None:
        """Requeues the functions of a worker that is lost."""
        self._hungry.remove(worker)
        self._state.settle(self._queue.lost(worker.name, worker.running()))

    def feed(self, *, only_idle: bool) -> None:
        """Gives queued functions to the workers that want some. See ``HungryWorkers.next``."""
        if only_idle and not self._hungry.has_idle:
            return
        while (worker := self._hungry.next(only_idle=only_idle)) is not None:
            self._serve(worker)

    def _serve(self, worker: WorkerState) -> None:
        """Gives a worker as many functions as it wants and may take."""
        if not self._queue.num_queued:
            self._place(worker)
            return
        taken: list[Closure] = []
        most = worker.num_wanted(self._queue.in_flight(worker.name))
        while len(taken) < most and (closure := self._queue.take(worker.name)) is not None:
            taken.append(closure)
        for closure, error in self.sending.send(worker, taken):
            self._fail(worker, closure, error)
        self._place(worker)

    def _place(self, worker: WorkerState, *, is_new: bool = False) -> None:
        """Puts a worker where it is found if it wants more functions."""
        num_in_flight = self._queue.in_flight(worker.name)
        if worker.num_wanted(num_in_flight):
            self._hungry.put(worker, num_in_flight, is_new=is_new)
        else:
            self._hungry.remove(worker)

    # --- answers ---------------------------------------------------------------------------------------

    def answered(
        self, worker: WorkerState, answers: Sequence[Mapping[str, Any] | Exception]
    ) -> UnavailableError | None:
        """Takes the answers to the oldest requests. Returns the error with which the connection has to end, if any."""
        num_functions, sent_at = 0, 0.0
        for answer in answers:
            if isinstance(answer, UnavailableError) and answer.task in (worker.name, ""):
                return answer  # it is about this worker, not about a server that the worker needs
            if not worker.unanswered:
                return UnavailableError(f"{worker.name} has sent an answer without a request.", worker.name)
            oldest = worker.answered()
            if oldest.closure is None:
                self._note(worker, oldest, answer)
                continue
            sent_at = sent_at if num_functions else oldest.sent_at
            num_functions += 1
            self._ended(worker, oldest.closure, oldest.needs, answer)
        if num_functions:
            worker.measure(num_functions, sent_at, self._state.now)
            self._serve(worker)  # before others
        return None

    def _note(self, worker: WorkerState, oldest: Unanswered, answer: Mapping[str, Any] | Exception) -> None:
        kind, name = oldest.request.kind, str(oldest.request.what)
        if not isinstance(answer, Exception):
            if kind == "resource":
                self._resources.made(name, worker.name, answer.get("spec"))
        elif kind == "resource":
            self._resources.failed(name, worker.name, answer)
        elif kind != "release":
            worker.refused[name] = answer

    def _ended(
        self,
        worker: WorkerState,
        closure: Closure,
        sent: FunctionNeeds,
        answer: Mapping[str, Any] | Exception,
    ) -> None:
        if isinstance(answer, Exception):
            self._raised(worker, closure, sent, answer)
        elif "need" in answer:
            # Its owner may have dropped it, if it has ended meanwhile.
            if self._queue.has_taken(worker.name, closure) and self._may_ask(worker, closure):
                key = "trace", closure.number, worker.name
                trace = self._trace(worker, worker.connection, closure, answer["need"], answer.get("end"))
                self._state.procedures.start(key, trace, self._state.now)
        elif self._queue.finished(worker.name, closure):
            self._state.act(Settle(closure.number, None, worker.name, answer))

    def _raised(self, worker: WorkerState, closure: Closure, sent: FunctionNeeds, error: Exception) -> None:
        """Handles a function that raised an error, or could not run; ``sent`` is what it needed when it was sent."""
        needs: FunctionNeeds = closure.work
        if isinstance(error, UnknownProgramError):
            # It may have been traced meanwhile, because of another worker.
            if any(error.digest in (*each.programs, *each.constants) for each in (sent, needs)):
                refusal = worker.forget(error.digest)
                if refusal is None:
                    if self._may_ask(worker, closure):
                        self._send_again(worker, closure)
                    return
                error = refusal
            elif self._is_tried_again(worker, closure, None):  # a server lacks it, and has restarted
                return
        elif isinstance(error, StaleCoordinatorError):
            self._state.broke(error)
            return
        elif isinstance(error, UnavailableError):
            if self._is_tried_again(worker, closure, error.task):
                return
        elif isinstance(error, ClosureAbortedError) or _is_remote(error, ClosureAbortedError):
            self._state.settle(self._queue.returned(worker.name, closure))
            return
        self._fail(worker, closure, self._resources.error(needs.resources, worker.name) or error)

    def _fail(self, worker: WorkerState, closure: Closure, error: Exception) -> None:
        self._state.settle(self._queue.failed(worker.name, closure, error))

    def _may_ask(self, worker: WorkerState, closure: Closure) -> bool:
        """True if a worker may ask again for a program of a function. A worker that asks forever is broken."""
        closure.num_asks += 1
        if closure.num_asks <= _MAX_ASKS:
            return True
        text = f"{worker.name} asked {closure.num_asks} times for a program of '{closure.name}' that it was sent."
        self._fail(worker, closure, RemoteError(text, "", worker.name))
        return False

    def _is_tried_again(self, worker: WorkerState, closure: Closure, ps: str | None) -> bool:
        """Requeues a function that a parameter server did not serve. Returns False if it has no retries left."""
        limits = self._state.setup.limits
        may_come_back = self._servers.note_failure(ps, self._state.now)
        if closure.num_returns < (limits.ps_restart_retries if may_come_back else limits.ps_retries):
            self._state.settle(self._queue.returned(worker.name, closure))
            return True
        return False

    def _send_again(self, worker: WorkerState, closure: Closure) -> None:
        if self._queue.has_taken(worker.name, closure):  # it may have ended meanwhile
            error = self.sending.send_whole(worker, closure)
            if error is not None:
                self._fail(worker, closure, error)

    def _trace(
        self, worker: WorkerState, connection: int | None, closure: Closure, signature: str, end: str | None
    ) -> Procedure[None]:
        """Has a function traced for elements of the shapes that a worker has met, and sends it again."""
        try:
            # Wherever the function is now, the owner's next message of it may name its new programs.
            closure.work = yield Tracing(closure.number, signature)
        except OutOfRangeError as error:
            failure: Exception = OutOfRangeError(f"{end} {error}")
        except Exception as error:
            failure = _with_text(error)
        else:
            if worker.connection == connection:
                self._send_again(worker, closure)
                self._place(worker)
            return
        if worker.connection == connection:
            self._fail(worker, closure, failure)
            self._place(worker)


def _with_text(error: Exception) -> Exception:
    """Returns a user's error; another one if its text, which others get, cannot be made."""
    try:
        str(error)
    except Exception as cause:
        text = f"Tracing raised {type(error).__name__}, whose text cannot be made: its __str__ raised "
        shown = RuntimeError(f"{text}{type(cause).__name__}. Look at its __cause__, and correct __str__.")
        shown.__cause__ = error
        return shown
    return error


def _is_remote(error: Exception, kind: type) -> bool:
    return isinstance(error, RemoteError) and error.type == kind.__name__
