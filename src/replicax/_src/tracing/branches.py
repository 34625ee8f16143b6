"""Conditions as selections: both branches are computed, and one's results are taken. So a program is one list again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from replicax._src import jax_compat
from replicax._src.tracing import flat
from replicax._src.tracing.equations import equations_in, has_any
from replicax._src.tracing.flat import FlatProgram
from replicax._src.tracing.markers import read_p


def without_conditions(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns a jaxpr (whose leading inputs are ``consts``) with its conditions resolved, those in inner functions too.
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
    """Returns True if one of the reads of variables with these numbers is in an inner function of an operation."""
    return any(inner.primitive is read_p and inner.params["number"] in numbers for inner in equations_in(eqn))
