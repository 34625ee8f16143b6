"""``TerminationConfig``: how a program learns that it is to end, how long it has, and what it does then."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

from replicax._src.vocabulary.errors import InvalidArgumentError

PREEMPTED_EXIT_CODE: Final = 42
"""The exit code of a preempted task that has saved. ``replicax launch`` restarts it and does not count a failure."""


def exit_preempted() -> NoReturn:
    """Exits with ``PREEMPTED_EXIT_CODE``."""
    sys.exit(PREEMPTED_EXIT_CODE)


@final
@dataclass(frozen=True)
class TerminationConfig:
    """Overrides the defaults of a ``PreemptionCheckpointHandler``.

    Attributes:
      termination_watcher_fn: Polled once a second in a thread, instead of watching for SIGTERM. It returns True if this
        task is preempted. The next ``run`` raises its error, if any.
      exit_fn: Called in the thread that calls ``run`` after all tasks have saved; ``sys.exit(42)`` by default. If it
        returns, training continues and is not saved again.
      grace_period: The seconds for which a task may continue after the preemption signal. If it is 0 or None, all tasks
        save at once and end. Otherwise they save at once and continue, then save again and end shortly before the time
        is over.
      save_fn: Called in every task in place of the checkpoint's ``save``, with the arguments of
        ``save_checkpoint_if_preempted``.

    Raises:
      InvalidArgumentError: One of the functions is not callable, or the period is not a number of at least 0.
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
                    f"TerminationConfig: {name} must be a function or None, got {given!r}."
                )
        period = self.grace_period
        is_number = isinstance(period, numbers.Real) and not isinstance(period, bool)
        if period is not None and not (is_number and 0 <= period < math.inf):
            raise InvalidArgumentError(
                f"TerminationConfig: grace_period must be a number of seconds of at least 0, got {period!r}."
            )

    @property
    def grace_s(self) -> float:
        """The grace period in seconds; 0 if there is none."""
        return float(self.grace_period or 0)
