"""Finds the checkpoints of a directory by their names, oldest first."""

from __future__ import annotations

import functools
import logging
import os
import re
import time

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.errors import CheckpointError
from replicax._src.checkpoint.retention import CheckpointRecord
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.vocabulary.options import path_of

log = logging.getLogger("replicax")

_OF_KERAS = (".weights.h5", ".keras")
_OF_TENSORFLOW = re.compile(r".+\.data-\d{5}-of-\d{5}")


def paths_in(directory: str, name: str | None = None) -> list[str]:
    """Returns the paths with names of checkpoints, by number.

    Args:
      directory: The directory, which need not exist.
      name: The text before the number; None for any.
    """
    pattern = re.compile(rf"{'.+' if name is None else re.escape(name)}-(\d+)")
    try:
        found = [(match, entry) for entry in os.listdir(directory) if (match := pattern.fullmatch(entry))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = sorted((int(match[1]), entry) for match, entry in found)
    return [os.path.join(os.path.abspath(directory), entry) for _, entry in numbered]


def records_in(directory: str, name: str | None = None) -> list[CheckpointRecord]:
    """Returns the checkpoints with a readable manifest, in the order in which they were saved. Verifies no other
    files.
    """
    records = [record for path in paths_in(directory, name) if (record := _record(path)) is not None]
    return sorted(records, key=lambda record: record.contents.time_s)


def later_time(directory: str, known_s: float = 0.0) -> float:
    """Returns the time, or a little more than that of the latest known checkpoint if the clock was set back."""
    there = [record.contents.time_s for record in records_in(directory)]
    return max(time.time(), *(known + 1e-3 for known in (known_s, *there)))


def _record(path: str) -> CheckpointRecord | None:
    try:
        return CheckpointRecord(path, SavedCheckpoint(path).contents)
    except CheckpointError:
        return None


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Returns the path of the latest checkpoint in a directory, or None. Its files are not verified.

    In a directory without checkpoints of ``rx.Checkpoint``, it returns the newest file of Keras, ``.weights.h5`` or
    ``.keras``, for ``model.load_weights``. It warns if the directory has only checkpoints of TensorFlow.

    It waits for a save that this process has started. A process of a cluster may call it alone.

    Raises:
      CheckpointError: That save has failed; ``CheckpointWriteError`` in the process that writes.
      ClusterFailureError: Another process is lost.

    Source: TensorFlow, ``tf.train.latest_checkpoint``.
    """
    directory = path_of(checkpoint_dir, "checkpoint_dir", "training")
    agreement.wait_for_saves(directory)
    records = records_in(directory)
    latest = records[-1].path if records else _latest_of_keras(directory)
    if latest is None:
        warn_of_tensorflow(directory)
    return latest


@functools.cache
def warn_of_tensorflow(directory: str) -> None:
    """Warns once if a directory without checkpoints has some of TensorFlow: training would begin again, silently."""
    try:
        found = sorted(filter(_OF_TENSORFLOW.fullmatch, os.listdir(directory)))
    except OSError:
        return
    if found:
        log.warning(
            "%s has checkpoints of TensorFlow (%s), which replicax does not read: nothing is restored from it. Save the weights "
            "with Keras where TensorFlow runs, model.save_weights('model.weights.h5'), and load them here: "
            "model.load_weights('model.weights.h5').",
            directory,
            found[-1],
        )


def is_of_keras(path: str) -> bool:
    """True for a file of weights or of a full model."""
    return path.endswith(_OF_KERAS)


def _latest_of_keras(directory: str) -> str | None:
    try:
        files = [entry for entry in os.scandir(directory) if is_of_keras(entry.name) and entry.is_file()]
        return max(((entry.stat().st_mtime_ns, entry.path) for entry in files), default=(0, None))[1]
    except OSError:  # there is no directory, or a file was removed in the meantime
        return None
