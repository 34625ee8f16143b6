"""Scatters of rows that do not divide over the replicas, where several devices have the same rows.

XLA pads such rows to as many on each device. Where a scatter takes them, such as the gradient of an embedding, it forgets to leave
out the padding if each row is on several devices, as on the logical devices of a replica: a silent wrong sum (jax 0.10, seen on CPU;
right where each row is on one). Whole updates have no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax._src import jax_compat


def has_scatter(jaxpr: Any) -> bool:
    """Whether a program has one, at any depth."""
    return any(map(_is_scatter, jax_compat.primitives_of(jaxpr)))


def _is_scatter(name: str) -> bool:
    return name.startswith("scatter")


def evaluate(jaxpr: Any, args: Sequence[Any], whole: Any) -> list[Any]:
    """Evaluates a jaxpr without constvars, the updates of whose scatters are whole on each device.

    Args:
      whole: The sharding of an array that every device holds whole.
    """
    values = dict(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_compat.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands, params = [value_of(atom) for atom in eqn.invars], None
        if _is_scatter(eqn.primitive.name):
            operand, indices, updates = operands
            operands = [operand, indices, jax.lax.with_sharding_constraint(updates, whole)]
        elif any(has_scatter(jax_compat.inner_jaxpr(inner)[0]) for inner in jax_compat.sub_jaxprs(eqn)):
            params = {name: _changed(param, whole) for name, param in eqn.params.items()}
        values.update(zip(eqn.outvars, jax_compat.bind_equation(eqn, operands, params), strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _changed(param: Any, whole: Any) -> Any:
    """A parameter of an equation with the same done to the functions in it."""
    if isinstance(param, (tuple, list)) and any(map(jax_compat.is_jaxpr, param)):
        return type(param)(_changed(each, whole) for each in param)
    if not jax_compat.is_jaxpr(param):
        return param
    return jax_compat.retraced(param, lambda inner, args: evaluate(inner, args, whole))
