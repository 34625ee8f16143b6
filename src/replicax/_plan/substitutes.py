"""Detects all-reduces that the compiler emits in place of another requested collective."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from replicax._plan.hlo_text import Instruction, bytes_of, names_called

EXPLAINED = {
    "all-gather": (
        "an all-gather was compiled as an all-reduce: each device adds its piece to zeros where the others' are, at twice the "
        "bytes. TPU's compiler does this for thin or small pieces. It gathers larger arrays, and arrays sharded over "
        "fewer replicas (shard_size)"
    ),
    "reduce-scatter": (
        "a reduce-scatter was compiled as an all-reduce, at twice the bytes; each device then keeps its piece"
    ),
}
"""The explanation for each requested collective that the compiler replaced."""

_PARAMETER = re.compile(r"parameter\((\d+)\)")

Computations = Mapping[str, Sequence[Instruction]]


def stands_for(instruction: Instruction, computation: str, computations: Computations) -> str | None:
    """Returns the collective that an all-reduce replaces, or None for a true all-reduce."""
    around = {one.name: one for one in computations[computation]}
    operands = [around[name] for name in instruction.operands if name in around]
    if operands and all(_puts_a_piece(one, computations) for one in operands):
        return "all-gather"
    if instruction.type.startswith("("):
        is_in_pieces = _mostly_pieces_are_used(instruction.name, computation, computations)
    else:
        is_in_pieces = _only_pieces_are_used(instruction.name, computation, computations)
    return "reduce-scatter" if is_in_pieces else None


def _mostly_pieces_are_used(name: str, computation: str, computations: Computations) -> bool:
    """True if most bytes of a combined all-reduce are used in pieces. Small arrays in it may be used in full."""
    parts = [
        one for one in computations[computation] if one.opcode == "get-tuple-element" and name in one.operands
    ]
    cut = [one for one in parts if _only_pieces_are_used(one.name, computation, computations)]
    return 2 * sum(bytes_of(one.type) for one in cut) > sum(bytes_of(one.type) for one in parts)


def _puts_a_piece(instruction: Instruction, computations: Computations) -> bool:
    """True if an array is this device's piece, put into a full array."""
    if instruction.opcode == "fusion":
        called = [one for name in names_called(instruction) for one in computations.get(name, ())]
        return any(
            one.opcode == "dynamic-update-slice" and one.type.split("{")[0] == instruction.type.split("{")[0]
            for one in called
        )
    return instruction.opcode == "dynamic-update-slice"


def _only_pieces_are_used(name: str, computation: str, computations: Computations) -> bool:
    users = [one for one in computations[computation] if name in one.operands]
    return bool(users) and all(_cuts(name, user, computations) for user in users)


def _cuts(name: str, user: Instruction, computations: Computations) -> bool:
    """True if an instruction, or the fusion that it runs, uses only a piece of a value."""
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name
    if user.opcode != "fusion":
        return False
    number = user.operands.index(name)
    for called in names_called(user):
        for one in computations.get(called, ()):
            found = _PARAMETER.search(one.rest) if one.opcode == "parameter" else None
            if found and int(found[1]) == number:
                return _only_pieces_are_used(one.name, called, computations)
    return False
