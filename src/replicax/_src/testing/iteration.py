"""Keeps a function that is checked from taking its batches from a distributed dataset."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from replicax._src import context
from replicax._src.errors import InvalidArgumentError
from replicax._src.input.dataset import iteration_guard

_lock = threading.Lock()
_displaced: list[
    Callable[[], None]
] = []  # the guard that ours stands for, once for each thread that is inside


@contextlib.contextmanager
def iteration_forbidden() -> Iterator[None]:
    """Inside, no distributed dataset may be iterated in a thread in which a strategy has a stand-in.

    Ours comes before the guards that take an iteration in a trace for something else. It replaces the first of them
    and calls it: other threads may be going through the list, and would miss one if the rest moved up afterwards.
    """
    with _lock:
        first = _displaced[0] if _displaced else iteration_guard[0]
        if not _displaced:
            iteration_guard[0] = functools.partial(_forbid, first)
        _displaced.append(first)
    try:
        yield
    finally:
        with _lock:
            _displaced.pop()
            if not _displaced:
                iteration_guard[0] = first


def _forbid(first: Callable[[], None]) -> None:
    if context.is_standing_in():
        raise InvalidArgumentError(
            "A distributed dataset was iterated in the function that check_against_one_device runs, so that both runs "
            "would see other rows. Give the function that takes one batch, and the batch."
        )
    first()
