"""``Strategy.lower``: lowers a step for devices that may not be here. It runs nothing and makes no array.

``run``, an ``rx.function`` or ``fit`` would run the same program. Variables and arguments are only shapes.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import numpy as np

from replicax._src.devices.ahead_of_time import topology_ahead
from replicax._src.devices.hardware import hardware_of
from replicax._src.devices.topology import Topology
from replicax._src.lowering.spmd import Launcher
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy, StrategyParts, StrategyView
from replicax._src.strategies.mistakes import check_arguments
from replicax._src.strategies.running import ReplicaRunner
from replicax._src.tracing import key
from replicax._src.tracing.arguments import as_arguments
from replicax._src.tracing.bindings import Binding
from replicax._src.values.distributed import Mirrored, PerReplica, is_value, largest_shape
from replicax._src.values.framework import frameworks_in_use
from replicax._src.variables.state_shards import StateShards
from replicax._src.vocabulary.errors import UnsupportedError
from replicax._src.vocabulary.options import RunOptions


class LowerableStrategy(AnyStrategy, Protocol):
    """A strategy that can have other devices, on which its programs are lowered."""

    @property
    def num_logical_devices(self) -> int: ...

    def shards_on(self, topology: Topology) -> StateShards | None: ...

    def view_on(self, topology: Topology, shards: StateShards | None) -> StrategyView: ...


@final
@dataclass(frozen=True)
class StepToLower:
    """A step to lower: the call that ``Strategy.lower`` takes.

    Attributes:
      fn: A replica function, an ``rx.function``, or a method of a Keras model.
      global_batch: The rows of all replicas together; None if each replica has the rows of ``args`` for one replica.
      num_replicas_here: The strategy's own number of replicas R, which the arguments are for.
    """

    fn: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: RunOptions = dataclasses.field(default_factory=RunOptions)
    global_batch: int | None = None
    num_replicas_here: int = 1

    @property
    def name(self) -> str:
        """The name of the function for messages."""
        return key.name_of(self.fn)


@final
@dataclass(frozen=True)
class NamedArray:
    """The description of a variable or an argument of a program.

    Attributes:
      role: "variable" or "argument".
      value: The shape, dtype and sharding.
      is_written: True if the program changes it.
    """

    role: str
    name: str
    value: Any
    is_written: bool = False


@final
@dataclass(frozen=True)
class StepProgram:
    """The program of a step.

    Attributes:
      compiled: The function from ``jax.jit``.
      operands: Descriptions of its operands: the variables that it writes, those that it only reads, its constants,
        then the arguments.
      arrays: The variables and arguments.
      rows: The rows of a replica's batch; None if no argument is split.
      is_split: True for a program of all replicas together, which the partitioner splits.
    """

    name: str
    compiled: Any
    operands: Sequence[Any]
    arrays: Sequence[NamedArray]
    rows: int | None
    is_split: bool = False

    def trace(self) -> jax.stages.Traced:
        """Traces the program for its operands."""
        return self.compiled.trace(*self.operands)


class LoweredAlone(abc.ABC):
    """A function that is not a replica function and provides its own program."""

    @abc.abstractmethod
    def place(self, view: StrategyView, step: StepToLower) -> StepProgram:
        """Returns the program of a call of this function on the devices of a view."""


Placer = Callable[[StrategyView, StepToLower], StepProgram]


def lower(strategy: LowerableStrategy, step: StepToLower, topology: str | None) -> jax.stages.Lowered:
    """Returns JAX's lowered program of a step; see ``Strategy.lower``."""
    check(strategy, step)
    if topology is None:
        devices = own_devices(strategy)
    else:
        devices = topology_ahead(hardware_of(topology), strategy.num_logical_devices)
    with program_on(strategy.view_on(devices, strategy.shards_on(devices)), step) as program:
        return program.trace().lower()


def check(strategy: AnyStrategy, step: StepToLower) -> None:
    """Raises for invalid calls of a step, and for strategies whose variables are not on the replicas' devices."""
    check_arguments("strategy.lower", step.fn, step.args, step.kwargs, step.options)
    if not strategy.variable_placement.is_on_replicas:
        raise UnsupportedError(
            f"{type(strategy).__name__} does not keep its variables on the replicas' devices, for which steps are lowered "
            "and planned. Use rx.MirroredStrategy for it."
        )


def own_devices(strategy: AnyStrategy) -> Topology:
    """Returns the strategy's own devices, as a topology for descriptions of arrays."""
    strategy.topology.refuse_survivors("strategy.lower, or strategy.plan, for the strategy's own devices,")
    mesh = strategy.topology.mesh
    assert isinstance(mesh, jax.sharding.Mesh)  # its devices are here
    return Topology.from_mesh(mesh, is_ahead=True)


