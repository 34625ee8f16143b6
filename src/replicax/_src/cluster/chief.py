"""``is_chief``: finds the one process of a job that prints, logs and saves."""

from __future__ import annotations

import sys
from collections.abc import Callable

from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver, is_one_task

_roles: list[bool] = []  # roles of this process, one for each strategy that it has made for a cluster
_leaders: list[Callable[[], bool]] = []  # if failures are tolerated: says if this process leads the live ones


def is_chief() -> bool:
    """Returns True in exactly one process of a job, which prints, logs, or starts the W&B or MLflow run.

    This process is the chief, or worker 0 if there is no chief. If the strategy tolerates failures, it is the live
    process with the lowest number, so that another one becomes chief when this one dies: ask again each time. With
    parameter servers it is the coordinator; if each worker runs the program, it is the chief or worker 0. An evaluator
    is not the chief of the job. Without a cluster the result is True.

    Call it anywhere: before or after a strategy is created, in a scope or in a replica function. It neither blocks nor
    communicates. It uses the cluster resolver of the strategy if there is one. Otherwise it uses the arguments of
    ``jax.distributed.initialize``, then the environment, as ``choose_resolver`` does.

    Raises:
      ClusterError: The environment describes the cluster wrongly.

    >>> is_chief()
    True
    """
    if _leaders:
        return _leaders[-1]()
    if _roles:
        return _roles[-1]
    number = _number_for_jax()
    if number is not None:
        return number == 0
    return _has_chief_role(choose_resolver().membership)


def note_role(resolver: ClusterResolver | None, is_chief: bool) -> None:
    """Notes the role of this process in the cluster of a new strategy. A single task has no role."""
    if resolver is not None and not is_one_task(resolver.cluster_spec()):
        _roles[:] = [is_chief and resolver.task_type != "evaluator"]


def follow_leader(is_leader: Callable[[], bool]) -> None:
    """Lets the role of this process follow the live processes of its job, whose leader is the chief."""
    _leaders[:] = [is_leader]


def has_role(is_chief: bool) -> bool:
    """Returns True if this process is the chief now. Unless failures are tolerated, that is its role at the start."""
    return _leaders[-1]() if _leaders else is_chief


def _has_chief_role(membership: Membership) -> bool:
    return membership.is_chief and not membership.is_evaluator


def _number_for_jax() -> int | None:
    """Returns the number of this process if ``jax.distributed`` was initialized. Does not import JAX, which takes a
    second.
    """
    if "jax" not in sys.modules:
        return None
    from replicax._src.jax_internals import jax_compat

    return jax_compat.process_number()
