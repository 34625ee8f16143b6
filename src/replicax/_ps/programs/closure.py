"""A function for workers, as the program of a worker and the update programs of the parameter servers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import numpy as np

from replicax._ps.placement.placement_plan import PlacementNeeds, PlacementPlan, Places
from replicax._ps.placement.placing_rules import check_may_be_whole, servers_of
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.assignments import assignment_program
from replicax._ps.programs.iterator_inputs import Elements, Offer, has_parts, joined_parts
from replicax._ps.programs.optimizers import OptimizerUpdate
from replicax._ps.programs.programs import (
    NamedRows,
    Operand,
    Push,
    Shard,
    UpdateProgram,
    WorkerProgram,
)
from replicax._ps.programs.server_updates import UpdateBuilder
from replicax._ps.programs.tracing import TracedFunction, trace_function
from replicax._ps.programs.variable_changes import Applied, Assigned
from replicax._ps.programs.worker_side import WorkerBuilder
from replicax._src.program_kit.captures import Binding
from replicax._src.program_kit.errors import UnsupportedError, VariableError
from replicax._src.program_kit.traced_programs import Atom, Output

log = logging.getLogger("replicax")
_KEPT_WHOLE = (
    "%s computes rows of a variable from its other rows. Each of these stays on one server, unsharded: %s."
)


class Servers(Protocol):
    """What programs must know of the parameter servers: ``_ps/client/session.py``."""

    @property
    def num_ps(self) -> int: ...

    @property
    def platforms(self) -> Sequence[str]:
        """The platforms of the parameter servers."""
        ...


@dataclass(frozen=True, eq=False)
class RemoteClosure:
    """A function, traced for arguments and elements of certain shapes, ready to be sent.

    Attributes:
      export: Makes the worker's program for some platforms.
      updates: The programs of the parameter servers.
      constants: The arrays that the function closes over, by name; known once it was exported.
      tree, outputs: The structure of the function's result, and its leaves.
      elements: The elements that it takes of iterators.
      places: The values on the servers that it reads or changes, and the places that its programs are made for.
      num_replicas: The number of replicas of a worker, if it runs anything on all of them.
      round_key: A key that is equal for closures whose gradients are averaged; None if it has no such gradients.
    """

    export: Callable[[Sequence[str]], WorkerProgram]
    updates: Sequence[tuple[int, UpdateProgram]]
    constants: Mapping[str, np.ndarray]
    tree: Any
    outputs: Sequence[Output]
    elements: Elements
    places: Places
    num_replicas: int
    round_key: str | None = None

    @property
    def returns(self) -> tuple[Any, Sequence[Any]]:
        """The structure of the function's result, and the values in it that are not arrays."""
        return self.tree, [None if output.is_array else output.value for output in self.outputs]

    def assemble(self, arrays: Sequence[Any]) -> Any:
        """Makes the function's result from the results of the worker."""
        remaining = iter(arrays)
        leaves = [next(remaining) if output.is_array else output.value for output in self.outputs]
        pytree = jax.tree_util.tree_unflatten(self.tree, leaves)
        return joined_parts(pytree) if self._has_parts else pytree

    @functools.cached_property
    def _has_parts(self) -> bool:
        return has_parts(self.tree)


@final
class TracedClosure:
    """A function, traced for workers. Its programs are made once it is known where its values will be.

    Attributes:
      needs: Where it needs its values.
    """

    def __init__(
        self,
        traced: TracedFunction,
        name: str,
        servers: Servers,
        binding_of: Callable[[Any], Binding],
        num_averaged: int | None = None,
    ):
        self._traced, self._name = traced, name
        self._arrays = Arrays(binding_of)
        self._worker = WorkerBuilder(traced, self._arrays.of)
        self._server_side = _ServerSide(self._worker, self._arrays, servers, num_averaged)
        self.needs = self._server_side.needs()

    def closure(self, plan: PlacementPlan) -> RemoteClosure:
        """Makes the programs for the places in a plan. Another plan may need other programs."""
        places = plan.places_of(self.needs.used)
        programs = self._server_side.programs(self._name, places)
        pushes = tuple(
            Push(
                builder.ps,
                program.digest,
                tuple(Operand(*operand) for operand in builder.operands),
                builder.is_averaged,
            )
            for builder, program in programs
        )
        traced, worker, name = self._traced, self._worker, self._name

        def export(platforms: Sequence[str]) -> WorkerProgram:
            return worker.build(name, platforms, pushes, places)

        return RemoteClosure(
            export,
            [(builder.ps, program) for builder, program in programs],
            worker.constants,
            traced.tree,
            traced.variant.outputs[: traced.num_outputs],
            traced.elements,
            places,
            traced.num_replicas,
            self._server_side.round_key(programs, places),
        )


