"""``DatedKeys``: the keys of a process's all-gathers, which need no memory of what came before.

``control/dates.py`` has the rules.
"""

from __future__ import annotations

from typing import final

from replicax._src.control.standing import Moment, Topic


@final
class DatedKeys:
    """Counts all-gathers and topics within their date.

    Args:
      is_dated: True if failures are tolerated. Otherwise all have one date, which the keys leave out.
    """

    def __init__(self, *, is_dated: bool):
        self._is_dated = is_dated
        self._gathered: dict[
            str, tuple[int, int]
        ] = {}  # the date of the last one, and its number at this date
        self._topic = (0, -1)

    def new_topic(self, name: str, moment: Moment) -> Topic:
        """Returns an unused topic, of this moment."""
        self._topic = _after(self._topic, moment.date)
        return Topic(f"{name} {self._text(*self._topic)}", moment)

    def next(self, topic: str | Topic, moment: Moment) -> str:
        """Returns the key of the next all-gather of a topic, which begins at this moment."""
        name = topic if isinstance(topic, str) else topic.name
        counted = self._gathered[name] = _after(self._gathered.get(name, (0, -1)), moment.date)
        return f"{name} {self._text(*counted)}"

    def _text(self, date: int, count: int) -> str:
        return f"{date}.{count}" if self._is_dated else str(count)


def _after(counted: tuple[int, int], date: int) -> tuple[int, int]:
    last, count = counted
    return date, count + 1 if date == last else 0
