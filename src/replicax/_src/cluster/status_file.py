"""``StatusFile``: the file in which a task tells the launcher its step.

If a script writes the file itself, replicax stops writing it.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Final, final

STATUS_FILE_VARIABLE: Final = "REPLICAX_STATUS_FILE"
SAVING: Final = "saving"
"""The state of a task that saves after the failure of another one. The launcher waits for it."""
RAISED: Final = "raised"
"""The state of a task whose program has raised an error of its own. The job has then failed, even if others finish,
unless another process of the task has taken its place."""
GIVEN_UP: Final = "given up"
"""The state of a task that the others continue without, because it was silent or cut off. It ends itself, and the job
succeeds if the others do."""


@final
class StatusFile:
    """Writes the status for the launcher's table, until the script writes the file itself. Any thread may call it.

    Args:
      path: The path of the file; None if no launcher wants one.
    """

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path)
        self._written = ""
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """True if writing has an effect."""
        return self._path is not None

    def write(
        self, step: int, state: str, left_at: float | None = None, *, tolerates_failures: bool = False
    ) -> None:
        """Writes the status.

        Args:
          step: The number of the step.
          state: The state in one word.
          left_at: The time at which the task began to end, on the clock of ``time.monotonic``; None if it has not.
          tolerates_failures: True if the other tasks continue without this one when it dies: it has joined a job that
            tolerates failures, and the run is not lost.
        """
        content = {
            "step": step,
            "time": time.time(),
            "state": state,
            "left_at": left_at,
            "tolerates_failures": tolerates_failures,
        }
        with self._lock:
            try:
                self._replace(json.dumps(content))
            except OSError:
                self._path = None

    def _replace(self, text: str) -> None:
        if self._path is None:
            return
        if (self._path.read_text() if self._path.exists() else "") != self._written:
            self._path = None  # the script writes the file now
            return
        fresh = Path(f"{self._path}.replicax")
        fresh.write_text(text)
        fresh.replace(self._path)
        self._written = text
