"""``ClusterLayout``: the tasks of a cluster on this machine, their ports, and the environment of each."""

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
REPLACEMENT_VARIABLE: Final = "REPLICAX_REPLACEMENT"
"""Set to 1 in a process that replaces a dead one of a running job. It starts no job of its own."""
# The directory in which the script saves.
CHECKPOINT_DIR_VARIABLE: Final = "REPLICAX_CHECKPOINT_DIR"
SCRIPT_IN: Final = ("chief", "workers", "all")
# Tells a task which tasks run the user's program.
SCRIPT_IN_VARIABLE: Final = "REPLICAX_SCRIPT_IN"
# Tells a task the number of devices of each worker.
DEVICES_VARIABLE: Final = "REPLICAX_DEVICES_PER_WORKER"
# Tells a task how many tasks the launcher has started on this host, because they share its cores.
TASKS_ON_HOST_VARIABLE: Final = "REPLICAX_TASKS_ON_HOST"
# The number of parameter servers that hold each variable.
REPLICATION_VARIABLE: Final = "REPLICAX_REPLICATION"
# The address at which the status of the job is served.
STATUS_ADDRESS_VARIABLE: Final = "REPLICAX_STATUS_ADDRESS"
# The arguments of ``python`` for a server; TF_CONFIG says which one it is.
SERVER_COMMAND: Final = ("-m", "replicax", "server")

_LOOPBACK: Final = "127.0.0.1"
_FIRST_PORT: Final = 15_000
_PORT_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
# XLA's thread pool for several virtual devices in one process; see docs/explanation/design/005-cpu-meshes.md.
_CPU_POOL_THREADS: Final = 16
_TUNABLES: Final = "GLIBC_TUNABLES"
_SERVER_MEMORY: Final = {
    "glibc.malloc.hugetlb": 1,  # large pages, if the kernel has them
    "glibc.malloc.mmap_threshold": 8 << 20,  # chunks of messages, 4 MB, reuse freed memory
    "glibc.malloc.trim_threshold": 64 << 20,
}
_HOST_DEVICES_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=\S*")


@dataclass(frozen=True)
class ClusterLayout:
    """The number of tasks of each type in a cluster.

    Attributes:
      num_workers: The number of tasks of type ``worker``, without the chief.
      chief: True if there is a task of type ``chief``. Otherwise worker 0 is the chief.
      num_ps: The number of parameter servers.
      evaluator: True if there is an evaluator. It has no address, as with Kubeflow, because no task connects to it.

    Raises:
      ClusterError: A number is negative, or there is neither a worker nor a chief.

    >>> [str(task) for task in ClusterLayout(num_workers=2, evaluator=True).tasks]
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
            raise ClusterError("A cluster needs at least one worker, or a chief. Add one.")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks: the chief, the workers, the parameter servers, the evaluator."""
        return (*self.tasks_with_address, *([Task("evaluator", 0)] if self.evaluator else []))

    @property
    def tasks_with_address(self) -> tuple[Task, ...]:
        """The tasks that are listed in the cluster of ``TF_CONFIG``."""
        counts = {"chief": int(self.chief), "worker": self.num_workers, "ps": self.num_ps}
        return tuple(Task(kind, index) for kind, count in counts.items() for index in range(count))

    def servers(self, script_in: str | None = None) -> frozenset[Task]:
        """Returns the tasks that run ``replicax server`` instead of the user's program; none without parameter servers.

        Args:
          script_in: The tasks that run the program. ``chief``: the coordinator only. ``workers``: the workers and the
            chief, each on its own. ``all``: every task, for TensorFlow's scripts, which create the servers themselves.
            None: the chief, or the workers if there is no chief.

        Raises:
          ClusterError: ``script_in`` is none of these, or it is ``chief`` and there is no chief.

        >>> layout = ClusterLayout(num_workers=1, chief=True, num_ps=1)
        >>> [sorted(map(str, layout.servers(who))) for who in ("chief", "workers", "all")]
        [['ps 0', 'worker 0'], ['ps 0'], []]
        """
        script_in = ("chief" if self.chief else "workers") if script_in is None else script_in
        if script_in not in SCRIPT_IN:
            raise ClusterError(f"script_in must be one of {', '.join(SCRIPT_IN)}, got {script_in!r}.")
        if not self.num_ps or script_in == "all":
            return frozenset()
        if script_in == "chief" and not self.chief:
            raise ClusterError(
                "The script cannot run in the chief: there is none. Add a chief, or let the workers run it."
            )
        kinds = ("worker", "ps") if script_in == "chief" else ("ps",)
        return frozenset(task for task in self.tasks if task.type in kinds)

    def environment_for(self, task: Task, script_in: str | None = None) -> dict[str, str]:
        """Returns a task's variables besides ``TF_CONFIG``: the number of tasks on its host, and the tasks that run the
        script.

        >>> ClusterLayout(num_workers=1, num_ps=1).environment_for(Task("worker", 0))
        {'REPLICAX_TASKS_ON_HOST': '2', 'REPLICAX_SCRIPT_IN': 'workers'}
        """
        told = {TASKS_ON_HOST_VARIABLE: str(len(self.tasks))}
        who = ("chief" if self.chief else "workers") if script_in is None else script_in
        is_told = self.num_ps and who == "workers" and task.type in ("chief", "worker")
        return told | ({SCRIPT_IN_VARIABLE: "workers"} if is_told else {})

    def on_this_machine(self, ports: Sequence[int]) -> dict[str, list[str]]:
        """Returns the cluster of ``TF_CONFIG``, with loopback addresses.

        Args:
          ports: One port for each of ``tasks_with_address``.
        """
        cluster: dict[str, list[str]] = {}
        for task, port in zip(self.tasks_with_address, ports, strict=True):
            cluster.setdefault(task.type, []).append(f"{_LOOPBACK}:{port}")
        return cluster


