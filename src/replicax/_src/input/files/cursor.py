"""The cursor that reads the files of a dataset, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from replicax._src.input.files.chunks import Chunk, join, num_rows_of
from replicax._src.input.files.formats import FileFormat, FileReader, reading
from replicax._src.input.files.steps import Cursor


@final
class FilesCursor(Cursor):
    """The rows of files, one file after the other."""

    def __init__(self, files: Sequence[str], format: FileFormat):
        self._files, self._format = files, format
        self._number = 0  # of the file that is being read
        self._reader: FileReader | None = None

    def read(self, num_rows: int) -> Chunk:
        pieces: list[Chunk] = []
        while num_rows and self._number < len(self._files):
            piece = self._read_from_file(num_rows)
            pieces.append(piece)
            if num_rows_of(piece) < num_rows:
                self._close()
                self._number += 1
            num_rows -= num_rows_of(piece)
        return join(pieces)

    def get_state(self) -> Any:
        return {"file": self._number, "at": None if self._reader is None else self._reader.tell()}

    def set_state(self, state: Any) -> None:
        self._close()
        self._number = int(state["file"])
        if state["at"] is not None:
            self._reader = self._opened(state["at"])

    def _read_from_file(self, num_rows: int) -> Chunk:
        path = self._files[self._number]
        if self._reader is None:
            self._reader = self._opened(None)
        with reading(path, self._format):
            return self._reader.read(num_rows)

    def _opened(self, position: Any) -> FileReader:
        path = self._files[self._number]
        with reading(path, self._format):
            return self._format.open(path, position)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
