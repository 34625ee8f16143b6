"""Yields new checkpoints of a directory, which another program writes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from replicax._src.checkpoint.directory import latest_checkpoint

_PAUSE_S: Final = 1.0


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the path of the latest checkpoint of a directory whenever there is a new one. It blocks.

    It skips checkpoints that are replaced by newer ones before the caller asks for the next.

    Args:
      checkpoint_dir: The directory, into which another program may save.
      min_interval_secs: The least time between two paths, in seconds.
      timeout: The longest wait for a new one, in seconds; None for no limit.
      timeout_fn: A function that is called after that time. The iteration ends if it returns True, or is not given.

    Source: TensorFlow, ``tf.train.checkpoints_iterator``.
    """
    seen: tuple[str, int] | None = None
    while True:
        new = _newer(checkpoint_dir, seen, timeout)
        if new is not None:
            seen, start = new, time.monotonic()
            yield new[0]
            time.sleep(max(0.0, start + min_interval_secs - time.monotonic()))
        elif timeout_fn is None or timeout_fn():
            return


def _newer(
    directory: str | os.PathLike[str], seen: tuple[str, int] | None, timeout: float | None
) -> tuple[str, int] | None:
    """Waits for a new latest checkpoint, and returns its path and time. A file that was written again counts as new."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        path = latest_checkpoint(directory)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                found = (path, os.stat(path).st_mtime_ns)
                if found != seen:
                    return found
        remaining = _PAUSE_S if end is None else end - time.monotonic()
        if remaining <= 0:
            return None
        time.sleep(min(_PAUSE_S, remaining))
