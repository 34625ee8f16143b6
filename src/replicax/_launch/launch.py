"""``replicax launch``: reads the options and builds the tasks, which ``supervisor.py`` runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from replicax._launch import on_kubernetes, on_slurm
from replicax._launch.display import Display
from replicax._launch.gpus import GPUS_VARIABLE, gpus_here, gpus_of_tasks, visible_gpus
from replicax._launch.hosts import DEFAULT_PORT, addresses_of, lines_to_paste, read_hosts
from replicax._launch.option_values import count, count_or_auto, port, positive, seconds
from replicax._launch.python_arguments import add_script, check_keras, python_arguments
from replicax._launch.standard_streams import UNREAD_EXIT_CODE
from replicax._launch.supervisor import Renew, Start, Supervisor, SupervisorOptions
from replicax._src.cluster.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, random_token
from replicax._src.cluster.errors import ClusterError, ClusterManagerError
from replicax._src.cluster.machine_layout import (
    CHECKPOINT_DIR_VARIABLE,
    REPLICATION_VARIABLE,
    SCRIPT_IN,
    SERVER_COMMAND,
    STATUS_ADDRESS_VARIABLE,
    ClusterLayout,
    device_environment,
    free_ports,
    num_usable_cores,
    task_environment,
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
"""
_EPILOG: Final = """\
several hosts, one worker on each:
  replicax launch --hosts h0,h1 train.py                 prints the command to paste on each host
  replicax launch --hosts h0,h1 --task-index 1 train.py  runs worker 1 here; give each host its own index
  The hosts must reach each other at --port. A host may have a port of its own: h0:2222.

on Slurm:
  replicax launch --on slurm --nodes 2 train.py          submits a job, prints its output and returns its exit code. Ctrl-C asks
                                                         whether to cancel it. --dry-run prints the batch script

environment of the tasks:
  TF_CONFIG               the cluster, and which task this is
  REPLICAX_TOKEN          the token of the job; random unless you set it. With --hosts set the same one on all hosts
  REPLICAX_RESTART_COUNT  the number of restarts of the task so far
  REPLICAX_CHECKPOINT_DIR the directory given to --checkpoint-dir
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
            here = _TasksHere(options, parser, command)
            (starts, status_notes), renew = here.starts(), here.starts
            notes += status_notes
        if options.gpus_per_worker is not None:
            starts, renew = _with_gpus(starts, renew, options.gpus_per_worker)
        if options.log_dir is not None:
            _make_folder(options.log_dir, parser)
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


def _make_folder(folder: Path, parser: argparse.ArgumentParser) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--log-dir {folder} cannot be made: {error.strerror}")


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


@final
class _TasksHere:
    """The tasks of a job on this machine. Each start gets ports that are free then."""

    def __init__(self, options: argparse.Namespace, parser: argparse.ArgumentParser, command: Sequence[str]):
        has_chief = bool(options.ps) if options.chief is None else options.chief
        num_workers = options.workers if options.workers is not None else 1
        self._options, self._command = options, command
        self._layout = ClusterLayout(num_workers, has_chief, options.ps, options.evaluator)
        self._servers = self._layout.servers(options.script_in)
        has_coordinator = bool(options.ps) and has_chief and options.script_in != "workers"
        self._awaited = ("chief",) if has_coordinator else ("chief", "worker")
        if options.status and options.ps and not has_coordinator:
            parser.error(
                "--status with parameter servers needs a coordinator: a chief that runs the script. Leave out --no-chief "
                "and --script-in workers"
            )
        self._token = _token(os.environ)
        self._ports: list[int] = []
        self._shown: dict[str, str] = {}

    def starts(self) -> tuple[list[Start], list[str]]:
        """Returns all tasks, with ports that are free now, and the notes to show. A port of the last start stays the
        same while it is free, because somebody may watch the status.

        Raises:
          ProcessStartError: Too few ports are free.
        """
        num_tasks = len(self._layout.tasks_with_address)
        self._ports = free_ports(num_tasks + 1, self._ports)
        shown, notes = _status(self._options, self._ports[num_tasks])
        notes = notes if shown != self._shown else []
        self._shown = shown
        cluster = self._layout.on_this_machine(self._ports[:num_tasks])
        return [self._start(task, cluster) for task in self._layout.tasks], notes

    def _start(self, task: Task, cluster: Mapping[str, Sequence[str]]) -> Start:
        # The task chief, or worker 0. Another worker becomes the chief if the job goes on after this one's death.
        may_serve = task == self._layout.tasks[0] or (not self._options.ps and task.type == "worker")
        variables = (
            self._token
            | self._layout.environment_for(task, self._options.script_in)
            | (self._shown if may_serve else {})
        )
        is_server = task in self._servers
        environment = _environment(self._options, cluster, task, variables, is_server=is_server)
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


def _with_gpus(
    starts: Sequence[Start], renew: Renew | None, num_each: int
) -> tuple[list[Start], Renew | None]:
    """Gives each task its own GPUs, now and at each renewal. Parameter servers see no GPU."""
    tasks = [start.task for start in starts if start.task.type != "ps"]
    gpus = gpus_of_tasks(visible_gpus(os.environ), tasks, num_each)

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


def _token(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a token for the cluster in an environment variable, unless the user has set one."""
    has_token = TOKEN_VARIABLE in environ or TOKEN_FILE_VARIABLE in environ
    return {} if has_token else {TOKEN_VARIABLE: random_token()}


