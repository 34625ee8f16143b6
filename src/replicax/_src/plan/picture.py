"""A plan as a picture, in SVG: the memory of one device, and of each array how it is cut over the mesh, and what a device holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from replicax._src.plan.report import answer, size

if TYPE_CHECKING:
    from replicax._src.plan.plan import Plan, PlannedArray

_MAX_ROWS, _ROW, _TOP = 30, 22, 118
_NAMES, _CUTS, _BARS, _BAR, _WIDTH = 10, 320, 384, 340, 1080
_CUT_WIDTH, _CUT_HEIGHT, _MOST_PIECES = 48, 16, 12
_WHOLE, _SPLIT, _TEMPORARY, _OTHERS = "#4878a8", "#d08a3c", "#9a9a9a", "#f3e6d4"


def svg(plan: Plan) -> str:
    """The memory of a device above, below it the variables and arguments, the largest first."""
    arrays = sorted(plan.arrays, key=lambda array: -array.device_bytes)
    shown, rest = arrays[:_MAX_ROWS], arrays[_MAX_ROWS:]
    largest = max((array.device_bytes for array in shown), default=0) or 1
    height = _TOP + _ROW * (len(shown) + bool(rest)) + 16
    title = f"{plan.name} on {plan.hardware.name}. {answer(plan)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_NAMES, 22, title, font_size=15),
        *_memory(plan),
        *_legend(),
    ]
    for number, array in enumerate(shown):
        lines += _row(array, _TOP + _ROW * number, largest)
    if rest:
        smaller = (
            f"… and {len(rest)} smaller ones, {size(sum(array.device_bytes for array in rest))} together"
        )
        lines.append(_text(_NAMES, _TOP + _ROW * len(shown) + 15, smaller, fill="#555"))
    return "\n".join([*lines, "</svg>"])


def _memory(plan: Plan) -> Iterator[str]:
    """One bar: what is whole on each device, what is cut, and what is there while the step runs; a line where memory ends."""
    memory, width = plan.memory, _WIDTH - 2 * _NAMES
    cut = sum(array.device_bytes for array in plan.arrays if _is_cut(array))
    whole = max(0, memory.arguments - cut)
    parts = [(whole, _WHOLE), (cut, _SPLIT), (max(0, memory.peak - whole - cut), _TEMPORARY)]
    scale = width / max(memory.limit, sum(amount for amount, _ in parts), 1)
    left = float(_NAMES)
    for amount, color in parts:
        yield _rect(left, 36, amount * scale, 18, color)
        left += amount * scale
    end = _NAMES + memory.limit * scale
    yield f'<path d="M{end:.1f} 32V58" stroke="#b03030" stroke-width="2"/>'
    told = f"memory of a device: {size(memory.limit)}"
    anchor = "end" if end > _WIDTH / 2 else "start"
    yield _text(end, 70, told, fill="#b03030", text_anchor=anchor)


def _legend() -> Iterator[str]:
    entries = (
        (_WHOLE, "whole on each device"),
        (_SPLIT, "one device's piece"),
        (_TEMPORARY, "while the step runs"),
    )
    left = _NAMES
    for color, told in entries:
        yield _rect(left, 80, 12, 12, color)
        yield _text(left + 18, 91, told)
        left += 40 + 7 * len(told)
    yield _text(_CUTS, 110, "cut", fill="#555")
    yield _text(_BARS, 110, "of one device", fill="#555")


def _row(array: PlannedArray, top: int, largest: int) -> Iterator[str]:
    color = _SPLIT if _is_cut(array) else _WHOLE
    name = array.name if len(array.name) <= 46 else f"…{array.name[-45:]}"
    length = max(2, round(_BAR * array.device_bytes / largest))
    cuts = [f"dim {i} over {axis}, 1 of {array.pieces[i]:,}" for i, axis in enumerate(array.split) if axis]
    told = "; ".join([f"{size(array.device_bytes)}  {array.dtype}{list(array.shape)}", *cuts])
    yield _text(_NAMES, top + 15, name)
    yield from _cut(array, top + 3, color)
    yield _rect(_BARS, top + 3, length, _CUT_HEIGHT, color, name="bar")
    yield _text(_BARS + length + 6, top + 15, told, fill="#555")


def _cut(array: PlannedArray, top: int, color: str) -> Iterator[str]:
    """The whole array as a rectangle, of which a device's piece is in colour: its last dim to the right, the others downwards."""
    right = array.pieces[-1] if array.pieces else 1
    down = math.prod(array.pieces[:-1])
    width, height = _CUT_WIDTH / min(right, _MOST_PIECES), _CUT_HEIGHT / min(down, _MOST_PIECES)
    yield _rect(_CUTS, top, _CUT_WIDTH, _CUT_HEIGHT, _OTHERS)
    yield _rect(_CUTS, top, width, height, color)
    yield f'<path d="M{_CUTS} {top}h{_CUT_WIDTH}v{_CUT_HEIGHT}h-{_CUT_WIDTH}z" fill="none" stroke="{color}"/>'


def _is_cut(array: PlannedArray) -> bool:
    return any(count > 1 for count in array.pieces)


def _rect(left: float, top: float, width: float, height: float, color: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<rect{kind} x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def _text(left: float, top: float, text: str, **style: object) -> str:
    styles = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{left:g}" y="{top:g}"{styles}>{escape(text)}</text>'
