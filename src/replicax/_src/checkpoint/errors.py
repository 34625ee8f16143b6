"""What may be wrong with a checkpoint, or with writing one."""

from replicax._src.errors import InvalidArgumentError, ReplicaxError


class CheckpointError(ReplicaxError):
    """Something is wrong with a checkpoint, or with writing one."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was to be read."""


class CorruptCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut, or have other bytes than were written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint of another model: variables of it have other shapes or dtypes."""


class UnmatchedCheckpointError(CheckpointError, AssertionError):
    """Values of a checkpoint, or variables of the program, without a counterpart."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written: the disk is full, or read-only."""


class UnsharedDirectoryError(CheckpointError):
    """The processes do not see one directory for checkpoints, but each one of its own."""


class UntrackableError(InvalidArgumentError):
    """An object that a checkpoint cannot save."""
