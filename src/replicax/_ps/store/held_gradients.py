"""Gradients that a parameter server holds until the round of their closures is applied. The caller holds the
lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from replicax._ps.programs.averages import averaged, takes
from replicax._ps.store.updates import CompiledUpdate
from replicax._src.program_kit.errors import InvalidArgumentError


@dataclass(frozen=True)
class _Held:
    update: CompiledUpdate
    arrays: Sequence[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@final
class HeldGradients:
    """Gradients, by round and by closure."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[int, _Held]] = {}

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all gradients."""
        return sum(held.num_bytes for held_of in self._rounds.values() for held in held_of.values())

    def hold(
        self, number: int, closure: int, update: CompiledUpdate, gradients: Sequence[np.ndarray]
    ) -> None:
        """Copies and keeps a closure's gradients. If they come again, the first ones stay.

        Raises:
          InvalidArgumentError: The update does not accept them.
        """
        if not takes(update.program.averaged, update.operands, gradients):
            got = [(array.shape, array.dtype) for array in gradients]
            raise InvalidArgumentError(
                f"An update of averaged gradients takes {list(update.operands)}, got {got}. Send gradients of "
                "the shapes and dtypes that its program was exported for."
            )
        held = self._rounds.setdefault(number, {})
        if closure not in held:
            held[closure] = _Held(update, [np.array(array) for array in gradients])

    def held(self) -> Iterator[tuple[int, int, str, Sequence[np.ndarray]]]:
        """Yields for all gradients the round, the closure, the digest of the update, and the arrays."""
        for number, held_of in self._rounds.items():
            for closure, held in held_of.items():
                yield number, closure, held.update.program.digest, held.arrays

    def keys_of(self, number: int) -> list[str]:
        """Returns the keys of the shards that a round will write."""
        programs = [held.update.program for held in self._rounds.get(number, {}).values()]
        return list(dict.fromkeys(program.state[at] for program in programs for at in program.written))

    def mean(
        self, number: int, closures: Sequence[int]
    ) -> tuple[CompiledUpdate, Sequence[np.ndarray]] | None:
        """Returns the update of a round and its averaged operands, from those closures that sent gradients here.

        Returns:
          None if no closure did.

        Raises:
          InvalidArgumentError: No update of theirs accepts the gradients of all.
        """
        held_of = self._rounds.get(number, {})
        held = [held_of[closure] for closure in closures if closure in held_of]
        if not held:
            return None
        # A closure with fewer rows of a table has a program with fewer row slots.
        update = max((each.update for each in held), key=_room)
        kinds = update.program.averaged
        if not all(takes(kinds, update.operands, each.arrays) for each in held):
            raise InvalidArgumentError(
                "Some functions of a round look up more rows of one table than the others, and fewer of another "
                "table, so no update has room for all. Give the functions of a round elements of the same shapes."
            )
        return update, averaged(kinds, update.operands, [each.arrays for each in held])

    def end(self, number: int) -> None:
        """Drops the gradients of a round that is over."""
        self._rounds.pop(number, None)

    def end_below(self, low: int) -> None:
        """Drops the gradients of all rounds below ``low``, which are over."""
        for number in [number for number in self._rounds if number < low]:
            del self._rounds[number]

    def forget(self, keys: Collection[str]) -> None:
        """Drops the gradients of updates that use these shards, because the shards are gone."""
        for held_of in self._rounds.values():
            for closure in [
                c for c, held in held_of.items() if not set(keys).isdisjoint(held.update.program.state)
            ]:
                del held_of[closure]


def _room(update: CompiledUpdate) -> int:
    return sum(shape[0] for shape, _ in update.operands if shape)