def trace_closure(
    call: Callable[[list[Any], Elements], Any],
    avals: Sequence[Any],
    name: str,
    servers: Servers,
    binding_of: Callable[[Any], Binding],
    offer: Offer | None = None,
    num_averaged: int | None = None,
    num_replicas: int = 1,
) -> TracedClosure:
    """Traces a function for workers. It sends nothing: the session places the values that the function needs.

    Args:
      call: Calls the function with tracers of ``avals``, and the source of its iterators' elements.
      avals: The shapes and dtypes of its arguments.
      name: The name of the function, for messages.
      servers: The number of the servers, and their platforms.
      binding_of: Returns the binding of a variable.
      offer: The elements that it takes, see ``Elements``.
      num_averaged: The number of closures whose gradients are averaged for one update; None for no averaging.
      num_replicas: The number of replicas of a worker.

    Raises:
      VariableError: It uses a variable that is not on the parameter servers.
    """
    traced = trace_function(call, avals, binding_of, offer, num_replicas)
    return TracedClosure(traced, name, servers, binding_of, num_averaged)


@final
class Arrays:
    """The arrays on the servers of the variables that a function uses."""

    def __init__(self, binding_of: Callable[[Any], Binding]):
        self._binding_of = binding_of
        self._arrays: dict[int, ServerArray] = {}  # by id of the variable

    @property
    def all(self) -> list[ServerArray]:
        return list(self._arrays.values())

    def of(self, variable: Any) -> ServerArray:
        """Returns the array of a variable.

        Raises:
          VariableError: The variable is not on the servers.
        """
        array = self._arrays.get(id(variable))
        if array is None:
            array = self._arrays[id(variable)] = _array_of(variable, self._binding_of(variable))
        return array


def _array_of(variable: Any, binding: Binding) -> ServerArray:
    value = binding.value
    if not isinstance(value, ServerArray):
        raise VariableError(
            f"Variable {binding.name!r} is used in a function for workers, but was made outside of the scope of "
            "ParameterServerStrategy, so it is in this process only. Make variables, models, optimizers and "
            "metrics inside `with strategy.scope():`."
        )
    return value


