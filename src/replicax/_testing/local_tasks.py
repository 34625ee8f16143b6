"""``LocalTask``: one task of a ``LocalCluster``, whose process a test can kill and stop; and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replicax._src.cluster.machine_layout import RESTART_COUNT_VARIABLE
from replicax._src.cluster.processes import Ending, Process, ProcessTimeoutError, shown_lines
from replicax._src.cluster.spec import Task
from replicax._src.drawing import html
from replicax._src.vocabulary.errors import TaskFailedError
from replicax._testing.task_reports import read_reports

_NUM_LINES_KEPT: Final = 10_000
_LOOK_S: Final = 0.01


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
      task: The task.
      exit_code: The exit code of its process. It is 128 plus the signal if one killed it: 137 for SIGKILL.
      signal: The signal that killed it, or None.
      output: The lines of all its processes, including those before a restart and standard error.
      reports: Its calls of ``rx.testing.report``, one dict for each.
    """

    task: Task
    exit_code: int
    signal: int | None
    output: tuple[str, ...]
    reports: tuple[dict[str, Any], ...]

    @property
    def report(self) -> dict[str, Any]:
        """All reports in one dict. A repeated name has its last value."""
        return {name: value for report in self.reports for name, value in report.items()}


class ClusterResults(Mapping[tuple[str, int], TaskResult]):
    """The results of all tasks: ``results["worker", 1]``."""

    def __init__(self, results: Sequence[TaskResult]):
        self._results = {(result.task.type, result.task.index): result for result in results}

    def __getitem__(self, key: tuple[str, int]) -> TaskResult:
        return self._results[key]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        told = ", ".join(f"{result.task}: exit code {result.exit_code}" for result in self.values())
        return f"ClusterResults({told})"

    def _repr_html_(self) -> str:
        rows = [
            (result.task, result.exit_code, result.output[-1] if result.output else "", result.report or "")
            for result in self.values()
        ]
        return html.page("ClusterResults", html.table(("task", "exit code", "last line", "report"), rows))

    def raise_if_failed(self) -> None:
        """Raises if a task did not exit with 0.

        Raises:
          TaskFailedError: A task failed. The message has its last lines. It is an ``AssertionError``.
        """
        bad = [result for result in self.values() if result.exit_code]
        if bad:
            raise TaskFailedError(
                "\n".join(
                    f"{r.task} ended with exit code {r.exit_code}.{shown_lines(r.output, 20)}" for r in bad
                )
            )


class LocalTask:
    """A task of a ``LocalCluster``, which creates it. Any thread may call its methods.

    Args:
      task: The task.
      command: The command to run.
      environment: All its variables.
      report_file: The file for its reports.
      timeout_s: The default time limit of waits.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environment: Mapping[str, str],
        report_file: Path,
        timeout_s: float,
    ):
        self.task = task
        self._command, self._environment = command, environment
        self._report_file, self._timeout_s = report_file, timeout_s
        self._earlier_output: tuple[str, ...] = ()
        self._num_restarts = 0
        self._pids: list[int] = []
        self._process = self._started()

    def _started(self) -> Process:
        process = Process(
            self._command,
            environment={**self._environment, RESTART_COUNT_VARIABLE: str(self._num_restarts)},
            name=str(self.task),
            num_lines_kept=_NUM_LINES_KEPT,
        )
        self._pids.append(process.pid)
        return process

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of all processes that it has had."""
        return tuple(self._pids)

    @property
    def is_running(self) -> bool:
        """True until its process has ended. A stopped process has not ended."""
        return self._process.is_running

    @property
    def ending(self) -> Ending | None:
        """The ending of its process; None while it runs."""
        return self._process.ending

    @property
    def output(self) -> tuple[str, ...]:
        """Its output lines until now."""
        return (*self._earlier_output, *self._process.lines)[-_NUM_LINES_KEPT:]

    @property
    def reports(self) -> tuple[dict[str, Any], ...]:
        """Its reports until now."""
        return read_reports(self._report_file)

    def kill(self) -> None:
        """Kills the process, like ``kill -9``."""
        self._process.kill()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()

    def stop(self) -> None:
        """Sends SIGSTOP, which halts the process until ``resume``."""
        self._process.stop()

    def resume(self) -> None:
        """Sends SIGCONT."""
        self._process.resume()

    def restart(self) -> None:
        """Restarts its process with the same command, ports and environment. Kills it first if it runs.

        ``REPLICAX_RESTART_COUNT`` increases by one. Output and reports continue.
        """
        self._process.close()
        self._num_restarts += 1
        self._earlier_output = self.output
        self._process = self._started()

    def wait(self, timeout_s: float | None = None) -> TaskResult:
        """Waits until its process has ended.

        Args:
          timeout_s: The time limit; the cluster's ``timeout_s`` by default.

        Raises:
          ProcessTimeoutError: The process still runs.
        """
        ending = self._process.wait(self._timeout_s if timeout_s is None else timeout_s)
        return TaskResult(self.task, ending.exit_code, ending.signal, self.output, self.reports)

    def wait_for_output(self, text: str, timeout_s: float | None = None, *, since_start: bool = False) -> str:
        """Waits until a line contains ``text``. Returns the first such line.

        Args:
          text: The text to find in a line.
          timeout_s: The time limit; the cluster's ``timeout_s`` by default.
          since_start: True to search only the lines since its last start.

        Raises:
          ProcessTimeoutError: No line has it in time, or the process has ended without one.
        """

        def found() -> str | None:
            lines = self._process.lines if since_start else self.output
            return next((line for line in lines if text in line), None)

        return self._wait_for(found, f"a line with {text!r}", timeout_s)

    def wait_for_report(self, name: str, timeout_s: float | None = None) -> Any:
        """Waits until the task has reported a value with this name. Returns the first one.

        Raises:
          ProcessTimeoutError: The task has not reported it in time, or the process has ended.
        """

        def found() -> tuple[Any] | None:
            return next(((report[name],) for report in self.reports if name in report), None)

        return self._wait_for(found, f"a report of {name!r}", timeout_s)[0]

    def _wait_for(self, found: Callable[[], Any], what: str, timeout_s: float | None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = not self._process.is_running or time.monotonic() >= deadline
            if (thing := found()) is not None:
                return thing
            if is_over:
                how = self._process.ending or f"has not within {timeout_s:g} s"
                raise ProcessTimeoutError(
                    f"Waited for {what} from {self.task}, which {how}.{shown_lines(self.output)}"
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Kills the process and all processes that it has started."""
        self._process.close()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of its process, and the number of its restarts."""
        return {**self._process.statistics(), "num_restarts": self._num_restarts}
