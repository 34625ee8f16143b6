"""The roofline of a program: the least work of a step over the published rates of the hardware."""

from __future__ import annotations

from collections.abc import Sequence

from replicax._src.devices.hardware import Chip, Hardware
from replicax._src.devices.plan import Bound, Collective, Memory


def bounds_of(
    hardware: Hardware, flops: dict[str, float], memory_bytes: float, collectives: Sequence[Collective]
) -> list[Bound]:
    """Returns the parts of the roofline: the least work of a step over the published rates of the hardware.

    Args:
      memory_bytes: The bytes that pass through a device's memory.
      collectives: The collectives of one device.
    """
    chip = hardware.chip
    if not chip.flops_per_s:
        return []
    seconds = sum(count / chip.flops_of(dtype) for dtype, count in flops.items())
    total = sum(flops.values())
    rate = total / seconds if seconds else next(iter(chip.flops_per_s.values()))
    bounds = [
        Bound("multiplications", total, rate, chip.source_of("flops_per_s")),
        Bound("memory", memory_bytes, *_rate(chip, "memory_bytes_per_s")),
        Bound("links", sum(one.link_bytes for one in collectives), *_rate(chip, "link_bytes_per_s")),
        Bound("network", sum(one.network_bytes for one in collectives), *_rate(chip, "network_bytes_per_s")),
    ]
    return [bound for bound in bounds if bound.rate and (bound.name != "network" or hardware.num_domains > 1)]


def _rate(chip: Chip, fact: str) -> tuple[float, str]:
    return getattr(chip, fact), chip.source_of(fact)


def memory_traffic(memory: Memory, matrix_bytes: float) -> float:
    """Returns the least bytes that pass through a device's memory: those of matrix products, or of arguments and
    outputs if these are more.
    """
    return max(matrix_bytes, float(memory.arguments + memory.outputs))
