"""Lookups: turns a program of tables into one that takes some of their rows, and one that computes which rows.

The pass runs before gradients are resolved: a gradient with respect to a table becomes one with respect to its rows,
each of which is there once. The pass names the operations that need the full table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from replicax._ps.programs.lookup_rules import Positions, Walk
from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.table_rows import ByRows, NeedsWholeTable, WholeTable
from replicax._src.program_kit.traced_programs import FlatProgram, computing, first_results, trace

_MAX_ROWS = 2**31 - 1
_STAYS_A_TABLE = frozenset(["convert_element_type", "copy", "stop_gradient", "replicax_read"])
_OF_LEARNING = frozenset(["replicax_gradient", "replicax_aggregate"])


@dataclass(frozen=True)
class Given:
    """The role of an operand of a rewritten program.

    Attributes:
      kind: "constant": constant number ``index``. "input": input ``index`` of the original program. "rows": the rows of
        lookup ``index``, [num_ids, ...]: those of its unique ids, then arbitrary padding. "positions": the position of
        each id in these rows (int32, [num_ids]); ``num_ids`` for an id that the table does not have.
    """

    kind: Literal["constant", "input", "rows", "positions"]
    index: int


@dataclass(frozen=True)
class TableLookup:
    """All lookups of one table in a program, combined.

    Attributes:
      table: The position of the table among the operands of the original program.
      jaxpr: Computes the ids (int32, [num_ids]): row numbers, or the table's number of rows for an id without a row.
      inputs: The operands of ``jaxpr``.
      num_ids: The number of ids, duplicates included.
    """

    table: int
    jaxpr: Any
    inputs: tuple[Given, ...]
    num_ids: int


@dataclass(frozen=True)
class Lookups:
    """A program that takes rows instead of tables.

    Attributes:
      jaxpr: The rewritten program, without constvars and with its marks unresolved.
      consts: The constant arrays.
      inputs: The operands of ``jaxpr``: the constants, then those of the original program, with rows and positions in
        place of each table.
      lookups: The lookups of the replaced tables.
      gradients: The lookup number of each result that is the gradient of such a table. It has the shape of the rows;
        all other rows have a gradient of 0.
      whole: The reasons why other tables are needed in full.
    """

    jaxpr: Any
    consts: list[Any]
    inputs: tuple[Given, ...]
    lookups: tuple[TableLookup, ...]
    gradients: dict[int, int]
    whole: tuple[WholeTable, ...]


def find_lookups(jaxpr: Any, tables: Sequence[int], axis_env: Sequence[tuple[str, int]] = ()) -> Lookups:
    """Replaces tables of which a program uses only some rows.

    With several replicas, all get the same rows, and each gets its own positions.

    Args:
      jaxpr: The program, without constvars and with its marks unresolved.
      tables: The positions of operands that are tables, with rows on axis 0.
      axis_env: The names and sizes of the axes of the trace.
    """
    chosen, whole = [], []
    program = FlatProgram.unresolved(jaxpr)
    used = numbers_in(program.operations, program.outputs)
    for table in tables:
        if program.input_avals[table].shape[0] > _MAX_ROWS:
            whole.append(WholeTable(table, None, "", f"has more than {_MAX_ROWS} rows"))
        elif program.inputs[table] in used:
            chosen.append(table)
    while True:
        try:
            return _rewritten(program, chosen, whole, axis_env)
        except NeedsWholeTable as found:
            whole.append(found.why)
            chosen.remove(found.why.table)


def is_looked_up(program: FlatProgram, table: int) -> bool:
    """Returns True if some operation of a program, at any depth, takes rows of its operand ``table`` by their
    numbers.
    """
    same = {program.inputs[table]}
    for operation in program.operations:
        if same.isdisjoint(operation.numbers):
            continue
        if operation.name == "gather" and numbers_in((), operation.operands[:1]) & same:
            return True
        if operation.name in _STAYS_A_TABLE:
            same.add(operation.results[0])
        for inner in operation.inner:
            given = operation.operands[len(operation.operands) - len(inner.inputs) :]
            tables = [at for at, atom in enumerate(given) if isinstance(atom, int) and atom in same]
            if any(is_looked_up(inner, at) for at in tables):
                return True
    return False


def _rewritten(
    program: FlatProgram,
    tables: Sequence[int],
    whole: Sequence[WholeTable],
    axis_env: Sequence[tuple[str, int]],
) -> Lookups:
    given = _operands(program, tables)
    num_ids = dict.fromkeys(tables, 0)
    for table, shape in _counted(program, tables, given, axis_env):
        num_ids[table] += _size(shape)
    run = _Run(program, tables, given, num_ids)
    traced, consts = trace(run, _avals(program, tables, given, num_ids), axis_env)
    inputs = (*(Given("constant", i) for i in range(len(consts))), *given)
    num_results = len(program.outputs)
    lookups = tuple(
        _lookup(traced, num_results + number, table, inputs, num_ids[table], run.lines.get(table, ""))
        for number, table in enumerate(tables)
    )
    return Lookups(first_results(traced, num_results), consts, inputs, lookups, run.gradients, tuple(whole))


def _operands(program: FlatProgram, tables: Sequence[int]) -> list[Given]:
    given: list[Given] = []
    for position in range(len(program.inputs)):
        if position in tables:
            number = list(tables).index(position)
            given += [Given("rows", number), Given("positions", number)]
        else:
            given.append(Given("input", position))
    return given


def _avals(
    program: FlatProgram, tables: Sequence[int], given: Sequence[Given], num_ids: dict[int, int]
) -> list[Any]:
    def aval_of(each: Given) -> Any:
        if each.kind == "input":
            return program.input_avals[each.index]
        table = tables[each.index]
        aval = program.input_avals[table]
        if each.kind == "positions":
            return jax.ShapeDtypeStruct((num_ids[table],), jnp.int32)
        return jax.ShapeDtypeStruct((num_ids[table], *aval.shape[1:]), aval.dtype)

    return [aval_of(each) for each in given]


def _counted(
    program: FlatProgram, tables: Sequence[int], given: Sequence[Given], axis_env: Sequence[tuple[str, int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the table and the shape of the ids of each lookup, in order."""
    one = dict.fromkeys(tables, 1)
    run = _Run(program, tables, given, None)
    trace(run, _avals(program, tables, given, one), axis_env)
    return run.found


