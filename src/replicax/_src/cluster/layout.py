"""``Layout``: which tasks a cluster on this machine has, at which ports, and what each is told in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.processes import ProcessStartError
from replicax._src.cluster.spec import Task

RESTART_COUNT_VARIABLE: Final = "REPLICAX_RESTART_COUNT"
# Where the script saves.
CHECKPOINT_DIR_VARIABLE: Final = "REPLICAX_CHECKPOINT_DIR"
SCRIPT_IN: Final = ("chief", "workers", "all")
# What a task that runs the user's program is told of who else does.
SCRIPT_IN_VARIABLE: Final = "REPLICAX_SCRIPT_IN"
# What it is told of how many devices each worker has.
DEVICES_VARIABLE: Final = "REPLICAX_DEVICES_PER_WORKER"
# Tells a task how many tasks its launcher has started on this host: they share its cores.
TASKS_ON_HOST_VARIABLE: Final = "REPLICAX_TASKS_ON_HOST"
# On how many parameter servers each variable is.
REPLICATION_VARIABLE: Final = "REPLICAX_REPLICATION"
# What a server is run as, after ``python``; TF_CONFIG says which.
SERVER_COMMAND: Final = ("-m", "replicax", "server")

_LOOPBACK: Final = "127.0.0.1"
_FIRST_PORT: Final = 15_000
_PORT_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
# XLA's thread pool for several virtual devices in one process; see docs/explanation/design/005-cpu-meshes.md.
_CPU_POOL_THREADS: Final = 16
_TUNABLES: Final = "GLIBC_TUNABLES"
_SERVER_MEMORY: Final = {
    "glibc.malloc.hugetlb": 1,  # in large pages, as far as the kernel has them
    "glibc.malloc.mmap_threshold": 8 << 20,  # pieces of messages, 4 MB, are of memory that was used before
    "glibc.malloc.trim_threshold": 64 << 20,
}
_HOST_DEVICES_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=\S*")


@dataclass(frozen=True)
class Layout:
    """How many tasks of each type a cluster has.

    Attributes:
      num_workers: Of type ``worker``, besides the chief.
      chief: Whether there is one; worker 0 is the chief otherwise.
      num_ps: Parameter servers.
      evaluator: Whether there is one. It has no address, as with Kubeflow: nobody connects to it.

    Raises:
      ClusterError: A number is negative, or nobody computes.

    >>> [str(task) for task in Layout(num_workers=2, evaluator=True).tasks]
    ['worker 0', 'worker 1', 'evaluator 0']
    """

    num_workers: int = 1
    chief: bool = False
    num_ps: int = 0
    evaluator: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.num_ps < 0:
            raise ClusterError(
                f"A cluster cannot have {self.num_workers} workers and {self.num_ps} parameter servers: numbers of "
                "tasks are at least 0."
            )
        if not self.num_workers and not self.chief:
            raise ClusterError("A cluster needs at least one worker, or a chief: somebody has to compute.")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All of them: the chief, the workers, the parameter servers, the evaluator."""
        return (*self.tasks_with_address, *([Task("evaluator", 0)] if self.evaluator else []))

    @property
    def tasks_with_address(self) -> tuple[Task, ...]:
        """Those that stand in the cluster of ``TF_CONFIG``."""
        counts = {"chief": int(self.chief), "worker": self.num_workers, "ps": self.num_ps}
        return tuple(Task(kind, index) for kind, count in counts.items() for index in range(count))

    def servers(self, script_in: str | None = None) -> frozenset[Task]:
        """The tasks that run ``replicax server`` instead of the user's program; only where there are parameter servers.

        Args:
          script_in: Who runs the program: ``chief``, who is the coordinator; ``workers``, and the chief if there is
            one, each for itself; or ``all``, as TensorFlow's scripts expect, which make servers themselves. None: the
            chief, and where there is none the workers.

        Raises:
          ClusterError: It is none of these, or ``chief`` where there is none.

        >>> layout = Layout(num_workers=1, chief=True, num_ps=1)
        >>> [sorted(map(str, layout.servers(who))) for who in ("chief", "workers", "all")]
        [['ps 0', 'worker 0'], ['ps 0'], []]
        """
        script_in = ("chief" if self.chief else "workers") if script_in is None else script_in
        if script_in not in SCRIPT_IN:
            raise ClusterError(f"Who runs the script is one of {', '.join(SCRIPT_IN)}, got {script_in!r}.")
        if not self.num_ps or script_in == "all":
            return frozenset()
        if script_in == "chief" and not self.chief:
            raise ClusterError(
                "The script cannot run in the chief: there is none. Add a chief, or let the workers run it."
            )
        kinds = ("worker", "ps") if script_in == "chief" else ("ps",)
        return frozenset(task for task in self.tasks if task.type in kinds)

    def told(self, task: Task, script_in: str | None = None) -> dict[str, str]:
        """Returns what a task's environment says besides ``TF_CONFIG``: whom it shares its host with, who runs the
        script.

        >>> Layout(num_workers=1, num_ps=1).told(Task("worker", 0))
        {'REPLICAX_TASKS_ON_HOST': '2', 'REPLICAX_SCRIPT_IN': 'workers'}
        """
        told = {TASKS_ON_HOST_VARIABLE: str(len(self.tasks))}
        who = ("chief" if self.chief else "workers") if script_in is None else script_in
        is_told = self.num_ps and who == "workers" and task.type in ("chief", "worker")
        return told | ({SCRIPT_IN_VARIABLE: "workers"} if is_told else {})

    def on_this_machine(self, ports: Sequence[int]) -> dict[str, list[str]]:
        """The cluster of ``TF_CONFIG``, with loopback addresses.

        Args:
          ports: One for each of ``tasks_with_address``.
        """
        cluster: dict[str, list[str]] = {}
        for task, port in zip(self.tasks_with_address, ports, strict=True):
            cluster.setdefault(task.type, []).append(f"{_LOOPBACK}:{port}")
        return cluster


