"""The text of a compiled program as computations of instructions. The text is a debugging format and differs by
platform.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[0-9,]*)\]")
_OPCODE = re.compile(r"(?:^|[\s)}])(?P<opcode>[a-z][a-z0-9\-]*)\((?P<operands>[^()]*)\)")
_CALLED = re.compile(
    r"(?:calls|branch_computations|called_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
# Opcodes that run a called computation as a part. For other opcodes it is the function of a reduction.
_CALLS, _APPLIED = frozenset({"call", "call-start", "async-start"}), re.compile(r"to_apply=(%[\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One operation.

    Attributes:
      type: The type of its result, such as ``f32[8,16]{1,0}``.
      operands: The names of its operands, instructions of the same computation.
      rest: The full text after its name.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


def computations_of(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns all computations by name, and the name of the entry."""
    computations: dict[str, list[Instruction]] = {}
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


def _instruction(name: str, rest: str) -> Instruction:
    """Splits ``f32[8]{0} add(%a, %b), metadata=...``; a type may be a tuple, and a layout also has parentheses."""
    end = _end_of_type(rest)
    match = _OPCODE.match(rest[end:])
    if match is None:
        return Instruction(name, rest[:end], "", (), rest)
    operands = tuple(part.strip().rpartition("%")[2] for part in match["operands"].split(",") if "%" in part)
    return Instruction(name, rest[:end], match["opcode"], operands, rest)


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


def names_called(instruction: Instruction) -> Iterator[str]:
    """Returns the names of the computations that an instruction runs as a part of itself, except those of a
    ``while``.
    """
    applied = _APPLIED.findall(instruction.rest) if instruction.opcode in _CALLS else []
    for names in [*_CALLED.findall(instruction.rest), *applied]:
        yield from re.findall(r"%([\w.\-]+)", names)


def bytes_of(type_text: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple."""
    return sum(
        _bits(match["dtype"]) * math.prod(int(d) for d in match["dims"].split(",") if d) // 8
        for match in _ARRAY.finditer(type_text)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
