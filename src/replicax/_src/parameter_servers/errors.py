"""What goes wrong with parameter servers, workers and scheduled functions.

``docs/reference/errors.md`` has an entry for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._src.errors import InvalidArgumentError, ReplicaxError
from replicax._src.user_code import UNKNOWN, user_line_of


class UnavailableError(ReplicaxError, RuntimeError):
    """A parameter server or a worker died, is stopped, or cannot be reached.

    Attributes:
      task: Its name: ``"ps 0"``.
      is_silent: True if it did not answer in time: it may be stopped or cut off, and go on later.
    """

    def __init__(self, message: str, task: str = "", *, is_silent: bool = False):
        super().__init__(message)
        self.task = task
        self.is_silent = is_silent


class UnauthenticatedError(ReplicaxError, PermissionError):
    """A task of the cluster was asked without the right token or certificate."""


class RemoteError(ReplicaxError, RuntimeError):
    """A task failed at what it was asked to do; the text has its own error.

    Attributes:
      type: The name of the class of the error there.
      task: The name of the task: ``"worker 1"``.
    """

    def __init__(self, message: str, type: str = "", task: str = ""):
        super().__init__(message)
        self.type = type
        self.task = task


class MessageError(ReplicaxError, ValueError):
    """Bytes from another task that are no message: truncated, too large, of another version."""


class StaleCoordinatorError(ReplicaxError, RuntimeError):
    """Another coordinator has taken over the tasks of the cluster since."""


class SnapshotError(ReplicaxError, RuntimeError):
    """A snapshot could not be written, or none can be read."""


class UnknownProgramError(ReplicaxError, KeyError):
    """A task does not have a program (any more): it is to be sent again.

    Attributes:
      digest: Of the program.
    """

    def __init__(self, message: str, digest: str = ""):
        super().__init__(message)
        self.digest = digest

    def __str__(self) -> str:
        return Exception.__str__(self)


class CancelledError(ReplicaxError, RuntimeError):
    """A scheduled function did not run, or may have run in part, because another one failed."""


class ClosureInputError(ReplicaxError, RuntimeError):
    """What a scheduled function takes, a dataset say, could not be made on a worker."""


class WaitTimeoutError(ReplicaxError, TimeoutError):
    """``join``, ``fetch`` or another wait for scheduled functions lasted as long as it was allowed to."""


class ClosureAbortedError(ReplicaxError, RuntimeError):
    """What a scheduled function takes went with the worker that had it, and is being made again."""


def described(error: BaseException) -> dict[str, Any]:
    """An error as it stands in an answer."""
    details = {name: getattr(error, name) for name in ("digest", "task") if getattr(error, name, "")}
    line = user_line_of(error)
    if line != UNKNOWN:  # of a dataset's function, say
        details["line"] = line
    return {"type": type(error).__name__, "text": str(error) or repr(error), "details": details}


def of_answer(fields: Mapping[str, Any], task: str) -> ReplicaxError:
    """The error that the answer of ``task`` tells of."""
    kind, text = fields["type"], fields["text"]
    if kind == UnknownProgramError.__name__:
        return UnknownProgramError(text, fields["details"]["digest"])
    if kind == UnavailableError.__name__:
        return UnavailableError(text, fields["details"].get("task", task))
    known = {cls.__name__: cls for cls in (StaleCoordinatorError, MessageError, InvalidArgumentError)}
    if kind in known:
        return known[kind](text)
    line = fields["details"].get("line")
    where = f" (raised at {line})" if line else ""
    return RemoteError(f"{task} failed: {kind}: {text}{where}", kind, task)
