"""``StepCounts``: the numbers by which messages name steps. Each step has a number among those of its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

_PROGRAM: Final = "to run "


@final
class StepCounts:
    """Counts the committed steps by their purposes, such as ``"to run train_step"``.

    Attributes:
      last: The last committed step, in words; None before the first one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.last: str | None = None

    def next(self, what: str) -> str:
        """Returns the next step of a purpose, in words: ``"step 1,204 of train_step"``."""
        if not what.startswith(_PROGRAM):
            return f"the step {what}"
        return f"step {self._counts.get(what, 0) + 1:,} of {what.removeprefix(_PROGRAM)}"

    def commit(self, what: str) -> str:
        """Counts a step. Returns it in words."""
        self.last = self.next(what)
        self._counts[what] = self._counts.get(what, 0) + 1
        return self.last

    def as_json(self) -> dict[str, Any]:
        """Returns all counts, for a replacement."""
        return {"counts": self._counts, "last": self.last}

    def take(self, counts: Mapping[str, Any]) -> None:
        """Continues with the counts of another process."""
        self._counts, self.last = dict(counts["counts"]), counts["last"]
