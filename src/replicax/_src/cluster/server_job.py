"""The cluster of a job with parameter servers, as a process that makes its strategy finds it.

Some messages begin with those of TensorFlow.
"""

from __future__ import annotations

from typing import final

from replicax._src.cluster.detect import checked_resolver
from replicax._src.cluster.errors import TaskError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver, membership_of
from replicax._src.cluster.spec import ClusterSpec


@final
class ServerJob:
    """A job with parameter servers.

    Args:
      given: The resolver of the cluster; None for the resolver that fits the environment.

    Attributes:
      resolver: The resolver.

    Raises:
      InvalidArgumentError: The argument is not a resolver.
    """

    def __init__(self, given: ClusterResolver | None):
        self.resolver = checked_resolver(given)

    def cluster_of_coordinator(self) -> ClusterSpec:
        """Returns the cluster of which this process is the coordinator.

        Raises:
          TaskError: It is not such a cluster, or this process is not its chief. The messages begin like TensorFlow's.
        """
        spec = self.resolver.cluster_spec()
        source = spec.origin
        wrong = [job for job in spec.jobs if job not in ("chief", "worker", "ps", "evaluator")]
        if wrong:
            raise TaskError(
                f"Disallowed task type found in cluster spec{source}: {', '.join(wrong)}. Allowed are chief, worker, "
                "ps and evaluator."
            )
        for job in ("worker", "ps"):
            if job not in spec.jobs or not spec.num_tasks(job):
                raise TaskError(
                    f"There must be at least one {job}. The cluster{source} has "
                    f"{', '.join(spec.jobs) or 'no tasks'}. Add the addresses of its {job} tasks; "
                    "on one machine: replicax launch --workers 2 --ps 1 train.py"
                )
        if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
            raise TaskError(
                f"There must be at most one 'chief' job. Got {spec.num_tasks('chief')}{source}. Keep one."
            )
        if self.resolver.task_type in ("worker", "ps"):
            raise TaskError(
                f"This process is {self.resolver.task_type} {self.resolver.task_id}{source}, but only the "
                "chief makes the coordinator's ParameterServerStrategy. In this task run `replicax server`, "
                "or rx.Server(...).join()."
            )
        return spec

    def own_worker(self) -> Membership:
        """Returns the place of this process among the workers.

        Raises:
          TaskError: There is no parameter server, or this process is not a worker. The first message begins like
            TensorFlow's.
        """
        membership = membership_of(self.resolver)
        spec, task = membership.spec, membership.task
        source = spec.origin
        if "ps" not in spec.jobs or not spec.num_tasks("ps"):
            raise TaskError(
                f"The cluster spec needs to have `ps` jobs. The cluster{source} has "
                f"{', '.join(spec.jobs) or 'no tasks'}. Add the addresses of its parameter servers; on one machine: "
                "replicax launch --workers 2 --ps 1 --no-chief train.py"
            )
        if task.type not in ("chief", "worker"):
            raise TaskError(
                f"This process is {task}{source}, but only the chief and workers run the program on shared parameter "
                "servers. An evaluator reads checkpoints, with another strategy; a ps runs `replicax server`."
            )
        return membership
