"""Bindings: where a variable's value lives between the calls of programs, and what happens if it differs.

A binding joins one variable to one strategy's devices. Nothing here traces or runs.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax._src import jax_compat
from replicax._src.devices.topology import Topology
from replicax._src.errors import TraceError, VariableError
from replicax._src.framework import make_binding
from replicax._src.tracing.optimizer_slots import model_variable_of, optimizer_slots_of

# Held while a program takes the state and gives it back, so that threads neither donate one array twice nor read
# one that is being donated. Reads of rx.Variable take it; reads of Keras variables cannot.
state_lock = threading.RLock()


class SyncPolicy(enum.Enum):
    """How the replicas share a variable, and what a program does when their values differ at its end."""

    MIRRORED = "one value; differing is an error"
    AVERAGED = "one value; differing ones are averaged, weighted by rows (moving statistics)"
    FIRST = "one value; the first replica's wins (integer state of Keras)"
    SEED = "one value; each replica sees its own random stream derived from it"
    COMPONENTS = "one value per replica (synchronization ON_READ)"
    SUMMED = "one value per replica behind a variable that shows their sum (Keras metrics)"

    @property
    def is_per_replica(self) -> bool:
        return self in (SyncPolicy.COMPONENTS, SyncPolicy.SUMMED)


class Accessor(Protocol):
    """Reads and writes the value that variables of one kind hold now, by their holders: see ``Binding``."""

    def get(self, holders: Sequence[Any]) -> list[Any]:
        """Returns the values, in order."""
        ...

    def set(self, holders: Sequence[Any], values: Sequence[Any]) -> None:
        """Stores ``values``, in order."""


class Binding:
    """A variable on the devices of one strategy.

    Attributes:
      variable: The variable; the binding does not look inside, ``accessor`` does.
      holder: What the accessor takes: the object that has the value as an attribute, by default the variable.
      name: For messages.
      shape, dtype: As one replica sees the value.
      sync_policy: See ``SyncPolicy``.
      num_replicas: R of the strategy.
      placed: The array that a program, or adoption, gave the variable last; None while the program that wrote last
        keeps it (``lowering/spmd.py``).
      components: [R, ...] behind ``placed`` where sync_policy is SUMMED.
      layout: How the value lies over the devices, where it is divided over the logical devices of a replica or over
        replicas; None: each device holds all of it.
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
        sync_policy: SyncPolicy,
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
        """What the variable holds now."""
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
        """Returns the value as programs over a topology take it, without a value: shape, dtype and sharding."""
        shape = (topology.num_replicas, *self.shape) if self.sync_policy.is_per_replica else self.shape
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.placement_on(topology))

    def __repr__(self) -> str:
        return f"Binding({self.name!r}, {self.sync_policy.name})"


class BindingTable:
    """The bindings of the variables that one strategy's programs have met.

    A binding lives as long as a program that uses it.

    Args:
      num_replicas: R of the strategy.
      layout_by_rule: How a variable lies over the devices, where nobody has said it; None, or giving it: each holds
        all.
    """

    def __init__(self, num_replicas: int, layout_by_rule: Callable[[Any], Any] | None = None) -> None:
        self._num_replicas = num_replicas
        self._layout_by_rule = layout_by_rule
        self._bindings: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()
        self._layouts: dict[int, Any] = {}
        self._components: dict[int, tuple[Any, Any]] = {}
        self._mesh: Any = None

    def on(self, topology: Topology, layout_by_rule: Callable[[Any], Any] | None) -> BindingTable:
        """Returns a table for other devices, as many for each replica, over which variables lie as they were laid out
        here.
        """
        table = BindingTable(topology.num_replicas, layout_by_rule)
        table._layouts, table._mesh = self._layouts, topology.mesh
        return table

    def binding_of(self, variable: Any) -> Binding:
        """Returns the binding of ``variable``, made when it is first met."""
        binding = self._bindings.get(id(variable))
        if binding is None:
            binding = make_binding(variable, self._num_replicas)
            assert isinstance(binding, Binding)
            binding.num_replicas = self._num_replicas
            binding.layout = None if binding.sync_policy.is_per_replica else self.layout_of(variable)
            placed, components = self._components.get(id(variable), (None, None))
            if (
                components is not None and not components.is_deleted()
            ):  # as a program leaves it that was given its memory
                binding.placed, binding.components = placed, components
            self._bindings[id(variable)] = binding
        return binding

    def give_components(self, variable: Any, placed: Any, components: Any) -> None:
        """Says what is behind the sum that a SUMMED variable is given: also to bindings that are made later, as nothing
        may hold one yet. It counts as long as the variable shows that sum.
        """
        binding = self.binding_of(variable)
        binding.placed, binding.components = placed, components
        if id(variable) not in self._components:
            weakref.finalize(variable, self._components.pop, id(variable), None)
        self._components[id(variable)] = placed, components

    def layout_of(self, variable: Any) -> Any:
        """How a variable lies over the devices; None: each holds all of it."""
        if self._layouts:
            laid_out = variable if id(variable) in self._layouts else model_variable_of(variable)
            if id(laid_out) in self._layouts:
                layout = self._layouts[id(laid_out)]
                return (
                    layout if layout is None or self._mesh is None else NamedSharding(self._mesh, layout.spec)
                )
        return None if self._layout_by_rule is None else self._layout_by_rule(variable)

    def lay_out(self, variable: Any, layout: Any, topology: Topology) -> None:
        """Moves a variable, and what programs will write to it, into a layout over the logical devices; and with it
        what optimizers keep for it.

        Raises:
          VariableError: Each replica has a value of its own, or a program has the variable already.
        """
        for each in [
            *optimizer_slots_of(variable),
            variable,
        ]:  # which are laid out as it is, as soon as it is
            self._lay_out(each, layout, topology)

    def _lay_out(self, variable: Any, layout: Any, topology: Topology) -> None:
        is_met = id(variable) in self._bindings
        binding = self.binding_of(variable)
        if binding.layout == layout:
            return
        if binding.sync_policy.is_per_replica:
            raise VariableError(
                f"Variable {binding.name!r} has a value for each replica, which stays whole: only variables with one value can "
                "be divided over logical devices."
            )
        if is_met:
            raise VariableError(
                f"Variable {binding.name!r} is in a program that was compiled for it as it lies now. Divide variables over "
                "logical devices right after making them, before the first step."
            )
        if id(variable) not in self._layouts:
            weakref.finalize(variable, self._layouts.pop, id(variable), None)
        binding.layout = self._layouts[id(variable)] = layout
        adopt(binding, binding.value, topology)


