"""Value numbering: finds the values of two traces of one function that are the same computation.

Traces for different local batch sizes may contain different Python numbers (``x.shape[0]``) where dataflow alone would
say "the same on all replicas". Two values with equal numbers have the same operation, parameters and operands, down to
variables, arguments, and the bytes of constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import walked
from replicax._src.tracing.flat import Atom, Operation
from replicax._src.tracing.program import Variant
from replicax._src.tracing.replication import is_call, is_replica_collective


def number_values(jaxpr: Any, inputs: Sequence[Any]) -> dict[Any, Any]:
    """Returns a hashable for each variable of ``jaxpr``, given hashables for its inputs that include their shapes."""
    return _number(jaxpr, inputs)[1]


def number_variant(variant: Variant) -> dict[Any, Any]:
    """Returns the numbers of a variant's values, comparable between variants of one function."""
    args = variant.jaxpr.invars[len(variant.consts) + len(variant.entries) :]
    return number_values(
        variant.jaxpr,
        [
            *map(number_constant, variant.consts),
            *(("variable", id(e.binding)) for e in variant.entries),
            *(("argument", i, tuple(v.aval.shape)) for i, v in enumerate(args)),
        ],
    )


def number_of(numbers: dict[Any, Any], atom: Any) -> Any:
    """Returns the number of a variable or literal."""
    return number_constant(atom.val) if isinstance(atom, jax_compat.Literal) else numbers[atom]


def number_constant(value: Any) -> Any:
    """Returns a hashable for a constant: its bytes, or its identity if it is a tracer."""
    if isinstance(value, jax_compat.Tracer):
        return ("tracer", id(value))
    if isinstance(value, jax.Array) and jax_compat.is_typed_key(value.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return ("constant", str(array.dtype), array.shape, hash(array.tobytes()))


def number_slice(
    operations: Iterable[Operation],
    inputs: Mapping[int, Any],
    consts: Mapping[int, Any],
    wanted: Iterable[Atom],
) -> tuple[Any, ...]:
    """Returns hashables for values that operations compute: equal ones for equal computations.

    Args:
      inputs: A hashable for each input of the operations.
      consts: The value of each constant that they take.
    """
    numbers = {number: number_constant(value) for number, value in consts.items()} | dict(inputs)
    for each in operations:
        operands = tuple(number_of(numbers, atom) for atom in each.operands)
        base = hash((each.eqn.primitive.name, operands, number_params(each.eqn)))
        numbers.update((number, (base, position)) for position, number in enumerate(each.results))
    return tuple(number_of(numbers, atom) for atom in wanted)


def _number(
    jaxpr: Any, inputs: Sequence[Any], *, is_nested: bool = False
) -> tuple[list[Any], dict[Any, Any]]:
    """Returns the numbers of the results, and of all variables."""
    collectives = itertools.count()

    def number(eqn: Any, operands: list[Any]) -> list[Any]:
        if is_replica_collective(eqn) and not is_nested:
            # Replicas meet here, so their operands do not matter. In a scan or condition they do: the enclosing
            # equation is shared by all replicas and must compute the same for each.
            base: Any = ("collective", next(collectives))
        else:
            # Nested tuples would grow with the depth of the computation, so keep their hash.
            base = hash((eqn.primitive.name, tuple(operands), number_params(eqn)))
        return [(base, position, tuple(var.aval.shape)) for position, var in enumerate(eqn.outvars)]

    return walked(jaxpr, inputs, number, literal=lambda atom: number_constant(atom.val))


def number_params(eqn: Any) -> Any:
    """Returns a hashable for the parameters of an equation. It compares jaxprs by the computation."""
    if is_call(eqn):  # only the called function counts, not its rules for derivatives
        return _number_param(jax_compat.sub_jaxprs(eqn)[0])
    return tuple(sorted((name, _number_param(value)) for name, value in eqn.params.items()))


def _number_param(value: Any) -> str:
    if jax_compat.is_jaxpr(value):
        inner, consts = jax_compat.inner_jaxpr(value)
        inputs = [("input", i, tuple(v.aval.shape)) for i, v in enumerate(inner.invars)]
        opened = jax_compat.rebuild(inner, invars=[*inner.constvars, *inner.invars], keep_constvars=False)
        results, _ = _number(opened, [*map(number_constant, consts), *inputs], is_nested=True)
        return str(hash(tuple(results)))
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_number_param(v) for v in value) + ")"
    if callable(value):
        return str(id(value))
    if isinstance(value, np.ndarray):
        return str(number_constant(value))
    return repr(value)
