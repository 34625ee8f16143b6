"""What is around ``rx.Checkpoint`` and ``rx.CheckpointManager``. In the source: ``docs/reference/checkpoints.md``."""

from replicax._src.checkpoint.directory import latest_checkpoint
from replicax._src.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    NoBoundaryError,
    UnmatchedCheckpointError,
    UnsharedDirectoryError,
    UntrackableError,
)
from replicax._src.checkpoint.export import export, export_weights
from replicax._src.checkpoint.load_status import LoadStatus
from replicax._src.checkpoint.loading import load_safetensors
from replicax._src.checkpoint.polling import checkpoints_iterator
from replicax._src.checkpoint.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
from replicax._src.checkpoint.trees import HostRandomState
from replicax._src.user.public_names import publish_all

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "HostRandomState",
    "LoadStatus",
    "NoBoundaryError",
    "UnmatchedCheckpointError",
    "UnsharedDirectoryError",
    "UntrackableError",
    "checkpoints_iterator",
    "export",
    "export_weights",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_safetensors",
    "load_variable",
]

__dir__ = publish_all(globals())
