"""A replica function's program as rounds, whose sums the caller exchanges outside of it.

It is cut at its top-level collectives. Sums, maxima and minima over the replicas are combined as they are. An
``all_gather`` becomes a sum of arrays with one row for each replica, of which each replica fills its own, which gives
the same bits. Other collectives, and those in loops and conditions, cannot be cut.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, equations_in, evaluated, inner_jaxprs, variables
from replicax._src.tracing.flat import Atom, FlatProgram, Operation
from replicax._src.tracing.primitives import CALLBACKS, SUMS
from replicax._src.tracing.replication import (
    collective_axes,
    is_call,
    is_call_with_collective,
    is_replica_collective,
    meets,
)
from replicax._src.tracing.rounds import Combined, Computation, Reduction, RoundsOfSums

Number = Callable[[], Any]
"""Returns the number of the replica, in the trace of its program."""

_REDUCTIONS: dict[str, Reduction] = {**dict.fromkeys(SUMS, "sum"), "pmax": "max", "pmin": "min"}
_GATHERS = frozenset(["all_gather", "all_gather_invariant"])


class UncutError(Exception):
    """The program cannot be cut into rounds. The text is the subject of a sentence."""


replicas_p = jax_compat.jaxpr_primitive("replicax_replicas")
"""The computation of each replica, in code of all replicas: its jaxpr may use the axis ``replica``. Its results are
equal on all of them, such as the rows of all.
"""


def cut_at_sums(jaxpr: Any, replica: Number, num_replicas: int, *, takes_first: bool = True) -> RoundsOfSums:
    """Returns the rounds of a program.

    Args:
      jaxpr: The program, without constvars. With ``takes_first``, replicas differ only in their number on the axis, in
        ``replicas_p``; otherwise in their operands too.
      replica: Returns the number of the replica.
      num_replicas: R.
      takes_first: True to make all results equal in all processes, given equal operands: if replicas compute different
        values for one, the first one's is taken.

    Raises:
      UncutError: It has a collective of another kind, or in a loop, or a callback with effects.
    """
    program = FlatProgram(jaxpr, (), _is_opened)
    cut = _Cut(program, replica, num_replicas, is_equal=takes_first)
    for operation in program.operations:
        cut.add(operation)
    outputs = list(map(cut.first, program.outputs)) if takes_first else list(program.outputs)
    return RoundsOfSums(program.inputs, program.consts, cut.computations, cut.rounds, outputs)


def _is_opened(eqn: Any) -> bool:
    if eqn.primitive is replicas_p or is_call_with_collective(eqn):
        return True
    return is_call(eqn) and any(each.primitive is replicas_p for each in equations_in(eqn))


@final
class _Cut:
    def __init__(self, program: FlatProgram, replica: Number, num_replicas: int, *, is_equal: bool):
        self._replica, self._num_replicas, self._is_equal = replica, num_replicas, is_equal
        self._new_numbers = itertools.count(-1, -1)
        self._ready = dict.fromkeys(
            [*program.inputs, *program.consts], 0
        )  # the first round that has the value
        self._varying: set[int] = set()
        self.computations: list[Computation] = []
        self.rounds: list[list[Combined]] = []

    def add(self, operation: Operation) -> None:
        """Adds an operation of the program, after those that compute its operands."""
        eqn = operation.eqn
        if is_replica_collective(eqn):
            self._add_collective(operation)
            return
        names = operation.inner_names | {operation.name}
        if meets(eqn) or replicas_p.name in names:
            raise UncutError(f"A collective, or strategy.run, in a loop or a condition, at {operation.line},")
        if operation.has_effects and names & CALLBACKS:
            raise UncutError(f"A callback with effects, at {operation.line},")
        if not _can_ask(eqn):
            raise UncutError(f"{operation.name} with the number of the replica inside, at {operation.line},")
        evaluate = functools.partial(_evaluated, eqn, replica=self._replica)
        if operation.has_effects:
            self._add_print(operation, evaluate)
        else:
            self._compute(operation.operands, operation.results, evaluate, varies=asks_for_number(eqn))

    def _add_print(self, operation: Operation, evaluate: Callable[[Any], Sequence[Any]]) -> None:
        """Adds an operation that prints. A number that travels makes each replica evaluate it once."""
        token = next(self._new_numbers)
        self._compute(
            operation.operands,
            [*operation.results, token],
            lambda args: [*evaluate(args), jnp.int32(0)],
            varies=True,
        )
        self._combine(token, next(self._new_numbers), "sum")

    def _add_collective(self, operation: Operation) -> None:
        name, params = operation.name, operation.params
        is_known = name in _REDUCTIONS or name in _GATHERS
        if (
            not is_known
            or len(collective_axes(operation.eqn)) > 1
            or params.get("axis_index_groups") is not None
        ):
            raise UncutError(f"The collective {name}, at {operation.line},")
        for operand, result in zip(operation.operands, operation.results, strict=True):
            if name in _GATHERS:
                rows = self.gathered(operand)
                arrange = functools.partial(
                    _arranged, dim=params["all_gather_dimension"], is_tiled=params["tiled"]
                )
                self._compute([rows], [result], lambda args, arrange=arrange: [arrange(args[0])])
            else:
                self._combine(self._computed(operand), result, _REDUCTIONS[name])

    def first(self, atom: Atom) -> Atom:
        """Returns a value of which all replicas have the first one's."""
        if not self._varies(atom):
            return atom
        return self._sent(atom, self._of_first)

    def gathered(self, atom: Atom) -> int:
        """Returns the array [R, ...] of the values of all replicas."""
        return self._sent(atom, self._in_own_row)

    def _sent(self, atom: Atom, part_of: Callable[[Any], Any]) -> int:
        """Returns the sum of what replicas make of their values. Typed random keys travel as words."""
        part, total, result = (next(self._new_numbers) for _ in range(3))
        kinds: list[Any] = []

        def part_in_trace(args: Sequence[Any]) -> list[Any]:
            value = jnp.asarray(args[0])
            is_key = jax_compat.is_typed_key(value.dtype)
            kinds[:] = [jax.random.key_impl(value) if is_key else None]
            return [part_of(jax.random.key_data(value) if is_key else value)]

        def result_in_trace(args: Sequence[Any]) -> list[Any]:
            # A result that is an operand could share its memory.
            if kinds[0] is None:
                return [jnp.copy(args[0])]
            return [jax.random.wrap_key_data(args[0], impl=kinds[0])]

        self._compute([atom], [part], part_in_trace, varies=True)
        self._combine(part, total, "sum")
        self._compute([total], [result], result_in_trace)
        return result

    def _of_first(self, value: Any) -> Any:
        return jnp.where(self._replica() == 0, value, _nothing(value.shape, value.dtype))

    def _in_own_row(self, value: Any) -> Any:
        rows = _nothing((self._num_replicas, *value.shape), value.dtype)
        return jax.lax.dynamic_update_index_in_dim(rows, value, self._replica(), 0)

    def _computed(self, atom: Atom) -> int:
        if isinstance(atom, int):
            return atom
        number = next(self._new_numbers)
        self._compute([atom], [number], lambda args: [jnp.asarray(args[0])])
        return number

    def _compute(
        self,
        operands: Sequence[Atom],
        results: Sequence[int],
        evaluate: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        varies: bool = False,
    ) -> None:
        varies = varies or any(map(self._varies, operands))
        if varies:
            self._varying.update(results)
        # If the operands of replicas differ, so do all results.
        is_invariant = self._is_equal and not varies
        invariant = Computation(operands, results, evaluate) if is_invariant else None
        self.computations.append(Computation(operands, results, evaluate, invariant))
        self._ready.update(dict.fromkeys(results, self._round_of(operands)))

    def _combine(self, part: int, result: int, reduction: Reduction) -> None:
        number = self._round_of([part])
        if number == len(self.rounds):
            self.rounds.append([])
        self.rounds[number].append(Combined(part, result, reduction))
        self._ready[result] = number + 1

    def _varies(self, atom: Atom) -> bool:
        return isinstance(atom, int) and atom in self._varying

    def _round_of(self, atoms: Sequence[Atom]) -> int:
        return max((self._ready[atom] for atom in variables(atoms)), default=0)


