"""The status of a cluster: the coordinator's statistics as one JSON value, with its rates and its table.

Pure: ``status_server.py`` serves it, and ``replicax top`` shows it. Besides numbers it has only names of tasks and
functions.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

STATUS_ADDRESS_VARIABLE: Final = "REPLICAX_STATUS_ADDRESS"
COLUMNS: Final = (
    "task",
    "state",
    "function",
    "closures/s",
    "updates/s",
    "received/s",
    "sent/s",
    "memory",
    "restarts",
    "pid",
    "up",
)
NUM_TEXT_COLUMNS: Final = 3
"""The number of columns with text, which come first; the others have numbers."""

_COUNTS: Final = ("closures", "updates", "received_bytes", "sent_bytes")
_WINDOW_S: Final = 5.0


def status_of(statistics: Mapping[str, Any], process: Mapping[str, Any], time: float) -> dict[str, Any]:
    """Returns the status, without rates.

    Args:
      statistics: The result of ``ClusterCoordinator.statistics()``.
      process: Statistics of the coordinator's process: ``pid``, ``uptime_s``, ``resident_bytes``.
      time: The current ``time.time()``, in seconds.

    Returns:
      JSON: ``time``; ``closures``, counts of all scheduled closures; ``staleness`` of the updates on all parameter
      servers; ``tasks``, each with the same fields, which are None if unknown.
    """
    ps = statistics["ps"]
    return {
        "time": time,
        "closures": {name: count for name, count in statistics["closures"].items() if name != "low"},
        "staleness": _sum([each["statistics"].get("staleness") for each in ps.values()]),
        "tasks": [
            _task("coordinator", "running", process),
            *(_worker(name, told) for name, told in statistics["workers"].items()),
            *(_ps(name, told, statistics.get("replication")) for name, told in ps.items()),
        ],
    }


def _task(name: str, state: str, process: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(
        (
            "function",
            "in_flight",
            *_COUNTS,
            "duplicates",
            "held_bytes",
            "restarts",
            "connections",
            "staleness",
        )
    )
    vitals = {what: process.get(what) for what in ("pid", "uptime_s", "resident_bytes")}
    return {"task": name, "state": state, **vitals, **nothing, **more}


def _worker(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    own, process, transport = _heartbeat(told)
    links = own.get("traffic") or {}
    return _task(
        name,
        _worker_state(told),
        process,
        function=told["function"],
        in_flight=told["in_flight"],
        closures=own.get("num_closures"),
        received_bytes=_plus(transport.get("bytes_in"), links.get("bytes_in")),
        sent_bytes=_plus(transport.get("bytes_out"), links.get("bytes_out")),
        restarts=told["restarts"],
        connections=told["connections"],
    )


def _worker_state(told: Mapping[str, Any]) -> str:
    if told["connected"]:
        return "busy" if told["in_flight"] else "idle"
    if told["given_up"]:
        return "given up"
    return "lost" if told["connections"] else "awaited"


def _ps_state(name: str, told: Mapping[str, Any], replication: Mapping[str, Any] | None) -> str:
    if not told["connected"]:
        return "lost"
    if not told["statistics"]:
        return "awaited"
    if replication is None:
        return "serving"
    served = [group for group, primary in enumerate(replication["primaries"]) if name == f"ps {primary}"]
    if not served:
        return "backup"
    return "alone" if set(served) & set(replication["unprotected"]) else "serving"


def _ps(name: str, told: Mapping[str, Any], replication: Mapping[str, Any] | None) -> dict[str, Any]:
    own, process, transport = _heartbeat(told)
    return _task(
        name,
        _ps_state(name, told, replication),
        process,
        updates=own.get("updates"),
        duplicates=own.get("duplicates"),
        held_bytes=own.get("bytes"),
        received_bytes=transport.get("bytes_in"),
        sent_bytes=transport.get("bytes_out"),
        restarts=told["restarts"],
        staleness=own.get("staleness"),
    )


def _heartbeat(told: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Returns a task's last statistics of its work, process and connections; empty ones for a lost task."""
    own = told["statistics"] if told["connected"] else {}
    process = own.get("process") or {}
    return own, process, process.get("transport") or {}


