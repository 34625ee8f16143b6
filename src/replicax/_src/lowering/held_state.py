"""The state of a loop between its steps: tracks who holds its arrays and which ones a program may overwrite."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import as_parts, is_local, own_copy, own_copy_here
from replicax._src.tracing.holders import held_elsewhere

# Arrays that programs returned, by id. Nothing else holds their buffers.
_made: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


_all_held: weakref.WeakSet[HeldState] = weakref.WeakSet()


def _is_made(value: Any) -> bool:
    return _made.get(id(value)) is value


def arrays_of_programs() -> set[int]:
    """Returns the identities of the arrays that programs returned, which loops do not compare with other processes."""
    owned = (id(value) for held in list(_all_held) for value in held._owned_values())
    return {*_made.keys(), *owned}


def note_of_program(value: jax.Array) -> None:
    """Notes that a program of another process, which has given it, returned this array. Nothing else may hold it."""
    _made[id(value)] = value


@final
class Values:
    """Arrays that change in place, so that every holder sees the current ones. It is no list, which Keras would
    copy.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: Iterable[Any]):
        self.arrays = list(arrays)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


@final
class HeldState:
    """The state of one loop: groups of arrays, the same groups from its first step to its last.

    A program overwrites the memory of arrays that it changes. It may do so if the array is *owned*: a replicax program
    made it and nobody else holds it, or it is a copy. All other arrays are copied first.

    Args:
      topology: The devices that hold it.
      names: The names of the arrays for messages.
      layouts: The sharding of each array over the logical devices of a replica; None for a replicated array.
      parts: The shape of each array that is kept as one part [R, ...] for each replica, by its position.
    """

    def __init__(
        self,
        topology: Topology,
        names: Callable[[], Sequence[str]] | None = None,
        layouts: Callable[[], Sequence[Any]] | None = None,
        parts: Callable[[], Mapping[int, tuple[int, ...]]] = dict,
    ):
        self._topology, self._names, self._layouts, self._parts = topology, names, layouts, parts
        _all_held.add(self)
        self._shardings: list[Any] | None = None
        self._groups: tuple[Values, ...] | None = None
        self._owned: set[int] = set()
        self._is_placed = False
        self._ready_for: Sequence[int] | None = None
        self._form: Hashable = None

    @property
    def groups(self) -> tuple[Values, ...] | None:
        """The arrays by group; None before the first step and after the last one."""
        return self._groups

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of arrays in each group."""
        return tuple(map(len, self._groups or ()))

    @property
    def form(self) -> Hashable:
        """The key of programs for this state: the shapes and dtypes by group, which no step changes."""
        if self._form is None:
            dtypes = tuple(v.dtype for v in self.values())
            self._form = self.sizes, dtypes, tuple(self.shapes), tuple(self.shardings)
        return self._form

    @property
    def parts(self) -> Mapping[int, tuple[int, ...]]:
        """The shapes of the arrays that replicas keep parts of, by their position in ``values()``."""
        return self._parts()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays in ``values()``, and of those that replicas keep parts of."""
        parts = self.parts
        return [parts.get(i, tuple(value.shape)) for i, value in enumerate(self.values())]

    @property
    def shardings(self) -> list[Any]:
        """The shardings of the arrays in ``values()``, for inputs and outputs of programs."""
        if self._shardings is None:
            layouts = self._layouts() if self._layouts else [None] * sum(self.sizes)
            self._shardings = [layout or self._topology.replicated for layout in layouts]
        return self._shardings

    def hold(self, state: Sequence[Values] | Sequence[list[Any]]) -> tuple[Values, ...]:
        """Takes over the state that a step is given: its own groups, or new lists of arrays, which it empties.

        Holders of the groups see the new arrays in them.
        """
        if self._groups is not None and state is self._groups:
            return self._groups
        self._remember_owned()
        groups = self._groups or tuple(Values(()) for _ in state)
        for group, given in zip(groups, state, strict=True):
            group.arrays = list(given)
        self._groups = groups  # all of them at once: Ctrl-C may come between any two lines
        for given in state:
            if isinstance(given, list):
                given.clear()  # otherwise its arrays would be held twice, and copied
        self._forget()
        return self._groups

    def adopt(self, written: Sequence[int], held_by: Callable[[], Sequence[Any]]) -> None:
        """Places the arrays, and makes the state the owner of those that a program will overwrite.

        Args:
          written: The positions in ``values()`` of the arrays that a program will overwrite.
          held_by: Returns, for each array, the value that its variable holds: the array or None.
        """
        if self._ready_for is written:
            return
        to_own = set(written) - self._owned
        if to_own or not self._is_placed:
            self._own_and_place(to_own, held_by())
        self._owned |= to_own
        self._is_placed, self._ready_for = True, written

    def _own_and_place(self, to_own: set[int], variables: Sequence[Any]) -> None:
        values = self.values()
        # Own references: the group's and, if the variable has the array, the variable's and that of ``variables``.
        held, held_beside_variable = (set(held_elsewhere(values, num_own)) for num_own in (1, 3))
        shardings = list(self.shardings)
        wholes = [i for i, shape in self.parts.items() if tuple(values[i].shape) == shape]
        for i in wholes:
            shardings[i] = self._topology.replicated
        to_copy, to_place = [], []
        for i, value in enumerate(values):
            if i in self._owned:
                continue
            is_ours = _is_made(value) and value.sharding == shardings[i]
            is_unheld = i not in (held_beside_variable if variables[i] is value else held)
            if i in to_own and not (is_ours and is_unheld):
                to_copy.append(i)
            elif not is_ours:
                to_place.append(i)
        if self._topology.peers is not None:
            local = [i for i in to_copy + to_place if is_local(values[i]) and not _is_made(values[i])]
            # Of a loop around this one, as that of `fit` around its validation.
            of_programs = (
                {id(value) for held in list(_all_held) for value in held._owned_values()} if local else ()
            )
            self._agree(values, [i for i in local if id(values[i]) not in of_programs])
            values = self.values()
            to_place = [i for i in to_place if values[i].sharding != shardings[i]]
        for sharding in dict.fromkeys(shardings):
            copied, placed = [[i for i in some if shardings[i] == sharding] for some in (to_copy, to_place)]
            self.store(copied, [own_copy(values[i], sharding) for i in copied])
            self.store(placed, jax_compat.put_all([values[i] for i in placed], sharding))
        values = self.values()
        self.store(wholes, [as_parts(values[i], self._topology) for i in wholes])

    def _agree(self, values: list[Any], positions: Sequence[int]) -> None:
        names = self.names
        copies = [own_copy_here(values[i]) for i in positions]
        for i, agreed in zip(
            positions, self._topology.put_agreed(copies, [names[i] for i in positions]), strict=True
        ):
            values[i] = agreed
        self.store(positions, [values[i] for i in positions])

    @property
    def names(self) -> Sequence[str]:
        """The names of the arrays in ``values()``, for messages."""
        if self._names is not None:
            return self._names()
        return [f"array {i} of the state" for i in range(sum(self.sizes))]

    def values(self) -> list[Any]:
        """Returns all arrays, one group after the other."""
        return list(itertools.chain.from_iterable(self._groups or ()))

    def store(self, positions: Sequence[int], values: Sequence[Any]) -> None:
        """Replaces arrays, by their position in ``values()``."""
        changed = self.values()
        for position, value in zip(positions, values, strict=True):
            changed[position] = value
        start = 0
        for group in self._groups or ():
            stop = start + len(group)
            group.arrays = changed[start:stop]
            start = stop

    def replace(self, values: Sequence[Any]) -> None:
        """Replaces all arrays by ones that no replicax program made."""
        self.store(range(len(values)), values)
        self._forget()

    def _forget(self) -> None:
        self._owned, self._is_placed, self._ready_for = set(), False, None
        self._form = self._shardings = None

    def release(self) -> None:
        """Releases the arrays to the variables and empties the groups for all holders."""
        self._remember_owned()
        for group in self._groups or ():
            group.arrays = []
        self._groups, self._owned = None, set()

    def _remember_owned(self) -> None:
        _made.update((id(value), value) for value in self._owned_values())

    def _owned_values(self) -> list[jax.Array]:
        values = self.values() if self._owned else []
        return [values[i] for i in self._owned if isinstance(values[i], jax.Array)]
