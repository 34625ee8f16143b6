"""Tables for notebooks, as HTML: plain text in, escaped; no scripts, nothing from elsewhere, and the notebook's own
colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_MAX_ROWS: Final = 16
_CELL: Final = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;white-space:pre-wrap"
_TABLE: Final = "border-collapse:collapse;margin:4px 0 8px 0"


def page(title: str, *parts: str) -> str:
    """What a cell shows: a title, and parts that are HTML, from the functions below."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def facts(of: Mapping[str, object]) -> str:
    """Names and what they are, a line for each; None is left out."""
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(str(value))}</td></tr>'
        for name, value in of.items()
        if value is not None
    )
    return f'<table style="{_TABLE}">{rows}</table>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under a head; of many the first ones, and how many more there are."""
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
    """Text as it is, in lines of its own, that opens where its summary is clicked."""
    return (
        f"<details><summary>{escape(summary)}</summary>"
        f'<pre style="background:transparent;color:inherit">{escape(text)}</pre></details>'
    )


def scrolled(svg: str) -> str:
    """A picture that is as wide as it is, or as the notebook. It must be of our own making: it is not escaped."""
    return f'<div style="overflow-x:auto">{svg}</div>'
