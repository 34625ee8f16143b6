"""``wait_for``: waits for other tasks while a job starts, and says which ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from replicax._src.parameter_servers.errors import UnavailableError

log = logging.getLogger("replicax")
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.4
_SAY_EVERY_S: Final = 10.0


class Awaited(NamedTuple):
    """The tasks that are missing: how a message names them, why they are missing, and the name of the first one."""

    what: str
    why: str
    task: str


def wait_for(missing: Callable[[], Awaited | None], waiting: str, limit_s: float) -> None:
    """Calls ``missing`` until it returns None. Logs now and then what it waits for.

    Args:
      waiting: The name of the task that waits.

    Raises:
      UnavailableError: Something is missing after ``limit_s``.
    """
    start = said = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while (awaited := missing()) is not None:
        now = time.monotonic()
        if now - start > limit_s:
            raise UnavailableError(
                f"{waiting} waited {limit_s:g} s for {awaited.what}: {awaited.why} REPLICAX_START_TIMEOUT_S sets how long to "
                "wait.",
                awaited.task,
            )
        if now - said > _SAY_EVERY_S:
            said = now
            log.warning("%s has waited %.0f s for %s: %s", waiting, now - start, awaited.what, awaited.why)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
