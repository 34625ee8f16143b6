"""Traces replica functions: calls them, describes their arguments and wraps their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from replicax._src import context, jax_compat
from replicax._src.collectives.in_replica import TracedCommunicator
from replicax._src.context import ReplicaContext
from replicax._src.devices.topology import Topology
from replicax._src.errors import InvalidArgumentError, MixedStrategiesError, StructureError
from replicax._src.framework import enter_modules
from replicax._src.options import ReduceOp
from replicax._src.strategies.drift import Maker
from replicax._src.tracing import key, passes, side_effects
from replicax._src.tracing.bindings import Binding
from replicax._src.tracing.cache import Leaf
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.tracing.program import Output, ReplicaProgram
from replicax._src.values import DistributedValues, Mirrored, PerReplica, Results, per_replica_from_components

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

Observe = Callable[[int, Callable[[], Any]], Any]
"""Takes the number of a variant and the call of the function. Returns the result of the variant."""


def trace_replicas(
    strategy: Strategy,
    topology: Topology,
    fn: Callable[..., Any],
    tree: Any,
    described: Sequence[Leaf],
    *,
    binding_of: Callable[[Any], Binding],
    has_modules: bool = False,
    observe: Observe = lambda number, call: call(),
) -> tuple[ReplicaProgram, list[int] | None]:
    """Traces ``fn`` as a replica function; see ``passes.trace_replicas``.

    Args:
      tree: The structure of (args, kwargs, cells), whose leaves are ``described``.
      observe: Observes the call of the function.
    """

    def call(number: int, tracers: list[Any]) -> Any:
        remaining = iter(tracers)
        leaves = [leaf.thaw() if leaf.kind == "static" else next(remaining) for leaf in described]
        opened = jax.tree_util.tree_unflatten(tree, leaves)
        capture = current_capture()
        assert capture is not None
        replica = ReplicaContext(strategy, None, TracedCommunicator(capture, topology))
        with context.Scope(strategy), context.replica_context(strategy, replica):
            pytree, finish = enter_modules(opened, has_modules)
            args, kwargs, cells = pytree
            with attempt():
                return observe(number, lambda: finish(key.with_cells(fn, cells)(*args, **kwargs)))

    def sum_gradients(capture: Capture, values: Sequence[Any]) -> list[Any]:
        communicator = TracedCommunicator(capture, topology)
        return strategy.reduce_in_replica(communicator, ReduceOp.SUM, list(values), None) if values else []

    inputs = [leaf for leaf in described if leaf.kind != "static"]
    with side_effects.reported(fn) as attempt:
        return passes.trace_replicas(
            call, inputs, topology.num_replicas, binding_of=binding_of, sum_gradients=sum_gradients
        )


def describe_distributed(value: DistributedValues, strategy: Strategy, num_replicas: int) -> Leaf:
    """Returns the description of a per-replica or mirrored argument.

    Raises:
      MixedStrategiesError: It belongs to another strategy.
    """
    if isinstance(value, PerReplica):
        if value.is_of_whole_batch:
            raise MixedStrategiesError(
                f"strategy.run got a result of an eager run, which is of the whole batch, and {strategy!r} has {num_replicas} "
                f"replicas. If each replica should have all of it, pass strategy.replicate(value); or run this step with "
                f"options=rx.RunOptions(eager=True) too."
            )
        if value.num_replicas != num_replicas:
            raise MixedStrategiesError(
                f"strategy.run got a PerReplica of {value.num_replicas} components, and {strategy!r} has "
                f"{num_replicas} replicas: the value was made by another strategy. Mixing different "
                f"tf.distribute.Strategy objects is not possible in one call."
            )
        array = value.stored
        if value.is_equal:
            return Leaf("whole", tuple(array.shape), array.dtype)
        return Leaf("row", tuple(array.shape[1:]), array.dtype, shapes=value.shapes)
    if isinstance(value, Mirrored):
        if value.num_replicas != num_replicas:
            raise MixedStrategiesError(
                f"strategy.run got a Mirrored value over {value.num_replicas} devices, and {strategy!r} "
                f"has {num_replicas} replicas: replicate it with this strategy."
            )
        return Leaf("whole", tuple(value.stored.shape), value.stored.dtype)
    raise InvalidArgumentError(
        f"strategy.run got {value!r}, which lives only inside merge_call. Return it from merge_fn instead."
    )


def results_of(
    program: ReplicaProgram,
    topology: Topology,
    function: Any = None,
    shared: Mapping[str, tuple[int, ...]] | None = None,
    drifted: Mapping[int, str] = MappingProxyType({}),
) -> Results:
    """Converts the arrays that a program returns into the results of ``run``.

    Args:
      function: The identity of the function, for results that replace arguments of the shapes in ``shared``, by path.
      drifted: The sentences for errors about results that have drifted apart, by their position.
    """
    first = program.variants[0]
    leaves: list[tuple[bool, Any, bool, Maker | None]] = []
    index = 0
    for position, output in enumerate(first.outputs):
        if output.is_array:
            shapes = _output_shapes(program, index)
            is_equal = program.same_outputs[index]
            maker = None
            if (shared or drifted) and not is_equal:
                shape = tuple(first.jaxpr.outvars[index].aval.shape)
                replaced = frozenset(path for path, other in (shared or {}).items() if other == shape)
                note = drifted.get(index, "")
                maker = Maker(function, replaced, index, note) if replaced or note else None
            leaves.append((True, shapes, is_equal, maker))
            index += 1
        else:
            outputs = [v.outputs[position] for v in program.variants]
            leaves.append((False, _static_output(program, topology, outputs), False, None))
    return Results(topology.num_replicas, first.tree, leaves)


def _output_shapes(program: ReplicaProgram, index: int) -> tuple[tuple[int, ...], ...] | None:
    shapes = [tuple(v.jaxpr.outvars[index].aval.shape) for v in program.variants]
    if len(set(shapes)) == 1:
        return None
    assert not program.same_outputs[index], "outputs of different shapes were taken for the same"
    return tuple(shapes[v] for v in program.variant_of_replica)


def _static_output(program: ReplicaProgram, topology: Topology, outputs: Sequence[Output]) -> Any:
    values = [output.value for output in outputs]
    if all((type(v) is type(values[0]) and v is values[0]) or v == values[0] for v in values):
        return values[0]
    by_replica = [values[v] for v in program.variant_of_replica]
    if all(isinstance(v, (bool, int, float)) for v in by_replica):
        with jax_compat.outside_traces():  # rx.function may be tracing
            return per_replica_from_components(topology, by_replica)
    raise StructureError(
        f"The replica function returns {values[0]!r} on one replica and {values[1]!r} on another. Return "
        f"arrays where replicas differ."
    )
