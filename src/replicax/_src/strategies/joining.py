"""Joins the processes of a cluster and returns their devices."""

from __future__ import annotations

import socket

import jax

from replicax._src.cluster.environ import check_cpu_collectives
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import UNKNOWN_ADDRESS, split_address
from replicax._src.cluster.start import compare_devices, join_cluster
from replicax._src.collectives.host_sums.job_sums import JobSums, joined_sums
from replicax._src.devices.jax_backend import prepare_backend
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.jax_internals.jax_compat import Device

TIMEOUT_S = 600.0


def join_workers(membership: Membership, timeout_s: float) -> list[Device]:
    """Makes this process one of the workers of a cluster. Blocks until all have come.

    Args:
      timeout_s: The limit for later waits for other workers.

    Returns:
      All devices, worker after worker. Every worker has the same number.

    Raises:
      ClusterEnvironmentError: Collectives by MPI are requested.
      ClusterStartError: A worker is missing, or the workers do not fit together.
      BackendStartedError: JAX was used before.
    """
    check_cpu_collectives(jax_compat.requested_cpu_collectives())
    prepare_backend(membership.spec.num_tasks_beside(membership.task), is_task=True)
    peers = join_cluster(membership, timeout_s)
    compare_devices(peers, jax.local_devices())
    # Device ids have gaps between processes.
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def sums_on_hosts(topology: Topology, membership: Membership, timeout_s: float) -> JobSums | None:
    """Connects the processes of a topology for sums on their hosts. All call it.

    Returns:
      None where programs of all devices are faster, or the only way.
    """
    peers = topology.peers
    if peers is None or not topology.is_cpu or topology.num_logical_devices > 1:
        return None
    return joined_sums(peers, _own_host(membership), len(topology.local_replicas), timeout_s)


def _own_host(membership: Membership) -> str:
    """Returns the name or address by which other tasks reach this host. If the launcher gave it none, that is the
    address from which this host reaches the leader; empty if there is none.
    """
    address = membership.addresses[membership.id_in_cluster]
    if address != UNKNOWN_ADDRESS:
        return split_address(address)[0]
    host, port = split_address(membership.leader_address)
    try:
        family, _, _, _, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(to)  # (it sends nothing)
            return probe.getsockname()[0]
    except OSError:
        return ""


def join_survivors(membership: Membership, timeout_s: float, min_workers: int) -> Peers:
    """Makes this process one of the workers of a cluster that continue after a failure. Blocks until all have come.

    The process stays alone for JAX: it has its own devices only. The caller makes the first epoch.

    Args:
      timeout_s: The limit for later waits for other workers.
      min_workers: The fewest live workers that continue, the same in all.

    Raises:
      ClusterStartError: A worker is missing, the workers do not fit together, or another process was this worker.
      BackendStartedError: JAX was used before.
    """
    prepare_backend(membership.spec.num_tasks_beside(membership.task), is_task=True)
    jax_compat.run_on_cpu_in_order()
    peers = join_cluster(membership, timeout_s, min_workers=min_workers)
    compare_devices(peers, jax.local_devices())
    return peers
