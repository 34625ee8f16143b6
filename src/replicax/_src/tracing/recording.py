"""The record of a tape in a function that runs operation by operation, and its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from replicax._src.tracing.markers import Question


class TapeStep(NamedTuple):
    """One operation that a tape recorded, with its arrays."""

    operation: Any
    inputs: list[Any]
    outputs: list[Any]
    line: str


class TapeRecord:
    """The record of one tape.

    Attributes:
      steps: The recorded operations, in order.
      watched_at: The number of steps when the tape began to watch an array, by ``id`` of the array.
    """

    def __init__(self) -> None:
        self.steps: list[TapeStep] = []
        self.watched_at: dict[int, int] = {}
        self.known: dict[int, Any] = {}  # keeps all arrays alive, so that their ids stay unique

    def watch(self, value: Any) -> None:
        self.know(value)
        self.watched_at.setdefault(id(value), len(self.steps))

    def know(self, value: Any) -> None:
        self.known[id(value)] = value

    def add(self, step: TapeStep) -> None:
        self.steps.append(step)
        for value in (*step.inputs, *step.outputs):
            self.know(value)

    def is_active(self, value: Any, index: int) -> bool:
        """Returns True if step ``index`` used the array after the tape began to watch it, or the array is not
        watched.
        """
        return self.watched_at.get(id(value), 0) <= index


def gradients_of(record: TapeRecord, question: Question) -> list[Any]:
    """Returns the gradients with respect to the sources; None for a source that the targets do not depend on."""
    targets, seeds, sources, derived, watched = question
    seeds = seeds or [jnp.ones_like(target) for target in targets]
    chosen, computed = _steps_from(record, sources)
    wanted = {id(s) for s in sources}
    cotangents: dict[int, Any] = {}
    leaves: dict[int, Any] = {}
    for target, seed in zip(targets, seeds, strict=True):
        _accumulate(cotangents, id(target), seed)
        if id(target) in wanted:
            _accumulate(leaves, id(target), seed)
    for index in reversed(chosen):
        step = record.steps[index]
        given = [cotangents.pop(id(out), None) for out in step.outputs]
        active = [
            i
            for i, x in enumerate(step.inputs)
            if _is_inexact(x) and (id(x) in computed or (id(x) in wanted and record.is_active(x, index)))
        ]
        if all(g is None for g in given):
            continue
        for i, cotangent in zip(active, _pull_back(step, given, active), strict=True):
            x = step.inputs[i]
            if id(x) in computed:
                _accumulate(cotangents, id(x), cotangent)
            if id(x) in wanted and record.is_active(x, index):
                _accumulate(leaves, id(x), cotangent)
    reached = {id(w) for w in watched} | _steps_from(record, watched)[1] if any(derived) else set()
    return [
        None if is_derived and id(source) not in reached else leaves.get(id(source))
        for source, is_derived in zip(sources, derived, strict=True)
    ]


def _steps_from(record: TapeRecord, sources: Sequence[Any]) -> tuple[list[int], set[int]]:
    """Returns the steps that depend on a source, and the ids of their results."""
    wanted = {id(s) for s in sources}
    computed: set[int] = set()
    chosen = []
    for index, step in enumerate(record.steps):
        if step.operation.name != "stop_gradient" and any(
            id(x) in computed or (id(x) in wanted and record.is_active(x, index)) for x in step.inputs
        ):
            chosen.append(index)
            computed.update(id(out) for out in step.outputs if _is_inexact(out))
    return chosen, computed


def _pull_back(step: TapeStep, given: Sequence[Any], active: Sequence[int]) -> list[Any]:
    """Returns the cotangents of a step's ``active`` inputs."""
    present = [i for i, g in enumerate(given) if g is not None]

    def forward(*values: Any) -> list[Any]:
        inputs = list(step.inputs)
        for i, value in zip(active, values, strict=True):
            inputs[i] = value
        outputs = step.operation(*inputs)
        return [outputs[i] for i in present]

    try:
        _, pull = jax.vjp(forward, *[step.inputs[i] for i in active])
        return list(pull([given[i] for i in present]))
    except Exception as error:
        error.add_note(f"This is the derivative of {step.operation.name} at {step.line}.")
        raise


def _accumulate(table: dict[int, Any], key: int, value: Any) -> None:
    table[key] = table[key] + value if key in table else value


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)
