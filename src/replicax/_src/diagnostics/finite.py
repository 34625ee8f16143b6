"""``RunOptions(check_finite=True)``: a program that also reports where its first NaN and first infinity arose.

An operation counts as the origin of a NaN if no operand is NaN, and as the origin of an infinity if all operands are
finite. An attention mask of -inf is a literal, and does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called
from replicax._src.tracing.labels import LabelWatch
from replicax._src.tracing.program import Output, ReplicaProgram, Variant
from replicax._src.tracing.replication import Replication, is_call
from replicax._src.user.user_code import UNKNOWN
from replicax._src.vocabulary.errors import NotFiniteError

_NONE = -1
_WHAT = ("nan", "infinite")


@final
@dataclass(frozen=True)
class FiniteCheck:
    """Raises the error for a value that a watched program has found.

    Attributes:
      name: The name of the function.
      results: The names of the results, then of the assigned variables.
      origins: The descriptions of arguments, variables and equations, by variant.
      variant_of_replica: The variant that each replica runs.
      labels: The labels that the program notes.
    """

    name: str
    results: Sequence[str]
    origins: Sequence[Sequence[str]]
    variant_of_replica: Sequence[int]
    labels: LabelWatch

    def __call__(self, found: Any) -> None:
        """Waits for the program's findings.

        Args:
          found: [R, 3]: the first result that is not finite, the origin of the first NaN, and the origin of the first
            infinity; -1 for none.

        Raises:
          LabelError: Labels are outside the range of the classes.
          NotFiniteError: A result or a new value of a variable is not finite.
        """
        rows = np.asarray(found)
        self.labels.check(self.name)
        bad = [r for r, row in enumerate(rows) if row[0] != _NONE]
        if not bad:
            return
        # Replicas receive non-finite values from each other: the earliest one is the origin.
        begun = [r for r in bad if (rows[r, 1:] != _NONE).any()] or bad
        first = min(begun, key=lambda r: sorted(i if i != _NONE else np.inf for i in rows[r, 1:]))
        result, *births = rows[first]
        known = self.origins[self.variant_of_replica[first]]
        # In program order, because a NaN often comes from an infinity.
        in_order = sorted(zip(births, _WHAT, strict=True), key=lambda birth: birth[0])
        told = [
            f"The first {what} value comes from {known[index]}." for index, what in in_order if index != _NONE
        ]
        raise NotFiniteError(
            f"{self.name}: {self.results[result]} is not finite on replica {first}. {' '.join(told)} The variables keep the values "
            "that they had before this step."
        )


def watched(
    program: ReplicaProgram,
    name: str,
    arguments: Sequence[str],
    rows_of_replica: Sequence[int] | None,
    labels: LabelWatch,
) -> tuple[ReplicaProgram, FiniteCheck]:
    """Returns a program with one more result, and the check that takes this result.

    Args:
      arguments: The names of the arrays that the program takes.
      labels: The labels that the program notes.
      rows_of_replica: See ``replica_body``. Values that a replica without rows computes do not count.
    """
    num_replicas = len(program.variant_of_replica)
    variants, origins = [], []
    for number, variant in enumerate(program.variants):
        has_rows = rows_of_replica is None or rows_of_replica[program.variant_of_replica.index(number)] > 0
        watcher = _Watcher(variant, arguments, has_rows)
        variants.append(watcher.variant(num_replicas))
        origins.append(watcher.origins)
    first = program.variants[0]
    paths = jax.tree_util.tree_flatten_with_path(
        jax.tree_util.tree_unflatten(first.tree, range(len(first.outputs))), is_leaf=lambda leaf: leaf is None
    )[0]
    is_array = [output.is_array for output in first.outputs]
    results = [f"result{jax.tree_util.keystr(path)}" for path, i in paths if i is not None and is_array[i]]
    assigned = [f"the new value of variable {entry.binding.name!r}" for entry in first.written]
    check = FiniteCheck(name, [*results, *assigned], origins, program.variant_of_replica, labels)
    return ReplicaProgram(variants, program.variant_of_replica), check


@final
class _Watcher:
    """Evaluates a variant and tracks the origins of values that are not finite.

    Attributes:
      origins: The descriptions of origins, by number.
    """

    def __init__(self, variant: Variant, arguments: Sequence[str], has_rows: bool):
        self._variant, self._has_rows = variant, has_rows
        self.origins: list[str] = []
        self._numbers: dict[int, int] = {}
        states = [f"variable {entry.binding.name!r}, before the step" for entry in variant.entries]
        self._inputs = [*("a constant of the function" for _ in variant.consts), *states, *arguments]

    def variant(self, num_replicas: int) -> Variant:
        """Returns the variant with one more result, after the others."""
        variant = self._variant
        changed = variant.retraced(
            lambda _, args: self._evaluate(args, num_replicas), [(REPLICA_AXIS, num_replicas)]
        )
        return dataclasses.replace(
            changed,
            outputs=[*variant.outputs, Output(True)],
            out_replications=[*variant.out_replications, Replication.REDUCED],
        )

    def _evaluate(self, args: Sequence[Any], num_replicas: int) -> list[Any]:
        births = (jnp.int32(_NONE), jnp.int32(_NONE))
        for what, arg in zip(self._inputs, args, strict=True):
            births = self._noted(births, [], [arg], self._number(what))
        outs, births = self._run(self._variant.jaxpr, (), args, births, UNKNOWN)
        is_bad = [jnp.bool_(False) if not _is_float(out) else ~jnp.isfinite(out).all() for out in outs]
        first_bad = jnp.int32(_NONE)
        if is_bad and self._has_rows:
            stacked = jnp.stack(is_bad)
            first_bad = jnp.where(stacked.any(), jnp.argmax(stacked), _NONE).astype(jnp.int32)
        found = jnp.stack([first_bad, *births])
        found = found[None] if num_replicas == 1 else jax.lax.all_gather(found, REPLICA_AXIS)
        num_arrays = self._variant.num_arrays
        return [*outs[:num_arrays], found, *outs[num_arrays:]]

    def _number(self, what: str, key: int | None = None) -> int:
        if key is not None and key in self._numbers:
            return self._numbers[key]
        self.origins.append(what)
        if key is not None:
            self._numbers[key] = len(self.origins) - 1
        return len(self.origins) - 1

    def _noted(self, births: Any, operands: Sequence[Any], results: Sequence[Any], number: int) -> Any:
        """Returns the updated origins after an operation."""
        operands, results = list(filter(_is_float, operands)), list(filter(_is_float, results))
        if not results:
            return births
        kinds = (jnp.isnan, lambda x: ~jnp.isfinite(x)), (jnp.isnan, jnp.isinf)
        noted = []
        for birth, of_operands, of_results in zip(births, *kinds, strict=True):
            is_born = _any(of_results, results) & ~_any(of_operands, operands)
            noted.append(jnp.where((birth == _NONE) & is_born, jnp.int32(number), birth))
        return tuple(noted)

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], births: Any, called_at: str
    ) -> tuple[list[Any], Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            line = jax_compat.equation_line(eqn)
            line = called_at if line == UNKNOWN else line
            rule = _RULES.get(eqn.primitive.name, _Watcher._call if is_call(eqn) else None)
            if rule is not None:
                results, births = rule(self, eqn, operands, births, line)
            else:
                results = jax_compat.bind_equation(eqn, operands)
                backward = " in the backward pass" if jax_compat.is_transposed(eqn) else ""
                number = self._number(f"{eqn.primitive.name} at {line}{backward}", id(eqn))
                births = self._noted(births, operands, results, number)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars)), births

    def _call(self, eqn: Any, operands: Sequence[Any], births: Any, line: str) -> tuple[list[Any], Any]:
        return self._run(*called(eqn, operands), births, line)

    def _cond(self, eqn: Any, operands: Sequence[Any], births: Any, line: str) -> tuple[list[Any], Any]:
        index, *rest = operands
        branches = [
            self._part(jax_compat.inner_jaxpr(branch), len(rest), line) for branch in eqn.params["branches"]
        ]
        index = index.astype(jnp.int32)
        return _split(jax.lax.switch(index, branches, *rest, *births))

    def _scan(self, eqn: Any, operands: Sequence[Any], births: Any, line: str) -> tuple[list[Any], Any]:
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        body, body_consts = jax_compat.inner_jaxpr(eqn.params["jaxpr"])
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]

        def step(state: Any, xs: Any) -> Any:
            carried, births = state
            outs, births = self._run(body, body_consts, [*consts, *carried, *xs], births, line)
            return (outs[:num_carry], births), outs[num_carry:]

        (carried, births), ys = jax.lax.scan(
            step,
            (list(carry), births),
            operands[num_consts + num_carry :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        return [*carried, *ys], births

    def _while(self, eqn: Any, operands: Sequence[Any], births: Any, line: str) -> tuple[list[Any], Any]:
        num_cond, num_body = jax_compat.while_counts(eqn)
        cond, cond_consts = jax_compat.inner_jaxpr(eqn.params["cond_jaxpr"])
        body, body_consts = jax_compat.inner_jaxpr(eqn.params["body_jaxpr"])
        of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]

        def goes_on(state: Any) -> Any:
            return self._run(cond, cond_consts, [*of_cond, *state[0]], state[1], line)[0][0]

        def step(state: Any) -> Any:
            return self._run(body, body_consts, [*of_body, *state[0]], state[1], line)

        return jax.lax.while_loop(goes_on, step, (list(operands[num_cond + num_body :]), births))

    def _part(self, opened: tuple[Any, list[Any]], num_operands: int, line: str) -> Callable[..., list[Any]]:
        jaxpr, consts = opened

        def run(*operands: Any) -> list[Any]:
            outs, births = self._run(jaxpr, consts, operands[:num_operands], operands[num_operands:], line)
            return [*outs, *births]

        return run


_RULES: dict[str, Callable[..., tuple[list[Any], Any]]] = {
    "cond": _Watcher._cond,
    "scan": _Watcher._scan,
    "while": _Watcher._while,
}


def _split(results: Sequence[Any]) -> tuple[list[Any], Any]:
    return list(results[:-2]), tuple(results[-2:])


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _any(is_so: Callable[[Any], Any], values: Sequence[Any]) -> Any:
    found = jnp.bool_(False)
    for value in values:
        found = found | is_so(value).any()
    return found
