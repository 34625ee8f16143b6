"""Lists devices, and places arrays on one, by TensorFlow's names: ``rx.config.list_physical_devices``, ``rx.device``.

Programs ask which devices a machine has before they configure them, so physical devices are counted without JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib.util
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from replicax._src.devices.device_names import LogicalDevice, PhysicalDevice
from replicax._src.devices.jax_backend import prepare_backend
from replicax._src.devices.named_devices import device_kind, resolve_device
from replicax._src.jax_internals import jax_compat

_KINDS = ("CPU", "GPU", "TPU")
_PLATFORMS = {"GPU": ("gpu", "cuda", "rocm"), "TPU": ("tpu",)}
_GOOGLE = "0x1ae0"  # the PCI vendor of TPUs
log = logging.getLogger("replicax")


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the devices of this machine. JAX's backend does not start, so they can still be configured.

    There is one CPU, whatever the number of its virtual devices. NVIDIA GPUs are counted by their driver, if JAX is
    installed for them. For AMD GPUs and TPUs, JAX's backend starts.

    Args:
      device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``; None lists all.

    Source: tf.config.list_physical_devices.

    >>> import replicax as rx
    >>> rx.config.list_physical_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return [
        PhysicalDevice(f"/physical_device:{kind}:{number}", kind)
        for kind in _KINDS
        if device_type in (None, kind)
        for number in range(_num_physical(kind))
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Returns JAX's devices of this process. JAX's backend starts, so that devices cannot be configured any more.

    Args:
      device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``; None lists all.

    Source: tf.config.list_logical_devices.
    """
    prepare_backend()
    return [
        LogicalDevice(f"/device:{kind}:{number}", kind)
        for kind in _KINDS
        if device_type in (None, kind)
        for number in range(_num_logical(kind))
    ]


def device(device_name: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which new arrays are made on a device. In steps and scopes the strategy places them.

    As in TensorFlow, a device of a kind that this process lacks is replaced by JAX's default device. A log line says
    so once.

    Args:
      device_name: A name such as ``"/GPU:0"`` or ``"cpu:1"``, a ``jax.Device``, or a device from
        ``rx.config.list_logical_devices``; None for the default device.

    Raises:
      DeviceError: This is no name of a device, or there are fewer devices of this kind.

    Source: tf.device.

    >>> import jax.numpy as jnp
    >>> import replicax as rx
    >>> with rx.device("/cpu:0"):
    ...     x = jnp.ones(3)
    """
    if device_name is None:
        return contextlib.nullcontext()
    kind = device_kind(device_name)
    prepare_backend()
    if kind is not None and not _num_logical(kind):
        _report_missing(kind)
        return contextlib.nullcontext()
    return jax.default_device(resolve_device(device_name))


@functools.cache
def _report_missing(kind: str) -> None:
    log.info("This process has no %s: rx.device takes %s instead.", kind, jax.local_devices()[0])


def _num_logical(kind: str) -> int:
    try:
        return len(jax.local_devices(backend=kind.lower()))
    except RuntimeError:  # JAX has no such backend
        return 0


def _num_physical(kind: str) -> int:
    if kind == "CPU":
        return 1
    if not jax_compat.backend_started():
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        if chosen and not set(_PLATFORMS[kind]) & set(chosen.split(",")):
            return 0
        if kind == "GPU":
            plugins = set(_plugins())
            if not plugins or "cuda" in plugins:
                return _num_cuda_devices() if plugins else 0
        elif not any(_google_devices()):
            return 0
    prepare_backend()
    return _num_logical(kind)


def _plugins() -> Iterator[str]:
    """Yields "cuda" or "rocm" for each package of JAX for GPUs that is installed."""
    spec = importlib.util.find_spec("jax_plugins")
    for module in pkgutil.iter_modules(spec.submodule_search_locations if spec else ()):
        yield from (kind for kind in ("cuda", "rocm") if module.name.startswith(f"xla_{kind}"))


def _num_cuda_devices() -> int:
    """Returns the number of GPUs that NVIDIA's driver shows this process. It makes no context on them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return 0
    chosen = jax.config.jax_cuda_visible_devices  # type: ignore[attr-defined]
    return number.value if chosen == "all" else len(chosen.split(","))


def _google_devices() -> Iterator[str]:
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == _GOOGLE:
                yield path
