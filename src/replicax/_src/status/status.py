"""The status of a job as one JSON value, with its rates, its table and its summary. Pure.

``http_server.py`` serves it, and ``replicax top`` shows it. Its tasks all have the same fields; None is an unknown
value. Two sources make it: ``job.py`` for synchronous strategies, the coordinator for parameter servers. A column is
shown if the tasks have its field.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from replicax._src.drawing.text import printable
from replicax._src.status.figure_texts import bytes_text, duration_text, loss_text, number_text, share_text
from replicax._src.status.group_table import GROUP_MEANINGS, groups_of

GOOD_STATES: Final = ("busy", "serving", "running", "backup")
DOUBTFUL_STATES: Final = ("alone", "slow", "stalled", "entering")
BAD_STATES: Final = ("lost", "given up", "silent")

# The counters of a task, each with the name of its rate per second.
_RATES: Final = {
    **{name: f"{name}_per_s" for name in ("closures", "updates", "received_bytes", "sent_bytes")},
    **{name: f"{name}_per_s" for name in ("steps", "examples")},
    **{"data_s": "data_share", "device_s": "device_share", "cpu_s": "num_cpus"},
}
_WINDOW_S: Final = 5.0
_SLOW_SHARE: Final = 0.1


# --- rates ----------------------------------------------------------------------------------------------


def with_rates(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, Any]:
    """Adds rates per second since an earlier status, or None if a rate is unknown.

    The rates of a task use its own clock, because its figures are as old as its last heartbeat. The result has
    ``finished_per_s`` in the closures, ``recent_mean`` in the staleness, and in the tasks the rates of their counters.
    With synchronous strategies they include ``own_share``, the share of time that a task spent in Python or waiting for
    its own data, while its devices had nothing to do. The task with the largest share is "slow" if it exceeds the
    median of the others by 10 % of the time.
    """
    earlier = {} if before is None else {task["task"]: task for task in before["tasks"]}
    tasks = [{**task, **_rates(earlier.get(task["task"]), task)} for task in after["tasks"]]
    _mark_slow(tasks)
    result = {**after, "tasks": tasks}
    if "closures" in after:
        result["closures"] = {**after["closures"], "finished_per_s": _finished_per_s(before, after)}
        result["staleness"] = {**after["staleness"], "recent_mean": _recent_mean(before, after)}
    return result


def _rates(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, float | None]:
    names = {name: to for name, to in _RATES.items() if name in after}
    if before is None or before["pid"] != after["pid"] or after["uptime_s"] is None:
        rates: dict[str, float | None] = dict.fromkeys(names.values())
    else:
        elapsed_s = after["uptime_s"] - before["uptime_s"]
        # A counter of the same process that was not known had counted nothing.
        rates = {to: _per_s(before.get(name) or 0, after[name], elapsed_s) for name, to in names.items()}
    if "device_s" in after:
        share = rates["device_share"]
        rates["own_share"] = None if share is None else max(0.0, 1 - share)
    return rates


def _per_s(before: float, after: float | None, elapsed_s: float) -> float | None:
    """Returns the rate; None if it is unknown. A counter that has fallen was reset."""
    if after is None or elapsed_s <= 0 or after < before:
        return None
    return (after - before) / elapsed_s


def _mark_slow(tasks: Sequence[dict[str, Any]]) -> None:
    known = [task for task in tasks if task["state"] == "running" and task.get("own_share") is not None]
    slowest = max(known, key=lambda task: task["own_share"], default=None)
    others = [task["own_share"] for task in known if task is not slowest]
    is_slow = bool(others) and slowest["own_share"] - statistics.median(others) >= _SLOW_SHARE  # type: ignore[index]
    for task in tasks:
        if "device_s" in task:
            task["is_slow"] = int(is_slow and task is slowest)
    if is_slow:
        slowest["state"] = "slow"  # type: ignore[index]


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


# --- the table -----------------------------------------------------------------------------------------


def _plain(value: Any) -> str:
    return "–" if value is None else printable(value)


@final
@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
      name: Its head.
      field: The field of a task that it shows.
      text: Turns the field into a cell.
      meaning: What it shows, in a sentence or two. Empty if the head says enough.
      is_text: True for names, which come first.
    """

    name: str
    field: str
    text: Callable[[Any], str]
    meaning: str = ""
    is_text: bool = False


