"""The groups that train alone and exchange through syncers, as text, from a status. Pure.

``status["groups"]`` is what one group knows of all. ``_ps/local_updates/group_status.py`` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from replicax._src.drawing.text import printable
from replicax._src.status.figure_texts import bytes_text, number_text

GROUP_COLUMNS: Final = ("group", "exchange", "lag", "open rows")

GROUP_MEANINGS: Final = {
    "version": "The number of rounds that have closed: how often the outer parameters have changed. Two numbers: those of "
    "the fragments differ.",
    "quorum": "The number of groups that a round waits for.",
    "rows": "The rows that this group has trained on and handed over.",
    "lost pushes": "How many of this group's contributions are in no outer parameters.",
    "lag": "The number of rounds that have closed since the group's last contribution arrived.",
    "open rows": "The rows of the group that are in the round which is open.",
}


def groups_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the exchange of the group that serves the status; none without groups."""
    groups = status.get("groups")
    if groups is None:
        return []
    low, high = min(groups["versions"], default=None), max(groups["versions"], default=None)
    version = number_text(low) if low == high else f"{number_text(low)} to {number_text(high)}"
    return [
        ("group", f"{number_text(groups['index'])} of {len(groups['members'])}"),
        ("version", version),
        ("quorum", number_text(groups["quorum"])),
        *(
            (name.replace("_", " "), number_text(groups[name]))
            for name in ("rows", "pushes", "adoptions", "lost_pushes", "silent_servers")
        ),
        ("sent", bytes_text(groups["sent_bytes"])),
        ("received", bytes_text(groups["received_bytes"])),
        *([("stopping", "yes")] if groups["is_stopping"] else []),
    ]


def group_rows_of(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of each group: one for each of ``GROUP_COLUMNS``."""
    members: Sequence[Mapping[str, Any]] = (status.get("groups") or {}).get("members", ())
    return [
        (str(index), printable(each["state"]), number_text(each["lag"]), number_text(each["rows"]))
        for index, each in enumerate(members)
    ]


def group_lines_of(status: Mapping[str, Any]) -> list[str]:
    """Returns the groups as lines: the exchange, and a table."""
    rows = group_rows_of(status)
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(GROUP_COLUMNS, *rows, strict=True)]
    table = [
        f"{group:<{widths[0]}}  {state:<{widths[1]}}  {lag:>{widths[2]}}  {number:>{widths[3]}}"
        for group, state, lag, number in (GROUP_COLUMNS, *rows)
    ]
    return ["  ".join(f"{name} {value}" for name, value in groups_of(status)), *table]
