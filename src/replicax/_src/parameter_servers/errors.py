"""Errors of parameter servers, workers and scheduled functions. ``docs/reference/errors.md`` has an entry for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._src.drawing.text import printable, printable_lines
from replicax._src.errors import InvalidArgumentError, ReplicaxError
from replicax._src.user_code import UNKNOWN, user_line_of


class UnavailableError(ReplicaxError, RuntimeError):
    """A parameter server or a worker died, is stopped, or cannot be reached.

    Attributes:
      task: The name of the task: ``"ps 0"``.
      is_silent: True if it did not answer in time. It may only be paused or cut off, and resume later.
    """

    def __init__(self, message: str, task: str = "", *, is_silent: bool = False):
        super().__init__(message)
        self.task = task
        self.is_silent = is_silent


class UnauthenticatedError(ReplicaxError, PermissionError):
    """A task of the cluster got a request without the right token or certificate."""


class RemoteError(ReplicaxError, RuntimeError):
    """A task failed to execute a request; the message has its own error.

    Attributes:
      type: The name of the class of the task's error.
      task: The name of the task: ``"worker 1"``.
    """

    def __init__(self, message: str, type: str = "", task: str = ""):
        super().__init__(message)
        self.type = type
        self.task = task


class MessageError(ReplicaxError, ValueError):
    """Another task sent bytes that are not a message: truncated, too large, or of another version."""


class StaleCoordinatorError(ReplicaxError, RuntimeError):
    """Another coordinator has taken over the tasks of the cluster."""


class SnapshotError(ReplicaxError, RuntimeError):
    """A snapshot could not be written, or none can be read."""


class UnknownProgramError(ReplicaxError, KeyError):
    """A task does not have a program, and it must be sent again.

    Attributes:
      digest: The digest of the program.
    """

    def __init__(self, message: str, digest: str = ""):
        super().__init__(message)
        self.digest = digest

    def __str__(self) -> str:
        return Exception.__str__(self)


class CancelledError(ReplicaxError, RuntimeError):
    """A scheduled function did not run, or ran only in part, because another one failed."""


class ClosureInputError(ReplicaxError, RuntimeError):
    """A dataset or value that a scheduled function takes could not be made on a worker."""


class WaitTimeoutError(ReplicaxError, TimeoutError):
    """A wait for scheduled functions, such as ``join`` or ``fetch``, has exceeded its limit."""


class ClosureAbortedError(ReplicaxError, RuntimeError):
    """A resource of a scheduled function was lost with its worker, and is being made again."""


def described(error: BaseException) -> dict[str, Any]:
    """Returns an error as an answer describes it."""
    details = {name: getattr(error, name) for name in ("digest", "task") if getattr(error, name, "")}
    line = user_line_of(error)
    if line != UNKNOWN:  # for example in a dataset's function
        details["line"] = line
    return {"type": type(error).__name__, "text": str(error) or repr(error), "details": details}


def of_answer(fields: Mapping[str, Any], task: str) -> ReplicaxError:
    """Returns the error that an answer of ``task`` describes."""
    kind, text = printable(fields["type"]), printable_lines(fields["text"])
    if kind == UnknownProgramError.__name__:
        return UnknownProgramError(text, fields["details"]["digest"])
    if kind == UnavailableError.__name__:
        return UnavailableError(text, fields["details"].get("task", task))
    known = {cls.__name__: cls for cls in (StaleCoordinatorError, MessageError, InvalidArgumentError)}
    if kind in known:
        return known[kind](text)
    line = fields["details"].get("line")
    where = f" (raised at {printable(line)})" if line else ""
    return RemoteError(f"{task} failed: {kind}: {text}{where}", kind, task)
