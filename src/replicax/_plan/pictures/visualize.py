"""``rx.visualize``: shows the placement of a value over devices, as text and as SVG."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

from replicax._plan.pictures.value_layouts import ArrayLayout, ArrayPart, layouts_of
from replicax._src.drawing import html, svg
from replicax._src.drawing.text import size
from replicax._src.vocabulary.options import path_of

_MAX_CELLS: Final = 16
_MAX_ROWS: Final = 60
_LEFT, _TOP, _GRID_WIDTH, _LABELS, _CELL_HEIGHT = 10, 52, 520, 96, 30


def visualize(value: Any) -> Picture:
    """Draws the placement of a value over devices: which device, process or parameter server holds which part.

    Nothing is computed, fetched or sent, so one process may call it alone; the parts of other processes are marked. In
    a script it prints the picture, in colours if rich is installed. A notebook or Python's prompt displays the returned
    picture.

    Args:
      value: An array, a variable, a PerReplica value (for example an element of a distributed dataset), a Keras model,
        layer or optimizer (all its variables), or a pytree of these.

    Returns:
      A ``Picture``. ``str`` gives text, ``to_svg()`` gives SVG, and ``save(path)`` writes the SVG.

    Raises:
      InvalidArgumentError: The value contains no arrays.

    >>> import jax.numpy as jnp
    >>> import replicax as rx
    >>> print(rx.visualize(jnp.ones((4, 2))).layouts[0].kind)  # doctest: +ELLIPSIS
    array: ...
    float32[4, 2]
    """
    picture = Picture(layouts_of(value))
    if not _is_interactive():
        picture.show()
    return picture


def _is_interactive() -> bool:
    """True at Python's prompt and in notebooks, which display the value of a line."""
    return getattr(sys, "ps1", None) is not None or "ipykernel" in sys.modules


