"""A scheduled function, traced, as what a worker computes and what each parameter server does with the results."""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import jax_compat
from replicax._src.errors import TraceError, VariableError
from replicax._src.placement.remote.assignments import assignment_program
from replicax._src.placement.remote.events import Applied, Assigned, Event, Events
from replicax._src.placement.remote.optimizers import OptimizerUpdate
from replicax._src.placement.remote.updates import UpdateBuilder
from replicax._src.program import flat
from replicax._src.program.capture import Entry, current_capture
from replicax._src.program.flat import Atom, FlatProgram
from replicax._src.program.lookups import Given, Lookups, find_lookups, is_looked_up
from replicax._src.program.program import Output, Variant, check_no_leaks, trace_variant
from replicax._src.program.slots import Sharing, Slot
from replicax._src.program.verdict import Verdict
from replicax._src.ps.arrays import ServerArray
from replicax._src.ps.programs import (
    Input,
    Lookup,
    Operand,
    Piece,
    Push,
    UpdateProgram,
    WorkerProgram,
    signature_of,
)
from replicax._src.user_code import user_line
from replicax._src.values import is_variable

log = logging.getLogger("replicax")
_SMALL_BYTES = 64 << 10  # a constant of more travels once, by itself


class Servers(Protocol):
    """Where the variables are: ``ps/session.py``."""

    @property
    def num_ps(self) -> int: ...

    @property
    def platforms(self) -> Sequence[str]:
        """Of the workers and the parameter servers."""
        ...

    def make(self, arrays: Sequence[ServerArray]) -> None:
        """Puts arrays that are not there yet on the servers."""

    def put_beside(self, array: ServerArray, other: ServerArray) -> None:
        """Sees to it that an array has its pieces where another has them."""

    def copy_to(self, array: ServerArray, ps: int) -> None:
        """Sees to it that a server has a copy of an array."""


@dataclass(frozen=True)
class ElementSpec:
    """What an iterator gives: the structure, and shape and dtype of each leaf."""

    tree: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def nest(self) -> Any:
        """Both together."""
        return jax.tree_util.tree_unflatten(self.tree, self.leaves)


class PerWorkerInput(abc.ABC):
    """What each worker has its own of, and a scheduled function takes: an iterator, or a value."""

    @property
    @abc.abstractmethod
    def resource(self) -> str:
        """The name under which the workers know it."""

    @property
    @abc.abstractmethod
    def spec(self) -> ElementSpec:
        """What it gives, as far as is known before it does; may wait for a worker to say."""

    @property
    @abc.abstractmethod
    def is_iterator(self) -> bool:
        """Whether each ``next`` gives another element; a value is always the same one."""

    @property
    def described(self) -> Hashable:
        """What a trace depends on."""
        spec = self.spec
        return self.is_iterator, spec.tree, spec.leaves


@dataclass(frozen=True, eq=False)
class Element:
    """One leaf of one element of an iterator: an input, which a trace meets as if it were a variable."""

    source: PerWorkerInput
    call: int
    leaf: int


@final
class Elements:
    """The elements that a function takes while it is traced.

    Args:
      shapes: Of the elements' leaves, where they are others than the iterators say: by (number of the iterator, call).
    """

    def __init__(self, shapes: Mapping[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] | None = None):
        self._shapes = shapes or {}
        self.sources: list[PerWorkerInput] = []
        self.counts: list[int] = []
        self.taken: dict[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] = {}
        self._slots: dict[int, Slot] = {}

    def take(self, source: PerWorkerInput) -> Any:
        """The next element, in the function that is being traced.

        Raises:
          TraceError: In a scan, condition or other inner trace, which is traced once for all its turns.
        """
        capture = current_capture()
        assert capture is not None
        if capture.is_in_inner_trace():
            raise TraceError(
                f"next(iterator) at {user_line()} is called inside a function that JAX traces on its own (a scan, loop, "
                "condition, jax.grad, jax.vmap or jax.jit): it would be one element for all turns. Call it outside and pass "
                "the element in, or use a Python loop."
            )
        if source not in self.sources:
            self.sources.append(source)
            self.counts.append(0)
        number = self.sources.index(source)
        call = self.counts[number] if source.is_iterator else 0
        self.counts[number] = call + 1
        spec = source.spec
        leaves = self._shapes.get((number, call), spec.leaves)
        self.taken[number, call] = leaves
        values = []
        for position, leaf in enumerate(leaves):
            element = Element(source, call, position)
            name = f"element {position} of iterator {number}"
            self._slots[id(element)] = Slot(
                element, _NO_ACCESSOR, name, leaf.shape, leaf.dtype, Sharing.MIRRORED
            )
            values.append(capture.read(element))
        return jax.tree_util.tree_unflatten(spec.tree, values)

    def slot_of(self, element: Element) -> Slot:
        return self._slots[id(element)]

    @property
    def signature(self) -> str:
        """Of all that is taken."""
        return signature_of([(x.shape, x.dtype) for key in sorted(self.taken) for x in self.taken[key]])