def tf_config(cluster: Mapping[str, Sequence[str]], task: Task) -> str:
    """Returns the ``TF_CONFIG`` of one task of a cluster.

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
    """Returns the variables of a task that are added to ``environment``, or replace variables of it.

    Args:
      cluster: The addresses of ``TF_CONFIG``.
      task: The task.
      environment: All other variables of its process.
      num_devices: The virtual CPU devices of each task except parameter servers. None: the environment decides.
      is_server: True if it runs ``replicax server``.
    """
    told = {"TF_CONFIG": tf_config(cluster, task)}
    if is_server:
        told |= server_environment(environment)
    if num_devices is not None and task.type != "ps":
        told |= {**device_environment(num_devices, environment), DEVICES_VARIABLE: str(num_devices)}
    return told


def device_environment(num_devices: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make ``num_devices`` virtual CPU devices. They are added to ``environment``."""
    changes = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    if "JAX_PLATFORMS" not in environment:
        changes["JAX_PLATFORMS"] = "cpu"
    if num_devices > 1 and "PJRT_NPROC" not in environment:
        changes["PJRT_NPROC"] = str(_CPU_POOL_THREADS)
    flags = environment.get("XLA_FLAGS", "")
    if _HOST_DEVICES_FLAG.search(flags):  # JAX refuses this flag beside its own option
        changes["XLA_FLAGS"] = _HOST_DEVICES_FLAG.sub("", flags).strip()
    return changes


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make servers faster: settings of the memory allocator of GNU's C library.

    Each step allocates and frees arrays. Fresh small pages would take longer than the work on the arrays.
    """
    said = environment.get(_TUNABLES, "")
    known = {each.partition("=")[0] for each in said.split(":")}
    missing = [f"{name}={value}" for name, value in _SERVER_MEMORY.items() if name not in known]
    return {_TUNABLES: ":".join([*filter(None, [said]), *missing])} if missing else {}


def num_usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    asked = getattr(os, "sched_getaffinity", None)  # not on macOS
    return os.cpu_count() or 1 if asked is None else len(asked(0))


def free_ports(num_ports: int, kept: Sequence[int] = ()) -> list[int]:
    """Returns distinct ports that are free now on all interfaces.

    They are bound for a moment and released, so use them soon. Ports that the system gives to outgoing connections are
    left out if they are known. Only a program that asks for such a port by number can then take it.

    Args:
      num_ports: Their number.
      kept: Ports of an earlier call, ``num_ports`` or none. Those that are free keep their place.

    Raises:
      ProcessStartError: Too few ports are free.
    """
    numbers = iter(_static_ports())
    with contextlib.ExitStack() as held:
        ports = [_held_port(port, held, is_kept=True) for port in kept] or [None] * num_ports
        for place, port in enumerate(ports):
            while port is None and (number := next(numbers, None)) is not None:
                port = _held_port(number, held)
            ports[place] = port
    free = [port for port in ports if port is not None]
    if len(free) < num_ports:
        raise ProcessStartError(f"Only {len(free)} of {num_ports} requested ports are free.")
    return free


def _held_port(port: int, held: contextlib.ExitStack, *, is_kept: bool = False) -> int | None:
    """Returns the number of a port that it binds for as long as ``held``; None if another program has it."""
    bound = held.enter_context(socket.socket())
    if is_kept:  # connections of the earlier start that the system still remembers are no obstacle
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("", port))
        bound.listen()  # with SO_REUSEADDR only this fails if another program listens there
    except OSError:
        return None
    return bound.getsockname()[1]


def _static_ports(max_tries: int = 1000) -> list[int]:
    """Returns ports to try, in random order, that the system does not assign on its own; 0 lets it choose."""
    try:
        low, high = map(int, _PORT_RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return [0] * max_tries
    outside = [port for port in range(_FIRST_PORT, 65_536) if not low <= port <= high]
    if len(outside) < max_tries:
        return [0] * max_tries
    return random.SystemRandom().sample(outside, max_tries)
