"""``Plan``: the facts of a program on hardware before it runs there, which ``Strategy.plan`` returns.

The part `_plan` finds them, prints them and draws them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from replicax._src.devices.hardware import Hardware
from replicax._src.drawing import html
from replicax._src.hooks import hook


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


@dataclass(frozen=True)
class Collective:
    """One kind of collective, and the number of its runs in a step.

    Attributes:
      kind: XLA's name: "all-reduce", "all-gather", ...
      bytes: The size of the full array on one device: the input, or the output of an all-gather.
      group_size: The number of devices that exchange.
      count: The number of runs in a step, with loops unrolled.
      axes: The axes of the mesh, if the program names them.
      stands_for: The requested kind, if the compiler replaced it by this one; otherwise None.
      num_domains: The number of GPU hosts or TPU slices over which the devices of a group are spread evenly.
    """

    kind: str
    bytes: int
    group_size: int
    count: int = 1
    axes: tuple[str, ...] = ()
    num_domains: int = 1
    stands_for: str | None = None

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends in a step with the ring algorithm.

        That is 2 (n - 1) / n of an all-reduce's bytes, all bytes of a permutation, and (n - 1) / n of the others'
        bytes.
        """
        return self.count * self.bytes * self._share(self.group_size)

    @property
    def link_bytes(self) -> float:
        """A lower bound on the bytes that one device sends within its host or slice, if the exchange starts there."""
        return self.count * self.bytes * self._share(self.group_size // self.num_domains)

    @property
    def network_bytes(self) -> float:
        """A lower bound on the bytes that one device sends to other hosts or slices, if the devices of each share them
        evenly.
        """
        together = (
            1 if self.kind in ("all-to-all", "collective-permute") else self.group_size // self.num_domains
        )
        return self.count * self.bytes * self._share(self.num_domains) / max(1, together)

    def _share(self, size: int) -> float:
        if size < 2:
            return 0.0
        share = 1.0 if self.kind == "collective-permute" else (size - 1) / size
        return share * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Remedy:
    """A change that was computed to make a program fit.

    Attributes:
      change: The change in words.
      topology: The topology for which it was planned.
      rows, global_batch: The rows of a replica and of all replicas; None if no argument is split.
      shard_state, shard_size: The sharded state, "optimizer" or "all", and the number of replicas that share it; None
        if the change keeps the sharding.
      peak: The bytes of a device with the change; those of the arguments alone if it was not compiled.
      fits: True if the program then fits; None if that depends on temporaries, which were not compiled.
      is_compiled: True if the program was compiled with the change.
    """

    change: str
    topology: str
    rows: int | None
    global_batch: int | None
    shard_state: str | None
    shard_size: int | None
    peak: int
    fits: bool | None
    is_compiled: bool


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
        return hook("plan_picture").svg(self)

    def __str__(self) -> str:
        return hook("plan_report").text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.page(
            f"{self.name} on {self.hardware.name}",
            html.scrolled(hook("plan_picture").svg(self, is_inline=True)),
            html.folded("the whole report", str(self)),
        )


def _described(one: Collective) -> dict[str, Any]:
    return {**asdict(one), "wire_bytes": one.wire_bytes}
