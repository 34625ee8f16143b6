"""ReplicaProgram: a function traced over ONE replica's inputs, with its variables as inputs and outputs.

The lowering of a strategy decides where and how it runs. Replicas with different shapes run different variants of one
program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import Binding
from replicax._src.tracing.capture import Entry
from replicax._src.tracing.equations import has_any
from replicax._src.tracing.primitives import CALLBACKS, PRINTS
from replicax._src.tracing.replication import Replication, analyse, has_replica_collective
from replicax._src.vocabulary.errors import StructureError, TraceError


@dataclass(frozen=True)
class Output:
    """One leaf that the function returned: an array computed by the program, or a Python value."""

    is_array: bool
    value: Any = None


@dataclass
class Variant:
    """One trace of the function. The passes (``passes.py``) set the attributes that have a default.

    Attributes:
      jaxpr: The invars are constants, then the state in the order of ``entries``, then the arguments. The outvars are
        the array outputs, then the new values of the written entries.
      consts: The values of the leading invars.
      entries: The variables that the function uses, in order of discovery.
      tree, outputs: The structure that the function returned, and its leaves.
      out_replications, write_replications: The replications of the outvars.
      input_replications: The replications of the invars.
      sums, unconnected: The gradients that are summed over replicas, and those without a source (see ``MarkResolver``).
      reduced_at: The line that reduces a loss over replicas in a differentiated function (``report_gradients``).
    """

    jaxpr: Any
    consts: list[Any]
    entries: list[Entry]
    tree: Any
    outputs: list[Output]
    input_replications: list[Replication]
    out_replications: list[Replication] = field(default_factory=list)
    write_replications: list[Replication] = field(default_factory=list)
    sums: list[bool] = field(default_factory=list)
    unconnected: frozenset[tuple[int, int]] = frozenset()
    reduced_at: str = ""

    @property
    def written(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.written]

    @property
    def num_arrays(self) -> int:
        return sum(output.is_array for output in self.outputs)

    @property
    def state_vars(self) -> list[Any]:
        """The invars of ``entries``."""
        return self.jaxpr.invars[len(self.consts) : len(self.consts) + len(self.entries)]

    def with_jaxpr(self, jaxpr: Any, consts: Sequence[Any]) -> Variant:
        """Returns the variant with another jaxpr for the same computation.

        Args:
          consts: The values of further invars, before all others.
        """
        return dataclasses.replace(
            self,
            jaxpr=jaxpr,
            consts=[*consts, *self.consts],
            input_replications=[Replication.INVARIANT] * len(consts) + self.input_replications,
        )

    def with_more_results(self, jaxpr: Any, consts: Sequence[Any], num_leaves: int, num_more: int) -> Variant:
        """Returns the variant with other results: the first leaves of its own, then arrays that vary over replicas.

        Args:
          jaxpr, consts: The computation, and the values of further invars, before all others.
          num_leaves: The number of leaves that stay.
          num_more: The number of arrays after them.
        """
        kept = self.outputs[:num_leaves]
        num_kept = sum(output.is_array for output in kept)
        return dataclasses.replace(
            self.with_jaxpr(jaxpr, consts),
            outputs=[*kept, *(Output(True) for _ in range(num_more))],
            out_replications=[*self.out_replications[:num_kept], *[Replication.VARYING] * num_more],
        )

    def with_result_alone(self, num_arrays: int) -> Variant:
        """Returns the variant of a function of a pair that gives its first item alone, and uses no variables.

        Args:
          num_arrays: The number of arrays in the first item.
        """
        tree = self.tree.children()[0]
        return dataclasses.replace(
            self,
            jaxpr=jax_compat.rebuild(self.jaxpr, outvars=self.jaxpr.outvars[:num_arrays]),
            tree=tree,
            outputs=list(self.outputs[: tree.num_leaves]),
            out_replications=self.out_replications[:num_arrays],
            entries=[],
            write_replications=[],
        )

    def proves_same(self, jaxpr: Any, consts: Sequence[Any]) -> bool:
        """Returns True if all results of a jaxpr of its operands, after constants, are the same on all replicas."""
        replications, _ = analyse(
            jaxpr, [Replication.INVARIANT] * len(consts) + list(self.input_replications)
        )
        return all(replication.is_same for replication in replications)

    def check_no_leaks(self) -> None:
        """Raises if a function of the outermost trace closes over tracers.

        Raises:
          TraceError: The error names the user's line that computes with one.
        """
        for var, value in zip(self.jaxpr.invars, self.consts, strict=False):
            if isinstance(value, jax_compat.Tracer):
                users = [e for e in self.jaxpr.eqns if any(a is var for a in e.invars)]
                line = jax_compat.equation_line(users[0]) if users else "an unknown line"
                raise leaked(line)

    def without_new_values(self) -> Variant:
        """Returns the variant without the new values of variables, and without the operations that only they need."""
        results = jax_compat.rebuild(self.jaxpr, outvars=self.jaxpr.outvars[: self.num_arrays])
        reduced, _ = jax_compat.without_dead_code(results)
        jaxpr = jax_compat.rebuild(reduced, invars=self.jaxpr.invars)
        return dataclasses.replace(self, jaxpr=jaxpr, write_replications=[])

    def retraced(
        self,
        evaluate: Callable[[Any, Sequence[Any]], Sequence[Any]],
        axes: Sequence[tuple[str, int]],
        avals: Sequence[Any] | None = None,
    ) -> Variant:
        """Returns the variant that an evaluator makes of the jaxpr.

        Args:
          evaluate: Takes the jaxpr and its operands.
          axes: The names and sizes of axes.
          avals: The avals of the operands, if they change.
        """
        jaxpr, consts = jax_compat.trace(
            lambda *args: evaluate(self.jaxpr, args), avals or [v.aval for v in self.jaxpr.invars], axes
        )
        return self.with_jaxpr(jaxpr, consts)


@dataclass(frozen=True)
class ReplicaProgram:
    """A traced function, with the facts that its lowering needs.

    Attributes:
      variants: The variants: one per distinct pattern of per-replica shapes.
      variant_of_replica: The variant that each replica runs.
    """

    variants: Sequence[Variant]
    variant_of_replica: tuple[int, ...]

    def __post_init__(self) -> None:
        first = self.variants[0]
        for other in self.variants[1:]:
            kinds = [o.is_array for o in other.outputs]
            if other.tree != first.tree or kinds != [o.is_array for o in first.outputs]:
                raise StructureError(
                    f"The replica function returns different structures on different replicas: {first.tree} for "
                    f"one local batch size and {other.tree} for another. Return the same structure on all."
                )

    @functools.cached_property
    def bindings(self) -> list[Binding]:
        """The bindings that any variant reads or writes."""
        return list({id(e.binding): e.binding for v in self.variants for e in v.entries}.values())

    @functools.cached_property
    def _lines(self) -> dict[int, str]:
        """The user's line that writes each binding, by position."""
        position = {id(binding): i for i, binding in enumerate(self.bindings)}
        lines: dict[int, str] = {}
        for variant in self.variants:
            for entry in variant.written:
                lines.setdefault(position[id(entry.binding)], entry.line)
        return lines

    @property
    def written(self) -> list[int]:
        """The indices into ``bindings`` of the written ones, in order."""
        return list(self._lines)

    @property
    def lines(self) -> list[str]:
        """The user's lines that write the bindings of ``written``."""
        return list(self._lines.values())

    @functools.cached_property
    def same_writes(self) -> list[bool]:
        """For each written value, True if it is proven to be the same on all replicas."""
        return [all(self._is_same_write(v, self.bindings[i]) for v in self.variants) for i in self.written]

    @functools.cached_property
    def same_outputs(self) -> list[bool]:
        """For each array output, True if it is proven to be the same on all replicas."""
        columns = zip(*(v.out_replications for v in self.variants), strict=True)
        return [all(replication.is_same for replication in column) for column in columns]

    @property
    def reduced_at(self) -> str:
        """The user's line that reduces a loss in a differentiated function; "" if there is none."""
        return next((v.reduced_at for v in self.variants if v.reduced_at), "")

    @functools.cached_property
    def has_collectives(self) -> bool:
        """True if the program has collectives, at any depth."""
        return any(has_replica_collective(v.jaxpr) for v in self.variants)

    @functools.cached_property
    def has_callbacks(self) -> bool:
        """True if the program calls back into Python, at any depth."""
        return any(has_callback(v.jaxpr) for v in self.variants)

    @staticmethod
    def _is_same_write(variant: Variant, binding: Binding) -> bool:
        found = [
            replication.is_same
            for entry, replication in zip(variant.written, variant.write_replications, strict=True)
            if entry.binding is binding
        ]
        return found == [True]


def leaked(line: str) -> TraceError:
    """Returns the error for a tracer that has left its trace."""
    return TraceError(
        f"At {line} a value is used that was computed in another trace, which has ended: it was "
        f"stored in an object, a list or a global while a function was traced. Return it from the function "
        f"instead, or assign it to an rx.Variable."
    )


def has_callback(jaxpr: Any) -> bool:
    """Returns True if ``jaxpr`` calls back into Python, at any depth. Debug prints do not count."""
    return has_any(jaxpr, CALLBACKS)


def is_print(eqn: Any) -> bool:
    """Returns True if an equation is ``jax.debug.print`` or ``jax.debug.callback``, which has no results."""
    return eqn.primitive.name in PRINTS


def shows_how_often(jaxpr: Any) -> bool:
    """Returns True if a repeated evaluation of ``jaxpr`` is visible, because it calls back into Python or prints."""
    return has_any(jaxpr, CALLBACKS | PRINTS)
