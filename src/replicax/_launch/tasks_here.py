"""``TasksHere``: the tasks of a job on this machine, with their commands, ports and variables."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import final

from replicax._launch.gpus import GPUS_VARIABLE, gpus_of_tasks, visible_gpus
from replicax._launch.supervisor import Renew, Start
from replicax._src.cluster.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, random_token
from replicax._src.cluster.machine_layout import (
    CHECKPOINT_DIR_VARIABLE,
    REPLICATION_VARIABLE,
    SERVER_COMMAND,
    STATUS_ADDRESS_VARIABLE,
    ClusterLayout,
    free_ports,
    task_environment,
)
from replicax._src.cluster.spec import Task


@final
class TasksHere:
    """The tasks of a job on this machine. Each start gets ports that are free then.

    Args:
      options: The options of the command.
      command: The arguments of ``python`` for the script.
      more: Variables of all tasks.
      ports: The ports of the first start, as many as ``num_ports``; None: any that are free.
      status_address: The address of the status, if the options ask for one; None: a free port of this machine.

    Raises:
      ClusterError: The options do not describe a cluster.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        command: Sequence[str],
        more: Mapping[str, str],
        *,
        ports: Sequence[int] = (),
        status_address: str | None = None,
    ):
        has_chief = bool(options.ps) if options.chief is None else options.chief
        num_workers = options.workers if options.workers is not None else 1
        self._options, self._command, self._more = options, command, more
        self._layout = ClusterLayout(num_workers, has_chief, options.ps, options.evaluator)
        self._servers = self._layout.servers(options.script_in)
        self._has_coordinator = bool(options.ps) and has_chief and options.script_in != "workers"
        self._awaited = ("chief",) if self._has_coordinator else ("chief", "worker")
        if options.status and options.ps and not self._has_coordinator:
            options.parser.error(
                "--status with parameter servers needs a coordinator: a chief that runs the script. Leave out --no-chief "
                "and --script-in workers"
            )
        self._ports, self._status_address = list(ports), status_address
        self._shown: dict[str, str] = {}

    def starts(self) -> tuple[list[Start], list[str]]:
        """Returns all tasks, with ports that are free now, and the notes to show. A port of the last start stays the
        same while it is free, because somebody may watch the status.

        Raises:
          ProcessStartError: Too few ports are free.
        """
        num_tasks = len(self._layout.tasks_with_address)
        self._ports = free_ports(num_tasks + 1, self._ports)
        address = self._status_address or f"127.0.0.1:{self._ports[num_tasks]}"
        shown, notes = status_at(address) if self._options.status else ({}, [])
        notes = notes if shown != self._shown else []
        self._shown = shown
        cluster = self._layout.on_this_machine(self._ports[:num_tasks])
        return [self._start(task, cluster) for task in self._layout.tasks], notes

    def _start(self, task: Task, cluster: Mapping[str, Sequence[str]]) -> Start:
        # The task chief, or worker 0. Another worker becomes the chief if the job goes on after this one's death.
        may_serve = task == self._layout.tasks[0] or (not self._options.ps and task.type == "worker")
        variables = {
            **self._layout.environment_for(task, self._options.script_in),
            **self._more,
            **(self._shown if may_serve else {}),
        }
        is_server = task in self._servers
        environment = environment_of(self._options, cluster, task, variables, is_server=is_server)
        if is_server:
            return _start_of_server(self._options, task, environment)
        arguments = [sys.executable, *self._command]
        return Start(task, arguments, environment, is_awaited=task.type in self._awaited)


def _start_of_server(options: argparse.Namespace, task: Task, environment: Mapping[str, str]) -> Start:
    has_snapshots = task.type == "ps" and options.snapshot_dir is not None
    command = [sys.executable, *SERVER_COMMAND, *(["--snapshot-dir", options.snapshot_dir] * has_snapshots)]
    may_restart = task.type == "worker" or options.replication > 1 or has_snapshots
    max_restarts = options.server_restarts if may_restart else 0
    return Start(task, command, environment, is_awaited=False, is_server=True, max_restarts=max_restarts)


def with_gpus(
    starts: Sequence[Start], renew: Renew | None, num_each: int, visible: Sequence[str] | None = None
) -> tuple[list[Start], Renew | None]:
    """Gives each task its own GPUs, now and at each renewal. Parameter servers see no GPU.

    Args:
      starts: The tasks.
      renew: The renewal.
      num_each: The number of GPUs of each task.
      visible: The GPUs of the job; None: all that are visible here.

    Raises:
      ClusterError: There are too few GPUs.
    """
    tasks = [start.task for start in starts if start.task.type != "ps"]
    gpus = gpus_of_tasks(visible_gpus(os.environ) if visible is None else visible, tasks, num_each)

    def restricted(starts: Sequence[Start]) -> list[Start]:
        return [
            dataclasses.replace(
                start, environment={**start.environment, GPUS_VARIABLE: gpus.get(start.task, "")}
            )
            for start in starts
        ]

    def renewed() -> tuple[Sequence[Start], Sequence[str]]:
        assert renew is not None
        new, notes = renew()
        return restricted(new), notes

    return restricted(starts), None if renew is None else renewed


def token_of_job() -> dict[str, str]:
    """Returns a token for the cluster in an environment variable, unless the user has set one."""
    has_token = TOKEN_VARIABLE in os.environ or TOKEN_FILE_VARIABLE in os.environ
    return {} if has_token else {TOKEN_VARIABLE: random_token()}


def status_at(address: str) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that make the chief serve the status at an address, and the notes to show."""
    return {STATUS_ADDRESS_VARIABLE: address}, [f"Status: http://{address}/ and replicax top {address}"]


def environment_of(
    options: argparse.Namespace,
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    more: Mapping[str, str],
    *,
    is_server: bool = False,
) -> dict[str, str]:
    """Returns all variables of a task; ``more`` has those that its cluster and the options do not say."""
    own = task_environment(
        cluster, task, os.environ, num_devices=options.devices_per_worker, is_server=is_server
    )
    if options.checkpoint_dir is not None:
        own[CHECKPOINT_DIR_VARIABLE] = str(options.checkpoint_dir.absolute())
    if options.replication > 1:
        own[REPLICATION_VARIABLE] = str(options.replication)
    return {**os.environ, "PYTHONUNBUFFERED": "1", **more, **own}
