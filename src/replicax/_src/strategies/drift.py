"""Functional state that replicas no longer share: found when a function is traced for a value that it has returned itself.

A leaf of the arguments that was the same on all replicas, whose result differs between them and is passed again in its place,
has drifted apart. Only floating leaves count: random keys and counters are folded with the replica's number on purpose.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.errors import DivergenceError
from replicax._src.program.cache import Leaf
from replicax._src.program.flat import FlatProgram, needed_for
from replicax._src.program.program import ReplicaProgram
from replicax._src.program.verdict import is_equalising, is_movement
from replicax._src.user_code import user_line
from replicax._src.values import PerReplica

log = logging.getLogger("replicax")
_MAX_SHOWN = 5


@final
@dataclass(frozen=True)
class Maker:
    """What made a value.

    Attributes:
      function: By what ``run`` knows the function.
      shared: The paths of its floating arguments that were the same on all replicas.
      index: Of the value among the arrays that the program returned.
    """

    function: Any
    shared: frozenset[str]
    index: int


def paths_of(tree: Any, *, has_modules: bool) -> list[str]:
    """How messages name the leaves of (args, kwargs, closure), or of what stands for these where there are modules among them."""
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    found = jax.tree_util.tree_flatten_with_path(numbered)[0]
    if has_modules:
        return ["arguments" + jax.tree_util.keystr(path) for path, _ in found]
    roots = ("args", "kwargs", "closure")
    return [roots[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in found]


def shared_paths(paths: Sequence[str], described: Sequence[Leaf]) -> frozenset[str]:
    """Those of floating leaves that are the same on all replicas."""
    return frozenset(
        path
        for path, leaf in zip(paths, described, strict=True)
        if leaf.kind == "whole" and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def drifted_paths(
    function: Any,
    program: ReplicaProgram,
    paths: Sequence[str],
    described: Sequence[Leaf],
    leaves: Sequence[Any],
) -> list[str]:
    """The paths of state that has drifted apart; what each replica merely accumulates for itself has not."""
    arrays = [i for i, leaf in enumerate(described) if leaf.kind != "static"]
    found = []
    for position, i in enumerate(arrays):
        maker = leaves[i].maker if isinstance(leaves[i], PerReplica) else None
        if maker is None or maker.function != function or paths[i] not in maker.shared:
            continue
        if not _is_accumulated(program, position, maker.index):
            found.append(paths[i])
    return found


def _is_accumulated(program: ReplicaProgram, position: int, successor: int) -> bool:
    """Whether an argument only goes, element by element, into its own next value, as a sum over steps does."""
    variant = program.variants[0]
    flat = FlatProgram(variant.jaxpr)
    reached = {flat.inputs[len(variant.consts) + len(variant.entries) + position]}

    def is_reached(atom: Any) -> bool:
        return not isinstance(atom, jax_compat.Literal) and atom in reached

    for operation in needed_for(flat.operations, flat.outputs):
        if not any(map(is_reached, operation.operands)) or is_equalising(operation.eqn):
            continue
        if not is_movement(operation.eqn):
            return False
        reached.update(operation.results)
    return not any(is_reached(atom) for i, atom in enumerate(flat.outputs) if i != successor)


def tell(name: str, paths: Sequence[str], *, raises: bool) -> None:
    """Warns of state that has drifted apart.

    Raises:
      DivergenceError: If ``raises``.
    """
    more = f" and {len(paths) - _MAX_SHOWN} more" if len(paths) > _MAX_SHOWN else ""
    told = (
        f"{name}, run at {user_line()}, is given state that has drifted apart: {', '.join(paths[:_MAX_SHOWN])}{more}. In an earlier call "
        f"it was the same on all replicas, and what {name} returned for it differs between them: each replica trains its own copy. "
        "Combine the gradients first: gradients = rx.get_replica_context().all_reduce('sum', gradients). If each replica shall keep its "
        "own value, begin with one: strategy.experimental_distribute_values_from_function(...). If you know that it is the same on all "
        "replicas, return rx.assert_same(value)."
    )
    if raises:
        raise DivergenceError(told)
    log.warning("%s", told)