@final
class Picture:
    """The placement of arrays over devices.

    Attributes:
      layouts: The layout of each array.
    """

    def __init__(self, layouts: Sequence[ArrayLayout]):
        self.layouts = tuple(layouts)

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self._lines(shutil.get_terminal_size((80, 24)).columns))

    __repr__ = __str__

    def show(self) -> None:
        """Prints the picture."""
        try:
            console = importlib.import_module("rich.console").Console(highlight=False)
            text: Any = importlib.import_module("rich.text").Text
        except ImportError:
            print(self)
            return
        for line, style in self._lines(console.width):
            console.print(text(line, style=style), no_wrap=True, crop=False, overflow="ignore")

    def to_svg(self) -> str:
        """Returns the picture as SVG that suits light and dark pages."""
        return _svg(self.layouts, is_inline=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the SVG to a file."""
        Path(path_of(path, "path", "layout.svg")).write_text(self.to_svg(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.scrolled(_svg(self.layouts, is_inline=True))

    def _lines(self, width: int) -> Iterator[tuple[str, str]]:
        """Yields lines of text, each with a style of rich."""
        if len(self.layouts) == 1:
            yield from _boxes(self.layouts[0], width)
        else:
            yield from _list(self.layouts, width)


# --- text ---------------------------------------------------------------------------------------------


def _title(layout: ArrayLayout) -> str:
    return f"{layout.name}: {layout.kind}" if layout.dtype else layout.name


def _on_each(layout: ArrayLayout) -> str:
    return f"{layout.told}, {size(layout.device_bytes)}" if layout.parts else layout.told


def _boxes(layout: ArrayLayout, width: int) -> Iterator[tuple[str, str]]:
    yield svg.shortened(_title(layout), max(width, 12)), "bold"
    yield svg.shortened(_on_each(layout), max(width, 12)), "dim"
    grid = _Grid(layout)
    if not grid.cells:
        return
    rows, columns = _elided(grid.num_rows), _elided(grid.num_columns, max(1, (width - 14) // 8))
    label = max((len(grid.row_label(row)) for row in rows if row is not None), default=0)
    each = max(6, min(60, width - label - 3) // len(columns) - 1)
    if grid.num_columns > 1:
        heads = ("⋯" if c is None else grid.column_label(c) for c in columns)
        yield " " * (label + 2) + " ".join(svg.shortened(head, each).center(each) for head in heads), "dim"

    def border(left: str, middle: str, right: str) -> str:
        return " " * (label + 1) + left + middle.join("─" * each for _ in columns) + right

    yield border("┌", "┬", "┐"), ""
    for number, row in enumerate(rows):
        if number:
            yield border("├", "┼", "┤"), ""
        cells = [None if row is None or c is None else grid.cells[row][c] for c in columns]
        said = ["⋯" if cell is None else _in_cell(cell) for cell in cells]
        is_here = all(cell is None or cell.is_local for cell in cells)
        inner = "│".join(svg.shortened(one, each).center(each) for one in said)
        name = "" if row is None else grid.row_label(row)
        yield f"{name:>{label}} │{inner}│", "cyan" if is_here else "dim"
    yield border("└", "┴", "┘"), ""


def _in_cell(part: ArrayPart) -> str:
    return part.places if part.is_local else f"({part.places})"


def _list(layouts: Sequence[ArrayLayout], width: int) -> Iterator[tuple[str, str]]:
    total = sum(layout.device_bytes for layout in layouts)
    yield f"{len(layouts):,} arrays; {size(total)} on one device", "bold"
    shown = layouts[:_MAX_ROWS]
    most = max(12, min(max(len(one.name) for one in shown), 52, max(12, width - 46)))
    for layout in shown:
        name = svg.shortened(layout.name, most)
        cut = "■" + "□" * (min(math.prod(layout.pieces), 8) - 1)
        line = f"{name:{most}}  {cut:8}  {size(layout.device_bytes):>9}  {layout.kind}  {layout.told}"
        yield (
            (line if len(line) <= width else line[: width - 1] + "…"),
            "yellow" if math.prod(layout.pieces) > 1 else "",
        )
    if len(layouts) > len(shown):
        yield f"… and {len(layouts) - len(shown):,} more", "dim"


def _elided(count: int, most: int = _MAX_CELLS) -> list[int | None]:
    """Yields the indices to draw. None stands for those left out in the middle."""
    most = max(3, min(most, _MAX_CELLS))
    if count <= most:
        return list(range(count))
    head = most - 2
    return [*range(head), None, count - 1]


@final
class _Grid:
    """The parts of an array in rows and columns. Its last split dim runs to the right, the others downwards."""

    def __init__(self, layout: ArrayLayout):
        cut = [dim for dim, count in enumerate(layout.pieces) if count > 1]
        is_across = bool(cut) and cut[-1] > 0
        self._across = cut[-1:] if is_across else []
        self._down = cut[:-1] if is_across else cut
        places: dict[tuple[Any, Any], ArrayPart] = {}
        for part in layout.parts:
            places[self._key(part, self._down), self._key(part, self._across)] = part
        self._rows = sorted({row for row, _ in places})
        self._columns = sorted({column for _, column in places})
        self.cells = [[places[row, column] for column in self._columns] for row in self._rows]

    @staticmethod
    def _key(part: ArrayPart, dims: Sequence[int]) -> tuple[Any, ...]:
        return tuple(part.index[dim] for dim in dims)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    def row_label(self, row: int) -> str:
        return _interval(self._rows[row])

    def column_label(self, column: int) -> str:
        return _interval(self._columns[column])


def _interval(key: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in key)


# --- SVG ----------------------------------------------------------------------------------------------


def _svg(layouts: Sequence[ArrayLayout], *, is_inline: bool) -> str:
    return _svg_of_one(layouts[0], is_inline) if len(layouts) == 1 else _svg_of_list(layouts, is_inline)


def _svg_of_one(layout: ArrayLayout, is_inline: bool) -> str:
    lines = [
        svg.text(_LEFT, 20, _title(layout), font_size=15),
        svg.text(_LEFT, 38, _on_each(layout), fill_opacity=".75"),
    ]
    grid = _Grid(layout)
    rows, columns = _elided(grid.num_rows), _elided(grid.num_columns, 8)
    top = _TOP + (18 if grid.num_columns > 1 else 0)
    left = _LEFT + (_LABELS if grid.num_rows > 1 else 0)
    longest = max((len(part.places) for part in layout.parts), default=0)
    width = max(_GRID_WIDTH / max(len(columns), 1), svg.CHAR * min(longest, 60) + 12)
    for i, row in enumerate(rows):
        at = top + _CELL_HEIGHT * i
        if grid.num_rows > 1 and row is not None:
            label = svg.shortened(grid.row_label(row), 13)
            lines.append(svg.mono(left - 8, at + 19, label, text_anchor="end"))
        for j, column in enumerate(columns):
            x = left + width * j
            if i == 0 and grid.num_columns > 1 and column is not None:
                head = grid.column_label(column)
                lines.append(svg.mono(x + width / 2, top - 7, head, text_anchor="middle"))
            if row is None or column is None:
                lines.append(svg.text(x + width / 2, at + 19, "⋯", text_anchor="middle"))
                continue
            number = row * grid.num_columns + column
            lines += _cell(grid.cells[row][column], number, x, at, width)
    longest_head = svg.CHAR * 1.25 * len(_title(layout)), svg.CHAR * len(_on_each(layout))
    total = max(left + width * len(columns), *longest_head) + 2 * _LEFT
    bottom = top + _CELL_HEIGHT * len(rows) if layout.parts else _TOP
    return svg.picture(total, bottom + 12, lines, is_inline=is_inline)


def _cell(part: ArrayPart, number: int, left: float, top: float, width: float) -> Iterator[str]:
    said = svg.shortened(part.places, max(4, int((width - 8) / svg.CHAR)))
    if part.is_local:
        yield svg.rect(left, top, width, _CELL_HEIGHT, svg.PALETTE[number % len(svg.PALETTE)], name="part")
        yield svg.outline(left, top, width, _CELL_HEIGHT)
        yield svg.mono(left + width / 2, top + 19, said, text_anchor="middle", fill="#1f2328")
    else:
        yield svg.outline(left + 1, top + 1, width - 2, _CELL_HEIGHT - 2, is_dashed=True)
        yield svg.mono(left + width / 2, top + 19, said, text_anchor="middle")


def _svg_of_list(layouts: Sequence[ArrayLayout], is_inline: bool) -> str:
    shown = layouts[:_MAX_ROWS]
    rows = [
        svg.ArrayRow(
            one.name, one.pieces, one.device_bytes, f"{size(one.device_bytes)}  {one.kind}  {one.told}"
        )
        for one in shown
    ]
    total = f"{len(layouts):,} arrays; {size(sum(one.device_bytes for one in layouts))} on one device"
    width, height = svg.size_of_rows(rows, _LEFT)
    lines = [
        svg.text(_LEFT, 20, total, font_size=15),
        *svg.heads_of_rows(rows, _LEFT, 44),
        *svg.array_rows(rows, _LEFT, _TOP),
    ]
    if len(layouts) > len(shown):
        lines.append(svg.mono(_LEFT, _TOP + height + 15, f"… and {len(layouts) - len(shown):,} more"))
        height += 22
    return svg.picture(
        max(width, svg.CHAR * 1.25 * len(total)), _TOP + height + 12, lines, is_inline=is_inline
    )
