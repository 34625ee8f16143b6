"""Bindings: where a variable's value lives between program calls, and how replicas share it.

A binding joins one variable to one strategy's devices. Nothing here traces or runs.
"""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from replicax._src.devices.sharding_specs import Axes
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.optimizer_slots import optimizer_slots_of
from replicax._src.values.framework import make_binding
from replicax._src.vocabulary.errors import TraceError, VariableError

# A thread holds this lock while a program takes the state and gives it back, so that threads neither donate one array
# twice nor read one that is being donated. Reads of rx.Variable take it; reads of Keras variables cannot.
state_lock = threading.RLock()


class SyncPolicy(enum.Enum):
    """How the replicas share a variable, and what a program does when their values differ at its end."""

    MIRRORED = "one value; differing is an error"
    AVERAGED = "one value; differing ones are averaged, weighted by rows (moving statistics)"
    FIRST = "one value; the first replica's wins (integer state of Keras)"
    SEED = "one value; each replica sees its own random stream derived from it"
    COMPONENTS = "one value per replica (synchronization ON_READ)"
    SUMMED = "one value per replica behind a variable that shows their sum (Keras metrics)"
    PARTS = "one value per replica; their sum is computed when the variable is read (accumulated gradients)"

    @property
    def is_per_replica(self) -> bool:
        return self in (SyncPolicy.COMPONENTS, SyncPolicy.SUMMED, SyncPolicy.PARTS)

    @property
    def is_sum(self) -> bool:
        return self in (SyncPolicy.SUMMED, SyncPolicy.PARTS)


class Accessor(Protocol):
    """Reads and writes the current values of variables of one kind, through their holders; see ``Binding``."""

    def get(self, holders: Sequence[Any]) -> list[Any]:
        """Returns the values, in order."""
        ...

    def set(self, holders: Sequence[Any], values: Sequence[Any]) -> None:
        """Stores ``values``, in order."""

    def late(self, holders: Sequence[Any]) -> LateValues | None:
        """Returns the late values of the holders; None if somebody may read them unnoticed."""
        ...


