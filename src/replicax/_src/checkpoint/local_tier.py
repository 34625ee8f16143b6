"""The checkpoints that each process keeps on its host's own disk, between those of the shared directory.

Each is a checkpoint of what the process's devices hold, ``local_directory/TOKEN/PROCESS/ckpt-7``. It counts only if
every process has its part of the same save. The token belongs to the shared directory: a training that starts with
another directory, or an emptied one, does not find the local files of an earlier training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from typing import Any, Final, final

from replicax._src.checkpoint import processes
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.directory import records_in
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.retention import Record, Retention
from replicax._src.checkpoint.writing import clean, probe, remove, write_error
from replicax._src.errors import InvalidArgumentError
from replicax._src.options import path_of

log = logging.getLogger("replicax")

_TOKEN_FILE: Final = ".local-checkpoints"
# If a process is killed while it writes, all processes still have the one before.
_RETENTION: Final = Retention(max_to_keep=2)


@final
class LocalTier:
    """The local checkpoints of this process.

    Args:
      local_directory: A directory on a disk of this host. Processes of one host may share it.
      every: The least number of steps between two saves.
      directory: The directory that all processes share, as it was given.
      name: The beginning of the names of checkpoints.
      interval: The number of steps between two saves into the shared directory.

    Attributes:
      last_step: The step of the last save of either tier; None if there was none.

    Raises:
      InvalidArgumentError: An argument is not allowed.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        every: Any,
        directory: str,
        name: str,
        interval: int | None,
    ):
        self._root = os.path.abspath(path_of(local_directory, "local_directory", "/local/training"))
        shared, root = os.path.realpath(directory), os.path.realpath(self._root)
        if os.path.commonpath([shared, root]) == shared:
            raise InvalidArgumentError(
                f"local_directory {self._root!r} is in the shared directory {directory!r}. Give a directory on a disk "
                "of each host."
            )
        is_whole = isinstance(every, int) and not isinstance(every, bool)
        if interval is None or not is_whole or not 0 < every < interval:
            raise InvalidArgumentError(
                "local_directory needs checkpoint_interval, a number of steps, and local_every, a smaller number of "
                f"steps of at least 1; got checkpoint_interval={interval!r} and local_every={every!r}."
            )
        self._every, self._name = every, name
        self._directory = ""
        self.last_step: int | None = None

    def open(self, shared: str) -> None:
        """Creates the directory, and removes what killed writers have left. All processes call it.

        Args:
          shared: The directory that all processes share.

        Raises:
          CheckpointWriteError: It cannot be created or is not writable, on some host.
        """

        def chiefs_token() -> str:
            return _token_of(shared) if processes.is_chief() else ""

        _, tokens = processes.told_together("opening the shared directory", chiefs_token, lambda token: token)

        def open_here() -> None:
            self._directory = os.path.join(self._root, tokens[0], str(processes.process_number()))
            probe(self._directory)
            for name in clean(self._directory):
                log.info("Removed %s, which a killed writer has left in %s.", name, self._directory)

        processes.together("opening the local directories", open_here)

    def is_due(self, step: int) -> bool:
        """True if so many steps have passed since the last save."""
        return self.last_step is None or step - self.last_step >= self._every

    def path(self, number: int) -> str:
        """Returns the path of the local checkpoint of this number."""
        return os.path.join(self._directory, f"{self._name}-{number}")

    def records(self) -> list[Record]:
        """Returns the local checkpoints of this process, oldest first."""
        return records_in(self._directory, self._name)

    def write(self, write: Callable[[], int], checkpoint: Checkpoint) -> None:
        """Writes a local checkpoint, and removes all but the newest two. All processes call it, in any thread."""
        try:
            write()
        except CheckpointWriteError as error:
            tell_of_failure(error)
            return
        in_use = checkpoint.path_in_use
        for record in _RETENTION.to_remove(self.records()):
            if record.path != in_use:
                remove(record.path)

    def common(self, shared_at: float) -> list[tuple[str, float]]:
        """Returns the local checkpoints that all processes have: the path here, and the time by the chief's clock. All
        processes call it.

        Args:
          shared_at: The time of the newest checkpoint in the shared directory; later ones that cannot be restored are
            worth a log line.
        """
        records, num_processes = self.records(), len(processes.names())
        usable = {one.contents.save: one for one in records if len(one.contents.processes) == num_processes}
        mine = {save: record.contents.time_s for save, record in usable.items()}
        told = processes.gather("which local checkpoints there are", mine)
        common = set.intersection(*map(set, told))
        times = {save: time_s for theirs in told for save, time_s in theirs.items()}
        lost = [save for save, time_s in times.items() if save not in common and time_s > shared_at]
        others = [one for one in records if one not in usable.values() and one.contents.time_s > shared_at]
        if lost and processes.is_chief():
            without = [
                name for name, theirs in zip(processes.names(), told, strict=True) if not {*lost} <= {*theirs}
            ]
            log.warning(
                "%d local checkpoint(s) cannot be restored: %s lacks them.", len(lost), ", ".join(without)
            )
        if others and processes.is_chief():
            log.warning(
                "%d local checkpoint(s) cannot be restored: they were saved by %d processes, and there are %d now.",
                len(others),
                len(others[-1].contents.processes),
                num_processes,
            )
        return [(usable[save].path, told[0][save]) for save in common]


def _token_of(shared: str) -> str:
    path = os.path.join(shared, _TOKEN_FILE)
    try:
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            return file.read().strip() or _new_token(path)
        return _new_token(path)
    except OSError as error:
        raise write_error(shared, error) from error


def _new_token(path: str) -> str:
    token = uuid.uuid4().hex[:8]
    with open(path, "w") as file:
        file.write(token)
    return token


def tell_of_failure(error: CheckpointWriteError) -> None:
    """Logs that a local checkpoint could not be written. Training continues: the shared directory has the others."""
    log.warning("%s The training continues without it.", error.strerror)
