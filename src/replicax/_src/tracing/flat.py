"""A jaxpr as one list of operations between numbered values, whose order can be changed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.tracing.equations import called, variables, walked
from replicax._src.tracing.primitives import REMATERIALISES
from replicax._src.tracing.replication import is_call
from replicax._src.user_code import UNKNOWN

Atom = Any
"""The number of a value, or a literal of JAX."""


@dataclass(frozen=True)
class Operation:
    """An equation between numbered values. A resolved call is replaced by the operations of its function.

    Attributes:
      line: The line of the user's code.
    """

    eqn: Any
    operands: Sequence[Atom]
    results: Sequence[int]
    line: str


@final
class FlatProgram:
    """A jaxpr with calls of inner functions resolved.

    Args:
      consts: The values of the constvars.
      is_resolved: True for calls to resolve; by default all but those of ``jax.checkpoint``, whose borders matter.
      is_selected: True for conditions to resolve: both branches are computed, and one branch's results are selected.

    Attributes:
      operations: The operations, in order.
      inputs: The numbers of the program's operands.
      outputs: The program's results.
      consts: The constant values, by number.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any] = (),
        is_resolved: Callable[[Any], bool] | None = None,
        is_selected: Callable[[Any], bool] | None = None,
    ):
        self._is_resolved = is_resolved or _is_plain_call
        self._is_selected = is_selected or _never
        self._numbers = itertools.count()
        self.operations: list[Operation] = []
        self.consts: dict[int, Any] = {}
        self.inputs = [next(self._numbers) for _ in jaxpr.invars]
        self.outputs = self._inline(jaxpr, consts, self.inputs)

    def slice(self, wanted: Iterable[Atom], given: Collection[int] = ()) -> list[Operation]:
        """Returns the operations that compute the values ``wanted``, in order; values that are ``given`` need none."""
        chosen: set[int] = set()
        missing = list(wanted)
        while missing:
            atom = missing.pop()
            if isinstance(atom, jax_compat.Literal) or atom in given or atom not in self._producers:
                continue
            at = self._producers[atom]
            if at not in chosen:
                chosen.add(at)
                missing += self.operations[at].operands
        return [self.operations[at] for at in sorted(chosen)]

    @functools.cached_property
    def _producers(self) -> dict[int, int]:
        """The position of the operation that computes each number."""
        return {number: at for at, each in enumerate(self.operations) for number in each.results}

    def _inline(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], called_at: str = UNKNOWN
    ) -> list[Atom]:
        held = [next(self._numbers) for _ in consts]
        self.consts.update(zip(held, consts, strict=True))

        def results(eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
            line = jax_compat.equation_line(eqn)
            line = called_at if line == UNKNOWN else line
            if self._is_resolved(eqn):
                return self._inline(*called(eqn, operands), line)
            if eqn.primitive.name == "cond" and self._is_selected(eqn):
                return self._inline_selection(eqn, operands, line)
            numbers = [next(self._numbers) for _ in eqn.outvars]
            self.operations.append(Operation(eqn, operands, numbers, line))
            return numbers

        return walked(jaxpr, inputs, results, held, literal=lambda atom: atom)[0]

    def _inline_selection(self, eqn: Any, operands: Sequence[Atom], line: str) -> list[Atom]:
        branches = [jax_compat.inner_jaxpr(branch) for branch in eqn.params["branches"]]
        results = [self._inline(inner, consts, operands[1:], line) for inner, consts in branches]
        avals = [eqn.invars[0].aval, *(var.aval for var in eqn.outvars for _ in branches)]
        selection, _ = jax_compat.trace(functools.partial(_selected, len(branches)), avals)
        columns = itertools.chain(*zip(*results, strict=True))
        return self._inline(selection, (), [operands[0], *columns], line)


def _selected(num_branches: int, index: Any, *results: Any) -> list[Any]:
    """Returns the results of branch ``index``, clamped as in a JAX condition. ``results`` has each result for all
    branches.
    """
    if jnp.issubdtype(index.dtype, jnp.integer):
        index = jax.lax.clamp(0, index, num_branches - 1)
        index = index.astype(bool) if num_branches == 2 else index
    starts = range(0, len(results), num_branches)
    return [jax.lax.select_n(index, *results[start : start + num_branches]) for start in starts]


def _never(eqn: Any) -> bool:
    del eqn
    return False


def _is_plain_call(eqn: Any) -> bool:
    return is_call(eqn) and eqn.primitive.name not in REMATERIALISES


def read(env: Mapping[int, Any], atom: Atom) -> Any:
    """Returns the value of an atom, given the values of all numbers."""
    return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]


def numbers_in(operations: Sequence[Operation], atoms: Sequence[Atom] = ()) -> set[int]:
    """Returns the numbers of ``atoms`` and of all values that operations take."""
    return set(variables(itertools.chain(atoms, *(operation.operands for operation in operations))))


def run(operations: Sequence[Operation], env: dict[int, Any]) -> None:
    """Evaluates operations. Takes their operands from ``env`` and stores their results there."""
    for operation in operations:
        operands = [read(env, atom) for atom in operation.operands]
        env.update(zip(operation.results, jax_compat.bind_equation(operation.eqn, operands), strict=True))
