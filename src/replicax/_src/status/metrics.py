"""A status as metrics for Prometheus, in its text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# The name of each metric, with its field of ``status["closures"]`` and its help text. Names in _total are counters.
_CLOSURES: Final = {
    "replicax_closures_scheduled_total": ("scheduled", "Functions that were scheduled."),
    "replicax_closures_finished_total": ("finished", "Functions that have ended with a result."),
    "replicax_closures_failed_total": ("failed", "Functions that have ended with an error."),
    "replicax_closures_cancelled_total": (
        "cancelled",
        "Functions that were cancelled because another one had failed.",
    ),
    "replicax_closures_retried_total": ("retried", "How often a function was queued again."),
    "replicax_rounds_total": ("rounds", "Updates with the mean of the gradients of several functions."),
    "replicax_gradients_dropped_total": (
        "gradients_dropped",
        "Functions whose gradients arrived after the end of their round.",
    ),
    "replicax_closures_queued": ("queued", "Functions that no worker has taken."),
    "replicax_closures_in_flight": (
        "in_flight",
        "Functions that a worker has taken and that have not ended.",
    ),
}
# The same for each task.
_TASKS: Final = {
    "replicax_task_uptime_seconds": ("uptime_s", "Time since the process started."),
    "replicax_task_resident_memory_bytes": ("resident_bytes", "Memory of the process that is in RAM."),
    "replicax_task_cpu_seconds_total": ("cpu_s", "Processor time of the process."),
    "replicax_task_device_memory_bytes": ("device_bytes", "Memory in use on the devices of the process."),
    "replicax_task_slow": ("is_slow", "1 if the others wait for the task, else 0."),
    "replicax_steps_total": ("steps", "Batches taken from datasets; without a dataset, programs run."),
    "replicax_steps_per_second": ("steps_per_s", "Steps per second in the last 5 s."),
    "replicax_examples_total": ("examples", "Rows that the task's replicas have taken from datasets."),
    "replicax_loss": ("loss", "The loss that was logged last."),
    "replicax_data_wait_seconds_total": ("data_s", "Time spent waiting for the task's own data."),
    "replicax_device_wait_seconds_total": (
        "device_s",
        "Time spent in programs, which compute on the devices and wait for other tasks.",
    ),
    "replicax_task_received_bytes_total": ("received_bytes", "Bytes received from other tasks."),
    "replicax_task_sent_bytes_total": ("sent_bytes", "Bytes sent to other tasks."),
    "replicax_task_restarts_total": ("restarts", "How often a new process has replaced the task's process."),
    "replicax_worker_connections_total": (
        "connections",
        "How often the coordinator has connected to the worker.",
    ),
    "replicax_worker_closures_total": ("closures", "Functions that the worker's process has run."),
    "replicax_worker_in_flight": (
        "in_flight",
        "Functions that the worker has taken and that have not ended.",
    ),
    "replicax_ps_updates_total": ("updates", "Updates that were applied."),
    "replicax_ps_duplicates_total": (
        "duplicates",
        "Updates that were skipped because they had been applied before.",
    ),
    "replicax_ps_held_bytes": ("held_bytes", "Size of the values on the parameter server."),
}
# The name of each metric, with its field of ``status["progress"]`` and its help text.
_PROGRESS: Final = {
    "replicax_progress_ratio": (
        "share",
        "The part of the training that is done; without epochs, of the pass.",
    ),
    "replicax_time_left_seconds": ("left_s", "Time until then, at the mean speed so far."),
}
# The name of each metric, with its field of ``status["survivors"]`` and its help text.
_SURVIVORS: Final = {
    "replicax_live_workers": ("members", "Workers that are live, of those that tolerate failures."),
    "replicax_adopted_replicas": ("adopted", "Replicas of dead workers that others compute."),
    "replicax_recoveries_total": ("num_recoveries", "How often a step was repeated after a death."),
    "replicax_replacements_total": (
        "num_replacements",
        "How many processes have taken the place of dead workers.",
    ),
    "replicax_last_recovery_seconds": (
        "recovery_s",
        "Time from the last error to the end of the repeated step.",
    ),
    "replicax_members_epoch": ("epoch", "The number of the agreement on which workers are live."),
}
# The name of each metric, with its field of ``status["groups"]`` and its help text.
_GROUPS: Final = {
    "replicax_groups_quorum": ("quorum", "Groups that a round waits for."),
    "replicax_groups_version": ("versions", "Rounds of the fragment with the fewest that have closed."),
    "replicax_group_rows_total": ("rows", "Rows that this group has trained on and handed over."),
    "replicax_group_pushes_total": ("pushes", "Contributions of this group."),
    "replicax_group_adoptions_total": ("adoptions", "How often this group has adopted outer parameters."),
    "replicax_group_lost_pushes_total": (
        "lost_pushes",
        "Contributions of this group that are in no outer parameters.",
    ),
    "replicax_group_silent_servers_total": (
        "silent_servers",
        "How often a server did not answer this group.",
    ),
    "replicax_group_sent_bytes_total": ("sent_bytes", "Bytes sent to the servers of the groups."),
    "replicax_group_received_bytes_total": ("received_bytes", "Bytes received from them."),
}
_DOWN: Final = ("awaited", "ended", "lost", "given up", "silent")
_STALENESS: Final = "replicax_ps_staleness_updates"
# The upper ends of the buckets 0, 1, 2 to 3, 4 to 7, ...; Prometheus expects them never to change.
_HIGHEST: Final = tuple((1 << bits) - 1 for bits in range(11))


def metrics_of(status: Mapping[str, Any]) -> str:
    """Returns all metrics of a status, with or without rates. Counters of a task start at 0 with its process."""
    closures = _of_closures(status) if "closures" in status else ()
    of_job = (_of_progress(status), _of_fit(status), _of_survivors(status), _of_groups(status))
    parts = (closures, _of_tasks(status), *of_job, _of_staleness(status))
    return "".join(f"{line}\n" for part in parts for line in part)


def _of_closures(status: Mapping[str, Any]) -> Iterator[str]:
    for name, (field, text) in _CLOSURES.items():
        yield from _head(name, text)
        yield f"{name} {status['closures'][field]}"


def _of_tasks(status: Mapping[str, Any]) -> Iterator[str]:
    tasks = status["tasks"]
    yield from _head("replicax_task_up", "1 if the task is there, else 0.")
    for task in tasks:
        yield f"replicax_task_up{_labels(task=task['task'])} {int(task['state'] not in _DOWN)}"
    for name, (field, text) in _TASKS.items():
        known = [(task["task"], task[field]) for task in tasks if task.get(field) is not None]
        if known:
            yield from _head(name, text)
        for task, value in known:
            yield f"{name}{_labels(task=task)} {value}"


def _of_progress(status: Mapping[str, Any]) -> Iterator[str]:
    progress = status.get("progress") or {}
    for name, (field, text) in _PROGRESS.items():
        if progress.get(field) is not None:
            yield from _head(name, text)
            yield f"{name} {progress[field]}"


def _of_fit(status: Mapping[str, Any]) -> Iterator[str]:
    metrics = status.get("metrics") or {}
    if metrics:
        yield from _head("replicax_fit_metric", "What fit has logged last besides the loss.")
    for name, value in metrics.items():
        yield f"replicax_fit_metric{_labels(name=name)} {value}"


def _of_survivors(status: Mapping[str, Any]) -> Iterator[str]:
    survivors = status.get("survivors") or {}
    for name, (field, text) in _SURVIVORS.items():
        value = survivors.get(field)
        if value is not None:
            yield from _head(name, text)
            yield f"{name} {len(value) if isinstance(value, (list, dict)) else value}"


def _of_groups(status: Mapping[str, Any]) -> Iterator[str]:
    groups = status.get("groups") or {}
    for name, (field, text) in _GROUPS.items():
        value = groups.get(field)
        value = min(value, default=None) if isinstance(value, list) else value
        if value is not None:
            yield from _head(name, text)
            yield f"{name} {value}"
    lags = [(str(index), each["lag"]) for index, each in enumerate(groups.get("members", ()))]
    if lags:
        yield from _head("replicax_group_lag", "Rounds since the last contribution of a group arrived.")
    for index, lag in lags:
        if lag is not None:
            yield f"replicax_group_lag{_labels(group=index)} {lag}"


def _of_staleness(status: Mapping[str, Any]) -> Iterator[str]:
    staleness_of = {task["task"]: task.get("staleness") for task in status["tasks"]}
    known = [(task, staleness) for task, staleness in staleness_of.items() if staleness is not None]
    if known:
        yield f"# HELP {_STALENESS} The number of other updates between an update and the values it used."
        yield f"# TYPE {_STALENESS} histogram"
    for task, staleness in known:
        counts = {int(low): count for low, count in staleness["histogram"].items()}
        for highest in _HIGHEST:
            below = sum(count for low, count in counts.items() if low <= highest)
            yield f"{_STALENESS}_bucket{_labels(task=task, le=str(highest))} {below}"
        yield f"{_STALENESS}_bucket{_labels(task=task, le='+Inf')} {staleness['num']}"
        yield f"{_STALENESS}_sum{_labels(task=task)} {round(staleness['mean'] * staleness['num'])}"
        yield f"{_STALENESS}_count{_labels(task=task)} {staleness['num']}"


def _head(name: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
