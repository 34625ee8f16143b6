"""Uneven batches with variables that replicas divide: where these are gathered when replicas have different shapes.

A gather needs all replicas, so it may not stand in a branch that only some of them take. It becomes a cut between branches, as any
collective is (``uneven.py``): each replica computes up to the equation that needs the variable, all gather it, each goes on. Gathers
in a loop cannot be cut out of it: there each replica evaluates all variants, gathers among them, and takes its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax._src import jax_compat
from replicax._src.errors import StructureError
from replicax._src.placement.uneven import UnevenEvaluator
from replicax._src.program.gathers import Divided, evaluate_gathering
from replicax._src.program.program import ReplicaProgram, Variant
from replicax._src.program.verdict import has_replica_collective
from replicax._src.topology import REPLICA_AXIS


def evaluate_uneven_gathering(
    program: ReplicaProgram,
    consts: Sequence[Sequence[Any]],
    state: Sequence[Sequence[Any]],
    args: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """What ``UnevenEvaluator`` gives, where some of the state is ``Divided``. Inside ``shard_map``."""
    cut = _cut_at_gathers(program, state)
    if cut is None:
        divided = {
            id(entry.slot)
            for variant, values in zip(program.variants, state, strict=True)
            for entry, value in zip(variant.entries, values, strict=True)
            if isinstance(value, Divided)
        }
        return UnevenEvaluator(program, divided=divided)(consts, state, args)
    evaluate, more = cut
    return evaluate(
        [[*new, *own] for new, own in zip(more, consts, strict=True)],
        [list(map(_in_pieces, values)) for values in state],
        args,
    )


def _cut_at_gathers(
    program: ReplicaProgram, state: Sequence[Sequence[Any]]
) -> tuple[UnevenEvaluator, list[list[Any]]] | None:
    """The program of pieces, with gathers between branches, and its further constants; None where these cannot stand there."""
    num_replicas = len(program.variant_of_replica)
    variants = [
        _with_gathers(variant, values, num_replicas)
        for variant, values in zip(program.variants, state, strict=True)
    ]
    for before, after in zip(program.variants, variants, strict=True):
        if _num_in_loops(after) > _num_in_loops(before):
            return None
    try:
        evaluate = UnevenEvaluator(ReplicaProgram(variants, program.variant_of_replica))
    except StructureError:  # variants gather other variables, or in another order
        return None
    more = [
        len(after.consts) - len(before.consts)
        for before, after in zip(program.variants, variants, strict=True)
    ]
    return evaluate, [variant.consts[:count] for variant, count in zip(variants, more, strict=True)]


def _with_gathers(variant: Variant, values: Sequence[Any], num_replicas: int) -> Variant:
    """The variant of one replica's pieces, with gathers among its equations."""
    first = len(variant.consts)
    divided = {first + i: value for i, value in enumerate(values) if isinstance(value, Divided)}

    def evaluated(*arrays: Any) -> list[Any]:
        given = [
            dataclasses.replace(divided[i], pieces=array) if i in divided else array
            for i, array in enumerate(arrays)
        ]
        return evaluate_gathering(variant.jaxpr, given, recomputes_gathers=False)

    avals = [
        jax_compat.abstractify(divided[i].pieces) if i in divided else var.aval
        for i, var in enumerate(variant.jaxpr.invars)
    ]
    jaxpr, consts = jax_compat.trace(evaluated, avals, [(REPLICA_AXIS, num_replicas)])
    return variant.with_jaxpr(jaxpr, consts)


def _num_in_loops(variant: Variant) -> int:
    """How many equations have collectives inside."""
    subs = [list(map(jax_compat.inner_jaxpr, jax_compat.sub_jaxprs(eqn))) for eqn in variant.jaxpr.eqns]
    return sum(any(has_replica_collective(inner) is not None for inner, _ in inners) for inners in subs)


def _in_pieces(value: Any) -> Any:
    return value.pieces if isinstance(value, Divided) else value
