"""Stand-ins for a table or its gradient in a program that has only some of the rows, and the rules for gradients.

The gradient of a table is 0 in all other rows. The program may apply only operations that keep these rows 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import numpy as np

from replicax._src.program_kit.traced_programs import Operation


@dataclass(frozen=True)
class WholeTable:
    """The reason why a program needs a full table.

    Attributes:
      table: The position of the table among the program's operands.
      primitive: The operation that needs it; None if there is none.
      line: The line of the user's code.
      why: The reason, for messages.
    """

    table: int
    primitive: str | None
    line: str
    why: str

    def __str__(self) -> str:
        said = self.why if self.primitive is None else f"{self.primitive} {self.why}"
        return f"{said} ({self.line})" if self.line else said


class NeedsWholeTable(Exception):
    """Some rows cannot replace the table of ``why``."""

    def __init__(self, why: WholeTable):
        super().__init__(str(why))
        self.why = why


@dataclass(frozen=True)
class ByRows:
    """Stands for an array with all rows of a table.

    Attributes:
      table: The position of the table among the program's operands.
      rows: The rows that are looked up.
      is_gradient: True if the other rows are 0; else they are the table's.
    """

    table: int
    rows: Any
    is_gradient: bool


def bound(operation: Operation, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Returns the results of an operation. The conversion of a known constant, such as a limit of clipping, is known
    too.
    """
    is_known = all(not isinstance(operand, jax.core.Tracer) for operand in operands)
    if operation.name == "convert_element_type" and is_known:
        with jax.ensure_compile_time_eval():
            return operation.bind(operands)
    return operation.bind(operands, params)


def whole_table(table: ByRows, operation: Operation, line: str, why: str) -> NeedsWholeTable:
    """Returns the error for an operation."""
    return NeedsWholeTable(WholeTable(table.table, operation.name, line, why))


def raw(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands with the arrays of rows instead of ``ByRows``."""
    return [operand.rows if isinstance(operand, ByRows) else operand for operand in operands]


def first_of(operands: Sequence[Any]) -> ByRows:
    """Returns the first operand that stands for a table."""
    return next(operand for operand in operands if isinstance(operand, ByRows))


def apply_to_gradient_rows(operation: Operation, operands: list[Any], line: str) -> list[Any]:
    """Applies an operation that maps 0 to 0, or a sum over all rows, to which rows of 0 add nothing."""
    first = first_of(operands)
    name = operation.name
    is_alike = all(
        o.is_gradient and o.table == first.table if isinstance(o, ByRows) else np.ndim(o) == 0
        for o in operands
    )
    if not is_alike or not (name == "reduce_sum" or _keeps_zero(operation, operands)):
        raise whole_table(first, operation, line, "takes the gradient of all rows of the table")
    (result,) = bound(operation, raw(operands))
    is_sum = name == "reduce_sum" and 0 in operation.params["axes"]
    return [result if is_sum else replace(first, rows=result)]


_KEEPS_ZERO = frozenset(
    """
    abs cbrt convert_element_type copy expm1 imag log1p neg real reduce_precision replicax_reduced round sign sin sqrt
    square stop_gradient tan tanh
    """.split()  # noqa: SIM905 - a line for each, otherwise
)
_OF_SEVERAL = frozenset(["add", "add_any", "max", "min", "mul", "sub"])


def _keeps_zero(operation: Operation, operands: Sequence[Any]) -> bool:
    name = operation.name
    if name in _KEEPS_ZERO or (name in _OF_SEVERAL and all(isinstance(o, ByRows) for o in operands)):
        return True
    if name in ("max", "min"):
        return all(isinstance(o, ByRows) or _is_limit(o, is_upper=name == "min") for o in operands)
    if name == "clamp":
        low, gradient, high = operands
        return (
            isinstance(gradient, ByRows) and _is_limit(low, is_upper=False) and _is_limit(high, is_upper=True)
        )
    if name == "integer_pow":
        return operation.params["y"] > 0
    return name == "mul" or (name == "div" and not isinstance(operands[1], ByRows))


def _is_limit(value: Any, *, is_upper: bool) -> bool:
    """Returns True if a limit of clipping is known now and does not change 0."""
    if isinstance(value, (ByRows, jax.core.Tracer)):
        return False
    return bool(np.asarray(value) >= 0) if is_upper else bool(np.asarray(value) <= 0)
