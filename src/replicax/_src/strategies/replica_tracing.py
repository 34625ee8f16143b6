"""Traces replica functions: calls them, describes their arguments and wraps their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from replicax._src.collectives.in_replica import TracedCommunicator
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.scope.context import ReplicaContext
from replicax._src.tracing import key, passes
from replicax._src.tracing.arguments import Call
from replicax._src.tracing.bindings import Binding
from replicax._src.tracing.cache import ArgumentLeaf
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.tracing.program import Output, ReplicaProgram
from replicax._src.user.listening import listener
from replicax._src.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    Results,
    per_replica_from_components,
)
from replicax._src.values.framework import enter_modules
from replicax._src.vocabulary.errors import InvalidArgumentError, MixedStrategiesError, StructureError
from replicax._src.vocabulary.options import ReduceOp

Observe = Callable[[int, Callable[[], Any]], Any]
"""Takes the number of a variant and the call of the function. Returns the result of the variant."""


def trace_replicas(
    strategy: AnyStrategy,
    topology: Topology,
    fn: Callable[..., Any],
    tree: Any,
    described: Sequence[ArgumentLeaf],
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

    def call(number: int, tracers: list[jax.Array]) -> Any:
        remaining = iter(tracers)
        leaves = [leaf.thaw() if leaf.kind == "static" else next(remaining) for leaf in described]
        opened = jax.tree_util.tree_unflatten(tree, leaves)
        capture = current_capture()
        assert capture is not None
        replica = ReplicaContext(strategy, None, TracedCommunicator(capture, topology))
        with context.Scope(strategy), context.replica_context(strategy, replica):
            pytree, finish = enter_modules(opened, has_modules)
            args, kwargs, cells = pytree
            return observe(number, lambda: finish(key.with_cells(fn, cells)(*args, **kwargs)))

    def sum_gradients(capture: Capture, values: Sequence[jax.Array]) -> list[jax.Array]:
        communicator = TracedCommunicator(capture, topology)
        return strategy.reduce_in_replica(communicator, ReduceOp.SUM, list(values), None) if values else []

    inputs = [leaf for leaf in described if leaf.kind != "static"]
    with listener().tracing(fn):
        return passes.trace_replicas(
            call,
            inputs,
            topology.num_replicas,
            binding_of=binding_of,
            sum_gradients=sum_gradients,
            is_for_plan=topology.is_ahead,
        )


@final
@dataclass(frozen=True)
class ReplicaCall:
    """A replica function, traced with values of the function that calls it.

    Attributes:
      call: The call, which has the arguments of the program.
      program: The program of the function.
      topology: The devices of the replicas.
      rows: The numbers of rows, if replicas have different ones.
    """

    call: Call
    program: ReplicaProgram
    topology: Topology
    rows: Sequence[int] | None

    @classmethod
    def traced(cls, strategy: AnyStrategy, topology: Topology, call: Call, observe: Observe) -> ReplicaCall:
        """Describes and traces a call.

        Args:
          topology: The devices of the replicas.
          observe: Observes the calls of the function.

        Raises:
          MixedStrategiesError: An argument belongs to another strategy.
          NarrowingError: A number of the closure does not fit into the dtype of its array.
        """
        known = [
            (describe_distributed(leaf, strategy, topology.num_replicas), leaf.stored)
            if isinstance(leaf, (PerReplica, Mirrored))
            else None
            for leaf in call.leaves
        ]
        call.describe(None, known)
        program, rows = trace_replicas(
            strategy,
            topology,
            call.fn,
            call.tree,
            call.described,
            binding_of=strategy.bindings.binding_of,
            observe=observe,
        )
        call.closure_check([variant.jaxpr for variant in program.variants])(call.leaves)
        return cls(call, program, topology, rows)

    @property
    def is_row(self) -> list[bool]:
        """True for each argument that is [R, ...], with one row for each replica."""
        return [leaf.kind == "row" for leaf in self.call.inputs]

    def results(self, program: ReplicaProgram) -> Results:
        """Returns the converter of the arrays that a program with the function's result returns."""
        return results_of(program, self.topology)


def describe_distributed(value: DistributedValues, strategy: AnyStrategy, num_replicas: int) -> ArgumentLeaf:
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
            return ArgumentLeaf("whole", tuple(array.shape), array.dtype)
        return ArgumentLeaf("row", tuple(array.shape[1:]), array.dtype, shapes=value.shapes)
    if isinstance(value, Mirrored):
        if value.num_replicas != num_replicas:
            raise MixedStrategiesError(
                f"strategy.run got a Mirrored value over {value.num_replicas} devices, and {strategy!r} "
                f"has {num_replicas} replicas: replicate it with this strategy."
            )
        return ArgumentLeaf("whole", tuple(value.stored.shape), value.stored.dtype)
    raise InvalidArgumentError(
        f"strategy.run got {value!r}, which lives only inside merge_call. Return it from merge_fn instead."
    )


def results_of(
    program: ReplicaProgram,
    topology: Topology,
    maker_of: Callable[[int, tuple[int, ...]], Any] = lambda index, shape: None,
) -> Results:
    """Converts the arrays that a program returns into the results of ``run``.

    Args:
      maker_of: See ``ResultWatch.maker_of``.
    """
    first = program.variants[0]
    leaves: list[tuple[bool, Any, bool, Any]] = []
    index = 0
    for position, output in enumerate(first.outputs):
        if output.is_array:
            shapes = _output_shapes(program, index)
            is_equal = program.same_outputs[index]
            # Equal values cannot drift apart.
            maker = None if is_equal else maker_of(index, tuple(first.jaxpr.outvars[index].aval.shape))
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
