"""``TPUStrategy``: TPU cores, one or several for each replica, with variables mirrored on all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import final

from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.cluster.tpu import TPUClusterResolver
from replicax._src.devices.topology import Topology, replica_mesh
from replicax._src.devices.tpu.device_assignment import DeviceAssignment
from replicax._src.packaging.home import install_command
from replicax._src.strategies.strategy import Strategy
from replicax._src.strategies.tpu_system import TPUSystem
from replicax._src.variables.layout_map import DimAxes, LayoutMap
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import ShardState

log = logging.getLogger("replicax")


@final
class TPUStrategy(Strategy):
    """Synchronous training on TPUs, of one host or several: one replica per core, or per group of cores.

    A device assignment can give each replica several cores, its *logical devices*, for model parallelism.
    ``experimental_split_to_logical_devices`` and the compiler shard the replica's program over them; results are those
    of one device. Variables are replicated over all cores, unless they are sharded too.

    With ``TPUClusterResolver("local")``, on a machine without TPUs, virtual CPU devices stand for the cores:
    ``rx.config.set_local_devices(8)``. A single CPU device is used with a warning.

    Args:
      tpu_cluster_resolver: The resolver that describes the TPUs; default: ``TPUClusterResolver()``, for the TPUs of
        this machine, or of the hosts in TPU_WORKER_HOSTNAMES.
      experimental_device_assignment: The cores of each replica; by default each core is a replica.
      experimental_spmd_xla_partitioning: The logical devices of a replica always run one program. True also makes
        ``experimental_assign_to_logical_device``, which has no effect then, an error.
      layout_map: The sharding of variables over the logical devices of a replica, by patterns of their paths: an
        ``rx.experimental.LayoutMap``, or a dict of its entries. By default variables are replicated.
      shard_state: "optimizer" or "all", as in ``MirroredStrategy``.
      shard_size: See ``MirroredStrategy``.

    Raises:
      DeviceError: There are no TPUs, and the resolver asks for no virtual devices.
      InvalidArgumentError: The assignment is for other devices, ``layout_map`` names an unknown axis, or ``shard_size``
        does not divide the number of replicas.
      UnsupportedError: A replica has cores of several hosts.
      ClusterStartError: A host is missing after ``REPLICAX_START_TIMEOUT_S`` (300 by default).

    Source: tf.distribute.TPUStrategy.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        layout_map: LayoutMap | Mapping[str, DimAxes] | None = None,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
    ):
        assignment = experimental_device_assignment
        if assignment is not None and not isinstance(assignment, DeviceAssignment):
            raise InvalidArgumentError(
                f"experimental_device_assignment must be an rx.tpu.experimental.DeviceAssignment, got {assignment!r}. Make one "
                "with rx.tpu.experimental.DeviceAssignment.build(topology, computation_shape, num_replicas=…)."
            )
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        system = TPUSystem.of(resolver)
        grid = system.grid(assignment)
        if len(grid) == 1 and [device.platform for device in grid[0]] == ["cpu"]:
            log.warning(
                "TPUStrategy finds no TPU, and runs on the one CPU device of this process. On a TPU VM install JAX for TPUs, "
                "%s; elsewhere virtual CPU devices may stand for the cores: rx.config.set_local_devices(8).",
                install_command("jax[tpu]"),
            )
        topology = Topology.from_mesh(replica_mesh(grid))
        super().__init__(
            lambda: topology,
            cluster_resolver=resolver,
            is_chief=system.membership is None or system.membership.is_chief,
            layout_map=None if layout_map is None else LayoutMap.of(layout_map),
            shard_state=shard_state,
            shard_size=shard_size,
        )
        self.parts  # checks the layout map and the sharding of state  # noqa: B018
        self.partitions_by_spmd = bool(experimental_spmd_xla_partitioning)
        log.info(
            "Using TPUStrategy with %d replica(s) of %d logical device(s), on %s.",
            topology.num_replicas,
            topology.num_logical_devices,
            system.topology,
        )


def from_older_signature(
    tpu_cluster_resolver: ClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
    *,
    steps_per_run: int | None = None,
) -> TPUStrategy:
    """``TPUStrategy`` with the arguments of TensorFlow's older, experimental name.

    Raises:
      UnsupportedError: ``steps_per_run``, the second argument in TensorFlow 1, is given.

    Source: tf.distribute.experimental.TPUStrategy.
    """
    if steps_per_run is None and isinstance(device_assignment, int):
        steps_per_run = device_assignment
    if steps_per_run is not None:
        raise UnsupportedError(
            f"steps_per_run={steps_per_run} told the Estimators of TensorFlow 1 how many steps a TPU runs at a time. Leave it out, and "
            f"write strategy.run_steps(fn, iterator, {steps_per_run}); with Keras, model.compile(steps_per_execution={steps_per_run})."
        )
    return TPUStrategy(tpu_cluster_resolver, device_assignment)
