"""``replicax launch --on slurm``: submits a batch script, and follows the job until it ends."""

from __future__ import annotations

import argparse
import codecs
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from replicax._launch.batch_script import BatchJob
from replicax._launch.option_values import positive
from replicax._launch.supervisor import NOISE
from replicax._src.cluster.machine_layout import device_environment
from replicax._src.cluster.processes import ProcessStartError

OWN_OPTIONS: Final = frozenset({"nodes", "tasks_per_node", "time", "partition", "sbatch"})
SHARED_OPTIONS: Final = frozenset({"gpus_per_worker", "devices_per_worker", "max_restarts", "checkpoint_dir"})
HOW_TO_WATCH: Final = (
    "export REPLICAX_STATUS_ADDRESS=0.0.0.0:8080 and a REPLICAX_TOKEN before the launch, and run `replicax top NODE:8080` with the "
    "node of worker 0, the first of the job"
)

_ENDED: Final = re.compile(
    "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|REVOKED"
)
_READ_S: Final = 0.5
# Between two questions to Slurm's controller, which all users share; longer while nothing changes.
_LEAST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 15.0
_COMMAND_TIMEOUT_S: Final = 120.0
_UNKNOWN: Final = "Invalid job id"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only Slurm has."""
    group = parser.add_argument_group("Slurm (--on slurm)")
    group.add_argument("--nodes", type=positive, metavar="N", help="number of nodes (1)")
    group.add_argument(
        "--tasks-per-node", type=positive, metavar="N", help="number of workers on each node (1)"
    )
    group.add_argument("--time", metavar="T", help="time limit, such as 30 (minutes), 2:00:00, 1-12:00:00")
    group.add_argument("--partition", metavar="NAME", help="partition of the nodes")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as account=me, cpus-per-task=8 or signal=TERM@300; may be repeated",
    )


def launch(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Submits the job and follows it; returns its exit code.

    Raises:
      ClusterError: The options do not describe a job.
      ProcessStartError: Slurm did not take the job.
    """
    devices = options.devices_per_worker
    text = BatchJob(
        command,
        sys.executable,
        nodes=options.nodes or 1,
        tasks_per_node=options.tasks_per_node or 1,
        gpus_per_task=options.gpus_per_worker,
        time=options.time,
        partition=options.partition,
        options=options.sbatch,
        environment={} if devices is None else device_environment(devices, {}),
        checkpoint_dir=options.checkpoint_dir,
        max_restarts=options.max_restarts,
    ).text()
    if options.dry_run:
        print(text, end="")
        return 0
    answer = _ask("sbatch", "--parsable", text=text)
    if answer.returncode:
        raise ProcessStartError(f"sbatch refused the job: {answer.stderr.strip()}")
    job = _Job(answer.stdout.strip().partition(";")[0])
    try:
        try:
            _note(f"Submitted job {job.number}.")
            return job.follow()
        except KeyboardInterrupt:
            return _interrupted(job)
    except BrokenPipeError:
        return _unread(job)