def _nothing(shape: Sequence[int], dtype: Any) -> Any:
    """Returns what changes no bit of a number that is added to it: a positive zero would change a negative one."""
    return jnp.full(shape, -0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


def _arranged(rows: Any, dim: int, is_tiled: bool) -> Any:
    """Returns the result of an ``all_gather``, given the values of the replicas [R, ...]."""
    moved = jnp.moveaxis(rows, 0, dim)
    if not is_tiled:
        return moved
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


# --- the number of the replica ------------------------------------------------------------------------


def asks_for_number(eqn: Any) -> bool:
    """Returns True if an equation is, or has at any depth, a question for the number of the replica."""
    return any(
        each.primitive.name == "axis_index" and REPLICA_AXIS in collective_axes(each)
        for each in (eqn, *equations_in(eqn))
    )


def _can_ask(eqn: Any) -> bool:
    """Returns True unless the number is asked for inside of an operation that cannot be given it."""
    if eqn.primitive.name == "axis_index" or not asks_for_number(eqn):
        return True
    is_opened = is_call(eqn) or eqn.primitive.name in ("cond", "scan", "while")
    return is_opened and all(_can_ask(each) for inner in inner_jaxprs(eqn) for each in inner.eqns)


def _evaluated(eqn: Any, operands: Sequence[Any], replica: Number) -> Sequence[Any]:
    """Evaluates an equation without the axis, for a replica whose number is known."""
    if not asks_for_number(eqn):
        return jax_compat.bind_equation(eqn, operands)
    name = eqn.primitive.name
    if name == "axis_index":
        return [replica()]
    rule = functools.partial(_evaluated, replica=replica)
    if is_call(eqn):
        inner, consts, given = called(eqn, list(operands))
        return evaluated(inner, given, rule, consts)
    functions = [
        functools.partial(_call, *jax_compat.inner_jaxpr(each), rule) for each in jax_compat.sub_jaxprs(eqn)
    ]
    if name == "cond":
        return jax.lax.switch(operands[0].astype(jnp.int32), functions, *operands[1:])
    if name == "scan":
        return _scanned(eqn, operands, functions[0])
    assert name == "while", name
    return _looped(eqn, operands)(rule)


def _call(jaxpr: Any, consts: Sequence[Any], rule: Any, *args: Any) -> list[Any]:
    return evaluated(jaxpr, list(args), rule, consts)


def _scanned(eqn: Any, operands: Sequence[Any], body: Callable[..., list[Any]]) -> list[Any]:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    consts, first, xs = (
        list(operands[:num_consts]),
        list(operands[num_consts : num_consts + num_carry]),
        list(operands[num_consts + num_carry :]),
    )

    def step(carry: Any, x: Any) -> Any:
        results = body(*consts, *carry, *x)
        return results[:num_carry], results[num_carry:]

    params = eqn.params
    last, ys = jax.lax.scan(
        step, first, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*last, *ys]


def _looped(eqn: Any, operands: Sequence[Any]) -> Callable[[Any], list[Any]]:
    num_cond, num_body = jax_compat.while_counts(eqn)
    of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]

    def run(rule: Any) -> list[Any]:
        condition = functools.partial(_call, *jax_compat.inner_jaxpr(eqn.params["cond_jaxpr"]), rule)
        body = functools.partial(_call, *jax_compat.inner_jaxpr(eqn.params["body_jaxpr"]), rule)
        return list(
            jax.lax.while_loop(
                lambda carry: condition(*of_cond, *carry)[0],
                lambda carry: body(*of_body, *carry),
                list(operands[num_cond + num_body :]),
            )
        )

    return run
