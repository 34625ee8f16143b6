"""Starts a worker that runs the program itself, and shares the parameter servers with other such workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.environ import START_LIMIT, limit_s
from replicax._src.cluster.errors import TaskError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver, membership_of
from replicax._src.cluster.spec import ClusterSpec, from_source, listed
from replicax._src.parameter_servers.client.server_clients import ServerClients
from replicax._src.parameter_servers.client.server_contents import ServerContents
from replicax._src.parameter_servers.client.session import Session
from replicax._src.parameter_servers.client.shared_arrays import SharedArrays
from replicax._src.parameter_servers.client.shared_job import join_shared
from replicax._src.parameter_servers.client.tasks import Share, Tasks


def worker_of_own(resolver: ClusterResolver) -> Membership:
    """Returns the place of this process among the workers.

    Raises:
      TaskError: There is no parameter server, or this process is not a worker. The first message begins like
        TensorFlow's.
    """
    membership = membership_of(resolver)
    spec, task = membership.spec, membership.task
    source = from_source(spec.source)
    if "ps" not in spec.jobs or not spec.num_tasks("ps"):
        raise TaskError(
            f"The cluster spec needs to have `ps` jobs. The cluster{source} has "
            f"{listed(spec.jobs) or 'no tasks'}. Add the addresses of its parameter servers; on one machine: "
            "replicax launch --workers 2 --ps 1 --no-chief train.py"
        )
    if task.type not in ("chief", "worker"):
        raise TaskError(
            f"This process is {task}{source}, but only the chief and workers run the program on shared parameter "
            "servers. An evaluator reads checkpoints, with another strategy; a ps runs `replicax server`."
        )
    return membership


def shared_session(membership: Membership, environ: Mapping[str, str]) -> Session:
    """Joins the session of the other workers. Waits for the parameter servers and the chief.

    Raises:
      UnavailableError: A parameter server does not answer, or the chief has not started the session.
    """
    limit = limit_s(environ, START_LIMIT)
    share = Share([str(task) for task in membership.workers], str(membership.task))
    tasks = Tasks((), addresses(membership.spec, "ps"), Credentials.of_environment(environ), share)
    told = join_shared(tasks, limit)
    tasks.start_heartbeats()
    num_ps = len(tasks.addresses("ps"))
    servers = ServerClients([tasks.connect("ps", index) for index in range(num_ps)], tasks.incarnation)
    platforms = sorted({str(answer["platform"]) for answer in told})
    intervals_s = [snapshot_interval_s(answer) for answer in told]
    return Session(
        servers, platforms, tasks, intervals_s, SharedArrays(ServerContents(servers), share, limit)
    )


def addresses(spec: ClusterSpec, job: str) -> list[str]:
    """Returns the addresses of the tasks of a job, in order."""
    return [spec.task_address(job, index) for index in spec.task_indices(job)]


def snapshot_interval_s(told: Mapping[str, Any]) -> float | None:
    """Returns the snapshot interval in a parameter server's description of itself; None if it takes no snapshots."""
    snapshots = told["snapshots"]
    return None if snapshots is None else float(snapshots["interval_s"])
