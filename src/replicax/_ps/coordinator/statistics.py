"""The coordinator's statistics as the status of a job; see ``status/status.py``. Pure.

Besides numbers it has only names of tasks and functions.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Final

_COUNTS: Final = ("closures", "updates", "received_bytes", "sent_bytes")
_TRAINING: Final = ("examples", "loss", "data_s")  # left out if no task knows them


def status_of(statistics: Mapping[str, Any], process: Mapping[str, Any], time: float) -> dict[str, Any]:
    """Returns the status, without rates.

    Args:
      statistics: The result of ``ClusterCoordinator.statistics()``.
      process: The figures of the coordinator's process; see ``cluster/figures.py``.
      time: The current ``time.time()``, in seconds.

    Returns:
      JSON: ``time``; ``closures``, counts of all scheduled closures; ``staleness`` of the updates on all parameter
      servers; ``tasks``, each with the same fields, which are None if unknown.
    """
    ps = statistics["ps"]
    tasks = [
        _task("coordinator", "running", process, loss=process.get("loss"), **_read(process)),
        *(_worker(name, told) for name, told in statistics["workers"].items()),
        *(_ps(name, told, statistics.get("replication")) for name, told in ps.items()),
    ]
    unknown = {name for name in _TRAINING if all(task[name] is None for task in tasks)}
    return {
        "time": time,
        "closures": {name: count for name, count in statistics["closures"].items() if name != "low"},
        "staleness": _sum([each["statistics"].get("staleness") for each in ps.values()]),
        "tasks": [{name: task[name] for name in task if name not in unknown} for task in tasks],
    }


def _task(name: str, state: str, process: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(
        (
            "function",
            "in_flight",
            *_COUNTS,
            *_TRAINING,
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
        **_read(own),
        received_bytes=_plus(transport.get("bytes_in"), links.get("bytes_in")),
        sent_bytes=_plus(transport.get("bytes_out"), links.get("bytes_out")),
        restarts=told["restarts"],
        connections=told["connections"],
    )


def _read(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told.get(name) for name in ("examples", "data_s") if told.get("examples")}


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
