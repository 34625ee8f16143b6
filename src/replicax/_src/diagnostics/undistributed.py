"""Warns of a batch that was not distributed: every replica computes all of its rows."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import Any

from replicax._src.functions.nn import AVERAGE_LOSS
from replicax._src.input.pipeline import is_of_dataset
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.cache import ArgumentLeaf
from replicax._src.tracing.equations import called, equations, inner_jaxprs, walked
from replicax._src.tracing.program import ReplicaProgram
from replicax._src.tracing.replication import Replication, is_call, join, transfer
from replicax._src.user.user_code import user_line

log = logging.getLogger("replicax")
_warned: set[tuple[str, str]] = set()
_MAX_SHOWN = 3


def warn_of_whole_batch(
    name: str,
    program: ReplicaProgram,
    paths: Sequence[str],
    described: Sequence[ArgumentLeaf],
    leaves: Sequence[Any],
) -> None:
    """Warns, once for each function and line, if a batch is the same on all replicas.

    That is certain only if no argument differs between replicas, the function does not ask for its replica's number,
    and one of these holds. A dataset of ``rx.data`` yielded the array. Or ``rx.nn.compute_average_loss`` takes the
    mean over as many losses as the array has rows, and no variable that differs between replicas enters
    these losses. Parameters, scalars and random keys are therefore no batches.

    Args:
      name: The name of the function.
      paths, described, leaves: The names of the arguments, their descriptions, and the arguments.
    """
    if len(program.variant_of_replica) == 1 or any(leaf.kind == "row" for leaf in described):
        return
    variant = program.variants[0]
    names = collections.Counter(eqn.primitive.name for eqn in equations(variant.jaxpr))
    if names["axis_index"] > names["replicax_seed_shift"] + names["replicax_seed_unshift"]:
        return  # the function may take rows of its own by the number of its replica
    sizes = _averaged_sizes(variant.jaxpr, variant.input_replications)
    found = [
        path
        for path, leaf, value in zip(paths, described, leaves, strict=True)
        if leaf.kind == "whole" and leaf.shape and (leaf.shape[0] in sizes or is_of_dataset(value))
    ]
    line = user_line()
    if not found or (name, line) in _warned:
        return
    _warned.add((name, line))
    shapes = [leaf.shape for path, leaf in zip(paths, described, strict=True) if path in found]
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    log.warning(
        "%s, run at %s: the batch (%s%s) was not distributed, so each of the %d replicas computes all of its rows. Iterate the "
        "distributed dataset: for batch in strategy.experimental_distribute_dataset(dataset). For arrays of one batch: "
        "(batch,) = strategy.experimental_distribute_dataset([batch]).%s",
        name,
        line,
        ", ".join(found[:_MAX_SHOWN]),
        more,
        len(program.variant_of_replica),
        _on_axis_of_devices(shapes, len(program.variant_of_replica)),
    )


def _on_axis_of_devices(shapes: Sequence[tuple[int, ...]], num_replicas: int) -> str:
    """Returns what to do if the first axis of the batch has one entry for each device, as ``jax.pmap`` wants it."""
    if any(len(shape) < 2 or shape[0] != num_replicas or shape[:2] != shapes[0][:2] for shape in shapes):
        return ""
    return (
        f" If the first axis of {num_replicas} is of devices, as for jax.pmap, first make the batch [global batch, ...], here of "
        f"{num_replicas * shapes[0][1]} rows: x.reshape(-1, *x.shape[2:])."
    )


def _averaged_sizes(jaxpr: Any, inputs: Sequence[Replication]) -> set[int]:
    """Returns the numbers of losses, two or more, over which ``rx.nn.compute_average_loss`` takes a mean.

    Losses that differ between replicas do not count, unless only random numbers make them differ, as in dropout.
    """
    sizes: set[int] = set()

    def run(jaxpr: Any, inputs: Sequence[Replication], is_caller_average: bool) -> list[Replication]:
        def rule(eqn: Any, operands: list[Replication]) -> list[Replication]:
            is_average = is_caller_average or AVERAGE_LOSS in str(eqn.source_info.name_stack)
            if is_call(eqn):
                inner, _, given = called(eqn, operands)
                return run(inner, given, is_average)
            for inner in inner_jaxprs(eqn):
                run(inner, [join(operands)] * len(inner.invars), is_average)
            if is_average and eqn.primitive.name == "reduce_sum" and not jax_compat.is_transposed(eqn):
                shape = eqn.invars[0].aval.shape
                if operands[0].is_same and shape and shape[0] > 1:
                    sizes.add(shape[0])
            if eqn.primitive.name == "replicax_seed_shift":
                return [Replication.INVARIANT]
            return transfer(eqn, operands, None)

        consts = [Replication.INVARIANT] * len(jaxpr.constvars)
        return walked(jaxpr, inputs, rule, consts, lambda atom: Replication.INVARIANT)[0]

    run(jaxpr, inputs, False)
    return sizes