def own_copy(value: Any, sharding: Any) -> jax.Array:
    """Returns a strongly typed copy of ``value`` in buffers that nobody else holds, placed by ``sharding``.

    ``jax.device_put`` alone may share the buffer of its argument, and programs donate what they are given.
    """
    return jax_compat.put(own_copy_here(value), sharding)


# Arrays on the devices of several processes that each has made of a value of its own, by id: nobody has compared them.
_uncompared: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


# Arrays that nobody has but the variables that they were made for, by id.
_unshared: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def note_unshared(value: jax.Array) -> None:
    """``value`` was made for a variable, and nobody else has it: who adopts it need not copy it."""
    _unshared[id(value)] = value


def placed_by_each(value: Any, topology: Topology) -> jax.Array:
    """Returns a copy of a value that is made outside of programs, whole on every device.

    In several processes each gives its own; they are compared when a variable or the state of ``run_steps`` takes it.
    """
    placed = own_copy(value, topology.replicated)
    if topology.peers is not None:
        _uncompared[id(placed)] = placed
    return placed


def is_local(value: Any) -> bool:
    """Returns True if a value is of this process only."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def made_by_each(value: Any) -> jax.Array | None:
    """Returns the value of this process, if each process has made its own and nobody has compared them; else None."""
    if is_local(value):
        return own_copy_here(value)
    return own_copy_here(value.addressable_data(0)) if _uncompared.get(id(value)) is value else None


def own_copy_here(value: Any) -> jax.Array:
    """Returns a strongly typed copy, where ``value`` is."""
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
    """Takes over a value that no program of ours wrote, and gives the variable the placed copy.

    Raises:
      TraceError: The variable holds a tracer of a trace that has ended.
    """
    check_no_tracer(binding, value)
    if _unshared.get(id(value)) is value and value.sharding == binding.placement_on(topology):
        placed = value
    elif binding.sync_policy is SyncPolicy.COMPONENTS:
        placed = own_copy(value, topology.per_replica)
    elif topology.peers is not None and (here := made_by_each(value)) is not None:
        placed = topology.put_agreed([here], [binding.name])[0]
        placed = placed if binding.layout is None else topology.put_by(placed, binding.layout)
    elif topology.peers is not None and binding.layout is not None:
        placed = own_copy_here(topology.put_by(value, binding.layout))
    else:
        placed = own_copy(value, binding.layout or topology.replicated)
    binding.placed = placed
    if binding.sync_policy is SyncPolicy.SUMMED:
        binding.components = spread_sum(placed, topology)
    binding.value = placed
    return placed


def spread_sum(value: jax.Array, topology: Topology) -> jax.Array:
    """Components [R, ...] whose sum is ``value``: the first replica's is the value, the others' zero."""
    rows = [value] + [jnp.zeros_like(value)] * (topology.num_replicas - 1)
    return topology.put_rows(jnp.stack(rows))
