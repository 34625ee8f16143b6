"""An optimizer's update of a table, as a program of all its rows and of some rows: the updates of parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._ps.programs.row_parallel import Mixing, mixed_values, rows_of, with_rows
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.flat import FlatProgram
from replicax._src.tracing.replication import is_call

_STEPS = (0, 1, 7, 1000)


@dataclass(frozen=True)
class TableUpdate:
    """An optimizer's update of one table, traced for some rows of it.

    Numbers that Python computes from the number of rows while tracing (``value.shape[0]``) are those of the trace.

    Attributes:
      closed: The closed jaxpr. Operands with rows have them on axis 0, all equally many.
      has_rows: For each operand, whether it has the table's rows: the table, its slots, the gradient.
      table: The position of the table among the operands.
      gradient: The position of the gradient.
      written: For each result, the position of the operand whose new value it is.
    """

    closed: Any
    has_rows: Sequence[bool]
    table: int
    gradient: int
    written: Sequence[int]

    @property
    def state(self) -> list[int]:
        """Positions of the operands that are not the gradient."""
        return [i for i in range(len(self.has_rows)) if i != self.gradient]

    def evaluate(self, operands: Sequence[Any]) -> list[Any]:
        """The results."""
        jaxpr, consts = jax_compat.open_jaxpr(self.closed)
        return jax_compat.eval_jaxpr(jaxpr, [*consts, *operands])


def find_mixing(update: TableUpdate) -> Mixing | None:
    """The first operation that mixes rows; None if the update is row-parallel."""
    jaxpr, consts = jax_compat.inner_jaxpr(update.closed)
    program = FlatProgram(jaxpr, consts, is_call)
    inputs = zip(program.inputs, update.has_rows, strict=True)
    mixed = mixed_values(program.operations, {number for number, has_rows in inputs if has_rows})
    return next(iter(mixed.values()), None)


def is_lazy_equal_dense(update: TableUpdate, shared: Sequence[Any]) -> bool:
    """True if rows without a gradient stay unchanged, so that leaving them out changes nothing.

    The function tries random rows with a gradient of 0, at several step counts.

    Args:
      update: The update to evaluate; a few rows of a few columns are enough.
      shared: Values of the operands that have no rows. Integers among them count steps, and are varied.
    """
    with jax_compat.outside_traces():
        evaluate = jax.jit(update.evaluate)
        for step in _STEPS:
            operands = _resting(update, shared, step)
            for position, result in zip(update.written, evaluate(operands), strict=True):
                if update.has_rows[position] and not np.array_equal(result, operands[position]):
                    return False
    return True


RowProgram = Callable[[Sequence[Any], Any, Any], list[Any]]


def row_program(update: TableUpdate) -> RowProgram:
    """The update of some rows of a shard, for an update that is row-parallel.

    Returns:
      A function of the state (the operands but the gradient, in order, with all rows of the shard), the rows' numbers
      in the shard (int32, as many as rows were traced, none twice) and their gradients. It returns the results of the
      update, with all rows of the shard. Row numbers out of range are padding: they change nothing.
    """

    def run(state: Sequence[Any], ids: Any, gradient: Any) -> list[Any]:
        operands = dict(zip(update.state, state, strict=True))
        chosen = {
            i: rows_of(value, ids) if update.has_rows[i] else value for i, value in operands.items()
        } | {update.gradient: gradient}
        results = update.evaluate([chosen[i] for i in range(len(update.has_rows))])
        return [
            with_rows(operands[position], ids, result) if update.has_rows[position] else result
            for position, result in zip(update.written, results, strict=True)
        ]

    return run


def _resting(update: TableUpdate, shared: Sequence[Any], step: int) -> list[Any]:
    """Operands with a gradient of 0. Slots are positive, because some are sums of squares."""
    rng = np.random.default_rng(step)
    remaining = iter(shared)
    operands: list[Any] = []
    for position, (var, has_rows) in enumerate(
        zip(jax_compat.inner_jaxpr(update.closed)[0].invars, update.has_rows, strict=True)
    ):
        shape, dtype = var.aval.shape, var.aval.dtype
        if position == update.gradient:
            operands.append(jnp.zeros(shape, dtype))
        elif has_rows:
            low = -1.0 if position == update.table else 0.1
            operands.append(jnp.asarray(rng.uniform(low, 1.0, shape)).astype(dtype))
        else:
            value = next(remaining)
            is_count = jnp.issubdtype(dtype, jnp.integer)
            operands.append(jnp.full(shape, step, dtype) if is_count else jnp.asarray(value, dtype))
    return operands
