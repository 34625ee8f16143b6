"""``LocalCluster``: a cluster of real processes on this machine, which tests can kill, stop and restart."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from replicax._src.cluster.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, random_token
from replicax._src.cluster.machine_layout import (
    DEVICES_VARIABLE,
    SERVER_COMMAND,
    ClusterLayout,
    free_ports,
    task_environment,
    tf_config,
)
from replicax._src.cluster.processes import ProcessTimeoutError, shown_lines
from replicax._src.cluster.spec import Task
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._testing.local_tasks import ClusterResults, LocalTask
from replicax._testing.task_reports import REPORT_FILE_VARIABLE

_POLL_S = 0.02
_STARTED = "LocalCluster.{} was called before, or the cluster is closed. Make another one, or call restart()."


class LocalCluster:
    """Runs a program as the tasks of a cluster on this machine, each with its own ``TF_CONFIG``.

    With parameter servers, these and the workers run ``replicax server`` unless ``script_in`` says otherwise, and all
    tasks get a random ``REPLICAX_TOKEN``. Tasks compute on the CPU unless ``JAX_PLATFORMS`` is set. Use it in ``with``.
    All processes end when it is closed, or when this process ends in any way. POSIX only. Use it outside of traced
    functions.

    Args:
      num_workers: The number of tasks of type ``worker``.
      chief: True to add a task of type ``chief``.
      num_ps: The number of parameter servers.
      evaluator: True to add an evaluator.
      script_in: The tasks that run the program if there are parameter servers, as for ``replicax launch``: "chief",
        "workers" or "all".
      server_arguments: The arguments of ``replicax server``: ``["--snapshot-dir", path]``.
      devices_per_worker: The number of virtual CPU devices of each task except parameter servers.
      environment: Variables of all tasks, besides those of this process; None removes a variable.
      timeout_s: The default time limit of waits for tasks.

    Attributes:
      cluster: The addresses of the tasks, by type, as in ``TF_CONFIG``.
      own_environment: Further variables of single tasks, by type and index. Fill it before the tasks start.

    Raises:
      ClusterError: The cluster would have no tasks.

    >>> with LocalCluster(num_workers=2) as cluster:
    ...     cluster.start("import os\\nprint(os.environ['TF_CONFIG'][-31:])")
    ...     results = cluster.wait()
    >>> results["worker", 1].output
    ('{"type": "worker", "index": 1}}',)
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        chief: bool = False,
        num_ps: int = 0,
        evaluator: bool = False,
        script_in: Literal["chief", "workers", "all"] | None = None,
        server_arguments: Sequence[str] = (),
        devices_per_worker: int = 1,
        environment: Mapping[str, str | None] | None = None,
        timeout_s: float = 60.0,
    ):
        if isinstance(devices_per_worker, bool) or devices_per_worker < 1:
            raise InvalidArgumentError(
                f"devices_per_worker must be a number of at least 1, got {devices_per_worker!r}."
            )
        self._layout = ClusterLayout(num_workers, chief, num_ps, evaluator)
        self._servers, self._script_in = self._layout.servers(script_in), script_in
        self._server_command = [*SERVER_COMMAND, *map(str, server_arguments)]
        self._devices_per_worker, self._timeout_s = devices_per_worker, timeout_s
        token = {TOKEN_VARIABLE: random_token(), TOKEN_FILE_VARIABLE: None}
        changed = {**os.environ, "PYTHONUNBUFFERED": "1", **token, **(environment or {})}
        self._environment = {name: value for name, value in changed.items() if value is not None}
        self._directory = tempfile.TemporaryDirectory(prefix="replicax-cluster-")
        self.own_environment: dict[tuple[str, int], dict[str, str]] = {}
        self._tasks: dict[tuple[str, int], LocalTask] = {}
        self._is_closed = False
        ports = free_ports(len(self._layout.tasks_with_address))
        self.cluster = self._layout.on_this_machine(ports)

    @property
    def tasks(self) -> Mapping[tuple[str, int], LocalTask]:
        """The tasks that were started: ``cluster.tasks["worker", 1]``."""
        return self._tasks

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of all processes that tasks have had."""
        return tuple(pid for task in self._tasks.values() for pid in task.pids)

    @property
    def servers(self) -> tuple[LocalTask, ...]:
        """The tasks that were started and run ``replicax server``."""
        return tuple(task for task in self._tasks.values() if task.task in self._servers)

    def environment_of(self, task_type: str, index: int) -> dict[str, str]:
        """Returns the environment of a task, for a process that the test starts itself, or for the test's own
        process.
        """
        task = Task(task_type, index)
        told = {"TF_CONFIG": tf_config(self.cluster, task)}
        if self._devices_per_worker > 1:
            told[DEVICES_VARIABLE] = str(self._devices_per_worker)
        token = {name: self._environment[name] for name in (TOKEN_VARIABLE,) if name in self._environment}
        return told | token | self.own_environment.get((task_type, index), {})

    @property
    def resolver(self) -> TFConfigClusterResolver:
        """The cluster resolver for the coordinator's strategy in the process of the test."""
        return TFConfigClusterResolver(environ=self.environment_of("chief", 0))

    def start_servers(self) -> None:
        """Starts the tasks that run ``replicax server``, and waits until they answer (about 2 s for all together).

        Raises:
          InvalidArgumentError: There are no such tasks, or tasks were started already.
          ProcessTimeoutError: A server has ended, or does not answer within ``timeout_s``. No process is left.
        """
        if not self._servers:
            raise InvalidArgumentError(
                "There are no servers in this cluster. Create it with num_ps=1, for example."
            )
        if self._tasks or self._is_closed:
            raise InvalidArgumentError(_STARTED.format("start_servers"))
        self._start({task: self._server_command for task in self._layout.tasks if task in self._servers})
        try:
            self.wait_for_servers()
        except BaseException:
            self.close()
            raise

    def wait_for_servers(self, timeout_s: float | None = None) -> None:
        """Waits until all servers listen, for example after a restart.

        Raises:
          ProcessTimeoutError: A server has ended, or does not listen in time.
        """
        for task in self.servers:
            task.wait_for_output(" listens at ", timeout_s, since_start=True)

    def start(self, program: str | os.PathLike[str] | Callable[..., Any], args: Sequence[str] = ()) -> None:
        """Starts a program as every task.

        Args:
          program: The path of a script; its source, a str of more than one line; or a function. The source of a
            function is copied: it must contain its imports, and is called with ``args``, all str.
          args: The arguments on its command line.

        Raises:
          InvalidArgumentError: The script or the function's source does not exist, or tasks were started already.
          ProcessStartError: A process could not be created. No process is left.
        """
        if all(self._started_already(task) for task in self._layout.tasks):
            raise InvalidArgumentError(_STARTED.format("start"))
        command = [str(self._script_of(program)), *map(str, args)]
        self._start(
            {task: self._server_command if task in self._servers else command for task in self._layout.tasks}
        )

    def _started_already(self, task: Task) -> bool:
        return self._is_closed or (task.type, task.index) in self._tasks

    def _start(self, commands: Mapping[Task, Sequence[str]]) -> None:
        """Starts the tasks that have not been started."""
        try:
            for task, command in commands.items():
                if not self._started_already(task):
                    self._tasks[task.type, task.index] = self._started(task, [sys.executable, *command])
        except BaseException:
            self.close()
            raise

    def _started(self, task: Task, command: Sequence[str]) -> LocalTask:
        report_file = Path(self._directory.name) / f"{task.type}-{task.index}.reports"
        own = task_environment(
            self.cluster,
            task,
            self._environment,
            num_devices=self._devices_per_worker,
            is_server=task in self._servers,
        )
        own |= {**self._layout.environment_for(task, self._script_in), REPORT_FILE_VARIABLE: str(report_file)}
        own |= self.own_environment.get((task.type, task.index), {})
        return LocalTask(task, command, {**self._environment, **own}, report_file, self._timeout_s)

    def _script_of(self, program: str | os.PathLike[str] | Callable[..., Any]) -> Path:
        if callable(program):
            return self._written(_source_of(program))
        if isinstance(program, str) and "\n" in program:
            return self._written(textwrap.dedent(program))
        path = Path(program)
        if not path.is_file():
            raise InvalidArgumentError(
                f"LocalCluster.start: there is no script {str(program)!r} in {Path.cwd()}. Give its path, or source code "
                "of more than one line."
            )
        return path

    def _written(self, source: str) -> Path:
        path = Path(self._directory.name) / "program.py"
        path.write_text(source)
        return path

    def wait(self, timeout_s: float | None = None) -> ClusterResults:
        """Waits until all tasks have ended. Servers get SIGTERM when all other tasks have ended. Blocks.

        Args:
          timeout_s: The time limit; the cluster's ``timeout_s`` by default.

        Returns:
          The result of each task. Its ``raise_if_failed()`` raises if a task did not exit with 0.

        Raises:
          ProcessTimeoutError: Some tasks still run. It shows their names and last lines. They keep running.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        has_program = any(task.task not in self._servers for task in self._tasks.values())
        while running := [task for task in self._tasks.values() if task.is_running]:
            if has_program and all(task.task in self._servers for task in running):
                has_program = False
                for task in running:
                    task.terminate()
            if time.monotonic() >= deadline:
                raise ProcessTimeoutError(
                    "\n".join(
                        f"{t.task} still runs after {timeout_s:g} s.{shown_lines(t.output)}" for t in running
                    )
                )
            time.sleep(_POLL_S)
        return ClusterResults([task.wait(timeout_s) for task in self._tasks.values()])

    def restart(self, task_type: str, index: int) -> None:
        """Restarts the process of a task on the same port. Kills it first if it runs."""
        self._task(task_type, index).restart()

    def _task(self, task_type: str, index: int) -> LocalTask:
        try:
            return self._tasks[task_type, index]
        except KeyError:
            there = ", ".join(str(task.task) for task in self._tasks.values()) or "none, before start()"
            raise InvalidArgumentError(
                f"There is no {task_type} {index} in this cluster; there are: {there}."
            ) from None

    def close(self) -> None:
        """Kills all processes, and waits until they are gone: about 10 ms for each task."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # closes all tasks, even if one raises
            stack.callback(self._directory.cleanup)
            for task in self._tasks.values():
                stack.callback(task.close)

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of each task, by its name."""
        return {"tasks": {str(task.task): task.statistics() for task in self._tasks.values()}}

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def server_cluster(workers: int = 2, ps: int = 1, **options: Any) -> Iterator[LocalCluster]:
    """Runs workers and parameter servers in separate processes; this process is their coordinator.

    In the block this process has the ``TF_CONFIG`` and ``REPLICAX_TOKEN`` of the chief, so a strategy that is created
    from the environment finds the cluster. ``cluster.resolver`` describes the same cluster. The tasks start in
    parallel, which takes about 2 s. No process is left afterwards.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers.
      options: Other arguments of ``LocalCluster``.

    Yields:
      The cluster. Use ``cluster.tasks["worker", 0].kill()``, ``stop()`` and ``resume()``; ``cluster.restart("ps", 0)``;
      and ``cluster.wait_for_servers()`` until servers listen again.
    """
    with LocalCluster(workers, chief=True, num_ps=ps, **options) as cluster:
        cluster.start_servers()
        told = {TOKEN_FILE_VARIABLE: None, **cluster.environment_of("chief", 0)}
        before = {name: os.environ.get(name) for name in told}
        _set(told)
        try:
            yield cluster
        finally:
            _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _source_of(function: Callable[..., Any]) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise InvalidArgumentError(
            f"LocalCluster.start: the source of {function!r} cannot be found ({error}). Give the path of a script, or its "
            "source as a str."
        ) from error
    if not source.startswith("def "):
        raise InvalidArgumentError(
            f"LocalCluster.start takes a plain function, written with def and without decorators, got {function!r}."
        )
    return f"{source}\n\nimport sys\n\n{function.__name__}(*sys.argv[1:])\n"
