"""The state of a loop between its steps: who holds its arrays, and which of them a program may overwrite."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, final

import jax

from replicax._src import jax_compat
from replicax._src.devices.topology import Topology
from replicax._src.tracing.bindings import is_local, own_copy, own_copy_here
from replicax._src.tracing.holders import held_elsewhere

# Arrays that programs gave back, by id: their buffers belong to nothing else.
_made: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


@final
class Values:
    """Arrays that change in place: who holds the group sees it as it is now. Not a list, which Keras would copy."""

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

    A program overwrites the memory of what it changes. It may, where the array is *owned*: a program of ours made it
    and nobody else holds it, or it is a copy. Everything else is copied first.

    Args:
      topology: Where it is.
      names: Of the arrays, for messages.
      layouts: Of the arrays: how each lies over the logical devices of a replica; None where each device holds all of
        it.
    """

    def __init__(
        self,
        topology: Topology,
        names: Callable[[], Sequence[str]] | None = None,
        layouts: Callable[[], Sequence[Any]] | None = None,
    ):
        self._topology, self._names, self._layouts = topology, names, layouts
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
        """How many arrays each group has."""
        return tuple(map(len, self._groups or ()))

    @property
    def form(self) -> Hashable:
        """Equal where the same program fits: the shapes and dtypes by group, which no step changes."""
        if self._form is None:
            shapes = tuple(tuple((v.shape, v.dtype) for v in group) for group in self._groups or ())
            self._form = shapes, tuple(self.shardings)
        return self._form

    @property
    def shardings(self) -> list[Any]:
        """Of the arrays in ``values()``: how programs take and give them."""
        if self._shardings is None:
            layouts = self._layouts() if self._layouts else [None] * sum(self.sizes)
            self._shardings = [layout or self._topology.replicated for layout in layouts]
        return self._shardings

    def hold(self, state: Sequence[Values] | Sequence[list[Any]]) -> tuple[Values, ...]:
        """Takes over the state that a step is given: the groups again, or new lists of arrays, which are emptied.

        Who holds the groups sees the new arrays in them.
        """
        if self._groups is not None and state is self._groups:
            return self._groups
        self._remember_owned()
        if self._groups is None:
            self._groups = tuple(Values(()) for _ in state)
        for group, given in zip(self._groups, state, strict=True):
            group.arrays = list(given)
            if isinstance(given, list):
                given.clear()  # or its arrays would be held twice, and copied
        self._forget()
        return self._groups

    def adopt(self, written: Sequence[int], held_by: Callable[[], Sequence[Any]]) -> None:
        """Places the arrays, and makes those the state's own that a program will overwrite.

        Args:
          written: Their positions in ``values()``.
          held_by: For each array what its variable holds: the array too, or nothing any more.
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
        # Ours is the group's reference, and where the variable has the array, its own and that of ``variables``.
        held, held_beside_variable = (set(held_elsewhere(values, num_own)) for num_own in (1, 3))
        shardings = self.shardings
        to_copy, to_place = [], []
        for i, value in enumerate(values):
            if i in self._owned:
                continue
            is_ours = _made.get(id(value)) is value and value.sharding == shardings[i]
            is_unheld = i not in (held_beside_variable if variables[i] is value else held)
            if i in to_own and not (is_ours and is_unheld):
                to_copy.append(i)
            elif not is_ours:
                to_place.append(i)
        if self._topology.peers is not None:
            self._agree(values, [i for i in to_copy + to_place if is_local(values[i])])
            values = self.values()
            to_place = [i for i in to_place if values[i].sharding != shardings[i]]
        for sharding in dict.fromkeys(shardings):
            copied, placed = [[i for i in some if shardings[i] == sharding] for some in (to_copy, to_place)]
            self.store(copied, [own_copy(values[i], sharding) for i in copied])
            self.store(placed, jax_compat.put_all([values[i] for i in placed], sharding))

    def _agree(self, values: list[Any], positions: Sequence[int]) -> None:
        names = self._names() if self._names else [f"array {i} of the state" for i in range(len(values))]
        copies = [own_copy_here(values[i]) for i in positions]
        for i, agreed in zip(
            positions, self._topology.put_agreed(copies, [names[i] for i in positions]), strict=True
        ):
            values[i] = agreed
        self.store(positions, [values[i] for i in positions])

    def values(self) -> list[Any]:
        """All arrays, one group after the other."""
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
        """Replaces all arrays by such as no program of ours has made."""
        self.store(range(len(values)), values)
        self._forget()

    def _forget(self) -> None:
        self._owned, self._is_placed, self._ready_for = set(), False, None
        self._form = self._shardings = None

    def release(self) -> None:
        """Lets go of the arrays: they are the variables' now. The groups are empty, whoever holds them."""
        self._remember_owned()
        for group in self._groups or ():
            group.arrays = []
        self._groups, self._owned = None, set()

    def _remember_owned(self) -> None:
        if self._owned:
            values = self.values()
            _made.update((id(values[i]), values[i]) for i in self._owned if isinstance(values[i], jax.Array))
