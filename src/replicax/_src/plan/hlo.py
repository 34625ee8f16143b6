"""What a compiled program exchanges, read from its HLO text: collectives, how often, and the compiler's own cycles.

The text is a debugging format, and differs by platform: on TPUs one collective stands in it up to three times (start, fused
step, done), and a reduce-scatter is a fusion around an all-reduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from replicax._src.plan.costs import Collective, merged

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[0-9,]*)\]")
_OPCODE = re.compile(r"(?:^|[\s)}])(?P<opcode>[a-z][a-z0-9\-]*)\((?P<operands>[^()]*)\)")
_COLLECTIVE = re.compile(
    r"^(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?$"
)
_CALLED = re.compile(
    r"(?:calls|branch_computations|called_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_LOOP = re.compile(r"condition=%([\w.\-]+), body=%([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r"known_trip_count[^0-9}]*(\d+)")
_CONSTANT = re.compile(r"s32\[\][^ ]* constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**15


@dataclass
class Compiled:
    """What the text of a compiled program says of one step on one device.

    Attributes:
      cycles: The compiler's own estimate, summed over the operations; 0 where it makes none (only TPU's does).
    """

    collectives: list[Collective] = field(default_factory=list)
    cycles: float = 0.0


def read_hlo(text: str, num_devices: int) -> Compiled:
    """Reads a compiled program.

    Args:
      text: Of ``jax.stages.Compiled.as_text()``.
      num_devices: In a group, where the text names none.
    """
    computations, entry = _split(text)
    found = Compiled()
    _Reader(computations, num_devices, found).read(entry, 1)
    found.collectives = merged(found.collectives)
    return found


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


def _split(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            current = computations.setdefault(begins["name"], [])
            entry = begins["name"] if begins["entry"] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match:
            current.append(_instruction(match["name"], match["rest"]))
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    """Splits ``f32[8]{0} add(%a, %b), metadata=...``; a type may be a tuple, and a layout has parentheses too."""
    end = _end_of_type(rest)
    match = _OPCODE.match(rest[end:])
    if match is None:
        return _Instruction(name, rest[:end], "", (), rest)
    operands = tuple(part.strip().rpartition("%")[2] for part in match["operands"].split(",") if "%" in part)
    return _Instruction(name, rest[:end], match["opcode"], operands, rest)


def _end_of_type(rest: str) -> int:
    depth = 0
    for i, character in enumerate(rest):
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == " " and depth == 0:
            return i
    return len(rest)


class _Reader:
    """Walks the computations from the entry, each loop body as often as it runs."""

    def __init__(self, computations: dict[str, list[_Instruction]], num_devices: int, found: Compiled):
        self._computations, self._num_devices, self._found = computations, num_devices, found

    def read(self, root: str, times: int) -> None:
        """Adds what the entry, or a loop body, does, with all that it calls."""
        seen: dict[
            str, str
        ] = {}  # by channel, the computation: others repeat it; two in one computation are two
        for name, instruction, depth in self._called(root, 0):
            loop = _LOOP.search(instruction.rest) if instruction.opcode == "while" else None
            if loop:
                self.read(loop[2], times * self._trips(instruction.rest, loop[1]))
            cycles = _CYCLES.search(instruction.rest) if depth == 0 else None
            if cycles and int(cycles[1]) < _UNKNOWN_CYCLES:
                self._found.cycles += times * int(cycles[1])
            kind = _COLLECTIVE.match(instruction.opcode)
            if kind:
                channel = _CHANNEL.search(instruction.rest)
                key = channel[1] if channel else f"{name}/{instruction.name}"
                if seen.setdefault(key, name) == name:
                    self._add(kind["kind"], name, instruction, times)

    def _called(self, name: str, depth: int) -> Iterator[tuple[str, _Instruction, int]]:
        for instruction in self._computations.get(name, ()):
            yield name, instruction, depth
            for names in _CALLED.findall(instruction.rest):
                for called in re.findall(r"%([\w.\-]+)", names):
                    yield from self._called(called, depth + 1)

    def _trips(self, rest: str, condition: str) -> int:
        """How often a loop runs: as the text says, or the largest number in its condition, which TPU's compiler leaves."""
        known = _KNOWN_TRIPS.search(rest)
        if known:
            return int(known[1])
        numbers = [
            int(n) for _, i, _ in self._called(condition, 0) for n in _CONSTANT.findall(f"{i.type} {i.rest}")
        ]
        return max(numbers, default=1)

    def _add(self, kind: str, name: str, instruction: _Instruction, times: int) -> None:
        types = {i.name: i.type for i in self._computations[name]}
        size = sum(_bytes_of(types.get(operand, "")) for operand in instruction.operands)
        group = self._group_size(kind, instruction.rest)
        if kind == "all-gather":
            size *= group
        if kind == "all-reduce" and "all-reduce-scatter" in name:
            kind = "reduce-scatter"
        if group > 1 and size:
            self._found.collectives.append(Collective(kind, size, group, times))

    def _group_size(self, kind: str, rest: str) -> int:
        if kind == "collective-permute":
            return 2
        listed, iota = _LISTED_GROUPS.search(rest), _IOTA_GROUPS.search(rest)
        if listed:
            return listed[1].count(",") + 1
        return int(iota[2]) if iota else self._num_devices


def _bytes_of(type_text: str) -> int:
    return sum(
        _bits(match["dtype"]) * math.prod(int(d) for d in match["dims"].split(",") if d) // 8
        for match in _ARRAY.finditer(type_text)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
