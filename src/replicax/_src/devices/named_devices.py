"""Finds devices of this process by their names, and names devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from replicax._src.devices.device_names import LogicalDevice
from replicax._src.devices.jax_backend import local_devices, prepare_backend
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.packaging.home import install_command
from replicax._src.vocabulary.errors import DeviceError

# The packages on JAX's installation page in 2026.
_NVIDIA = f'{install_command("jax[cuda13]")} (or "jax[cuda12]", for older drivers)'
_INSTALL = {
    "gpu": _NVIDIA,
    "cuda": _NVIDIA,
    "rocm": install_command("jax[rocm7-local]"),
    "tpu": install_command("jax[tpu]"),
}

_DEVICE_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?"
    r"(?P<kind>(?!(?:job|replica|task):)[A-Za-z]+)(?::(?P<index>\d+))?$"
)


def resolve_devices(
    devices: Sequence[str | Device | LogicalDevice] | str | Device | LogicalDevice | int | None,
) -> list[Device]:
    """Returns the JAX devices with these names. A number takes this process's first devices, and None takes all.

    Raises:
      DeviceError: A device does not exist or repeats, or the list is empty.
    """
    if devices is None:
        return local_devices()
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _first_devices(devices)
    if isinstance(devices, LogicalDevice):
        devices = [devices.name]
    if not isinstance(devices, (str, jax.Device, Iterable)):
        raise DeviceError(
            f"`devices` must be a list of names such as 'cpu:0' or of jax.Device, or a number of devices, got {devices!r}."
        )
    given: Any = [devices] if isinstance(devices, (str, jax.Device)) else devices
    resolved = [resolve_device(device) for device in given]
    if not resolved:
        raise DeviceError(
            "`devices` is empty. Name at least one device, or leave `devices` out to use all of this machine."
        )
    repeated = sorted({device_name(d) for d in resolved if resolved.count(d) > 1})
    if repeated:
        raise DeviceError(
            f"No duplicates allowed in `devices` argument: {', '.join(repeated)} occurs more than once in "
            f"{[str(d) for d in given]}. Each replica needs its own device. For several replicas on one CPU call "
            "replicax.config.set_local_devices(n) first."
        )
    return resolved


def _first_devices(num_devices: int) -> list[Device]:
    found = local_devices()
    if not 1 <= num_devices <= len(found):
        raise DeviceError(
            f"{num_devices!r} devices were requested, but this process has {len(found)}: "
            f"{', '.join(map(device_name, found))}. Give a number from 1 to {len(found)}, or names of devices. For n "
            "virtual CPU devices call "
            "replicax.config.set_local_devices(n) at the start of the program."
        )
    return found[:num_devices]


def resolve_device(device: Any) -> Device:
    """Returns the JAX device for ``"cpu:0"``, ``"/gpu:1"``, ``"/device:GPU:0"``, TensorFlow's full name or a device."""
    if isinstance(device, jax.Device):
        return device
    device = device.name if isinstance(device, LogicalDevice) else device
    kind, index = _parsed(device)
    prepare_backend()
    try:
        candidates = jax.local_devices(backend=kind)
    except RuntimeError:
        candidates = []
    if index >= len(candidates):
        raise DeviceError(_missing_device_text(device, kind, len(candidates)))
    return candidates[index]


def device_kind(device: Any) -> str | None:
    """Returns "GPU" for the name ``"/gpu:1"``; None for an object of JAX.

    Raises:
      DeviceError: This is no name of a device.
    """
    if isinstance(device, jax.Device):
        return None
    return _parsed(device.name if isinstance(device, LogicalDevice) else device)[0].upper()


def _parsed(name: Any) -> tuple[str, int]:
    """Returns the platform in lower case, and the index."""
    match = _DEVICE_NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            f"{name!r} is not a device. Give a name such as 'cpu:0', '/gpu:1' or '/device:GPU:0', or a "
            f"jax.Device."
        )
    return match["kind"].lower(), int(match["index"] or 0)


def _missing_device_text(device: str, kind: str, num_found: int) -> str:
    have = ", ".join(device_name(d) for d in jax.local_devices()) or "none"
    text = f"Device {device!r} does not exist: this process has {num_found} {kind} device(s). It has: {have}."
    if kind == "cpu":
        text += " Call replicax.config.set_local_devices(n) at the start of the program for n virtual ones."
    elif not num_found and kind in _INSTALL:
        text += (
            f" If the machine has one, install JAX for it: {_INSTALL[kind]}. Without one, try the program on n "
            "virtual CPU devices: replicax.config.set_local_devices(n)."
        )
    return text


def device_name(device: Device) -> str:
    """Returns the short name of a device, such as ``cpu:0``."""
    return f"{device.platform}:{device.id}"
