"""``GroupPositions``: how far a group has trained, over restarts, with the position of its data in each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

from replicax._ps.local_updates.group_processes import GroupProcesses
from replicax._ps.local_updates.stored_position import StoredPosition
from replicax._src.program_kit.errors import InvalidArgumentError


class ResumableData(Protocol):
    """Data with a position that is a JSON value, as iterators of ``rx.data`` have."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> object: ...


@final
class GroupPositions:
    """The positions of one group. All its processes make the same calls.

    Args:
      processes: The processes of the group.
      data: The data of this process, if their position is stored.
    """

    def __init__(self, processes: GroupProcesses, data: ResumableData | None):
        self._processes, self._data = processes, data
        self._before = StoredPosition()

    def resumed(self, stored: Callable[[], StoredPosition]) -> StoredPosition | None:
        """Moves the data to the position of the last push. Returns it; None if there is none.

        Args:
          stored: Returns the position in the leader of the group.

        Raises:
          InvalidArgumentError: The group had another number of processes.
        """

        def described() -> list[Any]:
            position = stored()
            return [position.steps, position.tokens, position.data]

        self._before = StoredPosition(*self._processes.agreed(described))
        states = self._before.data
        if self._data is not None and states is not None:
            num_processes = len(self._processes.of_all(None))
            if len(states) != num_processes:
                raise InvalidArgumentError(
                    f"rx.experimental.LocalUpdates: the group had {len(states)} processes at its last push, and now has "
                    f"{num_processes}. Start it with {len(states)}, or leave `data` out."
                )
            self._data.set_state(states[self._processes.number])
        return self._before if self._before.steps else None

    def now(self, steps: int, tokens: int) -> StoredPosition:
        """Returns the position after so many steps and rows of this process."""
        data = None if self._data is None else self._processes.of_all(self._data.get_state())
        return StoredPosition(self._before.steps + steps, self._before.tokens + tokens, data)
