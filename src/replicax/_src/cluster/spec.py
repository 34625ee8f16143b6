"""Who is in a cluster and at which address: ``ClusterSpec``, ``Task`` and ``Membership``, one task's view of it.

An address is ``host:port``. Port 0 means that nobody connects there: launchers that tell only the address of the
leader leave the others at ``UNKNOWN_ADDRESS``. Pure: no jax, no sockets, no environment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.cluster.errors import AddressError, ClusterTypeError, TaskError

UNKNOWN_ADDRESS = "unknown:0"

_TASK_TYPES = ("chief", "worker", "evaluator", "ps", None)


def split_address(address: str, *, source: str = "") -> tuple[str, int]:
    """Returns host and port: ``"[::1]:2222" -> ("::1", 2222)``.

    Args:
      address: ``host:port``; an IPv6 address stands in brackets.
      source: Where it comes from, for the message: ``TF_CONFIG``.

    Raises:
      AddressError: It is not of that form, or the port is not one of 0 to 65535.
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
        wrong = f"{host!r} is no host"
    elif ":" in host and not is_bracketed:
        wrong = "an IPv6 address needs brackets around it, and a port after them"
    elif not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        wrong = f"{port!r} is not a port of 0 to 65535"
    else:
        return host, int(port)
    raise AddressError(
        f"{address!r}{_from(source)} is not the address of a task: {wrong}. Write host:port, such as "
        f"'worker0.example.com:2222', '10.0.0.7:2222' or '[::1]:2222'."
    )


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@final
@dataclass(frozen=True)
class Task:
    """One process of a cluster: its type and its index among the tasks of this type.

    ``str(task)`` is the short form of messages, ``worker 1``.

    Attributes:
      type: ``chief``, ``worker``, ``ps`` or ``evaluator``.
      index: From 0.
    """

    type: str
    index: int

    @property
    def name(self) -> str:
        """``/job:worker/task:1``."""
        return f"/job:{self.type}/task:{self.index}"

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@final
class ClusterSpec:
    """The tasks of a cluster, by job, and their addresses: ``tf.train.ClusterSpec``.

    It takes any job names and any texts as addresses, as TensorFlow does; a ``Membership`` checks them. Two are
    equal if they have the same tasks; a dict is equal to one that is made of it.

    Args:
      cluster: A mapping from job names to lists of addresses, or to mappings from task indices to addresses where
        only some tasks are known; or another ClusterSpec.
      source: Where it comes from, for messages: ``TF_CONFIG``.

    Raises:
      ClusterTypeError: It is none of these. It is a TypeError, as in TensorFlow.

    >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": {1: "b:2222"}})
    >>> spec.task_address("worker", 1), spec.job_tasks("worker"), spec.as_dict()["worker"]
    ('b:2222', [None, 'b:2222'], {1: 'b:2222'})
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec,
        *,
        source: str = "",
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            self._source = source or cluster.source
            return
        if not isinstance(cluster, Mapping):
            raise ClusterTypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network addresses, "
                f"got {type(cluster).__name__}{_from(source)}: {_shown(cluster)}. Write "
                '{"worker": ["host:port", ...]}; of a tf.train.ClusterSpec pass its as_dict().'
            )
        self._jobs = {_job_name(job, source): _tasks_of(job, tasks, source) for job, tasks in cluster.items()}
        self._source = source

    @property
    def source(self) -> str:
        """Where it comes from: ``TF_CONFIG``, or empty where that is not known."""
        return self._source

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks of this job are known.

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
                f"No task with index {task_index!r} in job {job_name!r}{_from(self._source)}. It has "
                f"{_listed(sorted(job))}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of this job in the order of the indices, None where a task is not known.

        Raises:
          TaskError: There is no such job.
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns a list of addresses for each job, or a dict from indices where some tasks are not known."""
        return {
            job: _as_list(tasks) if _is_dense(tasks) else dict(tasks) for job, tasks in self._jobs.items()
        }

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise TaskError(
                f"No such job in cluster: {job_name!r}{_from(self._source)}. It has {_listed(self.jobs)}."
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


@final
@dataclass(frozen=True)
class Membership:
    """One task in a cluster, checked: TensorFlow's rules of who leads and who is counted.

    *Workers* are the chief, if there is one, and the tasks of type ``worker``; they compute together. The evaluator
    is chief of a cluster of its own, in which it is the one worker; it may be missing in ``spec``. An empty spec is
    one worker on its own.

    Attributes:
      spec: The cluster.
      task: Of this process.

    Raises:
      TaskError: A job that no strategy knows, two chiefs or evaluators, indices with gaps, or ``task`` is not there.
      AddressError: An address that is malformed or stands there twice, or a leader at port 0.

    >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> me = Membership(spec, Task("worker", 1))
    >>> me.is_chief, me.id_in_cluster, me.num_workers, me.leader_address
    (False, 2, 3, 'a:2222')
    """

    spec: ClusterSpec
    task: Task

    def __post_init__(self) -> None:
        _check_job_names(self.spec)
        _check_task_type(self.spec, self.task)
        _check_numbers(self.spec)
        _check_index(self.spec, self.task)
        _check_addresses(self.spec)
        if self.task.type in ("chief", "worker") and self.num_workers > 1:
            _check_leader(self.spec, self.workers[0])

    @classmethod
    def of(cls, spec: ClusterSpec, task_type: str | None, task_id: int | None) -> Membership:
        """Returns the membership of the task that a resolver names.

        Raises:
          TaskError: The spec is not empty, and type or index are missing.
        """
        if spec and (task_type is None or task_id is None):
            raise TaskError(
                "When `cluster_spec` is given, you must also specify `task_type` and `task_id`. Got the type "
                f"{task_type!r} and the id {task_id!r}{_from(spec.source)}, and a cluster of {_listed(spec.jobs)}. "
                f"{_how_to_name_a_task(spec)}"
            )
        return cls(spec, Task("worker" if task_type is None else task_type, task_id or 0))

    @property
    def is_evaluator(self) -> bool:
        """This task evaluates, on its own."""
        return self.task.type == "evaluator"

    @property
    def is_chief(self) -> bool:
        """This task saves checkpoints and summaries: the chief, worker 0 if there is none, the evaluator."""
        if self.task.type == "worker":
            return self.task.index == 0 and not _num_tasks(self.spec, "chief")
        return self.task.type != "ps"

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that compute together, in the order of their ids; the evaluator alone for the evaluator."""
        if self.is_evaluator or not self.spec:
            return (self.task,)
        return tuple(
            Task(job, index) for job in ("chief", "worker") for index in range(_num_tasks(self.spec, job))
        )

    @property
    def num_workers(self) -> int:
        """How many tasks compute together: TensorFlow's ``worker_count``.

        Raises:
          TaskError: This is a parameter server.
        """
        if self.task.type == "ps":
            raise TaskError(
                "Unexpected `task_type` 'ps': a parameter server is not counted among workers. Ask on a worker."
            )
        return len(self.workers)

    @property
    def id_in_cluster(self) -> int:
        """The place of this task among ``workers``: the chief has 0, worker i has i plus the number of chiefs.

        Raises:
          TaskError: This is a parameter server.
        """
        if self.task.type == "ps":
            raise TaskError(
                "There is no id for task_type 'ps': only tasks that compute have one. Ask on a worker."
            )
        return self.workers.index(self.task)

    @property
    def collective_leader(self) -> str:
        """TensorFlow's name of the first worker; empty for an evaluator, and for a worker on its own."""
        if not self.spec or self.is_evaluator:
            return ""
        return _leader_name(self.spec, ("chief", "worker"))

    @property
    def coordination_leader(self) -> str:
        """TensorFlow's name of the task that coordinates: ps 0, else the chief, else worker 0; empty if alone."""
        return _leader_name(self.spec, ("ps", "chief", "worker")) if self.spec else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of ``workers``; ``UNKNOWN_ADDRESS`` where an address is not known."""
        return tuple(self.address_of(task) for task in self.workers)

    @property
    def address(self) -> str:
        """The address of this task."""
        return self.address_of(self.task)

    @property
    def leader_address(self) -> str:
        """The address of worker 0 of ``workers``, where the others connect."""
        return self.addresses[0]

    def address_of(self, task: Task) -> str:
        """Returns the address of a task, ``UNKNOWN_ADDRESS`` if it is not in the spec."""
        if task.type not in self.spec.jobs or task.index not in self.spec.task_indices(task.type):
            return UNKNOWN_ADDRESS
        return self.spec.task_address(task.type, task.index)


# --- reading a spec -----------------------------------------------------------------------------------


def _job_name(job: object, source: str) -> str:
    if not isinstance(job, str):
        raise ClusterTypeError(
            f"Job name {job!r} must be bytes or unicode{_from(source)}: names are texts, such as 'worker'."
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
            f"{type(tasks).__name__}{_from(source)}: {_shown(tasks)}. Write a list, also for one task: "
            f'"{job}": ["host:port"].'
        )
    for _, address in indexed:
        if not isinstance(address, str):
            raise ClusterTypeError(
                f"Task address {address!r} must be bytes or unicode{_from(source)}: it is a "
                f"{type(address).__name__}, in job {job!r}. Write it as a text, 'host:port'."
            )
    return dict(sorted(indexed))


def _task_index(job: str, index: Any, source: str) -> int:
    try:
        number = int(index)  # texts too: the keys of JSON's objects
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(index, bool):
        raise ClusterTypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings, got the key "
            f"{index!r}{_from(source)}. Indices are whole numbers from 0."
        )
    return number


def _is_dense(tasks: Mapping[int, str]) -> bool:
    return bool(tasks) and max(tasks) + 1 == len(tasks)


def _as_list(tasks: Mapping[int, str]) -> list[str]:
    return [tasks[index] for index in range(len(tasks))]


# --- the rules ----------------------------------------------------------------------------------------
# The texts begin with TensorFlow's, of multi_worker_util.py.


def _num_tasks(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _leader_name(spec: ClusterSpec, jobs: Sequence[str]) -> str:
    job = next((job for job in jobs if _num_tasks(spec, job)), None)
    if job is None:
        raise TaskError(
            f"The cluster{_from(spec.source)} has neither a chief nor workers, so nobody leads: it has "
            f"{_listed(spec.jobs)}. Add at least one worker."
        )
    return f"/job:{job}/replica:0/task:0"


def _check_job_names(spec: ClusterSpec) -> None:
    wrong = [job for job in spec.jobs if job not in _TASK_TYPES]
    if wrong:
        raise TaskError(
            f"Disallowed task type found in cluster spec. Allowed types are {_TASK_TYPES} and the cluster spec is "
            f"{spec}. Rename or leave out {_listed(wrong)}{_from(spec.source)}."
        )


def _check_task_type(spec: ClusterSpec, task: Task) -> None:
    if task.type not in _TASK_TYPES:
        raise TaskError(
            f"Unrecognized task_type: {task.type}, valid task types are: {_TASK_TYPES}. It is the type of this "
            f"process's task{_from(spec.source)}. {_how_to_name_a_task(spec)}"
        )
    if not _num_tasks_or_alone(spec, task.type):
        raise TaskError(
            f"`task_type` {task.type!r} not found in cluster_spec. This process's task is {task}, and the cluster"
            f"{_from(spec.source)} has {_listed(spec.jobs)}. {_how_to_name_a_task(spec)}"
        )


def _check_numbers(spec: ClusterSpec) -> None:
    for job in ("chief", "evaluator"):
        if _num_tasks(spec, job) > 1:
            raise TaskError(
                f"There must be at most one '{job}' job. Got {spec.num_tasks(job)}{_from(spec.source)}: "
                f"{_quoted(spec, job)}. Keep one; "
                + ("the others can be workers." if job == "chief" else "one process evaluates.")
            )
    for job in spec.jobs:
        indices = spec.task_indices(job)
        if indices != list(range(len(indices))):
            raise TaskError(
                f"Job {job!r}{_from(spec.source)} has the task indices {_listed(indices)}, with gaps: "
                f"{_quoted(spec, job)}. A strategy needs to know all tasks, numbered from 0."
            )


def _check_index(spec: ClusterSpec, task: Task) -> None:
    num_tasks = _num_tasks_or_alone(spec, task.type)
    if task.index < 0:
        raise TaskError(
            f"The `task_id` {task.index} of {task.type}{_from(spec.source)} is negative. {_how_to_name_a_task(spec)}"
        )
    if task.index >= num_tasks:
        there = (
            f"{_quoted(spec, task.type)} has"
            if task.type in spec.jobs
            else "Without a list of addresses it has"
        )
        raise TaskError(
            f"The `task_id` {task.index} exceeds the maximum id of {task.type}. {there} {num_tasks} task(s)"
            f"{_from(spec.source)}, numbered from 0, so the index must be at most {num_tasks - 1}. Correct the index "
            f"of this process's task, or add its address."
        )


def _num_tasks_or_alone(spec: ClusterSpec, job: str) -> int:
    """How many tasks of this job there may be: the evaluator, and a worker on its own, need no address."""
    is_alone = job == "evaluator" or (not spec and job in ("chief", "worker"))
    return _num_tasks(spec, job) or int(is_alone)


def _check_addresses(spec: ClusterSpec) -> None:
    places = [(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    addresses = [spec.task_address(*place) for place in places]
    for (job, index), address in zip(places, addresses):
        split_address(address, source=f"{job} {index}" + (f" of {spec.source}" if spec.source else ""))
    counts = Counter(split_address(address.lower()) for address in addresses)
    for (host, port), count in counts.items():
        if count > 1 and port:
            tasks = [f"{Task(*place)}" for place in places if _is_at(spec, place, host, port)]
            raise AddressError(
                f"The address {join_address(host, port)!r} stands {count} times in the cluster{_from(spec.source)}: "
                f"for {' and '.join(tasks)}. Each task needs an address of its own; on one machine, give each another "
                f"port."
            )


def _is_at(spec: ClusterSpec, place: tuple[str, int], host: str, port: int) -> bool:
    return split_address(spec.task_address(*place).lower()) == (host, port)


def _check_leader(spec: ClusterSpec, leader: Task) -> None:
    address = spec.task_address(leader.type, leader.index)
    if not split_address(address)[1]:
        raise AddressError(
            f"The address of {leader}{_from(spec.source)} is {address!r}. Port 0 means that nobody connects there, and "
            f"{leader} is the one that all others connect to: give it a port."
        )


# --- words of messages --------------------------------------------------------------------------------


def _from(source: str) -> str:
    return f" (from {source})" if source else ""


def _shown(value: object, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _quoted(spec: ClusterSpec, job: str) -> str:
    """A job as it stands in TF_CONFIG: ``"chief": ["a:1", "b:1"]``."""
    return f'"{job}": {json.dumps(spec.as_dict()[job])}'


def _how_to_name_a_task(spec: ClusterSpec) -> str:
    job = next(iter(spec.jobs), "worker")
    if spec.source == "TF_CONFIG":
        return f'Write, for example, "task": {{"type": "{job}", "index": 0}} into TF_CONFIG.'
    return f"Name one of its tasks, for example task_type='{job}', task_id=0."
