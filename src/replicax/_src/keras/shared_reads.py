"""Reads and assignments of Keras variables that are sharded over several processes, outside of programs. No process
holds a full variable.

A read needs all processes, which gather the variable together, so all must read the same variables in the same order.
The end of an epoch of ``fit`` is an exception: processes whose callbacks have finished wait there for the others, and
gather the variables that these read meanwhile. So a chief can save alone.

A value that all processes assign, such as loaded weights, is cut into shards at once if all have the same value.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import keras
import numpy as np

from replicax._src.devices.topology import Topology, digest
from replicax._src.jax_internals import jax_compat
from replicax._src.keras.overriding import overridden
from replicax._src.scope import context
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.bindings import added_up, is_stored_as_parts, sum_of_parts
from replicax._src.variables.layouts import VariableLayouts

_DONE = -1


class _Here(threading.local):
    """The state of this thread: True if it takes values as stored, without a gather."""

    takes_shards = False


_here = _Here()


@final
class SharedReads:
    """The reads of the variables of one strategy.

    Args:
      layouts: The layouts of a strategy over several processes.
    """

    def __init__(self, layouts: VariableLayouts):
        self._layouts = layouts
        self._by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._is_open = False

    def note(self, variable: Any) -> None:
        """Records a new variable. All processes make the same variables in the same order."""
        self._by_number[self._count] = variable
        self._numbers[id(variable)] = self._count
        weakref.finalize(variable, self._numbers.pop, id(variable), None)
        self._count += 1

    def whole(self, variable: Any, value: jax.Array) -> jax.Array:
        """Returns the full value of a variable of which each process has shards."""
        number = self._numbers.get(id(variable))
        if not self._is_open or number is None:
            return self._layouts.whole(value)
        while True:
            asked, gathered = self._gather_together(number)
            if asked == number and gathered is not None:
                return gathered

    def in_shards(self, path: str, value: np.ndarray, sharding: Any) -> jax.Array | None:
        """Returns a host value that all processes assign, as shards; None if they assign different values, which the
        next program compares.
        """
        peers = self._layouts.topology.peers
        assert peers is not None
        if self._is_open:  # other processes may answer reads now
            return None
        of_all = peers.gather(
            "assigning divided variables", [path, digest(value)], "to assign a divided variable"
        )
        if any(theirs != of_all[0] for theirs in of_all):
            return None
        return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))

    def open(self, *args: Any) -> None:
        """Allows each process to read alone, until all call ``meet``."""
        self._is_open = True

    def meet(self, *args: Any) -> None:
        """Waits for all processes, and gathers the variables that the others read meanwhile."""
        while self._is_open:
            asked, _ = self._gather_together(_DONE)
            self._is_open = asked != _DONE

    @contextlib.contextmanager
    def in_fit(self, callbacks: Sequence[Any]) -> Iterator[list[Any]]:
        """Yields the callbacks for the ``fit`` that runs inside the block. On exit no process waits for another."""
        opening, meeting = (
            keras.callbacks.LambdaCallback(on_epoch_end=call, on_train_end=call)
            for call in (self.open, self.meet)
        )
        try:
            yield [opening, *callbacks, meeting]
        finally:
            self._is_open = False

    def _gather_together(self, number: int) -> tuple[int, jax.Array | None]:
        peers = self._layouts.topology.peers
        assert peers is not None
        asked = peers.gather("reading divided variables", number, "to read divided variables")
        chosen = next((n for n in asked if n != _DONE), _DONE)
        if chosen == _DONE:
            return _DONE, None
        with shards():
            value = self._by_number[chosen].value
        return chosen, self._layouts.whole(value) if is_sharded(value) else value


is_needed = False
"""True if a strategy of this process shards variables over processes, or stores parts of one. Every read of a Keras
variable checks it.
"""

_of_layouts: weakref.WeakKeyDictionary[VariableLayouts, SharedReads] = weakref.WeakKeyDictionary()


def of(strategy: Strategy | None) -> SharedReads | None:
    """Returns the reads of a strategy, or None if it does not shard variables over processes."""
    layouts = None if strategy is None else strategy.variable_placement.layouts
    if layouts is None or layouts.topology.peers is None:
        return None
    global is_needed
    if layouts not in _of_layouts:
        is_needed = True
        _of_layouts[layouts] = SharedReads(layouts)
    return _of_layouts[layouts]


def is_sharded(value: Any) -> bool:
    """True if a value is sharded over the devices of several processes."""
    if not isinstance(value, jax.Array) or isinstance(value, jax_compat.Tracer):
        return False
    return not value.is_fully_addressable and not value.is_fully_replicated


def is_of_parts(variable: Any, value: Any) -> bool:
    """True for the parts that programs store for a variable whose value is their sum."""
    if not variable.has_parts or not isinstance(value, jax.Array) or isinstance(value, jax_compat.Tracer):
        return False
    owner = context.owner_of(variable)  # none of a copy
    is_stored_by_program = owner is None or value.sharding == owner.topology.per_replica
    return is_stored_as_parts(value, variable.shape) and is_stored_by_program


def in_shards(variable: Any, value: Any, stored: Any) -> Any:
    """Returns a host value that is assigned outside of functions, as the variable stores it: in shards if ``stored`` is
    sharded over several processes.
    """
    if not is_needed or not isinstance(value, np.ndarray) or not is_sharded(stored):
        return value
    reads = of(context.owner_of(variable))
    if reads is None or value.shape != stored.shape:
        return value
    shards = reads.in_shards(variable.path, np.asarray(value, stored.dtype), stored.sharding)
    return value if shards is None else shards


def shards() -> contextlib.AbstractContextManager[None]:
    """Makes this thread take values as stored, without a gather."""
    return overridden(_here, takes_shards=True)


def whole(variable: Any, held: Any) -> Any:
    """Returns the full value of a variable of which each process may hold a shard, or each replica a part."""
    if _here.takes_shards:
        return held
    if is_of_parts(variable, held):
        owner = context.owner_of(variable)
        if owner is None and held.is_fully_addressable:
            return sum_of_parts(held)
        return added_up(held, Topology.from_mesh(held.sharding.mesh) if owner is None else owner.topology)
    if not is_sharded(held) or not jax_compat.is_evaluating():
        return held
    reads = of(context.owner_of(variable))
    return held if reads is None else reads.whole(variable, held)
