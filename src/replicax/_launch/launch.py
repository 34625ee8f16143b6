"""``replicax launch``: reads the options and builds the tasks, which ``supervisor.py`` runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from replicax._launch import on_kubernetes, on_slurm
from replicax._launch.display import open_display
from replicax._launch.gpus import GPUS_VARIABLE, gpus_here
from replicax._launch.hosts import DEFAULT_PORT, addresses_of, lines_to_paste, read_hosts
from replicax._launch.launched_groups import check_groups, run_groups
from replicax._launch.option_values import count, count_or_auto, port, positive, seconds
from replicax._launch.python_arguments import add_script, check_keras, python_arguments
from replicax._launch.standard_streams import UNREAD_EXIT_CODE
from replicax._launch.supervisor import Renew, Start, Supervisor, SupervisorOptions
from replicax._launch.tasks_here import TasksHere, environment_of, status_at, token_of_job, with_gpus
from replicax._src.cluster.errors import ClusterError, ClusterManagerError
from replicax._src.cluster.machine_layout import (
    CHECKPOINT_DIR_VARIABLE,
    SCRIPT_IN,
    STATUS_ADDRESS_VARIABLE,
    device_environment,
    free_ports,
    num_usable_cores,
)
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.processes import ProcessStartError
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.vocabulary.errors import MissingExtraError

_DESCRIPTION: Final = """\
Runs a script as the tasks of a cluster on this machine. Each task gets TF_CONFIG with free ports, and its output is printed
with the name of the task in front. All tasks end when the launcher ends, for whatever reason. While nobody reads the output,
running tasks wait, and those that are ending do not. After the end of the job the last lines have 5 s to be read.

The exit code is that of the first task that fails, 0 if none does, 130 after Ctrl-C and 143 after SIGTERM. When a task fails,
the others have the grace time to end by themselves. Then they get SIGTERM, and after the grace time again SIGKILL. The job is
finished when the chief and all workers have exited.

Exit code 42 means that a task was told to end and has saved, as rx.experimental.PreemptionCheckpointHandler does at SIGTERM.
With --max-restarts or --checkpoint-dir all tasks are then started again, and the restart is not counted, unless the tasks ran
for less than 30 s without a new checkpoint. Before a restart without a new checkpoint the launcher waits: 1, 2, 4, ... 30 s.

With fault_tolerance=True the others continue when a worker dies. With --max-restarts the dead one is then started again,
alone, and takes its place where the program restores its checkpoint. The others do not wait for it.

A cluster with parameter servers also has a chief, unless --no-chief is given. The chief is the coordinator and runs the
script; the workers and parameter servers run `replicax server`. A worker that dies is restarted. The job is finished when the
chief has exited. All tasks of a job share a random token and refuse connections without it; with --hosts and --task-index set REPLICAX_TOKEN.

With --groups N there are N jobs, numbered from 0, that train alone and exchange what they learned through --syncers: see
rx.experimental.LocalUpdates. Each group has a cluster of its own, its own restarts (--max-restarts), its own folder in
--checkpoint-dir (DIR/group-0) and its own logs. A group that fails for good ends no other one. Syncers are parameter servers
on the CPU. A syncer that dies is restarted at its address, from its snapshot in DIR/syncers, at most --server-restarts times.
They end when all groups have ended. The exit code is that of the group that failed first, and the last line names all that did.
"""
_EPILOG: Final = """\
several hosts, one worker on each:
  replicax launch --hosts h0,h1 train.py                 prints the command to paste on each host
  replicax launch --hosts h0,h1 --task-index 1 train.py  runs worker 1 here; give each host its own index
  The hosts must reach each other at --port. A host may have a port of its own: h0:2222.

groups that train alone:
  replicax launch --groups 4 --workers 2 train.py        starts four jobs of two workers each, and one syncer

on Slurm:
  replicax launch --on slurm --nodes 2 train.py          submits a job, prints its output and returns its exit code. Ctrl-C asks
                                                         whether to cancel it. --dry-run prints the batch script

