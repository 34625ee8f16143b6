"""``replicax launch --groups``: the jobs of groups that train alone, and of the syncers through which they exchange."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from replicax._launch.backlog import ShownTask
from replicax._launch.display import TaskRow, open_display
from replicax._launch.display_of_job import DisplayOfJob
from replicax._launch.gpus import GPUS_VARIABLE, visible_gpus
from replicax._launch.side_by_side import run_side_by_side
from replicax._launch.standard_streams import UNREAD_EXIT_CODE
from replicax._launch.supervisor import Renew, Start, Supervisor, SupervisorOptions
from replicax._launch.tasks_here import TasksHere, environment_of, token_of_job, with_gpus
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.group_place import GROUP_VARIABLE, SYNCERS_VARIABLE
from replicax._src.cluster.machine_layout import (
    SERVER_COMMAND,
    STATUS_ADDRESS_VARIABLE,
    TASKS_ON_HOST_VARIABLE,
    free_ports,
)
from replicax._src.cluster.spec import Task

_HERE: Final = "127.0.0.1"
_BY_HAND: Final = (
    "--groups runs on this machine. Elsewhere set REPLICAX_GROUP and REPLICAX_SYNCERS for each process: the guides to Slurm and "
    "Kubernetes say how"
)
# Options that do not go with groups, each with what to do instead.
_REFUSED: Final = {
    "on": _BY_HAND,
    "hosts": _BY_HAND,
    "hosts_file": _BY_HAND,
    "task_index": _BY_HAND,
    "ps": "the servers of groups are syncers: --syncers",
    "evaluator": "evaluate in the script, with the outer parameters",
    "chief": "worker 0 of each group is its chief",
    "script_in": "all workers of all groups run the script",
    "replication": "a syncer that dies comes back from its snapshot: --checkpoint-dir",
}


def check_groups(options: argparse.Namespace) -> None:
    """Ends this process with a message if the options for groups make no sense."""
    parser: argparse.ArgumentParser = options.parser
    if options.groups is None:
        if options.syncers is not None:
            parser.error("--syncers needs --groups: syncers are the servers through which groups exchange")
        return
    for name, instead in _REFUSED.items():
        if getattr(options, name) != parser.get_default(name):
            option = (
                "--no-chief" if options.chief is False and name == "chief" else "--" + name.replace("_", "-")
            )
            parser.error(f"{option} does not go with --groups: {instead}")
    if options.workers in ("auto", 0):
        parser.error(
            f"--workers {options.workers} does not go with --groups: give the number of workers of each group, at least 1"
        )


def run_groups(options: argparse.Namespace, command: Sequence[str], notes: Sequence[str]) -> int:
    """Runs the groups and their syncers; returns the exit code.

    Raises:
      ClusterError: The options do not describe a cluster, or there are too few GPUs.
      ProcessStartError: Too few ports are free, or a log cannot be opened.
    """
    jobs = _jobs(options, command)
    with open_display([name for job in jobs for name in job.names.values()], options) as display:
        for note in notes:
            display.note(note)
        table: dict[str, Sequence[TaskRow]] = {job.name: () for job in jobs}
        supervisors: dict[str, Supervisor] = {}
        for job in jobs:
            own = DisplayOfJob(display, job.name, job.names, table)
            for note in job.notes:
                own.note(note)
            supervisors[job.name] = Supervisor(job.starts, own, job.options, job.renew)
        groups = {job.name: supervisors.pop(job.name) for job in jobs if not job.is_syncer}
        code = run_side_by_side(groups, supervisors, display.note)
    return 1 if display.has_full_disk and code in (0, UNREAD_EXIT_CODE) else code


@dataclass(frozen=True)
class _Job:
    """A job to run, and what the display calls its tasks."""

    name: str
    starts: Sequence[Start]
    names: Mapping[ShownTask, str]
    options: SupervisorOptions
    renew: Renew | None = None
    notes: Sequence[str] = ()
    is_syncer: bool = False


def _jobs(options: argparse.Namespace, command: Sequence[str]) -> list[_Job]:
    """Returns all groups, and then all syncers."""
    num_groups, num_syncers = options.groups, options.syncers or 1
    num_workers = options.workers or 1
    ports_each = num_workers + 1  # one for the status
    ports = free_ports(num_groups * ports_each + num_syncers)
    syncers = [f"{_HERE}:{port}" for port in ports[num_groups * ports_each :]]
    num_gpus = num_workers * (options.gpus_per_worker or 0)
    gpus = _gpus_of_groups(num_groups, num_gpus) if num_gpus else []
    told = {
        **token_of_job(),
        SYNCERS_VARIABLE: ",".join(syncers),
        TASKS_ON_HOST_VARIABLE: str(num_groups * num_workers + num_syncers),
    }
    jobs = [
        _group(
            options,
            command,
            index,
            {**told, GROUP_VARIABLE: f"{index}/{num_groups}"},
            ports[index * ports_each : (index + 1) * ports_each],
            gpus[index * num_gpus : (index + 1) * num_gpus],
        )
        for index in range(num_groups)
    ]
    return [*jobs, *(_syncer(options, index, syncers, told) for index in range(num_syncers))]


def _group(
    options: argparse.Namespace,
    command: Sequence[str],
    index: int,
    told: dict[str, str],
    ports: Sequence[int],
    gpus: Sequence[str],
) -> _Job:
    name = f"group {index}"
    folder = None if options.checkpoint_dir is None else options.checkpoint_dir / f"group-{index}"
    address = None if index else os.environ.get(STATUS_ADDRESS_VARIABLE)
    if index and not options.status:
        told = {**told, STATUS_ADDRESS_VARIABLE: ""}  # one address has room for one group: the first
    here = TasksHere(
        argparse.Namespace(**{**vars(options), "checkpoint_dir": folder}),
        command,
        told,
        ports=ports,
        status_address=address,
    )
    (starts, notes), renew = here.starts(), here.starts
    if gpus:
        starts, renew = with_gpus(starts, renew, options.gpus_per_worker, gpus)
    tasks = [start.task for start in starts]
    names: dict[ShownTask, str] = {task: f"{name} {task}" if len(tasks) > 1 else name for task in tasks}
    how = SupervisorOptions(options.max_restarts, options.grace, checkpoint_dir=folder)
    return _Job(name, starts, names, how, renew, notes)


def _syncer(
    options: argparse.Namespace, index: int, addresses: Sequence[str], told: Mapping[str, str]
) -> _Job:
    """Returns a job of one parameter server. It keeps its address when it starts again."""
    name, task = f"syncer {index}", Task("ps", index)
    folder = None if options.checkpoint_dir is None else options.checkpoint_dir.absolute() / "syncers"
    snapshots = folder if options.snapshot_dir is None else options.snapshot_dir
    command = [sys.executable, *SERVER_COMMAND]
    command += [] if snapshots is None else ["--snapshot-dir", str(snapshots)]
    cpu_only = {"JAX_PLATFORMS": "cpu", GPUS_VARIABLE: "", STATUS_ADDRESS_VARIABLE: ""}
    own = argparse.Namespace(**{**vars(options), "checkpoint_dir": folder})
    environment = environment_of(own, {"ps": addresses}, task, {**told, **cpu_only}, is_server=True)
    start = Start(
        task, command, environment, is_awaited=False, is_server=True, max_restarts=options.server_restarts
    )
    return _Job(name, [start], {task: name}, SupervisorOptions(grace_s=options.grace), is_syncer=True)


def _gpus_of_groups(num_groups: int, num_each: int) -> list[str]:
    gpus = visible_gpus(os.environ)
    if len(gpus) < num_groups * num_each:
        raise ClusterError(
            f"--groups {num_groups} with {num_each} GPU(s) each needs {num_groups * num_each} GPUs, and there are {len(gpus)}. Start "
            "fewer groups, give each worker fewer, or leave --gpus-per-worker out and set JAX_PLATFORMS=cpu to train on CPUs."
        )
    return gpus
