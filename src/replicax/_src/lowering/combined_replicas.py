"""Runs a program on all replicas inside of another one, and combines some of its results over the replicas."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.collectives.in_replica import ReplicaSums
from replicax._src.devices.topology import Topology
from replicax._src.lowering.spmd import replica_body
from replicax._src.tracing.bindings import SyncPolicy
from replicax._src.tracing.program import ReplicaProgram


class Combining(enum.Enum):
    """A way to combine the values of a result on all replicas."""

    SAME = "equal on all"
    FIRST = "the first replica's"
    MEAN = "the mean, weighted by rows"
    SUM = "the sum"

    @classmethod
    def of(cls, sync_policy: SyncPolicy, *, is_same: bool) -> Combining:
        """Returns the way to combine the values that the replicas give a variable.

        Args:
          is_same: True if the value is the same on all replicas.
        """
        if is_same and sync_policy is not SyncPolicy.SUMMED:
            return cls.SAME
        return _OF_SHARING[sync_policy]


_OF_SHARING = {
    SyncPolicy.MIRRORED: Combining.SAME,
    SyncPolicy.FIRST: Combining.FIRST,
    SyncPolicy.SEED: Combining.FIRST,
    SyncPolicy.AVERAGED: Combining.MEAN,
    SyncPolicy.SUMMED: Combining.SUM,
}


def combined_replicas(
    program: ReplicaProgram,
    topology: Topology,
    rows: Sequence[int] | None,
    is_row: Sequence[bool],
    is_same: Sequence[bool],
    combining: Sequence[Combining],
) -> Callable[[Sequence[Any], Any, Sequence[Any]], tuple[list[Any], list[Any], list[Any]]]:
    """Returns a function of (values of variables, constants by variant, arguments) for the function of all replicas.

    Args:
      program: The program. Its last results are those to combine.
      rows: The numbers of rows, if replicas have different ones.
      is_row: True for each argument that is [R, ...], with one row for each replica.
      is_same: True for each of the first results that is the same on all replicas. The others become rows [R, ...].
      combining: The way to combine each of the last results.

    Returns:
      A function that returns the first results, the combined ones, and the new values of variables.
    """
    body = replica_body(program, topology, rows)
    num_results = len(is_same)

    def on_device(before: Sequence[Any], consts: Any, args: Sequence[Any]) -> Any:
        over_replicas = ReplicaSums(topology)
        state = [
            jnp.where(over_replicas.index == 0, value, jnp.zeros_like(value))
            if binding.sync_policy is SyncPolicy.SUMMED
            else value
            for binding, value in zip(program.bindings, before, strict=True)
        ]
        args = [arg[0] if row else arg for arg, row in zip(args, is_row, strict=True)]
        outs, writes, sums = body(consts, state, args)
        totals = iter(sums)
        sync_policies = [program.bindings[index].sync_policy for index in program.written]
        finals = [
            next(totals) if sync_policy is SyncPolicy.SUMMED else value
            for sync_policy, value in zip(sync_policies, writes, strict=True)
        ]
        results = [o if same else o[None] for o, same in zip(outs[:num_results], is_same, strict=True)]
        return results, _combined(outs[num_results:], combining, over_replicas, topology, rows), finals

    whole, row_of_each = topology.replicated.spec, topology.per_replica.spec
    return jax.shard_map(
        on_device,
        mesh=topology.mesh,
        in_specs=(whole, whole, [row_of_each if row else whole for row in is_row]),
        out_specs=([whole if same else row_of_each for same in is_same], whole, whole),
        check_vma=False,
    )


def _combined(
    values: Sequence[Any],
    combining: Sequence[Combining],
    over_replicas: ReplicaSums,
    topology: Topology,
    rows: Sequence[int] | None,
) -> list[Any]:
    addends = list(values)
    weight, total = _weights(over_replicas.index, topology, rows)
    for i, each in enumerate(combining):
        if each is Combining.MEAN:
            # The statistics of a replica without rows may be nan, so never compute 0 * nan.
            addends[i] = jnp.where(weight > 0, values[i] * weight.astype(values[i].dtype), 0)
    combined = list(values)
    summed = [i for i, each in enumerate(combining) if each in (Combining.SUM, Combining.MEAN)]
    for i, value in zip(summed, over_replicas.sum([addends[i] for i in summed]), strict=True):
        is_mean = combining[i] is Combining.MEAN
        combined[i] = (value / total if is_mean else value).astype(values[i].dtype)
    of_first = [i for i, each in enumerate(combining) if each is Combining.FIRST]
    for i, value in zip(of_first, over_replicas.first([values[i] for i in of_first]), strict=True):
        combined[i] = value
    return combined


def _weights(index: Any, topology: Topology, rows: Sequence[int] | None) -> tuple[Any, float]:
    """Returns the weight of this replica, and the sum of all."""
    if rows is None:
        return jnp.float32(1), float(topology.num_replicas)
    return jnp.asarray(rows, jnp.float32)[index], float(sum(rows) or 1)
