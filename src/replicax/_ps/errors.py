"""Errors of parameter servers, workers and scheduled functions in answers to requests. ``_src/vocabulary/errors.py``
has the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._src.program_kit.errors import (
    InvalidArgumentError,
    MessageError,
    RemoteError,
    ReplicaxError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
    printable,
    printable_lines,
    user_line_of,
)


def described(error: BaseException) -> dict[str, Any]:
    """Returns an error as an answer describes it."""
    details = {name: getattr(error, name) for name in ("digest", "task") if getattr(error, name, "")}
    line = user_line_of(error, "")
    if line:  # for example in a dataset's function
        details["line"] = line
    return {"type": type(error).__name__, "text": str(error) or repr(error), "details": details}


def error_from_answer(fields: Mapping[str, Any], task: str) -> ReplicaxError:
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
