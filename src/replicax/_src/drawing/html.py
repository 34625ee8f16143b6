"""Tables for notebooks as HTML. Text is escaped. There are no scripts and no external files, and colours are the
notebook's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_MAX_ROWS: Final = 16
_CELL: Final = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;white-space:pre-wrap"
_TABLE: Final = "border-collapse:collapse;margin:4px 0 8px 0"


def page(title: str, *parts: str) -> str:
    """Returns the HTML of a cell: a title and parts, which are HTML from the functions below."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def page_of_table(
    title: str, about: Mapping[str, object], head: Sequence[str], rows: Sequence[Sequence[object]]
) -> str:
    """Returns a page of ``facts``, and a table if it has rows."""
    return page(title, facts(about), table(head, rows) if rows else "")


def facts(of: Mapping[str, object]) -> str:
    """Returns a line for each name and its value. None values are left out."""
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(str(value))}</td></tr>'
        for name, value in of.items()
        if value is not None
    )
    return f'<table style="{_TABLE}">{rows}</table>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns rows under a head. Of many rows it shows the first, and the number of the rest."""
    shown = rows if len(rows) <= _MAX_ROWS else rows[: _MAX_ROWS - 1]
    names = "".join(f'<th style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(str(cell))}</td>' for cell in row) + "</tr>"
        for row in shown
    )
    if len(shown) < len(rows):
        body += (
            f'<tr><td style="{_CELL}" colspan="{len(head)}">… and {len(rows) - len(shown):,} more</td></tr>'
        )
    return f'<table style="{_TABLE}"><tr>{names}</tr>{body}</table>'


def folded(summary: str, text: str) -> str:
    """Returns text, unchanged in its own lines, that opens with a click on its summary."""
    return (
        f"<details><summary>{escape(summary)}</summary>"
        f'<pre style="background:transparent;color:inherit">{escape(text)}</pre></details>'
    )


def scrolled(svg: str) -> str:
    """Returns a picture in its own width, which scrolls in a narrow notebook. The SVG must be trusted, because it is
    not escaped.
    """
    return f'<div style="overflow-x:auto">{svg}</div>'
