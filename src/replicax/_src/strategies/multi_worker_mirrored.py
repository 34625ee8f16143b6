"""``MultiWorkerMirroredStrategy``: the devices of several processes, variables mirrored on all."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import final

from replicax._src.cluster.detect import checked_resolver
from replicax._src.cluster.resolver import ClusterResolver, membership_of
from replicax._src.devices.named_devices import device_name, resolve_devices
from replicax._src.devices.topology import Topology
from replicax._src.strategies import surviving
from replicax._src.strategies.joining import TIMEOUT_S, join_workers, sums_on_hosts
from replicax._src.strategies.strategy import Strategy
from replicax._src.variables.layout_map import DimAxes, LayoutMap
from replicax._src.variables.mapped_layouts import layout_map_for
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import (
    CommunicationImplementation,
    CommunicationOptions,
    FaultToleranceOptions,
    ShardState,
)

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
        alive; the value of a process's first strategy counts. Give all workers the same options. On CPUs, up to eight
        workers add on their hosts; RING asks for gloo's ring. The log names the implementation.
      shard_state: "optimizer" or "all", as in ``MirroredStrategy``, sharded over the replicas of all workers.
      shard_size: See ``MirroredStrategy``.
      devices_per_replica: The number of adjacent devices of each replica, as in ``MirroredStrategy``. All devices of a
        replica belong to one worker.
      layout_map: See ``MirroredStrategy``.
      fault_tolerance: True, or an ``rx.FaultToleranceOptions``: ``fit``, ``evaluate``, ``predict``, and loops
        with ``run``, ``reduce``, ``gather`` and ``rx.function``, go on when workers die. A live worker adopts the
        replica of a dead one, and the step is repeated with the same rows, so that no bit of the results changes. Each
        worker has one CPU device, and reads whole batches; replicax sums the arrays itself.

    Raises:
      InvalidArgumentError: ``shard_size`` does not divide the number of replicas or is given without ``shard_state``;
        ``devices_per_replica`` does not divide the number of a worker's devices; or ``layout_map`` names an unknown
        axis, or a replica has one device; or ``min_workers`` is larger than the number of workers.
      UnsupportedError: ``fault_tolerance`` is given with ``shard_state``, ``devices_per_replica`` or ``layout_map``, or
        with GPUs, TPUs or several devices of a worker.
      ClusterError: The description of the cluster is wrong, or JAX_CPU_COLLECTIVES_IMPLEMENTATION is mpi.
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
        layout_map: LayoutMap | Mapping[str, DimAxes] | None = None,
        fault_tolerance: FaultToleranceOptions | bool = False,
    ):
        options = _checked(communication_options)
        self._resolver = checked_resolver(cluster_resolver)
        self._membership = membership_of(self._resolver)
        tolerance = surviving.checked_options(
            fault_tolerance,
            self._membership,
            shard_state=shard_state,
            devices_per_replica=devices_per_replica,
            layout_map=layout_map,
        )
        topology = self._topology_of_cluster(options, devices_per_replica, tolerance)
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
            "Using MultiWorkerMirroredStrategy: %s of %d, %d replicas, on %s here; collectives by %s%s.",
            self._membership.task,
            self._membership.num_workers,
            topology.num_replicas,
            ", ".join(map(device_name, topology.local_devices)),
            "replicax" if topology.survivors is not None else self._carrier_of(topology),
            "" if topology.host_sums is None else f"; sums by {topology.host_sums.transport}",
        )

    def _carrier_of(self, topology: Topology) -> str:
        return _carrier(topology.local_devices[0].platform) if self._membership.num_workers > 1 else "XLA"

    def _topology_of_cluster(
        self, options: CommunicationOptions, devices_per_replica: int, tolerance: FaultToleranceOptions | None
    ) -> Topology:
        membership = self._membership
        if tolerance is not None:
            return surviving.join(membership, options.timeout_seconds or TIMEOUT_S, tolerance)
        if membership.num_workers == 1:
            return Topology.of(
                resolve_devices(None), options.bytes_per_pack, devices_per_replica=devices_per_replica
            )
        devices = join_workers(membership, options.timeout_seconds or TIMEOUT_S)
        _say_what_communicates(options.implementation, devices[0].platform)
        topology = Topology.of(devices, options.bytes_per_pack, devices_per_replica=devices_per_replica)
        if options.implementation is not CommunicationImplementation.AUTO:
            return topology
        return dataclasses.replace(
            topology, host_sums=sums_on_hosts(topology, membership, options.timeout_seconds or TIMEOUT_S)
        )


def _checked(options: CommunicationOptions | None) -> CommunicationOptions:
    if options is not None and not isinstance(options, CommunicationOptions):
        raise InvalidArgumentError(
            f"communication_options must be an rx.CommunicationOptions, got {options!r}. A cluster is described by "
            "`cluster_resolver`, the first argument."
        )
    return options or CommunicationOptions()


def _carrier(platform: str) -> str:
    """Returns the name of the library for collectives between processes."""
    return {"cpu": "gloo", "gpu": "NCCL"}.get(platform, "XLA")


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


def from_older_signature(
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
