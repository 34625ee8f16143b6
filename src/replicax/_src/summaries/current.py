"""The default writer, the default step, and whether summaries are recorded: of each thread, as in TensorFlow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from replicax._src.errors import InvalidArgumentError

if TYPE_CHECKING:
    from replicax._src.summaries.writer import SummaryWriter


class _Local(threading.local):
    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.step: Any = None
        self.condition: bool | Callable[[], Any] = True


_local = _Local()


def default_writer() -> SummaryWriter | None:
    """The writer of this thread's ``as_default``; None if there is none."""
    return _local.writer


def set_as_default(writer: SummaryWriter, step: Any) -> None:
    """``writer`` is this thread's from now on, and ``step`` its step unless it is None."""
    _local.writer = writer
    if step is not None:
        _local.step = step


@contextlib.contextmanager
def as_default(writer: SummaryWriter, step: Any) -> Iterator[SummaryWriter]:
    """Inside, ``writer`` is this thread's."""
    before = _local.writer, _local.step
    set_as_default(writer, step)
    try:
        yield writer
    finally:
        _local.writer = before[0]
        if step is not None:
            _local.step = before[1]


def get_step() -> Any:
    """The step that this thread's summaries have if they name none; None if it was not set."""
    return _local.step


def set_step(step: Any) -> None:
    """Sets the step that this thread's summaries have if they name none.

    Args:
      step: An int; or a variable, which is read at each summary.
    """
    _local.step = step


def step_or_default(step: Any, what: str, name: str) -> Any:
    """``step``, or this thread's.

    Raises:
      InvalidArgumentError: There is none.
    """
    found = _local.step if step is None else step
    if found is None:
        raise InvalidArgumentError(
            f"{what}({name!r}) has no step: no step set. Write {what}({name!r}, data, step=step), or call "
            "rx.summary.experimental.set_step(step) first."
        )
    return found


def should_record_summaries() -> bool:
    """Whether summaries are recorded here: what the innermost ``record_if`` says, True without one."""
    condition = _local.condition
    return bool(condition() if callable(condition) else condition)


@contextlib.contextmanager
def record_if(condition: bool | Callable[[], Any]) -> Iterator[None]:
    """Inside, in this thread, summaries are recorded only if ``condition`` is true, or what it returns.

    All processes must come to the same answer where variables are written whose value is combined when it is read.
    """
    before, _local.condition = _local.condition, condition
    try:
        yield
    finally:
        _local.condition = before
