"""Records the changes of a traced scheduled function to variables: each assignment, and each call of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.program_kit.captures import Binding
from replicax._src.program_kit.errors import user_line
from replicax._src.program_kit.strategy_parts import hook
from replicax._src.program_kit.traced_programs import Operation

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


def assigning(events: Iterable[Event]) -> Callable[[Operation], bool]:
    """Returns a predicate that is true if a condition may assign variables. Servers must know its branch and its
    effect.
    """
    reads = {number for event in events if isinstance(event, Assigned) for number in event.reads}
    return lambda condition: not reads.isdisjoint(condition.inner_reads)


@final
class Events:
    """The observer of a capture: records the assignments with their values, and the reads before each.

    Attributes:
      is_applying: True while an optimizer runs. Its assignments are not recorded.
      noted: The events in order, each with its traced values: the new value, or the gradients.
      num_replicas: The number of replicas of the replica functions in it, if there are several.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[Event, list[Any]]] = []
        self._reads: dict[int, list[int]] = {}  # by id of the variable
        self.is_applying = False
        self.num_replicas = 1

    def read(self, binding: Binding, number: int) -> None:
        self._reads.setdefault(id(binding.variable), []).append(number)

    def written(self, binding: Binding, value: Any, line: str) -> None:
        reads = self._reads.pop(id(binding.variable), [])
        if not self.is_applying:
            self.noted.append((Assigned(binding, reads[::-1], line), [value]))

    def forget_reads(self, variable: Any) -> None:
        """Forgets the reads of a variable, because its next value is not computed from them."""
        self._reads.pop(id(variable), None)

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Returns a context in which assignments are not recorded, because the servers' update is recorded already."""
        was_applying, self.is_applying = self.is_applying, True
        try:
            yield
        finally:
            self.is_applying = was_applying

    def applied(
        self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Records ``Optimizer.apply`` of Keras as one update of the servers."""
        return hook("keras_on_servers").apply(apply, optimizer, gradients, variables, self)

    @contextlib.contextmanager
    def applying(self, call: OptimizerCall, gradients: Sequence[Any]) -> Iterator[None]:
        """Records an optimizer call, and returns a context in which the optimizer assigns."""
        self.noted.append((Applied(call, user_line()), list(gradients)))
        with self.unnoted():
            yield
