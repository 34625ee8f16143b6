"""Warns of gradients that are R times too large: the loss is a mean on each replica, and an optimizer sums them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.markers import Question
from replicax._src.tracing.replication import Replication, analyse

log = logging.getLogger("replicax")
_warned: set[str] = set()


def warn_of_local_means(jaxpr: Any, inputs: Sequence[Replication], num_replicas: int) -> None:
    """Warns, once for each line, if gradients of such a loss go to an optimizer without a correction.

    Args:
      jaxpr: A replica function, with the marks of tapes and optimizers.
      inputs: The replications of its invars.
    """
    eqns = jaxpr.eqns
    made_by = {id(var): eqn for eqn in eqns for var in eqn.outvars}

    def maker(atom: Any, name: str) -> Any:
        eqn = made_by.get(id(atom))
        return eqn if eqn is not None and eqn.primitive.name == name else None

    def terms(atom: Any) -> Iterator[Any]:
        added = maker(atom, "add")
        if added is None:
            yield atom
        else:
            for each in added.invars:
                yield from terms(each)

    @functools.cache
    def replications() -> Mapping[Any, Replication]:
        return analyse(jaxpr, inputs)[1]

    def is_local_mean(atom: Any) -> bool:
        divided = maker(atom, "div")
        if divided is None or not isinstance(divided.invars[1], jax_compat.Literal):
            return False
        summed = maker(divided.invars[0], "reduce_sum")
        if summed is None or 0 not in summed.params["axes"]:
            return False
        (operand,) = summed.invars
        number = math.prod(operand.aval.shape[axis] for axis in summed.params["axes"])
        if operand.aval.shape[0] <= 1 or divided.invars[1].val != number:
            return False
        return replications().get(operand) is Replication.VARYING

    for aggregate in eqns:
        if aggregate.primitive.name not in ("replicax_accumulate", "replicax_aggregate"):
            continue
        markers = {
            id(m): m for m in (maker(atom, "replicax_gradient") for atom in aggregate.invars) if m is not None
        }
        for marker in markers.values():
            asked = Question.of(marker)
            if asked.seeds:
                continue
            for atom in (t for target in asked.targets for t in terms(target)):
                if is_local_mean(atom):
                    _warn(jax_compat.equation_line(made_by[id(atom)]), num_replicas)


def _warn(line: str, num_replicas: int) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning(
            "%s: the loss is a mean over the rows of one replica, and the optimizer sums its gradients over %d replicas: they "
            "are %d times too large. Write rx.nn.compute_average_loss(losses), with one loss per row, instead of the mean.",
            line,
            num_replicas,
            num_replicas,
        )
