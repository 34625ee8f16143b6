"""``TaskRequests``: asks tasks, and carries out operations of the session, for the thread that owns the job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, final

from replicax._ps.client.request_threads import RequestThreads
from replicax._ps.client.session import Session
from replicax._ps.job.actions_out import Ask, OperationName, Perform
from replicax._ps.job.events_in import Answered, Failed
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

_IMMEDIATE: Final = ("meet_worker", "names_on", "renew")
"""Operations that wait for nothing, so that no thread is needed."""


@final
class TaskRequests:
    """Requests under way. Each that may wait has a thread, so that none waits behind another one's silent task.

    Args:
      session: The session with the tasks.
      threads: The threads.
      put: Takes the outcomes, ``Answered`` or ``Failed``; from any thread.
    """

    def __init__(self, session: Session, threads: RequestThreads, put: Callable[[Answered | Failed], None]):
        self._session, self._threads, self._put = session, threads, put
        self._lock = threading.Lock()
        self._clients: dict[str, TaskClient] = {}
        self._is_closed = False
        self._operations: dict[OperationName, Callable[..., Any]] = {
            "meet_worker": session.meet_worker,
            "restored": session.restored,
            "use_primaries": session.use_primaries,
            "apply_round": session.apply_round,
            "names_on": session.names_on,
            "renew": session.renew,
        }

    def client(self, task: str) -> TaskClient:
        """Returns the client of a task. Does not wait for the task."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError(f"The coordinator was closed before {task} was asked.", task)
            if task not in self._clients:
                job, index = task.split()
                self._clients[task] = self._session.connect(job, int(index))
            return self._clients[task]

    def ask(self, ask: Ask) -> None:
        """Sends a request to a task."""
        header = {**ask.header, "incarnation": self._session.incarnation}
        self.carry_out(ask.request, lambda: self.client(ask.task).ask(ask.op, header, ask.timeout_s))

    def perform(self, action: Perform) -> None:
        """Carries out an operation of the session."""
        operation = self._operations[action.operation]
        if action.operation in _IMMEDIATE:
            self._put(_outcome(action.request, lambda: operation(*action.arguments)))
        else:
            self.carry_out(action.request, lambda: operation(*action.arguments))

    def carry_out(self, request: int, function: Callable[[], Any]) -> None:
        """Calls a function in a thread. Its result, or its error, is the outcome of the request."""
        if not self._threads.call(lambda: self._put(_outcome(request, function))):
            self._put(Failed(request, UnavailableError("The coordinator could not start a thread for it.")))

    def close(self) -> None:
        """Ends the requests to tasks. Operations of the session, and tracing, go on."""
        with self._lock:
            self._is_closed = True
            clients = list(self._clients.values())
        for client in clients:
            client.close()


def _outcome(request: int, function: Callable[[], Any]) -> Answered | Failed:
    try:
        return Answered(request, function())
    except Exception as error:
        return Failed(request, error)
    except BaseException as error:  # a user's function that is traced may exit
        return Failed(
            request, RuntimeError(f"{type(error).__name__} ended a request of the coordinator: {error}")
        )