class Stored:
    """A holder of an array, whose readers and writers call ``LateValues.settle`` first."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array


@final
class LateValues:
    """The values that a program wrote and its variables do not have yet: they get them when somebody reads or assigns
    any variable. A loop of one program therefore touches no variable, which takes a microsecond for each.

    Attributes:
      is_read: True if somebody has read or assigned a variable since a program wrote. The next one writes at once.
    """

    is_read: ClassVar[bool] = True
    _pending: ClassVar[LateValues | None] = None  # of the program that wrote last

    def __init__(self, holders: Sequence[Stored]):
        self._holders = holders
        self._values: Sequence[Any] = ()

    @property
    def values(self) -> Sequence[Any] | None:
        """The values, which nobody has seen; None if the variables have them."""
        return self._values if LateValues._pending is self else None

    def held(self) -> list[Any]:
        """Returns the values that the holders have."""
        return [holder.array for holder in self._holders]

    def put(self, values: Sequence[Any]) -> None:
        """Takes new values of all holders. Hold the ``state_lock``.

        Ctrl-C may come between any two lines: call it again then.
        """
        if LateValues._pending is not self:
            LateValues.give()
            self._values, LateValues._pending = values, self
            for holder in self._holders:
                holder.array = None  # otherwise the earlier arrays would stay alive
        self._values = values

    def end(self) -> None:
        """Gives the variables their values, because the program is deleted."""
        if LateValues._pending is self:
            LateValues.give()

    @classmethod
    def settle(cls) -> None:
        """Called by all that read or assign a variable: gives all variables the values that were written last."""
        cls.is_read = True
        if cls._pending is not None:
            cls.give()

    @classmethod
    def give(cls) -> None:
        """Gives the variables of the program that wrote last their values, if they are late."""
        with state_lock:
            late = cls._pending
            if late is not None:
                for holder, value in zip(late._holders, late._values, strict=True):
                    holder.array = value
                cls._pending, late._values = None, ()


class Binding:
    """A variable on the devices of one strategy.

    Attributes:
      variable: The variable. Only ``accessor`` looks inside it.
      holder: The object that has the value as an attribute, for the accessor; by default the variable.
      name: The name that messages show.
      shape, dtype: The shape and dtype that one replica sees.
      sync_policy: How the replicas share the value; see ``SyncPolicy``.
      num_replicas: The number of replicas R of the strategy.
      placed: The array that a program or an adoption gave the variable last; None while the program that wrote last
        still keeps it (``lowering/spmd.py``).
      components: The components [R, ...] whose sum is ``placed``, if the sync policy is SUMMED.
      layout: The sharding of the value over the logical devices of a replica or over replicas; None if the value is
        replicated.
    """

    __slots__ = (
        "__weakref__",
        "accessor",
        "components",
        "dtype",
        "holder",
        "layout",
        "name",
        "num_replicas",
        "placed",
        "shape",
        "sync_policy",
        "variable",
    )

    def __init__(
        self,
        variable: Any,
        accessor: Accessor,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        sync_policy: SyncPolicy = SyncPolicy.MIRRORED,
        holder: Any = None,
    ):
        self.variable = variable
        self.holder = variable if holder is None else holder
        self.accessor = accessor
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.sync_policy = sync_policy
        self.num_replicas = 1
        self.placed: Any = None
        self.components: Any = None
        self.layout: Any = None

    @property
    def value(self) -> Any:
        """Returns the value that the variable holds now."""
        return self.accessor.get([self.holder])[0]

    @value.setter
    def value(self, value: Any) -> None:
        self.accessor.set([self.holder], [value])

    def placement_on(self, topology: Topology) -> Any:
        """Returns the sharding of the array that programs take for the variable."""
        if self.layout is not None:
            return self.layout
        return topology.per_replica if self.sync_policy.is_per_replica else topology.replicated

    def described(self, topology: Topology) -> Any:
        """Returns the shape, dtype and sharding of the array that programs over a topology take for the variable."""
        shape = (topology.num_replicas, *self.shape) if self.sync_policy.is_per_replica else self.shape
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.placement_on(topology))

    def __repr__(self) -> str:
        return f"Binding({self.name!r}, {self.sync_policy.name})"


class Layouts(Protocol):
    """The layouts of variables; see ``variables/layouts.py``."""

    def of(self, variable: Any) -> NamedSharding | None:
        """Returns the layout in which a variable is stored; None if it is replicated."""
        ...

    def layout_by_axes(self, variable: Any, axes: Axes) -> NamedSharding | None:
        """Returns the layout that a variable would have if the logical devices sharded it by ``axes``."""
        ...

    def give(self, variable: Any, axes: Axes) -> None:
        """Makes the logical devices shard a variable by ``axes``."""


class BindingTable:
    """The bindings of the variables that one strategy's programs have met.

    The table keeps a binding as long as a program uses it.

    Args:
      num_replicas: The number of replicas R of the strategy.
      layouts: The layouts of variables; None if all are replicated.
    """

    def __init__(self, num_replicas: int, layouts: Layouts | None = None) -> None:
        self._num_replicas = num_replicas
        self._layouts = layouts
        self._bindings: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()
        self._components: dict[int, tuple[Any, Any]] = {}

    def binding_of(self, variable: Any) -> Binding:
        """Returns the binding of ``variable``, and makes it at the first call."""
        binding = self._bindings.get(id(variable))
        if binding is None:
            binding = make_binding(variable, self._num_replicas)
            assert isinstance(binding, Binding)
            binding.num_replicas = self._num_replicas
            binding.layout = self._layout(binding)
            placed, components = self._components.get(id(variable), (None, None))
            if (
                components is not None and not components.is_deleted()
            ):  # a program that owned its memory deletes it
                binding.placed, binding.components = placed, components
            self._bindings[id(variable)] = binding
        return binding

    def give_components(self, variable: Any, placed: Any, components: Any) -> None:
        """Sets the components of the sum that a SUMMED variable is given.

        A binding that is made later gets them too. They are valid as long as the variable shows that sum.
        """
        binding = self.binding_of(variable)
        binding.placed, binding.components = placed, components
        if id(variable) not in self._components:
            weakref.finalize(variable, self._components.pop, id(variable), None)
        self._components[id(variable)] = placed, components

    def layout_of(self, variable: Any) -> Any:
        """Returns the layout of a variable, from its creation on; None if it is replicated or each replica has its own
        value.
        """
        return None if self._layouts is None else self._layout(make_binding(variable, self._num_replicas))

    def _layout(self, binding: Binding) -> Any:
        if self._layouts is None or binding.sync_policy.is_per_replica:
            return None
        return self._layouts.of(binding.variable)

    def lay_out(self, variable: Any, axes: Axes, topology: Topology) -> None:
        """Makes the logical devices shard a variable and its optimizer slots by ``axes``. Programs keep that layout.

        Raises:
          VariableError: Each replica has its own value, or a compiled program already uses the variable.
        """
        for each in [
            *optimizer_slots_of(variable),
            variable,
        ]:  # optimizer slots get the layout of their variable
            self._lay_out(each, axes, topology)

    def _lay_out(self, variable: Any, axes: Axes, topology: Topology) -> None:
        assert self._layouts is not None
        is_met = id(variable) in self._bindings
        binding = self.binding_of(variable)
        layout = self._layouts.layout_by_axes(variable, axes)
        if binding.layout == layout:
            return
        if binding.sync_policy.is_per_replica:
            raise VariableError(
                f"Variable {binding.name!r} has one value per replica, which cannot be sharded: only variables with one value can "
                "be sharded over logical devices."
            )
        if is_met:
            raise VariableError(
                f"Variable {binding.name!r} is used by a program that was compiled for its current layout. Shard variables over "
                "logical devices right after making them, before the first step."
            )
        self._layouts.give(variable, axes)
        binding.layout = layout
        adopt(binding, binding.value, topology)


def own_copy(value: Any, sharding: Any) -> jax.Array:
    """Returns a strongly typed copy of ``value`` in buffers that nobody else holds, placed by ``sharding``.

    ``jax.device_put`` alone may share the buffer of its argument, and programs donate what they are given.
    """
    if isinstance(value, np.ndarray) and not sharding.is_fully_replicated:
        return jax_compat.put_shards(value, sharding)
    return jax_compat.put(own_copy_here(value), sharding)


# Arrays, by id, whose values each process made itself. Nobody has compared the processes' values yet.
_uncompared: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


# Arrays, by id, that only the variables that they were made for hold.
_unshared: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def note_unshared(value: jax.Array) -> None:
    """Notes that ``value`` was made for a variable and nobody else holds it, so that adoption need not copy it."""
    _unshared[id(value)] = value


def forget_unshared(value: jax.Array) -> None:
    """Takes ``note_unshared`` back: adoption compares the value with those of other processes."""
    _unshared.pop(id(value), None)


def is_adopted(binding: Binding) -> bool:
    """True if adoption would not compare the value of a variable with those of other processes."""
    value = binding.value
    return value is not None and (value is binding.placed or _unshared.get(id(value)) is value)


def placed_by_each(value: Any, topology: Topology) -> jax.Array:
    """Returns a replicated copy of a value that was made outside of programs.

    With several processes each passes its own value. The values are compared when a variable or the state of
    ``run_steps`` takes the array.
    """
    placed = own_copy(value, topology.replicated)
    if topology.peers is not None:
        _uncompared[id(placed)] = placed
    return placed


def is_local(value: Any) -> bool:
    """Returns True if only this process has the value."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def made_by_each(value: Any) -> jax.Array | None:
    """Returns this process's value if each process made its own and nobody has compared them; else None."""
    if is_local(value):
        return own_copy_here(value)
    return own_copy_here(value.addressable_data(0)) if _uncompared.get(id(value)) is value else None


