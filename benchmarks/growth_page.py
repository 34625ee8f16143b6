"""The table of growth in the page of the docs: new lines take the place of old ones, and the others stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from growth_rows import GROUPS

HEADER: Final = """\
| what grows | what is measured | from → to | may | fitted | bends at |
|---|---|--:|--:|--:|--:|"""


def with_lines(page: str, lines: Mapping[tuple[str, str], str]) -> str:
    """Returns the page with new lines in its table, in the order of ``GROUPS``.

    Args:
      page: The text of the page. It has the table once.
      lines: The new lines, by the names of their group and row.
    """
    before, header, after = page.partition(HEADER + "\n")
    if not header:
        raise SystemExit(f"The page has no table that begins with\n{HEADER}")
    old: list[str] = []
    while after.startswith("|"):
        line, _, after = after.partition("\n")
        old.append(line)
    table: list[str] = []
    for group in GROUPS:
        for row in group.rows:
            of_row = (line for line in old if _is_of(line, group.name, row.name))
            line = lines.get((group.name, row.name)) or next(of_row, None)
            if line is not None:
                table.append(line)
    return before + header + "".join(f"{line}\n" for line in table) + after


def _is_of(line: str, group: str, row: str) -> bool:
    """True if a line is of a row: its first cell is the group's name and sizes."""
    what, measured, *_ = (cell.strip() for cell in line.strip("|").split("|"))
    return what.startswith(f"{group} ") and what[len(group) + 1].isdigit() and measured == row
