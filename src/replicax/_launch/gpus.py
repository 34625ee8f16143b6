"""Assigns the GPUs of this machine to the tasks of ``replicax launch --gpus-per-worker``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.spec import Task

GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S: Final = 30.0


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, or else all GPUs of this machine.

    Raises:
      ClusterError: The variable names a GPU twice, or one that this machine does not have.
    """
    said = environ.get(GPUS_VARIABLE)
    num_here = _num_gpus()
    if said is None:
        if num_here is None:
            raise ClusterError(
                f"--gpus-per-worker asks nvidia-smi which GPUs this machine has, and nvidia-smi does not answer. Name them: "
                f"{GPUS_VARIABLE}=0,1 replicax launch ..."
            )
        return [str(number) for number in range(num_here)]
    named = [name.strip() for name in said.split(",")] if said.strip() else []
    for name in named:
        if not name or name.startswith("-") or named.count(name) > 1:
            raise ClusterError(
                f"{GPUS_VARIABLE}={said!r} in the environment names {name!r}, or names it twice. Name each GPU that the job may "
                "use once, or leave the variable out for all."
            )
        if num_here is not None and name.isdecimal() and int(name) >= num_here:
            raise ClusterError(
                f"{GPUS_VARIABLE}={said!r} in the environment names GPU {name!r}, and this machine has {num_here} (nvidia-smi -L). "
                "Name those that the job may use, or leave the variable out for all."
            )
    return named


def gpus_here(environ: Mapping[str, str]) -> list[str]:
    """Returns the same as ``visible_gpus``; an empty list if nvidia-smi does not answer.

    Raises:
      ClusterError: CUDA_VISIBLE_DEVICES is wrong.
    """
    return visible_gpus(environ) if GPUS_VARIABLE in environ or _num_gpus() else []


def gpus_of_tasks(gpus: Sequence[str], tasks: Sequence[Task], num_each: int) -> dict[Task, str]:
    """Returns CUDA_VISIBLE_DEVICES of each task: the first ``num_each`` GPUs for the first task, and so on.

    Raises:
      ClusterError: There are too few GPUs.

    >>> gpus_of_tasks(["0", "1", "4", "5"], [Task("worker", 0), Task("worker", 1)], 2)[Task("worker", 1)]
    '4,5'
    """
    if len(gpus) < num_each * len(tasks):
        named = f" ({', '.join(gpus)})" if gpus else ""
        raise ClusterError(
            f"--gpus-per-worker {num_each} needs {num_each * len(tasks)} GPUs for {', '.join(map(str, tasks))}, and there are "
            f"{len(gpus)}{named}. Give each fewer, start fewer tasks, or leave "
            "the option out and set JAX_PLATFORMS=cpu to train on CPUs."
        )
    return {
        task: ",".join(gpus[place * num_each : (place + 1) * num_each]) for place, task in enumerate(tasks)
    }


def _num_gpus() -> int | None:
    """Returns the number of GPUs that the driver shows; None if nvidia-smi is missing or fails."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode:
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
