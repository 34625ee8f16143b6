"""Devices as TensorFlow names them. Holds the records only; ``listing`` makes them."""

from __future__ import annotations

from typing import NamedTuple, final


@final
class PhysicalDevice(NamedTuple):
    """A device of this machine, as ``rx.config.list_physical_devices`` lists it.

    Source: tf.config.PhysicalDevice.

    Attributes:
      name: Such as ``"/physical_device:GPU:0"``. It is a label; no function takes it.
      device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
    """

    name: str
    device_type: str


@final
class LogicalDevice(NamedTuple):
    """A device of JAX in this process, as ``rx.config.list_logical_devices`` lists it.

    Strategies and ``rx.device`` take it, and its name.

    Source: tf.config.LogicalDevice.

    Attributes:
      name: Such as ``"/device:GPU:0"``.
      device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
    """

    name: str
    device_type: str
