"""Turns conditions into selections: computes both branches and selects one result, so that a program is one list."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from replicax._src import jax_compat
from replicax._src.tracing import flat
from replicax._src.tracing.equations import equations_in, has_any
from replicax._src.tracing.flat import FlatProgram
from replicax._src.tracing.markers import read_p


def without_conditions(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns a jaxpr, whose leading inputs are ``consts``, without conditions. Conditions in inner functions go
    too.
    """
    if not has_any(jaxpr, ("cond",)):
        return jaxpr, list(consts)
    program = FlatProgram(jaxpr, is_selected=lambda eqn: True)

    def evaluated(*args: Any) -> list[Any]:
        env = dict(program.consts) | dict(zip(program.inputs, [*consts, *args], strict=True))
        flat.run(program.operations, env)
        return [flat.read(env, atom) for atom in program.outputs]

    return jax_compat.trace(evaluated, [var.aval for var in jaxpr.invars[len(consts) :]])


def reads_in(eqn: Any, numbers: Collection[int]) -> bool:
    """Returns True if an inner function of an operation reads one of the variables with these numbers."""
    return any(inner.primitive is read_p and inner.params["number"] in numbers for inner in equations_in(eqn))
