"""The TPU cores of a job, or virtual devices in their place: finds their positions and joins several hosts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver, is_one_task, membership_of
from replicax._src.cluster.tpu import TPUClusterResolver
from replicax._src.devices.jax_backend import local_devices
from replicax._src.devices.tpu.device_assignment import DeviceAssignment
from replicax._src.devices.tpu.positions import Topology, TPUSystemMetadata, full_mesh, usual_mesh_shape
from replicax._src.jax_internals import jax_compat
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.strategies.joining import TIMEOUT_S, join_workers
from replicax._src.vocabulary.errors import DeviceError, InvalidArgumentError, UnsupportedError

log = logging.getLogger("replicax")


@final
@dataclass(frozen=True)
class TPUSystem:
    """The devices of all tasks and their positions.

    Attributes:
      membership: The tasks; None for this process alone.
      devices: The devices [tasks][devices of a task].
      topology: The position of device i of task t.
    """

    membership: Membership | None
    devices: Sequence[Sequence[Device]]
    topology: Topology

    @classmethod
    def of(cls, resolver: ClusterResolver) -> TPUSystem:
        """Returns the devices that a resolver stands for. Joins the other hosts first, if there are any.

        Raises:
          DeviceError: The devices are not TPUs although TPUs are needed, or their number differs from the places of the
            mesh.
          ClusterStartError: A host is missing.
          BackendStartedError: There are several hosts, and JAX was used before.
        """
        if not isinstance(resolver, ClusterResolver):
            raise InvalidArgumentError(
                f"tpu_cluster_resolver must be an rx.cluster_resolver.TPUClusterResolver, got {resolver!r}. Leave it out for the "
                "TPU of this machine."
            )
        membership = None if is_one_task(resolver.cluster_spec()) else membership_of(resolver)
        devices = local_devices() if membership is None else join_workers(membership, TIMEOUT_S)
        num_tasks = 1 if membership is None else membership.num_workers
        size = len(devices) // num_tasks
        by_task = [devices[task * size : (task + 1) * size] for task in range(num_tasks)]
        return cls(membership, by_task, _topology(by_task, resolver))

    def grid(self, assignment: DeviceAssignment | None) -> list[list[Device]]:
        """Returns the logical devices of each replica, [R][L]. Without an assignment each device is a replica.

        The replicas of a task are adjacent. Within a task they are in the assignment's order.
        """
        if assignment is None:
            return [[device] for task in self.devices for device in task]
        if assignment.topology != self.topology:
            raise InvalidArgumentError(
                f"experimental_device_assignment is for {assignment.topology}, but the devices are {self.topology}. Build it with "
                "the result of rx.tpu.experimental.initialize_tpu_system(resolver) for this resolver."
            )
        rows: dict[int, list[list[Device]]] = {task: [] for task in range(len(self.devices))}
        for replica in range(assignment.num_replicas):
            cores = [
                assignment.coordinates(replica, core) for core in range(assignment.num_cores_per_replica)
            ]
            tasks = {self.topology.task_ordinal_at_coordinates(core) for core in cores}
            if len(tasks) > 1:
                raise UnsupportedError(
                    f"Replica {replica} of the device assignment has cores of the tasks {sorted(tasks)}: the logical devices of "
                    f"a replica must be in one process, which has {self.topology.num_tpus_per_task}. Use a smaller "
                    "computation_shape, or one within the devices of one host."
                )
            task = tasks.pop()
            ordinals = [self.topology.tpu_device_ordinal_at_coordinates(core) for core in cores]
            rows[task].append([self.devices[task][ordinal] for ordinal in ordinals])
        counts = {task: len(of_task) for task, of_task in rows.items()}
        if len(set(counts.values())) > 1:
            raise InvalidArgumentError(
                f"Each task must have the same number of replicas, but the device assignment has, by task, {counts}. Ask for a number of "
                f"replicas that is a multiple of {len(self.devices)}."
            )
        return [row for task in sorted(rows) for row in rows[task]]


def _topology(devices: Sequence[Sequence[Device]], resolver: ClusterResolver) -> Topology:
    platform = devices[0][0].platform
    wanted = resolver.mesh_shape if isinstance(resolver, TPUClusterResolver) else None
    if platform == "tpu":
        coordinates = jax_compat.tpu_coordinates(devices)
        found = Topology(mesh_shape=coordinates.max((0, 1)) + 1, device_coordinates=coordinates)
        if wanted is not None:
            raise DeviceError(
                f"{resolver!r} asks for virtual devices in a mesh, and this machine has TPUs, whose mesh is {found.mesh_shape}. "
                "Leave the shape out."
            )
        return found
    needs_tpu = isinstance(resolver, TPUClusterResolver) and resolver.needs_tpu
    if platform != "cpu" or needs_tpu:
        raise DeviceError(
            f"{resolver!r} stands for TPUs, and JAX has {len(devices[0])} device(s) of platform {platform!r} here. Run the program on "
            "a TPU VM with jax[tpu]; for virtual devices call rx.config.set_local_devices(n) first and use tpu='local'; for GPUs "
            "use rx.MirroredStrategy."
        )
    num_tasks, size = len(devices), len(devices[0])
    x, y, _, cores = usual_mesh_shape(size)
    shape = wanted or (x, y, num_tasks, cores)  # hosts are stacked along z
    if math.prod(shape) != num_tasks * size:
        raise DeviceError(
            f"{resolver!r}: a mesh of {'x'.join(map(str, shape))} has {math.prod(shape)} places, and there are "
            f"{num_tasks * size} CPU device(s). Call rx.config.set_local_devices({math.prod(shape)}) first, or name another shape."
        )
    return full_mesh(shape, num_tasks)


def metadata_of(resolver: ClusterResolver) -> TPUSystemMetadata:
    """Returns the numbers of cores and hosts that a resolver stands for."""
    system = TPUSystem.of(resolver)
    devices = [device for task in system.devices for device in task]
    return TPUSystemMetadata(
        num_cores=len(devices),
        num_hosts=len(system.devices),
        num_of_cores_per_host=len(system.devices[0]),
        topology=system.topology,
        devices=devices,
    )


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Returns the positions of the TPU cores. With several hosts it blocks until all have joined.

    Call it before anything else uses JAX. JAX keeps the TPUs as long as the process lives, so a second call does not
    change their state.

    Args:
      cluster_resolver: The resolver that describes the TPUs; default: ``TPUClusterResolver()``.

    Raises:
      DeviceError: There are no TPUs, and the resolver asks for no virtual devices; or their number is not the
        requested one.
      ClusterStartError: A host is missing after ``REPLICAX_START_TIMEOUT_S``.

    Source: tf.tpu.experimental.initialize_tpu_system.
    """
    topology = TPUSystem.of(TPUClusterResolver() if cluster_resolver is None else cluster_resolver).topology
    log.info("The TPU system is %s.", topology)
    return topology


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Does nothing, because JAX keeps the TPUs until the process ends.

    Source: tf.tpu.experimental.shutdown_tpu_system.
    """
    del cluster_resolver


def connect_to_cluster(
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: Any = None,
) -> None:
    """Joins the hosts of a TPU, if there are several. Blocks until all have joined.

    A call is optional, because code that needs the devices joins on its own. Strategies for other clusters join when
    they are made.

    Args:
      cluster_spec_or_resolver: An ``rx.cluster_resolver.TPUClusterResolver``.
      job_name, task_index, protocol, make_master_device_default, cluster_device_filters: Accepted for compatibility
        with TensorFlow.

    Raises:
      UnsupportedError: Another kind of resolver describes several tasks.
      ClusterStartError: A host is missing after ``REPLICAX_START_TIMEOUT_S``.

    Source: tf.config.experimental_connect_to_cluster.
    """
    del job_name, task_index, protocol, make_master_device_default, cluster_device_filters
    given = cluster_spec_or_resolver
    if isinstance(given, TPUClusterResolver):
        if not is_one_task(given.cluster_spec()):
            TPUSystem.of(given)
        return
    raise UnsupportedError(
        f"experimental_connect_to_cluster takes an rx.cluster_resolver.TPUClusterResolver, got {given!r}. Other clusters need no "
        "call: rx.MultiWorkerMirroredStrategy(resolver) and rx.ParameterServerStrategy(resolver) connect when they are made."
    )
