"""The worker's side of a closure: its computation, its inputs, and the results that go to the servers."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._ps.placement.placement_plan import Places
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.iterator_inputs import Element
from replicax._ps.programs.lookups import Given
from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.optimizers import OptimizerUpdate
from replicax._ps.programs.programs import Input, Lookup, Push, WorkerProgram
from replicax._ps.programs.random_keys import is_key, taking_data
from replicax._ps.programs.tracing import TracedFunction
from replicax._ps.programs.variable_changes import Event, assigning
from replicax._src.program_kit.errors import UnsupportedError
from replicax._src.program_kit.traced_programs import (
    Atom,
    FlatProgram,
    NumberedValues,
    Operation,
    Topology,
    export,
)

log = logging.getLogger("replicax")
_PRINTS = ("debug_callback", "debug_print")
SMALL_BYTES = 64 << 10  # a larger constant is sent once, on its own
_Aval = tuple[tuple[int, ...], Any]


@final
class WorkerBuilder:
    """The worker's program, while it is built.

    Args:
      traced: The function.
      array_of: Returns the array on the servers of a variable.

    Attributes:
      program: The function as one list of operations.
      notes: The changes to variables, in order, with their values in ``program``.
      constants: Large arrays that the function closes over, by name; known once it is built.
    """

    def __init__(self, traced: TracedFunction, array_of: Callable[[Any], ServerArray]):
        self._traced, self._array_of = traced, array_of
        variant = traced.variant
        self.program = FlatProgram(variant.jaxpr, is_selected=assigning(traced.events))
        self.constants: dict[str, np.ndarray] = {}
        self._consts = dict(zip(self.program.inputs, variant.consts, strict=False))
        self._variables: dict[int, Any] = {}
        self._arguments: dict[int, int] = {}  # numbers in the program -> positions
        self._of_lookups: dict[int, tuple[Any, int]] = {}
        for number, (kind, index) in zip(
            self.program.inputs[len(variant.consts) :], self._kinds(), strict=True
        ):
            if kind != "input":
                self._of_lookups[number] = (kind, index)
            elif index < len(variant.entries):
                self._variables[number] = variant.entries[index].binding.variable
            else:
                self._arguments[number] = index - len(variant.entries)
        num_results = sum(output.is_array for output in variant.outputs[: traced.num_outputs])
        self._results = list(self.program.outputs[:num_results])
        self.notes = self._noted(num_results)
        self._outputs: dict[tuple[int, int], tuple[int, Atom]] = {}
        self._updates: list[tuple[OptimizerUpdate, Sequence[Atom]]] = []
        self._avals = self._known_avals()

    def _kinds(self) -> list[tuple[Any, int]]:
        """Returns the kind of each input after the constants: a variable or an argument, of the function or of a
        lookup.
        """
        variant, rows = self._traced.variant, self._traced.rows
        if rows is None:
            return [("input", index) for index in range(len(variant.jaxpr.invars) - len(variant.consts))]
        given = rows.lookups.inputs[len(rows.lookups.consts) + rows.num_consts :]
        return [(g.kind, g.index - rows.num_consts if g.kind == "input" else g.index) for g in given]

    def _noted(self, start: int) -> list[tuple[Event, list[Atom]]]:
        notes = []
        for event, count in zip(self._traced.events, self._traced.note_counts, strict=True):
            notes.append((event, list(self.program.outputs[start : start + count])))
            start += count
        return notes

    def _known_avals(self) -> dict[int, _Aval]:
        avals = dict(zip(self.program.inputs, self.program.input_avals, strict=True))
        for operation in self.program.operations:
            avals.update(zip(operation.results, operation.result_avals, strict=True))
        return {number: (tuple(aval.shape), aval.dtype) for number, aval in avals.items()}

    @property
    def variables(self) -> list[Any]:
        """The variables that the function uses, including tables of which it reads rows."""
        met = (entry.binding.variable for entry in self._traced.variant.entries)
        return [variable for variable in met if not isinstance(variable, Element)]

    def aval_of(self, atom: Atom) -> _Aval:
        """Returns the shape and dtype of a value of the program."""
        if isinstance(atom, int):
            return self._avals[atom]
        return tuple(atom.aval.shape), atom.aval.dtype

    def lookups_of(self, gradients: Sequence[Atom]) -> dict[int, int]:
        """Returns the number of the lookup for each gradient that has the rows of one."""
        rows = self._traced.rows
        if rows is None:
            return {}
        of_output = {self.program.outputs[n]: lookup for n, lookup in rows.lookups.gradients.items()}
        numbers = [of_output.get(atom) if isinstance(atom, int) else None for atom in gradients]
        return {i: number for i, number in enumerate(numbers) if number is not None}

    def num_rows_of(self, gradients: Sequence[Atom]) -> dict[int, int]:
        """Returns the number of rows for each gradient that has the rows of a lookup."""
        rows = self._traced.rows
        lookups = () if rows is None else rows.lookups.lookups
        return {i: lookups[number].num_ids for i, number in self.lookups_of(gradients).items()}

    def add_update(self, update: OptimizerUpdate, gradients: Sequence[Atom]) -> None:
        """Adds the worker's part of an optimizer's update, which the servers cannot compute."""
        self._updates.append((update, gradients))

    def output(self, atom: Atom, update: int | None = None) -> int:
        """Adds a result of the worker: a value of the function, or of an update that was added. Returns its number."""
        where = 0 if update is None else update + 1
        key = where, atom if isinstance(atom, int) else id(atom)
        self._outputs.setdefault(key, (where, atom))
        return len(self._results) + list(self._outputs).index(key)

    # --- building -------------------------------------------------------------------------------------

    def build(
        self, name: str, platforms: Sequence[str], pushes: tuple[Push, ...], places: Places
    ) -> WorkerProgram:
        """Returns the program, with all results that have been added."""
        wanted = self._wanted()
        operations = self.program.slice(wanted)
        check_callbacks(self.program.operations, operations, name)
        used = numbers_in(operations, wanted)
        arrays: list[ServerArray] = []
        lookups = self._placed_lookups(arrays, name, platforms)
        small, inputs = self._inputs(used, arrays, lookups)
        computation = self._computation(operations, list(inputs), small)
        blob = export(computation, self._operands(inputs), platforms, name)
        return WorkerProgram(
            name,
            blob,
            tuple(inputs.values()),
            tuple(places[array].shards for array in arrays),
            len(self._results),
            pushes,
            tuple(lookups),
            tuple(self._traced.elements.counts),
            self._traced.num_replicas,
        )

    def _operands(self, numbers: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes. With several replicas they also have the sharding over their devices."""
        whole, row = self._shardings

        def sharding(number: int) -> Any:
            is_cut = getattr(self._variables.get(number), "is_cut", False)
            return row if is_cut else whole

        return [jax.ShapeDtypeStruct(*self._avals[number], sharding=sharding(number)) for number in numbers]

    @property
    def _shardings(self) -> tuple[Any, Any]:
        """Returns the shardings of replicated operands, and of operands of which each device has rows."""
        topology = Topology.elsewhere(self._traced.num_replicas)
        return (topology.replicated, topology.per_replica) if topology.num_replicas > 1 else (None, None)

    def _wanted(self) -> list[Atom]:
        wanted = [*self._results, *(atom for where, atom in self._outputs.values() if where == 0)]
        for update, gradients in self._updates:
            if update.cuts:
                wanted += [*gradients, *self._state_for_cuts(update).values()]
        return wanted

    def _inputs(
        self, used: set[int], arrays: list[ServerArray], lookups: Sequence[Lookup]
    ) -> tuple[dict[int, Any], dict[int, Input]]:
        """Returns the constants that are part of the program, and the kinds of the other inputs among the numbers
        ``used``.
        """
        small: dict[int, Any] = {}
        inputs: dict[int, Input] = {}
        for number, value in self._consts.items():
            if number not in used:
                continue
            if is_key(value):
                small[number] = value
                continue
            array = np.asarray(value)
            if array.nbytes <= SMALL_BYTES:
                small[number] = array
            else:
                inputs[number] = self._constant(array)
        for number, variable in self._variables.items():
            if number in used:
                inputs[number] = self._of_variable(variable, arrays)
        for number, position in self._arguments.items():
            if number in used:
                inputs[number] = Input("argument", position)
        for number, (kind, index) in self._of_lookups.items():
            if number in used:
                inputs[number] = Input(kind, lookups[index].variable, index)
        return small, inputs

    def _constant(self, value: Any) -> Input:
        array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
        name = name_of(array)
        self.constants[name] = array
        return Input("constant", name=name)

    def _of_variable(self, variable: Any, arrays: list[ServerArray]) -> Input:
        if isinstance(variable, Element):
            number = self._traced.elements.sources.index(variable.source)
            return Input("element", number, variable.call, variable.leaf)
        return Input("variable", _number_of(self._array_of(variable), arrays))

    def _placed_lookups(self, arrays: list[ServerArray], name: str, platforms: Sequence[str]) -> list[Lookup]:
        """Returns the lookups for the worker's program. Adds the variables and constants that they need."""
        rows, variant = self._traced.rows, self._traced.variant
        if rows is None:
            return []
        traced_consts = variant.consts[len(variant.consts) - rows.num_consts :]

        def taken(given: Given) -> Input:
            index = given.index - rows.num_consts
            if given.kind == "constant":
                return self._constant(rows.lookups.consts[given.index])
            if index < 0:
                return self._constant(traced_consts[given.index])
            if index >= len(variant.entries):
                return Input("argument", index - len(variant.entries))
            return self._of_variable(variant.entries[index].binding.variable, arrays)

        placed = []
        for number, lookup in enumerate(rows.lookups.lookups):
            table = self._array_of(variant.entries[lookup.table - rows.num_consts].binding.variable)
            whole, _ = self._shardings
            program = FlatProgram.unresolved(lookup.jaxpr)
            ids, avals = taking_data(_evaluating(program), program.input_avals)
            avals = [aval.update(sharding=whole) for aval in avals]
            blob = export(ids, avals, platforms, f"ids_{number}_of_{name}")
            inputs = tuple(taken(given) for given in lookup.inputs)
            placed.append(Lookup(_number_of(table, arrays), blob, inputs, lookup.num_ids, table.shape[0]))
        return placed

    def _state_for_cuts(self, update: OptimizerUpdate) -> dict[int, int]:
        """Returns the state that the worker needs: its number in the function, by its number in the update."""
        of_variable = {id(variable): number for number, variable in self._variables.items()}
        state = update.call.state
        return {update.traced.state[n].old: of_variable[id(state[n])] for n in update.needed_state}

    def _computation(
        self, operations: Sequence[Operation], numbers: Sequence[int], small: dict[int, Any]
    ) -> Callable[..., list[Any]]:
        results, outputs = list(self._results), list(self._outputs.values())
        updates = [(update, of, self._state_for_cuts(update)) for update, of in self._updates]

        def compute(*args: Any) -> list[Any]:
            values = NumberedValues(small | dict(zip(numbers, args, strict=True))).run(operations)
            computed = [values]
            for update, gradients, state in updates:
                computed.append(
                    _of_update(update, values.of(gradients) if update.cuts else (), state, values)
                )
            pushed = [computed[where].of([atom])[0] for where, atom in outputs]
            return [*values.of(results), *pushed]

        return compute