class _Run:
    """Runs the rewritten program in a trace: returns the results, then the ids of each table.

    Args:
      num_ids: The number of ids of each table; None to find them.
    """

    def __init__(
        self,
        program: FlatProgram,
        tables: Sequence[int],
        given: Sequence[Given],
        num_ids: dict[int, int] | None,
    ):
        self._program, self._tables, self._given = program, tables, given
        self._num_ids = num_ids
        self.found: list[tuple[int, tuple[int, ...]]] = []
        self.gradients: dict[int, int] = {}
        self.lines: dict[int, str] = {}

    def __call__(self, *args: Any) -> list[Any]:
        operands: dict[int, Any] = {}
        flat: dict[int, Any] = {}
        for each, value in zip(self._given, args, strict=True):
            if each.kind == "input":
                operands[each.index] = value
            elif each.kind == "rows":
                table = self._tables[each.index]
                operands[table] = ByRows(table, value, is_gradient=False)
            else:
                flat[self._tables[each.index]] = value
        positions = Positions(None if self._num_ids is None else _slices(flat))
        num_rows = {table: self._program.input_avals[table].shape[0] for table in self._tables}
        walk = Walk(positions, num_rows)
        results = walk.evaluate(self._program, [operands[i] for i in range(len(operands))])
        self.found, self.lines = positions.found, positions.lines
        ids = {table: [jnp.zeros(0, jnp.int32)] for table in self._tables}
        for (table, _), each in zip(positions.found, positions.ids, strict=True):
            ids[table].append(each.reshape(-1))
        return [*self._plain(results), *(jnp.concatenate(ids[table]) for table in self._tables)]

    def _plain(self, results: Sequence[Any]) -> list[Any]:
        plain = []
        for number, result in enumerate(results):
            if isinstance(result, ByRows):
                if not result.is_gradient:
                    raise NeedsWholeTable(WholeTable(result.table, None, "", "is a result"))
                self.gradients[number] = list(self._tables).index(result.table)
            plain.append(result.rows if isinstance(result, ByRows) else result)
        return plain


def _slices(flat: dict[int, Any]) -> Any:
    """Yields the positions of lookups, in order, for the table and shape that are sent to it."""
    starts = dict.fromkeys(flat, 0)

    def take(table: int, shape: tuple[int, ...]) -> Any:
        start = starts[table]
        starts[table] = start + _size(shape)
        return jax.lax.slice(flat[table], (start,), (starts[table],)).reshape(shape)

    return take


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _lookup(
    traced: Any, output: int, table: int, inputs: Sequence[Given], num_ids: int, line: str
) -> TableLookup:
    """Returns the program that computes only the ids.

    Raises:
      NeedsWholeTable: The ids are computed from rows, or from gradients.
    """
    jaxpr, used = computing(traced, output)
    kept = tuple(each for each, is_used in zip(inputs, used, strict=True) if is_used)
    if any(each.kind in ("rows", "positions") for each in kept):
        raise NeedsWholeTable(
            WholeTable(table, "gather", line, "is given ids that are computed from rows of a table")
        )
    operations = FlatProgram.unresolved(jaxpr).operations
    if any(not _OF_LEARNING.isdisjoint({each.name, *each.inner_names}) for each in operations):
        raise NeedsWholeTable(
            WholeTable(table, "gather", line, "is given ids that are computed from gradients")
        )
    return TableLookup(table, jaxpr, kept, num_ids)
