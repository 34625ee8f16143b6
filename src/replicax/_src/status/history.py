"""``History``: the curves of a job, as means over intervals of one length. Pure.

The interval is one second at first. Whenever a curve has more than ``MOST_POINTS`` points, the interval of all doubles:
two neighbours become one point, the mean of what they were made of. So the points depend on the values and their times
alone, and not on when the neighbours were joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from replicax._src.untrusted.strict_json import Form, JsonReader, read_json

MOST_POINTS: Final = 2048
MOST_CURVES: Final = 4
MOST_BYTES: Final = 1 << 20
"""The largest history as text: four curves of 2048 points need about 400 kB."""

_LARGEST: Final = 1e300  # sums of millions of these are finite

Points = list[tuple[float, float]]
"""The time of each point in seconds of ``time.time``, the start of its interval, and its value."""


@final
class _Curve:
    """The sum and the number of the values in each interval, by the number of the interval."""

    def __init__(self, points: Iterable[tuple[int, float, int]] = ()):
        self.points: dict[int, tuple[float, int]] = {}
        for index, total, count in points:
            self.add(index, total, count)

    def add(self, index: int, total: float, count: int) -> None:
        index = max(index, next(reversed(self.points), index))  # clocks may be set back
        old_total, old_count = self.points.get(index, (0.0, 0))
        self.points[index] = old_total + total, old_count + count

    def joined(self, num_intervals: int) -> _Curve:
        """Returns the curve with intervals that are longer by a factor."""
        joined = _Curve()
        points = joined.points
        for index, (total, count) in self.points.items():
            old_total, old_count = points.get(index // num_intervals, (0.0, 0))
            points[index // num_intervals] = old_total + total, old_count + count
        return joined


@final
class History:
    """Curves by name. Not thread-safe."""

    def __init__(self) -> None:
        self.interval_s = 1
        self._curves: dict[str, _Curve] = {}

    def add(self, now: float, values: Mapping[str, Any]) -> None:
        """Adds values that are known at a time. Anything but a number up to 1e300 leaves a gap. New names beyond
        ``MOST_CURVES`` are left out.
        """
        for name, value in values.items():
            if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
                continue
            if name not in self._curves and len(self._curves) >= MOST_CURVES:
                continue
            curve = self._curves.setdefault(name, _Curve())
            curve.add(int(now // self.interval_s), float(value), 1)
            while len(curve.points) > MOST_POINTS:
                self._double()
                curve = self._curves[name]

    def _double(self) -> None:
        self.interval_s *= 2
        self._curves = {name: curve.joined(2) for name, curve in self._curves.items()}

    def points(self, name: str, most: int = MOST_POINTS) -> Points:
        """Returns the points of a curve, oldest first. More than ``most`` are joined like those that are kept."""
        curve, factor = self._curves.get(name, _Curve()), 1
        while len({index // factor for index in curve.points}) > most:
            factor *= 2
        curve, interval_s = curve.joined(factor), self.interval_s * factor
        return [(index * interval_s, total / count) for index, (total, count) in curve.points.items()]

    # --- as text, for the process that serves after a restart ---------------------------------------------

    def to_text(self) -> str:
        """Returns the history as JSON."""
        curves = {
            name: [(i, *point) for i, point in curve.points.items()] for name, curve in self._curves.items()
        }
        return json.dumps({"interval_s": self.interval_s, "curves": curves})

    @classmethod
    def from_text(cls, text: str | bytes) -> History:
        """Returns the history that ``to_text`` wrote.

        Raises:
          TextError: The text is not of this form.
        """
        told = JsonReader(read_json(text, most_bytes=MOST_BYTES), "the history").record(_FIELDS)
        history = cls()
        history.interval_s = told["interval_s"]
        names = list(told["curves"])[:MOST_CURVES]
        history._curves = {name: _Curve(told["curves"][name]) for name in names}
        return history


# --- the form of the text ---------------------------------------------------------------------------------


def _at_least_one(it: JsonReader) -> int:
    return it.whole(1)


def _point(it: JsonReader) -> tuple[int, float, int]:
    index, total, count = it.fixed(JsonReader.count, JsonReader.number, _at_least_one)
    return index, total, count


def _points(it: JsonReader) -> tuple[tuple[int, float, int], ...]:
    return it.items(_point, most=MOST_POINTS)


_FIELDS: Final[Mapping[str, Form[Any]]] = {
    "interval_s": _at_least_one,
    "curves": lambda it: it.table(_points),
}
