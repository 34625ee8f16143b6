"""The checkpoints that each process keeps on its host's own disk, between those of the shared directory.

Each is a checkpoint of what the process's devices hold, ``local_directory/TOKEN/PROCESS/ckpt-7``. It counts only if
every process has its part of the same save. The token belongs to the shared directory: a training that starts with
another directory, or an emptied one, does not find the local files of an earlier training.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable
from typing import Any, Final, final

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.directory import records_in
from replicax._src.checkpoint.errors import CheckpointError, CheckpointWriteError
from replicax._src.checkpoint.retention import CheckpointRecord, Retention
from replicax._src.checkpoint.writing import beside, clean, probe, remove, write_error
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import path_of

log = logging.getLogger("replicax")

_TOKEN_FILE: Final = ".local-checkpoints"
_TOKEN: Final = re.compile(r"[0-9a-f]{8}")
_LONGEST_READ: Final = 100
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

        def open_here() -> None:
            probe(self._directory)
            clean(self._directory, self._name)

        what = "opening the local directories"
        token = agreement.chiefs_value(what, lambda: _token_of(shared))
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise CheckpointError(
                f"The chief sent {token!r:.60} as the token of the local checkpoints; a token has eight hexadecimal digits. "
                "Use one version of replicax in all processes."
            )
        self._directory = os.path.join(self._root, token, str(agreement.process_number()))
        agreement.together(what, open_here)

    # --- saving -------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """True if so many steps have passed since the last save."""
        return self.last_step is None or step - self.last_step >= self._every

    def path(self, number: int) -> str:
        """Returns the path of the local checkpoint of this number."""
        return os.path.join(self._directory, f"{self._name}-{number}")

    def snapshot(self, checkpoint: Checkpoint, number: int) -> Callable[[], None] | None:
        """Copies to the host what this process holds. Returns a function that writes it; None if there is no room.

        All processes call both, the second in any thread. A failure is only logged, because the shared directory has
        the other checkpoints.
        """
        try:
            write = checkpoint.snapshot(self.path(number), number=number, is_own=True)
        except CheckpointWriteError as error:
            log.warning("%s", error)
            return None

        def run() -> None:
            try:
                write()
            except CheckpointWriteError as error:
                log.warning("%s", error)
                return
            in_use = checkpoint.path_in_use
            for record in _RETENTION.to_remove(self._records()):
                if record.path != in_use:
                    remove(record.path)

        return run

    def _records(self) -> list[CheckpointRecord]:
        return records_in(self._directory, self._name)

    # --- restoring ----------------------------------------------------------------------------------------

    def common(self, shared_at: float) -> list[tuple[str, float]]:
        """Returns the local checkpoints that all processes have: the path here, and the time by the chief's clock. All
        processes call it.

        Args:
          shared_at: The time of the newest checkpoint in the shared directory; later ones that cannot be restored are
            worth a log line.
        """
        records = {record.contents.save: record for record in self._records()}
        mine = {save: [one.contents.time_s, len(one.contents.processes)] for save, one in records.items()}
        told = agreement.gather("which local checkpoints there are", mine)
        of_all = {save: about for theirs in told for save, about in theirs.items()}
        reasons = {save: self._reason(save, about[1], told) for save, about in of_all.items()}
        lost = [save for save, (time_s, _) in of_all.items() if reasons[save] and time_s > shared_at]
        if lost and agreement.is_chief():
            newest = max(lost, key=lambda save: of_all[save][0])
            log.warning("%d local checkpoint(s) cannot be restored: %s.", len(lost), reasons[newest])
        return [(records[save].path, told[0][save][0]) for save in of_all if not reasons[save]]

    @staticmethod
    def _reason(save: str, num_saved: int, told: GatheredValues) -> str:
        """Returns why a save cannot be restored; "" if it can."""
        num_processes = len(agreement.names())
        if num_saved != num_processes:
            return f"saved by {num_saved} processes, and there are {num_processes} now"
        without = [name for name, theirs in told.named() if save not in theirs]
        return f"not on the disk of {', '.join(without)}" if without else ""


def _token_of(shared: str) -> str:
    """Returns the token of a shared directory, after creating it if there is none.

    The token becomes a part of paths, so another text is replaced.
    """
    path = os.path.join(shared, _TOKEN_FILE)
    try:
        token = _read_token(path)
        if token and not _TOKEN.fullmatch(token):
            log.warning(
                "%s contains %.60r, which is not a token, so local checkpoints of earlier runs are not used. It gets a new token.",
                path,
                token,
            )
            token = ""
        return token or _new_token(path)
    except OSError as error:
        raise write_error(shared, error) from error


def _read_token(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_LONGEST_READ)
    except FileNotFoundError:
        return ""


def _new_token(path: str) -> str:
    token = uuid.uuid4().hex[:8]
    part = beside(path, "part")
    with open(part, "w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    return token