def _plus(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other


def _sum(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns the staleness of all updates, from that of each parameter server."""
    known = [part for part in parts if part]
    num = sum(part["num"] for part in known)
    total = sum(part["mean"] * part["num"] for part in known)
    buckets: collections.Counter[int] = collections.Counter()
    for part in known:
        buckets.update({int(low): count for low, count in part["histogram"].items()})
    return {
        "num": num,
        "mean": total / num if num else None,
        "max": max((part["max"] for part in known), default=0) if num else None,
        "histogram": {str(low): buckets[low] for low in sorted(buckets)},
    }


# --- rates ----------------------------------------------------------------------------------------------


def with_rates(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, Any]:
    """Adds rates per second since an earlier status, or None if a rate is unknown.

    The rates of a task use its own clock, because its statistics are as old as its last heartbeat. The result has
    ``finished_per_s`` in the closures, ``recent_mean`` in the staleness, and ``closures_per_s``, ``updates_per_s``,
    ``received_bytes_per_s`` and ``sent_bytes_per_s`` in the tasks.
    """
    earlier = {} if before is None else {task["task"]: task for task in before["tasks"]}
    tasks = [{**task, **_rates(earlier.get(task["task"]), task)} for task in after["tasks"]]
    return {
        **after,
        "closures": {**after["closures"], "finished_per_s": _finished_per_s(before, after)},
        "staleness": {**after["staleness"], "recent_mean": _recent_mean(before, after)},
        "tasks": tasks,
    }


def _rates(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, float | None]:
    names = {name: f"{name}_per_s" for name in _COUNTS}
    if before is None or before["pid"] != after["pid"] or after["uptime_s"] is None:
        return dict.fromkeys(names.values())
    elapsed_s = after["uptime_s"] - before["uptime_s"]
    return {to: _per_s(before[name], after[name], elapsed_s) for name, to in names.items()}


def _per_s(before: float | None, after: float | None, elapsed_s: float) -> float | None:
    """Returns the rate; None if it is unknown. A counter that has fallen was reset."""
    if before is None or after is None or elapsed_s <= 0 or after < before:
        return None
    return (after - before) / elapsed_s


def _finished_per_s(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    if before is None:
        return None
    elapsed_s = after["tasks"][0]["uptime_s"] - before["tasks"][0]["uptime_s"]
    return _per_s(before["closures"]["finished"], after["closures"]["finished"], elapsed_s)


def _recent_mean(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    if before is None:
        return None
    old, new = before["staleness"], after["staleness"]
    num = new["num"] - old["num"]
    if num <= 0:
        return None
    # The means are floats, so rounding could make the difference negative.
    return max(0.0, new["num"] * new["mean"] - old["num"] * (old["mean"] or 0.0)) / num


@final
class Recent:
    """The statuses of the last 5 s. Not thread-safe."""

    def __init__(self) -> None:
        self._statuses: collections.deque[Mapping[str, Any]] = collections.deque()

    def add(self, status: Mapping[str, Any]) -> None:
        """Adds a status. Call it about once a second."""
        self._statuses.append(status)
        while len(self._statuses) > 2 and _clock(status) - _clock(self._statuses[1]) >= _WINDOW_S:
            self._statuses.popleft()

    def with_rates(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a newer status with its rates since the oldest one."""
        return with_rates(self._statuses[0] if self._statuses else None, status)


def _clock(status: Mapping[str, Any]) -> float:
    return status["tasks"][0]["uptime_s"]


# --- text -----------------------------------------------------------------------------------------------


def closures_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe all closures, from a status with rates."""
    closures = status["closures"]
    rounds = ("rounds", "gradients_dropped") if closures["rounds"] else ()
    return [
        ("closures/s", number_text(closures["finished_per_s"])),
        *(
            (name.replace("_", " "), number_text(closures[name]))
            for name in ("finished", "queued", "in_flight", "failed", "cancelled", "retried", *rounds)
        ),
    ]


def staleness_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the staleness of updates."""
    staleness = status["staleness"]
    return [
        ("lately", number_text(staleness["recent_mean"])),
        ("mean", number_text(staleness["mean"])),
        ("max", number_text(staleness["max"])),
    ]


def rows_of(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of each task, from a status with rates: one for each of ``COLUMNS``."""
    return [
        (
            task["task"],
            task["state"],
            "–" if task["function"] is None else task["function"],
            number_text(task["closures_per_s"]),
            number_text(task["updates_per_s"]),
            bytes_text(task["received_bytes_per_s"]),
            bytes_text(task["sent_bytes_per_s"]),
            bytes_text(task["resident_bytes"]),
            number_text(task["restarts"]),
            "–" if task["pid"] is None else str(task["pid"]),
            duration_text(task["uptime_s"]),
        )
        for task in status["tasks"]
    ]


def number_text(number: float | None) -> str:
    """
    >>> number_text(None), number_text(12345), number_text(1.25), number_text(2345.6)
    ('–', '12,345', '1.2', '2,346')
    """
    if number is None:
        return "–"
    return f"{number:,.1f}" if isinstance(number, float) and number < 100 else f"{number:,.0f}"


def bytes_text(number: float | None) -> str:
    """
    >>> bytes_text(None), bytes_text(512), bytes_text(1536), bytes_text(200 << 20), bytes_text(3 << 40)
    ('–', '512 B', '1.5 kB', '200 MB', '3,072 GB')
    """
    if number is None:
        return "–"
    unit, units = "B", ["kB", "MB", "GB"]
    while number >= 1024 and units:
        number, unit = number / 1024, units.pop(0)
    return f"{number:,.1f} {unit}" if number < 10 and unit != "B" else f"{number:,.0f} {unit}"


def duration_text(seconds: float | None) -> str:
    """
    >>> duration_text(None), duration_text(5.2), duration_text(125), duration_text(7380), duration_text(200_000)
    ('–', '5 s', '2 min 5 s', '2 h 3 min', '2 d 7 h')
    """
    if seconds is None:
        return "–"
    minutes, left_s = divmod(int(seconds), 60)
    hours, left_min = divmod(minutes, 60)
    days, left_h = divmod(hours, 24)
    if days:
        return f"{days} d {left_h} h"
    if hours:
        return f"{hours} h {left_min} min"
    return f"{minutes} min {left_s} s" if minutes else f"{left_s} s"
