"""A traced optimizer update: one list of operations, and the slice of it that each variable needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.variable_changes import OptimizerCall, Shapes
from replicax._src.program_kit.traced_programs import (
    Atom,
    FlatProgram,
    NumberedValues,
    Operation,
    number_slice,
)


@dataclass(frozen=True)
class Written:
    """The change that the update makes to one value that a server holds.

    Attributes:
      old: The number of the old value.
      new: The new value.
    """

    old: int
    new: Atom

    @property
    def is_changed(self) -> bool:
        return not isinstance(self.new, int) or self.new != self.old


@dataclass(frozen=True)
class TracedUpdate:
    """An update, traced for some shapes.

    Attributes:
      program: The operations.
      consts: The constants, by number.
      gradients: The numbers of the gradients.
      values, state: The changes of the variables, and of the state of the optimizer.
      avals: The shapes and dtypes, by number.
    """

    program: FlatProgram
    consts: Mapping[int, Any]
    gradients: Sequence[int]
    values: Sequence[Written]
    state: Sequence[Written]
    avals: Mapping[int, Any]

    @classmethod
    def of(cls, call: OptimizerCall, shape_of: Shapes) -> TracedUpdate:
        jaxpr, const_values = call.trace(shape_of)
        program = FlatProgram(jaxpr)
        num_consts, num_state, num_variables = len(const_values), len(call.state), len(call.variables)
        state = program.inputs[num_consts : num_consts + num_state]
        gradients, values = _halves(program.inputs[num_consts + num_state :])
        avals = dict(zip(program.inputs, program.input_avals, strict=True))
        for operation in program.operations:
            avals.update(zip(operation.results, operation.result_avals, strict=True))
        return cls(
            program,
            program.consts | dict(zip(program.inputs, const_values, strict=False)),
            gradients,
            [Written(*pair) for pair in zip(values, program.outputs[:num_variables], strict=True)],
            [Written(*pair) for pair in zip(state, program.outputs[num_variables:], strict=True)],
            avals,
        )

    def is_alike(self, other: TracedUpdate) -> bool:
        """True if two updates differ only in shapes, so that their values have the same numbers."""
        ours, theirs = self.program.operations, other.program.operations
        return len(ours) == len(theirs) and all(
            a.name == b.name and list(a.results) == list(b.results) for a, b in zip(ours, theirs, strict=True)
        )

    def scalars(self, wanted: Sequence[Atom], given: Collection[int]) -> list[Any]:
        """Returns the scalar constants in the computation of some values from others. Some may come from a shape."""
        operations = self.program.slice(wanted, set(given))
        used = numbers_in(operations, wanted)
        consts = {n: value for n, value in self.consts.items() if n in used and isinstance(value, _NUMBERS)}
        return [
            *map(_literals, operations),
            *((n, _shown(consts[n])) for n in sorted(consts)),
        ]

    def depends(self, atom: Atom, number: int) -> bool:
        """True if a value depends on another one."""
        return number in numbers_in(self.program.slice([atom]), [atom])

    def function(self, wanted: Sequence[Atom], given: Sequence[int]) -> tuple[Any, Callable[..., list[Any]]]:
        """Returns a function that computes some values from others, after a key that is equal for equal functions."""
        operations = self.program.slice(wanted, set(given))
        used = numbers_in(operations, wanted)
        consts = {n: value for n, value in self.consts.items() if n in used}
        inputs = {n: ("input", at, str(self.avals[n])) for at, n in enumerate(given)}

        def part_of_update(*args: Any) -> list[Any]:
            values = NumberedValues(dict(self.consts) | dict(zip(given, args, strict=True)))
            return values.run(operations).of(wanted)

        return number_slice(operations, inputs, consts, wanted), jax.jit(part_of_update)


def computable(program: FlatProgram, given: Collection[int]) -> set[int]:
    """Returns the values that can be computed from the given ones."""
    known = set(given)
    for operation in program.operations:
        if operation.numbers <= known:
            known.update(operation.results)
    return known


def slots_of(call: OptimizerCall, traced: TracedUpdate) -> list[list[int]]:
    """Returns for each variable the positions of its slots among the state."""
    slots: list[list[int]] = [[] for _ in call.variables]
    position = {id(variable): i for i, variable in enumerate(call.variables)}
    for n, variable in enumerate(call.state):
        reference = call.reference_of(variable)
        if reference is not None and id(reference) in position:
            slots[position[id(reference)]].append(n)
        elif reference is None and math.prod(variable.shape) > 1:
            users = [
                i for i, each in enumerate(traced.values) if traced.depends(each.new, traced.state[n].old)
            ]
            if len(users) == 1:
                slots[users[0]].append(n)
    return slots


def _halves(numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


_NUMBERS = (np.ndarray, np.generic, float, int)


def _literals(operation: Operation) -> list[str]:
    """Returns the literals of an operation."""
    return [_shown(atom.val) for atom in operation.operands if not isinstance(atom, int)]


def _shown(value: Any) -> str:
    return repr(np.asarray(value).item()) if np.ndim(value) == 0 else ""
