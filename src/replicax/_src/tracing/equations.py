"""Walks over the equations of a jaxpr: lists them at any depth, opens calls, or evaluates them by a rule."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from replicax._src.jax_internals import jax_compat

Rule = Callable[[Any, list[Any]], Sequence[Any]]
"""Returns the values of an equation's results, given those of its operands."""


def is_variable(atom: Any) -> bool:
    """Returns True if an operand is not a literal."""
    return not isinstance(atom, jax_compat.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the operands that are not literals."""
    return [atom for atom in atoms if is_variable(atom)]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs of the functions that an equation has."""
    return [jax_compat.inner_jaxpr(sub)[0] for sub in jax_compat.sub_jaxprs(eqn)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):  # (a generator for each equation would cost more)
            yield from equations(inner)


def equations_in(eqn: Any) -> Iterator[Any]:
    """Yields all equations of the functions in an equation, at any depth."""
    for inner in inner_jaxprs(eqn):
        yield from equations(inner)


def has_any(jaxpr: Any, names: Container[str]) -> bool:
    """Returns True if a jaxpr contains an operation of one of these names, at any depth."""
    return any(eqn.primitive.name in names for eqn in equations(jaxpr))


def called(eqn: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """Returns the jaxpr, the constants and the arguments of the function that an equation calls."""
    inner, consts = jax_compat.inner_jaxpr(jax_compat.sub_jaxprs(eqn)[0])
    return inner, consts, operands[len(operands) - len(inner.invars) :]


def walked(
    jaxpr: Any,
    args: Sequence[Any],
    rule: Rule = jax_compat.bind_equation,
    consts: Sequence[Any] = (),
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> tuple[list[Any], dict[Any, Any]]:
    """Evaluates a jaxpr with a value for each of its variables: an array, or a fact about it.

    Args:
      args, consts: The values of its invars and its constvars.
      rule: The function to call for each equation, in order.
      literal: Returns the value of a literal.

    Returns:
      The values of its results, and of all its variables.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars)), env


def evaluated(
    jaxpr: Any, args: Sequence[Any], rule: Rule = jax_compat.bind_equation, consts: Sequence[Any] = ()
) -> list[Any]:
    """Returns the results of a jaxpr, and evaluates each equation by a rule."""
    return walked(jaxpr, args, rule, consts)[0]


def computing(jaxpr: Any, output: int) -> tuple[Any, list[bool]]:
    """Returns the part of a jaxpr that computes one result, and True for each operand that the part uses.

    Operations with an effect go, unless the result depends on them.
    """
    wanted = [jaxpr.outvars[output]]
    eqns = leading_to(jaxpr.eqns, wanted, keeps_effects=False)
    return jax_compat.without_dead_code(jax_compat.rebuild(jaxpr, outvars=wanted, eqns=eqns))


def first_results(jaxpr: Any, count: int) -> Any:
    """Returns a jaxpr with its first results only, without the operations that only other results need. Marks stay."""
    outvars = jaxpr.outvars[:count]
    needed, kept = set(variables(outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if not eqn.outvars or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(variables(eqn.invars))
    return jax_compat.rebuild(jaxpr, outvars=outvars, eqns=kept[::-1])


def leading_to(eqns: Sequence[Any], results: Iterable[Any], *, keeps_effects: bool) -> list[Any]:
    """Returns the equations that compute the results.

    Args:
      keeps_effects: True to keep equations with an effect, and the equations that they depend on.
    """
    needed, chosen = set(variables(results)), []
    for eqn in reversed(eqns):
        if (keeps_effects and eqn.effects) or not needed.isdisjoint(eqn.outvars):
            chosen.append(eqn)
            needed.update(variables(eqn.invars))
    return chosen[::-1]
