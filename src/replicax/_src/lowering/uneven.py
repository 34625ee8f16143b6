"""Uneven batches: replicas with different shapes run one SPMD program.

Every replica's arrays are padded to the largest shape. The traces of the variants are cut at their top-level
collectives. Between the cuts each replica runs its own variant with ``lax.switch``. Collectives stay outside of the
switch, so that all replicas meet.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, evaluated, inner_jaxprs, is_variable, variables
from replicax._src.tracing.gathers import Sharded, evaluate_gathering
from replicax._src.tracing.passes import check_equal_counts
from replicax._src.tracing.program import ReplicaProgram, Variant, is_print
from replicax._src.tracing.replication import is_call, meets
from replicax._src.tracing.value_numbering import number_params, number_variant
from replicax._src.values.distributed import cut, largest_shape, pad
from replicax._src.vocabulary.errors import StructureError


class UnevenEvaluator:
    """Evaluates a program of several variants on one replica's padded arrays, inside ``shard_map``.

    Equations that all variants share (an optimizer's update, after the gradients are summed) are evaluated once,
    outside of the switch.

    Args:
      evaluates_all: True if every replica evaluates all variants and takes the results of its own. The compiler may
        shard a variant over devices with collectives that all replicas must join, such as a permutation, which a branch
        forbids.
      divided: The ids of bindings whose values are ``Sharded`` and are gathered where each variant needs them. Every
        replica then evaluates all variants, too.
    """

    def __init__(
        self, program: ReplicaProgram, evaluates_all: bool = False, divided: Collection[int] = frozenset()
    ):
        self._program, self._evaluates_all = program, evaluates_all or bool(divided)
        self._gathers = bool(divided)
        self._cuts = [[i for i, e in enumerate(v.jaxpr.eqns) if meets(e)] for v in program.variants]
        check_equal_counts([len(c) for c in self._cuts], "collectives")
        self._shared = _shared_values(program.variants, self._cuts, divided)
        first = program.variants[0].jaxpr
        for variant, cuts in zip(program.variants[1:], self._cuts[1:], strict=True):
            for a, b in zip(self._cuts[0], cuts, strict=True):
                _check_same_collective(first.eqns[a], variant.jaxpr.eqns[b])

    def __call__(
        self, consts: Sequence[Sequence[Any]], state: Sequence[Sequence[Any]], args: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluates this replica's variant.

        Args:
          consts, state: The values by variant, in the order of its invars.
          args: The arguments, padded to the largest shapes.

        Returns:
          The padded array outputs, and the new values of written variables.
        """
        variants = self._program.variants
        table = jnp.asarray(self._program.variant_of_replica, jnp.int32)
        choice = table[jax.lax.axis_index(REPLICA_AXIS)]
        envs: list[dict[Any, Any]] = []
        for variant, own_consts, own_state in zip(variants, consts, state, strict=True):
            values = [*own_consts, *own_state, *args]
            envs.append(dict(zip(variant.jaxpr.invars, values, strict=True)))
        starts = [0] * len(variants)
        for cuts in zip(*self._cuts, strict=True):
            pieces = [_Piece(v.jaxpr, a, b) for v, a, b in zip(variants, starts, cuts, strict=True)]
            operands = self._run_pieces(choice, envs, pieces)
            results = jax_compat.bind_equation(variants[0].jaxpr.eqns[cuts[0]], operands)
            for env, variant, index in zip(envs, variants, cuts, strict=True):
                env.update(zip(variant.jaxpr.eqns[index].outvars, results, strict=True))
            starts = [index + 1 for index in cuts]
        pieces = [_Piece(v.jaxpr, a, len(v.jaxpr.eqns)) for v, a in zip(variants, starts, strict=True)]
        values = self._run_pieces(choice, envs, pieces)
        num_arrays = variants[0].num_arrays
        return values[:num_arrays], values[num_arrays:]

    def _run_pieces(self, choice: Any, envs: list[dict[Any, Any]], pieces: Sequence[_Piece]) -> list[Any]:
        """Runs the equations between two cuts: the shared ones, then each variant's own in a branch.

        Returns:
          The wanted values of the pieces, padded to the largest shapes. ``envs`` get the values that later pieces need.
        """
        self._run_shared(envs, pieces)
        own = [
            [e for e in piece.eqns if not _is_all_shared(e, shared)]
            for piece, shared in zip(pieces, self._shared, strict=True)
        ]
        wanted = list(zip(*(piece.wanted for piece in pieces), strict=True))
        direct = [all(self._is_shared(n, a) for n, a in enumerate(column)) for column in wanted]
        in_branch = [column for column, is_direct in zip(wanted, direct, strict=True) if not is_direct]
        live = [
            [v for v in piece.live if v not in shared]
            for piece, shared in zip(pieces, self._shared, strict=True)
        ]
        chosen = iter(())
        if in_branch or any(live):
            results = self._switch(choice, envs, own, in_branch, live)
            chosen = iter(results)
        return [
            _read(envs[0], column[0]) if is_direct else next(chosen)
            for column, is_direct in zip(wanted, direct, strict=True)
        ]

    def _is_shared(self, number: int, atom: Any) -> bool:
        return is_variable(atom) and atom in self._shared[number]

    def _run_shared(self, envs: list[dict[Any, Any]], pieces: Sequence[_Piece]) -> None:
        """Evaluates the equations that all variants share, and adds the results to every variant's environment."""
        made: dict[Any, Any] = {}
        for eqn in pieces[0].eqns:
            if _is_all_shared(eqn, self._shared[0]):
                values = jax_compat.bind_equation(eqn, [_read(envs[0], a) for a in eqn.invars])
                envs[0].update(zip(eqn.outvars, values, strict=True))
                made.update((self._shared[0][v], x) for v, x in zip(eqn.outvars, values, strict=True))
        for env, piece, shared in zip(envs[1:], pieces[1:], self._shared[1:], strict=True):
            for eqn in piece.eqns:
                env.update((v, made[shared[v]]) for v in eqn.outvars if shared.get(v) in made)

    def _switch(
        self,
        choice: Any,
        envs: list[dict[Any, Any]],
        eqns: Sequence[Sequence[Any]],
        wanted: Sequence[Sequence[Any]],
        live: Sequence[Sequence[Any]],
    ) -> list[Any]:
        """Runs each variant's equations in its own branch. Returns the values of ``wanted``, padded."""
        wanted_shapes = [_largest([a.aval for a in column]) for column in wanted]
        is_paired = _can_pair(live)
        if is_paired:
            live_shapes = [_largest([v.aval for v in column]) for column in zip(*live, strict=True)]
        else:  # each variant's values have their own slots, with zeros in the slots of the others
            live_shapes = [(v.aval.shape, v.aval.dtype) for own in live for v in own]
        firsts = [0 if is_paired else sum(len(other) for other in live[:n]) for n in range(len(live))]

        def branch(number: int) -> Callable[[], list[Any]]:
            def taken() -> list[Any]:
                env = dict(envs[number])
                needed = [*(column[number] for column in wanted), *live[number]]
                # Programs that print are not evaluated with late gathers.
                is_ours = choice == number if self._evaluates_all else None
                rule = functools.partial(_outputs, is_ours=is_ours)
                evaluate = evaluate_gathering if self._gathers else functools.partial(evaluated, rule=rule)
                _evaluate(self._program.variants[number].jaxpr, eqns[number], env, needed, evaluate)
                results = [
                    _padded(_read(env, column[number]), shape, dtype)
                    for column, (shape, dtype) in zip(wanted, wanted_shapes, strict=True)
                ]
                carried = [] if is_paired else [jnp.zeros(shape, dtype) for shape, dtype in live_shapes]
                first, count = firsts[number], len(live[number])
                carried[first : first + count] = [
                    _padded(_read(env, v), *live_shapes[first + i]) for i, v in enumerate(live[number])
                ]
                return results + carried

            return taken

        branches = [branch(number) for number in range(len(envs))]
        if self._evaluates_all:
            results = [
                jax.lax.select_n(choice, *column) for column in zip(*(b() for b in branches), strict=True)
            ]
        else:
            results = jax.lax.switch(choice, branches)
        carried = results[len(wanted) :]
        for env, own, first in zip(envs, live, firsts, strict=True):
            env.update(zip(own, carried[first : first + len(own)], strict=True))
        return results[: len(wanted)]


def _shared_values(
    variants: Sequence[Variant], cuts: Sequence[Sequence[int]], apart: Collection[int]
) -> list[dict[Any, tuple[Any, int]]]:
    """Finds values that all variants compute alike, between the same cuts, and not from bindings with the ids
    ``apart``.

    (A value that one variant computes before a collective and another one after it does not count, because it must
    exist when each of them needs it.)

    Returns:
      For each variant the shared values, each with a key that is equal in all variants.
    """
    known = [number_variant(v) for v in variants]
    # An equation that is a cut belongs to the piece before it.
    pieces = [
        {v: bisect.bisect_left(own, i) for i, eqn in enumerate(variant.jaxpr.eqns) for v in eqn.outvars}
        for variant, own in zip(variants, cuts, strict=True)
    ]
    places = [
        {v: (number, piece.get(v, -1)) for v, number in numbers.items()}
        for numbers, piece in zip(known, pieces, strict=True)
    ]
    shared = set.intersection(*(set(own.values()) for own in places))
    shared -= {
        places[0][var]
        for entry, var in zip(variants[0].entries, variants[0].state_vars, strict=True)
        if id(entry.binding) in apart
    }
    while True:
        lost = {
            own[v]
            for variant, own, cut in zip(variants, places, map(set, cuts), strict=True)
            for i, eqn in enumerate(variant.jaxpr.eqns)
            if i not in cut and not all(own.get(a) in shared for a in variables(eqn.invars))
            for v in eqn.outvars
            if v in own
        }
        if not lost & shared:
            return [{v: place for v, place in own.items() if place in shared} for own in places]
        shared -= lost


def _is_all_shared(eqn: Any, shared: dict[Any, Any]) -> bool:
    """Returns True if all variants share an equation. An equation that has only an effect stays with its replica."""
    return bool(eqn.outvars) and all(v in shared for v in eqn.outvars)


def _evaluate(
    jaxpr: Any,
    eqns: Sequence[Any],
    env: dict[Any, Any],
    needed: Sequence[Any],
    evaluate: Callable[[Any, Sequence[Any]], list[Any]],
) -> None:
    """Evaluates some equations of a jaxpr and adds the needed results to ``env``."""
    made = {v for eqn in eqns for v in eqn.outvars}
    used = dict.fromkeys(a for eqn in eqns for a in variables(eqn.invars) if a not in made)
    results = dict.fromkeys(a for a in variables(needed) if a in made)
    piece = jax_compat.rebuild(jaxpr, invars=list(used), outvars=list(results), eqns=list(eqns))
    args = [env[v] if isinstance(env[v], Sharded) else _read(env, v) for v in used]
    env.update(zip(results, evaluate(piece, args), strict=True))


def _outputs(eqn: Any, args: list[Any], is_ours: Any) -> list[Any]:
    """Evaluates an equation. If a replica evaluates all variants, only its own variant prints, except in loops."""
    if is_ours is not None and _prints(eqn):
        return _shown_if(is_ours, eqn, args)
    return jax_compat.bind_equation(eqn, args)


def _prints(eqn: Any) -> bool:
    if is_call(eqn):
        return any(map(_prints, inner_jaxprs(eqn)[0].eqns))
    return is_print(eqn)


def _shown_if(is_ours: Any, eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a print, or a call that contains one. Prints only if ``is_ours``."""
    if is_print(eqn):
        return jax.lax.cond(is_ours, lambda *a: jax_compat.bind_equation(eqn, a), lambda *_: [], *args)
    inner, consts, given = called(eqn, args)
    return evaluated(inner, given, functools.partial(_outputs, is_ours=is_ours), consts)


class _Piece:
    """The equations of one variant between two cuts.

    Attributes:
      wanted: The values to compute: the operands of the next collective, or the results.
      live: The values of this piece that later pieces need.
    """

    def __init__(self, jaxpr: Any, start: int, stop: int):
        is_last = stop == len(jaxpr.eqns)
        self.eqns = jaxpr.eqns[start:stop]
        self.wanted = list(jaxpr.outvars if is_last else jaxpr.eqns[stop].invars)
        self.live = [] if is_last else _live_across(jaxpr, start, stop)


def _check_same_collective(a: Any, b: Any) -> None:
    shapes = [[v.aval.shape for v in eqn.invars] for eqn in (a, b)]
    if a.primitive.name == b.primitive.name and shapes[0] == shapes[1]:
        if not jax_compat.sub_jaxprs(a) or number_params(a) == number_params(b):
            return
        raise StructureError(
            f"The scan, loop or condition at {jax_compat.equation_line(a)} has a collective inside and computes "
            f"something else for another local batch size (perhaps it uses x.shape[0]): it must be the same for all "
            f"replicas. Compute what depends on the local batch size before it."
        )
    raise StructureError(
        f"The collective at {jax_compat.equation_line(a)} is {a.primitive.name} of shapes {shapes[0]} for one "
        f"local batch size and {b.primitive.name} of shapes {shapes[1]} for another. Replicas can only "
        f"exchange arrays of equal shapes: reduce over the batch first (for example jnp.sum(x, axis=0)), or "
        f"use all_gather, which accepts different sizes. A collective inside a scan or loop cannot have "
        f"operands that depend on the batch."
    )


def _live_across(jaxpr: Any, start: int, stop: int) -> list[Any]:
    """Returns the values that the equations from ``start`` to ``stop`` compute and later equations need."""
    made = [v for eqn in jaxpr.eqns[start:stop] for v in eqn.outvars]
    needed = set(variables([*(a for eqn in jaxpr.eqns[stop + 1 :] for a in eqn.invars), *jaxpr.outvars]))
    return [v for v in made if not jax_compat.is_drop_var(v) and v in needed]


def _can_pair(live: Sequence[Sequence[Any]]) -> bool:
    kinds = [[(v.aval.dtype, len(v.aval.shape)) for v in own] for own in live]
    return all(kind == kinds[0] for kind in kinds)


def _largest(avals: Sequence[Any]) -> tuple[tuple[int, ...], Any]:
    ranks = {len(a.shape) for a in avals}
    if len(ranks) > 1:
        raise StructureError(f"Replicas return arrays of different ranks: shapes {[a.shape for a in avals]}.")
    dtypes = {a.dtype for a in avals}
    if len(dtypes) > 1:
        raise StructureError(f"Replicas return arrays of different dtypes: {sorted(map(str, dtypes))}.")
    return largest_shape([a.shape for a in avals]), avals[0].dtype


def _padded(value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    value = jnp.asarray(value)
    return pad(value if jax_compat.is_typed_key(value.dtype) else value.astype(dtype), shape)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    if isinstance(atom, jax_compat.Literal):
        return atom.val
    value = env[atom]
    return value.whole() if isinstance(value, Sharded) else cut(value, atom.aval.shape)
