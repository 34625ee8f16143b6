"""The file that keeps the curves of a job over restarts of the process that serves its status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from replicax._src.status.history import MOST_BYTES, History
from replicax._src.untrusted.strict_json import TextError

STATUS_HISTORY_VARIABLE: Final = "REPLICAX_STATUS_HISTORY"

_log = logging.getLogger("replicax")


@final
class HistoryFile:
    """Loads and saves a ``History``. A file that cannot be read or written is no error, as the job does not need it.

    Args:
      path: The path of the file. With None nothing is loaded or saved.
    """

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HistoryFile:
        """Returns the file of ``REPLICAX_STATUS_HISTORY``."""
        return cls(environ.get(STATUS_HISTORY_VARIABLE) or None)

    def load(self) -> History:
        """Returns the history of the file; an empty one if there is none, or another program's file."""
        if self._path is None:
            return History()
        try:
            with self._path.open("rb") as file:
                return History.from_text(file.read(MOST_BYTES + 1))
        except FileNotFoundError:
            pass
        except (OSError, TextError) as error:
            _log.warning(
                "The curves of the status start again, because %s cannot be read: %s", self._path, error
            )
        return History()

    def save(self, history: History) -> None:
        """Replaces the file in one step."""
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.replicax")
        try:
            fresh.write_text(history.to_text())
            fresh.replace(self._path)
        except OSError:
            _log.debug("The curves of the status cannot be saved in %s.", self._path, exc_info=True)