_NO_ACCESSOR: Any = None
_local = threading.local()


@contextlib.contextmanager
def taking_from(elements: Elements) -> Iterator[None]:
    """Inside, while a function for workers is traced, ``next`` of an iterator is an input of it."""
    _local.elements = elements
    try:
        yield
    finally:
        _local.elements = None


def current_elements() -> Elements | None:
    """What takes elements in the function for workers that is being traced in this thread."""
    return getattr(_local, "elements", None)


@dataclass(frozen=True)
class RemoteClosure:
    """A function, traced for arguments and elements of certain shapes, ready to be sent.

    Attributes:
      updates: The programs of the parameter servers.
      constants: Arrays that the function closes over, by name.
      tree, outputs: The structure of what it returns, and its leaves.
      elements: What it takes of iterators.
      arrays: The values on the servers that it reads or changes.
    """

    program: WorkerProgram
    updates: Mapping[int, UpdateProgram]
    constants: Mapping[str, np.ndarray]
    tree: Any
    outputs: Sequence[Output]
    elements: Elements
    arrays: Sequence[ServerArray]

    def assemble(self, arrays: Sequence[Any]) -> Any:
        """What the function returned, of the results of the worker."""
        remaining = iter(arrays)
        leaves = [next(remaining) if output.is_array else output.value for output in self.outputs]
        return jax.tree_util.tree_unflatten(self.tree, leaves)


@dataclass(frozen=True)
class _Rows:
    """What a function takes of tables.

    Attributes:
      num_consts: Of the function before its tables were replaced.
    """

    lookups: Lookups
    num_consts: int


@dataclass
class _Traced:
    variant: Variant
    elements: Elements
    events: list[Event]
    note_counts: list[int]
    tree: Any
    num_outputs: int
    rows: _Rows | None = None


def place_closure(
    call: Callable[[list[Any], Elements], Any],
    avals: Sequence[Any],
    name: str,
    servers: Servers,
    slot_of: Callable[[Any], Slot],
    shapes: Mapping[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] | None = None,
) -> RemoteClosure:
    """Traces a function for workers.

    Args:
      call: Calls it with tracers of ``avals``, and what its iterators take elements from.
      name: Of the function, for people.
      shapes: Of the elements, see ``Elements``.

    Raises:
      VariableError: It uses a variable that is not on the parameter servers.
    """
    traced = _trace(call, avals, slot_of, shapes)
    return _Assembly(traced, servers, name, slot_of).closure()


