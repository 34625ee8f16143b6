"""The layouts of one strategy's variables: sharded over the logical devices of a replica, over replicas, or both.

The layout map, or the user's call for one variable, says which dims the logical devices shard. The rule of
``shard_state`` then adds the replicas to one dim. Optimizer slots have the layout of their variable. Every layout is
one ``NamedSharding``, and its spec says how programs gather the variable.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.devices.sharding_specs import Axes, axes_of, dim_of, spec_of, without
from replicax._src.devices.topology import REPLICA_AXIS, SHARD_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.gathers import Sharded, is_large, sharded_read_p
from replicax._src.tracing.optimizer_slots import model_variable_of
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.mapped_layouts import MappedLayouts
from replicax._src.variables.row_shards import RowsInGlobalView, RowsOfReplica
from replicax._src.variables.state_shards import StateShards

# TPUs lay arrays out in tiles of 8 rows, and would pad thinner shards.
_LEAST_ROWS_ON_TPU = 8

# The ids of variables that optimizers keep. An entry is removed with its variable.
_of_optimizers: set[int] = set()


class LaidOutVariable(Protocol):
    """A variable, also of a framework, as the rules of layouts see it."""

    @property
    def path(self) -> str:
        """The name, which the patterns of a layout map match."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full value."""
        ...

    @property
    def trainable(self) -> bool:
        """True if optimizers update it."""
        ...


def note_of_optimizer(variable: LaidOutVariable) -> None:
    """Remembers that an optimizer keeps a variable."""
    _of_optimizers.add(id(variable))
    weakref.finalize(variable, _of_optimizers.discard, id(variable))


def is_of_optimizer(variable: LaidOutVariable) -> bool:
    """Returns True if an optimizer keeps a variable."""
    return id(variable) in _of_optimizers