@contextlib.contextmanager
def program_on(view: StrategyView, step: StepToLower) -> Iterator[StepProgram]:
    """Context with the program of a step on the devices of a view, which are for descriptions of arrays only.

    Trace the program inside. There the strategy has these devices, and variables without values have their future
    types.
    """
    step = dataclasses.replace(step, num_replicas_here=view.strategy.num_replicas_in_sync)
    with context.Scope(view.strategy, view=view):
        yield _placed(view, step)


def _placed(view: StrategyView, step: StepToLower) -> StepProgram:
    if isinstance(step.fn, LoweredAlone):
        return step.fn.place(view, step)
    for framework in frameworks_in_use():
        place = framework.lowering_of(step.fn)
        if place is not None:
            return place(view, step)
    return place_replica_function(view.parts, step)


def place_replica_function(parts: StrategyParts, step: StepToLower) -> StepProgram:
    """Returns the program that ``strategy.run`` would run."""
    topology, runner = parts.topology, parts.runner
    given = arguments_on(topology, step)
    assert isinstance(runner, ReplicaRunner)  # ``check`` has rejected others
    placed, arrays = runner.place(step.fn, given.args, given.kwargs, step.options)
    launcher = placed.launcher
    assert isinstance(launcher, Launcher)  # those of survivors have no single program
    operands = launcher.described(on_devices(arrays, topology))
    written, read = launcher.state_bindings
    variables = described_bindings(written, read, topology)
    return StepProgram(step.name, launcher.compiled, operands, [*variables, *given.arrays], given.rows)


# --- arguments ------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Arguments:
    """Descriptions of a step's arguments for other devices than their own.

    Attributes:
      rows: The rows of a replica's batch; None if no argument is split.
      arrays: The arguments that are on the devices, with their names.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    rows: int | None
    arrays: Sequence[NamedArray]


def arguments_on(topology: Topology, step: StepToLower) -> Arguments:
    """Describes arguments on the devices, with the same number of rows per replica or those of a global batch."""
    leaves, tree = jax.tree_util.tree_flatten((tuple(step.args), dict(step.kwargs)), is_leaf=is_value)
    leaves = as_arguments(leaves, tree)
    components = [_component(leaf) for leaf in leaves]
    have = next((shape[0] for shape, _ in filter(None, components) if shape), None)
    rows = have
    if step.global_batch is not None and have is not None:
        rows = math.ceil(step.global_batch / topology.num_replicas)
    placed = []
    for leaf, component in zip(leaves, components, strict=True):
        if component is not None:
            shape, dtype = component
            if shape and shape[0] == have:
                shape = (rows, *shape[1:])
            array = jax.ShapeDtypeStruct(
                (topology.num_replicas, *shape), dtype, sharding=topology.per_replica
            )
            placed.append(PerReplica(array, topology.num_replicas))
        elif isinstance(leaf, (Mirrored, PerReplica)):
            placed.append(Mirrored(topology.put_whole(leaf.stored), topology.num_replicas))
        else:
            placed.append(leaf)
    args, kwargs = pytree = jax.tree_util.tree_unflatten(tree, placed)
    paths, _ = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_value)
    arrays = [
        NamedArray("argument", f"args{jax.tree_util.keystr(path[1:])}", value)
        for path, leaf in paths
        if (value := _on_devices(leaf, topology)) is not None
    ]
    return Arguments(args, kwargs, rows, arrays)


def _component(leaf: Any) -> tuple[tuple[int, ...], np.dtype] | None:
    """Returns the shape and dtype of one replica's component of a split argument; None for other arguments."""
    if isinstance(leaf, PerReplica) and not leaf.is_equal:
        shapes = leaf.shapes or (leaf.component_shape(0),)
        return tuple(largest_shape(shapes)), leaf.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return tuple(leaf.shape), leaf.dtype
    return None


def _on_devices(leaf: Any, topology: Topology) -> Any:
    """Returns the description of an argument on the devices; None if it is not an array."""
    if isinstance(leaf, (PerReplica, Mirrored)):
        return leaf.stored
    return topology.put_whole(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else None


def on_devices(arrays: Sequence[Any], topology: Topology) -> list[Any]:
    """Returns descriptions of arrays for programs over the devices. Arrays without a sharding are replicated."""
    return [
        a if isinstance(a, jax.ShapeDtypeStruct) and a.sharding is not None else topology.put_whole(a)
        for a in arrays
    ]


def described_bindings(
    written: Sequence[Binding], read: Sequence[Binding], topology: Topology
) -> list[NamedArray]:
    """Returns the descriptions of a program's variables."""
    return [
        NamedArray("variable", binding.name, binding.described(topology), is_written)
        for bindings, is_written in ((written, True), (read, False))
        for binding in bindings
    ]
