"""Finds gradients that are R times too large: a loss that is already summed over R replicas is differentiated, and its
gradients are summed over the replicas again.

The transpose of ``psum`` is ``psum``. In the backward pass of a loss that is the same on all replicas, ``psum`` adds up
R equal cotangents, and so multiplies by R. A walk over the jaxpr of a replica function follows this factor through
linear operations to the sums of gradients. A mean divides by R and is right. Only certain cases are reported: a
gradient that also has a term without the factor, or is scaled by an unknown number, is not.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from replicax._src.functions.nn import AVERAGE_LOSS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, inner_jaxprs, walked
from replicax._src.tracing.primitives import MOVES, SUMS
from replicax._src.tracing.replication import (
    Replication,
    is_call,
    is_replica_collective,
    transfer,
)
from replicax._src.user.user_code import source_at
from replicax._src.vocabulary.errors import ReducedLossError

log = logging.getLogger("replicax")
_warned: set[str] = set()

_FOLDED: Final = {"eq": operator.eq, "max": max, "min": min, "ne": operator.ne}
"""Operations whose result is computed if the operands are known numbers, because denominators are guarded with them."""

_SUMMED: Final = SUMS | {"reduce_scatter"}
_ADDED: Final = frozenset(
    ["add", "add_any", "concatenate", "dynamic_update_slice", "scatter-add", "select_n", "stack", "sub"]
)
_KEPT: Final = (MOVES - _ADDED) | frozenset(
    "convert_element_type copy neg optimization_barrier reduce_precision reduce_sum replicax_reduced".split()  # noqa: SIM905
)


class Fact(NamedTuple):
    """A fact about one value.

    Attributes:
      replication: Its replication.
      number: Its value, if all elements are one known number.
      is_gradient: True if it is, or was computed from, a result of a backward pass that data or a sum entered.
      power: It has the factor R ** power, which sums of equal cotangents and divisions by R gave it; None if unknown.
      is_divided: True if a division by R was counted in ``power``.
      split_at: The user's line that divides the differentiated loss by the number of replicas, which it names.
      reduced_at: The user's line of the sum in the differentiated function that gave the factor R.
      is_from_sum: True if a sum over replicas entered it.
      is_share: True for the gradient of a replica's share of a mean, which ``rx.nn`` computed.
      divisors: The numbers by which the backward pass has divided it; nan for an unknown one.
      sums: The lines of the sums of gradients that it is linear in.
      parts: The values that it concatenates.
    """

    replication: Replication
    number: float | None = None
    is_gradient: bool = False
    power: int | None = 0
    is_divided: bool = False
    split_at: str = ""
    reduced_at: str = ""
    is_from_sum: bool = False
    is_share: bool = False
    divisors: frozenset[float] = frozenset()
    sums: frozenset[str] = frozenset()
    parts: tuple[Fact, ...] = ()

    @property
    def is_number(self) -> bool:
        """True if it is a known number of the program, and not a cotangent that was computed."""
        return self.number is not None and not (self.power or self.is_share or self.divisors)

    @property
    def is_constant(self) -> bool:
        """True if no factor of R can be wrong with it: it is no gradient, and the same on all replicas."""
        return not self.is_gradient and self.replication.is_same


def check_gradient_scale(jaxpr: Any, inputs: Sequence[Replication], num_replicas: int) -> str:
    """Raises if gradients of a replica function are certain to be R times too large.

    Logs one line for each mean that makes gradients of ``rx.nn.compute_average_loss`` R times too small.

    Args:
      jaxpr: The function, with marks resolved.
      inputs: The replications of its invars.
      num_replicas: The number of replicas R.

    Returns:
      The user's line that reduces a loss in a differentiated function, so that each replica's gradient has the factor
      R; "" if there is none.

    Raises:
      ReducedLossError: The error names this line, and the line that sums the gradients.
    """
    if num_replicas == 1 or not _is_worth_a_walk(jaxpr, num_replicas):
        return ""
    walk = _Walk(num_replicas)
    walk.run(jaxpr, [Fact(replication) for replication in inputs], is_backward=False)
    walk.report()
    return walk.reduced_at


def _is_backward(eqn: Any, is_caller_backward: bool) -> bool:
    return (is_caller_backward or jax_compat.is_transposed(eqn)) and not jax_compat.is_recomputed(eqn)


def _is_worth_a_walk(jaxpr: Any, num_replicas: int) -> bool:
    """Returns True if a backward pass sums over replicas, or gradients of a known average may be averaged again."""
    divisions: set[str] = set()

    def look(jaxpr: Any, is_caller_backward: bool) -> bool:
        for eqn in jaxpr.eqns:
            inner = inner_jaxprs(eqn)
            if inner:
                backward = _is_backward(eqn, is_caller_backward)
                if any(look(each, backward) for each in inner):
                    return True
            elif eqn.primitive.name in _SUMMED and is_replica_collective(eqn):
                if _is_backward(eqn, is_caller_backward):
                    return True
            elif eqn.primitive.name == "div":
                if AVERAGE_LOSS in str(eqn.source_info.name_stack):
                    divisions.add("average")
                elif _is_number(eqn.invars[1], num_replicas):
                    divisions.add("mean")
        return len(divisions) == 2

    return look(jaxpr, False)


def _is_number(atom: Any, number: int) -> bool:
    return isinstance(atom, jax_compat.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == number)


@final
class _Walk:
    """Evaluates a jaxpr on facts, and collects the sums of gradients.

    Attributes:
      reduced_at: See ``check_gradient_scale``.
    """

    def __init__(self, num_replicas: int):
        self.reduced_at = ""
        self._num = num_replicas
        self._members: dict[str, list[Fact]] = {}
        self._divided_at: dict[str, set[str]] = {}
        self._is_recording = True

    def run(self, jaxpr: Any, inputs: Sequence[Fact], *, is_backward: bool) -> list[Fact]:
        """Returns the facts of the results of a jaxpr."""
        consts = [Fact(Replication.INVARIANT)] * len(jaxpr.constvars)

        def rule(eqn: Any, operands: list[Fact]) -> list[Fact]:
            return self._results(eqn, operands, _is_backward(eqn, is_backward))

        return walked(jaxpr, inputs, rule, consts, _literal)[0]

    def report(self) -> None:
        """Raises for gradients that are R times too large; logs those that are R times too small.

        Raises:
          ReducedLossError: See ``check_gradient_scale``.
        """
        for line, members in self._members.items():
            gradients = [each for each in members if each.is_gradient]
            powers = [each.power for each in gradients if each.power is not None]
            if not gradients or len(powers) < len(gradients):
                continue
            divided_at = self._divided_at.get(line, set())
            if not divided_at and min(powers) >= 1:
                raise _reduced_twice(gradients[0].reduced_at, line, self._num)
            is_average = all(each.is_share and not each.is_divided for each in gradients)
            if divided_at == {line} and is_average and set(powers) == {0}:
                _warn_of_second_average(line, self._num)
            split_at = gradients[0].split_at
            if (
                not divided_at
                and set(powers) == {-1}
                and split_at
                and all(each.is_share for each in gradients)
            ):
                _warn_of_split_average(split_at, self._num)

    # --- equations ----------------------------------------------------------------------------------------

    def _results(self, eqn: Any, operands: list[Fact], is_backward: bool) -> list[Fact]:
        name = eqn.primitive.name
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, is_backward)
        if is_call(eqn):
            inner, _, arguments = called(eqn, operands)
            return self.run(inner, arguments, is_backward=is_backward)
        replications = transfer(eqn, [each.replication for each in operands], None)
        if name in _SUMMED and is_replica_collective(eqn):
            return [
                self._summed(eqn, operand, replication, is_backward)
                for operand, replication in zip(operands, replications, strict=True)
            ]
        fact = self._combined(eqn, operands, replications[0] if replications else None, is_backward)
        return [fact._replace(replication=replication) for replication in replications]

    def _summed(self, eqn: Any, operand: Fact, replication: Replication, is_backward: bool) -> Fact:
        """Returns the fact of a sum over the replicas."""
        line = jax_compat.equation_line(eqn)
        is_whole = eqn.params.get("axis_index_groups") is None
        if is_backward:
            return self._transposed(line, operand, replication, is_whole=is_whole)
        if is_whole and self._is_recording:
            self._members.setdefault(line, []).extend(operand.parts or [operand])
        is_gradient = any(each.is_gradient for each in (operand, *operand.parts))
        number = None if operand.number is None else operand.number * self._num
        sums = operand.sums | {line} if is_gradient else operand.sums
        power = None if is_gradient else 0
        return Fact(replication, number, is_gradient=is_gradient, power=power, is_from_sum=True, sums=sums)

    def _transposed(self, line: str, operand: Fact, replication: Replication, *, is_whole: bool) -> Fact:
        """Returns the fact of a sum in a backward pass. A sum of equal cotangents is R times one of them."""
        if operand.number == 0:
            return operand._replace(replication=replication)
        power = operand.power if is_whole else None
        reduced_at = operand.reduced_at
        if operand.replication.is_same and power is not None:
            is_divided_by_seed = power == 0 and operand.number == 1 / self._num
            power += 0 if is_divided_by_seed else 1
            reduced_at = reduced_at or line
            self.reduced_at = self.reduced_at or line
        return operand._replace(
            replication=replication,
            number=None,
            is_gradient=True,
            power=power,
            reduced_at=reduced_at,
            is_from_sum=True,
        )

    def _combined(
        self, eqn: Any, operands: list[Fact], replication: Replication | None, is_backward: bool
    ) -> Fact:
        """Returns the fact of the results of an operation on one replica."""
        name = eqn.primitive.name
        if replication is None or not operands:
            return Fact(replication or Replication.INVARIANT)
        if name == "select_n" and operands[0].number is not None:
            return operands[1 + int(operands[0].number)]._replace(parts=())
        numbers = [each.number for each in operands]
        if name in _FOLDED and None not in numbers:
            return Fact(replication, _FOLDED[name](*numbers))
        sums = frozenset().union(*(each.sums for each in operands))
        is_from_sum = any(each.is_from_sum for each in operands)
        if name in ("replicax_assert_same", "replicax_vouched"):
            self._note_division(sums, "")
            return Fact(replication, is_gradient=operands[0].is_gradient, power=None)
        if name in _ADDED:
            terms = operands[1:] if name == "select_n" else operands[:1] + operands[-1:]
            terms = operands if name == "concatenate" else terms
            parts = tuple(terms) if name == "concatenate" else ()
            fact = _added(terms)._replace(sums=sums, parts=parts)
        elif name in _KEPT:
            fact = self._after_sum_of_rows(eqn, operands[0]) if name == "reduce_sum" else operands[0]
            fact = fact._replace(parts=())
        elif name in ("mul", "div"):
            fact = self._scaled(eqn, operands, is_backward)._replace(sums=sums)
        else:
            fact = _multiplied(operands, is_known=is_backward)._replace(sums=sums)
        if is_backward:
            is_seed = not any(each.is_gradient for each in operands) and not replication.is_same
            is_share = fact.is_share or AVERAGE_LOSS in str(eqn.source_info.name_stack)
            fact = fact._replace(is_gradient=fact.is_gradient or is_seed, is_share=is_share)
        return fact._replace(is_from_sum=is_from_sum)

    def _scaled(self, eqn: Any, operands: list[Fact], is_backward: bool) -> Fact:
        """Returns the fact of a product or a quotient."""
        left, right = operands
        is_division = eqn.primitive.name == "div"
        is_right = is_division or not left.is_number or right.number == 1 / self._num
        value, factor = (left, right) if is_right else (right, left)
        is_scalar = not eqn.outvars[0].aval.shape
        if not factor.is_number:
            fact = _multiplied(operands, is_known=is_backward)
            if is_division and is_backward:
                fact = fact._replace(divisors=fact.divisors | {math.nan})
            # A number that comes from outside, such as a loss scale, may be 1/R.
            scales = operands[1:] if is_division else operands
            is_unknown = is_scalar and any(
                each.number is None and each.is_constant and not each.is_from_sum for each in scales
            )
            return fact._replace(power=None) if is_unknown and is_backward else fact
        fact = value if value.number is None else value._replace(number=_product(value, factor, is_division))
        fact = fact._replace(parts=())
        if is_backward and factor.number:
            fact = fact._replace(
                divisors=fact.divisors | {factor.number if is_division else 1 / factor.number}
            )
        # A loss of rows often has the factor 1/2; the factor 1/R of a user stands at a sum, or at a gradient.
        divides = factor.number == (self._num if is_division else 1 / self._num)
        divides = divides and (is_division or is_scalar or not is_backward)
        if divides:
            line = jax_compat.equation_line(eqn)
            self._note_division(value.sums, line)
            power = None if fact.power is None else fact.power - 1
            # Without the name it may be the factor 1/2 of a loss on two replicas.
            split_at = line if is_backward and "num_replicas" in source_at(line) else fact.split_at
            fact = fact._replace(power=power, is_divided=True, split_at=split_at)
        return fact

    def _note_division(self, sums: frozenset[str], line: str) -> None:
        for each in sums:
            self._divided_at.setdefault(each, set()).add(line)

    def _after_sum_of_rows(self, eqn: Any, operand: Fact) -> Fact:
        """Returns the fact of a sum. A sum over n of N = R * n rows undoes a division by N up to the factor 1/R."""
        if operand.replication.is_same and not operand.is_gradient:
            shape = eqn.invars[0].aval.shape
            count = math.prod(shape[axis] for axis in eqn.params["axes"])
            if count > 1 and any(
                math.isnan(d) or math.isclose(d, count * self._num) for d in operand.divisors
            ):
                return operand._replace(power=None, number=None)
        return operand._replace(number=None)

    # --- control flow -------------------------------------------------------------------------------------

    def _cond(self, eqn: Any, operands: list[Fact], is_backward: bool) -> list[Fact]:
        predicate, *arguments = operands
        branches = [self.run(branch, arguments, is_backward=is_backward) for branch in inner_jaxprs(eqn)]
        merged = [_merged(column) for column in zip(*branches, strict=True)]
        return merged if predicate.replication.is_same else list(map(_varying, merged))

    def _scan(self, eqn: Any, operands: list[Fact], is_backward: bool) -> list[Fact]:
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        body, _ = jax_compat.inner_jaxpr(eqn.params["jaxpr"])
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs = [each._replace(parts=()) for each in operands[num_consts + num_carry :]]

        def step(carry: list[Fact]) -> list[Fact]:
            return self.run(body, [*consts, *carry, *xs], is_backward=is_backward)

        carry = self._fixed(lambda carry: step(carry)[:num_carry], carry)
        return [*carry, *step(carry)[num_carry:]]

    def _while(self, eqn: Any, operands: list[Fact], is_backward: bool) -> list[Fact]:
        num_cond, num_body = jax_compat.while_counts(eqn)
        cond, _ = jax_compat.inner_jaxpr(eqn.params["cond_jaxpr"])
        body, _ = jax_compat.inner_jaxpr(eqn.params["body_jaxpr"])
        consts, carry = operands[num_cond : num_cond + num_body], operands[num_cond + num_body :]

        def step(carry: list[Fact]) -> list[Fact]:
            return self.run(body, [*consts, *carry], is_backward=is_backward)

        carry = self._fixed(step, carry)
        step(carry)
        (predicate,) = self.run(cond, [*operands[:num_cond], *carry], is_backward=is_backward)
        return carry if predicate.replication.is_same else list(map(_varying, carry))

    def _fixed(self, step: Any, carry: list[Fact]) -> list[Fact]:
        """Returns the facts of the carry of a loop, which hold before and after each iteration."""
        is_recording, self._is_recording = self._is_recording, False
        try:
            for _ in range(_MAX_ROUNDS):
                grown = [_merged(pair) for pair in zip(carry, step(carry), strict=True)]
                if grown == carry:
                    return carry
                carry = grown
        finally:
            self._is_recording = is_recording
        return [Fact(Replication.VARYING, is_gradient=True, power=None, sums=each.sums) for each in carry]


_MAX_ROUNDS: Final = 8


def _literal(atom: Any) -> Fact:
    value = np.asarray(atom.val)
    is_number = value.ndim == 0 and value.dtype.kind in "biuf"
    return Fact(Replication.INVARIANT, float(value) if is_number else None)


def _product(value: Fact, factor: Fact, is_division: bool) -> float | None:
    if value.number is None or factor.number is None or (is_division and not factor.number):
        return None
    return value.number / factor.number if is_division else value.number * factor.number


def _added(terms: Sequence[Fact]) -> Fact:
    """Returns the fact of a sum. Terms that no data enter do not count: the loss has them on each replica."""
    counted = [each for each in terms if each.number != 0]
    gradients = [each for each in counted if each.is_gradient]
    if not counted:
        return terms[0]
    if not gradients:
        first = counted[0]
        powers = {each.power for each in counted}
        return first._replace(
            number=first.number if len(counted) == 1 and len(terms) == 1 else None,
            power=first.power if len(powers) == 1 else None,
            is_share=all(each.is_share for each in counted),
            is_divided=any(each.is_divided for each in counted),
            divisors=frozenset().union(*(each.divisors for each in counted)),
        )
    is_certain = all(each.is_gradient or each.is_constant for each in counted)
    powers = {each.power for each in gradients}
    return gradients[0]._replace(
        number=None,
        power=gradients[0].power if len(powers) == 1 and is_certain else None,
        is_divided=any(each.is_divided for each in gradients),
        is_share=all(each.is_share for each in gradients),
        divisors=frozenset().union(*(each.divisors for each in gradients)),
    )


def _multiplied(operands: Sequence[Fact], *, is_known: bool) -> Fact:
    """Returns the fact of an operation that is linear in a gradient, if ``is_known``; else of an unknown operation."""
    gradients = [each for each in operands if each.is_gradient]
    if not gradients:
        powers = {each.power for each in operands}
        scaled = next((each for each in operands if each.power), operands[0])
        return scaled._replace(
            number=None,
            parts=(),
            power=scaled.power if is_known and len(powers - {0}) < 2 else 0 if not is_known else None,
            is_share=is_known and any(each.is_share for each in operands),
            is_divided=any(each.is_divided for each in operands),
            divisors=frozenset().union(*(each.divisors for each in operands)),
        )
    scaled = [each for each in gradients if each.power != 0]
    first = scaled[0] if scaled else gradients[0]
    return first._replace(
        number=None,
        parts=(),
        power=first.power if is_known and len(scaled) < 2 else None,
        is_share=is_known and any(each.is_share for each in gradients),
        is_divided=any(each.is_divided for each in operands),
        divisors=frozenset().union(*(each.divisors for each in operands)),
    )


def _merged(facts: Sequence[Fact]) -> Fact:
    """Returns the fact of a value that is one of several."""
    worst = max(each.replication for each in facts)
    numbers = {each.number for each in facts}
    return _added(facts)._replace(
        replication=worst,
        number=numbers.pop() if len(numbers) == 1 else None,
        parts=(),
        sums=frozenset().union(*(each.sums for each in facts)),
    )


def _varying(fact: Fact) -> Fact:
    return fact._replace(replication=Replication.VARYING)


# --- the messages -------------------------------------------------------------------------------------------


def _reduced_twice(reduced_at: str, summed_at: str, num_replicas: int) -> ReducedLossError:
    return ReducedLossError(
        f"The loss is already reduced over replicas at {reduced_at}, inside the differentiated function, and its gradients are "
        f"summed over {num_replicas} replicas again at {summed_at}: they would be {num_replicas} times too large. "
        f"Differentiate the replica's own share of the loss, and reduce the loss outside the differentiated function:\n"
        f"    loss, gradients = jax.value_and_grad(lambda w: rx.nn.compute_average_loss(losses(w)))(w)\n"
        f"    loss, gradients = rx.get_replica_context().all_reduce('sum', (loss, gradients))\n"
        f"Or take the mean of the gradients: all_reduce('mean', gradients). If your program divides by the number of replicas "
        f"elsewhere, say so with rx.assert_same(loss), where loss is the value that is differentiated."
    )


def _warn_of_second_average(line: str, num_replicas: int) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning(
            "%s: rx.nn.compute_average_loss divides by the global batch size, and the mean of its gradients over %d replicas "
            "divides by %d again: they are %d times too small. Write all_reduce('sum', gradients).",
            line,
            num_replicas,
            num_replicas,
            num_replicas,
        )


def _warn_of_split_average(line: str, num_replicas: int) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning(
            "%s: rx.nn.compute_average_loss divides by the global batch size, and the loss is divided by the %d replicas again: "
            "its gradients are %d times too small. Leave this division out.",
            line,
            num_replicas,
            num_replicas,
        )
