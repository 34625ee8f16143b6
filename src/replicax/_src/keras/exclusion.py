"""One thread at a time runs the steps of a Keras model: ``fit``, ``evaluate``, ``predict`` and the like."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from replicax._src.vocabulary.errors import UnsupportedError

_lock = threading.Lock()
_running: dict[int, tuple[threading.Thread, str]] = {}  # by the id of the model, while a method runs


@contextlib.contextmanager
def alone(model: Any, method: str) -> Iterator[None]:
    """Wraps a method that runs steps. A callback may call others in the same thread.

    Raises:
      UnsupportedError: Another thread runs steps of the model. Its steps go on: Keras keeps the loop's state in the
        model, so that both would fail.
    """
    thread = threading.current_thread()
    mine = thread, method
    with _lock:
        running = _running.setdefault(id(model), mine)
    if running[0] is not thread:
        raise UnsupportedError(
            f"{method}() of model {model.name!r} was called in the thread {thread.name!r} while {running[1]}() of it runs in "
            f"the thread {running[0].name!r}. The steps of a model run in one thread at a time. Hold a threading.Lock around "
            "each of the calls; or give each thread a model of its own, with copy.set_weights(model.get_weights())."
        )
    try:
        yield
    finally:
        if running is mine:
            with _lock:
                _running.pop(id(model), None)
