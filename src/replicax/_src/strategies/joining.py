"""Joins the processes of a cluster and returns their devices."""

from __future__ import annotations

import jax

from replicax._src.cluster.membership import Membership
from replicax._src.cluster.start import compare_devices, join_cluster
from replicax._src.devices.topology import prepare_backend
from replicax._src.jax_compat import Device

TIMEOUT_S = 600.0


def join_workers(membership: Membership, timeout_s: float) -> list[Device]:
    """Makes this process one of the workers of a cluster. Blocks until all have come.

    Args:
      timeout_s: The limit for later waits for other workers.

    Returns:
      All devices, worker after worker. Every worker has the same number.

    Raises:
      ClusterStartError: A worker is missing, or the workers do not fit together.
      BackendStartedError: JAX was used before.
    """
    prepare_backend(membership.spec.num_tasks_beside(membership.task), is_task=True)
    peers = join_cluster(membership, timeout_s)
    compare_devices(peers, jax.local_devices())
    # Device ids have gaps between processes.
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
