"""``Supervisor``: runs the tasks of a cluster as processes, from their start until all are gone."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
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

from replicax._launch.display import TaskDisplay, TaskRow
from replicax._launch.failed_start import tell_failed_start
from replicax._launch.left_controller import OtherHosts, wait_while_it_serves
from replicax._launch.passed_on_signals import signals_noticed
from replicax._launch.replacements import Replacements
from replicax._launch.restarts import Restarts
from replicax._launch.task_progress import Speed, Status, read_status
from replicax._src.cluster.environ import FAILURE_SAVE_LIMIT, SILENCE_LIMIT, limit_s
from replicax._src.cluster.machine_layout import REPLACEMENT_VARIABLE, RESTART_COUNT_VARIABLE
from replicax._src.cluster.processes import Ending, Process, resident_bytes, signal_name
from replicax._src.cluster.spec import Task
from replicax._src.cluster.status_file import GIVEN_UP, RAISED, SAVING, STATUS_FILE_VARIABLE
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE
from replicax._src.status.history_file import STATUS_HISTORY_VARIABLE

# Harmless lines that each process prints: from gloo, which has no option against it, and from JAX's coordination
# service (jaxlib 0.10).
NOISE: Final = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*"
    r"|W\d+ .* coordination_service\.cc:\d+\] .*Using experimental recoverable task feature\..*"
)
_TICK_S: Final = 0.05
_REFRESH_S: Final = 0.5
_NUM_LAST_LINES: Final = 20
_NUM_LINES_TOLD: Final = 10  # the lines may contain an error about another task
_TOLD_AT_ONCE_S: Final = 1.0
# A task writes its status twice a second.
_SAVING_SAID_S: Final = 10.0
# The time in which the others say that a death was one too many. It takes them milliseconds, if they have their turn.
_LOSS_SAID_S: Final = 1.0
# The time in which the others may raise the same error. Then all start again, not one after the other.
_ERROR_SHARED_S: Final = 2.0


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
      max_restarts: The largest number of restarts, of all tasks and of single ones. See ``restarts.py`` for those that
        count.
      grace_s: The time for which other tasks may run after a failure, and again after SIGTERM.
      evaluator_timeout_s: The time for which the evaluator may run after the training has ended.
      checkpoint_dir: The directory in which the tasks save, if it is known.
    """

    max_restarts: int = 0
    grace_s: float = 10.0
    evaluator_timeout_s: float = 600.0
    checkpoint_dir: Path | None = None


