"""``TerminationConfig``: how a program learns that it is to end, how long it has, and what it does then."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

from replicax._src.errors import InvalidArgumentError

PREEMPTED_EXIT_CODE: Final = 42
"""What a task that has saved exits with: ``replicax launch`` starts it again, and does not count that as a failure."""


def exit_preempted() -> NoReturn:
    """Ends the program with the code that says that it has saved."""
    sys.exit(PREEMPTED_EXIT_CODE)


@final
@dataclass(frozen=True)
class TerminationConfig:
    """What a ``PreemptionCheckpointHandler`` does otherwise than by default.

    Attributes:
      termination_watcher_fn: Called once a second in a thread, in place of watching for SIGTERM: whether this task is
        to end. What it raises is raised by the next ``run``.
      exit_fn: Called in the thread that calls ``run``, after all tasks have saved; ``sys.exit(42)`` by default. If it
        returns, training goes on, and is not saved again.
      grace_period: For how many seconds from the notice on the task may go on. With more than 0 all save at once and go
        on, and save a second time, and end, just before the time is over; with 0 they end after the first time.
      save_fn: Called in place of the checkpoint's ``save``, in every task, with what ``save_checkpoint_if_preempted``
        was given.

    Raises:
      InvalidArgumentError: Something that is to be called cannot be, or the period is no number of at least 0.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InvalidArgumentError(
                    f"TerminationConfig: {name} is a function, or None; got {given!r}."
                )
        period = self.grace_period
        is_number = isinstance(period, numbers.Real) and not isinstance(period, bool)
        if period is not None and not (is_number and 0 <= period < math.inf):
            raise InvalidArgumentError(
                f"TerminationConfig: grace_period is a number of seconds, of at least 0; got {period!r}."
            )

    @property
    def grace_s(self) -> float:
        """The grace period, 0 if there is none."""
        return float(self.grace_period or 0)
