"""Hardware for which a program is planned: published facts of chips, and existing topologies. Starts nothing."""

from __future__ import annotations

import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from replicax._src.packaging.extras import missing_extra, missing_packages
from replicax._src.vocabulary.errors import TopologyError

GPU_VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""With it JAX loads its GPU compiler on a machine without a GPU; it is read when JAX is imported."""

QUIET_TPU = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_TOPOLOGY": "2x4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""libtpu asks the environment which machine this is, and complains on one that is none of its own. It takes a lock for
the chips, which a process that compiles only does not need: two of them may plan at once.
"""

_NAME = re.compile(
    r"^(?:(?P<slices>[1-9][0-9]*)x)?(?P<chip>[a-z][a-z0-9]*)(?:[:=](?P<shape>[0-9]+(?:x[0-9]+)*)|-(?P<number>[0-9]+))$"
)
_MAX_CPU_DEVICES = 2048  # XLA's CPU client treats devices beyond this as those of another process (jax 0.10)


@dataclass(frozen=True, eq=False)
class Chip:
    """The published facts of one kind of device; see ``chips.toml`` for the units.

    Attributes:
      key: Its name in topologies.
      kind: "tpu", "gpu" or "cpu".
      flops_per_s, memory_bytes, …: The figures of one device, if a chip has several devices.
      compiler: The description of a GPU for XLA.
    """

    key: str
    kind: str
    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    clock_hz: float = 0.0
    devices_per_chip: int = 1
    per_host: int = 0
    cube: int = 0
    max_chips: int = 0
    topologies: tuple[str, ...] = ()
    vendor_name: tuple[str, int] = ("", 1)
    device_kinds: tuple[str, ...] = ()
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: str = ""
    compiler: Mapping[str, Any] | None = None

    def source_of(self, fact: str) -> str:
        """Returns the page that publishes a fact; empty if there is none."""
        return next((page for page, facts in self.sources.items() if fact in facts), "")

    def flops_of(self, dtype: str) -> float:
        """Returns the dense FLOP/s with operands of a dtype; 0 if none are published."""
        known = self.flops_per_s
        return known.get(dtype) or known.get("float32") or known.get("bfloat16") or 0.0


