"""``MirroredStrategy``: several devices of one machine, variables mirrored on all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from replicax._src.collectives.cross_device import CrossDeviceOps
from replicax._src.devices.topology import Topology, device_name, resolve_devices
from replicax._src.errors import InvalidArgumentError
from replicax._src.jax_compat import Device
from replicax._src.options import ShardState
from replicax._src.strategies.strategy import Strategy

log = logging.getLogger("replicax")


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine: one replica per device.

    Every device holds every variable. Gradients are summed over replicas before they are applied, so that all copies
    stay the same. The trace of a function proves this.

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

    Raises:
      DeviceError: A device does not exist or is repeated, or there are too few devices.
      InvalidArgumentError: ``shard_size`` does not divide the number of replicas or is given without ``shard_state``;
        or ``devices`` and ``num_devices`` are both given.

    Source: tf.distribute.MirroredStrategy.
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
        num_devices: int | None = None,
    ):
        if devices is not None and num_devices is not None:
            raise InvalidArgumentError(
                f"MirroredStrategy got devices={devices!r} and num_devices={num_devices!r}. Leave one of them out."
            )
        topology = Topology.of(resolve_devices(num_devices if devices is None else devices))
        super().__init__(
            lambda: topology,
            cross_device_ops=cross_device_ops,
            shard_state=shard_state,
            shard_size=shard_size,
        )
        self.layouts_on(topology)  # checks
        log.info("Using MirroredStrategy with devices (%s)", ", ".join(map(device_name, topology.devices)))
