"""Builds the update program that a parameter server runs when a closure pushes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.programs import Averaging, NamedRows, Shard, UpdateProgram
from replicax._src.program_kit.traced_programs import export

Values = dict[str, Any]
Step = Callable[[Values, Sequence[Any]], None]
"""A step of the program. It changes the values of shards, by key, and takes the operands of the program."""


@final
class UpdateBuilder:
    """The program of one server, while it is built.

    Args:
      ps: The number of the server.
      is_averaged: True if it runs with the mean of several closures' operands.

    Attributes:
      is_averaged: True if it runs with the mean of several closures' operands.
      operands: The operands that the worker sends, in order, as the caller describes them.
    """

    def __init__(self, ps: int, *, is_averaged: bool = False):
        self.ps = ps
        self.is_averaged = is_averaged
        self._averaged: list[Averaging] = []
        self.operands: list[Any] = []
        self._positions: dict[Any, int] = {}
        self._avals: list[Any] = []
        self._state: dict[str, Any] = {}
        self._written: dict[str, set[NamedRows] | None] = {}
        self._steps: list[Step] = []

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def use(
        self,
        array: ServerArray,
        shard: Shard,
        *,
        is_written: bool,
        rows: Iterable[NamedRows] | None = None,
    ) -> str:
        """Makes the program read a shard, and perhaps change it: these rows, or any. Returns its key."""
        self._state.setdefault(shard.key, jax.ShapeDtypeStruct(array.shape_of(shard), array.dtype))
        if is_written:
            before = self._written.get(shard.key, set())
            self._written[shard.key] = None if rows is None or before is None else before | set(rows)
        return shard.key

    def take(self, operand: Any, *avals: tuple[Sequence[int], Any]) -> int:
        """Adds an operand of one array or several. Returns the position of the first."""
        position = self._positions.get(operand)
        is_condition = avals[0][1] == np.dtype(bool)
        # Operands of two variables that are equal here may differ in another function of the round.
        if position is None or (self.is_averaged and not is_condition):
            position = self._positions[operand] = len(self._avals)
            self.operands.append(operand)
            if self.is_averaged:
                self._averaged.append("rows" if len(avals) == 2 else "all" if is_condition else "mean")
            self._avals += [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in avals]
        return position

    def add(self, step: Step) -> None:
        """Adds the next step."""
        self._steps.append(step)

    def build(self, platforms: Sequence[str], name: str) -> UpdateProgram:
        """Returns the finished program."""
        keys, written, steps = list(self._state), list(self._written), list(self._steps)

        def update(*args: Any) -> list[Any]:
            values = dict(zip(keys, args[: len(keys)], strict=True))
            for step in steps:
                step(values, args[len(keys) :])
            return [values[key] for key in written]

        avals = [*self._state.values(), *self._avals]
        blob = export(update, avals, platforms, f"update_of_{name}")
        positions = tuple(keys.index(key) for key in written)
        rows: tuple[tuple[NamedRows, ...] | None, ...] = tuple(
            None if named is None else tuple(sorted(named, key=repr)) for named in self._written.values()
        )
        has_rows = any(named is not None for named in rows)
        return UpdateProgram(blob, tuple(keys), positions, tuple(self._averaged), rows if has_rows else ())
