"""``MirroredStrategy``: several devices of one machine, variables mirrored on all."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import final

from replicax._src.collectives.cross_device import CrossDeviceOps
from replicax._src.devices.named_devices import device_name, resolve_devices
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.strategies.strategy import Strategy
from replicax._src.variables.layout_map import DimAxes, LayoutMap
from replicax._src.variables.mapped_layouts import layout_map_for
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import ShardState

log = logging.getLogger("replicax")


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine: one replica per device, or per group of devices.

    Every device holds every variable, unless ``shard_state`` or ``layout_map`` shards it. Gradients are summed over
    replicas before they are applied, so that all copies stay the same. The trace of a function proves this.

    Args:
      devices: A list of names (``"gpu:0"``, ``"/gpu:0"``, ``"cpu:1"``, …) or ``jax.Device``, or the number of this
        process's first devices to use; default: all devices of JAX's default backend.
        ``rx.config.set_local_devices(n)`` makes n virtual CPU devices.
      cross_device_ops: The cross-device operations; default: XLA's all-reduce.
      shard_state: The state that is sharded over replicas instead of replicated: "optimizer" for the variables of Keras
        optimizers (ZeRO 1), or "all" for the trainable variables too (ZeRO 3). Results do not change.
      shard_size: The number of adjacent replicas that share one copy of the state. It divides the number of replicas;
        default: the largest divisor up to 256.
      num_devices: The same as a number for ``devices``.
      devices_per_replica: The number of adjacent devices of each replica, its logical devices. They run one program,
        which the compiler shards; results are those of one device.
      layout_map: The sharding of variables over the logical devices of a replica, by patterns of their paths: an
        ``rx.experimental.LayoutMap``, or a dict of its entries. ``shard_state`` shards other dims of the same
        variables. By default each logical device has the full variable.

    Raises:
      DeviceError: A device does not exist or is repeated, or there are too few devices.
      InvalidArgumentError: ``shard_size`` does not divide the number of replicas or is given without ``shard_state``;
        ``devices_per_replica`` does not divide the number of devices; ``layout_map`` names an unknown axis, or a
        replica has one device; or ``devices`` and ``num_devices`` are both given.
      UnsupportedError: A replica has several devices, and ``cross_device_ops`` is not an all-reduce.

    Source: tf.distribute.MirroredStrategy; Megatron-LM's tensor parallelism for ``layout_map``.

    >>> import replicax as rx
    >>> layouts = {"up/kernel": (None, "logical"), "down/kernel": ("logical", None)}
    >>> strategy = rx.MirroredStrategy(
    ...     ["cpu:0", "cpu:1"], devices_per_replica=2, layout_map=layouts, shard_state="all"
    ... )
    >>> strategy.num_replicas_in_sync, strategy.num_logical_devices
    (1, 2)
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
        num_devices: int | None = None,
        devices_per_replica: int = 1,
        layout_map: LayoutMap | Mapping[str, DimAxes] | None = None,
    ):
        if devices is not None and num_devices is not None:
            raise InvalidArgumentError(
                f"MirroredStrategy got devices={devices!r} and num_devices={num_devices!r}. Leave one of them out."
            )
        topology = Topology.of(
            resolve_devices(num_devices if devices is None else devices),
            devices_per_replica=devices_per_replica,
        )
        super().__init__(
            lambda: topology,
            cross_device_ops=cross_device_ops,
            shard_state=shard_state,
            shard_size=shard_size,
            layout_map=layout_map_for(topology, layout_map),
        )
        if topology.num_logical_devices > 1 and self.user_ops is not None:
            raise UnsupportedError(
                f"devices_per_replica={devices_per_replica} does not work with cross_device_ops={type(cross_device_ops).__name__}, "
                "which moves the arrays of single devices. Leave cross_device_ops out, which sums over replicas by an all-reduce."
            )
        self.parts  # checks the layout map and the sharding of state  # noqa: B018
        log.info("Using MirroredStrategy with devices (%s)", ", ".join(map(device_name, topology.devices)))
