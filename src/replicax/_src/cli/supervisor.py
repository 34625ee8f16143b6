"""``Supervisor``: runs the tasks of a cluster as processes, from their start until all are gone."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from replicax._src.cli.display import Display, Row
from replicax._src.cli.failed_start import tell_failed_start
from replicax._src.cli.restarts import Restarts
from replicax._src.cli.status import Speed, read_status
from replicax._src.cluster.layout import RESTART_COUNT_VARIABLE
from replicax._src.cluster.processes import Ending, Process, resident_bytes, signal_name
from replicax._src.cluster.spec import Task
from replicax._src.cluster.status_file import STATUS_FILE_VARIABLE
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE
from replicax._src.status.history_file import STATUS_HISTORY_VARIABLE

# Harmless lines that each process prints: from gloo, which has no option against it, and from JAX's coordination
# service (jaxlib 0.10).
NOISE: Final = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*"
    r"|W\d+ .* coordination_service\.cc:\d+\] .*Using experimental recoverable task feature\..*"
)
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK_S: Final = 0.05
_REFRESH_S: Final = 0.5
_NUM_LAST_LINES: Final = 20
_NUM_LINES_TOLD: Final = 10  # the lines may contain an error about another task
_TOLD_AT_ONCE_S: Final = 1.0


@dataclass(frozen=True)
class Start:
    """The description of one task to start.

    Attributes:
      task: The task.
      command: The command to run.
      environment: All its variables.
      is_awaited: True if the training ends only after this task has exited with 0.
      is_server: True if it does not end on its own, and is not awaited.
      max_restarts: The largest number of restarts of this task alone, after its own failures.
    """

    task: Task
    command: Sequence[str]
    environment: Mapping[str, str]
    is_awaited: bool = True
    is_server: bool = False
    max_restarts: int = 0


# Returns the tasks for a start of all of them, such as with new ports, and notes about it to show.
Renew = Callable[[], tuple[Sequence[Start], Sequence[str]]]


@dataclass(frozen=True)
class SupervisorOptions:
    """The options for failures and the end of a job.

    Attributes:
      max_restarts: The largest number of restarts of all tasks. See ``restarts.py`` for those that count.
      grace_s: The time for which other tasks may run after a failure, and again after SIGTERM.
      evaluator_timeout_s: The time for which the evaluator may run after the training has ended.
      checkpoint_dir: The directory in which the tasks save, if it is known.
    """

    max_restarts: int = 0
    grace_s: float = 10.0
    evaluator_timeout_s: float = 600.0
    checkpoint_dir: Path | None = None


class Supervisor:
    """Runs tasks until the training has ended, one of them has failed, or a signal says to end.

    If only the coordinator failed, its restart leaves the servers running; they wait for the next coordinator.

    The training succeeds when all awaited tasks have exited with 0. The remaining tasks are then ended: the evaluator
    after its time limit, the others at once. If a task fails and is not restarted on its own, the other tasks get
    ``grace_s`` to end. Then they get SIGTERM, and after the same time again SIGKILL. SIGINT, SIGTERM and SIGHUP become
    SIGTERM for all tasks; a second signal becomes SIGKILL.

    Args:
      starts: The tasks.
      display: Shows the lines of the tasks.
      options: The options for failures and the end.
      renew: Called before each further start of all tasks, whose ports other programs may have taken; None: the tasks
        stay the same.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        display: Display,
        options: SupervisorOptions,
        renew: Renew | None = None,
    ):
        self._starts, self._display, self._options, self._renew = starts, display, options, renew
        self._status_files: dict[Task, Path] = {}
        # What the task that serves the status has saved there for the process after a restart. Its folder goes with it.
        self._histories: dict[Task, bytes] = {}
        self._signals: list[int] = []
        # Unlike an event it may be used in a signal handler, which may interrupt the thread that waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_ending, self._began_at = False, 0.0
        self._started_at: dict[Task, float] = {}
        self._processes: dict[Task, Process] = {}
        self._speeds: dict[Task, Speed] = {}
        self._restarts = Restarts(options.max_restarts, options.checkpoint_dir)
        self._num_starts: collections.Counter[Task] = collections.Counter()
        self._next_refresh = 0.0

    def run(self) -> int:
        """Runs the job from the main thread. Returns the exit code for the launcher.

        The exit code is 0, that of the task that failed first, or 128 plus the signal that ended the job.

        Raises:
          ProcessStartError: A task could not be started. No process is left.
        """
        with self._signals_noticed(), self._none_left():
            while True:
                failed = self._run_once()
                if self._signals:
                    return 128 + self._signals[0]
                if failed is None:
                    return 0
                what = "the coordinator" if self._processes else "all tasks"
                note = self._restarts.after(failed, failed.time - self._began_at, what)
                if note is not None:
                    self._display.note(note)
                    self._wait(lambda: False, self._restarts.wait_s)
                if note is None or self._signals:
                    self._end_all()
                    return 128 + self._signals[0] if self._signals else failed.exit_code
                if self._renew is not None and not self._processes:
                    self._starts, notes = self._renew()
                    for each in notes:
                        self._display.note(each)

    def _run_once(self) -> Ending | None:
        """Runs all tasks once. Returns the ending of the first that failed, or None. Servers may keep running."""
        restarts = {
            start.task: Restarts(start.max_restarts, self._options.checkpoint_dir, are_preempted=False)
            for start in self._starts
            if start.max_restarts
        }
        self._is_ending, self._began_at = False, time.monotonic()
        for start in self._starts:
            if start.task not in self._processes and not self._signals:
                self._start(start)
        self._wait(lambda: self._is_decided(restarts))
        if not self._signals and self._failed() is None:
            self._await_evaluator()
        self._is_ending = True
        failed = self._failed() if not self._signals else None
        if failed is not None:
            self._await_others(failed)
            failed = self._failed()
        kept = self._servers_that_stay(failed)
        self._end_all(kept)
        self._refresh(time.monotonic())
        ending = None if failed is None else self._processes[failed].ending
        if failed is not None and ending is not None and not self._signals:
            if ending.code == PREEMPTED_EXIT_CODE:
                self._display.note(f"{failed} {ending}: it was preempted, and has saved.")
            else:
                self._show_failure(failed)
        for task in [task for task in self._processes if task not in kept]:
            self._processes.pop(task).close()
        return None if self._signals else ending

    def _servers_that_stay(self, failed: Task | None) -> Collection[Task]:
        """Returns all servers if they keep running for the next coordinator, otherwise none.

        They keep running if only the coordinator failed. After a restart without progress they end too, because they
        may be the cause.
        """
        servers = {start.task for start in self._starts if start.is_server}
        may_stay = (
            failed is not None
            and failed.type == "chief"
            and not self._signals
            and not self._restarts.num_in_vain
            and all(start.task in servers for start in self._starts if start.task.type in ("worker", "ps"))
            and all(self._processes[task].is_running for task in servers)
        )
        return servers if may_stay else ()

    def _history_of(self, task: Task) -> dict[str, str]:
        """Returns the variable with the file for the task's curves, which has those of the process before."""
        if os.environ.get(STATUS_HISTORY_VARIABLE):  # the user has chosen one
            return {}
        path = self._history_file(task)
        if task in self._histories:
            path.write_bytes(self._histories[task])
        return {STATUS_HISTORY_VARIABLE: str(path)}

    def _history_file(self, task: Task) -> Path:
        return self._status_files[task].with_name("history.json")

    @contextlib.contextmanager
    def _none_left(self) -> Iterator[None]:
        """Ends all processes of tasks after the block."""
        try:
            yield
        finally:
            with contextlib.ExitStack() as stack:
                for process in self._processes.values():
                    stack.callback(process.close)

    def _start(self, start: Start) -> None:
        """Starts a task, after its earlier process, if any, is gone."""
        if start.task in self._processes:
            self._processes[start.task].close()
        folder = tempfile.mkdtemp(prefix="replicax-launch-")
        self._status_files[start.task] = Path(folder) / "status.json"
        self._speeds[start.task] = Speed()
        own = {
            STATUS_FILE_VARIABLE: str(self._status_files[start.task]),
            RESTART_COUNT_VARIABLE: str(self._num_starts[start.task]),
            **self._history_of(start.task),
        }
        self._display.started(start.task, self._num_starts[start.task])
        self._num_starts[start.task] += 1
        self._started_at[start.task] = time.monotonic()
        self._processes[start.task] = Process(
            start.command,
            environment={**start.environment, **own},
            name=str(start.task),
            own_folder=folder,
            num_lines_kept=_NUM_LAST_LINES,
            on_line=functools.partial(self._line, start.task),
            is_held=self._is_held,
            on_end=functools.partial(self._wake.put, None),
        )

    def _is_held(self) -> bool:
        """Returns True if tasks have to wait until somebody reads their output. Tasks that are ending never wait,
        because they may have to save.
        """
        return self._display.is_full and not (self._is_ending or self._signals)

    def _line(self, task: Task, text: str) -> None:
        if not NOISE.fullmatch(text):
            self._display.line(task, text)

    # --- how it goes --------------------------------------------------------------------------------------

    def _is_decided(self, restarts: Mapping[Task, Restarts]) -> bool:
        """Returns True if the training has ended or failed. Restarts the tasks that may restart on their own."""
        if self._is_trained():
            return True
        for start in self._starts:
            process = self._processes[start.task]
            if process.ending is None or process.ending.is_success:
                continue
            if _was_taken(start, process.ending):
                self._display.note(f"{start.task} was told to end. Starting it again; this is not counted.")
                self._start(start)
                continue
            note = None
            if start.task in restarts:
                run_s = process.ending.time - self._started_at[start.task]
                note = restarts[start.task].after(process.ending, run_s, "it")
            if note is None:
                return True
            self._display.note(f"{start.task} {process.ending}. {note}")
            self._start(start)
        return False

    def _is_trained(self) -> bool:
        """Returns True if all awaited tasks have exited with 0."""
        endings = [self._processes[start.task].ending for start in self._starts if start.is_awaited]
        return all(ending is not None and ending.is_success for ending in endings)

    def _failed(self) -> Task | None:
        """Returns the first task that ended with a failure; None if there is none."""
        bad = [
            (self._began_to_end(start.task, ending), number, start.task)
            for number, start in enumerate(self._starts)
            if (ending := self._processes[start.task].ending) is not None
            and not (ending.is_success or _was_taken(start, ending))
        ]
        return min(bad)[2] if bad else None

    def _began_to_end(self, task: Task, ending: Ending) -> float:
        """Returns the time at which a task began to end, in seconds of ``time.monotonic``. A failed worker 0 ends only
        after the other tasks, because they need it.
        """
        status = read_status(self._status_files[task])
        return ending.time if status is None or status.left_at is None else min(ending.time, status.left_at)

    def _await_evaluator(self) -> None:
        evaluators = [p for task, p in self._processes.items() if task.type == "evaluator" and p.is_running]
        if evaluators:
            limit_s = self._options.evaluator_timeout_s
            self._display.note(f"The training has ended; waiting up to {limit_s:g} s for the evaluator.")
            self._wait(lambda: not any(p.is_running for p in evaluators), limit_s)

    def _await_others(self, failed: Task) -> None:
        def running() -> list[Process]:
            processes = [self._processes[start.task] for start in self._starts if not start.is_server]
            return [process for process in processes if process.is_running]

        may_be_awaited = self._may_be_awaited(failed)
        if others := running():
            self._display.note(
                f"{failed} {self._processes[failed].ending}. Waiting up to {self._options.grace_s:g} s for {_listed(others)} to end."
            )
            with self._others_told(failed) if may_be_awaited else contextlib.nullcontext():
                self._wait(lambda: not running(), self._options.grace_s)
        elif may_be_awaited and len(self._starts) == 1 and not self._options.max_restarts:  # on other hosts
            with self._others_told(failed) as telling:
                self._wait(lambda: not telling.is_alive(), _TOLD_AT_ONCE_S)
                if telling.is_alive():
                    self._display.note(
                        f"{failed} {self._processes[failed].ending}. Telling tasks of other hosts that start in the next "
                        f"{self._options.grace_s:g} s."
                    )
                    self._wait(lambda: not telling.is_alive(), self._options.grace_s)

    def _may_be_awaited(self, failed: Task) -> bool:
        """Returns True if other tasks may wait for one that has ended, now or after they start.

        A task that has joined has a status file, and the end of its connection informs the other members. Tasks that
        have not joined wait for worker 0 too. All tasks have joined only when the first program has run.
        """
        if any(start.task.type == "ps" for start in self._starts):  # these jobs use a different channel
            return False
        status = read_status(self._status_files[failed])
        return status is None or (failed == Task("worker", 0) and status.step == 0)

    @contextlib.contextmanager
    def _others_told(self, failed: Task) -> Iterator[threading.Thread]:
        """Tries, while the block runs, to tell the waiting tasks that a task has ended."""
        process = self._processes[failed]
        environment = next(start.environment for start in self._starts if start.task == failed)
        text = "\n".join([f"it {process.ending}. Its last lines:", *process.lines[-_NUM_LINES_TOLD:]])
        is_over = threading.Event()
        arguments = (environment, text, is_over)
        telling = threading.Thread(target=tell_failed_start, args=arguments, daemon=True)
        telling.start()
        try:
            yield telling
        finally:
            is_over.set()
            telling.join()

    def _end_all(self, but: Collection[Task] = ()) -> None:
        """Ends all running tasks except ``but``: sends SIGTERM, then SIGKILL."""

        def still_running() -> list[Process]:
            return [p for task, p in self._processes.items() if task not in but and p.is_running]

        running = still_running()
        if not running:
            return
        if self._signals:
            self._display.note(f"{signal_name(self._signals[0])}: ending {_listed(running)}.")
        num_signals = len(self._signals)
        for process in running:
            process.terminate()
        self._wait(lambda: not still_running(), self._options.grace_s, num_signals)
        if killed := still_running():
            self._display.note(f"{_listed(killed)} did not end, and will be killed.")

    def _show_failure(self, failed: Task) -> None:
        process = self._processes[failed]
        self._display.note(f"{failed} {process.ending}, the first to fail. Its last lines:")
        lines = [line for line in process.lines if not NOISE.fullmatch(line)]
        for line in lines or ("(it has written nothing)",):
            self._display.note(f"    {line}")

    # --- waiting ------------------------------------------------------------------------------------------

    def _wait(
        self, is_over: Callable[[], bool], timeout_s: float = float("inf"), num_signals: int = 0
    ) -> None:
        """Waits until ``is_over`` returns True, the time is up, or more than ``num_signals`` signals arrived."""
        deadline = time.monotonic() + timeout_s
        while len(self._signals) <= num_signals and not is_over():
            now = time.monotonic()
            if now >= deadline:
                return
            if self._display.is_broken and not self._signals:  # otherwise the tasks are ending already
                self._signals.append(signal.SIGPIPE)
                return
            if now >= self._next_refresh:
                self._refresh(now)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_TICK_S)

    @contextlib.contextmanager
    def _signals_noticed(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _PASSED_ON}
        before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}  # nohup, `&`
        for number in before:
            signal.signal(number, self._notice)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        # Both mean that the terminal was closed, so they are one reason to end.
        if number == signal.SIGHUP and self._signals == [signal.SIGPIPE]:
            self._signals[0] = number
        else:
            self._signals.append(number)
        self._wake.put(None)

    # --- the table ----------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        self._next_refresh = now + _REFRESH_S
        self._display.update([self._row(task, process) for task, process in self._processes.items()])

    def _row(self, task: Task, process: Process) -> Row:
        with contextlib.suppress(OSError):  # few tasks have one
            self._histories[task] = self._history_file(task).read_bytes()
        status, speed = read_status(self._status_files[task]), self._speeds[task]
        if status is not None:
            speed.add(status)
        state = str(process.ending) if process.ending is not None else (status and status.state) or "running"
        return Row(
            task,
            state,
            process.pid,
            None if status is None else status.step,
            speed.steps_per_s if process.is_running else None,
            resident_bytes(process.pid) if process.is_running else None,
            self._num_starts[task] - 1,
        )


def _was_taken(start: Start, ending: Ending) -> bool:
    """Returns True if a restartable server was ended by a signal. It loses no state, so this is not a failure."""
    return start.is_server and start.max_restarts > 0 and ending.signal == signal.SIGTERM


def _listed(processes: Sequence[Process]) -> str:
    return ", ".join(process.name for process in processes)
