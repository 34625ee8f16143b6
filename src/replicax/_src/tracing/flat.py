"""A jaxpr as one list of operations between numbered values, whose order can be changed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, equations_in, variables, walked
from replicax._src.tracing.markers import read_p
from replicax._src.tracing.primitives import ELEMENTWISE, ELEMENTWISE_MARKS, JITS, REMATERIALISES
from replicax._src.tracing.replication import is_call
from replicax._src.user.user_code import UNKNOWN

Atom = Any
"""The number of a value, an int; or a literal of JAX, which has its value in ``val``."""


@final
class NumberedValues(dict[int, Any]):
    """The values of some numbers. Operations take their operands from it, and store their results in it."""

    def of(self, atoms: Iterable[Atom]) -> list[Any]:
        """Returns the values of atoms."""
        return [self[atom] if isinstance(atom, int) else atom.val for atom in atoms]

    def run(self, operations: Iterable[Operation]) -> NumberedValues:
        """Evaluates operations, in order."""
        for operation in operations:
            results = operation.bind(self.of(operation.operands))
            self.update(zip(operation.results, results, strict=True))
        return self


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

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of its primitive."""
        return self.eqn.params

    @property
    def numbers(self) -> set[int]:
        """The numbers of its operands."""
        return set(variables(self.operands))

    @property
    def operand_avals(self) -> list[Any]:
        """The shapes and dtypes of its operands."""
        return [atom.aval for atom in self.eqn.invars]

    @property
    def result_avals(self) -> list[Any]:
        """The shapes and dtypes of its results."""
        return [var.aval for var in self.eqn.outvars]

    @property
    def is_elementwise(self) -> bool:
        """True if it computes each element of its results from the same elements of its operands. Marks do too."""
        return self.name in ELEMENTWISE or self.name in ELEMENTWISE_MARKS

    @property
    def is_call(self) -> bool:
        """True if it calls a function: jit, checkpoint, or a function with a derivative of its own."""
        return is_call(self.eqn)

    @property
    def is_jit(self) -> bool:
        """True if it calls a function without changing its derivative."""
        return self.name in JITS and self.is_call

    @property
    def rematerialises(self) -> bool:
        """True if it is a ``jax.checkpoint``."""
        return self.name in REMATERIALISES

    @property
    def has_effects(self) -> bool:
        """True if it calls back into Python, or has another effect."""
        return bool(self.eqn.effects)

    @property
    def inner(self) -> list[FlatProgram]:
        """The functions that it has, whose own calls are not resolved."""
        return [
            FlatProgram.unresolved(*jax_compat.inner_jaxpr(each), self.line)
            for each in jax_compat.sub_jaxprs(self.eqn)
        ]

    @property
    def branches(self) -> list[FlatProgram]:
        """The branches of a condition, with all calls in them resolved."""
        inner = map(jax_compat.inner_jaxpr, self.params["branches"])
        return [FlatProgram(jaxpr, consts, is_call) for jaxpr, consts in inner]

    @property
    def inner_names(self) -> set[str]:
        """The names of the primitives in the functions that it has, at any depth."""
        return {eqn.primitive.name for eqn in equations_in(self.eqn)}

    @property
    def read(self) -> int | None:
        """The number of the read of a variable that it marks (``mark_read``); None for other operations."""
        return self.params["number"] if self.eqn.primitive is read_p else None

    @property
    def inner_reads(self) -> set[int]:
        """The numbers of the reads in the functions that it has, at any depth."""
        return {eqn.params["number"] for eqn in equations_in(self.eqn) if eqn.primitive is read_p}

    @property
    def num_scanned(self) -> tuple[int, int]:
        """The numbers of the constants and the carries of a scan."""
        return jax_compat.scan_counts(self.eqn)

    def bind(self, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Evaluates it for some operands, with other parameters if they are given."""
        return jax_compat.bind_equation(self.eqn, operands, params)


@final
class FlatProgram:
    """A jaxpr with calls of inner functions resolved.

    Args:
      consts: The values of the constvars.
      is_resolved: True for calls to resolve; by default all but those of ``jax.checkpoint``, whose borders matter.
      is_selected: True for conditions to resolve: both branches are computed, and one branch's results are selected.
        It gets the condition without results.
      called_at: The line of operations that have none of their own.

    Attributes:
      operations: The operations, in order.
      inputs: The numbers of the program's operands.
      input_avals: Their shapes and dtypes.
      outputs: The program's results.
      consts: The constant values, by number.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any] = (),
        is_resolved: Callable[[Any], bool] | None = None,
        is_selected: Callable[[Operation], bool] | None = None,
        *,
        called_at: str = UNKNOWN,
    ):
        self._is_resolved = is_resolved or _is_plain_call
        self._is_selected = is_selected or _never
        self._numbers = itertools.count()
        self.operations: list[Operation] = []
        self.consts: dict[int, Any] = {}
        self.inputs = [next(self._numbers) for _ in jaxpr.invars]
        self.input_avals = [var.aval for var in jaxpr.invars]
        self.outputs = self._inline(jaxpr, consts, self.inputs, called_at)

    @classmethod
    def unresolved(cls, jaxpr: Any, consts: Sequence[Any] = (), called_at: str = UNKNOWN) -> FlatProgram:
        """Returns a program whose calls of inner functions stay, with their own derivatives."""
        return cls(jaxpr, consts, _never, called_at=called_at)

    def slice(self, targets: Iterable[Atom], known: Collection[int] = ()) -> list[Operation]:
        """Returns the operations that compute the values ``targets``, in order; values that are ``known`` need none."""
        chosen: set[int] = set()
        missing = list(targets)
        while missing:
            atom = missing.pop()
            if not isinstance(atom, int) or atom in known or atom not in self._producers:
                continue
            at = self._producers[atom]
            if at not in chosen:
                chosen.add(at)
                missing += self.operations[at].operands
        return [self.operations[at] for at in sorted(chosen)]

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """Returns the results for some operands."""
        values = NumberedValues(self.consts | dict(zip(self.inputs, args, strict=True)))
        return values.run(self.operations).of(self.outputs)

    @functools.cached_property
    def _producers(self) -> dict[int, int]:
        """The position of the operation that computes each number."""
        return {number: at for at, each in enumerate(self.operations) for number in each.results}

    def _inline(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], called_at: str
    ) -> list[Atom]:
        held = [next(self._numbers) for _ in consts]
        self.consts.update(zip(held, consts, strict=True))

        def results(eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
            line = jax_compat.equation_line(eqn)
            line = called_at if line == UNKNOWN else line
            if self._is_resolved(eqn):
                return self._inline(*called(eqn, operands), line)
            if eqn.primitive.name == "cond" and self._is_selected(Operation(eqn, operands, (), line)):
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
