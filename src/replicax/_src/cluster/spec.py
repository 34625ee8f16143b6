"""``ClusterSpec`` and ``Task``: the tasks of a cluster and their addresses. ``membership.py`` has the rules.

An address is ``host:port``. Port 0 means that no task connects there. Launchers that give only the address of the
leader leave the others at ``UNKNOWN_ADDRESS``. Pure: no jax, no sockets, no environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.cluster.errors import AddressError, ClusterTypeError, TaskError

UNKNOWN_ADDRESS = "unknown:0"


def split_address(address: str, *, source: str = "") -> tuple[str, int]:
    """Returns host and port: ``"[::1]:2222" -> ("::1", 2222)``.

    Args:
      address: ``host:port``; an IPv6 address needs brackets.
      source: The origin of the address, for the message: ``TF_CONFIG``.

    Raises:
      AddressError: The address is not of that form, or the port is not in 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if "://" in address:
        wrong = "it has a scheme"
    elif not colon:
        wrong = "it has no port"
    elif not host:
        wrong = "it has no host"
    elif any(letter.isspace() or letter in "/,[]" for letter in host):
        wrong = f"{host!r} is not a host"
    elif ":" in host and not is_bracketed:
        wrong = "an IPv6 address needs brackets around it, and a port after them"
    elif not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        wrong = f"{port!r} is not a port of 0 to 65535"
    else:
        return host, int(port)
    raise AddressError(
        f"{address!r}{from_source(source)} is not the address of a task: {wrong}. Write host:port, such as "
        f"'worker0.example.com:2222', '10.0.0.7:2222' or '[::1]:2222'."
    )


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@final
@dataclass(frozen=True)
class Task:
    """One process of a cluster: its type, and its index among the tasks of this type.

    ``str(task)`` is the short form of messages, ``worker 1``.

    Attributes:
      type: ``chief``, ``worker``, ``ps`` or ``evaluator``.
      index: The index, from 0.
    """

    type: str
    index: int

    @property
    def name(self) -> str:
        """TensorFlow's name of the task: ``/job:worker/task:1``."""
        return f"/job:{self.type}/task:{self.index}"

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@final
@dataclass(frozen=True)
class JobDef:
    """The tasks of one job: an entry of ``ClusterDef.job``.

    Attributes:
      name: The name of the job.
      tasks: The address of each known task, by its index.
    """

    name: str
    tasks: Mapping[int, str]


@final
@dataclass(frozen=True)
class ClusterDef:
    """The result of ``ClusterSpec.as_cluster_def``. It has the attributes of TensorFlow's message, without protobuf.

    Attributes:
      job: The jobs, by name.
    """

    job: tuple[JobDef, ...]


