"""A plan as a picture, in SVG: each array as a bar as long as what one device holds, in a colour that says whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from replicax._src.plan.report import size

if TYPE_CHECKING:
    from replicax._src.plan.plan import Plan, PlannedArray

_MAX_ROWS, _ROW, _LEFT, _BAR, _TOP = 30, 22, 320, 420, 56
_WHOLE, _SPLIT = "#4878a8", "#d08a3c"


def svg(plan: Plan) -> str:
    """Where the variables and arguments are, the largest first."""
    shown = sorted(plan.arrays, key=lambda array: -array.device_bytes)[:_MAX_ROWS]
    largest = max((array.device_bytes for array in shown), default=0) or 1
    width, height = _LEFT + _BAR + 260, _TOP + _ROW * len(shown) + 40
    title = f"{plan.name} on {plan.hardware.name}: {size(plan.memory.peak)} of {size(plan.memory.limit)} of a device"
    rows = [_row(array, number, largest) for number, array in enumerate(shown)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
            f'<text x="10" y="42" fill="{_WHOLE}">whole on each device</text>',
            f'<text x="160" y="42" fill="{_SPLIT}">one device\'s part of it</text>',
            *rows,
            "</svg>",
        ]
    )


def _row(array: PlannedArray, number: int, largest: int) -> str:
    y, length = _TOP + _ROW * number, max(2, round(_BAR * array.device_bytes / largest))
    split = [f"dim {i} over {axis}" for i, axis in enumerate(array.split) if axis]
    color = _SPLIT if split else _WHOLE
    name = array.name if len(array.name) <= 46 else f"…{array.name[-45:]}"
    told = f"{size(array.device_bytes)}  {array.dtype}{list(array.shape)}" + "".join(
        f", {one}" for one in split
    )
    return (
        f'<text x="10" y="{y + 15}">{escape(name)}</text>'
        f'<rect x="{_LEFT}" y="{y + 3}" width="{length}" height="{_ROW - 6}" fill="{color}"/>'
        f'<text x="{_LEFT + length + 6}" y="{y + 15}" fill="#555">{escape(told)}</text>'
    )
