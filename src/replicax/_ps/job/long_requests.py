"""A request that may take minutes, such as one for a snapshot, ends when the server is known to be gone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from replicax._ps.job.procedures import Procedure, Request, Until
from replicax._ps.job.server_side import JobHooks
from replicax._src.program_kit.errors import UnavailableError


@dataclass(slots=True)
class _Reply:
    answer: Mapping[str, Any] | None = None
    error: Exception | None = None

    @property
    def has_come(self) -> bool:
        return self.answer is not None or self.error is not None


def ask_unless_gone(
    job: JobHooks, key: Hashable, request: Request, is_gone: Callable[[], bool]
) -> Procedure[Mapping[str, Any]]:
    """Sends a request, and waits for the answer until ``is_gone``. The task may carry out the request later.

    Args:
      job: The job.
      key: The key of the procedure that waits for the answer.
      request: The request.
      is_gone: Returns True if no answer is expected any more; called after each event.

    Raises:
      Exception: The error of the request.
      UnavailableError: The server is gone.
    """
    reply = _Reply()
    job.procedures.start(key, _await_reply(request, reply), job.now)
    yield Until(lambda: reply.has_come or is_gone())
    if reply.answer is not None:
        return reply.answer
    if reply.error is not None:
        raise reply.error
    job.procedures.stop(key)
    raise UnavailableError(
        f"{request.task} does not answer heartbeats any more, or is another process.", request.task
    )


def _await_reply(request: Request, reply: _Reply) -> Procedure[None]:
    try:
        reply.answer = yield request
    except Exception as error:
        reply.error = error
