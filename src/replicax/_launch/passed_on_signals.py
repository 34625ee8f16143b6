"""The signals that end a job. The main thread notices them for those that run tasks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_noticed(notice: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls ``notice`` in the main thread at each of these signals while the block runs. It may not take a lock.

    Signals that are ignored stay so, such as SIGHUP under nohup.
    """
    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}  # nohup, `&`
    for number in before:
        signal.signal(number, notice)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
