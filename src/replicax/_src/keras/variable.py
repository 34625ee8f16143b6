"""Keras variables that belong to the strategy in whose scope they are made. The strategy decides where they are kept.

``PlacedVariable`` comes before Keras's own class among the bases of ``keras.Variable``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras

from replicax._src.jax_internals import jax_compat
from replicax._src.keras import internals, placed_variables, sharded_state, shared_reads
from replicax._src.keras import variable_capture as keras_capture
from replicax._src.keras.internals import accessor
from replicax._src.keras.keras_placement import placement_of, placement_of_scope
from replicax._src.keras.variable_capture import outside_functions
from replicax._src.scope import context
from replicax._src.tracing.bindings import is_local
from replicax._src.tracing.capture import current_capture, note_created
from replicax._src.variables.remote_array import RemoteArray

_Keras: Any = keras.Variable if TYPE_CHECKING else object


# Keras's own getter, because ``super()`` takes half a microsecond.
_own_value: Any = keras.Variable.value.fget


class PlacedVariable(_Keras):
    """A Keras variable that is made, read and assigned where the strategy of its scope keeps variables.

    Attributes:
      has_parts: True if programs store it as parts [R, ...], one for each replica. Its value is their sum.
    """

    has_parts: bool = False

    @functools.wraps(keras.Variable.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        capture = current_capture()
        if capture is None or capture.is_for_plan:
            self._make(args, kwargs)
        else:  # a variable that a traced function creates gets its value at once
            with outside_functions():
                self._make(args, kwargs)
        note_created(self.path)

    def _make(self, args: Any, kwargs: Any) -> None:
        sharded_state.note_purpose(self)
        placement = placement_of_scope()
        placement.make(_own_init, self, args, kwargs)
        if not jax_compat.is_staging():
            placement.make_value(self)
        context.remember_owner(self)
        owner = context.owner_of(self)
        layouts = None if owner is None else owner.variable_placement.layouts
        if layouts is not None:
            layouts.note(self)
        reads = shared_reads.of(owner)
        if reads is not None and not sharded_state.making.is_alone:
            reads.note(self)
        shared_reads.is_needed = shared_reads.is_needed or self.has_parts
        _take_leaders_value(self)
        placed_variables.place(self)
        jax_compat.take_as_arrays(type(self), value_of)

    def _deferred_initialize(self) -> None:
        """Gives the first value to a variable of a model that was built while Keras traced it."""
        if accessor.is_built(self):
            return
        owner = context.owner_of(self)
        if placement_of(owner).make_value(self) or keras_capture.is_planned():
            return
        with sharded_state.laid_out(owner, internals.initializer_of(self)) as initializer:
            internals.set_initializer(self, initializer)
            super()._deferred_initialize()
        sharded_state.stay_as_assigned(owner, self)
        _take_leaders_value(self)
        placed_variables.place(self)

    @property
    def value(self) -> Any:
        """The value, read from the servers or gathered from the processes if it is there."""
        capture, stored = current_capture(), internals.stored(self)
        if capture is None and not isinstance(stored, RemoteArray):
            held = _own_value(self)
            return shared_reads.whole(self, held) if shared_reads.is_needed else held
        scope = internals.current_scope()
        value = None if scope is None else scope.get_current_value(self)
        if value is None and scope is not None:
            # A user's own scope does not map this variable, so its value is that of the trace, not a constant.
            if capture is not None:
                value = keras_capture.read(capture, self)
            elif isinstance(stored, RemoteArray) and jax_compat.is_staging():
                value = placement_of(context.owner_of(self)).stand_in(self)
        if value is None:
            value = stored.read() if isinstance(stored, RemoteArray) else stored
        return _own_value(self) if value is None else internals.autocast(self, value)

    def assign(self, value: Any) -> Any:
        """Assigns the value where the variable is kept."""
        stored = internals.stored(self)
        if shared_reads.is_of_parts(self, value):  # from Keras's loop
            accessor.set([self], [value])
            return self
        if shared_reads.is_needed and current_capture() is None:
            value = shared_reads.in_shards(self, value, stored)
        result = super().assign(placed_variables.beside(self, value))
        if isinstance(stored, RemoteArray):
            (assigned,) = accessor.get([self])
            if assigned is not stored:
                accessor.set([self], [stored])
                stored.assign(assigned)
        return result

    def assign_add(self, value: Any) -> Any:
        """Adds to the value where the variable is kept."""
        return super().assign_add(placed_variables.beside(self, value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts from the value where the variable is kept."""
        return super().assign_sub(placed_variables.beside(self, value))


def value_of(variable: Any) -> Any:
    """Returns the value of a Keras variable."""
    return variable.value


def _own_init(variable: Any, *args: Any, **kwargs: Any) -> None:
    init = super(PlacedVariable, variable).__init__
    initializer = args[0] if args else kwargs.get("initializer")
    if not keras_capture.is_planned() or not (callable(initializer) or isinstance(initializer, str)):
        init(*args, **kwargs)
        return
    with keras.StatelessScope(initialize_variables=False):  # a plan needs only shapes
        init(*args, **kwargs)


def _take_leaders_value(variable: Any) -> None:
    """Gives a new variable in several processes the value of the first process."""
    strategy = context.owner_of(variable)
    if strategy is None or strategy.topology.peers is None or sharded_state.making.is_alone:
        return
    if not accessor.is_built(variable):
        return
    with jax_compat.outside_traces():
        (value,) = accessor.get([variable])
        if is_local(value):
            layout = strategy.bindings.layout_of(variable)
            accessor.set([variable], [strategy.topology.put_leaders(value, layout)])