class Supervisor:
    """Runs tasks until the training has ended, one of them has failed, or a signal says to end. It is one job; several
    of them run beside each other, each in a thread of its own.

    If only the coordinator failed, its restart leaves the servers running; they wait for the next coordinator.

    The training succeeds when all awaited tasks have exited with 0. The remaining tasks are then ended: the evaluator
    after its time limit, the others at once. If a task fails and is not restarted on its own, the other tasks get
    ``grace_s`` to end, and more while they save a boundary (``save_on_failure``). Then they get SIGTERM, and after the
    same time again SIGKILL. SIGINT, SIGTERM and SIGHUP become SIGTERM for all tasks; a second signal becomes SIGKILL.

    The death of a task that *tolerates failures* is no failure while another one runs: its status says so, unless the
    run is lost. Exit code 42 is no death. If restarts are left, the task is started again alone: ``replacements.py``
    has the rules. If its program raised an error, and no replacement has entered, the others finish, and then the job
    fails.

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
        display: TaskDisplay,
        options: SupervisorOptions,
        renew: Renew | None = None,
    ):
        self._starts, self._display, self._options, self._renew = starts, display, options, renew
        self._status_files: dict[Task, Path] = {}
        # The curves that the task that serves the status has saved. Their file is beside the first task's status, so it
        # goes with that task's process.
        self._history: bytes | None = None
        self._history_file = Path()
        self._signals: list[int] = []
        # Unlike an event it may be used in a signal handler, which may interrupt the thread that waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        # True if the others have finished without the task that failed: a restart would find nothing to do.
        self._is_finished_by_others = False
        self._is_needless = False  # True once nobody needs these tasks, which are servers, any more
        self._is_ending, self._began_at = False, 0.0
        self._started_at: dict[Task, float] = {}
        self._processes: dict[Task, Process] = {}
        # The tasks that have said whether the others continue without them.
        self._tolerances: dict[Task, bool] = {}
        # The tasks of this run that the others continue without, each with the last process of it that ended. A newer
        # one is a replacement that has not entered.
        self._outlived: dict[Task, Process] = {}
        # The processes of this run whose program raised an error, until a replacement has entered.
        self._raised: dict[Task, Process] = {}
        self._other_hosts: dict[Process, OtherHosts] = {}
        # The first process of the first task, after its replacement has started. Its guard holds the controller, and the
        # file of the curves.
        self._first: Process | None = None
        self._is_handed_over = False  # True once the workers of other hosts have finished without this one
        # The time of the last status of each task that is awaited after others have finished, and when it was read.
        self._last_words: dict[Task, tuple[float, float]] = {}
        self._speeds: dict[Task, Speed] = {}
        self._restarts = Restarts(options.max_restarts, options.checkpoint_dir)
        self._replacements = Replacements(self._restarts)
        self._num_starts: collections.Counter[Task] = collections.Counter()
        self._next_refresh = 0.0

    def run(self) -> int:
        """Runs the job from the main thread, which notices signals. Returns the exit code for the launcher.

        Raises:
          ProcessStartError: A task could not be started. No process is left.
        """
        with signals_noticed(self.notice):
            return self.run_beside()

    def run_beside(self) -> int:
        """Runs the job from any thread, while the main thread passes signals to ``notice``. Returns the exit code.

        The exit code is 0, that of the task that failed first, or 128 plus the signal that ended the job.

        Raises:
          ProcessStartError: A task could not be started. No process is left.
        """
        with self._none_left():
            while True:
                failed = self._run_once()
                if self._signals:
                    return 128 + self._signals[0]
                if failed is None:
                    return 0
                what = "the coordinator" if self._processes else "all tasks"
                run_s = failed.time - self._began_at
                is_last = self._is_handed_over or self._is_finished_by_others
                note = None if is_last else self._restarts.after(failed, run_s, what)
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

    def finish(self) -> None:
        """Ends a job of servers in order: nobody needs them any more. Any thread may call it."""
        self._is_needless = True
        self._wake.put(None)

    def notice(self, number: int, frame: FrameType | None = None) -> None:
        """Notes a signal. A signal handler may call it: it takes no lock."""
        # Both mean that the terminal was closed, so they are one reason to end.
        if number == signal.SIGHUP and self._signals == [signal.SIGPIPE]:
            self._signals[0] = number
        else:
            self._signals.append(number)
        self._wake.put(None)

    def _run_once(self) -> Ending | None:
        """Runs all tasks once. Returns the ending of the first that failed, or None. Servers may keep running."""
        restarts = {
            start.task: Restarts(start.max_restarts, self._options.checkpoint_dir, are_preempted=False)
            for start in self._starts
            if start.max_restarts
        }
        self._is_ending, self._began_at = False, time.monotonic()
        for of_last_run in (
            self._outlived,
            self._raised,
            self._other_hosts,
            self._last_words,
            self._replacements,
        ):
            of_last_run.clear()
        for start in self._starts:
            if start.task not in self._processes and not self._signals:
                self._start(start)
        self._wait(lambda: self._is_decided(restarts))
        if not self._signals:
            self._end_replacements()
        if not self._signals and self._failed() is None:
            self._await_evaluator()
        self._is_ending = True
        failed = self._failed() if not self._signals else None
        if failed is not None:
            self._await_others(failed)
            failed = self._failed()
        self._is_finished_by_others = failed in self._outlived and self._is_trained()
        kept = self._servers_that_stay(failed)
        self._end_all(kept)
        self._refresh(time.monotonic())
        ending = None if failed is None else self._blamed(failed).ending
        if failed is not None and ending is not None and not self._signals:
            if ending.code == PREEMPTED_EXIT_CODE:
                self._display.note(f"{failed} {ending}: it was preempted, and has saved.")
            else:
                self._show_failure(failed)
        for task in [task for task in self._processes if task not in kept]:
            self._processes.pop(task).close()
        if self._first is not None:
            self._first.close()
            self._first = None
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
        """Returns the variable with the file for the curves, which has those of the process before. All tasks have one
        file, because the chief serves the status, and another task becomes the chief when it dies.
        """
        if os.environ.get(STATUS_HISTORY_VARIABLE):  # the user has chosen one
            return {}
        if task == self._starts[0].task and self._first is None:
            self._history_file = self._status_files[task].with_name("history.json")
            if self._history is not None:
                self._history_file.write_bytes(self._history)
        return {STATUS_HISTORY_VARIABLE: str(self._history_file)}

    @contextlib.contextmanager
    def _none_left(self) -> Iterator[None]:
        """Ends all processes of tasks after the block."""
        try:
            yield
        finally:
            with contextlib.ExitStack() as stack:
                for process in (*self._processes.values(), *filter(None, [self._first])):
                    stack.callback(process.close)

    def _replace(self, start: Start) -> None:
        """Starts a dead task, alone. What its first process has left serves the others on, if it is the first task."""
        if start.task == self._starts[0].task and self._first is None:
            self._first = self._processes[start.task]
        self._start(start, {REPLACEMENT_VARIABLE: "1"})

    def _start(self, start: Start, more: Mapping[str, str] | None = None) -> None:
        """Starts a task, after its earlier process, if any, is gone."""
        before = self._processes.get(start.task)
        if before is not None and before is not self._first:
            before.close()
        folder = tempfile.mkdtemp(prefix="replicax-launch-")
        self._status_files[start.task] = Path(folder) / "status.json"
        self._speeds[start.task] = Speed()
        self._tolerances.pop(start.task, None)
        self._last_words.pop(start.task, None)
        own = {
            STATUS_FILE_VARIABLE: str(self._status_files[start.task]),
            RESTART_COUNT_VARIABLE: str(self._num_starts[start.task]),
            **self._history_of(start.task),
            **(more or {}),
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
        # A task may die while this runs: only the next call, which first waits for the others' word, decides about it.
        endings = {task: process.ending for task, process in self._processes.items()}
        if self._has_new_death():
            return False
        self._note_entries()
        self._note_outlived()
        self._end_given_up()
        if self._is_trained():
            return True
        for start in self._starts:
            ending = endings[start.task]
            if ending is None or ending.is_success or start.task in self._outlived:
                continue
            if _was_taken(start, ending):
                self._display.note(f"{start.task} was told to end. Starting it again; this is not counted.")
                self._start(start)
                continue
            note = None
            if start.task in restarts:
                run_s = ending.time - self._started_at[start.task]
                note = restarts[start.task].after(ending, run_s, "it")
            if note is None:
                return True
            self._display.note(f"{start.task} {ending}. {note}")
            self._start(start)
        starts = {start.task: start for start in self._starts}
        self._replacements.start_due(time.monotonic(), lambda task: self._replace(starts[task]))
        return False

    def _is_trained(self) -> bool:
        """Returns True if all awaited tasks have exited with 0, apart from those that the others continued without; or
        if these are servers that nobody needs.
        """
        if self._is_needless:
            return True
        awaited = [start.task for start in self._starts if start.is_awaited]
        done = [task for task in awaited if self._has_finished(task)]
        return bool(done) and all(task in done or task in self._outlived for task in awaited)

    def _has_finished(self, task: Task) -> bool:
        ending = self._processes[task].ending
        return ending is not None and ending.is_success

    def _failed(self) -> Task | None:
        """Returns the first task that ended with a failure; None if there is none."""
        bad = [
            (self._began_to_end(start.task, ending), number, start.task)
            for number, start in enumerate(self._starts)
            if (ending := self._blamed(start.task).ending) is not None
            and not (ending.is_success or _was_taken(start, ending) or self._is_made_up_for(start.task))
        ]
        return min(bad)[2] if bad else None

    def _blamed(self, task: Task) -> Process:
        """Returns the process of a task whose end tells how the task has ended."""
        return self._raised.get(task, self._processes[task])

    def _is_made_up_for(self, task: Task) -> bool:
        """Returns True if the others continued without a task, unless its program raised an error: part of it, such as
        a save after the training, may not have run anywhere.
        """
        return task in self._outlived and task not in self._raised

    def _has_new_death(self) -> bool:
        """Returns True if a task that tolerates failures has just died. The others may say yet that the run is lost, or
        raise the same error.
        """
        return any(
            process.ending is not None
            and not process.ending.is_success
            and (self._is_new(task, process.ending) or self._awaits_other_hosts(task))
            for task, process in self._processes.items()
        )

    def _is_new(self, task: Task, ending: Ending) -> bool:
        may_be_shared = self._options.max_restarts and self._state_of(task) == RAISED
        since = time.monotonic() - (_ERROR_SHARED_S if may_be_shared else _LOSS_SAID_S)
        return ending.time > since and self._tolerates(task)

    def _awaits_other_hosts(self, task: Task) -> bool:
        """Returns True while it is not known if the tasks of other hosts continue without a dead one of this host."""
        process, last = self._processes[task], self._outlived.get(task)
        may_go_on = (
            self._tolerates(task) and not self._is_preempted(task) if last is None else process is not last
        )
        if not (self._is_one_of_hosts and self._options.max_restarts and may_go_on):
            return False
        if process not in self._other_hosts:
            environment = next(start.environment for start in self._starts if start.task == task)
            self._other_hosts[process] = OtherHosts(environment)
        return self._other_hosts[process].answer is None

    @property
    def _is_one_of_hosts(self) -> bool:
        """True if the other tasks, if there are some, run on other hosts."""
        return len(self._starts) == 1

    def _note_entries(self) -> None:
        """Notes the replacements that take part with the others now."""
        for task, last in list(self._outlived.items()):
            if self._processes[task] is not last and self._tolerates(task):
                del self._outlived[task]
                self._raised.pop(task, None)

    def _note_outlived(self) -> None:
        """Notes and shows the tasks that have died, and that others continue without. Decides about replacements.

        It looks at the times of the ends, because this process may have been asleep. The last task that ends has no
        survivor, so either one has exited with 0, or there is a failure.
        """
        for task, process in self._processes.items():
            ending, last = process.ending, self._outlived.get(task)
            if ending is None or ending.is_success or process is last:
                continue
            has_entered = last is None
            if has_entered and (ending.code == PREEMPTED_EXIT_CODE or not self._tolerates(task)):
                continue
            if not self._has_survivors(task, self._began_to_end(task, ending)):
                if self._is_one_of_hosts:
                    self._outlived.pop(task, None)
                continue
            note = self._restart(task, ending, has_entered=has_entered)
            if note is None and self._is_one_of_hosts:  # nothing is left to do here
                self._outlived.pop(task, None)
                continue
            if has_entered and self._state_of(task) == RAISED:
                self._raised[task] = process
            self._outlived[task] = process
            process.kill_group()  # its controller, if it has started one, has a session of its own
            self._show_death(task, ending, note, has_entered=has_entered)

    def _restart(self, task: Task, ending: Ending, *, has_entered: bool) -> str | None:
        """Decides about a replacement. Returns the end of a message about it; None if there is none."""
        others = {other: process for other, process in self._processes.items() if other != task}
        tolerant = [process for other, process in others.items() if self._tolerates(other)]
        is_over = any(process.ending is not None and process.ending.is_success for process in tolerant)
        if is_over or not (self._is_one_of_hosts or any(process.is_running for process in tolerant)):
            return None
        run_s, now = ending.time - self._started_at[task], time.monotonic()
        return self._replacements.after(task, run_s, now, has_entered=has_entered)

    def _end_replacements(self) -> None:
        """Kills the replacements that have not entered: the training has ended, or all start again."""
        entering = [self._processes[task] for task in self._outlived if self._is_entering(task)]
        for process in entering:
            process.kill()
        if entering:
            self._wait(lambda: not any(process.is_running for process in entering), self._options.grace_s)
        if entering and self._is_trained():
            self._display.note(
                f"The training has ended. The replacement of {_listed(entering)} had not entered, and is ended."
            )

    def _is_entering(self, task: Task) -> bool:
        """Returns True if a replacement of a task runs that has not entered."""
        process = self._processes[task]
        return process.is_running and process is not self._outlived.get(task, process)

    def _end_given_up(self) -> None:
        """Kills the tasks that the others have given up and finished without: they are silent, and have not begun to
        end. A stopped process would be awaited forever.
        """
        if not any(
            process.ending is not None and process.ending.is_success and self._tolerates(task)
            for task, process in self._processes.items()
        ):
            return
        now, silence_s = time.monotonic(), limit_s(os.environ, SILENCE_LIMIT)
        for task, process in self._processes.items():
            status = self._read_status(task) if process.is_running and self._tolerates(task) else None
            if status is None or status.left_at is not None or task in self._outlived:
                continue
            said_at, read_at = self._last_words.get(task, (None, now))
            if said_at != status.time:
                self._last_words[task] = status.time, now
            elif now - read_at > silence_s:
                self._outlived[task] = process
                self._display.note(
                    f"{task} has been silent for {silence_s:g} s, and the other workers have finished without it. It is "
                    "killed."
                )
                process.kill()

    def _has_survivors(self, task: Task, died_at: float) -> bool:
        """Returns True if another task that tolerates failures ran on after a time, or has finished without this
        one.
        """
        if self._is_one_of_hosts:
            other_hosts = self._other_hosts.get(self._processes[task])
            return other_hosts is not None and bool(other_hosts.answer)
        is_given_up = self._state_of(task) == GIVEN_UP
        return any(
            self._began_to_end(other, process.ending) > died_at
            or (is_given_up and process.ending is not None and process.ending.is_success)
            for other, process in self._processes.items()
            if other != task and self._tolerates(other) and self._state_of(other) != GIVEN_UP
        )

    def _state_of(self, task: Task) -> str | None:
        status = self._read_status(task)
        return None if status is None else status.state

    def _tolerates(self, task: Task) -> bool:
        """Returns True if the others continue without a task when it dies."""
        self._read_status(task)
        return self._tolerances.get(task, False)

    def _read_status(self, task: Task) -> Status | None:
        """Returns the status of a task. A script that writes the file may leave out what was there before."""
        status = read_status(self._status_files[task])
        if status is not None and status.tolerates_failures is not None:
            self._tolerances[task] = status.tolerates_failures
        return status

    def _began_to_end(self, task: Task, ending: Ending | None) -> float:
        """Returns the time at which a task began to end, in seconds of ``time.monotonic``; infinity if it has not. A
        failed worker 0 ends only after the other tasks, because they need it.
        """
        status = read_status(self._status_files[task])
        ended_at = math.inf if ending is None else ending.time
        return ended_at if status is None or status.left_at is None else min(ended_at, status.left_at)

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
            if self._are_saving():
                saves_s = limit_s(os.environ, FAILURE_SAVE_LIMIT)
                self._display.note(
                    f"{_listed(running())}: saving the last boundary. Waiting up to {saves_s:g} s ({FAILURE_SAVE_LIMIT})."
                )
                self._wait(lambda: not self._are_saving(), saves_s)
                self._wait(lambda: not running(), self._options.grace_s)
        elif self._is_one_of_hosts:
            may_restart = bool(self._options.max_restarts)
            may_go_on = self._tolerates(failed) and not self._is_preempted(failed)
            if may_be_awaited and not may_restart:
                self._tell_other_hosts(failed)
            elif failed.index == 0 and (self._has_survivors(failed, 0.0) if may_restart else may_go_on):
                self._keep_controller(failed)

    def _tell_other_hosts(self, failed: Task) -> None:
        with self._others_told(failed) as telling:
            self._wait(lambda: not telling.is_alive(), _TOLD_AT_ONCE_S)
            if telling.is_alive():
                self._display.note(
                    f"{failed} {self._processes[failed].ending}. Telling tasks of other hosts that start in the next "
                    f"{self._options.grace_s:g} s."
                )
                self._wait(lambda: not telling.is_alive(), self._options.grace_s)

    def _is_preempted(self, task: Task) -> bool:
        ending = self._processes[task].ending
        return ending is not None and ending.code == PREEMPTED_EXIT_CODE

    def _keep_controller(self, failed: Task) -> None:
        """Waits while the controller of a dead worker 0 serves workers of other hosts, which continue without it. It
        ends with this launcher.
        """
        process, is_over = self._processes[failed], threading.Event()
        process.kill_group()
        environment = next(start.environment for start in self._starts if start.task == failed)
        waiting = threading.Thread(target=wait_while_it_serves, args=(environment, is_over), daemon=True)
        waiting.start()
        try:
            self._wait(lambda: not waiting.is_alive(), _TOLD_AT_ONCE_S)
            if waiting.is_alive():
                self._display.note(
                    f"{failed} {process.ending}. The workers of other hosts continue; its controller serves them here until "
                    "they end."
                )
                self._is_handed_over = True
                self._wait(lambda: not waiting.is_alive())
        finally:
            is_over.set()

    def _are_saving(self) -> bool:
        """Returns True if a running task saves because another one has failed, and says so still."""
        since = time.time() - _SAVING_SAID_S
        statuses = [
            read_status(self._status_files[task]) for task, p in self._processes.items() if p.is_running
        ]
        return any(each is not None and each.state == SAVING and each.time > since for each in statuses)

    def _may_be_awaited(self, failed: Task) -> bool:
        """Returns True if other tasks may wait for one that has ended, now or after they start.

        A task that has joined has a status file, and the end of its connection informs the other members. Tasks that
        have not joined wait for worker 0 too. All tasks have joined only when the first program has run.
        """
        if any(start.task.type == "ps" for start in self._starts):  # these jobs use a different channel
            return False
        status = read_status(self._status_files[failed])
        may_miss_others = failed == Task("worker", 0) and not self._tolerates(failed)
        return status is None or (may_miss_others and status.step == 0)

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
        process = self._blamed(failed)
        after = f" after {_names(self._outlived)} died" if self._outlived else ""
        self._display.note(f"{failed} {process.ending}, the first to fail{after}. Its last lines:")
        self._show_last_lines(process)

    def _show_death(self, task: Task, ending: Ending, restart: str | None, *, has_entered: bool) -> None:
        is_error = ending.signal is None or not has_entered
        more = " Its last lines:" if is_error else ""
        if not has_entered:
            then = f"starting another one: {restart}" if restart else "the others continue without it."
            text = f"The replacement of {task} {ending} before it had entered; {then}"
        elif restart:
            text = f"{task} {ending}. The others continue; starting it again: {restart}"
        elif self._state_of(task) == GIVEN_UP:
            text = f"{task} {ending}: the others had given it up, and have gone on without it."
        else:
            none_left = " No restart is left." if self._options.max_restarts else ""
            text = f"{task} died ({_cause(ending)}); the other workers continue.{none_left}"
        self._display.note(text + more)
        if is_error:
            self._show_last_lines(self._processes[task])

    def _show_last_lines(self, process: Process) -> None:
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

    # --- the table ----------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        self._next_refresh = now + _REFRESH_S
        with contextlib.suppress(OSError, LookupError):  # few jobs have one; the first task has not started
            self._history = self._history_file.read_bytes()
        self._display.update([self._row(task, process) for task, process in self._processes.items()])

    def _row(self, task: Task, process: Process) -> TaskRow:
        status, speed = self._read_status(task), self._speeds[task]
        if status is not None:
            speed.add(status)
        return TaskRow(
            task,
            self._state(task, process.ending, status),
            process.pid,
            None if status is None else status.step,
            speed.steps_per_s if process.is_running else None,
            resident_bytes(process.pid) if process.is_running else None,
            self._num_starts[task] - 1,
        )

    def _state(self, task: Task, ending: Ending | None, status: Status | None) -> str:
        if ending is None:
            return "entering" if self._is_entering(task) else (status and status.state) or "running"
        if task not in self._outlived or ending.is_success:
            return str(ending)
        then = "starts again" if self._replacements.is_due(task) else "continued without it"
        return f"died ({_cause(ending)}); {then}"


def _cause(ending: Ending) -> str:
    return f"exit code {ending.code}" if ending.signal is None else signal_name(ending.signal)


def _names(tasks: Collection[Task]) -> str:
    return ", ".join(sorted(map(str, tasks)))


def _was_taken(start: Start, ending: Ending) -> bool:
    """Returns True if a restartable server was ended by a signal. It loses no state, so this is not a failure."""
    return start.is_server and start.max_restarts > 0 and ending.signal == signal.SIGTERM


def _listed(processes: Sequence[Process]) -> str:
    return ", ".join(process.name for process in processes)
