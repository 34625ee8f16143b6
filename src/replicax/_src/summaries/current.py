"""The default writer, the default step and the recording condition of each thread, as in TensorFlow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from replicax._src.vocabulary.errors import InvalidArgumentError

if TYPE_CHECKING:
    from replicax._src.summaries.writer import SummaryWriter


class _Local(threading.local):
    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.step: Any = None
        self.condition: bool | Callable[[], Any] = True


_local = _Local()


def default_writer() -> SummaryWriter | None:
    """Returns the default writer of this thread; None if there is none."""
    return _local.writer


def set_as_default(writer: SummaryWriter, step: Any) -> None:
    """Makes ``writer`` the default of this thread, and ``step`` its default step unless it is None."""
    _local.writer = writer
    if step is not None:
        _local.step = step


@contextlib.contextmanager
def as_default(writer: SummaryWriter, step: Any) -> Iterator[SummaryWriter]:
    """Makes ``writer`` the default of this thread in the block."""
    before = _local.writer, _local.step
    set_as_default(writer, step)
    try:
        yield writer
    finally:
        _local.writer = before[0]
        if step is not None:
            _local.step = before[1]


def get_step() -> Any:
    """Returns the default step of this thread's summaries; None if it was not set."""
    return _local.step


def set_step(step: Any) -> None:
    """Sets the default step of this thread's summaries.

    Args:
      step: An int, or a variable that is read at each summary.
    """
    _local.step = step


def step_or_default(step: Any, what: str, name: str) -> Any:
    """Returns ``step``, or the default step of this thread.

    Raises:
      InvalidArgumentError: There is no step.
    """
    found = _local.step if step is None else step
    if found is None:
        raise InvalidArgumentError(
            f"{what}({name!r}) has no step: no step set. Write {what}({name!r}, data, step=step), or call "
            "rx.summary.experimental.set_step(step) first."
        )
    return found


def should_record_summaries() -> bool:
    """Returns the condition of the innermost ``record_if``; True without one."""
    condition = _local.condition
    return bool(condition() if callable(condition) else condition)


@contextlib.contextmanager
def record_if(condition: bool | Callable[[], Any]) -> Iterator[None]:
    """Records summaries of this thread in the block only if ``condition``, or its return value, is true.

    All processes must get the same answer if a summary reads a variable whose value is combined from replicas.
    """
    before, _local.condition = _local.condition, condition
    try:
        yield
    finally:
        _local.condition = before
