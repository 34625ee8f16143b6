"""Devices that are absent or unused: as compilers see them, and as a topology whose arrays are only described."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax

from replicax._src.devices.hardware import GPU_VARIABLE, QUIET_TPU, Chip, Hardware, check_extra
from replicax._src.devices.topology import Topology, replica_mesh
from replicax._src.jax_internals import jax_compat
from replicax._src.vocabulary.errors import PlanError, TopologyError

_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ {capability} }}
  {fields}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def topology_ahead(hardware: Hardware, num_logical_devices: int = 1) -> Topology:
    """Returns a topology of replicas of so many neighbouring devices each, of one host if it has as many.

    Raises:
      MissingExtraError: The compiler for them is not installed.
      PlanError: This process cannot compile for GPUs, because the environment variable is not set.
      TopologyError: The number of devices is not a multiple of that of a replica.
    """
    count = hardware.num_devices
    if count % num_logical_devices:
        raise TopologyError(
            f"{hardware.name!r} has {count} device(s), but a replica of this strategy has {num_logical_devices} "
            f"logical devices. Use a topology whose number of devices is a multiple of {num_logical_devices}, or plan "
            "with another device assignment."
        )
    devices = _devices(hardware)  # ordered by host
    grid = [devices[i : i + num_logical_devices] for i in range(0, count, num_logical_devices)]
    return Topology.from_mesh(replica_mesh(grid), is_ahead=True)


@functools.lru_cache(maxsize=4)
def _devices(hardware: Hardware) -> list[Any]:
    chip = hardware.chip
    if chip.kind == "cpu":
        return jax_compat.devices_of_plan("cpu", "", hardware.num_devices)
    check_compiler(hardware)
    if chip.kind == "tpu":
        _quieten_tpu()
        name = f"{chip.key}:{'x'.join(map(str, hardware.shape))}"
        return jax_compat.devices_of_plan("tpu", name, hardware.num_devices, _slice_options(hardware))
    hosts, gpus = hardware.shape
    target = {"target_config": gpu_target(chip), "topology": f"1x{hosts}x{gpus}"}
    return jax_compat.devices_of_plan("cuda", chip.key, hardware.num_devices, target)


def check_compiler(hardware: Hardware) -> None:
    """Raises if the compiler for it is not available; see ``topology_ahead``."""
    check_extra(hardware)
    if hardware.chip.kind == "gpu" and not os.environ.get(GPU_VARIABLE):
        raise PlanError(
            f"A plan for {hardware.name} needs JAX's GPU compiler, which JAX loads on a machine without GPUs only if the "
            f"environment variable {GPU_VARIABLE} is 1 before Python starts. Run {GPU_VARIABLE}=1 python script.py, or "
            f"use the command, which sets it: replicax plan script.py --topology {hardware.name}."
        )


def _quieten_tpu() -> None:
    if not jax_compat.backend_started():
        jax.devices()  # a process with its own TPU must see the unchanged environment
    if jax.default_backend() != "tpu":
        for name, value in QUIET_TPU.items():
            os.environ.setdefault(name, value)


def _slice_options(hardware: Hardware) -> dict[str, Any]:
    """Returns the options of a slice that libtpu needs besides its name."""
    options: dict[str, Any] = {}
    if all(size == 1 for size in hardware.shape):
        options["chips_per_host_bounds"] = (1, 1, 1)  # smaller than a host
    if hardware.num_slices > 1:
        options["num_slices"] = hardware.num_slices
    if hardware.chip.key == "v4":
        options["chip_config_name"] = "megacore"  # one device for each chip, as on v4 itself
    return options


def gpu_target(chip: Chip) -> str:
    """Returns the description of a chip for XLA's GPU compiler."""
    facts = dict(chip.compiler or {})
    capability = facts.pop("capability")
    fields = " ".join(f"{name}: {value}" for name, value in facts.items())
    return _TARGET.format(capability=capability, fields=fields, memory=chip.memory_bytes, name=chip.name)