@dataclass
class _Job:
    """A submitted job: prints its output and its states."""

    number: str
    path: str | None = None
    _position: int = 0
    _line: str = ""
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def follow(self) -> int:
        """Prints the output and each new state until the job has ended. Returns its exit code."""
        shown, pause_s = None, _LEAST_PAUSE_S
        while True:
            state, text, code = self._state()
            self._print_output()
            if text != shown:
                _note(text)
                shown, pause_s = text, _LEAST_PAUSE_S
            if _ENDED.fullmatch(state):
                self._print_output(is_last=True)
                return code
            deadline = time.monotonic() + pause_s
            while time.monotonic() < deadline:
                time.sleep(_READ_S)
                self._print_output()
            pause_s = min(1.3 * pause_s, _LONGEST_PAUSE_S)

    def cancel(self) -> None:
        """Cancels the job: its tasks get SIGTERM, and after Slurm's KillWait SIGKILL."""
        _ask("scancel", self.number)

    def _state(self) -> tuple[str, str, int]:
        """Returns the state, a line about it, and the exit code."""
        answer = _ask("scontrol", "show", "job", self.number)
        if answer.returncode:
            if _UNKNOWN not in answer.stderr:
                return "", f"Slurm does not answer, and will be asked again: {answer.stderr.strip()}", 1
            return "REVOKED", f"Slurm does not know job {self.number} any more. Its output: {self.path}", 1
        found = dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
        output = re.search(r"^ *StdOut=(.*)$", answer.stdout, re.MULTILINE)
        self.path = output[1].replace("%j", self.number) if output is not None else None
        state = found["JobState"]
        text = f"Job {self.number} is {state}"
        if state == "RUNNING":
            text += f" on {found['NodeList']}, start {int(found['Restarts']) + 1}. Its output: {self.path}"
        elif _ENDED.fullmatch(state):
            text = f"Job {self.number} has ended: {state}"
        elif found["Reason"] != "None":
            text += f" ({found['Reason']})"
        return state, text, _exit_code(state, found["ExitCode"])

    def _print_output(self, *, is_last: bool = False) -> None:
        """Prints what the job has written since the last call. Opens the file each time, because over NFS an open file
        shows new lines late.
        """
        try:
            with open(self.path or "", "rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:  # not written yet, or not visible here
            new = b""
            if is_last and not self._position:
                _note(f"The output cannot be read here: {self.path}")
        self._position += len(new)
        *lines, self._line = (self._line + self._decoder.decode(new)).split("\n")
        for line in [*lines, *([self._line] if is_last and self._line else [])]:
            if not NOISE.fullmatch(re.sub(r"^ *\d+: ", "", line)):
                print(line, flush=True)


def _exit_code(state: str, code_and_signal: str) -> int:
    """Returns the exit code of a job as a shell reports it. A job that Slurm ended has one other than 0.

    >>> _exit_code("FAILED", "3:0"), _exit_code("CANCELLED", "0:15"), _exit_code("TIMEOUT", "0:0")
    (3, 143, 1)
    """
    code, number = map(int, code_and_signal.split(":"))
    return code or (128 + number if number else int(state != "COMPLETED"))


def _interrupted(job: _Job) -> int:
    """Asks at a terminal whether to cancel the job; without one it is cancelled. Returns the exit code after Ctrl-C."""
    try:
        is_kept = sys.stdin.isatty() and not input(f"\nCancel job {job.number}? [y/N] ").lower().startswith(
            "y"
        )
    except EOFError:  # Ctrl-D is the default answer
        is_kept = True
    except KeyboardInterrupt:
        is_kept = False
    if is_kept:
        _note(_continues(job))
        return 130
    try:
        _note(f"Cancelling job {job.number}. Its tasks get SIGTERM.")
        job.cancel()
        job.follow()
    except KeyboardInterrupt:
        _note(f"Job {job.number} may not have ended yet: squeue --jobs={job.number} shows it.")
    return 130


def _unread(job: _Job) -> int:
    """Lets the job continue, since nobody reads its output. Returns the exit code that a shell gives for SIGPIPE."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # or Python would fail to flush it at the end
    try:
        _note(f"The output is not read any more. {_continues(job)}")
    except BrokenPipeError:
        os.dup2(nowhere, sys.stderr.fileno())
    return 141


def _continues(job: _Job) -> str:
    return f"Job {job.number} continues. To cancel it: scancel {job.number}. Its output: {job.path}"


def _ask(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm."""
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S
        )
    except FileNotFoundError:
        raise ProcessStartError(
            f"There is no command {command[0]} here. Run this where you submit jobs to Slurm; --dry-run prints the script."
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 1, "", f"{command[0]} did not end in {_COMMAND_TIMEOUT_S:g} s"
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
