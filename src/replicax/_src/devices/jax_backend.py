"""JAX's backend in this process: what is configured before it starts, and its devices."""

from __future__ import annotations

import os

import jax

from replicax._src.cluster.machine_layout import TASKS_ON_HOST_VARIABLE, num_usable_cores
from replicax._src.devices.program_cache import keep_programs
from replicax._src.jax_internals import jax_compat
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.vocabulary.errors import BackendStartedError, DeviceError

# XLA runs the collectives of all virtual CPU devices on one thread pool of this many threads. With fewer threads than
# waiting participants, XLA aborts the process after 40 s (seen with jax 0.10 on 2 cores).
_CPU_POOL_THREADS = 16
# The number of a job's processes on this host, set by replicax's launcher, torchrun and Open MPI.
_TASKS_ON_HOST = (TASKS_ON_HOST_VARIABLE, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def local_devices() -> list[Device]:
    """Returns the devices of JAX's default backend in this process. Starts the backend if necessary."""
    prepare_backend()
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
        raise DeviceError(f"set_local_devices needs a number of devices, at least 1, got {num_devices!r}.")
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
    jax.config.update("jax_num_cpu_devices", num_devices)
    prepare_backend()


def cpu_pool_is_large() -> bool:
    """True if XLA's CPU thread pool is large enough for queued collectives."""
    value = os.environ.get("PJRT_NPROC", "")
    return value.isdigit() and int(value) >= _CPU_POOL_THREADS


def prepare_backend(num_processes_here: int = 1, *, is_task: bool = False) -> None:
    """Unless the user has, configures the cache of compiled programs and limits XLA's CPU threads. Call it before JAX's
    backend starts; the threads cannot change later.

    Several devices in one process need threads for queued collectives. Processes with one device each share the cores,
    and every thread beyond the number of cores waits for a time slice of another thread. With two workers on two cores
    (jax 0.10), a step of a small network took 6 to 7 ms instead of 1.5 ms.

    Args:
      num_processes_here: The number of the cluster's processes on this host. Launchers may report more.
      is_task: True if this process is a task of a cluster.
    """
    keep_programs(is_task=is_task)
    if jax_compat.backend_started():
        return
    num_told = [int(text) for text in map(os.environ.get, _TASKS_ON_HOST) if text and text.isdigit()]
    num_processes_here = max(num_processes_here, *num_told, 1)
    if jax_compat.has_several_cpu_devices():
        os.environ.setdefault("PJRT_NPROC", str(_CPU_POOL_THREADS))
    elif num_processes_here > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(1, num_usable_cores() // num_processes_here)))
