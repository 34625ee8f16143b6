"""Replication analysis: a conservative dataflow pass that finds the values of a jaxpr that all replicas share.

INVARIANT: every replica computes the value from the same inputs. REDUCED: a collective made the value the same, and
only elementwise operations and data movement followed. SHIFTED: the value is the seed of one replica. VARYING: anything
else. "The same" is a statement about the program: non-deterministic kernels may still differ in the last bit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, equations, equations_in, inner_jaxprs, walked
from replicax._src.tracing.primitives import (
    CALLS,
    COLLECTIVES,
    DIFFERS_BY_ITSELF,
    KEEPS_REDUCED,
    KEEPS_SHIFTED,
    MAKES_EQUAL,
)
from replicax._src.vocabulary.errors import DivergentCollectiveError


class Replication(enum.IntEnum):
    """The replication of a value, ordered from "the same" to "differs"."""

    REDUCED = 0
    INVARIANT = 1
    SHIFTED = 2
    VARYING = 3

    @property
    def is_same(self) -> bool:
        return self <= Replication.INVARIANT


def analyse(
    jaxpr: Any, inputs: Sequence[Replication], is_guarded: str | None = None
) -> tuple[list[Replication], dict[Any, Replication]]:
    """Returns the replication of every value of ``jaxpr``.

    Args:
      inputs: The replications of the invars.
      is_guarded: The user's line of an enclosing condition that differs between replicas.

    Returns:
      The replications of the outvars, and of all variables.

    Raises:
      DivergentCollectiveError: A collective is under a condition that differs between replicas.
    """
    same = [Replication.INVARIANT] * len(jaxpr.constvars)
    return walked(
        jaxpr,
        inputs,
        lambda eqn, given: transfer(eqn, given, is_guarded),
        same,
        lambda _: Replication.INVARIANT,
    )


def has_replica_collective(jaxpr: Any) -> bool:
    """Returns True if ``jaxpr`` contains a collective over the replicas, at any depth."""
    return any(map(is_replica_collective, equations(jaxpr)))


def meets(eqn: Any) -> bool:
    """Returns True if an equation is, or contains, a collective over the replicas."""
    return is_replica_collective(eqn) or any(map(is_replica_collective, equations_in(eqn)))


def has_backward_pass(jaxpr: Any) -> bool:
    """Returns True if ``jaxpr`` computes a gradient, at any depth."""
    return any(map(jax_compat.is_transposed, equations(jaxpr)))


def is_replica_collective(eqn: Any) -> bool:
    """Returns True if an equation itself is a collective over the replicas."""
    if eqn.primitive.name in ("replicax_accumulate", "replicax_aggregate"):
        return True
    return eqn.primitive.name in COLLECTIVES and REPLICA_AXIS in collective_axes(eqn)


def is_equalising(eqn: Any) -> bool:
    """Returns True if an equation is a collective that gives all replicas the same value."""
    return (
        eqn.primitive.name in MAKES_EQUAL
        and REPLICA_AXIS in collective_axes(eqn)
        and eqn.params.get("axis_index_groups") is None
    )


def is_movement(eqn: Any) -> bool:
    """Returns True if an equation is elementwise or only moves elements."""
    return eqn.primitive.name in KEEPS_REDUCED


def is_call(eqn: Any) -> bool:
    """Returns True if an equation calls a function: jit, checkpoint, or a function with a custom derivative."""
    return eqn.primitive.name in CALLS and bool(jax_compat.sub_jaxprs(eqn))


def is_call_with_collective(eqn: Any) -> bool:
    """Returns True if an equation calls a function that contains a collective over the replicas."""
    return is_call(eqn) and has_replica_collective(inner_jaxprs(eqn)[0])


def collective_axes(eqn: Any) -> tuple[Any, ...]:
    """Returns the names of the axes of a collective equation."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def join(replications: Sequence[Replication]) -> Replication:
    """Returns the replication of a value that an unknown operation computes from values of these replications."""
    worst = max(replications, default=Replication.INVARIANT)
    return Replication.INVARIANT if worst.is_same else Replication.VARYING