def _of_update(
    update: OptimizerUpdate, gradients: Sequence[Any], state: Mapping[int, int], values: NumberedValues
) -> NumberedValues:
    """Computes the worker's part of an update, from the values of the function."""
    traced = update.traced
    inner = NumberedValues(traced.consts)
    inner.update(zip(traced.gradients, gradients))
    inner.update((number, values[there]) for number, there in state.items())
    return inner.run(traced.program.slice(update.cuts))


def check_callbacks(every: Sequence[Operation], needed: Sequence[Operation], name: str) -> None:
    """Warns of Python callbacks that are left out, and refuses those whose results are needed: workers lack that
    code.
    """
    for operation in needed:
        found = [operation.name, *operation.inner_names]
        calls = [primitive for primitive in found if "callback" in primitive or primitive == "debug_print"]
        if calls:
            raise UnsupportedError(
                f"{name} calls back into Python ({calls[0]} at {operation.line}), but it runs on workers, which do "
                "not have your code. Compute it with JAX, or before the function is scheduled. Code that must run in "
                "Python on each worker belongs into the function of create_per_worker_dataset."
            )
    for operation in every:
        if operation.name in _PRINTS:
            _say_it_does_not_print(name, operation.line)


@functools.lru_cache(maxsize=256)
def _say_it_does_not_print(name: str, line: str) -> None:
    log.warning(
        "%s prints at %s, which is left out because it runs on workers. Return the value and print it here.",
        name,
        line,
    )


def _number_of(array: ServerArray, arrays: list[ServerArray]) -> int:
    if array not in arrays:
        arrays.append(array)
    return arrays.index(array)


def _evaluating(program: FlatProgram) -> Callable[..., list[Any]]:
    return lambda *args: program.evaluate(args)


def name_of(array: np.ndarray) -> str:
    """Returns the name of an array that is sent once: a hash of it."""
    said = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    said.update(np.ascontiguousarray(array).view(np.uint8).data)
    return said.hexdigest()