def _trace(
    call: Callable[[list[Any], Elements], Any],
    avals: Sequence[Any],
    slot_of: Callable[[Any], Slot],
    shapes: Mapping[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] | None,
) -> _Traced:
    found: dict[str, Any] = {}

    def noting(tracers: list[Any]) -> Any:
        capture = current_capture()
        assert capture is not None
        observer = capture.observer = Events()
        elements = found["elements"] = Elements(shapes)
        result = call(tracers, elements)
        result = jax.tree_util.tree_map(
            lambda leaf: leaf.value if is_variable(leaf) else leaf, result, is_leaf=is_variable
        )
        found["events"] = [event for event, _ in observer.noted]
        found["note_counts"] = [len(values) for _, values in observer.noted]
        leaves, found["tree"] = jax.tree_util.tree_flatten(result)
        found["num_outputs"] = len(leaves)
        return [*leaves, *(value for _, values in observer.noted for value in values)]

    def by_rows(
        jaxpr: Any, num_consts: int, entries: Sequence[Entry], num_arrays: int, axis_env: Any
    ) -> tuple[Any, list[Any]]:
        found["rows"] = None
        tables = [num_consts + n for n, entry in enumerate(entries) if _is_table(entry.slot)]
        if not tables:
            return jaxpr, []
        jaxpr = _without_updates(jaxpr, num_arrays)
        ends = np.cumsum([num_arrays - sum(found["note_counts"]), *found["note_counts"]])
        of_optimizers = {
            n
            for event, start, end in zip(found["events"], ends[:-1], ends[1:], strict=True)
            for n in range(start, end)
            if isinstance(event, Applied)
        }
        lookups = find_lookups(jaxpr, tables, axis_env)
        kept = {table for n, table in lookups.gradients.items() if n not in of_optimizers}
        if kept:  # the function returns, or assigns, a gradient
            kept_tables = {lookups.lookups[number].table for number in kept}
            lookups = find_lookups(jaxpr, [t for t in tables if t not in kept_tables], axis_env)
        for whole in lookups.whole:
            if is_looked_up(jaxpr, jaxpr.invars[whole.table]):
                _say_it_is_needed_whole(entries[whole.table - num_consts].slot.name, str(whole))
        if not lookups.lookups:
            return jaxpr, []
        found["rows"] = _Rows(lookups, num_consts)
        return lookups.jaxpr, list(lookups.consts)

    def slot(variable: Any) -> Slot:
        return found["elements"].slot_of(variable) if isinstance(variable, Element) else slot_of(variable)

    variant = trace_variant(
        noting,
        avals,
        [Verdict.SAME] * len(avals),
        slot_of=slot,
        num_replicas=None,
        sum_gradients=lambda capture: list,
        rewrite=by_rows,
    )
    check_no_leaks(variant)
    return _Traced(variant, **found)


def _without_updates(jaxpr: Any, num_arrays: int) -> Any:
    """A trace without what only the new values of variables need: the servers compute them. Its marks stay."""
    outvars = jaxpr.outvars[:num_arrays]
    needed = {atom for atom in outvars if not isinstance(atom, jax_compat.Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not eqn.outvars or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, jax_compat.Literal))
    return jax_compat.rebuild(jaxpr, outvars=outvars, eqns=kept[::-1])


def _is_table(slot: Slot) -> bool:
    if isinstance(slot.variable, Element) or not jnp.issubdtype(slot.dtype, jnp.inexact):
        return False
    (value,) = slot.accessor.get([slot.variable])
    return isinstance(value, ServerArray) and value.is_table


@functools.lru_cache(maxsize=256)
def _say_it_is_needed_whole(name: str, why: str) -> None:
    log.warning(
        "Table %r is sent to the workers whole, for more is done with it than rows looked up: %s.", name, why
    )


def array_of(variable: Any, slot: Slot) -> ServerArray:
    """The array on the servers that is a variable's value.

    Raises:
      VariableError: It is not there.
    """
    (value,) = slot.accessor.get([variable])
    if not isinstance(value, ServerArray):
        raise VariableError(
            f"Variable {slot.name!r} is used in a function for workers, and it was made outside of the scope of "
            "ParameterServerStrategy: it is in this process only. Make variables, models, optimizers and metrics inside "
            "`with strategy.scope():`."
        )
    return value


