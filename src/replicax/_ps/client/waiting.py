"""``wait_for``: waits for other tasks while a job starts, and logs which ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from replicax._src.program_kit.errors import UnavailableError

log = logging.getLogger("replicax")
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.4
_SAY_EVERY_S: Final = 10.0


class Awaited(NamedTuple):
    """The missing tasks: their names in a message, the reason, and the name of the first one."""

    what: str
    why: str
    task: str


def wait_for(missing: Callable[[], Awaited | None], waiting: str, limit_s: float) -> None:
    """Calls ``missing`` until it returns None. Logs at intervals what it waits for.

    Args:
      missing: Returns the missing tasks, or None.
      waiting: The name of the task that waits.
      limit_s: The longest wait.

    Raises:
      UnavailableError: Tasks are still missing after ``limit_s``.
    """
    start = said = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while (awaited := missing()) is not None:
        now = time.monotonic()
        if now - start > limit_s:
            raise UnavailableError(
                f"{waiting} waited {limit_s:g} s for {awaited.what}: {awaited.why} Set "
                "REPLICAX_START_TIMEOUT_S to wait longer.",
                awaited.task,
            )
        if now - said > _SAY_EVERY_S:
            said = now
            log.warning("%s has waited %.0f s for %s: %s", waiting, now - start, awaited.what, awaited.why)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
