"""Uneven batches with sharded variables: places the gathers if replicas have different shapes.

A gather needs all replicas, so it may not be in a branch that only some of them take. It becomes a cut between
branches, like any collective (``uneven.py``): each replica computes up to the equation that needs the variable, all
gather it, and each continues. Gathers in a loop cannot be cut out of it. Replicas that would gather different values
(other variables, or multiples of one by their number of rows) must not meet. In these cases each replica evaluates all
variants with their gathers, and takes the results of its own. This would call Python callbacks for all variants, so
programs with callbacks gather at their start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.uneven import UnevenEvaluator
from replicax._src.tracing.equations import inner_jaxprs, walked
from replicax._src.tracing.gathers import Sharded, evaluate_gathering
from replicax._src.tracing.program import ReplicaProgram, Variant, shows_how_often
from replicax._src.tracing.replication import has_replica_collective, meets
from replicax._src.tracing.value_numbering import number_constant, number_params
from replicax._src.vocabulary.errors import StructureError


def evaluate_uneven_gathering(
    program: ReplicaProgram,
    consts: Sequence[Sequence[Any]],
    state: Sequence[Sequence[Any]],
    args: Sequence[Any],
    *,
    evaluates_all: bool,
) -> tuple[list[Any], list[Any]]:
    """Returns the results of ``UnevenEvaluator`` for state that is partly ``Sharded``. Call it inside ``shard_map``.

    Args:
      evaluates_all: See ``UnevenEvaluator``. No gather is then in a branch, so none is cut out of one.
    """
    cut = None if evaluates_all else _cut_at_gathers(program, state)
    if cut is None and any(shows_how_often(variant.jaxpr) for variant in program.variants):
        shards = {id(value): value for values in state for value in values if isinstance(value, Sharded)}
        whole = {key: value.whole() for key, value in shards.items()}
        gathered = [[whole.get(id(value), value) for value in values] for values in state]
        return UnevenEvaluator(program, evaluates_all)(consts, gathered, args)
    if cut is None:
        divided = {
            id(entry.binding)
            for variant, values in zip(program.variants, state, strict=True)
            for entry, value in zip(variant.entries, values, strict=True)
            if isinstance(value, Sharded)
        }
        return UnevenEvaluator(program, divided=divided)(consts, state, args)
    evaluate, more = cut
    return evaluate(
        [[*new, *own] for new, own in zip(more, consts, strict=True)],
        [list(map(_sharded, values)) for values in state],
        args,
    )


def _cut_at_gathers(
    program: ReplicaProgram, state: Sequence[Sequence[Any]]
) -> tuple[UnevenEvaluator, list[list[Any]]] | None:
    """Returns the program of shards, with gathers between branches, and its further constants; None if the gathers
    cannot be there.
    """
    num_replicas = len(program.variant_of_replica)
    variants = [
        _with_gathers(variant, values, num_replicas)
        for variant, values in zip(program.variants, state, strict=True)
    ]
    for before, after in zip(program.variants, variants, strict=True):
        if _num_in_loops(after) > _num_in_loops(before):
            return None
    given = [_shards_given(*each) for each in zip(variants, state, strict=True)]
    if any(other != given[0] for other in given[1:]):
        return None
    try:
        evaluate = UnevenEvaluator(ReplicaProgram(variants, program.variant_of_replica))
    except StructureError:  # the variants gather a different number of times, or different shapes
        return None
    more = [
        len(after.consts) - len(before.consts)
        for before, after in zip(program.variants, variants, strict=True)
    ]
    return evaluate, [variant.consts[:count] for variant, count in zip(variants, more, strict=True)]


def _with_gathers(variant: Variant, values: Sequence[Any], num_replicas: int) -> Variant:
    """Returns the variant of one replica's shards, with gathers among its equations."""
    first = len(variant.consts)
    divided = {first + i: value for i, value in enumerate(values) if isinstance(value, Sharded)}

    def evaluated(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        given = [
            dataclasses.replace(divided[i], shards=array) if i in divided else array
            for i, array in enumerate(arrays)
        ]
        return evaluate_gathering(jaxpr, given, recomputes_gathers=False)

    avals = [
        jax_compat.abstractify(divided[i].shards) if i in divided else var.aval
        for i, var in enumerate(variant.jaxpr.invars)
    ]
    return variant.retraced(evaluated, [(REPLICA_AXIS, num_replicas)], avals)


def _shards_given(variant: Variant, values: Sequence[Any]) -> list[list[Any]]:
    """Returns a key for the shards in each operand of each collective, comparable between variants; None without
    shards.

    Shapes are not enough: shards of two variables may have equal shapes, and so does a shard that was divided by the
    number of rows.
    """
    given: list[list[Any]] = []

    def known(eqn: Any, operands: list[Any]) -> list[Any]:
        """Returns the value numbers of results that come from shards and constants; None for all others."""
        shards = [operand if isinstance(operand, _OfShards) else None for operand in operands]
        if meets(eqn):
            given.append(shards)
        elif eqn.primitive.name == "optimization_barrier":  # it ties gathers to values that differ
            return shards
        elif any(shards):
            base: Any = object()  # equal to no other key
            if None not in operands:
                base = hash((eqn.primitive.name, tuple(operands), number_params(eqn)))
            return [_OfShards((base, i)) for i in range(len(eqn.outvars))]
        return [None] * len(eqn.outvars)

    state = [
        _OfShards(("variable", id(entry.binding))) if isinstance(value, Sharded) else None
        for entry, value in zip(variant.entries, values, strict=True)
    ]
    inputs = [*map(number_constant, variant.consts), *state]
    others = [None] * (len(variant.jaxpr.invars) - len(inputs))
    walked(variant.jaxpr, [*inputs, *others], known, literal=lambda atom: number_constant(atom.val))
    return given


class _OfShards(tuple):
    """The value number of a value that is computed from shards, and perhaps constants."""


def _num_in_loops(variant: Variant) -> int:
    """Returns the number of equations that contain collectives."""
    return sum(any(map(has_replica_collective, inner_jaxprs(eqn))) for eqn in variant.jaxpr.eqns)


def _sharded(value: Any) -> Any:
    return value.shards if isinstance(value, Sharded) else value