@final
class _Assembly:
    """Puts the programs of one closure together."""

    def __init__(self, traced: _Traced, servers: Servers, name: str, slot_of: Callable[[Any], Slot]):
        self._traced, self._servers, self._name, self._slot_of = traced, servers, name, slot_of
        variant = traced.variant
        self._main = FlatProgram(variant.jaxpr)
        num_consts, num_entries = len(variant.consts), len(variant.entries)
        inputs = self._main.inputs
        self._consts = dict(zip(inputs[:num_consts], variant.consts, strict=True))
        self._entries: dict[int, Entry] = {}
        self._arguments: dict[int, int] = {}
        self._of_lookups: dict[int, tuple[Any, int]] = {}
        self._rows = traced.rows
        for number, (kind, index) in zip(inputs[num_consts:], self._kinds(num_entries), strict=True):
            if kind == "input" and index < num_entries:
                self._entries[number] = variant.entries[index]
            elif kind == "input":
                self._arguments[number] = index - num_entries
            else:
                self._of_lookups[number] = (kind, index)
        self._arrays: dict[int, ServerArray] = {}  # by id of the variable
        self._results = list(self._main.outputs[: self._num_array_results()])
        self._outputs: dict[tuple[int, int], tuple[int, Atom]] = {}
        self._updates: list[OptimizerUpdate] = []
        self._gradients: list[Sequence[Atom]] = []

    def _kinds(self, num_entries: int) -> list[tuple[Any, int]]:
        """What each input after the constants is: a variable or an argument of the function, or of a lookup."""
        variant, rows = self._traced.variant, self._rows
        if rows is None:
            return [("input", index) for index in range(len(variant.jaxpr.invars) - len(variant.consts))]
        given = rows.lookups.inputs[len(rows.lookups.consts) + rows.num_consts :]
        return [(g.kind, g.index - rows.num_consts if g.kind == "input" else g.index) for g in given]

    def _num_array_results(self) -> int:
        return sum(output.is_array for output in self._traced.variant.outputs[: self._traced.num_outputs])

    def closure(self) -> RemoteClosure:
        """The whole of it."""
        notes = self._notes()
        for entry in self._entries.values():
            if not isinstance(entry.slot.variable, Element):
                self._array(entry.slot.variable)
        for event, atoms in notes:
            if isinstance(event, Applied):
                self._updates.append(OptimizerUpdate(event, self._array, self._num_rows_of(atoms)))
                self._gradients.append(atoms)
        self._place()
        builders = {ps: UpdateBuilder(ps) for ps in range(self._servers.num_ps)}
        updates = iter(enumerate(self._updates, 1))
        for event, atoms in notes:
            if isinstance(event, Assigned):
                self._add_assignment(builders, event, atoms[0])
            else:
                self._add_update(builders, *next(updates))
        programs = {
            ps: builder.build(self._servers.platforms, self._name)
            for ps, builder in builders.items()
            if not builder.is_empty
        }
        return self._assembled(builders, programs)

    def _notes(self) -> list[tuple[Event, list[Atom]]]:
        traced = self._traced
        start = self._num_array_results()
        notes = []
        for event, count in zip(traced.events, traced.note_counts, strict=True):
            notes.append((event, list(self._main.outputs[start : start + count])))
            start += count
        return notes

    def _array(self, variable: Any) -> ServerArray:
        array = self._arrays.get(id(variable))
        if array is None:
            array = self._arrays[id(variable)] = array_of(variable, self._slot_of(variable))
        return array

    def _place(self) -> None:
        """Sees to it that everything is on the servers, and what belongs together on the same ones."""
        for update in self._updates:
            for slot, variable in update.slots:
                self._servers.put_beside(slot, variable)
        self._servers.make(list(self._arrays.values()))
        for update in self._updates:
            for array in update.shared:
                for ps in update.places():
                    self._servers.copy_to(array, ps)

    def _add_assignment(self, builders: Mapping[int, UpdateBuilder], event: Assigned, value: Atom) -> None:
        array = self._array(event.slot.variable)
        program = assignment_program(event, value, self._main)
        avals = [self._aval(atom) for atom in program.operands]
        copies = [Piece(ps, key) for ps, key in array.copies.items()]
        for piece in [*array.pieces, *copies]:
            builder = builders[piece.ps]
            positions = []
            for atom, has_rows, (shape, dtype) in zip(
                program.operands, program.have_rows, avals, strict=True
            ):
                is_cut = piece.rows is not None and has_rows and shape == array.shape
                rows = piece.rows if is_cut else None
                shape_there = array.shape_of(piece) if is_cut else shape
                positions.append(builder.take((self._output(0, atom), rows), (shape_there, dtype)))
            key = builder.use(array, piece, is_written=True)
            builder.add(_assign(key, positions, program.apply, piece.rows[0] if piece.rows else 0))

    def _add_update(
        self, builders: Mapping[int, UpdateBuilder], number: int, update: OptimizerUpdate
    ) -> None:
        gradients = self._gradients[number - 1]

        of_lookups = self._lookups_of(gradients)

        def take_gradient(i: int, piece: Piece) -> Any:
            return self._output(0, gradients[i]), piece.rows, of_lookups.get(i)

        def take_cut(atom: Atom, piece: Piece | None) -> Any:
            return self._output(number, atom), None

        for ps in update.places():
            update.add_to(builders[ps], take_gradient, take_cut)

    def _lookups_of(self, gradients: Sequence[Atom]) -> dict[int, int]:
        """For the gradients that have the rows of a lookup: the number of that."""
        if self._rows is None:
            return {}
        outputs = self._main.outputs
        of_output = {outputs[n]: lookup for n, lookup in self._rows.lookups.gradients.items()}
        return {i: of_output[atom] for i, atom in enumerate(gradients) if atom in of_output}

    def _num_rows_of(self, gradients: Sequence[Atom]) -> dict[int, int]:
        """For the same gradients: how many rows they have."""
        lookups = () if self._rows is None else self._rows.lookups.lookups
        return {i: lookups[number].num_ids for i, number in self._lookups_of(gradients).items()}

    def _output(self, program: int, atom: Atom) -> int:
        """The number of a result of the worker: a value of the function, or of an optimizer's update."""
        key = program, id(atom) if isinstance(atom, jax_compat.Literal) else atom
        self._outputs.setdefault(key, (program, atom))
        return len(self._results) + list(self._outputs).index(key)

    def _aval(self, atom: Atom) -> tuple[tuple[int, ...], Any]:
        if isinstance(atom, jax_compat.Literal):
            aval: Any = atom.aval
            return tuple(aval.shape), aval.dtype
        return self._avals[atom]

    @property
    def _avals(self) -> dict[int, tuple[tuple[int, ...], Any]]:
        known = getattr(self, "_known_avals", None)
        if known is None:
            invars = self._traced.variant.jaxpr.invars
            known = {n: (tuple(v.aval.shape), v.aval.dtype) for n, v in zip(self._main.inputs, invars)}
            for operation in self._main.operations:
                for number, var in zip(operation.results, operation.eqn.outvars, strict=True):
                    known[number] = tuple(var.aval.shape), var.aval.dtype
            self._known_avals = known
        return known

    # --- the worker's program -------------------------------------------------------------------------

    def _assembled(
        self, builders: Mapping[int, UpdateBuilder], programs: Mapping[int, UpdateProgram]
    ) -> RemoteClosure:
        wanted_of_main = self._wanted_of_main()
        operations = flat.needed_for(self._main.operations, wanted_of_main)
        used = flat.numbers_in(operations, wanted_of_main)
        constants: dict[str, np.ndarray] = {}
        small: dict[int, Any] = {}
        inputs: list[Input] = []
        numbers: list[int] = []
        arrays: list[ServerArray] = []

        def take(number: int, taken: Input) -> None:
            inputs.append(taken)
            numbers.append(number)

        for number, value in self._consts.items():
            if number not in used:
                continue
            array = np.asarray(value)
            if array.nbytes <= _SMALL_BYTES:
                small[number] = array
            else:
                name = _name_of(array)
                constants[name] = array
                take(number, Input("constant", name=name))
        for number, entry in self._entries.items():
            variable = entry.slot.variable
            if isinstance(variable, Element):
                if number in used:
                    index = self._traced.elements.sources.index(variable.source)
                    take(number, Input("element", index, variable.call, variable.leaf))
            elif number in used:
                take(number, Input("variable", len(arrays)))
                arrays.append(self._array(variable))
        for number, position in self._arguments.items():
            if number in used:
                take(number, Input("argument", position))
        lookups = self._placed_lookups(arrays, constants)
        for number, (kind, index) in self._of_lookups.items():
            if number in used:
                take(number, Input(kind, lookups[index].variable, index))
        avals = [jax.ShapeDtypeStruct(*self._avals[number]) for number in numbers]
        blob = jax_compat.export(
            self._worker(operations, numbers, small), avals, self._servers.platforms, self._name
        )
        program = WorkerProgram(
            self._name,
            blob,
            tuple(inputs),
            tuple(array.pieces for array in arrays),
            len(self._results),
            tuple(
                Push(ps, program.digest, tuple(Operand(*operand) for operand in builders[ps].operands))
                for ps, program in programs.items()
            ),
            tuple(lookups),
            tuple(self._traced.elements.counts),
        )
        traced = self._traced
        return RemoteClosure(
            program,
            programs,
            constants,
            traced.tree,
            traced.variant.outputs[: traced.num_outputs],
            traced.elements,
            list(self._arrays.values()),
        )

    def _placed_lookups(self, arrays: list[ServerArray], constants: dict[str, np.ndarray]) -> list[Lookup]:
        """The lookups as the worker makes them; adds the variables and constants that they need."""
        if self._rows is None:
            return []
        lookups, num_consts = self._rows.lookups, self._rows.num_consts
        entries = self._traced.variant.entries
        traced_consts = self._traced.variant.consts[-num_consts:] if num_consts else []

        def variable(array: ServerArray) -> int:
            if array not in arrays:
                arrays.append(array)
            return arrays.index(array)

        def taken(given: Given) -> Input:
            index = given.index - num_consts
            if given.kind == "constant" or index < 0:
                consts = lookups.consts if given.kind == "constant" else traced_consts
                array = np.asarray(consts[given.index])
                constants[_name_of(array)] = array
                return Input("constant", name=_name_of(array))
            if index >= len(entries):
                return Input("argument", index - len(entries))
            source = entries[index].slot.variable
            if isinstance(source, Element):
                number = self._traced.elements.sources.index(source.source)
                return Input("element", number, source.call, source.leaf)
            return Input("variable", variable(self._array(source)))

        placed = []
        for number, lookup in enumerate(lookups.lookups):
            table = self._array(entries[lookup.table - num_consts].slot.variable)
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in lookup.jaxpr.invars]
            blob = jax_compat.export(
                functools.partial(_evaluate_ids, lookup.jaxpr),
                avals,
                self._servers.platforms,
                f"ids_{number}_of_{self._name}",
            )
            inputs = tuple(taken(given) for given in lookup.inputs)
            placed.append(Lookup(variable(table), blob, inputs, lookup.num_ids, table.shape[0]))
        return placed

    def _wanted_of_main(self) -> list[Atom]:
        wanted = [*self._results, *(atom for program, atom in self._outputs.values() if program == 0)]
        for update, gradients in zip(self._updates, self._gradients, strict=True):
            if update.cuts:
                wanted += [*gradients, *self._state_for_cuts(update).values()]
        return wanted

    def _state_for_cuts(self, update: OptimizerUpdate) -> dict[int, int]:
        """For the state that the worker needs: its number in the update, and in the function."""
        of_variable = {id(entry.slot.variable): number for number, entry in self._entries.items()}
        call = update.call
        return {update.traced.state[n]: of_variable[id(call.state[n])] for n in update.needed_state}

    def _worker(self, operations: Any, numbers: Sequence[int], small: Mapping[int, Any]) -> Any:
        results, outputs = self._results, list(self._outputs.values())
        updates, gradients = self._updates, self._gradients
        states = [self._state_for_cuts(update) for update in updates]

        def compute(*args: Any) -> list[Any]:
            env = dict(small) | dict(zip(numbers, args, strict=True))
            flat.run(operations, env)
            envs = [env]
            for update, of_update, state in zip(updates, gradients, states, strict=True):
                traced = update.traced
                inner = dict(zip(traced.consts, traced.const_values, strict=True))
                if update.cuts:
                    inner.update((n, flat.read(env, a)) for n, a in zip(traced.gradients, of_update))
                    inner.update((n, env[m]) for n, m in state.items())
                    flat.run(flat.needed_for(traced.program.operations, update.cuts), inner)
                envs.append(inner)
            pushed = [flat.read(envs[program], atom) for program, atom in outputs]
            return [*(flat.read(env, atom) for atom in results), *pushed]

        return compute


def _evaluate_ids(jaxpr: Any, *args: Any) -> list[Any]:
    return jax_compat.eval_jaxpr(jaxpr, args)


def _assign(
    key: str, positions: Sequence[int], apply: Callable[[Any, Sequence[Any], int], Any], start: int
) -> Callable[[dict[str, Any], Sequence[Any]], None]:
    def step(values: dict[str, Any], operands: Sequence[Any]) -> None:
        old = values[key]
        new = apply(old, [operands[position] for position in positions], start)
        values[key] = jax.lax.convert_element_type(jax.numpy.broadcast_to(new, old.shape), old.dtype)

    return step


def _name_of(array: np.ndarray) -> str:
    said = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    said.update(np.ascontiguousarray(array).view(np.uint8).data)
    return said.hexdigest()
