"""Starts a worker that runs the program itself, and shares the parameter servers with other such workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_contents import ServerContents
from replicax._ps.client.session import Session
from replicax._ps.client.shared_arrays import SharedArrays
from replicax._ps.client.shared_job import join_shared
from replicax._ps.client.tasks import Share, Tasks
from replicax._src.program_kit.cluster_tasks import (
    ClusterSpec,
    Credentials,
    Membership,
    ServerSettings,
)


def shared_session(membership: Membership, environ: Mapping[str, str]) -> Session:
    """Joins the session of the other workers. Waits for the parameter servers and the chief.

    Raises:
      UnavailableError: A parameter server does not answer, or the chief has not started the session.
    """
    limit = ServerSettings(environ).start_limit_s
    share = Share([str(task) for task in membership.workers], str(membership.task))
    tasks = Tasks((), addresses(membership.spec, "ps"), Credentials.from_environment(environ), share)
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
