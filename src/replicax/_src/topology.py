"""Devices, replicas and the mesh between them; all index arithmetic. No values, no programs."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._src import jax_compat
from replicax._src.errors import BackendStartedError, DeviceError
from replicax._src.jax_compat import Device

REPLICA_AXIS = "replica"
log = logging.getLogger("replicax")

# XLA runs the collectives of all virtual CPU devices on one thread pool of this many threads; with fewer
# threads than waiting participants the process is aborted after 40 s (seen with jax 0.10 on 2 cores).
_CPU_POOL_THREADS = 16
_DEVICE_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+))?$"
)


@dataclass(frozen=True, eq=False)
class Topology:
    """R devices in a row, one per replica, as a mesh with the axis ``replica``.

    Attributes:
      devices: The R devices, in replica order.
      mesh: The mesh over them.
      replicated: The sharding of an array that every device holds whole.
      per_replica: The sharding of an array [R, ...] of which device r holds row r.
      stacked: The sharding of an array [steps, R, ...] of several such.
    """

    devices: tuple[Device, ...]
    mesh: Mesh
    replicated: NamedSharding
    per_replica: NamedSharding
    stacked: NamedSharding

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Topology:
        """The topology of ``devices``, replica r on the r-th."""
        mesh = Mesh(np.array(devices, dtype=object), (REPLICA_AXIS,))
        return cls(
            tuple(devices),
            mesh,
            NamedSharding(mesh, PartitionSpec()),
            NamedSharding(mesh, PartitionSpec(REPLICA_AXIS)),
            NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS)),
        )

    @functools.cached_property
    def num_replicas(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def is_cpu(self) -> bool:
        return self.devices[0].platform == "cpu"


def local_devices() -> list[Device]:
    """The devices of JAX's default backend in this process; starts it if it has not started."""
    _prepare_backend()
    return list(jax.local_devices())


def set_local_devices(num_devices: int) -> None:
    """Makes ``num_devices`` virtual CPU devices in this process, to try a program on without accelerators.

    Call it before anything else uses JAX: the devices cannot change once JAX's backend has started.

    Args:
      num_devices: At least 1.

    Raises:
      BackendStartedError: The backend has started with another number of CPU devices.
      DeviceError: ``num_devices`` is not a positive int.
    """
    if not isinstance(num_devices, int) or isinstance(num_devices, bool) or num_devices < 1:
        raise DeviceError(f"set_local_devices takes a number of devices of at least 1, got {num_devices!r}.")
    if jax_compat.backend_started():
        have = len(jax.local_devices(backend="cpu"))
        if have == num_devices:
            return
        raise BackendStartedError(
            f"set_local_devices({num_devices}): JAX's backend has already started with {have} CPU device(s), "
            f"and its devices can no longer be chosen. Call replicax.config.set_local_devices({num_devices}) "
            f"before anything uses JAX (before the first array, before the first strategy), or start Python "
            f"with the environment variable JAX_NUM_CPU_DEVICES={num_devices}."
        )
    _prepare_backend()
    jax.config.update("jax_num_cpu_devices", num_devices)


def cpu_pool_is_large() -> bool:
    """Whether XLA's CPU thread pool was made large enough for queued collectives."""
    value = os.environ.get("PJRT_NPROC", "")
    return value.isdigit() and int(value) >= _CPU_POOL_THREADS


def _prepare_backend() -> None:
    if not jax_compat.backend_started():
        os.environ.setdefault("PJRT_NPROC", str(_CPU_POOL_THREADS))


def resolve_devices(devices: Sequence[str | Device] | str | Device | None) -> list[Device]:
    """The JAX devices that names or devices stand for; None is all of the default backend.

    Raises:
      DeviceError: One does not exist, or repeats, or the list is empty.
    """
    if devices is None:
        return local_devices()
    given: Any = [devices] if isinstance(devices, (str, jax.Device)) else devices
    resolved = [resolve_device(device) for device in given]
    if not resolved:
        raise DeviceError("`devices` is empty; name at least one, or leave it out for all of this machine.")
    repeated = sorted({device_name(d) for d in resolved if resolved.count(d) > 1})
    if repeated:
        raise DeviceError(
            f"No duplicates allowed in `devices` argument: {', '.join(repeated)} stands more than once in "
            f"{[str(d) for d in given]}. Each replica needs a device of its own; for several replicas on "
            f"one CPU call replicax.config.set_local_devices(n) first."
        )
    return resolved


def resolve_device(device: Any) -> Device:
    """The JAX device that ``"cpu:0"``, ``"/gpu:1"``, ``"/device:GPU:0"``, TensorFlow's full name or a device is."""
    if isinstance(device, jax.Device):
        return device
    match = _DEVICE_NAME.match(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(
            f"{device!r} is not a device. Give a name such as 'cpu:0', '/gpu:1' or '/device:GPU:0', or a "
            f"jax.Device."
        )
    kind, index = match["kind"].lower(), int(match["index"] or 0)
    _prepare_backend()
    try:
        candidates = jax.local_devices(backend=kind)
    except RuntimeError:
        candidates = []
    if index >= len(candidates):
        raise DeviceError(_missing_device_text(device, kind, len(candidates)))
    return candidates[index]


def _missing_device_text(device: str, kind: str, num_found: int) -> str:
    have = ", ".join(device_name(d) for d in jax.local_devices()) or "none"
    text = f"Device {device!r} does not exist: this process has {num_found} {kind} device(s). It has: {have}."
    if kind == "cpu":
        text += " Call replicax.config.set_local_devices(n) at the start of the program for n virtual ones."
    return text


def device_name(device: Device) -> str:
    """The short name of a device, e.g. ``cpu:0``."""
    return f"{device.platform}:{device.id}"
