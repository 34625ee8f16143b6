"""Values that one process chooses for all: the leader, or another process if the leader dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax._src.cluster.gathered import GatheredValues


def value_of_leader(
    gather: Callable[[Callable[[], Any]], GatheredValues],
    is_leader: Callable[[], bool],
    choose: Callable[[], Any],
) -> Any:
    """Returns in each process the value that the leader chooses. All processes call it.

    If the leader dies before it has told its value, the others repeat it under the next leader. There are fewer of them
    each time, so this ends. A newcomer that gathers alone leads nobody, and chooses for itself.

    Args:
      gather: All-gathers what its argument returns, which it calls.
      is_leader: Returns True in one of the live processes.
      choose: Returns the value, as JSON. Called in the leader.
    """
    is_alone = False

    def chosen() -> list[Any] | None:
        return [choose()] if is_alone or is_leader() else None

    while True:
        values = gather(chosen)
        told = next((each for each in values if each is not None), None)
        if told is not None:
            return told[0]
        is_alone = len(values) == 1
