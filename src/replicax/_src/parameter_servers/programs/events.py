"""Records the changes of a traced scheduled function to variables: each assignment, and each call of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.tracing.bindings import Binding
from replicax._src.tracing.branches import reads_in
from replicax._src.tracing.capture import Entry
from replicax._src.tracing.markers import read_p
from replicax._src.user_code import user_line

Shapes = Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class OptimizerCall:
    """One call of an optimizer's ``apply``.

    Attributes:
      variables: The variables that it updates, each with its gradient.
      state: The variables of the optimizer.
      reference_of: Returns the variable that one of ``state`` is a binding of; None for shared state.
      trace: Traces the update for variables of the given shapes. It returns a jaxpr without constvars, and the values
        of
        its leading inputs. The other inputs are the state, the gradients and the values. The outputs are the values
        and
        the state.
      name: The name, for messages.
      why_not_rows: The reason why it cannot update only some rows of a table; None if there is no known reason.
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
      binding: The binding of the variable.
      reads: The numbers of the reads of the variable since its last assignment, latest first.
      line: The line of the user's code.
    """

    binding: Binding
    reads: Sequence[int]
    line: str


@dataclass(frozen=True)
class Applied:
    """One call of an optimizer. Its gradients are values of the program."""

    call: OptimizerCall
    line: str


Event = Assigned | Applied


def assigning(events: Iterable[Event]) -> Callable[[Any], bool]:
    """Returns a predicate that is true if a condition may assign variables. Servers must know its branch and its
    effect.
    """
    reads = {number for event in events if isinstance(event, Assigned) for number in event.reads}
    return lambda eqn: reads_in(eqn, reads)


@final
class Events:
    """The observer of a capture: numbers the reads, and records the assignments with their values.

    Attributes:
      is_applying: True while an optimizer runs. Its assignments are not recorded.
      noted: The events in order, each with its traced values: the new value, or the gradients.
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
            event = Assigned(entry.binding, reads[::-1], entry.line)
            self.noted.append((event, [entry.current]))

    def forget_reads(self, entry: Entry) -> None:
        """Forgets the reads of a variable, because its next value is not computed from them."""
        self._reads.pop(id(entry), None)

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Returns a context in which assignments are not recorded, because the servers' update is recorded already."""
        was_applying, self.is_applying = self.is_applying, True
        try:
            yield
        finally:
            self.is_applying = was_applying

    @contextlib.contextmanager
    def applying(self, call: OptimizerCall, gradients: Sequence[Any]) -> Iterator[None]:
        """Records an optimizer call, and returns a context in which the optimizer assigns."""
        self.noted.append((Applied(call, user_line()), list(gradients)))
        with self.unnoted():
            yield
