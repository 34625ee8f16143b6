"""What every format of files can do, and what becomes of the errors of the libraries that read them."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from replicax._src.errors import ReplicaxError
from replicax._src.extras import missing_extra
from replicax._src.input.chunks import Chunk


class UnreadableFileError(ReplicaxError, OSError):
    """A file is damaged, cut short, of another format than was said, or may not be read."""


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


class FileFormat(abc.ABC):
    """A format of files. Its subclasses are frozen dataclasses, whose fields are the options of reading.

    Attributes:
      name: What files of it are called: ``"Parquet"``.
      advice: What to do if a file cannot be read.
      has_columns: Whether rows are read as columns of numbers, not one by one as text or bytes.
    """

    name: ClassVar[str]
    advice: ClassVar[str]
    has_columns: ClassVar[bool]

    @abc.abstractmethod
    def open(self, path: str, position: Any) -> FileReader:
        """Opens a file at a position; None is its first row."""

    @abc.abstractmethod
    def count_rows(self, path: str) -> int | None:
        """Returns the number of rows of a file if that is known without reading them, else None."""

    @property
    @abc.abstractmethod
    def row_spec(self) -> Any:
        """The ArraySpecs of the columns ``{name: ArraySpec}``, or None if that is not known."""


REWRITE: Final = (
    "It is damaged, was not written to the end, or is of another format: write it again, or leave it out."
)

# What the readers raise about a file: theirs are RuntimeErrors, ValueErrors, OSErrors, EOFErrors (gzip), and, where
# the length of a record is wrong, also these two of Python's file objects.
_READER_ERRORS = (OSError, EOFError, ValueError, RuntimeError, MemoryError, OverflowError)


@contextlib.contextmanager
def reading(path: str, format: FileFormat) -> Iterator[None]:
    """Makes an UnreadableFileError, which names the file, of what the libraries raise."""
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
      MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(f"rx.data.{caller}", "files", module.partition(".")[0]) from error


def _first_line(error: BaseException, most: int = 160) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text[:most].rstrip(". ")
