"""Combines sums over replicas that do not depend on each other.

Between processes each separately summed array costs a round trip, even after XLA's optimizations. So the gradients,
metrics and statistics of a step travel in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax._src.collectives.in_replica import Packing, packed_sum
from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import variables
from replicax._src.tracing.flat import FlatProgram, NumberedValues, Operation
from replicax._src.tracing.primitives import SUMS
from replicax._src.tracing.replication import collective_axes, is_call_with_collective


def in_rounds(function: Callable[..., Any], packing: Packing | None) -> Callable[..., Any]:
    """Returns a replica function equivalent to ``function``, with as few rounds of sums over the replicas as possible.

    A function with effects is returned unchanged, because their order matters.
    """

    def joined(*args: Any) -> Any:
        flat, tree = jax.tree_util.tree_flatten(args)
        closed, shape = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)), return_shape=True)(
            *flat
        )
        if jax_compat.has_side_effects(closed):
            return function(*args)
        # Other calls keep their own derivatives.
        program = FlatProgram(closed.jaxpr, closed.consts, is_call_with_collective)
        results = _evaluate(program, flat, packing)
        return jax.tree_util.tree_structure(shape).unflatten(results)

    return joined


def _evaluate(program: FlatProgram, args: Sequence[Any], packing: Packing | None) -> list[Any]:
    values = NumberedValues(program.consts | dict(zip(program.inputs, args, strict=True)))
    for operations, sums in _rounds(program):
        values.run(operations)
        numbers = [number for operation in sums for number in operation.results]
        operands = values.of(atom for operation in sums for atom in operation.operands)
        with jax.named_scope("sum_together"):
            values.update(zip(numbers, packed_sum(operands, packing), strict=True))
    return values.of(program.outputs)


def _rounds(program: FlatProgram) -> list[tuple[list[Operation], list[Operation]]]:
    """Returns, for each round, the operations that depend only on sums of earlier rounds, and the sums of the round."""
    ready = dict.fromkeys([*program.inputs, *program.consts], 0)
    rounds: list[tuple[list[Operation], list[Operation]]] = [([], [])]
    for operation in program.operations:
        number = max((ready[atom] for atom in variables(operation.operands)), default=0)
        is_sum = _is_sum(operation.eqn)
        rounds[number][is_sum].append(operation)
        ready.update(dict.fromkeys(operation.results, number + is_sum))
        if is_sum and number + 1 == len(rounds):
            rounds.append(([], []))
    return rounds


def _is_sum(eqn: Any) -> bool:
    is_over_replicas = eqn.primitive.name in SUMS and collective_axes(eqn) == (REPLICA_AXIS,)
    return is_over_replicas and eqn.params.get("axis_index_groups") is None