@final
class ClusterSpec:
    """The tasks of a cluster, by job, and their addresses: ``tf.train.ClusterSpec``.

    Like TensorFlow, it accepts any job names and any strings as addresses; a ``Membership`` checks them. Two specs are
    equal if they have the same tasks. A dict equals the spec that is made of it.

    Args:
      cluster: A mapping from job names to lists of addresses; another ClusterSpec; or a ClusterDef. If only some tasks
        of a job are known, its value is a mapping from task indices to addresses.
      source: The origin of the description, for messages: ``TF_CONFIG``.

    Raises:
      ClusterTypeError: ``cluster`` is none of these. It is a TypeError, as in TensorFlow.

    >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": {1: "b:2222"}})
    >>> spec.task_address("worker", 1), spec.job_tasks("worker"), spec.as_dict()["worker"]
    ('b:2222', [None, 'b:2222'], {1: 'b:2222'})
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec | ClusterDef,
        *,
        source: str = "",
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            self._source = source or cluster.source
            return
        if isinstance(cluster, ClusterDef):
            cluster = {job.name: job.tasks for job in cluster.job}
        if not isinstance(cluster, Mapping):
            raise ClusterTypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network addresses, "
                f"got {type(cluster).__name__}{from_source(source)}: {_shown(cluster)}. Write "
                '{"worker": ["host:port", ...]}. For a tf.train.ClusterSpec, pass its as_dict().'
            )
        self._jobs = {_job_name(job, source): _tasks_of(job, tasks, source) for job, tasks in cluster.items()}
        self._source = source

    @property
    def source(self) -> str:
        """The origin of the description, such as ``TF_CONFIG``; empty if it is not known."""
        return self._source

    @property
    def origin(self) -> str:
        """The source for a message, ``" (from TF_CONFIG)"``; empty if it is not known."""
        return from_source(self._source)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The known tasks, by job, in the order of their indices."""
        return tuple(Task(job, index) for job, tasks in self._jobs.items() for index in tasks)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of known tasks of this job.

        Raises:
          TaskError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the known tasks of this job, in order.

        Raises:
          TaskError: There is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
          TaskError: There is no such job, or no such task in it.
        """
        job = self._job(job_name)
        if task_index not in job:
            raise TaskError(
                f"No task with index {task_index!r} in job {job_name!r}{from_source(self._source)}. It has "
                f"{listed(sorted(job))}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of this job in the order of the indices; None for a task that is not known.

        Raises:
          TaskError: There is no such job.
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def num_tasks_beside(self, task: Task) -> int:
        """Returns the number of tasks whose addresses have the same host as a task, itself included.

        >>> spec = ClusterSpec({"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["a:3"]})
        >>> spec.num_tasks_beside(Task("worker", 0)), spec.num_tasks_beside(Task("worker", 1))
        (3, 1)
        >>> spec.num_tasks_beside(Task("evaluator", 0))
        1
        """
        hosts = {known: split_address(self.task_address(known.type, known.index))[0] for known in self.tasks}
        return max(1, list(hosts.values()).count(hosts.get(task, "")))

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns a list of addresses for each job, or a dict from indices if some tasks are not known."""
        return {
            job: _as_list(tasks) if _is_dense(tasks) else dict(tasks) for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> ClusterDef:
        """Returns the jobs in the order of their names, and their tasks in the order of their indices.

        The result is not a protobuf message. Pass ``tf.train.ClusterSpec(spec.as_dict())`` to TensorFlow's functions.

        >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": ["c:2222"]})
        >>> [(job.name, dict(job.tasks)) for job in spec.as_cluster_def().job]
        [('ps', {0: 'c:2222'}), ('worker', {0: 'a:2222', 1: 'b:2222'})]
        """
        jobs = sorted(self._jobs.items())
        return ClusterDef(tuple(JobDef(name, dict(sorted(tasks.items()))) for name, tasks in jobs))

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise TaskError(
                f"No such job in cluster: {job_name!r}{from_source(self._source)}. It has {listed(self.jobs)}."
            )
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except ClusterTypeError:
                return False
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, frozenset(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"


# --- reading a spec -----------------------------------------------------------------------------------


def _job_name(job: object, source: str) -> str:
    if not isinstance(job, str):
        raise ClusterTypeError(
            f"Job name {job!r} must be bytes or unicode{from_source(source)}: names are texts, such as 'worker'."
        )
    return job


def _tasks_of(job: str, tasks: object, source: str) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        indexed = [(_task_index(job, index, source), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        indexed = list(enumerate(tasks))
    else:
        raise ClusterTypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings, got "
            f"{type(tasks).__name__}{from_source(source)}: {_shown(tasks)}. Write a list, also for one task: "
            f'"{job}": ["host:port"].'
        )
    for _, address in indexed:
        if not isinstance(address, str):
            raise ClusterTypeError(
                f"Task address {address!r} must be bytes or unicode{from_source(source)}, but it is a "
                f"{type(address).__name__}, in job {job!r}. Write it as a text, 'host:port'."
            )
    return dict(sorted(indexed))


def _task_index(job: str, index: Any, source: str) -> int:
    try:
        number = int(index)  # also strings: the keys of JSON objects
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(index, bool):
        raise ClusterTypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings, got the key "
            f"{index!r}{from_source(source)}. Indices are whole numbers from 0."
        )
    return number


def _is_dense(tasks: Mapping[int, str]) -> bool:
    return bool(tasks) and max(tasks) + 1 == len(tasks)


def _as_list(tasks: Mapping[int, str]) -> list[str]:
    return [tasks[index] for index in range(len(tasks))]


# --- words of messages --------------------------------------------------------------------------------


def from_source(source: str) -> str:
    """Returns the origin of a spec for a message; empty if it is not known."""
    return f" (from {source})" if source else ""


def _shown(value: object, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def listed(values: Sequence[object]) -> str:
    """Returns ``"chief, worker"``, or ``"none"``."""
    return ", ".join(map(str, values)) if values else "none"