def tf_config(cluster: Mapping[str, Sequence[str]], task: Task) -> str:
    """The ``TF_CONFIG`` of one task of a cluster.

    >>> tf_config({"worker": ["a:1", "b:1"]}, Task("worker", 1))
    '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    """
    own = {"type": task.type, "index": task.index}
    return json.dumps({"cluster": {job: list(to) for job, to in cluster.items()}, "task": own})


def task_environment(
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    environment: Mapping[str, str],
    *,
    num_devices: int | None = None,
    is_server: bool = False,
) -> dict[str, str]:
    """Returns what a task of a cluster is told, besides or instead of what is in ``environment``.

    Args:
      cluster: The addresses of ``TF_CONFIG``.
      task: Which one.
      environment: All that its process has otherwise.
      num_devices: Virtual CPU devices of each task but the parameter servers; None: as the environment says.
      is_server: It runs ``replicax server``.
    """
    told = {"TF_CONFIG": tf_config(cluster, task)}
    if is_server:
        told |= server_environment(environment)
    if num_devices is not None and task.type != "ps":
        told |= {**device_environment(num_devices, environment), DEVICES_VARIABLE: str(num_devices)}
    return told


def device_environment(num_devices: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What makes ``num_devices`` virtual CPU devices in a process, besides, or instead of, what is in
    ``environment``.
    """
    changes = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    if "JAX_PLATFORMS" not in environment:
        changes["JAX_PLATFORMS"] = "cpu"
    if num_devices > 1 and "PJRT_NPROC" not in environment:
        changes["PJRT_NPROC"] = str(_CPU_POOL_THREADS)
    flags = environment.get("XLA_FLAGS", "")
    if _HOST_DEVICES_FLAG.search(flags):  # JAX refuses to have both
        changes["XLA_FLAGS"] = _HOST_DEVICES_FLAG.sub("", flags).strip()
    return changes


def checkpoint_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What tells a script where to save; and JAX to keep compiled programs there, unless ``environment`` says something
    of it.

    They are kept for each machine: a program for the CPU of one may not run on another.
    """
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / ".compiled" / socket.gethostname()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    told = {CHECKPOINT_DIR_VARIABLE: str(folder.absolute())}
    return told | {name: value for name, value in kept.items() if name not in environment}


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What makes servers faster, besides what is in ``environment``: how GNU's C library, if it is that, gets memory.

    Arrays come and go at each step. Where each is made of fresh small pages, that takes longer than what is done with
    it.
    """
    said = environment.get(_TUNABLES, "")
    known = {each.partition("=")[0] for each in said.split(":")}
    missing = [f"{name}={value}" for name, value in _SERVER_MEMORY.items() if name not in known]
    return {_TUNABLES: ":".join([*filter(None, [said]), *missing])} if missing else {}


def num_usable_cores() -> int:
    """How many CPU cores this process may use."""
    asked = getattr(os, "sched_getaffinity", None)  # not on macOS
    return os.cpu_count() or 1 if asked is None else len(asked(0))


def free_ports(num_ports: int) -> list[int]:
    """Returns different ports that are free now, on all interfaces.

    They are bound for a moment, and released: use them soon. Where the system tells which ports it gives to outgoing
    connections these are left out, so that later only somebody who asks for one of ours by number can have it.

    Raises:
      ProcessStartError: There are not as many.
    """
    numbers = _static_ports()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in numbers:
            if len(ports) == num_ports:
                break
            bound = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                bound.bind(("", port))
                ports.append(bound.getsockname()[1])
    if len(ports) < num_ports:
        raise ProcessStartError(f"Only {len(ports)} of {num_ports} ports that were asked for are free.")
    return ports


def _static_ports(max_tries: int = 1000) -> list[int]:
    """Ports to try, in random order, that the system does not give away by itself; 0 lets it choose."""
    try:
        low, high = map(int, _PORT_RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return [0] * max_tries
    outside = [port for port in range(_FIRST_PORT, 65_536) if not low <= port <= high]
    if len(outside) < max_tries:
        return [0] * max_tries
    return random.SystemRandom().sample(outside, max_tries)
