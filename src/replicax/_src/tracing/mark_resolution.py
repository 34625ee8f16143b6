"""Evaluates a traced function and resolves its marks: tapes become ``jax.vjp``, gradients for optimizers become sums.

Slicing finds a tape's gradient. The equations that the tape recorded, that depend on a source and that lead to the
target are evaluated once, inside ``jax.vjp``. All other equations are evaluated in order.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, evaluated, has_any, inner_jaxprs
from replicax._src.tracing.markers import NUM_SCALARS, Question, accumulated
from replicax._src.tracing.primitives import MARKS, RECORDING_MARKS, REMATERIALISES
from replicax._src.tracing.replication import Replication, analyse, is_call_with_collective
from replicax._src.vocabulary.errors import ReplicaxError, UnsupportedError

SumGradients = Callable[[Sequence[Any]], list[Any]]


class MarkResolver:
    """Resolves the marks of one traced function while evaluating it.

    Attributes:
      unconnected: Pairs (ordinal of a gradient, position of a source) where the target does not depend on the source.
      sums: For each aggregated leaf, in order, True if it must be summed over replicas.
      is_empty (argument): True if this replica has no rows in this step.
      is_uneven (argument): True if replicas have different numbers of rows.
      num_replicas (argument): The number of replicas over which gradients are summed.
    """

    def __init__(
        self,
        sum_gradients: SumGradients,
        forced_sums: Sequence[bool] | None = None,
        *,
        is_empty: bool = False,
        is_uneven: bool = False,
        num_replicas: int = 1,
    ):
        self._is_empty, self._is_uneven, self._num_replicas = is_empty, is_uneven, num_replicas
        self._sum_gradients = sum_gradients
        self._forced_sums = forced_sums
        self.unconnected: set[tuple[int, int]] = set()
        self.sums: list[bool] = []

    def evaluate(self, jaxpr: Any, args: Sequence[Any], replications: Sequence[Replication]) -> list[Any]:
        """Returns the outputs of ``jaxpr`` (no constvars) for ``args``, whose replications are ``replications``."""
        if not has_any(jaxpr, MARKS):
            return jax_compat.eval_jaxpr(jaxpr, args)
        _, known = analyse(jaxpr, replications)
        return _Body(self, jaxpr, dict(zip(jaxpr.invars, args, strict=True)), known).run()

    def of_no_rows(self, gradients: list[Any]) -> list[Any]:
        """Replaces NaN in gradients by 0 on a replica without rows, where layers divide by the number of rows."""
        if not self._is_empty:
            return gradients
        return [jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)) for g in gradients]

    def aggregate(self, values: list[Any], replications: list[Replication]) -> list[Any]:
        """Sums the gradients that are not reduced already over replicas."""
        chosen = self._to_be_summed(replications)
        results = list(values)
        shares = self.of_no_rows([values[i] for i in chosen])
        with jax.named_scope("sum_gradients"):
            totals = self._sum_gradients(shares)
        for i, total in zip(chosen, totals, strict=True):
            results[i] = total
        return results

    def accumulate(self, operands: list[Any], replications: list[Replication]) -> list[Any]:
        """Resolves ``accumulate_p``. The first replica accumulates the gradients that are reduced already."""
        start = (len(operands) + NUM_SCALARS) // 2
        gradients = operands[start:]
        chosen = self._to_be_summed(replications[start:])
        if len(chosen) < len(gradients) and self._num_replicas > 1:
            is_first = jax.lax.axis_index(REPLICA_AXIS) == 0
            gradients = [jnp.where(is_first, g, jnp.zeros_like(g)) for g in gradients]
        for i, share in zip(chosen, self.of_no_rows([operands[start + i] for i in chosen]), strict=True):
            gradients[i] = share

        def total(values: Sequence[Any]) -> list[Any]:
            with jax.named_scope("sum_gradients"):
                return self._sum_gradients(values)

        # Replicas with batches of other sizes have other conditions, and must meet.
        return accumulated(*operands[:start], *gradients, total=total, is_conditional=not self._is_uneven)

    def _to_be_summed(self, replications: Sequence[Replication]) -> list[int]:
        """Returns the positions of the gradients that are not reduced already."""
        start = len(self.sums)
        self.sums.extend(replication is not Replication.REDUCED for replication in replications)
        decided = self.sums if self._forced_sums is None else self._forced_sums
        return [i for i in range(len(replications)) if decided[start + i]]


def _atom_key(atom: Any) -> Any:
    # A scalar constant that is a source becomes one Literal object, shared by all its uses.
    return id(atom) if isinstance(atom, jax_compat.Literal) else atom


class _Body:
    """The evaluation of one jaxpr with marks."""

    def __init__(
        self, rewriter: MarkResolver, jaxpr: Any, env: dict[Any, Any], replications: Mapping[Any, Replication]
    ):
        self.rewriter = rewriter
        self.jaxpr = jaxpr
        self.eqns = jaxpr.eqns
        self.env = env
        self.replications = replications
        self.recorded = _recorded_equations(self.eqns)

    def run(self) -> list[Any]:
        slices = {
            index: _slice_of(self.eqns, index, eqn)
            for index, eqn in enumerate(self.eqns)
            if eqn.primitive.name == "replicax_gradient"
        }
        done: set[int] = set()
        for index in slices:
            self._run_up_to(index, slices[index], done)
        self._run_up_to(len(self.eqns), (), done)
        return [self._read(self.env, a) for a in self.jaxpr.outvars]

    def _run_up_to(self, stop: int, sliced: Sequence[int], done: set[int]) -> None:
        """Evaluates the equations before ``stop``, except those of the slice, which wait for the gradient at
        ``stop``.
        """
        waiting = set(sliced) - done
        delayed: list[int] = []
        missing = {v for i in waiting for v in self.eqns[i].outvars}
        for index in range(stop):
            if index in done or index in waiting:
                continue
            eqn = self.eqns[index]
            if any(not isinstance(a, jax_compat.Literal) and a in missing for a in eqn.invars):
                delayed.append(index)
                missing.update(eqn.outvars)
            else:
                self._evaluate(eqn, self.env)
                done.add(index)
        if stop == len(self.eqns):
            return

        def settle(evaluated: list[list[Any]]) -> None:
            for index, outputs in zip(sliced, evaluated, strict=True):
                self.env.update(zip(self.eqns[index].outvars, outputs, strict=True))
            for index in delayed:
                self._evaluate(self.eqns[index], self.env)
            done.update(waiting, delayed, [stop])

        results = self._differentiate(self.eqns[stop], sliced, self.env, settle)
        self.env.update(zip(self.eqns[stop].outvars, results, strict=True))

    def _differentiate(
        self,
        marker: Any,
        sliced: Sequence[int],
        env: MutableMapping[Any, Any],
        settle: Callable[[list[list[Any]]], None] | None = None,
    ) -> list[Any]:
        """Returns the gradients of a marker.

        Args:
          sliced: The equations of the marker's slice.
          settle: Takes the outputs of these equations and evaluates all other equations before the marker.
        """
        operands = Question.of(marker)
        keys = [_atom_key(s) for s in operands.sources]
        unique = list(dict.fromkeys(keys))
        atom_of = dict(zip(keys, operands.sources, strict=True))
        recorded = self.recorded.get(marker.params["tape"], frozenset())
        watched_at = _watch_positions(self.eqns, marker.params["tape"])
        computed = {var for index in sliced for var in self.eqns[index].outvars}
        connected, chain = _connected(self.eqns, sliced, recorded, watched_at, operands)

        def forward(source_values: list[Any]) -> tuple[list[Any], list[list[Any]]]:
            given = dict(zip(unique, source_values, strict=True))
            overlay: dict[Any, Any] = {}
            inner = collections.ChainMap(overlay, env)
            primals: list[list[Any]] = []
            waiting = sorted(unique, key=lambda key: watched_at.get(key, -1))

            def activate_before(index: float) -> None:
                # A source counts only after it is watched; before that it is a constant.
                while waiting and watched_at.get(waiting[0], -1) < index:
                    key = waiting.pop(0)
                    if key not in computed:
                        overlay[key] = given.pop(key)
                    elif key in overlay:
                        overlay[key] = overlay[key] + given.pop(key)

            for index in sliced:
                activate_before(index)
                eqn = self.eqns[index]
                with _explained(eqn):
                    outputs = self._outputs(eqn, inner, detached=index not in chain)
                primals.append(outputs)
                for var, value in zip(eqn.outvars, outputs, strict=True):
                    is_leaf = var in given and var not in waiting
                    overlay[var] = value + given.pop(var) if is_leaf else value
            activate_before(float("inf"))
            return [jnp.asarray(self._read(inner, t), t.aval.dtype) for t in operands.targets], primals

        # A zero is added to a source that the slice itself computes: the source is both a leaf and a step on the way to
        # other sources.
        values = [
            jnp.zeros(atom_of[key].aval.shape, atom_of[key].aval.dtype)
            if key in computed
            else self._read(env, atom_of[key])
            for key in unique
        ]
        _, pull_back, primals = jax.vjp(forward, values, has_aux=True)
        if settle is not None:
            settle(primals)
        if operands.seeds:
            cotangents = [self._read(env, a) for a in operands.seeds]
        else:
            cotangents = [jnp.ones(a.aval.shape, a.aval.dtype) for a in operands.targets]
        (gradients,) = pull_back(cotangents)
        by_key = dict(zip(unique, gradients, strict=True))
        reached = _reached(self.eqns, recorded, watched_at, operands.watched)
        for position, (key, is_derived) in enumerate(zip(keys, operands.derived, strict=True)):
            if key not in connected or (is_derived and key not in reached):
                self.rewriter.unconnected.add((marker.params["ordinal"], position))
        return self.rewriter.of_no_rows([by_key[key] for key in keys])

    def _evaluate(self, eqn: Any, env: dict[Any, Any]) -> None:
        env.update(zip(eqn.outvars, self._outputs(eqn, env), strict=True))

    def _outputs(self, eqn: Any, env: MutableMapping[Any, Any], detached: bool = False) -> list[Any]:
        name = eqn.primitive.name
        if name in RECORDING_MARKS:
            return []
        if name == "replicax_gradient":  # an inner tape on the path of an outer one
            index = next(i for i, e in enumerate(self.eqns) if e is eqn)
            return self._differentiate(eqn, _slice_of(self.eqns, index, eqn), env)
        args = [self._read(env, a) for a in eqn.invars]
        if detached:
            args = [_stop_gradient(a) for a in args]
        replications = [self._replication(a) for a in eqn.invars]
        if name == "replicax_aggregate":
            with jax_compat.at_line_of(eqn):
                return self.rewriter.aggregate(args, replications)
        if name == "replicax_accumulate":
            with jax_compat.at_line_of(eqn):
                return self.rewriter.accumulate(args, replications)
        if any(has_any(inner, MARKS) for inner in inner_jaxprs(eqn)):
            return _evaluate_nested(self.rewriter, eqn, args, replications)
        return jax_compat.bind_equation(eqn, args)

    def _replication(self, atom: Any) -> Replication:
        return Replication.INVARIANT if isinstance(atom, jax_compat.Literal) else self.replications[atom]

    def _read(self, env: Mapping[Any, Any], atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return env.get(id(atom), atom.val)
        return env[atom]


def _watch_positions(eqns: Sequence[Any], tape: int) -> dict[Any, int]:
    """Returns the position of the first ``tape.watch`` of each array."""
    positions: dict[Any, int] = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive.name == "replicax_watch" and eqn.params["tape"] == tape:
            positions.setdefault(_atom_key(eqn.invars[0]), index)
    return positions


def _recorded_equations(eqns: Sequence[Any]) -> dict[int, frozenset[int]]:
    """Returns the indices of the equations that each tape recorded."""
    recording: dict[int, set[int]] = {}
    open_tapes: set[int] = set()
    for index, eqn in enumerate(eqns):
        if eqn.primitive.name == "replicax_tape":
            tape = eqn.params["tape"]
            recording.setdefault(tape, set())
            (open_tapes.add if eqn.params["begins"] else open_tapes.discard)(tape)
            continue
        for tape in open_tapes:
            recording[tape].add(index)
    return {tape: frozenset(indices) for tape, indices in recording.items()}


def _slice_of(eqns: Sequence[Any], stop: int, marker: Any) -> list[int]:
    """Returns the equations before ``stop`` that depend on a source of ``marker`` and lead to a target."""
    operands = Question.of(marker)
    depends = {_atom_key(a) for a in operands.sources}
    forward: list[int] = []
    for index in range(stop):
        eqn = eqns[index]
        if eqn.primitive.name not in RECORDING_MARKS and any(_atom_key(a) in depends for a in eqn.invars):
            forward.append(index)
            depends.update(eqn.outvars)
    needed = {_atom_key(a) for a in operands.targets}
    chosen: list[int] = []
    for index in reversed(forward):
        if any(var in needed for var in eqns[index].outvars):
            chosen.append(index)
            needed.update(_atom_key(a) for a in eqns[index].invars)
    return chosen[::-1]


def _connected(
    eqns: Sequence[Any],
    sliced: Sequence[int],
    recorded: frozenset[int],
    watched_at: Mapping[Any, int],
    operands: Question,
) -> tuple[set[Any], set[int]]:
    """Returns the sources that recorded, differentiable equations connect to a target, and these equations.

    The other equations of the slice need no derivative: they were not recorded, or integers or a stop_gradient follow.
    """
    needed = {_atom_key(t) for t in operands.targets}
    found = set(needed)
    chain: set[int] = set()
    for index in reversed(sliced):
        eqn = eqns[index]
        if index in recorded and _passes_gradients(eqn, needed):
            chain.add(index)
            keys = [_atom_key(a) for a in eqn.invars]
            needed.update(keys)
            found.update(key for key in keys if watched_at.get(key, -1) < index)
    return {key for key in map(_atom_key, operands.sources) if key in found}, chain


def _reached(
    eqns: Sequence[Any], recorded: frozenset[int], watched_at: Mapping[Any, int], watched: Sequence[Any]
) -> set[Any]:
    """Returns the values that recorded, differentiable equations compute from watched ones."""
    if not watched:
        return set()
    reached = {_atom_key(a) for a in watched}
    for index in sorted(recorded):
        eqn = eqns[index]
        keys = [_atom_key(a) for a in eqn.invars]
        if any(k in reached and watched_at.get(k, -1) < index for k in keys):
            reached.update(v for v in eqn.outvars if _passes_gradients(eqn, {v}))
    return reached


def _passes_gradients(eqn: Any, wanted: set[Any]) -> bool:
    """Returns True if derivatives flow through an equation to one of the ``wanted`` outputs."""
    if eqn.primitive.name == "stop_gradient":
        return False
    return any(v in wanted and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)


@contextlib.contextmanager
def _explained(eqn: Any) -> Iterator[None]:
    """Context that adds the user's line to the error for an operation that JAX cannot differentiate."""
    try:
        yield
    except ReplicaxError:
        raise
    except NotImplementedError as error:
        raise UnsupportedError(
            f"The operation at {jax_compat.equation_line(eqn)} is between a source and the target of a gradient, "
            f"and JAX has no derivative for it: {error}. Put jax.lax.stop_gradient around it if no gradient should "
            f"flow through it; for a maximum over replicas use all_gather and jnp.max."
        ) from error


