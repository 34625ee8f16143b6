"""Runs an optimizer's ``apply`` on parameter servers: each updates its shards and their slots from the gradients.

``update_analysis.py`` decides which part of it a server computes. The update is traced for full variables, and once
more for shards. A server's program calls one function for each of its shards. Shards of the same shape, with the same
operations, share a function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import numpy as np

from replicax._ps.placement.placement_plan import Places
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.programs import NamedRows, Shard
from replicax._ps.programs.row_parallel import Mixing, rows_of, with_rows
from replicax._ps.programs.server_updates import UpdateBuilder, Values
from replicax._ps.programs.traced_update import TracedUpdate, Written, computable, slots_of
from replicax._ps.programs.update_analysis import Sent, Slice, find_mixed, find_sent
from replicax._ps.programs.variable_changes import Applied, Shapes
from replicax._src.program_kit.errors import UnsupportedError
from replicax._src.program_kit.traced_programs import Atom

TakeGradient = Callable[[int, Shard], Any]
"""Returns the operand of a server's program that is the gradient of a variable, or of its rows."""
TakeScalar = Callable[[Atom], Any]
"""Returns the operand of a server's program that is a value of the worker."""


@dataclass(frozen=True)
class _Held:
    """A shard that a server holds, with the change that the update makes to it."""

    array: ServerArray
    shard: Shard
    written: Written


