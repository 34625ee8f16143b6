"""The plan of a program split by rows: which values are completed (summed over the replicas), and when.

The plan uses as few rounds of sums as the dependencies allow. Gradients, loss and metrics usually share one round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import equations
from replicax._src.tracing.flat import Atom, FlatProgram, NumberedValues, Operation
from replicax._src.tracing.rounds import Combined, Computation, Reduction, RoundsOfSums
from replicax._src.tracing.row_partitioner.row_layouts import Layout, Rows, RowSplit, Shared
from replicax._src.tracing.row_partitioner.rules import (
    AppliedOperation,
    Incomplete,
    NotByRowsError,
    apply,
    refused,
)

SumOverReplicas = Callable[[Sequence[Any]], Sequence[Any]]
_ADDITIONS = frozenset(["add", "add_any"])
_PLACING = frozenset(["shard_map", "sharding_constraint"])


def split_by_rows(
    jaxpr: Any,
    has_rows: Sequence[bool],
    split: RowSplit,
    parts: Collection[int] = (),
    kept: Collection[int] = (),
) -> RowsPlan | str:
    """Splits a program over a global batch into one for each replica's rows; returns the reason if that is impossible.

    Code outside of this folder needs only this function and ``RowSplit``.

    Args:
      has_rows: For each operand, True if replicas have its rows, False if they have all of it.
      parts: The positions of operands that are the sums of the replicas' arrays.
      kept: The positions of results that replicas get in this form.
    """
    layouts: list[Layout] = [Rows(0) if by_rows else Shared.WHOLE for by_rows in has_rows]
    for i in parts:
        layouts[i] = Shared.SUM
    for eqn in equations(jaxpr):
        if eqn.primitive.name in _PLACING or any(eqn.params.get("devices", ())):
            return (
                f"{eqn.primitive.name} places values on devices of its own ({jax_compat.equation_line(eqn)})"
            )
    try:
        return RowsPlan(FlatProgram(jaxpr), layouts, split, kept=kept)
    except NotByRowsError as reason:
        return str(reason)


@final
class RowsPlan:
    """A program over a global batch, in the form that each replica runs on its rows.

    Args:
      program: The program.
      layouts: The layouts of the operands.
      split: The rows of each replica.
      kept: The positions of results that are parts of sums.
      is_body: True for the body of a loop. Its results keep their layouts, including parts of sums and extremes.
        Replicated values that it adds to parts of a sum become parts of the sum.

    Attributes:
      num_rounds: The number of times that the replicas wait for each other.
      completed_inputs: The positions of operands that must be completed first.
      layouts: The layouts of the results.

    Raises:
      NotByRowsError: The program cannot be split.
    """

    def __init__(
        self,
        program: FlatProgram,
        layouts: Sequence[Layout],
        split: RowSplit,
        *,
        kept: Collection[int] = (),
        is_body: bool = False,
    ):
        self._split, self._kept, self._is_body = split, kept, is_body
        self._program = program
        self._inputs = tuple(layouts)
        self._completed: set[int] = set()
        while not self._is_settled():
            pass
        # A value that was a sum at first may not be one after its operands are completed.
        self._completed = {n for n in self._completed if self._layouts[n] is not Shared.WHOLE}
        self.num_rounds = max((self._rounds[n] + 1 for n in self._completed), default=0)
        self.completed_inputs = [i for i, n in enumerate(program.inputs) if n in self._completed]

    def _is_settled(self) -> bool:
        """Applies the rules to the program. Returns False if further values must be completed, which changes later
        layouts.

        (A completed value is used in its completed form everywhere; otherwise a clipped gradient would be summed
        twice.)
        """
        program = self._program
        known = set(self._completed)
        self._layouts: dict[int, Layout] = dict(zip(program.inputs, self._inputs, strict=True))
        self._layouts.update(dict.fromkeys(program.consts, Shared.WHOLE))
        self._rounds = dict.fromkeys(self._layouts, 0)
        self._applied: list[tuple[int, Operation, AppliedOperation]] = []
        for operation in program.operations:
            applied = self._apply(operation)
            number = max((self._round_of(atom) for atom in operation.operands), default=0)
            self._applied.append((number, operation, applied))
            for result, layout in zip(operation.results, applied.layouts, strict=True):
                self._layouts[result], self._rounds[result] = layout, number
        self.layouts = [self._layout_of(atom) for atom in program.outputs]
        if not self._is_body:
            if any(isinstance(layout, Rows) for layout in self.layouts):
                raise NotByRowsError("a result of the step has a row for each row of the batch")
            for i, atom in enumerate(program.outputs):
                if i not in self._kept or self.layouts[i] is not Shared.SUM:
                    self._complete(atom)
        return self._completed == known

    def _apply(self, operation: Operation) -> AppliedOperation:
        while True:
            try:
                layouts = [self._layout_of(atom) for atom in operation.operands]
                rule = _scan if operation.eqn.primitive.name == "scan" else apply
                return _checked(operation.eqn, rule(operation.eqn, layouts, self._split))
            except Incomplete as wanted:
                is_sum = all(layout in (Shared.WHOLE, Shared.SUM) for layout in layouts)
                if (self._is_body or self._kept) and is_sum and operation.eqn.primitive.name in _ADDITIONS:
                    return _added_up(operation.eqn, layouts, self._split)
                for i in wanted.numbers:
                    self._complete(operation.operands[i])
            except NotByRowsError as error:
                error.line = error.line or operation.line
                raise

    def _complete(self, atom: Atom) -> None:
        if self._layout_of(atom) is not Shared.WHOLE:
            self._completed.add(atom)

    def _layout_of(self, atom: Atom) -> Layout:
        if isinstance(atom, jax_compat.Literal) or atom in self._completed:
            return Shared.WHOLE
        return self._layouts[atom]

    def _round_of(self, atom: Atom) -> int:
        if isinstance(atom, jax_compat.Literal):
            return 0
        return self._rounds[atom] + (atom in self._completed and self._layouts[atom] is not Shared.WHOLE)

    # --- in the program of a replica ------------------------------------------------------------------

    def evaluate(self, args: Sequence[Any], sum_over_replicas: SumOverReplicas) -> list[Any]:
        """Runs the program on one replica, under the axis ``replica``.

        Args:
          args: The replica's parts of the operands.
          sum_over_replicas: Sums this replica's arrays with those of the others.

        Returns:
          The replica's parts of the results.
        """
        env = NumberedValues(self._program.consts | dict(zip(self._program.inputs, args, strict=True)))
        by_round = sorted(self._applied, key=lambda applied: applied[0])  # (keeps the order within a round)
        remaining = iter(by_round)
        upcoming = next(remaining, None)
        for number in range(self.num_rounds + 1):
            while upcoming is not None and upcoming[0] == number:
                _, operation, applied = upcoming
                env.update(zip(operation.results, applied.evaluate(env.of(operation.operands)), strict=True))
                upcoming = next(remaining, None)
            self._sum(env, number, sum_over_replicas)
        results = env.of(self._program.outputs)
        for i in self._kept:
            results[i] = self._split.converted(results[i], self.layouts[i], Shared.SUM)
        return results

    def _due(self, number: int) -> list[int]:
        """Returns the values that one round completes."""
        return sorted(n for n in self._completed if self._rounds[n] == number)

    def _sum(self, env: dict[int, Any], number: int, sum_over_replicas: SumOverReplicas) -> None:
        """Completes the values of one round."""
        due = self._due(number)
        sums = [n for n in due if self._layouts[n] is Shared.SUM]
        env.update(zip(sums, sum_over_replicas([env[n] for n in sums]), strict=True))
        for n in due:
            if self._layouts[n] is not Shared.SUM:
                env[n] = _extreme(env[n], self._layouts[n])

    def in_rounds(self) -> RoundsOfSums:
        """Returns the program with its rounds, for whoever exchanges the sums outside of it.

        A value that is completed has two numbers, one for the replica's part.
        """

        def part(number: int) -> int:
            return -1 - number if number in self._completed else number

        computations = [
            Computation(
                operation.operands,
                list(map(part, operation.results)),
                applied.evaluate,
                self._invariant(operation, applied),
            )
            for _, operation, applied in sorted(self._applied, key=lambda applied: applied[0])
        ]
        rounds = [
            [Combined(part(n), n, _REDUCTIONS[self._layouts[n]]) for n in self._due(number)]
            for number in range(self.num_rounds)
        ]
        program = self._program
        return RoundsOfSums(
            list(map(part, program.inputs)), program.consts, computations, rounds, program.outputs
        )

    def _invariant(self, operation: Operation, applied: AppliedOperation) -> Computation | None:
        """Returns the part of an operation that is the same on all replicas.

        Whole results depend on whole operands only, so the others may be zeros, and the compiler drops what they lead
        to: the rows that a loop carries beside a counter.
        """
        positions = [i for i, layout in enumerate(applied.layouts) if layout is Shared.WHOLE]
        if not positions:
            return None
        layouts = [self._layout_of(atom) for atom in operation.operands]
        known = [i for i, layout in enumerate(layouts) if layout is Shared.WHOLE]
        avals, split = operation.operand_avals, self._split

        def evaluate(args: Sequence[Any]) -> list[Any]:
            given = dict(zip(known, args, strict=True))
            operands = [
                given[i] if i in given else jnp.zeros(_shape_of_part(aval, layout, split), aval.dtype)
                for i, (aval, layout) in enumerate(zip(avals, layouts, strict=True))
            ]
            results = applied.evaluate(operands)
            return [results[i] for i in positions]

        return Computation(
            [operation.operands[i] for i in known], [operation.results[i] for i in positions], evaluate
        )


_REDUCTIONS: dict[Layout, Reduction] = {Shared.SUM: "sum", Shared.MAX: "max", Shared.MIN: "min"}


def _shape_of_part(aval: Any, layout: Layout, split: RowSplit) -> tuple[int, ...]:
    return split.local_shape(aval.shape, layout) if isinstance(layout, Rows) else aval.shape


def _checked(eqn: Any, applied: AppliedOperation) -> AppliedOperation:
    """Raises for contractions of booleans, which mean "or" and cannot be summed."""
    for var, layout in zip(eqn.outvars, applied.layouts, strict=True):
        if layout is Shared.SUM and jnp.issubdtype(var.aval.dtype, jnp.bool_):
            raise refused(eqn, "combines truth values of all rows")
    return applied


def _added_up(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Returns the sum of replicated values and parts of a sum, as parts of a sum."""
    parts = [Shared.SUM] * len(layouts)
    applied = apply(eqn, parts, split)
    return AppliedOperation(
        applied.layouts, lambda args: applied.evaluate(list(map(split.converted, args, layouts, parts)))
    )


