"""The errors that parameter servers raise and send, and what these say: lines of the user's code, printable text."""

from __future__ import annotations

from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.drawing.text import printable, printable_lines
from replicax._src.packaging.extras import missing_extra
from replicax._src.user.user_code import user_line, user_line_of
from replicax._src.vocabulary.errors import (
    CancelledError,
    ClosureAbortedError,
    ClosureInputError,
    ContextError,
    DeviceError,
    InvalidArgumentError,
    MessageError,
    RemoteError,
    ReplayDifferenceError,
    ReplicaxError,
    SnapshotError,
    StaleCoordinatorError,
    StructureError,
    TraceError,
    UnauthenticatedError,
    UnavailableError,
    UnknownProgramError,
    UnsupportedError,
    VariableError,
    WaitTimeoutError,
)

__all__ = [
    "CancelledError",
    "ClosureAbortedError",
    "ClosureInputError",
    "ContextError",
    "DeviceError",
    "InvalidArgumentError",
    "MessageError",
    "ProgramMismatchError",
    "RemoteError",
    "ReplayDifferenceError",
    "ReplicaxError",
    "SnapshotError",
    "StaleCoordinatorError",
    "StructureError",
    "TraceError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownProgramError",
    "UnsupportedError",
    "VariableError",
    "WaitTimeoutError",
    "missing_extra",
    "printable",
    "printable_lines",
    "user_line",
    "user_line_of",
]
