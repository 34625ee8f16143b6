"""The denominators of losses in a step, which optimizers that accumulate gradients weigh micro-batches by."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class LossCount(NamedTuple):
    """The denominator of one mean loss.

    Attributes:
      of: Returns it: an int, or a scalar array.
      is_local: True if it counts the rows of this replica only.
    """

    of: Callable[[], Any]
    is_local: bool = False


class LossCounts:
    """The denominators of the losses of one step.

    Attributes:
      new: Those of the losses that no optimizer has used.
      last: Those that the last optimizer used.
    """

    def __init__(self) -> None:
        self.new: list[LossCount] = []
        self.last: list[LossCount] = []


class _Local(threading.local):
    counts: LossCounts | None = None


_local = _Local()


def loss_counts() -> LossCounts | None:
    """Returns the counts of the innermost ``counting`` block; None elsewhere."""
    return _local.counts


def note_loss(count: LossCount) -> None:
    """Records the denominator of a loss."""
    counts = loss_counts()
    if counts is not None:
        counts.new.append(count)


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Context for one step."""
    before, _local.counts = _local.counts, LossCounts()
    try:
        yield
    finally:
        _local.counts = before