@final
class VariableLayouts:
    """The layouts of one strategy's variables.

    Args:
      topology: The devices of the strategy.
      shards: The kinds of variables that are sharded over replicas, and the number of shards; None for none.
      layout_map: The user's layout map over the logical devices; None for none.

    Raises:
      InvalidArgumentError: The map names an axis that the logical devices do not have.
    """

    def __init__(self, topology: Topology, shards: StateShards | None, layout_map: LayoutMap | None = None):
        self.topology, self.shards = topology, shards
        self.mapped = None if layout_map is None else MappedLayouts(layout_map, topology)
        self._given: dict[int, Axes] = {}
        self._least_rows = _LEAST_ROWS_ON_TPU if topology.devices[0].platform == "tpu" else 1

    def on(self, topology: Topology, shards: StateShards | None) -> VariableLayouts:
        """Returns the layouts over the devices of a plan, as many for each replica."""
        layouts = VariableLayouts(topology, shards)
        layouts._given, layouts.mapped = self._given, self.mapped and self.mapped.on(topology)
        return layouts

    # --- the layouts ----------------------------------------------------------------------------------

    @property
    def has_rule(self) -> bool:
        """True if variables are sharded from the start."""
        return self.shards is not None or self.mapped is not None

    def of(self, variable: LaidOutVariable) -> NamedSharding | None:
        """Returns the layout in which a variable is stored; None if it is replicated. ``BindingTable.layout_of`` also
        knows the variables that have one value per replica.
        """
        return self._of(variable, self._logical_axes(variable))

    def layout_by_axes(self, variable: LaidOutVariable, axes: Axes) -> NamedSharding | None:
        """Returns the layout that a variable would have if the logical devices sharded it by ``axes``."""
        return self._of(variable, axes)

    def update_layout(self, variable: LaidOutVariable) -> NamedSharding | None:
        """Returns the layout in which optimizers update a variable: that of its slots."""
        return self._composed(self._logical_axes(variable), variable.shape)

    def give(self, variable: LaidOutVariable, axes: Axes) -> None:
        """Makes the logical devices shard a variable by ``axes``, whatever the layout map says."""
        if id(variable) not in self._given:
            weakref.finalize(variable, self._given.pop, id(variable), None)
        self._given[id(variable)] = axes

    def note(self, variable: LaidOutVariable) -> None:
        """Records the path of a new variable, for the messages of the layout map."""
        if self.mapped is not None and not is_of_optimizer(variable):
            self.mapped.note(variable.path)

    def check_used(self, *, is_training: bool) -> None:
        """Checks that the patterns of the layout map match variables; see ``MappedLayouts.check_used``."""
        if self.mapped is not None:
            self.mapped.check_used(is_training=is_training)

    def _of(self, variable: LaidOutVariable, axes: Axes) -> NamedSharding | None:
        is_divided = self.shards is not None and self.shards.divides(
            is_trainable=bool(variable.trainable), is_of_optimizer=is_of_optimizer(variable)
        )
        return self._composed(axes, variable.shape, is_shared=not is_divided)

    def _logical_axes(self, variable: LaidOutVariable) -> Axes:
        if id(variable) in self._given:
            return self._given[id(variable)]
        owner = model_variable_of(variable)
        if owner is None and not is_of_optimizer(variable):
            return () if self.mapped is None else self.mapped.axes_of_path(variable.path, variable.shape)
        if self.mapped is not None:
            self.mapped.note_slot(variable.path)
        return () if owner is None else self._logical_axes(owner)

    def _composed(self, axes: Axes, shape: Sequence[int], *, is_shared: bool = False) -> NamedSharding | None:
        """Returns the layout over logical devices by ``axes``, and over replicas unless these share the variable."""
        mesh, dims = self.topology.mesh, [*axes, *[()] * (len(shape) - len(axes))]
        if self.shards is not None and not is_shared:
            counts = [math.prod(mesh.shape[axis] for axis in dim) for dim in dims]
            dim = self.shards.dim_of(shape, counts, least_rows=self._least_rows)
            if dim is not None:
                dims[dim] = (*dims[dim], SHARD_AXIS)
                mesh = self.topology.mesh_of_shards(self.shards.num_shards)
        return NamedSharding(mesh, spec_of(dims)) if any(dims) else None

    # --- values in a layout ---------------------------------------------------------------------------

    def whole(self, value: jax.Array) -> jax.Array:
        """Replicates a sharded array. All processes must call it, in the same order relative to programs."""
        return self._gathering(value)

    @functools.cached_property
    def _gathering(self) -> Callable[[jax.Array], jax.Array]:
        return self.topology.compile(
            lambda value: value,
            "reading a divided variable",
            is_read=True,
            out_shardings=self.topology.replicated,
        )

    def gathered(self, layout: NamedSharding) -> NamedSharding:
        """Returns a layout without the shards over replicas: what a replica computes with."""
        return NamedSharding(self.topology.mesh, without(layout.spec, SHARD_AXIS))

    def read(self, value: jax.Array, layout: NamedSharding | None) -> jax.Array:
        """Gathers a traced array over the replicas. A large one gets a mark instead: programs in the global view gather
        it again where it is needed.
        """
        if layout is None or dim_of(layout.spec, SHARD_AXIS) is None:
            return value
        size = math.prod(value.shape) * value.dtype.itemsize
        if not is_large(size) or not isinstance(value, jax_compat.Tracer):
            return jax.lax.with_sharding_constraint(value, self.gathered(layout))
        rows = RowsInGlobalView(value.shape, layout, self.topology)
        return sharded_read_p.bind(value, spec=layout.spec, mesh=self.topology.mesh, rows=rows)

    def summed(self, gradient: jax.Array | None, layout: NamedSharding | None) -> jax.Array | None:
        """Sums a traced gradient over the replicas, then cuts it into shards. Without this the partitioner would rather
        gather the gradient's inputs.
        """
        if layout is None or gradient is None:
            return gradient
        return sharded(jax.lax.with_sharding_constraint(gradient, self.gathered(layout)), layout)

    def is_gathered_late(self, shape: Sequence[int], dtype: np.dtype, layout: NamedSharding | None) -> bool:
        """Returns True if a variable with this layout is gathered where a replica needs it, not at the start of a
        program.
        """
        size = math.prod(shape) * dtype.itemsize
        return layout is not None and dim_of(layout.spec, SHARD_AXIS) is not None and is_large(size)

    def rows_of(
        self, shape: Sequence[int], dtype: np.dtype, layout: NamedSharding | None
    ) -> RowsOfReplica | None:
        """Returns the rows of a variable with this layout, for lookups in replica programs; None if it has none."""
        is_shared = layout is None or dim_of(layout.spec, SHARD_AXIS) is None
        # A program is changed before the mesh of the logical devices is known.
        if layout is None or is_shared or self.topology.num_logical_devices > 1:
            return None
        return RowsOfReplica(shape, layout, self.topology) if jnp.issubdtype(dtype, jnp.number) else None

    def in_rows(self, value: jax.Array, layout: NamedSharding) -> jax.Array:
        """Returns a traced sharded array as [R, ...], whose row r is the shard of replica r. No data moves."""
        assert self.shards is not None
        spec, count = self.gathered(layout).spec, self.shards.num_shards
        dim = dim_of(layout.spec, SHARD_AXIS)
        assert dim is not None
        num_logical = math.prod(self.topology.mesh.shape[axis] for axis in axes_of(spec)[dim])
        before, size, after = value.shape[:dim], value.shape[dim], value.shape[dim + 1 :]
        # The logical devices shard the dim first, then the replicas.
        parts = value.reshape(*before, num_logical, count, size // num_logical // count, *after)
        rows = jnp.moveaxis(parts, dim + 1, 0).reshape(count, *before, size // count, *after)
        rows = jnp.broadcast_to(rows, (self._num_groups, *rows.shape))
        rows = rows.reshape(self._num_groups * count, *rows.shape[2:])
        row_layout = NamedSharding(self.topology.mesh, PartitionSpec(REPLICA_AXIS, *spec))
        return jax.lax.with_sharding_constraint(rows, row_layout)

    def sharded_from_row(self, shard: jax.Array, shape: Sequence[int], layout: NamedSharding) -> Sharded:
        """Returns the ``Sharded`` variable for this replica's shard, in a replica program."""
        assert self.shards is not None
        groups = None
        if self._num_groups > 1:
            numbers = range(self.topology.num_replicas)
            groups = [
                list(numbers[i : i + self.shards.num_shards]) for i in numbers[:: self.shards.num_shards]
            ]

        def gather(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
            dim = dim_of(spec, SHARD_AXIS)
            assert dim is not None
            gathered = functools.partial(
                jax.lax.all_gather, axis_name=REPLICA_AXIS, axis=dim, tiled=True, axis_index_groups=groups
            )
            return self.topology.collective_on_shards(gathered, shard, without(spec, SHARD_AXIS))

        size = math.prod(shape) * shard.dtype.itemsize
        return Sharded(shard, layout.spec, size, gather)

    @property
    def _num_groups(self) -> int:
        assert self.shards is not None
        return self.topology.num_replicas // self.shards.num_shards


def sharded(value: jax.Array, layout: NamedSharding | None) -> jax.Array:
    """Returns a traced array in a layout; unchanged without one."""
    return value if layout is None else jax.lax.with_sharding_constraint(value, layout)
