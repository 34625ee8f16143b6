"""``BatchJob``: the batch script of a job on Slurm. No processes, no files."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replicax._launch.restarts import SHORT_PREEMPTIONS, SHORT_RUN_S
from replicax._src.cluster.errors import ClusterError
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE

# The tasks get SIGTERM this long before the job's time limit; Slurm sends it up to 60 s earlier.
SIGNAL_AHEAD_S: Final = 120
_LEAST_TIME_S: Final = 300

_TOKEN: Final = """\
# The secret that the tasks share.
[ -n "$REPLICAX_TOKEN$REPLICAX_TOKEN_FILE" ] || export REPLICAX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
# srun does not take this from the job by itself since Slurm 22.05.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
"""
_TRAP: Final = """\
trap : TERM  # Slurm signals this shell too. The tasks save, and this shell decides about the restart.
"""
_ONCE: Final = """\
export REPLICAX_RESTART_COUNT=${{SLURM_RESTART_COUNT:-0}}
exec {step}
"""
_RESTARTING: Final = """\
max_restarts={max_restarts}
say() {{ echo "replicax: $*"; }}
ask() {{ squeue --noheader --jobs="$SLURM_JOB_ID" --format="$1"; }}
newest() {{ {python} -m replicax._launch.newest_checkpoint "$REPLICAX_CHECKPOINT_DIR" || echo -1; }}  # -1: there is none

# Slurm keeps these with the job, as its comment: the restarts that counted, and those without a requeue.
read -r mark counted here <<<"$(ask %k)"
[ "$mark" = replicax ] || counted=0 here=0
in_vain=0  # runs in a row without progress

