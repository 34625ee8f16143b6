"""``Plan``: what is known of a program on hardware before it runs there, and what it would cost at least."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from replicax._src.devices.hardware import Chip, Hardware
from replicax._src.drawing import html
from replicax._src.plan.costs import Collective
from replicax._src.plan.picture import svg
from replicax._src.plan.remedies import Remedy
from replicax._src.plan.report import text


@dataclass(frozen=True)
class PlannedArray:
    """A variable, or an argument, of a planned program.

    Attributes:
      role: "variable" or "argument".
      shape: Of the whole array.
      device_bytes: What one device holds of it.
      split: For each dim the axis of the mesh that it is split over, or None.
      pieces: For each dim into how many pieces it is cut, of which a device has one.
      is_written: The program changes it.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    device_bytes: int
    split: tuple[str | None, ...]
    is_written: bool = False
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      arguments: What the program is given: variables and the batch, as they are padded there.
      donated: Of these, what outputs overwrite.
      peak: All at the worst moment; what counts against ``limit``.
      limit: What the device has.
      is_exact: False where the compiler gave up, and ``temporaries`` is what it says that it needs.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int
    peak: int
    limit: int
    is_exact: bool = True


@dataclass(frozen=True)
class Bound:
    """One part of the roofline: what a step takes at least.

    Attributes:
      name: "multiplications", "memory", "links" or "network".
      amount: FLOP or bytes of one device.
      rate: Per second, as published.
      source: The page that says so.
    """

    name: str
    amount: float
    rate: float
    source: str

    @property
    def seconds(self) -> float:
        return self.amount / self.rate


@final
@dataclass(frozen=True, repr=False)
class Plan:
    """A program compiled for hardware, without running it.

    Attributes:
      name: Of the function.
      num_replicas: R there.
      rows: Of a replica's batch; None where no argument is split.
      arrays: The variables and arguments.
      flops: Of one device in a step, by dtype: matrix products and convolutions.
      requested: Collectives as the program asks for them; empty where the partitioner makes them (``fit``).
      compiled: Collectives as the compiler left them.
      bounds: The roofline, in parts; empty where nothing is published.
      estimated_cycles: The compiler's own estimate; 0 where it makes none.
      remedies: What was computed to make it fit; empty where it does.
      shard_size: Over how many replicas the strategy divides state; None: over none.
      seconds: How long tracing, lowering and compiling took.
      notes: What to know when reading it.
      num_logical_devices: Of a replica.
    """

    name: str
    hardware: Hardware
    num_replicas: int
    rows: int | None
    memory: Memory
    arrays: Sequence[PlannedArray]
    flops: dict[str, float]
    requested: Sequence[Collective]
    compiled: Sequence[Collective]
    bounds: Sequence[Bound]
    estimated_cycles: float
    seconds: dict[str, float]
    remedies: Sequence[Remedy] = ()
    shard_size: int | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    num_logical_devices: int = 1

    @property
    def fits(self) -> bool:
        """Whether the peak is within a device's memory."""
        return self.memory.peak <= self.memory.limit

    @property
    def global_batch(self) -> int | None:
        """Rows of all replicas together."""
        return None if self.rows is None else self.rows * self.num_replicas

    @property
    def state_bytes(self) -> int:
        """Of a device: variables, and the arguments that are not split, which no smaller batch makes less."""
        return sum(a.device_bytes for a in self.arrays if a.role == "variable" or not any(a.split))

    @property
    def at_least_s(self) -> float | None:
        """The largest of ``bounds``, in seconds: no step is faster."""
        return max((bound.seconds for bound in self.bounds), default=None)

    @property
    def estimated_s(self) -> float | None:
        """The compiler's cycles as seconds, where it gives some and a clock is known."""
        clock = self.hardware.chip.clock_hz
        return self.estimated_cycles / clock if self.estimated_cycles and clock else None

    def to_dict(self) -> dict[str, Any]:
        """All facts, for ``json``: bytes, seconds and counts as numbers."""
        chip = self.hardware.chip
        return {
            "name": self.name,
            "topology": self.hardware.name,
            "device": {
                "name": chip.name,
                "sources": {page: list(facts) for page, facts in chip.sources.items()},
                "notes": chip.notes,
            },
            "num_devices": self.hardware.num_devices,
            "num_replicas": self.num_replicas,
            "shard_size": self.shard_size,
            "num_logical_devices": self.num_logical_devices,
            "rows_per_replica": self.rows,
            "global_batch": self.global_batch,
            "fits": self.fits,
            "memory": asdict(self.memory),
            "arrays": [asdict(array) for array in self.arrays],
            "flops": dict(self.flops),
            "collectives": {
                "requested": [_described(one) for one in self.requested],
                "compiled": [_described(one) for one in self.compiled],
            },
            "roofline": {
                "at_least_s": self.at_least_s,
                "parts": [{**asdict(bound), "seconds": bound.seconds} for bound in self.bounds],
            },
            "compiler_estimate": {
                "cycles": self.estimated_cycles,
                "clock_hz": chip.clock_hz,
                "seconds": self.estimated_s,
            },
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_svg(self) -> str:
        """A picture: what one device holds of each variable and argument, whole or a part."""
        return svg(self)

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.page(
            f"{self.name} on {self.hardware.name}",
            html.scrolled(svg(self, is_inline=True)),
            html.folded("the whole report", text(self)),
        )


def _described(one: Collective) -> dict[str, Any]:
    return {**asdict(one), "wire_bytes": one.wire_bytes}


def bounds_of(
    hardware: Hardware, flops: dict[str, float], memory_bytes: float, collectives: Sequence[Collective]
) -> list[Bound]:
    """The parts of the roofline: what is published of the hardware, over what a step does at least.

    Args:
      memory_bytes: That pass through a device's memory.
      collectives: Of one device.
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
    """Bytes that pass through a device's memory at least: of matrix products, or of arguments and outputs, if that is
    more.
    """
    return max(matrix_bytes, float(memory.arguments + memory.outputs))