def own_copy_here(value: Any) -> jax.Array:
    """Returns a strongly typed copy on the devices of ``value``."""
    if is_local(value) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        copy = jax_compat.copied(value)
    else:
        parts = [jax_compat.copied(shard.data) for shard in value.addressable_shards]
        copy = jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)
    if not getattr(copy, "weak_type", False):  # random keys have none
        return copy
    return jax.lax.convert_element_type(copy, copy.dtype)  # a weak type would recompile


def check_no_tracer(binding: Binding, value: Any) -> None:
    """Raises unless a variable holds an array.

    Raises:
      TraceError: It holds a tracer of a trace that has ended.
    """
    if isinstance(value, jax_compat.Tracer):
        raise TraceError(
            f"Variable {binding.name!r} holds a tracer: it was assigned inside a function that JAX traced "
            f"without replicax (jax.jit, jax.grad, …). Assign it in strategy.run, rx.function or plain Python."
        )


def adopt(binding: Binding, value: Any, topology: Topology) -> jax.Array:
    """Places a copy of a value that no replicax program wrote, and gives it to the variable.

    Raises:
      TraceError: The variable holds a tracer of a trace that has ended.
    """
    check_no_tracer(binding, value)
    is_of_parts = binding.sync_policy is SyncPolicy.PARTS
    if _unshared.get(id(value)) is value and value.sharding == binding.placement_on(topology):
        placed = value
    elif binding.sync_policy is SyncPolicy.COMPONENTS or (
        is_of_parts and is_stored_as_parts(value, binding.shape)
    ):
        placed = own_copy(value, topology.per_replica)
    elif topology.peers is not None and (here := made_by_each(value)) is not None:
        placed = topology.put_agreed([here], [binding.name])[0]
        placed = placed if binding.layout is None else topology.put_by(placed, binding.layout)
    elif topology.peers is not None and binding.layout is not None:
        placed = own_copy_here(topology.put_by(value, binding.layout))
    else:
        placed = own_copy(value, binding.layout or topology.replicated)
    if is_of_parts and not is_stored_as_parts(placed, binding.shape):
        placed = as_parts(placed, topology)
    binding.placed = placed
    if binding.sync_policy is SyncPolicy.SUMMED:
        binding.components = spread_sum(placed, topology)
    binding.value = placed
    return placed


