"""A plan as an SVG picture: the memory of one device, how each array is split over the mesh, and a device's part of
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from replicax._plan.printed_plan import answer
from replicax._src.drawing.svg import (
    CHAR,
    CUT,
    WHOLE,
    ArrayRow,
    array_rows,
    heads_of_rows,
    mono,
    picture,
    rect,
    size_of_rows,
    text,
)
from replicax._src.drawing.text import size

if TYPE_CHECKING:
    from replicax._src.devices.plan import Plan, PlannedArray

_MAX_ROWS = 30
_LEFT, _TOP, _LEAST_WIDTH = 10, 136, 760
_TEMPORARY, _LIMIT = "#a8a8a8", "#d05050"
_LEAST_SHARE = 0.1
"""Of a device's memory: what needs less of it is drawn without it, or it could not be seen."""


def svg(plan: Plan, *, is_inline: bool = False) -> str:
    """Draws the memory of a device at the top, and the variables and arguments below it, the largest first."""
    arrays = sorted(plan.arrays, key=lambda array: -array.device_bytes)
    shown, rest = arrays[:_MAX_ROWS], arrays[_MAX_ROWS:]
    rows = list(map(_row, shown))
    width, height = size_of_rows(rows, _LEFT)
    title = f"{plan.name} on {plan.hardware.name}. {answer(plan)}"
    width = max(width, _LEAST_WIDTH, CHAR * 1.25 * len(title))
    lines = [
        text(_LEFT, 22, title, font_size=15),
        *_memory(plan, width - 2 * _LEFT),
        *heads_of_rows(rows, _LEFT, _TOP - 6),
        *array_rows(rows, _LEFT, _TOP),
    ]
    if rest:
        smaller = (
            f"… and {len(rest)} smaller ones, {size(sum(array.device_bytes for array in rest))} together"
        )
        lines.append(mono(_LEFT, _TOP + height + 15, smaller, fill_opacity=".75"))
        height += 22
    return picture(width, _TOP + height + 12, lines, is_inline=is_inline)


def _memory(plan: Plan, width: float) -> Iterator[str]:
    """Draws one bar: replicated arrays, sharded arrays and temporaries of a device, with a line at the memory limit."""
    memory = plan.memory
    cut = sum(array.device_bytes for array in plan.arrays if _is_cut(array))
    whole = max(0, memory.arguments - cut)
    parts = [
        (whole, WHOLE, "whole on each device"),
        (cut, CUT, "one device's piece"),
        (max(0, memory.peak - whole - cut), _TEMPORARY, "while the step runs"),
    ]
    total = sum(amount for amount, *_ in parts) or 1
    is_small = total < _LEAST_SHARE * memory.limit
    scale = width / (total / 0.6 if is_small else max(memory.limit, total))
    left = float(_LEFT)
    for amount, color, _ in parts:
        yield rect(left, 36, amount * scale, 18, color, name="memory")
        left += amount * scale
    if is_small:
        percent = 100 * total / memory.limit
        share = f"{percent:.2g}%" if percent >= 0.1 else "less than 0.1%"
        said = f"{share} of a device's memory: {size(memory.limit)}"
        yield text(left + 10, 50, said, fill=_LIMIT)
    else:
        end = _LEFT + memory.limit * scale
        yield f'<path d="M{end:.1f} 32V58" stroke="{_LIMIT}" stroke-width="2"/>'
        anchor = "end" if end > width / 2 else "start"
        yield text(end, 72, f"memory of a device: {size(memory.limit)}", fill=_LIMIT, text_anchor=anchor)
    yield from _legend(parts)


def _legend(parts: Sequence[tuple[int, str, str]]) -> Iterator[str]:
    left = float(_LEFT)
    for amount, color, told in parts:
        said = f"{told}, {size(amount)}"
        yield rect(left, 86, 12, 12, color)
        yield text(left + 18, 97, said)
        left += 44 + CHAR * len(said)


def _row(array: PlannedArray) -> ArrayRow:
    cuts = [f"dim {i} over {axis}, 1 of {array.pieces[i]:,}" for i, axis in enumerate(array.split) if axis]
    told = "; ".join([f"{size(array.device_bytes)}  {array.dtype}{list(array.shape)}", *cuts])
    return ArrayRow(array.name, array.pieces, array.device_bytes, told)


def _is_cut(array: PlannedArray) -> bool:
    return any(count > 1 for count in array.pieces)
