"""Finds functional state that replicas no longer share, when a function is traced with a value that it returned.

An argument leaf has drifted apart if it was the same on all replicas and is now replaced by a result of the same shape
that varies between them. Only floating leaves count, because random keys and counters vary on purpose.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.cache import ArgumentLeaf, static_leaf
from replicax._src.tracing.flat import FlatProgram
from replicax._src.tracing.program import ReplicaProgram
from replicax._src.tracing.replication import Replication, is_equalising, is_movement, transfer
from replicax._src.user.user_code import user_line
from replicax._src.values.distributed import PerReplica
from replicax._src.vocabulary.errors import DivergenceError

log = logging.getLogger("replicax")
_MAX_SHOWN = 5
_HAS_NO_SLOPE = frozenset(["ceil", "floor", "round", "sign"])


@final
@dataclass(frozen=True)
class Maker:
    """The maker of a value.

    Attributes:
      function: The identity of the function; see ``identity_of``.
      shared: The paths of the floating arguments of its shape that were the same on all replicas.
      index: The position of the value among the arrays that the program returned.
      drifted: For state that has drifted apart: the sentences for an error about its use as one array; else "".
    """

    function: Any
    shared: frozenset[str]
    index: int
    drifted: str = ""


@final
class DriftWatch:
    """Watches one program for state that has drifted apart; see ``ResultWatch``.

    Args:
      fn: The function. Neither it nor its arguments are kept.
      name: Its name.
      paths: Returns the names of its arguments.
      described, leaves: Their descriptions, and the arguments of the first call.
      raises: True if drift is an error.
      reported: The functions whose drift has been reported.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        program: ReplicaProgram,
        paths: Callable[[], Sequence[str]],
        described: Sequence[ArgumentLeaf],
        leaves: Sequence[Any],
        *,
        raises: bool,
        reported: set[Any],
    ):
        self._function, self._name, self._program = identity_of(fn), name, program
        self._paths, self._described = paths, described
        self._raises, self._reported = raises, reported
        self._drifted = self._drifted_results(leaves)

    def check(self, leaves: Sequence[Any]) -> None:
        """Warns of arguments that have drifted apart.

        Raises:
          DivergenceError: It is an error.
        """
        self._drifted_results(leaves)

    def maker_of(self, index: int, shape: tuple[int, ...]) -> Maker | None:
        replaced = frozenset(path for path, other in self._shared.items() if other == shape)
        note = self._drifted.get(index, "")
        return Maker(self._function, replaced, index, note) if replaced or note else None

    @functools.cached_property
    def _shared(self) -> Mapping[str, tuple[int, ...]]:
        return shared_shapes(self._paths(), self._described)

    def _drifted_results(self, leaves: Sequence[Any]) -> dict[int, str]:
        if all(not isinstance(leaf, PerReplica) or leaf.maker is None for leaf in leaves):
            return {}  # no program has made any of them
        program, paths = self._program, self._paths()
        drifted = drifted_paths(self._function, program, paths, self._described, leaves)
        if drifted and (self._raises or self._function not in self._reported):
            self._reported.add(self._function)
            tell(self._name, drifted, reduced_at=program.reduced_at, raises=self._raises)
        return drifted_results(self._name, program, paths, leaves, drifted)


def identity_of(fn: Any, seen: set[int] | None = None) -> Any:
    """Returns a key that is equal for functions that a loop makes repeatedly: their code and that of inner functions.

    Decorated functions and ``functools.partial`` objects have equal keys only if the inner functions do. Other
    callables, such as models, are compared by identity, and methods by the identity of their objects.
    """
    seen = set() if seen is None else seen
    if isinstance(fn, types.MethodType):
        return identity_of(fn.__func__, seen), static_leaf(fn.__self__)
    if isinstance(fn, functools.partial):
        own, held = None, [fn.func, *fn.args, *fn.keywords.values()]
    elif isinstance(fn, types.FunctionType):
        own, held = getattr(fn, "replicax_family", None) or fn.__code__, list(_held_by(fn))
    else:
        wrapped = getattr(fn, "__wrapped__", None)  # set by jax.jit and rx.function
        return identity_of(wrapped, seen) if isinstance(wrapped, types.FunctionType) else static_leaf(fn)
    if id(fn) in seen:
        return own
    seen.add(id(fn))
    return (own, *(identity_of(one, seen) for one in held if callable(one)))


def _held_by(fn: types.FunctionType) -> Iterator[Any]:
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


