"""CPU time and memory of processes, as Linux reports them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIB = 2**20


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of each process since it started, of all threads, user and system."""
    return {name: _cpu_s(pid) for name, pid in pids.items()}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The difference of two results of ``cpu_s``."""
    return {name: now[name] - before[name] for name in now}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_mib(pid: int) -> float:
    """Memory now."""
    return _status_kib(pid, "VmRSS") * 1024 / _MIB


def peak_mib(pid: int) -> float:
    """The peak since the process started, or since ``forget_peak``."""
    return _status_kib(pid, "VmHWM") * 1024 / _MIB


def forget_peak(pid: int) -> None:
    """Restarts the measurement of ``peak_mib``."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_kib(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])
