"""Notes what a traced scheduled function does to variables: each assignment, each call of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.tracing.branches import reads_in
from replicax._src.tracing.capture import Entry
from replicax._src.tracing.markers import read_p
from replicax._src.tracing.slots import Slot
from replicax._src.user_code import user_line

Shapes = Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class OptimizerCall:
    """One call of an optimizer's ``apply``.

    Attributes:
      variables: The variables that it updates, each with its gradient.
      state: The variables of the optimizer.
      reference_of: For each of ``state`` the variable that it is a slot of; None for what all share.
      trace: Traces the update, of variables that have the shapes that it is given: a jaxpr without constvars, and the
        values of its leading inputs; then come the state, the gradients, the values. It gives values, then the state.
      name: The name, for people.
      why_not_rows: Why it cannot update some rows of a table only; None: nothing known keeps it from that.
    """

    variables: Sequence[Any]
    state: Sequence[Any]
    reference_of: Callable[[Any], Any]
    trace: Callable[[Shapes], tuple[Any, list[Any]]]
    name: str
    why_not_rows: str | None = None


@dataclass(frozen=True)
class Assigned:
    """One assignment.

    Attributes:
      slot: The slot of the variable.
      reads: The numbers of the reads of the variable since it was assigned before, the last one first.
      line: The line of the user's code.
    """

    slot: Slot
    reads: Sequence[int]
    line: str


@dataclass(frozen=True)
class Applied:
    """One call of an optimizer; its gradients are values of the program."""

    call: OptimizerCall
    line: str


Event = Assigned | Applied


def assigning(events: Iterable[Event]) -> Callable[[Any], bool]:
    """Tells of a condition whether variables may be assigned in it: servers have to know in which branch, and what that
    does.
    """
    reads = {number for event in events if isinstance(event, Assigned) for number in event.reads}
    return lambda eqn: reads_in(eqn, reads)


@final
class Events:
    """The observer of a capture: numbers the reads, and notes the assignments with their values.

    Attributes:
      is_applying: An optimizer is at work: its assignments are not noted.
      noted: In order, with the traced values: the new value, or the gradients.
      num_replicas: The number of replicas of the replica functions in it, if there are several.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[Event, list[Any]]] = []
        self._num_reads = 0
        self._reads: dict[int, list[int]] = {}
        self.is_applying = False
        self.num_replicas = 1

    def read(self, entry: Entry) -> Any:
        number, self._num_reads = self._num_reads, self._num_reads + 1
        self._reads.setdefault(id(entry), []).append(number)
        return read_p.bind(entry.current, number=number)

    def written(self, entry: Entry) -> None:
        reads = self._reads.pop(id(entry), [])
        if not self.is_applying:
            event = Assigned(entry.slot, reads[::-1], entry.line)
            self.noted.append((event, [entry.current]))

    def forget_reads(self, entry: Entry) -> None:
        """Forgets the reads of a variable, because its next value is not computed from them."""
        self._reads.pop(id(entry), None)

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Inside, assignments are not noted: what they are on the servers has been."""
        was_applying, self.is_applying = self.is_applying, True
        try:
            yield
        finally:
            self.is_applying = was_applying

    @contextlib.contextmanager
    def applying(self, call: OptimizerCall, gradients: Sequence[Any]) -> Iterator[None]:
        """Inside, an optimizer assigns: what it does is known from ``call``."""
        self.noted.append((Applied(call, user_line()), list(gradients)))
        with self.unnoted():
            yield
