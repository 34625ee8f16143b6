"""``LoopProgress``: the position of a training loop in its data, and the time left. What is not known is None."""

from __future__ import annotations

import time
from typing import Any, Final, final

EPOCH: Final = "epoch"
"""A turn of Keras's ``fit``, which knows the number of its epochs."""
PASS: Final = "pass"
"""A turn of another loop: one iteration over a distributed dataset. Nobody knows how many will follow."""


@final
class LoopProgress:
    """The position of a loop. One thread writes it, others may read it.

    Attributes:
      kind: ``EPOCH`` or ``PASS``.
      number: The number of the current turn, from 0.
      num_turns: The number of all turns; None if it is not known.
      batch: The number of batches of this turn that have been trained on.
      num_batches: The number of batches in each turn; None if it is not known.
    """

    def __init__(self, kind: str, num_turns: int | None = None):
        self.kind, self.num_turns = kind, num_turns
        self.number = self.batch = 0
        self.num_batches: int | None = None
        # The speed is the mean since the second batch, because the first one waits for compilation.
        self._num_notes = self._num_timed = 0
        self._since_s = 0.0

    def begin_turn(self, number: int, num_batches: int | None) -> None:
        """Notes the start of a turn.

        Args:
          num_batches: The number of its batches. None: as many as the turn before had, if there was one.
        """
        if num_batches is None and number > self.number:
            num_batches = self.batch or None
        self.number, self.batch, self.num_batches = number, 0, num_batches

    def note(self, num_batches: int = 1) -> None:
        """Notes that batches have been trained on."""
        self.batch += num_batches
        if self._num_notes < 2:
            self._num_notes += 1
            self._since_s = time.monotonic()
        else:
            self._num_timed += num_batches

    def describe(self) -> dict[str, Any]:
        """Returns the position as JSON.

        ``share`` is the part of the whole training that is done, or of the pass where the number of turns is not known.
        ``left_s`` is the time until then, at the mean speed so far.
        """
        batch, num_batches, turns_left = self.batch, self.num_batches, 1
        if num_batches is not None and batch > num_batches:
            num_batches = None
        if self.num_turns is not None:
            turns_left = self.num_turns - self.number
        share = left_s = None
        if num_batches:
            left = num_batches * turns_left - batch
            share = 1 - left / (num_batches * (self.num_turns or 1))
            left_s = self._duration_of(left)
        return {
            "kind": self.kind,
            "number": self.number + 1,
            "num_turns": self.num_turns,
            "batch": batch,
            "num_batches": num_batches,
            "share": share,
            "left_s": left_s,
        }

    def _duration_of(self, num_batches: int) -> float | None:
        timed = self._num_timed
        return (time.monotonic() - self._since_s) / timed * num_batches if timed else None
