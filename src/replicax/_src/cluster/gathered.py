"""``GatheredValues``: the values of an all-gather, with the tasks that gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final


@final
class GatheredValues(list[Any]):
    """The values of an all-gather, in the order of the tasks' numbers.

    Where the live tasks continue after a failure, the values are those of the live ones; otherwise those of all tasks.
    So a position in the list is no number of a task.

    Attributes:
      numbers: The numbers of the tasks.
      names: Their names for messages.
      own: The position of this process's value.
    """

    def __init__(self, values: Sequence[Any], numbers: Sequence[int], names: Sequence[str], number: int):
        """Takes the values, the numbers of their tasks, the names of all tasks, and the number of this one."""
        super().__init__(values)
        self._tasks = (tuple(numbers), tuple(names), number)
        self.numbers = tuple(numbers)
        self.names = tuple(names[each] for each in self.numbers)
        self.own = self.numbers.index(number)

    def named(self) -> list[tuple[str, Any]]:
        """Returns the values with the names of their tasks."""
        return list(zip(self.names, self, strict=True))

    def with_values(self, values: Sequence[Any]) -> GatheredValues:
        """Returns other values of the same tasks."""
        return GatheredValues(values, *self._tasks)