environment of the tasks:
  TF_CONFIG               the cluster, and which task this is
  REPLICAX_TOKEN          the token of the job; random unless you set it. With --hosts set the same one on all hosts
  REPLICAX_RESTART_COUNT  the number of restarts of the task so far
  REPLICAX_CHECKPOINT_DIR the directory given to --checkpoint-dir; with --groups the folder of the group in it
  REPLICAX_GROUP          with --groups: the number of the group, from 0, and the number of groups: 0/4
  REPLICAX_SYNCERS        with --groups: the addresses of the syncers, with commas between them
  REPLICAX_STATUS_FILE    a file for the table: a task may write {"step": 12, "time": time.time(), "state": "training"}.
                          Otherwise the step is the number of programs that MultiWorkerMirroredStrategy has run
"""


# Each has add_options(parser), the names of its options, and launch(options, command), which returns the exit code.
_ENGINES: Final = {"slurm": on_slurm, "k8s": on_kubernetes}


def add_parser(subparsers: Any) -> None:
    """Adds the command ``launch``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "launch",
        help="run a script as the tasks of a cluster, on this machine or on a scheduler",
        usage="%(prog)s [options] (script.py | -m module) [arguments ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    who = parser.add_argument_group("tasks")
    who.add_argument(
        "--workers",
        type=count_or_auto,
        metavar="N",
        help="number of workers (1), or auto: one for each GPU (or for each --gpus-per-worker GPUs) of this machine, and "
        "without GPUs one for each CPU core (or for each --devices-per-worker cores)",
    )
    who.add_argument("--chief", action=argparse.BooleanOptionalAction, help="add a task of type chief")
    who.add_argument("--ps", type=count, default=0, metavar="N", help="number of parameter servers (0)")
    who.add_argument(
        "--groups",
        type=positive,
        metavar="N",
        help="number of groups (none), each a job of its own with --workers workers, for rx.experimental.LocalUpdates: groups train "
        "alone and exchange through --syncers",
    )
    who.add_argument(
        "--syncers",
        type=positive,
        metavar="N",
        help="number of servers through which --groups exchange (1). They run on the CPU, and need none of your code",
    )
    who.add_argument("--evaluator", action="store_true", help="add a task of type evaluator")
    who.add_argument(
        "--script-in",
        choices=SCRIPT_IN,
        help="which tasks run the script when there are parameter servers. chief: the coordinator only; workers: the workers "
        "and the chief, each on its own; all: every task, as in TensorFlow, where the script creates a Server in workers "
        "and parameter servers (chief; with --no-chief: workers)",
    )
    who.add_argument(
        "--devices-per-worker",
        type=positive,
        metavar="N",
        help="give each task except parameter servers N virtual CPU devices; sets JAX_PLATFORMS=cpu unless JAX_PLATFORMS is set",
    )
    who.add_argument(
        "--gpus-per-worker",
        type=positive,
        metavar="N",
        help="give each task except parameter servers N GPUs of its own, by setting CUDA_VISIBLE_DEVICES for it; they are taken "
        "from this machine's GPUs, or from your CUDA_VISIBLE_DEVICES",
    )
    how = parser.add_argument_group("failures and the end")
    how.add_argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="N",
        help="after a failure restart all tasks, at most N times (0: end the job); with --checkpoint-dir only restarts without a "
        "new checkpoint count. A dead worker that the others continue without (fault_tolerance=True) is restarted alone",
    )
    how.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help=f"where the script saves; it reads the path from {CHECKPOINT_DIR_VARIABLE}. Restarts after a failure need "
        "--max-restarts too; one that follows a new checkpoint of rx.Checkpoint is then not counted. Compiled programs are kept "
        "in DIR, so that a restart does not compile them again",
    )
    how.add_argument(
        "--server-restarts",
        type=count,
        default=3,
        metavar="N",
        help="restart a worker that runs `replicax server` when it dies, each at most N times (3), not counting restarts after a "
        "new checkpoint; with --replication 2 or --snapshot-dir, restart parameter servers too",
    )
    how.add_argument(
        "--replication",
        type=int,
        choices=(1, 2),
        default=1,
        help="number of copies of each variable, on as many parameter servers, unless the strategy sets it (1); with 2 copies and "
        "--ps 2 or more, one server may die and nothing is lost",
    )
    how.add_argument(
        "--snapshot-dir",
        metavar="DIR",
        help="where parameter servers save their values, to restore them when they are restarted",
    )
    how.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        metavar="S",
        help="the grace time after a failure, in seconds (10)",
    )
    how.add_argument(
        "--evaluator-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="end the evaluator S seconds after the training (600)",
    )
    hosts = parser.add_argument_group("several hosts")
    either = hosts.add_mutually_exclusive_group()
    either.add_argument("--hosts", metavar="A,B", help="run one worker on each of these hosts")
    either.add_argument(
        "--hosts-file", type=Path, metavar="FILE", help="the same, from a file with one host per line"
    )
    hosts.add_argument(
        "--port", type=port, default=DEFAULT_PORT, help=f"the port of the workers ({DEFAULT_PORT})"
    )
    hosts.add_argument("--task-index", type=count, metavar="I", help="run worker I, the one of this host")
    parser.add_argument(
        "--status",
        action="store_true",
        help="let the chief (worker 0 without one) serve the state of all tasks, for browsers and `replicax top`; the address is "
        f"printed, and {STATUS_ADDRESS_VARIABLE} chooses it",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write the output of each task to a file of its own: DIR/worker-0.log; restarts append",
    )
    parser.add_argument(
        "--plain", action="store_true", help="print plain lines without table and colours, even on a terminal"
    )
    where = parser.add_argument_group("a scheduler")
    where.add_argument(
        "--on", choices=tuple(_ENGINES), help="submit the job to this scheduler instead of running it here"
    )
    where.add_argument("--dry-run", action="store_true", help="with --on, print what would be submitted")
    for engine in _ENGINES.values():
        engine.add_options(parser)
    add_script(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Ends this process with code 2 if the options are wrong."""
    parser: argparse.ArgumentParser = options.parser
    command = python_arguments(options, parser, is_here=options.on != "k8s")  # an image has the script
    notes = [] if options.on == "k8s" else check_keras(command, parser)
    check_groups(options)
    _check_options(options, parser)
    if options.gpus_per_worker is not None and options.devices_per_worker is not None:
        parser.error(
            "--gpus-per-worker is for GPUs, and --devices-per-worker for virtual CPU devices: choose one"
        )
    try:
        if options.on is not None:
            for note in notes:
                print(note, file=sys.stderr)
            return _ENGINES[options.on].launch(options, command)
        if options.groups is not None:
            _make_log_dir(options)
            return run_groups(options, command, notes)
        hosts = _hosts(options, parser)
        if hosts is not None:
            if options.task_index is None:
                print("\n".join(_lines_to_paste(options, parser, hosts, command)))
                return 0
            shown, status_notes = _status(options)
            starts, renew = [_start_on_host(options, parser, hosts, command, shown)], None
            notes += status_notes if options.task_index == 0 else []
        else:
            notes += _choose_num_workers(options, parser)
            address = os.environ.get(STATUS_ADDRESS_VARIABLE)
            here = TasksHere(options, command, token_of_job(), status_address=address)
            (starts, status_notes), renew = here.starts(), here.starts
            notes += status_notes
        if options.gpus_per_worker is not None:
            starts, renew = with_gpus(starts, renew, options.gpus_per_worker)
        _make_log_dir(options)
        return _run_tasks(starts, renew, options, notes)
    except ClusterError as error:
        parser.error(str(error))
    except (ProcessStartError, ClusterManagerError, MissingExtraError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses options that have no meaning where the job runs."""
    own = {name: engine for engine, module in _ENGINES.items() for name in module.OWN_OPTIONS}
    given = {name for name, value in vars(options).items() if value != parser.get_default(name)}
    given -= {"on", "dry_run", "plain", "script", "module"}
    if options.on is None:
        if options.dry_run:
            parser.error("--dry-run needs --on")
        wrong = sorted(given & own.keys())
        hint = f"needs --on {own[wrong[0]]}" if wrong else ""
    else:
        engine = _ENGINES[options.on]
        wrong = sorted(given - engine.OWN_OPTIONS - engine.SHARED_OPTIONS)
        known = ", ".join(_option(name) for name in sorted(engine.OWN_OPTIONS | engine.SHARED_OPTIONS))
        hint = f"has no meaning with --on {options.on}, which takes {known}"
        if "status" in wrong:
            wrong, hint = ["status"], f"has no meaning with --on {options.on}. Instead {engine.HOW_TO_WATCH}"
    if wrong:
        parser.error(f"{_option(wrong[0])} {hint}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choose_num_workers(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Replaces ``--workers auto`` with a number. Returns a note to show about it."""
    if options.workers != "auto":
        return []
    num_others = sum([bool(options.ps) if options.chief is None else options.chief, options.evaluator])
    is_cpu = options.devices_per_worker is not None or os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    gpus = [] if is_cpu else gpus_here(os.environ)
    if gpus:
        options.gpus_per_worker = options.gpus_per_worker or 1
        options.workers = len(gpus) // options.gpus_per_worker - num_others
        why = f"{len(gpus)} GPU(s), {options.gpus_per_worker} for each task"
        if options.workers < 1:
            parser.error(f"--workers auto: there are {why}, which leaves none for a worker")
    else:
        num_cores = num_usable_cores()
        options.workers = max(1, num_cores // (options.devices_per_worker or 1) - num_others)
        why = f"{num_cores} CPU core(s)"
    return [f"--workers auto: {options.workers} worker(s); there are {why}."]


def _make_log_dir(options: argparse.Namespace) -> None:
    try:
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.parser.error(f"--log-dir {options.log_dir} cannot be made: {error.strerror}")


def _hosts(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str] | None:
    """Returns the addresses of the workers on several hosts; None without such hosts."""
    if options.hosts is None and options.hosts_file is None:
        if options.task_index is not None:
            parser.error("--task-index needs --hosts or --hosts-file")
        return None
    if options.workers is not None or options.ps or options.evaluator or options.chief or options.script_in:
        parser.error(
            "with --hosts there is one worker on each host, and no other task: --workers, --chief, --ps, --evaluator "
            "and --script-in do not go with it. For other clusters set TF_CONFIG on each host"
        )
    hosts = options.hosts.split(",") if options.hosts is not None else []
    if options.hosts_file is not None:
        try:
            hosts = read_hosts(options.hosts_file)
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--hosts-file cannot be read: {error}")
    if not hosts:
        parser.error("there are no hosts in --hosts-file")
    addresses = addresses_of(hosts, options.port)
    Membership(ClusterSpec({"worker": addresses}, source="--hosts"), Task("worker", 0))
    return addresses


def _status(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that make the chief serve the status, if requested, and the notes to show."""
    if not options.status:
        return {}, []
    return status_at(os.environ.get(STATUS_ADDRESS_VARIABLE) or f"127.0.0.1:{free_ports(1)[0]}")


def _start_on_host(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    hosts: Sequence[str],
    command: Sequence[str],
    told: Mapping[str, str],
) -> Start:
    if options.task_index >= len(hosts):
        parser.error(f"--task-index {options.task_index}: there are {len(hosts)} hosts, numbered from 0")
    task = Task("worker", options.task_index)
    return Start(task, [sys.executable, *command], environment_of(options, {"worker": hosts}, task, told))


def _lines_to_paste(
    options: argparse.Namespace, parser: argparse.ArgumentParser, hosts: Sequence[str], command: Sequence[str]
) -> list[str]:
    if options.max_restarts:
        parser.error(
            "--max-restarts needs --task-index with --hosts: the lines to paste start python without this launcher. Give "
            "each host replicax launch --hosts … --task-index I"
        )
    num_devices = options.devices_per_worker
    environment = {} if num_devices is None else device_environment(num_devices, {})
    if options.gpus_per_worker is not None:
        environment[GPUS_VARIABLE] = ",".join(map(str, range(options.gpus_per_worker)))
    told = {**environment, **token_of_job(), **_status(options)[0]}
    return lines_to_paste(hosts, ["python3", *command], told)


def _run_tasks(
    starts: Sequence[Start], renew: Renew | None, options: argparse.Namespace, notes: Sequence[str]
) -> int:
    tasks = [start.task for start in starts]
    how = SupervisorOptions(
        options.max_restarts, options.grace, options.evaluator_timeout, options.checkpoint_dir
    )
    with open_display(tasks, options) as display:
        for note in notes:
            display.note(note)
        code = Supervisor(starts, display, how, renew).run()
    return 1 if display.has_full_disk and code in (0, UNREAD_EXIT_CODE) else code
