"""``WaitRules``: the rules by which a task waits for others while a job starts. Pure: the caller has the clock."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from replicax._src.program_kit.errors import UnavailableError

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.4
_SAY_EVERY_S: Final = 10.0


class Awaited(NamedTuple):
    """The missing tasks: their names in a message, the reason, and the name of the first one."""

    what: str
    why: str
    task: str


class LookAgain(NamedTuple):
    """Log the text, if there is one, and look again after a pause."""

    pause_s: float
    text: str | None


@final
class WaitRules:
    """One wait.

    Args:
      waiting: The name of the task that waits.
      limit_s: The longest wait.
      now: The time in seconds, of the clock that ``missing`` uses.
    """

    def __init__(self, waiting: str, limit_s: float, now: float):
        self._waiting, self._limit_s = waiting, limit_s
        self._start = self._said = now
        self._pause_s = _FIRST_PAUSE_S

    def missing(self, awaited: Awaited, now: float) -> LookAgain:
        """Tasks are missing.

        Raises:
          UnavailableError: They are still missing after ``limit_s``.
        """
        waited_s = now - self._start
        if waited_s > self._limit_s:
            raise UnavailableError(
                f"{self._waiting} waited {self._limit_s:g} s for {awaited.what}: {awaited.why} Set "
                "REPLICAX_START_TIMEOUT_S to wait longer.",
                awaited.task,
            )
        text = None
        if now - self._said > _SAY_EVERY_S:
            self._said = now
            text = f"{self._waiting} has waited {waited_s:.0f} s for {awaited.what}: {awaited.why}"
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return LookAgain(pause_s, text)
