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

    Every device holds every variable; gradients are summed over replicas before they are applied, so that all
    copies stay the same, which is proven when a function is traced.

    Args:
      devices: Names (``"gpu:0"``, ``"/gpu:0"``, ``"cpu:1"``, …) or ``jax.Device``; or a number, of the first devices of
        this process; default: all of JAX's default backend. ``rx.config.set_local_devices(n)`` makes n virtual CPU
        devices.
      cross_device_ops: How to reduce; default: XLA's all-reduce.
      shard_state: What replicas divide among them instead of each holding all of it: "optimizer", the variables of
        Keras optimizers (ZeRO 1), or "all", the trainable variables too (ZeRO 3). The numbers stay what they are.
      shard_size: Over how many replicas, adjacent ones; the next ones hold the same again. A divisor of their number;
        default: the largest up to 256.
      num_devices: The same as a number for ``devices``.

    Raises:
      DeviceError: A device does not exist, or repeats, or there are fewer.
      InvalidArgumentError: ``shard_size`` does not divide the number of replicas, or nothing is divided; or ``devices``
        and ``num_devices`` are both given.

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
