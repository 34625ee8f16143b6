"""Conditions as selections: both branches are computed, and one's results are taken. So a program is one list again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.program.flat import FlatProgram, read


def without_conditions(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A jaxpr (whose leading inputs are ``consts``) with its conditions resolved, those in inner functions too."""
    if "cond" not in jax_compat.primitives_of(jaxpr):
        return jaxpr, list(consts)
    avals = [var.aval for var in jaxpr.invars[len(consts) :]]
    return jax_compat.trace(lambda *args: _evaluated(jaxpr, [*consts, *args]), avals)


def _evaluated(jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    program = FlatProgram(jaxpr, consts)
    env: dict[int, Any] = dict(program.consts) | dict(zip(program.inputs, args, strict=True))
    for operation in program.operations:
        operands = [read(env, atom) for atom in operation.operands]
        if operation.eqn.primitive.name == "cond":
            results = _selected(operation.eqn, operands)
        else:
            results = jax_compat.bind_equation(operation.eqn, operands)
        env.update(zip(operation.results, results, strict=True))
    return [read(env, atom) for atom in program.outputs]


def _selected(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    index, *given = operands
    branches = [jax_compat.inner_jaxpr(branch) for branch in eqn.params["branches"]]
    results = [_evaluated(inner, given, consts) for inner, consts in branches]
    if jnp.issubdtype(index.dtype, jnp.integer):
        index = jnp.clip(index, 0, len(branches) - 1)
        if len(branches) == 2:
            index = index.astype(bool)
    return [jax.lax.select_n(index, *column) for column in zip(*results, strict=True)]
