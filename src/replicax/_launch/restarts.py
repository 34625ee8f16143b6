"""The rules for restarts after a failure: which restarts are allowed, which count, and when they start.

No processes or clocks. The batch script for Slurm has the same rules (``batch_script.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

from replicax._launch.newest_checkpoint import NO_CHECKPOINT, newest_checkpoint
from replicax._src.cluster.processes import Ending
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE

# A shorter run without a new checkpoint was not preempted after some work, whatever its exit code says.
SHORT_RUN_S: Final = 30.0
# The restarts after short runs with exit code 42 if no number is given.
SHORT_PREEMPTIONS: Final = 3
_LONGEST_WAIT_S: Final = 30.0
_NEW_CHECKPOINT: Final = "there is a new checkpoint since the last start; this restart is not counted."


def waiting_s(num_in_vain: int) -> float:
    """Returns the seconds to wait before a start, after this number of failures in a row without progress.

    >>> [waiting_s(number) for number in (0, 1, 2, 3, 20)]
    [0.0, 1.0, 2.0, 4.0, 30.0]
    """
    return min(2.0 ** (num_in_vain - 1), _LONGEST_WAIT_S) if num_in_vain > 0 else 0.0


@final
class Restarts:
    """Counts the restarts of a job, or of one of its servers.

    Those of single tasks of a job that goes on count too; ``replacements.py`` says when they start.

    A run has made progress if there is a checkpoint that can be restored, and that is newer than the newest one at the
    start of the run. A failure counts unless the run has made progress. Exit code 42 means that a task was preempted
    and has saved, which is no failure, and counts only after less than 30 s without progress. After a run without
    progress the next start waits, longer each time.

    Args:
      most: The largest number of restarts that count. If it is 0, three of them may follow an exit code of 42.
      checkpoint_dir: The directory in which tasks save; None if it is not known.
      are_preempted: False for servers, which do not save when they are preempted: 42 is then an ordinary failure.

    Attributes:
      num_in_vain: The number of failures since the last progress.
    """

    def __init__(self, most: int, checkpoint_dir: Path | None, *, are_preempted: bool = True):
        self._most, self._folder, self._are_preempted = most, checkpoint_dir, are_preempted
        self._num_counted = self.num_in_vain = 0
        self._begun_from = self._newest()

    def after(self, ending: Ending, run_s: float, what: str = "all tasks") -> str | None:
        """Notes a failure, and decides about a restart.

        Args:
          ending: The ending of the task that failed first.
          run_s: The seconds from the start of the run to that ending.
          what: The tasks that would restart, for the message.

        Returns:
          A message that names the tasks that restart; None if there is no restart.
        """
        newest, begun_from = self._newest(), self._begun_from
        self._begun_from, is_new = newest, newest > begun_from
        is_preempted = (
            ending.code == PREEMPTED_EXIT_CODE and self._are_preempted and bool(self._most or self._folder)
        )
        is_short = run_s < SHORT_RUN_S and not is_new
        # Without a directory nobody knows what a task that was preempted has saved.
        has_progress = is_new or (is_preempted and self._folder is None and not is_short)
        self.num_in_vain = 0 if has_progress else self.num_in_vain + 1
        if is_preempted and not is_short:
            return f"Starting {what} again; this restart is not counted.{self._waiting}"
        if is_new and self._most:
            return f"Starting {what} again: {_NEW_CHECKPOINT}"
        counted = self._counted(self._most or (SHORT_PREEMPTIONS if is_preempted else 0))
        return None if counted is None else f"Starting {what} again: {counted}{self._waiting}"

    def after_death(self, *, is_in_vain: bool) -> str | None:
        """Notes the death of one task that the others continue without, and decides about a restart of this task.

        Args:
          is_in_vain: True if its process has not worked for 30 s. Its restart counts even if the others have saved.

        Returns:
          The end of a message about it; None if there is no restart.
        """
        newest, begun_from = self._newest(), self._begun_from
        self._begun_from = newest
        if newest > begun_from and self._most and not is_in_vain:
            return _NEW_CHECKPOINT
        return self._counted(self._most)

    def _counted(self, most: int) -> str | None:
        if self._num_counted >= most:
            return None
        self._num_counted += 1
        return f"restart {self._num_counted} of {most}."

    @property
    def wait_s(self) -> float:
        """The seconds to wait before the restart: 0 after progress."""
        return waiting_s(self.num_in_vain)

    @property
    def _waiting(self) -> str:
        return f" It waits {self.wait_s:g} s." if self.wait_s > 1 else ""

    def _newest(self) -> int:
        return NO_CHECKPOINT if self._folder is None else newest_checkpoint(self._folder)
