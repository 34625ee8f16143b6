"""Traces a function for workers, records its changes to variables, and replaces tables by rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.iterator_inputs import Element, Elements, Offer, in_parts
from replicax._ps.programs.lookups import Lookups, find_lookups, is_looked_up
from replicax._ps.programs.random_keys import as_data
from replicax._ps.programs.variable_changes import Applied, Event, Events
from replicax._src.program_kit.captures import Binding, current_capture
from replicax._src.program_kit.traced_programs import FlatProgram, Variant, first_results, trace_cross_replica
from replicax._src.program_kit.variables import is_variable

log = logging.getLogger("replicax")


@dataclass(frozen=True)
class TableRows:
    """The lookups of a function in tables.

    Attributes:
      num_consts: The number of constants before its tables were replaced.
    """

    lookups: Lookups
    num_consts: int


@dataclass
class TracedFunction:
    """A traced function for workers.

    Attributes:
      variant: The trace. Its array outputs are the results, then the values of the events.
      events: The changes to variables, in order.
      note_counts: The number of values of each event.
      tree: The structure of the function's result, which has ``num_outputs`` leaves.
      elements: The elements that it takes.
      num_replicas: The number of replicas of the replica functions in it.
      rows: The lookups in tables; None if it looks nothing up.
    """

    variant: Variant
    elements: Elements
    events: list[Event]
    note_counts: list[int]
    tree: Any
    num_outputs: int
    num_replicas: int
    rows: TableRows | None = None


def trace_function(
    call: Callable[[list[Any], Elements], Any],
    avals: Sequence[Any],
    binding_of: Callable[[Any], Binding],
    offer: Offer | None,
    num_replicas: int = 1,
) -> TracedFunction:
    found: dict[str, Any] = {}

    def noting(tracers: list[Any]) -> Any:
        capture = current_capture()
        assert capture is not None
        observer = capture.observer = Events()
        elements = found["elements"] = Elements(offer, num_replicas)
        result = call(tracers, elements)
        result = jax.tree_util.tree_map(
            lambda leaf: leaf.value if is_variable(leaf) else leaf, result, is_leaf=is_variable
        )
        result = jax.tree_util.tree_map(as_data, in_parts(result))
        found["events"] = [event for event, _ in observer.noted]
        found["note_counts"] = [len(values) for _, values in observer.noted]
        leaves, found["tree"] = jax.tree_util.tree_flatten(result)
        found["num_outputs"] = len(leaves)
        found["num_replicas"] = observer.num_replicas
        return [*leaves, *(value for _, values in observer.noted for value in values)]

    def by_rows(
        jaxpr: Any, num_consts: int, bindings: Sequence[Binding], num_arrays: int, axis_env: Any
    ) -> tuple[Any, list[Any]]:
        found["rows"] = None
        tables = [num_consts + n for n, each in enumerate(bindings) if _is_table(each)]
        if not tables:
            return jaxpr, []
        jaxpr = first_results(jaxpr, num_arrays)  # the servers compute the new values of variables
        ends = np.cumsum([num_arrays - sum(found["note_counts"]), *found["note_counts"]])
        of_optimizers = {
            n
            for event, start, end in zip(found["events"], ends[:-1], ends[1:], strict=True)
            for n in range(start, end)
            if isinstance(event, Applied)
        }
        lookups = find_lookups(jaxpr, tables, axis_env)
        kept = {table for n, table in lookups.gradients.items() if n not in of_optimizers}
        if kept:  # the function returns or assigns a gradient
            kept_tables = {lookups.lookups[number].table for number in kept}
            lookups = find_lookups(jaxpr, [t for t in tables if t not in kept_tables], axis_env)
        for whole in lookups.whole:
            if is_looked_up(FlatProgram.unresolved(jaxpr), whole.table):
                why = "the replicas of a worker use it" if whole.primitive == "shard_map" else str(whole)
                _say_it_is_needed_whole(bindings[whole.table - num_consts].name, why)
        if not lookups.lookups:
            return jaxpr, []
        found["rows"] = TableRows(lookups, num_consts)
        return lookups.jaxpr, list(lookups.consts)

    def binding(variable: Any) -> Binding:
        return (
            found["elements"].binding_of(variable) if isinstance(variable, Element) else binding_of(variable)
        )

    variant = trace_cross_replica(noting, avals, binding, take_rows=by_rows)
    variant.check_no_leaks()
    if found["num_replicas"] > 1:  # the servers compute the new values
        variant = variant.without_new_values()
    return TracedFunction(variant, **found)


def _is_table(binding: Binding) -> bool:
    if isinstance(binding.variable, Element) or not jnp.issubdtype(binding.dtype, jnp.inexact):
        return False
    value = binding.value
    return isinstance(value, ServerArray) and value.is_table


@functools.lru_cache(maxsize=256)
def _say_it_is_needed_whole(name: str, why: str) -> None:
    log.warning(
        "Table %r is sent to the workers in full, because the function does more than look up rows of it: %s.",
        name,
        why,
    )