@final
class OptimizerUpdate:
    """One call of an optimizer in a closure, distributed over the servers.

    Args:
      event: The call.
      array_of: Returns the array on the servers of a variable.
      num_rows: The number of rows of the gradient, for each variable of which only some rows are updated.
      num_averaged: The number of closures whose gradients are averaged for it; None for no averaging.

    Attributes:
      call: The call.
      line: The line of the user's code.
      traced: The update of full variables.
      shared: The arrays that each server has a copy of.
      kept_whole: The sharded variables that must not be sharded; the caller changes their placement.
    """

    def __init__(
        self,
        event: Applied,
        array_of: Callable[[Any], ServerArray],
        num_rows: Mapping[int, int],
        num_averaged: int | None = None,
    ):
        call = self.call = event.call
        self.line, self._num_rows = event.line, dict(num_rows)
        self._rows_at_server = {i: num * (num_averaged or 1) for i, num in num_rows.items()}
        self._is_averaged = num_averaged is not None
        self.traced = traced = TracedUpdate.of(call, self._shape_of(self._num_rows_shapes(num_rows)))
        self._arrays = [array_of(variable) for variable in call.variables]
        self._state = [array_of(variable) for variable in call.state]
        if self._num_rows and call.why_not_rows is not None:
            names = ", ".join(repr(self._arrays[i].name) for i in self._num_rows)
            raise UnsupportedError(
                f"{call.name} cannot update only some rows of table {names} (at {event.line}): it has "
                f"{call.why_not_rows}. Remove that, or use another optimizer for the table."
            )
        self._slots = slots_of(call, traced)
        owned = {n for slots in self._slots for n in slots}
        self._shared = [n for n in range(len(self._state)) if n not in owned]
        self.shared = [self._state[n] for n in self._shared]
        self._levels: dict[int, TracedUpdate] = {}
        self._functions: dict[Hashable, Callable[..., list[Any]]] = {}
        self.kept_whole: list[ServerArray] = []
        given = {*traced.consts, *traced.gradients}
        # Try without the shared state first: the server may have changed it since the worker read it.
        self._at_worker = [
            computable(traced.program, numbers) for numbers in (given, given | self._shared_numbers)
        ]
        self._sent = [self._decide(i) for i in range(len(self._arrays))]
        of_shared = Slice(self._new_shared, None, self._at_every_server)
        self._shared_sent = self._find(of_shared) or self._refuse(None)

    @property
    def slots(self) -> list[tuple[ServerArray, ServerArray]]:
        """The slots, each with the variable that it belongs to."""
        return [
            (self._state[n], array) for array, ns in zip(self._arrays, self._slots, strict=True) for n in ns
        ]

    @property
    def cuts(self) -> list[int]:
        """The values of ``traced`` that the worker computes."""
        every = (number for sent in [*self._sent, self._shared_sent] for number in sent.numbers)
        return list(dict.fromkeys(number for number in every if number not in self.traced.gradients))

    @property
    def variables(self) -> list[ServerArray]:
        """The arrays of the variables that it updates."""
        return list(self._arrays)

    @property
    def arrays(self) -> list[ServerArray]:
        """The arrays that it updates and keeps, in order."""
        return [*self._arrays, *self._state]

    def replaced_gradient(self, i: int) -> int | None:
        """Returns the value that the worker sends in place of a variable's gradient; None if it sends the gradient."""
        number = self._sent[i].gradient
        return None if number == self.traced.gradients[i] else number

    @property
    def needed_state(self) -> list[int]:
        """The positions of the state that the worker needs for ``cuts``."""
        used = numbers_in(self.traced.program.slice(self.cuts))
        return [n for n in self._shared if self.traced.state[n].old in used]

    @property
    def changes_shared(self) -> bool:
        """True if it changes state that all variables share, such as a count of steps."""
        return bool(self._new_shared)

    # --- decisions for full variables ----------------------------------------------------------------------

    @property
    def _new_shared(self) -> list[Atom]:
        return [self.traced.state[n].new for n in self._shared if self.traced.state[n].is_changed]

    @property
    def _shared_numbers(self) -> set[int]:
        return {self.traced.state[n].old for n in self._shared}

    @property
    def _at_every_server(self) -> set[int]:
        return {*self.traced.consts, *self._shared_numbers}

    def _decide(self, i: int) -> Sent:
        traced, array = self.traced, self._arrays[i]
        written = [traced.values[i], *(traced.state[n] for n in self._slots[i])]
        wanted, held = [each.new for each in written], {each.old for each in written}
        whole = Slice(wanted, traced.gradients[i], self._at_every_server | held)
        if not (array.row_ranges or i in self._num_rows):
            return self._find(whole) or self._refuse(i)
        by_rows = Slice(wanted, whole.gradient, whole.at_server, held | {traced.gradients[i]})
        found = self._find(by_rows)
        is_cut_alike = all(self._state[n].shape[:1] == array.shape[:1] for n in self._slots[i])
        if found is not None and (is_cut_alike or not array.row_ranges):
            return found
        if i not in self._num_rows and (found := self._find(whole)) is not None:
            self.kept_whole.append(array)
            return found
        mixed = find_mixed(traced, by_rows, Sent(by_rows.gradient))
        return self._refuse(i, next(iter(mixed.values()), None))

    def _find(self, part: Slice) -> Sent | None:
        found = (
            find_sent(self.traced, part, at_worker, is_averaged=self._is_averaged)
            for at_worker in self._at_worker
        )
        return next((sent for sent in found if sent is not None), None)

    def _refuse(self, i: int | None, mixing: Mixing | None = None) -> NoReturn:
        if i is not None and i in self._num_rows:
            mixes = f"updates each of its rows from other rows: {mixing}"
            how = mixes if mixing else "has slots that are not split like it"
            raise UnsupportedError(
                f"Variable {self._arrays[i].name!r} is a table of which some rows are updated, but "
                f"{self.call.name} {how} (at {self.line}). Use an optimizer that updates each row on its own "
                "(SGD, Adagrad, Adam, RMSprop, Ftrl), or do not shard the variable: remove "
                "variable_partitioner, or use one that leaves it in one shard."
            )
        what = "the state that its variables share" if i is None else f"variable {self._arrays[i].name!r}"
        raise UnsupportedError(
            f"{self.call.name} updates {what} from the values of other variables, which other parameter servers may "
            f"hold (at {self.line}). Use an optimizer that updates each variable from its own gradient and slots."
        )

    # --- the program of one server -------------------------------------------------------------------------

    def add_to(
        self, builder: UpdateBuilder, places: Places, take_gradient: TakeGradient, take_scalar: TakeScalar
    ) -> None:
        """Adds the steps of one server, for these places of all arrays."""
        for i, array in enumerate(self._arrays):
            for number, shard in enumerate(places[array].shards):
                if shard.ps == builder.ps:
                    self._add_shard(builder, places, i, number, take_gradient(i, shard), take_scalar)
        if self.changes_shared:  # last, because the updates of all shards use the old value
            self._add(builder, places, self.traced, self._shared_sent, [], {}, take_scalar)

    def _add_shard(
        self,
        builder: UpdateBuilder,
        places: Places,
        i: int,
        number: int,
        gradient: Any,
        take_scalar: TakeScalar,
    ) -> None:
        """Adds the update of shard ``number`` of a variable, with its slots."""
        array, sent = self._arrays[i], self._sent[i]
        shard = places[array].shards[number]
        traced, aval = self._traced_for(places, i, shard), (self._shape_at(i, shard), array.dtype)
        held = [_Held(array, shard, traced.values[i])]
        held += [
            _Held(self._state[n], places[self._state[n]].shards[number], traced.state[n])
            for n in self._slots[i]
        ]
        assert sent.gradient is not None
        if i in self._num_rows:
            ids = builder.take(gradient, (aval[0][:1], np.int32), aval)
            self._add(builder, places, traced, sent, held, {sent.gradient: ids + 1}, take_scalar, ids)
        else:
            taken = {sent.gradient: builder.take(gradient, aval)}
            self._add(builder, places, traced, sent, held, taken, take_scalar)

    def _add(
        self,
        builder: UpdateBuilder,
        places: Places,
        traced: TracedUpdate,
        sent: Sent,
        held: Sequence[_Held],
        operands: dict[int, int],
        take_scalar: TakeScalar,
        ids: int | None = None,
    ) -> None:
        """Adds the call of one function.

        Args:
          builder: The program of the server.
          places: The places of all arrays.
          traced: The update, traced for these shapes.
          sent: The values that the worker sends.
          held: The shards that it updates; empty for shared state.
          operands: The position of the gradient, by its number.
          take_scalar: Returns the operand that is a value of the worker.
          ids: The position of the numbers of the rows that it updates; None if it updates all.
        """
        shared = [
            self._shared_on(builder.ps, places, n, traced.state[n], is_changed=not held) for n in self._shared
        ]
        wanted = [each.written.new for each in [*held, *shared] if each.written.is_changed]
        if traced is not self.traced and traced.scalars(wanted, sent.numbers) != self.traced.scalars(
            wanted, sent.numbers
        ):
            self._refuse_shards()  # for example, because the number of rows is in a constant
        used = numbers_in(traced.program.slice(wanted, sent.numbers), wanted)
        for number in sent.scalars:
            aval = traced.avals[number]
            operands[number] = builder.take(take_scalar(number), (aval.shape, aval.dtype))
        read: dict[str, int] = {}  # numbers of the old values, by key
        written: list[str] = []
        ids_of: dict[str, int] = {}
        for each in [*held, *shared]:
            old, is_changed = each.written.old, each.written.is_changed
            if not (is_changed or old in used):
                continue
            rows = None if ids is None or each in shared else [NamedRows(ids)]
            key = builder.use(each.array, each.shard, is_written=is_changed, rows=rows)
            read |= {key: old} if old in used else {}
            written += [key] if is_changed else []
            ids_of |= {} if ids is None or rows is None else {key: ids}
        function = self._function(traced, wanted, [*operands, *read.values()])

        def step(values: Values, given: Sequence[Any]) -> None:
            args = [given[position] for position in operands.values()]
            for key in read:
                at = ids_of.get(key)
                args.append(values[key] if at is None else rows_of(values[key], given[at]))
            for key, new in zip(written, function(*args), strict=True):
                at = ids_of.get(key)
                values[key] = new if at is None else with_rows(values[key], given[at], new)

        builder.add(step)

    def _shared_on(self, ps: int, places: Places, n: int, written: Written, *, is_changed: bool) -> _Held:
        array = self._state[n]
        kept = Written(written.old, written.old)
        return _Held(array, Shard(ps, places[array].key_on(ps)), written if is_changed else kept)

    def _function(
        self, traced: TracedUpdate, wanted: Sequence[Atom], given: Sequence[int]
    ) -> Callable[..., Any]:
        key, function = traced.function(wanted, given)
        return self._functions.setdefault(key, function)

    # --- traces for other shapes ---------------------------------------------------------------------------

    def _traced_for(self, places: Places, i: int, shard: Shard) -> TracedUpdate:
        """Returns the update traced for the shape of a shard. ``level`` is that shape's number among the variable's
        shards.
        """
        level = self._shapes_at(places, i).index(self._shape_at(i, shard))
        if level not in self._levels:
            self._levels[level] = self._traced_at(places, level)
        return self._levels[level]

    def _traced_at(self, places: Places, level: int) -> TracedUpdate:
        shapes = {}
        for i in range(len(self._arrays)):
            of_shards = self._shapes_at(places, i)
            shapes[i] = of_shards[min(level, len(of_shards) - 1)]
        if all(shape == self.traced.avals[self.traced.gradients[i]].shape for i, shape in shapes.items()):
            return self.traced
        traced = TracedUpdate.of(self.call, self._shape_of(shapes))
        if not traced.is_alike(self.traced):
            self._refuse_shards()
        return traced

    def _refuse_shards(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.call.name} computes another result for a shard of a variable than for the full variable, so its "
            f"variables cannot be sharded (at {self.line}). Use another optimizer, or no variable_partitioner."
        )

    def _shapes_at(self, places: Places, i: int) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(self._shape_at(i, shard) for shard in places[self._arrays[i]].shards))

    def _shape_at(self, i: int, shard: Shard) -> tuple[int, ...]:
        """Returns the shape of the part of a variable that a server updates at once."""
        array = self._arrays[i]
        return self._num_rows_shapes(self._rows_at_server).get(i, array.shape_of(shard))

    def _num_rows_shapes(self, num_rows: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        return {i: (num, *self.call.variables[i].shape[1:]) for i, num in num_rows.items()}

    def _shape_of(self, shapes: Mapping[int, tuple[int, ...]]) -> Shapes:
        """Returns the shapes of variables and slots, given those of some variables."""
        by_id = {id(self.call.variables[i]): shape for i, shape in shapes.items()}

        def shape_of(variable: Any) -> tuple[int, ...]:
            reference = self.call.reference_of(variable)
            found = by_id.get(id(variable if reference is None else reference))
            return tuple(variable.shape) if found is None else found

        return shape_of