@final
class _ServerSide:
    """The servers' side of a closure. It tells the worker's side which operands the servers need."""

    def __init__(
        self, worker: WorkerBuilder, arrays: Arrays, servers: Servers, num_averaged: int | None = None
    ):
        self._worker, self._arrays, self._servers = worker, arrays, servers
        self._num_averaged = num_averaged
        self._updates = self._found_updates()
        if num_averaged is not None:
            self._check_order()

    def _found_updates(self) -> list[OptimizerUpdate]:
        worker, updates = self._worker, []
        for variable in worker.variables:
            self._arrays.of(variable)
        changed: set[int] = set()  # ids of variables that have changed since the worker read them
        for event, atoms in worker.notes:
            if isinstance(event, Applied):
                update = OptimizerUpdate(
                    event, self._arrays.of, worker.num_rows_of(atoms), self._num_averaged
                )
                _check_state_is_as_read(update, changed)
                changed |= {id(variable) for variable in event.call.state}
                updates.append(update)
                worker.add_update(update, atoms)
            else:
                self._arrays.of(event.binding.variable)
                changed.add(id(event.binding.variable))
        return updates

    def needs(self) -> PlacementNeeds:
        """Returns where the function needs its values: the shards of a variable and of its optimizer slots on the same
        servers, and a copy of shared state on each server that updates with it. Warns of variables that must not be
        sharded.
        """
        kept: dict[ServerArray, None] = {}
        for update in self._updates:
            whole = [array for array in update.kept_whole if array.row_ranges and array not in kept]
            for array in whole:
                check_may_be_whole(array)
            kept.update(dict.fromkeys(whole))
            if whole:
                names = ", ".join(repr(array.name) for array in whole)
                log.warning(_KEPT_WHOLE, update.call.name, names)
        return PlacementNeeds(
            self._arrays.all,
            list(kept),
            [pair for update in self._updates for pair in update.slots],
            [(a, self._near(update)) for update in self._updates for a in update.shared],
        )

    def programs(self, name: str, places: Places) -> list[tuple[UpdateBuilder, UpdateProgram]]:
        """Returns the programs of the servers that have something to do, with their builders.

        Immediate changes and changes by averaged gradients are two programs of a server.
        """
        every = range(self._servers.num_ps)
        builders = {ps: UpdateBuilder(ps) for ps in every}
        of_updates = builders
        if self._num_averaged is not None:
            of_updates = {ps: UpdateBuilder(ps, is_averaged=True) for ps in every}
        updates = iter(enumerate(self._updates))
        for event, atoms in self._worker.notes:
            if isinstance(event, Assigned):
                self._add_assignment(builders, places, event, atoms[0])
            else:
                self._add_update(of_updates, places, *next(updates), atoms)
        return [
            (builder, builder.build(self._servers.platforms, name))
            for builder in dict.fromkeys([*builders.values(), *of_updates.values()])
            if not builder.is_empty
        ]

    def round_key(
        self, programs: Sequence[tuple[UpdateBuilder, UpdateProgram]], places: Places
    ) -> str | None:
        """Returns a key that is equal if the same optimizers update the same variables, with operands of the same
        kinds.
        """
        averaged = [(builder.ps, program.averaged) for builder, program in programs if builder.is_averaged]
        if not averaged:
            return None
        names = [[places[array].shards[0].key for array in update.arrays] for update in self._updates]
        return repr((averaged, names))

    def _check_order(self) -> None:
        """Checks the order, because assignments are applied at once and averaged gradients later.

        Raises:
          UnsupportedError: The function assigns a variable after an optimizer has updated it.
        """
        updated: set[ServerArray] = set()
        updates = iter(self._updates)
        for event, _ in self._worker.notes:
            if isinstance(event, Applied):
                updated.update(next(updates).arrays)
            elif (array := self._arrays.of(event.binding.variable)) in updated:
                raise UnsupportedError(
                    f"Variable {array.name!r} is assigned at {event.line}, after an optimizer in the same "
                    "function. With replicas_to_aggregate, assignments are applied at once, but gradients "
                    "only when those of other functions have arrived. Assign in another scheduled function, "
                    "or use a constraint of the variable."
                )

    def _near(self, update: OptimizerUpdate) -> Sequence[ServerArray] | None:
        """Returns the arrays whose servers take part in an update; None for all servers, if it changes shared state
        that each server keeps.
        """
        return None if update.changes_shared else update.variables

    def _add_assignment(
        self, builders: Mapping[int, UpdateBuilder], places: Places, event: Assigned, value: Atom
    ) -> None:
        array = self._arrays.of(event.binding.variable)
        place = places[array]
        program = assignment_program(event, value, self._worker.program)
        avals = [self._worker.aval_of(atom) for atom in program.operands]
        copies = [Shard(ps, key) for ps, key in place.copies.items()]
        for shard in [*place.shards, *copies]:
            builder = builders[shard.ps]
            positions = []
            for atom, has_rows, (shape, dtype) in zip(
                program.operands, program.have_rows, avals, strict=True
            ):
                is_cut = shard.rows is not None and has_rows and shape[:1] == array.shape[:1]
                rows = shard.rows if is_cut and len(shape) == len(array.shape) else None
                shape_there = shape if rows is None else (rows[1] - rows[0], *shape[1:])
                positions.append(builder.take((self._worker.output(atom), rows), (shape_there, dtype)))
            start = shard.rows[0] if shard.rows else 0
            named = None
            if program.rows is not None:
                named = [NamedRows(positions[at], start, are_indices=True) for at in program.rows]
            key = builder.use(array, shard, is_written=True, rows=named)
            builder.add(_assign(key, positions, program.apply, start))

    def _add_update(
        self,
        builders: Mapping[int, UpdateBuilder],
        places: Places,
        number: int,
        update: OptimizerUpdate,
        gradients: Sequence[Atom],
    ) -> None:
        of_lookups = self._worker.lookups_of(gradients)

        def take_gradient(i: int, shard: Shard) -> Any:
            other = update.replaced_gradient(i)
            result = (
                self._worker.output(gradients[i]) if other is None else self._worker.output(other, number)
            )
            return result, shard.rows, of_lookups.get(i)

        def take_scalar(atom: Atom) -> Any:
            return self._worker.output(atom, number), None

        near = self._near(update)
        for ps in range(self._servers.num_ps) if near is None else servers_of(near, places):
            update.add_to(builders[ps], places, take_gradient, take_scalar)


def _check_state_is_as_read(update: OptimizerUpdate, changed: Collection[int]) -> None:
    """Checks that the optimizer state that workers need has not changed in the same closure.

    Raises:
      UnsupportedError: Workers need state that has changed, for values that no server can compute alone.
    """
    for n in update.needed_state:
        variable = update.call.state[n]
        if id(variable) in changed:
            raise UnsupportedError(
                f"{update.call.name} is applied at {update.line}. The workers need {variable.path!r} for it, "
                "which the same function has changed before. Apply it once in a scheduled function, and "
                "assign its variables in another one."
            )


def _assign(
    key: str, positions: Sequence[int], apply: Callable[[Any, Sequence[Any], int], Any], start: int
) -> Callable[[dict[str, Any], Sequence[Any]], None]:
    def step(values: dict[str, Any], operands: Sequence[Any]) -> None:
        old = values[key]
        new = apply(old, [operands[position] for position in positions], start)
        values[key] = jax.lax.convert_element_type(jax.numpy.broadcast_to(new, old.shape), old.dtype)

    return step
