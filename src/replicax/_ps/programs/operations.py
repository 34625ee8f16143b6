"""Sets of the operations of a traced function."""

from __future__ import annotations

from collections.abc import Iterable

from replicax._src.program_kit.traced_programs import Atom, Operation


def numbers_in(operations: Iterable[Operation], atoms: Iterable[Atom] = ()) -> set[int]:
    """Returns the numbers of ``atoms`` and of all values that operations take."""
    return {atom for atom in atoms if isinstance(atom, int)}.union(*(each.numbers for each in operations))
