"""Value numbering: which values of two traces of one function are the same computation?

Traces for different local batch sizes may hold different Python numbers (``x.shape[0]``) where the
dataflow alone says "the same on all replicas". Equal numbers mean: same operation, same parameters, same
operands, down to variables, arguments, and the bytes of constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax._src import jax_compat
from replicax._src.program.verdict import is_replica_collective


def number_outputs(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """A hashable for each output of ``jaxpr``, given hashables for its inputs."""
    counter = [0]
    return _number(jaxpr, inputs, counter)


def number_constant(value: Any) -> Any:
    """A hashable for a constant: its bytes, or its identity if it is being traced."""
    if isinstance(value, jax_compat.Tracer):
        return ("tracer", id(value))
    if isinstance(value, jax.Array) and jax_compat.is_typed_key(value.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return ("constant", str(array.dtype), array.shape, hash(array.tobytes()))


def _number(jaxpr: Any, inputs: Sequence[Any], collectives: list[int]) -> list[Any]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return number_constant(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(read(a) for a in eqn.invars)
        if is_replica_collective(eqn):
            # Replicas meet here: whatever each gave, all get the same.
            base: Any = ("collective", collectives[0])
            collectives[0] += 1
        else:
            # Nested tuples would grow with the depth of the computation: keep their hash.
            base = hash((eqn.primitive.name, operands, _number_params(eqn)))
        for position, var in enumerate(eqn.outvars):
            env[var] = (base, position)
    return [read(a) for a in jaxpr.outvars]


def _number_params(eqn: Any) -> Any:
    return tuple(sorted((name, _number_param(value)) for name, value in eqn.params.items()))


def _number_param(value: Any) -> str:
    if jax_compat.is_jaxpr(value):
        inner, consts = jax_compat.inner_jaxpr(value)
        inputs = [("input", i) for i in range(len(inner.invars))]
        closed = dict(zip(inner.constvars, map(number_constant, consts), strict=False))
        return str(hash(tuple(_number_with(inner, inputs, closed))))
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_number_param(v) for v in value) + ")"
    if callable(value):
        return str(id(value))
    return repr(value)


def _number_with(jaxpr: Any, inputs: Sequence[Any], constants: dict[Any, Any]) -> list[Any]:
    opened = jax_compat.rebuild(jaxpr, invars=[*jaxpr.constvars, *jaxpr.invars], keep_constvars=False)
    return _number(opened, [*constants.values(), *inputs], [0])
