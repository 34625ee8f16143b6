"""The rules for jobs that run beside each other: groups that train, and the syncers through which they exchange. Pure.

Events in, actions out: no processes, threads or clocks. ``side_by_side.py`` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Say:
    """Show a message."""

    text: str


@final
@dataclass(frozen=True)
class FinishSyncers:
    """End the syncers in order."""


@final
class GroupEndings:
    """Decides what the end of a job means for the others. A group that fails ends nobody else, and a syncer neither.

    The syncers end when all groups have ended.

    Args:
      groups: The names of the groups.
    """

    def __init__(self, groups: Sequence[str]):
        self._running = dict.fromkeys(groups)
        self._finished: list[str] = []
        self._failed: dict[str, int] = {}
        self._lost_syncers: dict[str, int] = {}
        self._signals: list[int] = []

    @property
    def exit_code(self) -> int:
        """128 plus the first signal; the code of the first group that failed; that of the first syncer; or 0."""
        if self._signals:
            return 128 + self._signals[0]
        return next(iter((*self._failed.values(), *self._lost_syncers.values())), 0)

    def signal(self, number: int) -> None:
        """All jobs were told to end. A signal handler may call it."""
        self._signals.append(number)

    def group_ended(self, group: str, code: int) -> list[Say | FinishSyncers]:
        """A group has ended for good, with its exit code."""
        del self._running[group]
        if code:
            self._failed[group] = code
        else:
            self._finished.append(group)
        actions: list[Say | FinishSyncers] = []
        if self._failed and not self._signals:
            if not self._running:
                ends = ", ".join(f"{name} (exit code {code})" for name, code in self._failed.items())
                actions.append(Say(f"Failed: {ends}. Finished: {', '.join(self._finished) or 'none'}."))
            elif code:
                others = ", ".join(self._running)
                others += " continues" if len(self._running) == 1 else " continue"
                actions.append(
                    Say(f"{group} has failed, with exit code {code}. It is not restarted. {others}.")
                )
        return actions if self._running else [*actions, FinishSyncers()]

    def syncer_ended(self, syncer: str, code: int) -> list[Say | FinishSyncers]:
        """A syncer has ended for good, with its exit code."""
        if not code or not self._running or self._signals:
            return []
        self._lost_syncers[syncer] = code
        return [
            Say(
                f"{syncer} has failed, with exit code {code}. It is not restarted. The groups train on, and no longer "
                "exchange what it holds."
            )
        ]