_COLUMNS: Final = (
    Column("task", "task", printable, is_text=True),
    Column("state", "state", printable, is_text=True),
    Column("function", "function", _plain, "The function that the task runs now or ran last.", is_text=True),
    Column("host", "host", _plain, is_text=True),
    Column("closures/s", "closures_per_s", number_text, "Functions per second that the worker has run."),
    Column("updates/s", "updates_per_s", number_text, "Updates per second that the server has applied."),
    Column(
        "step",
        "steps",
        number_text,
        "Batches that the task's loops have taken from datasets, validation included; without a dataset, calls of "
        "run and rx.function. The rows of all tasks are of the same second.",
    ),
    Column("steps/s", "steps_per_s", number_text, "Steps per second in the last 5 s."),
    Column("examples/s", "examples_per_s", number_text, "Rows per second for the task's own replicas."),
    Column("loss", "loss", loss_text, "The loss that was logged last."),
    Column(
        "data",
        "data_share",
        share_text,
        "The share of the last 5 s in which the task's loops waited for its own data. Waits for the batch of another "
        "task do not count.",
    ),
    Column(
        "own",
        "own_share",
        share_text,
        "The share of the last 5 s that the task spent in Python or waiting for its data, while its devices had "
        "nothing to do.",
    ),
    Column("cpu", "num_cpus", share_text, "Processor time per second. 100 % is one core."),
    Column("received/s", "received_bytes_per_s", bytes_text, "Bytes per second from other tasks."),
    Column("sent/s", "sent_bytes_per_s", bytes_text, "Bytes per second to other tasks."),
    Column("memory", "resident_bytes", bytes_text, "Memory of the process that is in RAM."),
    Column("device memory", "device_bytes", bytes_text, "Memory in use on the task's GPUs or TPUs."),
    Column("restarts", "restarts", number_text, "How often a new process has replaced the task's process."),
    Column("pid", "pid", _plain),
    Column("up", "uptime_s", duration_text),
)


def columns_of(status: Mapping[str, Any]) -> list[Column]:
    """Returns the columns of a status with rates."""
    return [column for column in _COLUMNS if column.field in status["tasks"][0]]


