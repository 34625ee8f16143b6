"""Terminal output of the commands: coloured lines, and a table that stays below them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO, final


def is_terminal(output: TextIO | DirectOutput, environment: Mapping[str, str]) -> bool:
    """Returns True if ``output`` is a terminal that can move its cursor and shows colours."""
    return output.isatty() and environment.get("TERM") != "dumb"


def coloured(text: str, code: str) -> str:
    """Returns a text with the colour or weight of an ANSI code; an empty code changes nothing."""
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def write_line(stream: TextIO, text: str) -> None:
    """Writes a line and flushes it. Characters that the stream's encoding lacks become escapes.

    Raises:
      OSError: The reader has closed the stream.
    """
    try:
        stream.write(f"{text}\n")
    except UnicodeEncodeError:
        stream.write(f"{text.encode('ascii', 'backslashreplace').decode()}\n")
    stream.flush()


@final
class DirectOutput(io.TextIOBase):
    """A text stream that writes at once to the file of another stream, and has no lock.

    A thread may thus wait for ever in ``write``, because nobody reads, and the process still ends in order: at exit
    Python flushes the other stream, which holds nothing.

    Args:
      stream: The other stream, such as ``sys.stdout``. If it has no file, ``write`` passes texts on to it.

    Attributes:
      written_at: The time, on the clock of ``time.monotonic``, at which a part of a text was last written.
    """

    def __init__(self, stream: TextIO):
        self.written_at = 0.0
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        stream.flush()
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, AttributeError):  # it is in memory
            self._descriptor = None

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a class attribute in typeshed
        return self._encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Writes a text. Characters that the encoding lacks become escapes.

        Raises:
          OSError: The reader has closed the stream.
        """
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return len(text)
        data = memoryview(text.encode(self._encoding, "backslashreplace"))
        while data:
            try:
                num_written = os.write(self._descriptor, data[:_PIECE_BYTES])
            except BlockingIOError:  # another program has made the terminal non-blocking
                select.select([], [self._descriptor], [])
                continue
            self.written_at = time.monotonic()
            data = data[num_written:]
        return len(text)

    def may_write(self) -> bool:
        """Returns True if a short text can be written without waiting."""
        return self._descriptor is None or bool(select.select([], [self._descriptor], [], 0)[1])


_PIECE_BYTES: Final = 4096  # of a text that can be written to a pipe which select calls writable


@final
class LiveTable:
    """A table that is redrawn in place, with lines that scroll above it. Needs rich.

    Texts may contain ANSI colour sequences. Only ``print`` and ``draw`` write, and ``close`` after them.

    Args:
      output: The terminal.

    Raises:
      ImportError: rich is not installed.
    """

    def __init__(self, output: TextIO | DirectOutput):
        self._text: Any = importlib.import_module("rich.text").Text.from_ansi
        self._table: Any = importlib.import_module("rich.table").Table
        rich_console: Any = importlib.import_module("rich.console")
        self._group: Any = rich_console.Group
        self._live: Any = importlib.import_module("rich.live").Live(
            console=rich_console.Console(file=output, highlight=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @property
    def width(self) -> int:
        """The number of characters in a line of the terminal."""
        return self._live.console.width

    def print(self, text: str) -> None:
        """Writes lines above the table, which each call draws again: one call for many lines is much faster."""
        self._live.start()  # has no effect the second time
        self._live.console.print(self._text(text), soft_wrap=True)

    def draw(
        self, heads: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int
    ) -> None:
        """Replaces the table.

        Args:
          heads: The lines above the table.
          columns: The titles of the columns.
          rows: The texts of each row, one for each column.
          num_left: The number of first columns that are aligned to the left.
        """
        self._live.start()
        table = self._table(box=None, pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < num_left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(self._text, row))
        self._live.update(self._group(*map(self._text, heads), table), refresh=True)

    def close(self) -> None:
        """Ends the table. Its last content stays visible."""
        with contextlib.suppress(OSError):
            self._live.stop()


def live_table(output: TextIO | DirectOutput, environment: Mapping[str, str]) -> LiveTable | None:
    """Returns a table on a terminal; None if the output is not a terminal or rich is not installed."""
    if is_terminal(output, environment):
        with contextlib.suppress(ImportError):
            return LiveTable(output)
    return None
