"""``Membership``: one task in its cluster, checked, with TensorFlow's rules for leaders and worker counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from replicax._src.cluster.errors import AddressError, TaskError
from replicax._src.cluster.spec import (
    UNKNOWN_ADDRESS,
    ClusterSpec,
    Task,
    from_source,
    join_address,
    listed,
    split_address,
)

_TASK_TYPES = ("chief", "worker", "evaluator", "ps", None)


@final
@dataclass(frozen=True)
class Membership:
    """One task in a cluster, checked, with TensorFlow's rules for leaders and worker counts.

    *Workers* are the chief, if there is one, and the tasks of type ``worker``; they compute together. The evaluator is
    the chief and the only worker of its own cluster, and need not be in ``spec``. An empty spec means a single worker.

    Attributes:
      spec: The cluster.
      task: The task of this process.

    Raises:
      TaskError: A job is unknown, there are two chiefs or evaluators, indices have gaps, or ``task`` is missing.
      AddressError: An address is malformed or occurs twice, or the leader is at port 0.

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
          TaskError: The spec is not empty, and the type or the index is missing.
        """
        if spec and (task_type is None or task_id is None):
            raise TaskError(
                "When `cluster_spec` is given, you must also specify `task_type` and `task_id`. Got the type "
                f"{task_type!r} and the id {task_id!r}{from_source(spec.source)}, and a cluster of {listed(spec.jobs)}. "
                f"{_how_to_name_a_task(spec)}"
            )
        return cls(spec, Task("worker" if task_type is None else task_type, task_id or 0))

    @property
    def is_evaluator(self) -> bool:
        """True if this task is an evaluator, which works alone."""
        return self.task.type == "evaluator"

    @property
    def is_chief(self) -> bool:
        """True for the task that saves checkpoints and summaries: the chief, worker 0 without a chief, or the
        evaluator.
        """
        if self.task.type == "worker":
            return self.task.index == 0 and not _num_tasks(self.spec, "chief")
        return self.task.type != "ps"

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that compute together, in the order of their ids. For an evaluator it is the evaluator alone."""
        if self.is_evaluator or not self.spec:
            return (self.task,)
        return tuple(
            Task(job, index) for job in ("chief", "worker") for index in range(_num_tasks(self.spec, job))
        )

    @property
    def num_workers(self) -> int:
        """The number of tasks that compute together: TensorFlow's ``worker_count``.

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
        """The index of this task in ``workers``: the chief has 0, worker i has i plus the number of chiefs.

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
        """TensorFlow's name of the first worker; empty for an evaluator and for a single worker."""
        if not self.spec or self.is_evaluator:
            return ""
        return _leader_name(self.spec, ("chief", "worker"))

    @property
    def coordination_leader(self) -> str:
        """TensorFlow's name of the coordinating task: ps 0, else the chief, else worker 0; empty for a single
        worker.
        """
        return _leader_name(self.spec, ("ps", "chief", "worker")) if self.spec else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of ``workers``; ``UNKNOWN_ADDRESS`` for those that are not known."""
        return tuple(self.address_of(task) for task in self.workers)

    @property
    def address(self) -> str:
        """The address of this task."""
        return self.address_of(self.task)

    @property
    def leader_address(self) -> str:
        """The address of the first of ``workers``, to which the others connect."""
        return self.addresses[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of ``workers`` in messages."""
        return tuple(map(str, self.workers))

    @property
    def described(self) -> str:
        """``workers`` in words, the same in all of them: ``"worker 0 at a:1, worker 1 at b:1"``."""
        return ", ".join(
            f"{name} at {address}" for name, address in zip(self.names, self.addresses, strict=True)
        )

    def address_of(self, task: Task) -> str:
        """Returns the address of a task, ``UNKNOWN_ADDRESS`` if it is not in the spec."""
        return self.spec.task_address(task.type, task.index) if task in self.spec.tasks else UNKNOWN_ADDRESS


# --- the rules ---------------------------------------------------------------------------------------- The messages
# begin with those of TensorFlow's multi_worker_util.py.


