"""The figures of this process, which its heartbeats carry to the chief: memory, steps, waits, loss."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from replicax._src.cluster.counters import Counters, counters
from replicax._src.cluster.processes import resident_bytes
from replicax._src.jax_internals import jax_compat

FIGURES: Final = (
    *("pid", "uptime_s", "resident_bytes", "host", "restarts", "cpu_s", "device_bytes"),
    *("steps", "examples", "loss", "data_s", "device_s"),
)
_NUMBERS: Final = (int, float, np.generic, np.ndarray, jax.Array)
_LOSS: Final = ""  # the name of the loss among the known values
_MOST_LOGS: Final = 16
_LONGEST_NAME: Final = 64
_RAYS_PROGRAM: Final = "default_worker.py"  # runs functions of a driver, which is another process
_BEGAN_S: Final = time.monotonic()
_RESTART_COUNTS: Final = ("REPLICAX_RESTART_COUNT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def vitals() -> dict[str, Any]:
    """Returns the state of this process as JSON: its pid, uptime, and resident memory (None without /proc)."""
    pid = os.getpid()
    return {"pid": pid, "uptime_s": time.monotonic() - _BEGAN_S, "resident_bytes": resident_bytes(pid)}


def figures() -> dict[str, Any]:
    """Returns the ``FIGURES`` of this process as JSON. It waits for no device, and any thread may call it.

    ``device_s`` is the time in which the devices worked or waited for other processes; None for a process that runs its
    programs alone, because it does not wait for them.
    """
    waits = counters.programs.total_s
    return {
        **vitals(),
        "host": socket.gethostname(),
        "restarts": max(int(text) if text.isdecimal() else 0 for text in map(_variable, _RESTART_COUNTS)),
        "cpu_s": time.process_time(),
        "device_bytes": _device_bytes(),
        "steps": counters.num_batches or counters.num_runs,
        "examples": counters.num_examples or None,
        "loss": loss_of(counters),
        "data_s": counters.waited_for_data_s,
        "device_s": waits + counters.waited_for_others_s if waits else None,
    }


def job_figures() -> dict[str, Any]:
    """Returns what the process that serves the status knows of the whole job, as JSON: ``job``, its name and strategy;
    ``progress``, the position of its loop (see ``progress.py``), None if it is in none; ``metrics``, see ``logs_of``.

    If the workers tolerate failures, also ``survivors``: ``epoch``, its number; ``members``, the numbers of the live
    workers; ``adopted``, the number of the worker that computes each replica of a dead one; ``num_recoveries``;
    ``recovery_s``, the seconds that the last one took, None before the first; and ``num_replacements``, the number of
    processes that have taken the place of dead workers.

    If this is a group that exchanges with others, also ``groups``: see ``_ps/local_updates/group_status.py``.
    """
    loop = counters.fit or counters.passes
    return {
        "job": {"name": program_name(sys.argv, sys.modules.get("__main__")), "strategy": counters.strategy},
        "progress": None if loop is None else loop.describe(),
        "metrics": logs_of(counters),
        **({} if counters.survivors is None else {"survivors": dict(counters.survivors())}),
        **({} if counters.groups is None else {"groups": dict(counters.groups())}),
    }


def program_name(argv: Sequence[str], main: Any) -> str | None:
    """Returns the name of a program: its file, or its module after ``python -m``. None for a notebook, a prompt, and a
    worker of Ray.

    Args:
      argv: The arguments of the process.
      main: The module ``__main__``.
    """
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__")
    name = os.path.basename(getattr(main, "__file__", None) or "")
    return name if name and argv and argv[0] and name != _RAYS_PROGRAM else None


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def loss_of(counted: Counters) -> float | str | None:
    """Returns the last loss that is known, without a wait: a number, or "nan", "inf" or "-inf", which JSON has no
    numbers for.
    """
    return _known(counted, _LOSS, counted.loss)


def logs_of(counted: Counters) -> dict[str, float | str]:
    """Returns the last known values of what ``fit`` logs besides the loss, by name; each as ``loss_of``.

    Those of the last epoch that the steps do not log, such as a validation's, come after the others. Of many it
    returns the first 16.
    """
    epoch, steps = dict(counted.epoch_logs), counted.logs
    values = {**_flat(steps), **{name: value for name, value in _flat(epoch).items() if name not in steps}}
    values.pop("loss", None)
    shown = {name: _known(counted, name, values[name]) for name in list(values)[:_MOST_LOGS]}
    return {name: value for name, value in shown.items() if value is not None}


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs in which metrics with several results are flat, as Keras shows them."""
    flat: dict[str, Any] = {}
    for name, value in dict(logs).items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return {_cut(str(name)): value for name, value in flat.items()}


def _cut(name: str) -> str:
    """Returns a name, of a long one the beginning and the end, in which the metrics of several outputs differ."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}"


def _known(counted: Counters, name: str, value: Any) -> float | str | None:
    number = _number_of(value)
    if number is not None:
        counted.known[name] = number
    return counted.known.get(name)


def _number_of(value: Any) -> float | str | None:
    """Returns the number that a value is; None if it is none, or not computed yet."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # no number, or a program that failed
        if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_ready()):  # type: ignore[attr-defined]
            return None
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = value.addressable_data(0)
        if isinstance(value, _NUMBERS):  # others may wait for another task
            number = float(np.asarray(value))
            return number if math.isfinite(number) else str(number)
    return None


def _device_bytes() -> int | None:
    """Returns the bytes in use on the devices of this process; None before they are used, and on CPUs."""
    if not jax_compat.backend_started():
        return None
    with contextlib.suppress(Exception):  # whatever a plugin raises: heartbeats must go on
        stats = [device.memory_stats() for device in jax.local_devices()]
        return sum(each["bytes_in_use"] for each in stats if each) if any(stats) else None
    return None
