"""Formats of files, and the errors of the libraries that read them."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from replicax._src.input.chunks import Chunk
from replicax._src.packaging.extras import missing_extra
from replicax._src.vocabulary.errors import ReplicaxError


class UnreadableFileError(ReplicaxError, OSError):
    """A file is damaged, truncated, unreadable or of another format than expected."""


class FileReader(abc.ABC):
    """One open file, from which rows are read in order."""

    @abc.abstractmethod
    def read(self, num_rows: int) -> Chunk:
        """Returns the next rows; fewer only at the end of the file."""

    @abc.abstractmethod
    def tell(self) -> Any:
        """Returns the position of the next row, as JSON, to be given to ``FileFormat.open``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file."""


REWRITE: Final = (
    "It is damaged, was not written to the end, or is of another format: write it again, or leave it out."
)


def unknown(path: str | None = None) -> None:
    """Returns None. It has a name, so that formats can be pickled."""


@final
@dataclass(frozen=True)
class FileFormat:
    """A format of files, with the options of reading.

    Attributes:
      name: The name of such files: ``"Parquet"``.
      options: The options as text, to tell positions of files read with other options apart.
      open: ``(path, position) -> FileReader``; the position None is the first row.
      count_rows: Returns the number of rows of a file if that is known without reading them; otherwise None.
      row_spec: Returns the ArraySpecs of the columns ``{name: ArraySpec}``, or None if that is not known.
      has_columns: True if rows are read as columns of numbers, False if they are read one by one as text or bytes.
      advice: The advice for a file that cannot be read.
    """

    name: str
    options: str
    open: Callable[[str, Any], FileReader]
    count_rows: Callable[[str], int | None] = unknown
    row_spec: Callable[[], Any] = unknown
    has_columns: bool = False
    advice: str = REWRITE


# The errors that readers raise: RuntimeError, ValueError, OSError, EOFError (gzip) and, for a wrong record length, also
# these two of Python's file objects.
_READER_ERRORS = (OSError, EOFError, ValueError, RuntimeError, MemoryError, OverflowError)


@contextlib.contextmanager
def reading(path: str, format: FileFormat) -> Iterator[None]:
    """Turns the errors of the libraries into an UnreadableFileError that names the file."""
    try:
        yield
    except ReplicaxError:
        raise
    except _READER_ERRORS as error:
        raise UnreadableFileError(
            f"The {format.name} file {path!r} cannot be read: {_first_line(error)}. {format.advice}"
        ) from error


def load(module: str, caller: str) -> Any:
    """Imports a module of an optional dependency.

    Raises:
      MissingExtraError: The dependency is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(f"rx.data.{caller}", "files", module.partition(".")[0]) from error


def _first_line(error: BaseException, most: int = 160) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text[:most].rstrip(". ")
