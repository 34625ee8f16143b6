"""The figures of this process, which its heartbeats carry to the chief: memory, steps, waits, loss."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from typing import Any, Final

import jax
import numpy as np

from replicax._src import jax_compat
from replicax._src.cluster.processes import resident_bytes
from replicax._src.status.counters import Counters, counters

FIGURES: Final = (
    *("pid", "uptime_s", "resident_bytes", "host", "restarts", "cpu_s", "device_bytes"),
    *("steps", "examples", "loss", "data_s", "device_s"),
)
_NUMBERS: Final = (int, float, np.generic, np.ndarray, jax.Array)
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


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def loss_of(counted: Counters) -> float | str | None:
    """Returns the last loss that is known, without a wait: a number, or "nan", "inf" or "-inf", which JSON has no
    numbers for.
    """
    value = counted.loss
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # no number, or a program that failed
        if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_ready()):  # type: ignore[attr-defined]
            return counted.known_loss
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = value.addressable_data(0)
        if isinstance(value, _NUMBERS):  # others may wait for another task
            number = float(np.asarray(value))
            counted.known_loss = number if math.isfinite(number) else str(number)
    return counted.known_loss


def _device_bytes() -> int | None:
    """Returns the bytes in use on the devices of this process; None before they are used, and on CPUs."""
    if not jax_compat.backend_started():
        return None
    with contextlib.suppress(Exception):  # whatever a plugin raises: heartbeats must go on
        stats = [device.memory_stats() for device in jax.local_devices()]
        return sum(each["bytes_in_use"] for each in stats if each) if any(stats) else None
    return None
