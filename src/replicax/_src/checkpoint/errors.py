"""Errors of checkpoints, and of writing them."""

from __future__ import annotations

from collections.abc import Sequence

from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError


class CheckpointError(ReplicaxError):
    """A checkpoint, or the writing of one, has a problem."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CorruptCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated, or changed."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint belongs to another model: its variables have other shapes or dtypes."""


class UnmatchedCheckpointError(CheckpointError, AssertionError):
    """Values of a checkpoint, or variables of the program, have no counterpart."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written: the disk is full, or read-only."""


class UnsharedDirectoryError(CheckpointError):
    """The processes do not share one directory for checkpoints."""


class NoBoundaryError(CheckpointError, RuntimeError):
    """A program trains with ``save_on_failure=True`` and marks no boundary at which its state could be kept."""


class UntrackableError(InvalidArgumentError):
    """A checkpoint cannot save this object."""


def listed(lines: Sequence[str]) -> str:
    """Returns the first 20 lines for a message, and how many more there are."""
    more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join([*(f"  {line}" for line in lines[:20]), *more])


def enumerated(names: Sequence[str]) -> str:
    """Returns the first 5 names for a log line, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
