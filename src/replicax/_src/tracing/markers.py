"""Marker primitives: what a trace leaves in a jaxpr to be decided when the whole function is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from replicax._src import jax_compat
from replicax._src.errors import TapeError, TraceError


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


# A variable first met while tracing: becomes an input of the program. Params: index, shape, dtype.
placeholder_p = jax_compat.source_primitive(
    "replicax_variable", lambda *, index, shape, dtype: jax_compat.shaped(shape, dtype)
)


class Question(NamedTuple):
    """What a ``tape.gradient`` asks for: arrays, or the operands in a jaxpr that stand for them.

    Attributes:
      targets: What is differentiated.
      seeds: The cotangents of the targets; none: ones.
      sources: By what, as they were read.
      derived: For each source, whether it counts only if it was computed from ``watched`` values.
      watched: The values that the tape watches, if there is such a source.
    """

    targets: Sequence[Any]
    seeds: Sequence[Any]
    sources: Sequence[Any]
    derived: Sequence[bool]
    watched: Sequence[Any]

    def mark(self, tape: int, ordinal: int) -> list[Any]:
        """Leaves the question in the trace; gives what stands for the gradients."""
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
        """Returns the question that a mark stands for, of its own operands or of others in their places."""
        rest = iter(mark.invars if operands is None else operands)
        targets, seeds, sources = ([next(rest) for _ in range(n)] for n in mark.params["lengths"])
        return cls(targets, seeds, sources, mark.params["derived"], list(rest))


# tape.gradient: see Question. Params: tape, lengths (of targets, seeds, sources), derived, ordinal.
gradient_p = jax_compat.marker_primitive(
    "replicax_gradient",
    lambda *avals, lengths, **_: [
        jax_compat.shaped(a.shape, a.dtype) for a in avals[sum(lengths[:2]) : sum(lengths)]
    ],
    _refuse_gradient,
)

# tape.watch of an array: it is a source from here on. Params: tape.
watch_p = jax_compat.marker_primitive("replicax_watch", lambda *avals, **_: [], _refuse_gradient)

# The begin or end of what a tape records. Params: tape, begins.
region_p = jax_compat.marker_primitive("replicax_tape", lambda *avals, **_: list(avals), _refuse_region)

# The gradients given to an optimizer: summed over replicas, but for those already reduced.
aggregate_p = jax_compat.marker_primitive(
    "replicax_aggregate",
    lambda *avals, **_: [jax_compat.shaped(a.shape, a.dtype) for a in avals],
    _refuse_aggregation,
    linear=True,
)

# What an all_reduce of the user's gave: reduced, whatever cross-device operations computed it.
reduced_p = jax_compat.identity_primitive("replicax_reduced")

# A user vouches that a value is the same on all replicas.
assert_same_p = jax_compat.identity_primitive("replicax_assert_same")

# The state of a seed as replica r sees it, and back: first word shifted by r * 0x9E3779B9.
seed_shift_p = jax_compat.identity_primitive("replicax_seed_shift")
seed_unshift_p = jax_compat.identity_primitive("replicax_seed_unshift")

# A read of a variable that parameter servers hold: an assignment is sent as what it does to the value last read.
# Params: number.
read_p = jax_compat.identity_primitive("replicax_read")

# A value laid out over the logical devices of its replica. Params: mesh, spec.
logical_p = jax_compat.sharding_primitive("replicax_logical")
