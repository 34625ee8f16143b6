"""``is_chief``: whether this process does what a job does once."""

from __future__ import annotations

import sys

from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver, is_one_task

_roles: list[bool] = []  # of this process, as the strategies of a cluster say that it has made


def is_chief() -> bool:
    """Returns True in one process of a job, which does what is to be done once: printing, logging, one W&B or MLflow
    run.

    That is the chief, or worker 0 if there is no chief. With parameter servers it is the coordinator, or, where each
    worker runs the program, the chief or worker 0. An evaluator is not the chief of the job. Without a cluster it is
    True.

    Call it anywhere: before a strategy is made and after, in a scope and in a replica function. It neither blocks nor
    communicates. A cluster resolver that you pass to a strategy counts from then on; before that, and without one, what
    ``jax.distributed.initialize`` was told counts, and what the environment says: TF_CONFIG, torchrun, Open MPI, Slurm,
    SageMaker.

    Raises:
      ClusterError: What the environment says about the cluster is wrong.

    >>> is_chief()
    True
    """
    if _roles:
        return _roles[-1]
    number = _number_for_jax()
    if number is not None:
        return number == 0
    return _has_chief_role(choose_resolver().membership)


def note_role(resolver: ClusterResolver | None, is_chief: bool) -> None:
    """Notes the role of this process in the cluster that a strategy was made for; one task on its own has none."""
    if resolver is not None and not is_one_task(resolver.cluster_spec()):
        _roles[:] = [is_chief and resolver.task_type != "evaluator"]


def _has_chief_role(membership: Membership) -> bool:
    return membership.is_chief and not membership.is_evaluator


def _number_for_jax() -> int | None:
    """The number of this process where ``jax.distributed`` was initialized; importing JAX for this would take a
    second.
    """
    if "jax" not in sys.modules:
        return None
    from replicax._src import jax_compat

    return jax_compat.process_number()
