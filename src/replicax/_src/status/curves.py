"""The curves of a job as pictures in SVG: the loss, and the speed. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from replicax._src.drawing import svg
from replicax._src.status.figure_texts import loss_text, number_text
from replicax._src.status.history import History, Points

LOSSES: Final = ("loss", "val_loss")
SPEEDS: Final = ("steps/s", "closures/s")
MOST_DRAWN: Final = 320
"""The most points of a line: more would not be seen. A picture has at most 12 kB."""

_COLORS: Final = (svg.WHOLE, svg.CUT)
_WIDTH, _HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 474, 30, 166
_LEAST_GAP_S: Final = 5.0
_LARGEST_LINEAR_RATIO: Final = 20.0


def pictures(history: History, now: float) -> list[str]:
    """Returns the pictures of the curves that have points.

    Args:
      now: The right end of the pictures, in seconds of ``time.time``.
    """
    known = {name: history.points(name, MOST_DRAWN) for name in (*LOSSES, *SPEEDS)}
    groups = [{name: known[name] for name in names if known[name]} for names in (LOSSES, SPEEDS)]
    start = min((points[0][0] for points in known.values() if points), default=now)
    return [
        _picture(lines, start, now, starts_at_0=number > 0) for number, lines in enumerate(groups) if lines
    ]


@final
@dataclass(frozen=True)
class _Axis:
    """The vertical axis: linear, or logarithmic where values differ by orders of magnitude."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], *, starts_at_0: bool) -> _Axis:
        low, high = min(values), max(values)
        if starts_at_0:
            return cls(0.0, high * 1.1 or 1.0)
        if low > 0 and high / low > _LARGEST_LINEAR_RATIO:
            return cls(low, high, is_log=True)
        margin = (high - low or abs(high) or 1.0) * 0.08
        return cls(low - margin, high + margin)

    def share(self, value: float) -> float:
        """Returns the height of a value, between 0 and 1."""
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)  # their quotient may be no finite number
            return (math.log(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def at(self, share: float) -> float:
        """Returns the value at a height."""
        if self.is_log:
            return self.low ** (1 - share) * self.high**share
        return self.low + share * (self.high - self.low)


def _picture(lines: Mapping[str, Points], start: float, now: float, *, starts_at_0: bool) -> str:
    axis = _Axis.of([value for points in lines.values() for _, value in points], starts_at_0=starts_at_0)
    parts = [
        *_grid(axis, max(now - start, 1.0), is_loss=not starts_at_0),
        *_legend(lines, is_log=axis.is_log),
        *(
            svg.polyline(_placed(part, axis, start, now), color, f"curve {name.partition('/')[0]}")
            for (name, points), color in zip(lines.items(), _COLORS, strict=False)
            for part in _unbroken(points)
        ),
    ]
    return svg.picture(_WIDTH, _HEIGHT, parts, is_inline=True)


def _grid(axis: _Axis, length_s: float, *, is_loss: bool) -> Iterator[str]:
    text_of = loss_text if is_loss else number_text
    for share in (0.0, 0.5, 1.0):
        top = _BOTTOM - share * (_BOTTOM - _TOP)
        yield svg.line(_LEFT, top, _RIGHT, top)
        yield svg.text(_LEFT - 6, top + 4, text_of(axis.at(share)), text_anchor="end", fill_opacity=".75")
    for share, anchor in ((0.0, "start"), (0.5, "middle")):
        ago = _ago_text(length_s * (1 - share))
        left = _LEFT + share * (_RIGHT - _LEFT)
        yield svg.text(left, _BOTTOM + 18, f"{ago} ago", text_anchor=anchor, fill_opacity=".75")
    yield svg.text(_RIGHT, _BOTTOM + 18, "now", text_anchor="end", fill_opacity=".75")


def _ago_text(seconds: float) -> str:
    """
    >>> _ago_text(89), _ago_text(1808), _ago_text(7300), _ago_text(300_000)
    ('89 s', '30 min', '2 h', '3 d')
    """
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _legend(names: Iterable[str], *, is_log: bool) -> Iterator[str]:
    left = float(_LEFT)
    for name, color in zip(names, _COLORS, strict=False):
        yield svg.rect(left, 8, 10, 10, color)
        yield svg.text(left + 15, 17, name)
        left += 35 + svg.CHAR * len(name)
    if is_log:
        yield svg.text(_RIGHT, 17, "logarithmic", text_anchor="end", fill_opacity=".75")


def _placed(points: Points, axis: _Axis, start: float, now: float) -> list[tuple[float, float]]:
    length_s = max(now - start, 1.0)
    return [
        (
            _LEFT + min(1.0, (time - start) / length_s) * (_RIGHT - _LEFT),
            _BOTTOM - axis.share(value) * (_BOTTOM - _TOP),
        )
        for time, value in points
    ]


def _unbroken(points: Points) -> Iterator[Points]:
    """Yields the parts of a curve between which nothing was known, such as during a restart."""
    steps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(points)]
    largest_s = max(_LEAST_GAP_S, 2 * min(steps, default=0.0))
    part: Points = []
    for point in points:
        if part and point[0] - part[-1][0] > largest_s:
            yield part
            part = []
        part.append(point)
    yield part