@dataclass(frozen=True)
class Hardware:
    """A number of devices of one kind.

    Attributes:
      name: The name: ``v5p:16x16x16``, ``2xv5e:16x16``, ``h100:16x8``, ``cpu:8``.
      shape: The shape of a TPU slice in chips; for GPUs the number of hosts and of GPUs per host.
      num_slices: The number of TPU slices, which a network connects.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip * self.num_slices

    @property
    def num_domains(self) -> int:
        """The number of GPU hosts or TPU slices. Links connect the devices within each, and a network connects them."""
        return self.shape[0] if self.chip.kind == "gpu" else self.num_slices

    @property
    def domain_size(self) -> int:
        """The number of devices of each host or slice."""
        return self.num_devices // self.num_domains

    def at_least(self, num_devices: int) -> Hardware | None:
        """Returns the smallest hardware of the same chip with at least so many devices; None if there is none.

        It is also None for virtual devices, because more of them would share the same memory.
        """
        if self.chip.per_host:
            per_host = self.chip.per_host
            shape = -(-num_devices // per_host), per_host
            return Hardware(f"{self.chip.key}:{shape[0]}x{shape[1]}", self.chip, shape)
        if self.chip.key not in chips():
            return None
        slices = [hardware_of(f"{self.chip.key}:{shape}") for shape in self.chip.topologies]
        enough = [one for one in slices if one.num_devices >= num_devices]
        if not enough and slices:
            largest = max(slices, key=lambda one: one.num_devices)
            return hardware_of(f"{-(-num_devices // largest.num_devices)}x{largest.name}")
        return min(enough, key=lambda one: one.num_devices, default=None)


@functools.cache
def chips() -> Mapping[str, Chip]:
    """Returns all chips with published facts, by key."""
    text = resources.files("replicax._src.devices").joinpath("chips.toml").read_text(encoding="utf-8")
    return {key: _chip(key, facts) for key, facts in tomllib.loads(text).items()}


def _chip(key: str, facts: dict[str, Any]) -> Chip:
    facts |= {name: tuple(facts.get(name, ())) for name in ("topologies", "device_kinds")}
    facts["vendor_name"] = tuple(facts.get("vendor_name", ("", 1)))
    parts = facts.get("devices_per_chip", 1)
    facts["memory_bytes"] //= parts
    for name in ("memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"):
        facts[name] = facts.get(name, 0.0) / parts
    facts["flops_per_s"] = {dtype: rate / parts for dtype, rate in facts["flops_per_s"].items()}
    return Chip(key, **facts)


def hardware_of(name: str) -> Hardware:
    """Returns the hardware with a name.

    Args:
      name: ``v5e:4x8`` (a TPU slice), ``2xv5e:16x16`` (two of them, with the network between), ``v5litepod-16`` (the
        vendor's name of a slice), ``h100:16x8`` (16 hosts of 8 GPUs), ``h200:4`` (GPUs of one host), or ``cpu:8``
        (virtual CPU devices of this machine).

    Raises:
      TopologyError: No hardware has this name. The message lists the valid names.
    """
    match = _NAME.match(name.lower()) if isinstance(name, str) else None
    if match is None:
        raise TopologyError(f"{name!r} is not a topology. {_known()}")
    num_slices = int(match["slices"] or 1)
    if match["number"] is not None:
        return _named_by_vendor(name, match["chip"], int(match["number"]), num_slices)
    key, shape = match["chip"], tuple(map(int, match["shape"].split("x")))
    if key != "cpu" and key not in chips():
        raise TopologyError(f"{name!r}: there are no facts about {key!r}. {_known()}")
    if not all(shape):
        raise TopologyError(f"{name!r} has no devices. {_known()}")
    if match["slices"] and (key == "cpu" or chips()[key].kind != "tpu"):
        raise TopologyError(f"{name!r}: only TPUs come in slices. {_known()}")
    if key == "cpu":
        return _virtual(name.lower(), shape)
    chip = chips()[key]
    return _slice(name, chip, shape, num_slices) if chip.kind == "tpu" else _cluster(name, chip, shape)


def _named_by_vendor(name: str, prefix: str, number: int, num_slices: int) -> Hardware:
    """Returns hardware by a vendor's name such as v5litepod-16, with a number of chips, or of cores (two for each
    chip).
    """
    chip = next(
        (c for c in chips().values() if prefix in (c.vendor_name[0], c.key) and c.kind == "tpu"), None
    )
    if chip is None:
        raise TopologyError(f"{name!r} is not a topology. {_known()}")
    prefix, per_chip = chip.vendor_name
    sold = {math.prod(map(int, shape.split("x"))) * per_chip: shape for shape in reversed(chip.topologies)}
    if number not in sold:
        raise TopologyError(
            f"{name!r}: no {chip.name} of that name is sold. There are {', '.join(f'{prefix}-{n}' for n in sorted(sold))}"
            f" ({chip.source_of('topologies')}); others are written with their shape, {chip.key}:{chip.topologies[-1]}."
        )
    return _slice(name, chip, tuple(map(int, sold[number].split("x"))), num_slices)


def _slice(name: str, chip: Chip, shape: tuple[int, ...], num_slices: int) -> Hardware:
    text = "x".join(map(str, shape))
    is_cubes = chip.cube > 0 and len(shape) == 3 and not any(size % chip.cube for size in shape)
    is_cubes = is_cubes and list(shape) == sorted(shape) and math.prod(shape) <= chip.max_chips
    if text not in chip.topologies and not is_cubes:
        raise TopologyError(
            f"{name!r}: no {chip.name} of {text} is sold. There are "
            f"{', '.join(f'{chip.key}:{known}' for known in chip.topologies)}{_cubes(chip)} ({chip.source_of('topologies')})."
        )
    several = f"{num_slices}x" if num_slices > 1 else ""
    return Hardware(f"{several}{chip.key}:{text}", chip, shape, num_slices)


def _cubes(chip: Chip) -> str:
    if not chip.cube:
        return ""
    return f", and others of whole {chip.cube}x{chip.cube}x{chip.cube} cubes, up to {chip.max_chips} chips"


def _cluster(name: str, chip: Chip, shape: tuple[int, ...]) -> Hardware:
    hosts, per_host = (1, *shape)[-2:]
    if len(shape) > 2 or per_host > chip.per_host:
        raise TopologyError(
            f"{name!r}: hosts with {chip.name} have at most {chip.per_host} of them. Write {chip.key}:HOSTSxGPUS, with 1 to "
            f"{chip.per_host} GPUs for each host: {chip.key}:1x{chip.per_host}, {chip.key}:16x{chip.per_host}."
        )
    return Hardware(f"{chip.key}:{hosts}x{per_host}", chip, (hosts, per_host))


def _virtual(name: str, shape: tuple[int, ...]) -> Hardware:
    count = math.prod(shape)
    if len(shape) > 1 or count > _MAX_CPU_DEVICES:
        raise TopologyError(
            f"{name!r}: write the number of virtual CPU devices, such as cpu:8, at most {_MAX_CPU_DEVICES}."
        )
    return Hardware(name, this_machine(count), shape)


@functools.cache
def this_machine(num_devices: int) -> Chip:
    """Returns this machine's processor as one of several virtual devices, which share its memory."""
    return Chip("cpu", "cpu", "virtual CPU device of this machine", {}, _memory_of_machine() // num_devices)


def _memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _known() -> str:
    tpus = ", ".join(f"{c.key}:{c.topologies[-1]}" for c in chips().values() if c.kind == "tpu")
    gpus = ", ".join(f"{c.key}:16x{c.per_host}" for c in chips().values() if c.kind == "gpu")
    return (
        f"Write a TPU slice ({tpus}, or a smaller one), several of them (2xv5e:16x16), a slice as its vendor names it "
        f"(v5litepod-16), hosts and GPUs of each ({gpus}), or virtual devices of this machine (cpu:8)."
    )


def check_extra(hardware: Hardware) -> None:
    """Checks that the compiler for this hardware is installed. CPUs need none.

    Raises:
      MissingExtraError: It is not installed.
    """
    extra = f"plan-{hardware.chip.kind}"
    if hardware.chip.kind != "cpu" and missing_packages(extra):
        advice = "Plans for this machine (topology=None) and for cpu:8 need no compiler."
        raise missing_extra(f"A plan for {hardware.name}", extra, advice=advice)
