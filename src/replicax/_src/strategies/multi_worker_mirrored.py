"""``MultiWorkerMirroredStrategy``: the devices of several processes, variables mirrored on all."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from replicax._src import jax_compat
from replicax._src.cluster.detect import checked_resolver
from replicax._src.cluster.failures import ClusterStartError
from replicax._src.cluster.mpi import check_mpi
from replicax._src.cluster.resolver import ClusterResolver, membership_of
from replicax._src.devices.topology import Topology, device_name, resolve_devices
from replicax._src.errors import InvalidArgumentError
from replicax._src.jax_compat import Device
from replicax._src.options import CommunicationImplementation, CommunicationOptions, ShardState
from replicax._src.strategies.joining import TIMEOUT_S, join_workers
from replicax._src.strategies.strategy import Strategy
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.mapped_layouts import layout_map_for

log = logging.getLogger("replicax")


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on several machines, or processes: one replica per device of each worker, or per group.

    Start the same program once for each worker, with a ``TF_CONFIG`` that describes the cluster and this task
    (``replicax launch`` does it on one machine). Making the strategy blocks until all workers have joined. After that
    all workers make the same calls of replicax, in the same order, and each feeds the replicas on its own devices.
    Variables start with the values of the chief (worker 0 if there is none).

    Args:
      cluster_resolver: The description of the cluster; default: ``TF_CONFIG``, else the environment of a launcher
        (torchrun, Open MPI, Slurm, a Kubeflow TrainJob, SageMaker), else this worker alone.
      communication_options: Options of collectives. ``timeout_seconds`` is the limit of a wait for others that are
        alive; the value of a process's first strategy counts. Give all workers the same options. CPUs use gloo's ring,
        or MPI if JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi is set. The log names the implementation.
      shard_state: "optimizer" or "all", as in ``MirroredStrategy``, sharded over the replicas of all workers.
      shard_size: See ``MirroredStrategy``.
      devices_per_replica: The number of adjacent devices of each replica, as in ``MirroredStrategy``. All devices of a
        replica belong to one worker.
      layout_map: See ``MirroredStrategy``.

    Raises:
      InvalidArgumentError: ``shard_size`` does not divide the number of replicas or is given without ``shard_state``;
        ``devices_per_replica`` does not divide the number of a worker's devices; or ``layout_map`` names an unknown
        axis, or a replica has one device.
      ClusterError: The description of the cluster is wrong, or MPI was requested and cannot start.
      ClusterStartError: A worker is missing after ``REPLICAX_START_TIMEOUT_S`` (300 by default), or the workers do not
        fit together.
      BackendStartedError: JAX was used before, in a cluster of several workers.

    Source: tf.distribute.MultiWorkerMirroredStrategy.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
        devices_per_replica: int = 1,
        layout_map: LayoutMap | Mapping[str, Any] | None = None,
    ):
        options = _checked(communication_options)
        self._resolver = checked_resolver(cluster_resolver)
        self._membership = membership_of(self._resolver)
        topology = self._topology_of_cluster(options, devices_per_replica)
        super().__init__(
            lambda: topology,
            cluster_resolver=self._resolver,
            is_chief=self._membership.is_chief,
            communication_options=options,
            shard_state=shard_state,
            shard_size=shard_size,
            layout_map=layout_map_for(topology, layout_map),
        )
        self.parts  # checks the layout map and the sharding of state  # noqa: B018
        log.info(
            "Using MultiWorkerMirroredStrategy: %s of %d, %d replicas, on %s here; collectives by %s.",
            self._membership.task,
            self._membership.num_workers,
            topology.num_replicas,
            ", ".join(map(device_name, topology.local_devices)),
            _carrier(topology.local_devices[0].platform) if self._membership.num_workers > 1 else "XLA",
        )

    def _topology_of_cluster(self, options: CommunicationOptions, devices_per_replica: int) -> Topology:
        membership = self._membership
        if membership.num_workers == 1:
            return Topology.of(
                resolve_devices(None), options.bytes_per_pack, devices_per_replica=devices_per_replica
            )
        is_mpi = jax_compat.cpu_collectives() == "mpi"
        if is_mpi:
            check_mpi(os.environ, membership.num_workers)
        devices = join_workers(membership, options.timeout_seconds or TIMEOUT_S)
        if is_mpi:
            _check_devices_for_mpi(jax.local_devices())
        _say_what_communicates(options.implementation, devices[0].platform)
        return Topology.of(devices, options.bytes_per_pack, devices_per_replica=devices_per_replica)


def _checked(options: Any) -> CommunicationOptions:
    if options is not None and not isinstance(options, CommunicationOptions):
        raise InvalidArgumentError(
            f"communication_options must be an rx.CommunicationOptions, got {options!r}. A cluster is described by "
            "`cluster_resolver`, the first argument."
        )
    return options or CommunicationOptions()


def _check_devices_for_mpi(devices: Sequence[Device]) -> None:
    if devices[0].platform == "cpu" and len(devices) > 1:
        raise ClusterStartError(
            f"Each worker has {len(devices)} CPU devices, and JAX's collectives by MPI work with one in each process. Start "
            "more workers of one device, or use gloo: unset JAX_CPU_COLLECTIVES_IMPLEMENTATION."
        )


def _carrier(platform: str) -> str:
    """Returns the name of the library for collectives between processes."""
    if platform == "cpu":
        return {"gloo": "gloo", "mpi": "MPI"}[jax_compat.cpu_collectives()]
    return "NCCL" if platform == "gpu" else "XLA"


def _say_what_communicates(wanted: CommunicationImplementation, platform: str) -> None:
    """Warns if the workers use another implementation than the requested one."""
    carrier = _carrier(platform)
    if wanted is CommunicationImplementation.NCCL and platform != "gpu":
        log.warning(
            "CommunicationImplementation.NCCL is for GPUs: on %s the workers use %s.",
            platform.upper(),
            carrier,
        )
    if wanted is CommunicationImplementation.RING and carrier != "gloo":
        chooses = ", which chooses ring or tree itself" if carrier == "NCCL" else ""
        log.warning(
            "CommunicationImplementation.RING is gloo's, on CPUs: here the workers use %s%s.",
            carrier,
            chooses,
        )


def of_older_signature(
    communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    cluster_resolver: ClusterResolver | None = None,
) -> MultiWorkerMirroredStrategy:
    """``MultiWorkerMirroredStrategy`` with the arguments of TensorFlow's older, experimental name.

    Args:
      communication: AUTO, RING or NCCL.
      cluster_resolver: The description of the cluster.

    Source: tf.distribute.experimental.MultiWorkerMirroredStrategy.
    """
    return MultiWorkerMirroredStrategy(
        cluster_resolver,
        CommunicationOptions(implementation=CommunicationImplementation.parse(communication)),
    )