def rows_of(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of each task, from a status with rates: one for each of ``columns_of``."""
    columns = columns_of(status)
    return [tuple(column.text(task[column.field]) for column in columns) for task in status["tasks"]]


_SLOW: Final = (
    "The task for which the others wait: the one with the largest own share, if that exceeds the median of the others "
    "by at least 10 % of the time. If its data share is high, its input is slow; if not, its Python code is, such as a "
    "callback."
)


_SURVIVORS: Final = {
    "adopted": "The replicas of dead workers, each with the live worker that computes it.",
    "recoveries": "How often the live workers have repeated a step after a death.",
    "replacements": "How many processes have taken the place of dead workers.",
    "last recovery": "The time from the error to the end of the repeated step.",
    "epoch of members": "The number of the agreement on who is live. Each death and each new worker begins another one.",
}


def meanings_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Returns the meanings of columns and of parts of the summary, by name, from a status with rates."""
    columns = {column.name: column.meaning for column in columns_of(status) if column.meaning}
    slow = {"slow": _SLOW} if "own" in columns else {}
    groups = GROUP_MEANINGS if groups_of(status) else {}
    return {**columns, **slow, **(_SURVIVORS if survivors_of(status) else {}), **groups}


def title_of(status: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the name of the job, and its strategy with the number of tasks."""
    job, num_tasks = status.get("job") or {}, len(status["tasks"])
    tasks = f"{num_tasks} task{'s' * (num_tasks != 1)}"
    strategy = job.get("strategy")
    return printable(
        job.get("name") or "replicax"
    ), tasks if strategy is None else f"{printable(strategy)}, {tasks}"


DONE: Final = "done"
"""The name of the share of the whole training that is done, in ``progress_of``."""


def progress_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the position of the training; none if it is in no loop over data."""
    progress = status.get("progress")
    if progress is None:
        return []
    turn, batch = number_text(progress["number"]), number_text(progress["batch"])
    if progress["num_turns"] is not None:
        turn += f" of {number_text(progress['num_turns'])}"
    if progress["num_batches"] is not None:
        batch += f" of {number_text(progress['num_batches'])}"
    parts = [(printable(progress["kind"]), turn), ("batch", batch)]
    done, left = ("pass done", "pass ends in") if progress["num_turns"] is None else (DONE, "time left")
    if progress["share"] is not None:
        parts.append((done, share_text(progress["share"])))
    if progress["left_s"] is not None:
        parts.append((left, duration_text(progress["left_s"])))
    return parts


def fit_metrics_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and values that ``fit`` has logged besides the loss."""
    return [(printable(name), loss_text(value)) for name, value in (status.get("metrics") or {}).items()]


def survivors_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the live workers; none if the workers do not tolerate failures."""
    survivors = status.get("survivors")
    if survivors is None:
        return []
    names = [printable(task["task"]) for task in status["tasks"]]
    adopted = [f"replica {replica} by {names[member]}" for replica, member in survivors["adopted"].items()]
    last_s = survivors["recovery_s"]
    return [
        ("live workers", f"{len(survivors['members'])} of {len(names)}"),
        ("adopted", ", ".join(adopted) or "–"),
        ("recoveries", number_text(survivors["num_recoveries"])),
        ("replacements", number_text(survivors["num_replacements"])),
        ("last recovery", "–" if last_s is None else f"{last_s:.2f} s"),
        ("epoch of members", number_text(survivors["epoch"])),
    ]


def curve_values_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the current value of each curve by name, from a status with rates; None if it is not known."""
    tasks = status["tasks"]
    values: dict[str, Any] = {
        "loss": next((task["loss"] for task in tasks if task.get("loss") is not None), None),
        "val_loss": (status.get("metrics") or {}).get("val_loss"),
    }
    if "closures" in status:
        return {**values, "closures/s": status["closures"]["finished_per_s"]}
    return {
        **values,
        "steps/s": max((each for task in tasks if (each := task["steps_per_s"]) is not None), default=None),
    }


def summary_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the whole job, from a status with rates."""
    return _closures(status["closures"]) if "closures" in status else _steps(status["tasks"])


def _closures(closures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rounds = ("rounds", "gradients_dropped") if closures["rounds"] else ()
    return [
        ("closures/s", number_text(closures["finished_per_s"])),
        *(
            (name.replace("_", " "), number_text(closures[name]))
            for name in ("finished", "queued", "in_flight", "failed", "cancelled", "retried", *rounds)
        ),
    ]


def _steps(tasks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    def known(field: str) -> list[Any]:
        return [task[field] for task in tasks if task[field] is not None]

    slow = [printable(task["task"]) for task in tasks if task["state"] == "slow"]
    examples = known("examples_per_s")
    return [
        ("step", number_text(max(known("steps"), default=None))),
        ("steps/s", number_text(max(known("steps_per_s"), default=None))),
        ("examples/s", number_text(sum(examples) if examples else None)),
        ("loss", loss_text(next(iter(known("loss")), None))),
        ("slow", ", ".join(slow) or "–"),
    ]


def staleness_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values that describe the staleness of updates; none without parameter servers."""
    staleness = status.get("staleness")
    if staleness is None:
        return []
    return [
        ("lately", number_text(staleness["recent_mean"])),
        ("mean", number_text(staleness["mean"])),
        ("max", number_text(staleness["max"])),
    ]