def transfer(eqn: Any, inputs: list[Replication], guarded: str | None) -> list[Replication]:
    """Returns the replications of the outputs of one equation, given those of its operands."""
    name = eqn.primitive.name
    count = len(eqn.outvars)
    if guarded is not None and name == "replicax_logical":
        raise DivergentCollectiveError(
            f"experimental_split_to_logical_devices or experimental_replicate_to_logical_devices at {jax_compat.equation_line(eqn)} "
            f"stands under a condition that differs between replicas ({guarded}): the compiler may move sharded values "
            f"between the devices of all replicas, and replicas in the other branch would not take part. Call it before the "
            f"condition, make the condition the same on all replicas, or use jnp.where."
        )
    if guarded is not None and is_replica_collective(eqn):
        raise DivergentCollectiveError(
            f"The collective at {jax_compat.equation_line(eqn)} stands under a condition that differs between "
            f"replicas ({guarded}): some replicas would reach it and wait for ever for the others. Make the "
            f"condition the same on all replicas (reduce it with all_reduce first), move the collective out of "
            f"the condition, or use jnp.where."
        )
    if name == "replicax_reduced":
        is_users = inputs[0].is_same and not jax_compat.is_differentiated(eqn)
        return [Replication.REDUCED if is_users else join(inputs)] * count
    if name == "replicax_accumulate":
        return [Replication.VARYING] * (count // 2) + [Replication.REDUCED] * (count // 2)
    if name in _SPECIAL:
        return [_SPECIAL[name](inputs)] * count
    if name in COLLECTIVES or name == "axis_index":
        return [_collective(eqn, inputs)] * count
    if name in _STRUCTURED:
        return _STRUCTURED[name](eqn, inputs, guarded)
    if is_call(eqn):
        inner, _, given = called(eqn, inputs)
        return analyse(inner, given, guarded)[0]
    # For unknown higher-order primitives, look only for operations that make replicas differ, whatever the inputs.
    if any(e.primitive.name in DIFFERS_BY_ITSELF or is_replica_collective(e) for e in equations_in(eqn)):
        return [Replication.VARYING] * count
    worst = max(inputs, default=Replication.INVARIANT)
    if worst.is_same:
        # A value that JAX's differentiation computes from reduced values is a gradient that is not reduced.
        keeps = (
            Replication.REDUCED in inputs and name in KEEPS_REDUCED and not jax_compat.is_differentiated(eqn)
        )
        return [Replication.REDUCED if keeps else Replication.INVARIANT] * count
    keeps = worst is Replication.SHIFTED and name in KEEPS_SHIFTED and inputs.count(Replication.SHIFTED) == 1
    return [Replication.SHIFTED if keeps else Replication.VARYING] * count


def _collective(eqn: Any, inputs: list[Replication]) -> Replication:
    if REPLICA_AXIS not in collective_axes(eqn):
        return join(inputs)
    if eqn.primitive.name in MAKES_EQUAL and eqn.params.get("axis_index_groups") is None:
        # JAX's differentiation inserted this collective; the user did not apply it to a gradient.
        return Replication.INVARIANT if jax_compat.is_differentiated(eqn) else Replication.REDUCED
    return Replication.VARYING


def _cond(eqn: Any, inputs: list[Replication], guarded: str | None) -> list[Replication]:
    predicate, operands = inputs[0], inputs[1:]
    if not predicate.is_same:
        guarded = f"a condition at {jax_compat.equation_line(eqn)}"
    branches = [analyse(branch, operands, guarded)[0] for branch in inner_jaxprs(eqn)]
    merged = [max(column) for column in zip(*branches, strict=True)]
    return merged if predicate.is_same else [Replication.VARYING] * len(merged)


def _scan(eqn: Any, inputs: list[Replication], guarded: str | None) -> list[Replication]:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    body, _ = jax_compat.inner_jaxpr(eqn.params["jaxpr"])
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    xs = inputs[num_consts + num_carry :]
    while True:
        outputs, _ = analyse(body, [*consts, *carry, *xs], guarded)
        grown = list(map(max, carry, outputs[:num_carry]))
        if grown == carry:
            return [*carry, *outputs[num_carry:]]
        carry = grown


def _while(eqn: Any, inputs: list[Replication], guarded: str | None) -> list[Replication]:
    num_cond, num_body = jax_compat.while_counts(eqn)
    cond, _ = jax_compat.inner_jaxpr(eqn.params["cond_jaxpr"])
    body, _ = jax_compat.inner_jaxpr(eqn.params["body_jaxpr"])
    cond_consts, body_consts = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    carry = inputs[num_cond + num_body :]
    while True:
        (predicate,), _ = analyse(cond, [*cond_consts, *carry])
        outputs, _ = analyse(body, [*body_consts, *carry])
        grown = list(map(max, carry, outputs))
        if not predicate.is_same:
            grown = [Replication.VARYING] * len(grown)
        if grown == carry:
            break
        carry = grown
    if not predicate.is_same:
        guarded = f"a loop at {jax_compat.equation_line(eqn)}"
    if guarded is not None:
        analyse(cond, [*cond_consts, *carry], guarded)
        analyse(body, [*body_consts, *carry], guarded)
    return carry


_SPECIAL: dict[str, Callable[[list[Replication]], Replication]] = {
    "replicax_assert_same": lambda inputs: Replication.INVARIANT,
    "replicax_gradient": lambda inputs: Replication.VARYING,
    "replicax_aggregate": lambda inputs: Replication.REDUCED,
    "replicax_seed_shift": lambda inputs: Replication.SHIFTED,
    "replicax_seed_unshift": lambda inputs: (
        Replication.INVARIANT if inputs[1] is Replication.SHIFTED else Replication.VARYING
    ),
    "io_callback": lambda inputs: Replication.VARYING,
}
_STRUCTURED: dict[str, Callable[[Any, list[Replication], str | None], list[Replication]]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
