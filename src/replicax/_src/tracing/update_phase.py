"""Splits off the updates of a replica program: its end, which computes from values that all replicas share.

After gradients are summed, every replica computes the same new values of an optimizer. This part can be evaluated once,
on global arrays with any sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import Binding
from replicax._src.tracing.capture import Entry
from replicax._src.tracing.equations import is_variable, leading_to, variables
from replicax._src.tracing.primitives import UNPACKS
from replicax._src.tracing.program import Output, ReplicaProgram, Variant
from replicax._src.tracing.replication import Replication, analyse, meets


@dataclass(frozen=True)
class Updates:
    """The updates at the end of a program.

    Attributes:
      jaxpr: Maps the values of ``read`` and the arrays from the replicas to the values of ``written``.
      read, written: The variables.
      num_handed: The number of arrays from the replicas, which are the last results of the program before it.
    """

    jaxpr: Any
    read: list[Binding]
    written: list[Binding]
    num_handed: int


def cut_before_updates(program: ReplicaProgram) -> tuple[ReplicaProgram, Updates] | None:
    """Returns the program without its updates, and the updates.

    Returns None if the program has no updates, or variants have different ones.
    """
    differing = [
        program.bindings[i] for i, same in zip(program.written, program.same_writes, strict=True) if not same
    ]
    halves = [_cut(variant, set(map(id, differing))) for variant in program.variants]
    first = halves[0][1]
    if not first.written:
        return None
    for _, other in halves[1:]:
        is_alike = other.read == first.read and other.written == first.written
        if not is_alike or str(other.jaxpr) != str(first.jaxpr):
            return None
    return ReplicaProgram([variant for variant, _ in halves], program.variant_of_replica), first


def _cut(variant: Variant, differing: set[int]) -> tuple[Variant, Updates]:
    """Cuts one variant.

    Args:
      differing: The ids of bindings whose assigned values may differ between replicas.
    """
    jaxpr, num_consts, num_arrays = variant.jaxpr, len(variant.consts), variant.num_arrays
    _, replications = analyse(jaxpr, variant.input_replications)
    writes = list(zip(variant.written, jaxpr.outvars[num_arrays:], strict=True))
    of_replicas = [
        var
        for entry, var in writes
        if entry.binding.sync_policy.is_per_replica or id(entry.binding) in differing
    ]
    # Equations that the results do not need may differ between shapes.
    live = leading_to(jaxpr.eqns, jaxpr.outvars, keeps_effects=True)
    ending = _ending(live, replications, variables([*jaxpr.outvars[:num_arrays], *of_replicas]))
    state = jaxpr.invars[num_consts : num_consts + len(variant.entries)]
    ending = _without_unpacking(ending, set(state))
    made = {var for eqn in ending for var in eqn.outvars}
    bindings = {var: entry.binding for var, entry in zip(state, variant.entries, strict=True)}

    used = dict.fromkeys(a for eqn in ending for a in variables(eqn.invars) if a not in made)
    read = [var for var in used if var in bindings]
    handed = [var for var in used if var not in bindings]
    late = [(entry, var) for entry, var in writes if is_variable(var) and var in made]
    early = [(entry, var) for entry, var in writes if not (is_variable(var) and var in made)]
    updates = Updates(
        jax_compat.rebuild(jaxpr, invars=[*read, *handed], outvars=[var for _, var in late], eqns=ending),
        [bindings[var] for var in read],
        [entry.binding for entry, _ in late],
        len(handed),
    )

    in_ending = set(map(id, ending))
    eqns = [eqn for eqn in live if id(eqn) not in in_ending]
    outvars = [*jaxpr.outvars[:num_arrays], *handed, *(var for _, var in early)]
    needed = {a for eqn in eqns for a in variables(eqn.invars)} | set(variables(outvars))
    kept = _kept_entries(variant, state, needed, {id(entry) for entry, _ in early})
    invars = [
        *jaxpr.invars[:num_consts],
        *(state[i] for i, _ in kept),
        *jaxpr.invars[num_consts + len(state) :],
    ]
    replication_of = dict(zip(map(id, variant.written), variant.write_replications, strict=True))
    return (
        dataclasses.replace(
            variant,
            jaxpr=jax_compat.rebuild(jaxpr, invars=invars, outvars=outvars, eqns=eqns),
            entries=[entry for _, entry in kept],
            outputs=[*variant.outputs, *[Output(True)] * len(handed)],
            out_replications=[*variant.out_replications, *[Replication.INVARIANT] * len(handed)],
            write_replications=[replication_of[id(entry)] for entry, _ in early],
            input_replications=[replications[var] for var in invars],
        ),
        updates,
    )


def _ending(eqns: Sequence[Any], replications: dict[Any, Replication], results: Sequence[Any]) -> list[Any]:
    """Returns the equations whose operands are the same on all replicas and whose results go only to such equations or
    variables.

    Args:
      results: The results that the program before them must return.
    """
    needed, ending = set(results), []
    for eqn in reversed(eqns):
        operands = variables(eqn.invars)
        are_same = all(replications[a].is_same for a in operands)
        is_late = are_same and needed.isdisjoint(eqn.outvars) and not eqn.effects and not meets(eqn)
        if is_late:
            ending.append(eqn)
        else:
            needed.update(operands)
    return ending[::-1]


def _without_unpacking(ending: Sequence[Any], state: set[Any]) -> list[Any]:
    """Removes equations that only unpack summed arrays from a buffer. Otherwise the buffer would have to move again."""
    rest: list[Any] = []
    made: set[Any] = set()
    for eqn in ending:
        if eqn.primitive.name in UNPACKS and (made | state).isdisjoint(variables(eqn.invars)):
            continue
        rest.append(eqn)
        made.update(eqn.outvars)
    return rest


def _kept_entries(
    variant: Variant, state: Sequence[Any], needed: set[Any], early: set[int]
) -> list[tuple[int, Entry]]:
    """Returns the entries that the program without its updates reads or writes, with their positions."""
    kept = []
    for i, entry in enumerate(variant.entries):
        if state[i] in needed or id(entry) in early:
            copy = Entry(entry.binding, entry.index, entry.current)
            copy.written, copy.line = id(entry) in early, entry.line
            kept.append((i, copy))
    return kept
