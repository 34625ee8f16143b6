"""The steps that both forms take: to begin a session with the parameter servers, and to compute in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.tasks import Tasks
from replicax._src.program_kit.cluster_tasks import ClusterSpec, ServerSettings
from replicax._src.program_kit.errors import ContextError, DeviceError, InvalidArgumentError
from replicax._src.program_kit.traced_programs import Topology


def addresses(spec: ClusterSpec, job: str) -> list[str]:
    """Returns the addresses of the tasks of a job, in order."""
    return [spec.task_address(job, index) for index in spec.task_indices(job)]


def clients_of(tasks: Tasks) -> ServerClients:
    """Returns clients of all parameter servers, for the session of ``tasks``."""
    num_ps = len(tasks.addresses("ps"))
    return ServerClients([tasks.connect("ps", index) for index in range(num_ps)], tasks.incarnation)


def platforms_of(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the platforms in the parameter servers' descriptions of themselves."""
    return sorted({str(answer["platform"]) for answer in told})


def snapshot_intervals_s(told: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Returns the snapshot interval of each parameter server; None for one that takes no snapshots."""
    snapshots = [answer["snapshots"] for answer in told]
    return [None if each is None else float(each["interval_s"]) for each in snapshots]


def number_of_copies(given: int | None) -> int:
    """Returns the number of copies of each shard: the program's, or the launcher's, or 1.

    Raises:
      InvalidArgumentError: The number is not allowed.
    """
    replication = (ServerSettings().replication or 1) if given is None else given
    if type(replication) is not int or replication not in (1, 2):
        raise InvalidArgumentError(
            f"replication must be 1, each variable on one parameter server, or 2; got {replication!r}."
        )
    return replication


def topology_here(num_devices: int) -> Topology:
    """Returns the topology of a worker's replicas on the devices of this process.

    Raises:
      DeviceError: This process has fewer devices.
    """
    devices = jax.local_devices()
    if len(devices) < num_devices:
        raise DeviceError(
            f"Workers have {num_devices} devices (devices_per_worker), but this one has "
            f"{len(devices)}. Start all with as many, or use the number that they have; for virtual ones: "
            f"rx.config.set_local_devices({num_devices})."
        )
    return Topology.of(devices[:num_devices])


def no_input_here(name: str, resource: str) -> ContextError:
    """Returns the error of a function that uses an input of workers in a process that does not have it."""
    return ContextError(
        f"{name} uses a worker's own input ({resource}), but was called outside of a scheduled function, in "
        "a process that is not a worker. Give a function that calls it to ClusterCoordinator.schedule."
    )