def _num_tasks(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _leader_name(spec: ClusterSpec, jobs: Sequence[str]) -> str:
    job = next((job for job in jobs if _num_tasks(spec, job)), None)
    if job is None:
        raise TaskError(
            f"The cluster{from_source(spec.source)} has neither a chief nor workers, so no task leads: it has "
            f"{listed(spec.jobs)}. Add at least one worker."
        )
    return f"/job:{job}/replica:0/task:0"


def _check_job_names(spec: ClusterSpec) -> None:
    wrong = [job for job in spec.jobs if job not in _TASK_TYPES]
    if wrong:
        raise TaskError(
            f"Disallowed task type found in cluster spec. Allowed types are {_TASK_TYPES} and the cluster spec is "
            f"{spec}. Rename or leave out {listed(wrong)}{from_source(spec.source)}."
        )


def _check_task_type(spec: ClusterSpec, task: Task) -> None:
    if task.type not in _TASK_TYPES:
        raise TaskError(
            f"Unrecognized task_type: {task.type}, valid task types are: {_TASK_TYPES}. It is the type of this "
            f"process's task{from_source(spec.source)}. {_how_to_name_a_task(spec)}"
        )
    if not _num_tasks_or_alone(spec, task.type):
        raise TaskError(
            f"`task_type` {task.type!r} not found in cluster_spec. This process's task is {task}, and the cluster"
            f"{from_source(spec.source)} has {listed(spec.jobs)}. {_how_to_name_a_task(spec)}"
        )


def _check_numbers(spec: ClusterSpec) -> None:
    for job in ("chief", "evaluator"):
        if _num_tasks(spec, job) > 1:
            raise TaskError(
                f"There must be at most one '{job}' job. Got {spec.num_tasks(job)}{from_source(spec.source)}: "
                f"{_quoted(spec, job)}. Keep one; "
                + ("the others can be workers." if job == "chief" else "one process evaluates.")
            )
    for job in spec.jobs:
        indices = spec.task_indices(job)
        if indices != list(range(len(indices))):
            raise TaskError(
                f"Job {job!r}{from_source(spec.source)} has the task indices {listed(indices)}, with gaps: "
                f"{_quoted(spec, job)}. A strategy needs to know all tasks, numbered from 0."
            )


def _check_index(spec: ClusterSpec, task: Task) -> None:
    num_tasks = _num_tasks_or_alone(spec, task.type)
    if task.index < 0:
        raise TaskError(
            f"The `task_id` {task.index} of {task.type}{from_source(spec.source)} is negative. {_how_to_name_a_task(spec)}"
        )
    if task.index >= num_tasks:
        there = (
            f"{_quoted(spec, task.type)} has"
            if task.type in spec.jobs
            else "Without a list of addresses it has"
        )
        raise TaskError(
            f"The `task_id` {task.index} exceeds the maximum id of {task.type}. {there} {num_tasks} task(s)"
            f"{from_source(spec.source)}, numbered from 0, so the index must be at most {num_tasks - 1}. Correct the index "
            f"of this process's task, or add its address."
        )


def _num_tasks_or_alone(spec: ClusterSpec, job: str) -> int:
    """Returns the number of tasks of a job, at least 1 for an evaluator or a single worker, which need no address."""
    is_alone = job == "evaluator" or (not spec and job in ("chief", "worker"))
    return _num_tasks(spec, job) or int(is_alone)


def _check_addresses(spec: ClusterSpec) -> None:
    addresses = {task: spec.task_address(task.type, task.index) for task in spec.tasks}
    tasks_at: dict[tuple[str, int], list[Task]] = {}
    for task, address in addresses.items():
        split_address(address, source=f"{task}" + (f" of {spec.source}" if spec.source else ""))
        tasks_at.setdefault(split_address(address.lower()), []).append(task)
    for (host, port), tasks in tasks_at.items():
        if len(tasks) > 1 and port:
            raise AddressError(
                f"The address {join_address(host, port)!r} occurs {len(tasks)} times in the cluster{from_source(spec.source)}: "
                f"for {' and '.join(map(str, tasks))}. Each task needs an address of its own; on one machine, give each "
                f"another port."
            )


def _check_leader(spec: ClusterSpec, leader: Task) -> None:
    address = spec.task_address(leader.type, leader.index)
    if not split_address(address)[1]:
        raise AddressError(
            f"The address of {leader}{from_source(spec.source)} is {address!r}. Port 0 means that no task connects there, but "
            f"all others connect to {leader}: give it a port."
        )


# --- words of messages --------------------------------------------------------------------------------


def _quoted(spec: ClusterSpec, job: str) -> str:
    """Returns a job as written in TF_CONFIG: ``"chief": ["a:1", "b:1"]``."""
    return f'"{job}": {json.dumps(spec.as_dict()[job])}'


def _how_to_name_a_task(spec: ClusterSpec) -> str:
    job = next(iter(spec.jobs), "worker")
    if spec.source == "TF_CONFIG":
        return f'Write, for example, "task": {{"type": "{job}", "index": 0}} into TF_CONFIG.'
    return f"Name one of its tasks, for example task_type='{job}', task_id=0."
