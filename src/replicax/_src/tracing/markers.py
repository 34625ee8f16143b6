"""Marker primitives: marks that a trace leaves in a jaxpr, to be resolved after the full function is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from replicax._src.jax_internals import jax_compat
from replicax._src.vocabulary.errors import TapeError, TraceError


def _refuse_gradient(where: str) -> Exception:
    advice = {
        "vmap": "A GradientTape cannot be differentiated under jax.vmap: use jax.grad inside the function "
        "that jax.vmap maps.",
        "jax.grad": "A GradientTape cannot be differentiated by jax.grad, jax.vjp or jax.jvp: use nested "
        "tapes, or nested jax.grad.",
    }
    return TapeError(advice.get(where, "tape.gradient was evaluated outside a replicax program."))


def _refuse_aggregation(where: str) -> Exception:
    return TraceError(
        f"optimizer.apply in a replica function was reached under {where}: apply gradients outside the "
        f"function that is mapped or differentiated."
    )


def _refuse_region(where: str) -> Exception:
    return TapeError(f"A GradientTape was opened under {where}: open it in the replica function itself.")


# The first read of a variable in a trace: it becomes an input of the program. Params: index, shape, dtype.
placeholder_p = jax_compat.source_primitive(
    "replicax_variable", lambda *, index, shape, dtype: jax_compat.shaped(shape, dtype)
)


class Question(NamedTuple):
    """The operands of one ``tape.gradient``: arrays, or the operands in a jaxpr that stand for them.

    Attributes:
      targets: The values to differentiate.
      seeds: The cotangents of the targets; empty for ones.
      sources: The values to differentiate by, in the form in which they were read.
      derived: For each source, True if it counts only when it was computed from ``watched`` values.
      watched: The values that the tape watches, if there is a derived source.
    """

    targets: Sequence[Any]
    seeds: Sequence[Any]
    sources: Sequence[Any]
    derived: Sequence[bool]
    watched: Sequence[Any]

    def mark(self, tape: int, ordinal: int) -> list[Any]:
        """Leaves the question in the trace. Returns placeholders for the gradients."""
        lengths = tuple(map(len, (self.targets, self.seeds, self.sources)))
        return gradient_p.bind(
            *(*self.targets, *self.seeds, *self.sources, *self.watched),
            tape=tape,
            lengths=lengths,
            derived=tuple(self.derived),
            ordinal=ordinal,
        )

    @classmethod
    def of(cls, mark: Any, operands: Sequence[Any] | None = None) -> Question:
        """Returns the question that a mark stands for, with its own operands or with ``operands`` instead."""
        rest = iter(mark.invars if operands is None else operands)
        targets, seeds, sources = ([next(rest) for _ in range(n)] for n in mark.params["lengths"])
        return cls(targets, seeds, sources, mark.params["derived"], list(rest))


# tape.gradient: see Question. Params: tape, lengths (the numbers of targets, seeds and sources), derived, ordinal.
gradient_p = jax_compat.marker_primitive(
    "replicax_gradient",
    lambda *avals, lengths, **_: [
        jax_compat.shaped(a.shape, a.dtype) for a in avals[sum(lengths[:2]) : sum(lengths)]
    ],
    _refuse_gradient,
)

# tape.watch of an array, which is a source from here on. Params: tape.
watch_p = jax_compat.marker_primitive("replicax_watch", lambda *avals, **_: [], _refuse_gradient)

# The start or end of a tape's recording. Params: tape, begins.
region_p = jax_compat.marker_primitive("replicax_tape", lambda *avals, **_: list(avals), _refuse_region)

# The gradients given to an optimizer. They are summed over replicas, except those that are reduced already.
aggregate_p = jax_compat.marker_primitive(
    "replicax_aggregate",
    lambda *avals, **_: [jax_compat.shaped(a.shape, a.dtype) for a in avals],
    _refuse_aggregation,
    linear=True,
)


NUM_SCALARS: Final = 3
"""The number of the operands of ``accumulate_p`` before the sums and the gradients."""


def accumulated(
    *operands: Any, total: Callable[[Sequence[Any]], Sequence[Any]], is_conditional: bool = True
) -> list[Any]:
    """Adds up gradients. The sums of the last small batch are totalled over the replicas.

    Args:
      *operands: True if this small batch is the last one; the factors of the sums and of the gradients; the sums so
        far; the gradients.
      total: Sums arrays over the replicas.
      is_conditional: False to total the sums of every small batch.

    Returns:
      The sums to keep, which are zero after the last small batch; and their totals, which are valid in the last one.
    """
    (is_last, of_sums, of_gradients), rest = operands[:NUM_SCALARS], operands[NUM_SCALARS:]
    half = len(rest) // 2
    sums = [
        of_sums.astype(s.dtype) * s + of_gradients.astype(s.dtype) * g.astype(s.dtype)
        for s, g in zip(rest[:half], rest[half:], strict=True)
    ]
    zeros = list(map(jnp.zeros_like, sums))
    totals = (
        jax.lax.cond(is_last, lambda: list(total(sums)), lambda: zeros) if is_conditional else total(sums)
    )
    return [jnp.where(is_last, *pair) for pair in zip(zeros, sums, strict=True)] + list(totals)


# Gradients that an optimizer accumulates: see ``accumulated``. Each replica keeps the sums of its own. Params: total,
# for programs that are split by rows.
accumulate_p = jax_compat.marker_primitive(
    "replicax_accumulate",
    lambda *avals, **_: (
        [jax_compat.shaped(a.shape, a.dtype) for a in avals[NUM_SCALARS : (len(avals) + NUM_SCALARS) // 2]]
        * 2
    ),
    _refuse_aggregation,
    one_device=lambda *operands, **_: accumulated(*operands, total=list, is_conditional=False),
)

# The result of the user's all_reduce. It is reduced, whichever cross-device operations computed it.
reduced_p = jax_compat.identity_primitive("replicax_reduced")

# A user asserts that a value is the same on all replicas. Its gradient, which need not be the same, has a mark of its own.
vouched_p = jax_compat.identity_primitive("replicax_vouched", is_kept_in_gradients=True)
assert_same_p = jax_compat.identity_primitive("replicax_assert_same", gradient=vouched_p)

# Converts the shared state of a seed to replica r's, and back: the first word is shifted by r * 0x9E3779B9.
seed_shift_p = jax_compat.identity_primitive("replicax_seed_shift")
seed_unshift_p = jax_compat.identity_primitive("replicax_seed_unshift")

# A table whose rows the user asks to exchange, or the gradient of one. See ``lowering/row_lookups.py``.
rows_p = jax_compat.identity_primitive("replicax_rows", is_kept_in_gradients=True)

# A read of a variable on parameter servers. An assignment is sent as an operation on the value that was read last.
# Params: number.
read_p = jax_compat.identity_primitive("replicax_read")


def mark_read(value: Any, number: int) -> Any:
    """Marks a value as the read of a variable with this number. Returns the marked value."""
    return read_p.bind(value, number=number)


# A value laid out over the logical devices of its replica. Params: mesh, spec.
logical_p = jax_compat.sharding_primitive("replicax_logical")

# The same, put there by a pass, around an operation that would be wrong on shards. It may stand under any condition.
replicated_p = jax_compat.sharding_primitive("replicax_replicated")