def shared_shapes(paths: Sequence[str], described: Sequence[ArgumentLeaf]) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of the floating leaves that are the same on all replicas, by path."""
    return {
        path: leaf.shape
        for path, leaf in zip(paths, described, strict=True)
        if leaf.kind == "whole" and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def drifted_paths(
    function: Any,
    program: ReplicaProgram,
    paths: Sequence[str],
    described: Sequence[ArgumentLeaf],
    leaves: Sequence[Any],
) -> list[str]:
    """Returns the paths of state that has drifted apart. A value that each replica only accumulates has not."""
    arrays = [i for i, leaf in enumerate(described) if leaf.kind != "static"]
    found = []
    for position, i in enumerate(arrays):
        maker = leaves[i].maker if isinstance(leaves[i], PerReplica) else None
        if maker is None or maker.function != function or paths[i] not in maker.shared:
            continue
        if not _is_accumulated(program, position, maker.index):
            found.append(paths[i])
    return found


def drifted_results(
    name: str, program: ReplicaProgram, paths: Sequence[str], leaves: Sequence[Any], drifted: Sequence[str]
) -> dict[int, str]:
    """Returns the sentences for errors about the next values of state that has drifted apart, by their position among
    the results.
    """
    found = {}
    for path, leaf in zip(paths, leaves, strict=True):
        maker = leaf.maker if isinstance(leaf, PerReplica) else None
        if maker is not None and path in drifted:
            found[maker.index] = (
                f"It replaces {path} of {name}, run at {user_line()}, which was the same on all replicas: each replica trains its "
                f"own copy of it. {_remedy(program.reduced_at)}"
            )
        elif maker is not None and maker.drifted:
            found[maker.index] = maker.drifted
    return found


def _remedy(reduced_at: str) -> str:
    if not reduced_at:
        return "Sum the gradients: gradients = rx.get_replica_context().all_reduce('sum', gradients)."
    return (
        f"The loss is already reduced over replicas at {reduced_at}, inside the differentiated function, so take the mean of "
        "the gradients: gradients = rx.get_replica_context().all_reduce('mean', gradients). Or differentiate the replica's own "
        "share of the loss, and sum its gradients."
    )


def _is_accumulated(program: ReplicaProgram, position: int, successor: int) -> bool:
    """Returns True if an argument only enters its own next value, element by element, like a sum over steps.

    It may be multiplied once by a value that varies between replicas, such as a mask. Gradient descent does so twice:
    in the loss and in its derivative.
    """
    variant = program.variants[0]
    flat = FlatProgram(variant.jaxpr)
    argument = flat.inputs[len(variant.consts) + len(variant.entries) + position]
    replications = dict(zip(flat.inputs, variant.input_replications, strict=True)) | {
        argument: Replication.INVARIANT
    }
    products = {
        argument: 0
    }  # products with varying values on the way to each reached value; -1 after an operation like a comparison
    for operation in flat.slice(flat.outputs):
        operands = [atom for atom in operation.operands if not isinstance(atom, jax_compat.Literal)]
        given = [
            Replication.INVARIANT
            if isinstance(atom, jax_compat.Literal)
            else replications.get(atom, Replication.INVARIANT)
            for atom in operation.operands
        ]
        replications.update(zip(operation.results, transfer(operation.eqn, given, None), strict=True))
        reached = [products[atom] for atom in operands if atom in products]
        if not reached or is_equalising(operation.eqn):
            continue
        if not is_movement(operation.eqn):
            return False
        count = max(reached)
        if operation.eqn.primitive.name == "mul" and Replication.VARYING in given:
            count += sum(number >= 0 for number in reached)
        is_flat = operation.eqn.primitive.name in _HAS_NO_SLOPE or not jnp.issubdtype(
            operation.eqn.outvars[0].aval.dtype, jnp.inexact
        )
        products.update(dict.fromkeys(operation.results, -1 if is_flat else count))
    ends = {
        i: products[a]
        for i, a in enumerate(flat.outputs)
        if not isinstance(a, jax_compat.Literal) and a in products
    }
    return ends.keys() <= {successor} and ends.get(successor, 0) < 2


def tell(name: str, paths: Sequence[str], *, reduced_at: str = "", raises: bool) -> None:
    """Warns of state that has drifted apart, with a remedy.

    Args:
      reduced_at: The line that reduces the loss in the differentiated function; "" if there is none.

    Raises:
      DivergenceError: If ``raises``.
    """
    more = f" and {len(paths) - _MAX_SHOWN} more" if len(paths) > _MAX_SHOWN else ""
    were, differ, train = ("were", "differ", "them") if len(paths) > 1 else ("was", "differs", "it")
    told = (
        f"{name}, run at {user_line()}: {', '.join(paths[:_MAX_SHOWN])}{more} {were} the same on all replicas in an earlier call and now "
        f"{differ}: each replica trains its own copy of {train}. {_remedy(reduced_at)} To keep one value per replica on purpose, create it with "
        "strategy.experimental_distribute_values_from_function(...). If the replicas' values are equal, return rx.assert_same(value)."
    )
    if raises:
        raise DivergenceError(told)
    log.warning("%s", told)
