"""The collectives of a compiled program, their counts and the compiler's own cycle estimate, read from HLO text.

The text is a debugging format and differs by platform. On TPUs one collective occurs up to three times (start, fused
step, done), and a reduce-scatter is a fusion around an all-reduce.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replicax._plan.collective_groups import axes_of, first_group
from replicax._plan.costs import merged, num_domains_of
from replicax._plan.hlo_text import Instruction, bytes_of, computations_of, names_called
from replicax._plan.substitutes import stands_for
from replicax._src.devices.plan import Collective

_COLLECTIVE = re.compile(
    r"^(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?$"
)
# On TPUs an exchange may be spread over fused steps. The text of each step contains the full collective.
_STEP_OF_ASYNC = re.compile(r"async_collective_fusion")
_END_OF_ASYNC = 'custom_call_target="AsyncCollectiveDone"'
_PAIRS = re.compile(r"source_target_pairs=\{(\{[^=]*?\})\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_LOOP = re.compile(r"condition=%([\w.\-]+), body=%([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r"known_trip_count[^0-9}]*(\d+)")
_CONSTANT = re.compile(r"s32\[\][^ ]* constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**15


@dataclass
class Compiled:
    """The facts of one step on one device, from the text of a compiled program.

    Attributes:
      cycles: The compiler's own estimate, summed over the operations; 0 if it makes none (only TPU's compiler does).
    """

    collectives: list[Collective] = field(default_factory=list)
    cycles: float = 0.0


def read_hlo(
    text: str, num_devices: int, domain_size: int | None = None, mesh: Mapping[str, int] | None = None
) -> Compiled:
    """Reads a compiled program.

    Args:
      text: The result of ``jax.stages.Compiled.as_text()``.
      num_devices: The size of a group for which the text names no devices.
      domain_size: The number of devices of a GPU host or a TPU slice; None for a single one.
      mesh: The sizes of the mesh by axis, to find the axes of collectives; None skips this.
    """
    computations, entry = computations_of(text)
    found = Compiled()
    _Reader(computations, num_devices, domain_size or num_devices, mesh, found).read(entry, 1)
    found.collectives = merged(found.collectives)
    return found


class _Reader:
    """Walks the computations from the entry, and each loop body as often as it runs."""

    def __init__(
        self,
        computations: dict[str, list[Instruction]],
        num_devices: int,
        domain_size: int,
        mesh: Mapping[str, int] | None,
        found: Compiled,
    ):
        self._computations, self._num_devices, self._found = computations, num_devices, found
        self._domain_size, self._mesh = domain_size, mesh

    def read(self, root: str, times: int) -> None:
        """Adds the operations of the entry or of a loop body, and of all computations that it calls."""
        for name, instruction, depth in self._called(root, 0):
            loop = _LOOP.search(instruction.rest) if instruction.opcode == "while" else None
            if loop:
                self.read(loop[2], times * self._trips(instruction.rest, loop[1]))
            cycles = _CYCLES.search(instruction.rest) if depth == 0 else None
            if cycles and int(cycles[1]) < _UNKNOWN_CYCLES:
                self._found.cycles += times * int(cycles[1])
            self._add_between_slices(name, instruction, times)
            kind = _COLLECTIVE.match(instruction.opcode)
            if kind and not self._goes_on(name, instruction):
                self._add(kind["kind"], name, instruction, times)

    def _called(self, name: str, depth: int) -> Iterator[tuple[str, Instruction, int]]:
        for instruction in self._computations.get(name, ()):
            yield name, instruction, depth
            for called in names_called(instruction):
                yield from self._called(called, depth + 1)

    def _goes_on(self, name: str, instruction: Instruction) -> bool:
        """True if a collective continues or ends an exchange that another instruction starts.

        Channels do not tell this, because all collectives of a ``shard_map`` have the same channel.
        """
        ends = (other for other in self._computations[name] if _END_OF_ASYNC in other.rest)
        return bool(_STEP_OF_ASYNC.match(name)) or any(instruction.name in end.operands for end in ends)

    def _trips(self, rest: str, condition: str) -> int:
        """Returns the trip count of a loop: the known count in the text, or the largest number in its condition, which
        TPU's compiler keeps.
        """
        known = _KNOWN_TRIPS.search(rest)
        if known:
            return int(known[1])
        numbers = [
            int(n) for _, i, _ in self._called(condition, 0) for n in _CONSTANT.findall(f"{i.type} {i.rest}")
        ]
        return max(numbers, default=1)

    def _add(self, kind: str, name: str, instruction: Instruction, times: int) -> None:
        size = self._operand_bytes(name, instruction)
        members = self._members(kind, instruction.rest)
        if kind == "all-gather":
            size *= len(members)
        if kind == "all-reduce" and "all-reduce-scatter" in name:
            kind = "reduce-scatter"
        if len(members) > 1 and size:
            domains = num_domains_of(members, self._domain_size)
            original = stands_for(instruction, name, self._computations) if kind == "all-reduce" else None
            axes = () if self._mesh is None else axes_of(members, self._mesh)
            self._found.collectives.append(
                Collective(kind, size, len(members), times, axes, domains, original)
            )

    def _add_between_slices(self, name: str, instruction: Instruction, times: int) -> None:
        """Adds the bytes that TPUs send over the network. For several slices the runtime does the rest of the exchange
        on the hosts.
        """
        between = _BETWEEN_SLICES.search(instruction.rest) if instruction.opcode == "send" else None
        if between is None:
            return
        size = self._operand_bytes(name, instruction)
        kind = between[1].lower().replace("_", "-")
        slices = self._num_devices // self._domain_size
        self._found.collectives.append(Collective(kind, size, slices, times, num_domains=slices))

    def _operand_bytes(self, name: str, instruction: Instruction) -> int:
        types = {i.name: i.type for i in self._computations[name]}
        return sum(bytes_of(types.get(operand, "")) for operand in instruction.operands)

    def _members(self, kind: str, rest: str) -> Sequence[int]:
        """Returns the devices of the first group."""
        if kind == "collective-permute":
            return self._permuted(rest)
        return first_group(rest) or range(self._num_devices)

    def _permuted(self, rest: str) -> Sequence[int]:
        """Returns a pair of devices that exchange, on different hosts or slices if there is such a pair."""
        found = _PAIRS.search(rest)
        pairs = [
            tuple(map(int, pair.split(",")))
            for pair in re.findall(r"\{(\d+,\d+)\}", found[1] if found else "")
        ]
        apart = (p for p in pairs if num_domains_of(p, self._domain_size) > 1)
        return next(apart, (0, 1))