def _stop_gradient(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(value.dtype, jnp.inexact):
        return jax.lax.stop_gradient(value)
    return value


def evaluate_inlined(jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Returns the outputs of ``jaxpr``, whose marks are resolved, and inlines its calls that contain collectives.

    A trace can be cut only at collectives of its top level. By now the other effects of a call (rematerialisation, a
    custom derivative) have been applied.
    """

    def outputs(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if not is_call_with_collective(eqn):
            return jax_compat.bind_equation(eqn, operands)
        inner, inner_consts, given = called(eqn, operands)
        return evaluate_inlined(inner, given, inner_consts)

    return evaluated(jaxpr, args, outputs, consts)


def _evaluate_nested(
    rewriter: MarkResolver, eqn: Any, args: list[Any], replications: list[Replication]
) -> list[Any]:
    """Evaluates an equation whose sub-jaxprs contain marks."""
    name = eqn.primitive.name
    if name in ("scan", "while", "cond"):
        return jax_compat.bind_equation(eqn, args, _resolved_params(rewriter, eqn, args, replications))
    inner, consts, given = called(eqn, args)
    _, _, known = called(eqn, replications)

    def evaluate(*values: Any) -> list[Any]:
        return _evaluate_closed(rewriter, inner, consts, values, known)

    if name in REMATERIALISES:
        return list(jax.checkpoint(evaluate, policy=eqn.params.get("policy"))(*given))
    return evaluate(*given)  # jit and the like: inlined


def _evaluate_closed(
    rewriter: MarkResolver,
    inner: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    replications: Sequence[Replication],
) -> list[Any]:
    _, known = analyse(inner, replications)
    env = dict(zip(inner.invars, values, strict=True)) | dict(zip(inner.constvars, consts, strict=True))
    return _Body(rewriter, inner, env, known).run()


def _resolved_params(
    rewriter: MarkResolver, eqn: Any, args: list[Any], replications: list[Replication]
) -> dict[str, Any]:
    """Returns the parameters of a scan, while or cond, with the marks in its sub-jaxprs resolved."""

    def resolve(closed: Any, replications: Sequence[Replication]) -> Any:
        inner, consts = jax_compat.inner_jaxpr(closed)

        def evaluate(*values: Any) -> list[Any]:
            return _evaluate_closed(rewriter, inner, consts, values, replications)

        return jax.make_jaxpr(evaluate)(*[v.aval for v in inner.invars])

    params = dict(eqn.params)
    name = eqn.primitive.name
    conservative = [v if v.is_same else Replication.VARYING for v in replications]
    if name == "cond":
        params["branches"] = tuple(resolve(b, conservative[1:]) for b in params["branches"])
    elif name == "scan":
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        carry = [Replication.VARYING] * num_carry
        params["jaxpr"] = resolve(
            params["jaxpr"], [*conservative[:num_consts], *carry, *conservative[num_consts + num_carry :]]
        )
    else:
        num_cond, num_body = jax_compat.while_counts(eqn)
        carry = [Replication.VARYING] * (len(replications) - num_cond - num_body)
        params["cond_jaxpr"] = resolve(params["cond_jaxpr"], [*conservative[:num_cond], *carry])
        params["body_jaxpr"] = resolve(
            params["body_jaxpr"], [*conservative[num_cond : num_cond + num_body], *carry]
        )
    return params