def spread_sum(value: jax.Array, topology: Topology) -> jax.Array:
    """Returns components [R, ...] whose sum is ``value``: the value for the first replica, zero for the others."""
    rows = [value] + [jnp.zeros_like(value)] * (topology.num_replicas - 1)
    return topology.put_rows(jnp.stack(rows))


# --- parts of a sum ---------------------------------------------------------------------------------------


def is_stored_as_parts(stored: Any, shape: Sequence[int]) -> bool:
    """Returns True for the parts [R, ...] of a sum of this shape, which a PARTS variable stores after a program."""
    return np.ndim(stored) > len(shape)


def parts_of(value: Any, num_parts: int) -> jax.Array:
    """Returns parts [R, ...] of a sum: the first one is all of it."""
    is_first = jax.lax.broadcasted_iota(jnp.int32, (num_parts, *value.shape), 0) == 0
    return jnp.where(is_first, value[None], jnp.zeros((), value.dtype))


def as_parts(value: jax.Array, topology: Topology) -> jax.Array:
    """Replaces a replicated value by parts, of which each replica has its own."""
    make = _maker_of_parts(topology.num_replicas)
    return topology.compile(make, "dividing a sum", out_shardings=topology.per_replica)(value)


def added_up(parts: jax.Array, topology: Topology) -> jax.Array:
    """Returns the replicated sum of parts. With several processes all must call it."""
    name = "reading accumulated gradients, which all processes must do"
    return topology.compile(sum_of_parts, name, is_read=True, out_shardings=topology.replicated)(parts)


@functools.cache
def _maker_of_parts(num_parts: int) -> Callable[[Any], jax.Array]:
    return functools.partial(parts_of, num_parts=num_parts)


def sum_of_parts(parts: Any) -> Any:
    """Returns the sum of parts [R, ...]."""
    return jnp.sum(parts, axis=0, dtype=parts.dtype)
