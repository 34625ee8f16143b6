"""Measures how a job of several processes on this machine starts, trains and ends."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 400.0


def measure(num_processes: int) -> dict[str, list[float]]:
    """Returns the values of each row of the table."""
    script = str(Path(__file__).parent / "growth_process.py")
    launch = [sys.executable, "-m", "replicax", "launch", "--workers", str(num_processes), "--plain", script]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    lines = [line.partition("growth: ")[2] for line in done.stdout.splitlines() if "growth: " in line]
    if done.returncode or len(lines) != num_processes:
        raise SystemExit(f"{script} failed under replicax launch:\n{done.stdout}{done.stderr}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_s = (usage.ru_utime + usage.ru_stime) / num_processes
    values: dict[str, list[float]] = {"start to end, processor time for a process": [all_s]}
    for line in lines:
        for name, value in json.loads(line).items():
            values.setdefault(name, []).append(value)
    return values
