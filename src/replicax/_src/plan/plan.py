"""``Plan``: the facts of a program on hardware before it runs there, and a lower bound on its cost."""

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
    """A variable or an argument of a planned program.

    Attributes:
      role: "variable" or "argument".
      shape: The shape of the full array.
      device_bytes: The bytes of it on one device.
      split: The mesh axis over which each dim is split, or None.
      pieces: The number of pieces along each dim. A device has one piece.
      is_written: True if the program changes it.
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
    """The memory of one device, in bytes.

    Attributes:
      arguments: The inputs of the program, variables and the batch, padded as on the device.
      donated: The bytes of these that outputs overwrite.
      peak: The largest use at any time, to compare with ``limit``.
      limit: The memory of the device.
      is_exact: False if the compiler failed; then ``temporaries`` is the size in its error.
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
    """One part of the roofline: a lower bound on the step time.

    Attributes:
      name: "multiplications", "memory", "links" or "network".
      amount: The FLOP or bytes of one device.
      rate: The published rate per second.
      source: The page that publishes the rate.
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
      name: The name of the function.
      num_replicas: R, the number of replicas on that hardware.
      rows: The rows of a replica's batch; None if no argument is split.
      arrays: The variables and arguments.
      flops: The FLOP of matrix products and convolutions on one device in a step, by dtype.
      requested: The collectives that the program requests; empty if the partitioner makes them (``fit``).
      compiled: The collectives of the compiled program.
      bounds: The parts of the roofline; empty if no figures are published.
      estimated_cycles: The compiler's own estimate; 0 if it makes none.
      remedies: The changes that were computed to make it fit; empty if it fits.
      shard_size: The number of replicas over which the strategy shards state; None if it does not.
      seconds: The times of tracing, lowering and compiling.
      notes: Notes for the reader of the plan.
      num_logical_devices: The number of logical devices of a replica.
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
        """True if the peak is within a device's memory."""
        return self.memory.peak <= self.memory.limit

    @property
    def global_batch(self) -> int | None:
        """The rows of all replicas together."""
        return None if self.rows is None else self.rows * self.num_replicas

    @property
    def state_bytes(self) -> int:
        """The bytes of variables, and of arguments that are not split, on a device. A smaller batch does not reduce
        them.
        """
        return sum(a.device_bytes for a in self.arrays if a.role == "variable" or not any(a.split))

    @property
    def at_least_s(self) -> float | None:
        """The largest of ``bounds`` in seconds, a lower bound on the step time."""
        return max((bound.seconds for bound in self.bounds), default=None)

    @property
    def estimated_s(self) -> float | None:
        """The compiler's cycles as seconds; None if it gives no cycles or the clock is unknown."""
        clock = self.hardware.chip.clock_hz
        return self.estimated_cycles / clock if self.estimated_cycles and clock else None

    def to_dict(self) -> dict[str, Any]:
        """Returns all facts for ``json``, with bytes, seconds and counts as numbers."""
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
        """Returns ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_svg(self) -> str:
        """Returns a picture of the part of each variable and argument that one device holds."""
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