while :; do
    export REPLICAX_RESTART_COUNT=$((${{SLURM_RESTART_COUNT:-0}} + here))
    begun_from=$(newest) began=$SECONDS
    {step} &
    step=$!
    while wait $step; code=$?; kill -0 $step 2>/dev/null; do :; done  # a signal ends `wait`, not the step
    ran=$((SECONDS - began))
    [ $code = 0 ] && exit 0
    # A job that was cancelled, or that Slurm itself requeues, is not RUNNING after a moment.
    sleep 2
    case "$(ask %T)" in RUNNING | "") ;; *) exit $code ;; esac

    # Progress is a new checkpoint. {preempted}: the tasks were told to end and have saved, which counts only after a short run.
    is_new=$(($(newest) > begun_from))
    is_short=$((ran < {short_s} && ! is_new)) is_preempted=$((code == {preempted}))
    most=$((max_restarts == 0 && is_preempted ? {short_preemptions} : max_restarts))
    in_vain=$((is_new || (is_preempted && ! is_short && ${{#REPLICAX_CHECKPOINT_DIR}} == 0) ? 0 : in_vain + 1))
    wait_s=$((in_vain == 0 ? 0 : in_vain > 5 ? 30 : 1 << (in_vain - 1)))
    if ((is_preempted && ! is_short)); then
        why="they have saved, so this is not counted"
    elif ((is_new && max_restarts)); then
        why="there is a new checkpoint; this is not counted"
    elif ((counted < most)); then
        counted=$((counted + 1))
        why="restart $counted of $most"
    else
        say "The tasks ended with exit code $code. No restarts are left."
        exit $code
    fi
    # 143: SIGTERM came before Python listened. These nodes are to be left, so the job goes back to the queue.
    if [ $code = {preempted} ] || [ $code = 143 ]; then
        say "The tasks ended with exit code $code. Requeueing the job: $why."
        scontrol update JobId="$SLURM_JOB_ID" Comment="replicax $counted $here"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this shell
        exit $code
    fi
    say "The tasks ended with exit code $code. Starting them again: $why."
    sleep $wait_s
    here=$((here + 1))
    scontrol update JobId="$SLURM_JOB_ID" Comment="replicax $counted $here"
done
"""


@dataclass(frozen=True)
class BatchJob:
    """A job for ``sbatch``.

    Attributes:
      command: The arguments of Python: the script and its arguments, or ``-m`` and a module.
      python: The path of Python on the nodes.
      nodes: The number of nodes.
      tasks_per_node: The number of tasks, which are workers, on each node.
      gpus_per_task: The number of GPUs of each task; None to ask for no GPUs.
      time: The time limit, as Slurm writes it; None for that of the partition.
      partition: The partition; None for the default one.
      options: More options of ``sbatch``, such as ``account=me``. They have priority.
      environment: Variables that the script sets.
      checkpoint_dir: See ``replicax launch --checkpoint-dir``.
      max_restarts: See ``replicax launch --max-restarts``.

    Raises:
      ClusterError: The time limit is malformed, or too short for a signal before its end; or an option of ``sbatch``
        cannot be passed on.
    """

    command: Sequence[str]
    python: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        for option in self.options:
            given = option.removeprefix("--")
            if not re.fullmatch(r'[A-Za-z][^"\r\n]*', given):
                raise ClusterError(
                    f"--sbatch {option!r} must be the long name of an option, such as partition=gpu instead of -pgpu, without "
                    'the character " and line breaks.'
                )
            if "array".startswith(re.split(r"[=\s]", given)[0]):
                raise ClusterError(
                    f"--sbatch {option!r}: the launcher follows one job. Print the script with --dry-run, and submit it "
                    "yourself with sbatch --array."
                )
        if self.time is not None and limit_s(self.time) < _LEAST_TIME_S and self.may_restart:
            raise ClusterError(
                f"--time {self.time} is {limit_s(self.time)} s. The tasks are told to save {SIGNAL_AHEAD_S} s before the time "
                f"limit, and Slurm may tell them a minute earlier: give at least {_LEAST_TIME_S // 60} minutes, or leave out "
                "--max-restarts and --checkpoint-dir."
            )

    @property
    def may_restart(self) -> bool:
        """True if the job starts again after a preemption, as with ``replicax launch`` on one machine."""
        return bool(self.max_restarts or self.checkpoint_dir)

    @property
    def name(self) -> str:
        """The name of the script or module."""
        text = self.command[1] if self.command[0] == "-m" else Path(self.command[0]).stem
        return re.sub(r"[^\w.-]", "_", text)

    def text(self) -> str:
        """Returns the script."""
        directives = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            # Not --gpus-per-task: tasks of a node that do not see each other's GPUs cannot copy between them.
            "gpus-per-node": None if self.gpus_per_task is None else self.gpus_per_task * self.tasks_per_node,
            "time": self.time,
            "partition": self.partition,
            "output": f"{self.name}-%j.txt",
            "open-mode": "append",
        }
        given = [f"{name}={value}" for name, value in directives.items() if value is not None]
        given += ["requeue", f"signal=TERM@{SIGNAL_AHEAD_S}"] if self.may_restart else ["no-requeue"]
        given += [option.removeprefix("--") for option in self.options]
        variables = {"PYTHONUNBUFFERED": "1", **self.environment}
        if self.checkpoint_dir is not None:
            variables["REPLICAX_CHECKPOINT_DIR"] = str(self.checkpoint_dir.absolute())
        step = "srun --label --kill-on-bad-exit=0 --distribution=block " + shlex.join(
            [self.python, *self.command]
        )
        body = _RESTARTING if self.may_restart else _ONCE
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {_quoted(option)}" for option in given),
                "",
                *([_TRAP] if self.may_restart else []),
                *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
                _TOKEN
                + body.format(
                    step=step,
                    python=shlex.quote(self.python),
                    max_restarts=self.max_restarts,
                    preempted=PREEMPTED_EXIT_CODE,
                    short_s=f"{SHORT_RUN_S:g}",
                    short_preemptions=SHORT_PREEMPTIONS,
                ),
            ]
        )


def limit_s(text: str) -> float:
    """Returns a time limit of Slurm in seconds; 0 and UNLIMITED are no limit.

    Raises:
      ClusterError: It is none of M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED.

    >>> [limit_s(text) for text in ("30", "1:30", "2:00:00", "1-12", "1-00:30", "0")]
    [1800, 90, 7200, 129600, 88200, inf]
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ClusterError(f"--time {text!r} must be minutes, H:M:S, D-H:M:S or UNLIMITED, as in Slurm.")
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)
    hours, minutes, seconds = [*given, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"--{name}{equals}" + (f'"{value}"' if re.search(r"\s", value) else value)
