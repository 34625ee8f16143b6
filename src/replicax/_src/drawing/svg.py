"""The elements of pictures in SVG: rectangles, text, and rows of arrays with a bar for the part on one device.

A picture in a page has no background and uses the page's text colour. A picture in a file is light or dark, as the
viewer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WHOLE: Final = "#6c9bd2"
CUT: Final = "#e0a458"
PALETTE: Final = ("#9ec5fe", "#ffd59e", "#b5e2b5", "#f5b5c8", "#cfc2f5", "#a8e0dc", "#e8d9a0", "#d8c4b4")
"""Of parts, in turn: light enough for dark text in them."""

CHAR: Final = 6.7
"""How wide a character of monospaced text is at 11 px: names are measured, so that nothing runs into what is beside
them.
"""

_COLOURS: Final = (
    "svg{color:#1f2328}.page{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}.page{fill:#0d1117}}"
)
_MAX_NAME: Final = 52
_ROW: Final = 22
_CUT_WIDTH, _CUT_HEIGHT, _MOST_PIECES, _BAR = 48, 16, 12, 300


def picture(width: float, height: float, lines: Iterable[str], *, is_inline: bool) -> str:
    """Returns a full picture.

    Args:
      is_inline: True for a picture in a page, whose text colour it uses. A file adapts to the viewer's dark mode.
    """
    style = (
        f'<style>{_COLOURS}</style><rect class="page" width="100%" height="100%"/>' if not is_inline else ""
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12" fill="currentColor">{style}',
            *lines,
            "</svg>",
        ]
    )


def rect(left: float, top: float, width: float, height: float, color: str, name: str = "") -> str:
    """Returns a filled rectangle."""
    kind = f' class="{name}"' if name else ""
    return f'<rect{kind} x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def outline(left: float, top: float, width: float, height: float, *, is_dashed: bool = False) -> str:
    """Returns the border of a rectangle."""
    dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="none" stroke="currentColor"'
        f' stroke-opacity=".5"{dashes}/>'
    )


def line(left: float, top: float, right: float, bottom: float) -> str:
    """Returns a thin straight line, such as one of a grid."""
    ends = f'x1="{left:g}" y1="{top:g}" x2="{right:g}" y2="{bottom:g}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity=".18"/>'


def polyline(points: Sequence[tuple[float, float]], color: str, name: str) -> str:
    """Returns a line through points. A single point becomes a dot."""
    shown = points if len(points) > 1 else [*points, *points]
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
    return (
        f'<polyline class="{name}" points="{at}" fill="none" stroke="{color}" stroke-width="1.8" '
        'stroke-linecap="round" stroke-linejoin="round"/>'
    )


def text(left: float, top: float, said: str, **style: object) -> str:
    """Returns a line of text. ``style`` has attributes, with ``_`` for ``-``."""
    styles = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{left:g}" y="{top:g}"{styles}>{escape(said)}</text>'


def mono(left: float, top: float, said: str, **style: object) -> str:
    """Returns text of a known width; see ``CHAR``."""
    return text(left, top, said, **{"font_family": "monospace", "font_size": 11, **style})


def shortened(name: str, most: int = _MAX_NAME) -> str:
    """Returns a name of at most the given length. Its middle is left out, because its start and end say most."""
    if len(name) <= most:
        return name
    head = (most - 1) // 3
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


@dataclass(frozen=True)
class ArrayRow:
    """An array in a list of arrays.

    Attributes:
      pieces: The number of pieces along each dim. A device has one piece.
      device_bytes: The bytes of it on one device.
      note: The text after its bar.
    """

    name: str
    pieces: Sequence[int]
    device_bytes: int
    note: str

    @property
    def is_cut(self) -> bool:
        return any(count > 1 for count in self.pieces)


def array_rows(rows: Sequence[ArrayRow], left: float, top: float) -> Iterator[str]:
    """Draws a row for each array: its name, its split, and a bar for the part on one device."""
    cuts, bars = _columns(rows, left)
    largest = max((row.device_bytes for row in rows), default=0) or 1
    for number, row in enumerate(rows):
        at = top + _ROW * number
        color = CUT if row.is_cut else WHOLE
        length = max(2, round(_BAR * row.device_bytes / largest)) if row.device_bytes else 0
        yield mono(left, at + 15, shortened(row.name))
        yield from _cut(row.pieces, cuts, at + 3, color)
        yield rect(bars, at + 3, length, _CUT_HEIGHT, color, name="bar")
        yield mono(bars + length + 6, at + 15, row.note, fill_opacity=".75")


def size_of_rows(rows: Sequence[ArrayRow], left: float) -> tuple[float, float]:
    """Returns the width and height of ``array_rows``."""
    _, bars = _columns(rows, left)
    longest = max((len(row.note) for row in rows), default=0)
    return bars + _BAR + 6 + CHAR * longest + left, _ROW * len(rows)


def heads_of_rows(rows: Sequence[ArrayRow], left: float, top: float) -> Iterator[str]:
    """Draws the heads of the columns."""
    cuts, bars = _columns(rows, left)
    yield text(cuts, top, "cut", fill_opacity=".75")
    yield text(bars, top, "of one device", fill_opacity=".75")


def _columns(rows: Sequence[ArrayRow], left: float) -> tuple[float, float]:
    longest = max((len(shortened(row.name)) for row in rows), default=0)
    cuts = left + CHAR * max(longest, 8) + 14
    return cuts, cuts + _CUT_WIDTH + 16


def _cut(pieces: Sequence[int], left: float, top: float, color: str) -> Iterator[str]:
    """Draws the full array as a rectangle with a device's piece in colour. Its last dim runs to the right, the others
    downwards.
    """
    right = pieces[-1] if len(pieces) > 1 else 1
    down = math.prod(pieces[:-1]) if len(pieces) > 1 else math.prod(pieces)
    width, height = _CUT_WIDTH / min(right, _MOST_PIECES), _CUT_HEIGHT / min(down, _MOST_PIECES)
    yield rect(left, top, width, height, color)
    yield outline(left, top, _CUT_WIDTH, _CUT_HEIGHT)
