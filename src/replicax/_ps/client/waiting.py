"""``wait_for``: waits for other tasks while a job starts, and logs which ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from replicax._ps.client.wait_rules import Awaited, WaitRules

log = logging.getLogger("replicax")


def wait_for(missing: Callable[[], Awaited | None], waiting: str, limit_s: float) -> None:
    """Calls ``missing`` until it returns None. Logs at intervals what it waits for.

    Args:
      missing: Returns the missing tasks, or None.
      waiting: The name of the task that waits.
      limit_s: The longest wait.

    Raises:
      UnavailableError: Tasks are still missing after ``limit_s``.
    """
    rules = WaitRules(waiting, limit_s, time.monotonic())
    while (awaited := missing()) is not None:
        pause_s, text = rules.missing(awaited, time.monotonic())
        if text is not None:
            log.warning("%s", text)
        time.sleep(pause_s)