def _extreme(value: Any, kind: Layout) -> Any:
    """Returns the largest or smallest value over replicas. A NaN stays NaN; XLA's own maximum over replicas drops
    it.
    """
    combine = jnp.max if kind is Shared.MAX else jnp.min
    if value.dtype == bool:
        return _extreme(value.astype(jnp.int32), kind).astype(bool)
    return combine(jax.lax.all_gather(value, REPLICA_AXIS), axis=0)


# --- loops --------------------------------------------------------------------------------------------


def _scan(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Applies a loop whose steps need no other replica. A sum that the loop accumulates is completed after it."""
    if all(layout is Shared.WHOLE for layout in layouts) or eqn.effects:
        return apply(eqn, layouts, split)
    extremes = [i for i, layout in enumerate(layouts) if layout in (Shared.MAX, Shared.MIN)]
    if extremes:
        raise Incomplete(extremes)
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    consts, given = list(layouts[:num_consts]), list(layouts[num_consts : num_consts + num_carry])
    xs = [_without_leading_dim(eqn, layout) for layout in layouts[num_consts + num_carry :]]
    body = FlatProgram(*jax_compat.inner_jaxpr(eqn.params["jaxpr"]))
    carry = given
    while True:
        plan = _plan_of_body(eqn, body, [*consts, *carry, *xs], layouts, split)
        grown = [_joined(eqn, *pair) for pair in zip(carry, plan.layouts[:num_carry], strict=True)]
        if grown == carry:
            break
        carry = grown

    def evaluate(args: Sequence[Any]) -> list[Any]:
        held, first, slices = _parted(args, num_consts, num_carry)
        first = [split.converted(*three) for three in zip(first, given, carry, strict=True)]

        def step(state: Any, x: Any) -> Any:
            results = plan.evaluate([*held, *state, *x], _no_sum)
            lay = zip(results[:num_carry], plan.layouts[:num_carry], carry, strict=True)
            return [split.converted(*three) for three in lay], results[num_carry:]

        last, ys = jax.lax.scan(
            step,
            first,
            slices,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*last, *ys]

    return AppliedOperation([*carry, *map(_with_leading_dim, plan.layouts[num_carry:])], evaluate)


def _plan_of_body(
    eqn: Any, body: FlatProgram, inside: Sequence[Layout], outside: Sequence[Layout], split: RowSplit
) -> RowsPlan:
    plan = RowsPlan(body, inside, split, is_body=True)
    incomplete = [i for i in plan.completed_inputs if outside[i] is Shared.SUM]
    if incomplete:
        raise Incomplete(incomplete)
    if plan.num_rounds:
        raise refused(eqn, "needs a sum over the batch in every step of a loop")
    return plan


def _parted(args: Sequence[Any], num_consts: int, num_carry: int) -> tuple[list[Any], list[Any], list[Any]]:
    end = num_consts + num_carry
    return list(args[:num_consts]), list(args[num_consts:end]), list(args[end:])


def _no_sum(values: Sequence[Any]) -> Sequence[Any]:
    assert not values
    return values


def _joined(eqn: Any, before: Layout, after: Layout) -> Layout:
    """Returns the layout of a value that a loop carries, which is the same before and after each step."""
    if before == after:
        return before
    others = {before, after} - {Shared.WHOLE}
    if len(others) == 1 and not others & {Shared.MAX, Shared.MIN}:
        return others.pop()
    raise refused(eqn, "carries a value that is split by rows in one step and summed in another")


def _without_leading_dim(eqn: Any, layout: Layout) -> Layout:
    if not isinstance(layout, Rows):
        return layout
    if layout.dim == 0:
        raise refused(eqn, "goes over the rows of the batch one by one")
    return Rows(layout.dim - 1, layout.unit)


def _with_leading_dim(layout: Layout) -> Layout:
    return Rows(layout.dim + 1, layout.unit) if isinstance(layout, Rows) else layout
