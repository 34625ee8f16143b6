"""Sizes, times and tables as plain text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence


def size(num_bytes: float) -> str:
    """Returns bytes as readable text, in powers of 1024."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def seconds(value: float) -> str:
    """Returns seconds as readable text."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def printable(text: object) -> str:
    """Returns a name of another process or file as text that a terminal only shows: characters that are not printable,
    such as escape sequences, line breaks and marks that reverse the order of text, become escapes.

    >>> printable("worker 0"), printable("\x1b[2Jgone"), printable("a\u202eb")
    ('worker 0', '\\\\x1b[2Jgone', 'a\\\\u202eb')
    """
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode() for c in str(text))


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # wide and other spaces


def printable_lines(text: object) -> str:
    """Returns a text of several lines, such as another process's error, in which each line is ``printable``."""
    return "\n".join(map(printable, str(text).replace("\t", "    ").split("\n")))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a line for each row, with the cells of a column aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
