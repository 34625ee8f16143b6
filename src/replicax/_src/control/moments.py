"""Reports of one moment: members report at the full seconds of their clocks, and a reader takes the same second of all.
Pure.

A report travels for some milliseconds, so the newest reports of all members would mix two seconds: at 150 steps a
second, members of one step would look 150 steps apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

NUM_KEPT: Final = 3
"""The number of newest reports of each member that a reader keeps: it needs two, and one more for a late member."""

Report = Mapping[str, Any]


def next_moment(now: float) -> tuple[int, float]:
    """Returns the moment of a report that is sent now, and the seconds until the next one is due.

    Args:
      now: The time of the clock, ``time.time``.

    >>> next_moment(12.0), next_moment(12.25), next_moment(12.75)
    ((12, 1.0), (12, 0.75), (13, 1.25))
    """
    moment = round(now)
    return moment, moment + 1 - now


def reports_of_one_moment(reports: Sequence[Sequence[Report]]) -> list[Report]:
    """Returns one report of each member, of the moment that most of them have; of several such moments, of the newest.

    For a member without a report of that moment it returns the newest one, and without any report an empty one.

    Args:
      reports: The newest reports of each member, oldest first. A report has its ``moment``.
    """
    counts = Counter(moment for kept in reports for moment in {report.get("moment") for report in kept})
    counts.pop(None, None)
    common = max(counts, key=lambda moment: (counts[moment], moment), default=None)
    return [_chosen(kept, common) for kept in reports]


def _chosen(kept: Sequence[Report], moment: Any) -> Report:
    newest = kept[-1] if kept else {}
    return next((report for report in reversed(kept) if report.get("moment") == moment), newest)