def _status(options: argparse.Namespace, port: int | None = None) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that make the chief serve the status, if requested, and the notes to show.

    Args:
      options: The options.
      port: The port, unless the user has chosen an address; None for any.
    """
    if not options.status:
        return {}, []
    address = os.environ.get(STATUS_ADDRESS_VARIABLE) or f"127.0.0.1:{port or free_ports(1)[0]}"
    return {STATUS_ADDRESS_VARIABLE: address}, [f"Status: http://{address}/ and replicax top {address}"]


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
    return Start(task, [sys.executable, *command], _environment(options, {"worker": hosts}, task, told))


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
    told = {**environment, **_token(os.environ), **_status(options)[0]}
    return lines_to_paste(hosts, ["python3", *command], told)


def _environment(
    options: argparse.Namespace,
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    told: Mapping[str, str],
    *,
    is_server: bool = False,
) -> dict[str, str]:
    """Returns all variables of a task; ``environment_for`` has those of this task only."""
    own = task_environment(
        cluster, task, os.environ, num_devices=options.devices_per_worker, is_server=is_server
    )
    if options.checkpoint_dir is not None:
        own[CHECKPOINT_DIR_VARIABLE] = str(options.checkpoint_dir.absolute())
    if options.replication > 1:
        own[REPLICATION_VARIABLE] = str(options.replication)
    return {**os.environ, "PYTHONUNBUFFERED": "1", **told, **own}


def _run_tasks(
    starts: Sequence[Start], renew: Renew | None, options: argparse.Namespace, notes: Sequence[str]
) -> int:
    tasks = [start.task for start in starts]
    how = SupervisorOptions(
        options.max_restarts, options.grace, options.evaluator_timeout, options.checkpoint_dir
    )
    try:
        display = Display(
            tasks, sys.stdout, sys.stderr, os.environ, is_plain=options.plain, log_dir=options.log_dir
        )
    except OSError as error:
        raise ProcessStartError(
            f"The log file {error.filename} cannot be opened: {error.strerror}. Choose another --log-dir."
        ) from None
    with contextlib.closing(display):
        for note in notes:
            display.note(note)
        code = Supervisor(starts, display, how, renew).run()
    return 1 if display.has_full_disk and code in (0, UNREAD_EXIT_CODE) else code
