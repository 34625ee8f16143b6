"""``ContinuousSaves``: when the saves of a manager with ``continuous=True`` begin, and what happens to failed ones.

``continuous_rule.py`` has the rule. Here the background thread that writes tells the training thread that a save has
ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.continuous_rule import ContinuousRule
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.control.standing import Moment
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")


@final
class ContinuousSaves:
    """The saves of one manager. All processes call the same methods.

    Args:
      wait: Waits until the thread of the last save has ended.
    """

    def __init__(self, wait: Callable[[], None]):
        self._wait = wait
        self._rule = ContinuousRule()
        self._lock = threading.Lock()
        self._is_agreeing = False
        self._failure: CheckpointWriteError | None = None  # of the last save
        self._errno = 0  # of the last warning; 0 while the disk takes checkpoints

    def pass_boundary(self) -> bool:
        """Returns True if a save begins at this boundary. Training waits here only while the processes agree on the
        next save, which takes one message to the controller and back.
        """
        with self._lock:
            self._rule.pass_boundary()
            is_agreeing = self._is_agreeing
        if is_agreeing:
            self._wait()
        return self._rule.is_due

    def begin(self) -> None:
        """Notes that a save begins."""
        self._failure = None
        self._rule.begin()

    def note_uncopied(self, error: CheckpointWriteError) -> None:
        """Notes that a save has failed in all processes before its thread was started."""
        self._note_failure(error)
        self._rule.end([self._rule.num_passed], is_durable=False)

    def write(self, write: Callable[[], None], save: str, moment: Moment) -> None:
        """Writes the copy, and agrees with the other processes on the next save. Runs in the background thread.

        Args:
          write: Writes the copy. It returns when the checkpoint is durable.
          save: The identity of the save, equal in all processes.
          moment: The moment at which it has begun.
        """
        is_durable = False
        try:
            write()
            is_durable = True
            if self._errno:
                self._errno = 0
                log.info("The disk takes checkpoints again.")
        except CheckpointWriteError as error:
            self._note_failure(error)
        finally:
            self._agree(is_durable, save, moment)

    def _agree(self, is_durable: bool, save: str, moment: Moment) -> None:
        with self._lock:
            self._is_agreeing, num_passed = True, self._rule.num_passed
        of_all = [[num_passed, is_durable]]
        try:
            of_all = agreement.gather(
                "the next save", [num_passed, is_durable], once=f"{save} next", since=moment
            )
        except ClusterFailureError:  # the next save raises it
            pass
        finally:
            with self._lock:
                passed, durable = zip(*of_all, strict=True)
                self._rule.end(passed, is_durable=all(durable))
                self._is_agreeing = False

    def _note_failure(self, error: CheckpointWriteError) -> None:
        self._failure = error
        if error.errno != self._errno and agreement.is_chief():
            log.warning(
                "%s Training continues, and later saves try again (continuous=True).",
                error.strerror,
            )
        self._errno = error.errno or 0

    def raise_failure(self) -> None:
        """Raises the failure of the last save, once.

        Raises:
          CheckpointWriteError: It could not be written.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def counts(self) -> list[int | None]:
        """Returns the state of the rule as JSON, for a replacement. No save may be running."""
        return self._rule.counts()

    def take_counts(self, counts: list[int | None]) -> None:
        """Takes such a state."""
        self._rule.take_counts(counts)


def check_continuous(continuous: Any, others: Mapping[str, Any]) -> None:
    """Checks the argument ``continuous``, and that no other argument decides when a manager saves.

    Args:
      continuous: The argument.
      others: The other arguments by name, each None if it was not given.

    Raises:
      InvalidArgumentError: It is not a bool, or there is such an argument.
    """
    if not isinstance(continuous, bool):
        raise InvalidArgumentError(f"continuous must be True or False; got {continuous!r:.200}.")
    for name, value in others.items() if continuous else ():
        if value is not None:
            raise InvalidArgumentError(
                f"continuous=True saves again as soon as the last save is on the disk, so {name}={value!r:.200} cannot "
                f"hold. Remove {name} to save continuously, or remove continuous to keep {name}."
            )
