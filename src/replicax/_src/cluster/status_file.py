"""``StatusFile``: where a task tells the launcher at which step it is. A script may write the file itself; then it is its."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final, final

STATUS_FILE_VARIABLE: Final = "REPLICAX_STATUS_FILE"


@final
class StatusFile:
    """Writes what the launcher's table shows, until somebody else writes there.

    Args:
      path: Of the file; None: nobody has asked for one.
    """

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path)
        self._written = ""

    @property
    def is_wanted(self) -> bool:
        """Whether writing has an effect."""
        return self._path is not None

    def write(self, step: int, state: str) -> None:
        """Says which step this is, and what is going on, in a word."""
        if self._path is None:
            return
        try:
            if (self._path.read_text() if self._path.exists() else "") != self._written:
                self._path = None  # the script's own
                return
            fresh = Path(f"{self._path}.replicax")
            self._written = json.dumps({"step": step, "time": time.time(), "state": state})
            fresh.write_text(self._written)
            fresh.replace(self._path)
        except OSError:
            self._path = None
