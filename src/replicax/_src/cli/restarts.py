"""The rules for restarts after a failure: which restarts are allowed, which count, and when they start.

No processes or clocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

from replicax._src.cluster.processes import Ending
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE

_LONGEST_WAIT_S: Final = 30.0


@final
class Restarts:
    """Counts the restarts of a job, or of one of its servers.

    Exit code 42 means that a task was preempted and has saved, which is not a failure. A failure after a new checkpoint
    does not count either: only restarts without progress count. The wait before them grows each time.

    Args:
      most: The largest number of restarts that count.
      checkpoint_dir: The directory in which tasks save; None if it is not known.
      are_preempted: False for servers, which do not save when they are preempted: 42 is then an ordinary failure.

    Attributes:
      num_in_vain: The number of failures since the last progress.
    """

    def __init__(self, most: int, checkpoint_dir: Path | None, *, are_preempted: bool = True):
        self._most, self._folder, self._are_preempted = most, checkpoint_dir, are_preempted
        self._num_counted = self.num_in_vain = 0
        self._seen = self._checkpoints()

    def after(self, ending: Ending, what: str = "all tasks") -> str | None:
        """Notes a failure, and decides about a restart.

        Args:
          ending: The ending of the task that failed first.
          what: The tasks that would restart, for the message.

        Returns:
          A message that names the tasks that restart; None if there is no restart.
        """
        is_new = self._has_new_checkpoint()
        may_restart = self._are_preempted and bool(self._most or self._folder)
        is_preempted = ending.code == PREEMPTED_EXIT_CODE and may_restart
        self.num_in_vain = 0 if is_new or (is_preempted and self._folder is None) else self.num_in_vain + 1
        if is_preempted:
            return f"Starting {what} again; this restart is not counted."
        if is_new and self._most:
            return f"Starting {what} again: there is a new checkpoint since the last start; this restart is not counted."
        if self._num_counted == self._most:
            return None
        self._num_counted += 1
        return f"Starting {what} again: restart {self._num_counted} of {self._most}."

    @property
    def wait_s(self) -> float:
        """The seconds to wait before the restart: 0 after progress and after the first failure."""
        return 0.0 if self.num_in_vain < 2 else min(2.0 ** (self.num_in_vain - 2), _LONGEST_WAIT_S)

    def _has_new_checkpoint(self) -> bool:
        """Returns True if there is a checkpoint that did not exist at the last call."""
        now = self._checkpoints()
        is_new = bool(now - self._seen)
        self._seen |= now
        return is_new

    def _checkpoints(self) -> set[str]:
        """Returns the names in the folder, without those that replicax or orbax is still writing."""
        try:
            names = {entry.name for entry in self._folder.iterdir()} if self._folder is not None else set()
        except OSError:
            return set()
        return {
            name
            for name in names
            if not (name.startswith(".") or ".part-" in name or "checkpoint-tmp" in name)
        }
