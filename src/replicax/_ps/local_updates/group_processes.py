"""``GroupProcesses``: the processes of one group, which adopt the same values in the same step.

Only the first one, the leader, exchanges. It tells the others what it decided, and its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import jax

from replicax._ps.local_updates.fragment_values import on_one_device
from replicax._src.program_kit.errors import ContextError, RemoteError, ReplicaxError, UnsupportedError
from replicax._src.program_kit.traced_programs import Topology

_TOPIC: Final = "local updates"


@final
class GroupProcesses:
    """The processes of one group. All make the same calls, in the same order.

    Args:
      topology: That of the group's strategy.

    Attributes:
      are_several: True if there are others.
      is_leader: True for the process that exchanges.

    Raises:
      UnsupportedError: The strategy goes on after failures of processes.
      ContextError: The group has several processes, and the topology is of one.
    """

    def __init__(self, topology: Topology):
        self._topology, self._peers = topology, topology.peers
        self.are_several = self._peers is not None
        self.is_leader = self._peers is None or self._peers.number == 0
        if self._peers is None and jax.process_count() > 1:
            raise ContextError(
                f"rx.experimental.LocalUpdates: this group has {jax.process_count()} processes, and what was attached is of "
                "this process alone. Attach it inside of `with strategy.scope():`, or make the variables there."
            )
        if self._peers is not None and self._peers.tolerates_failures:
            raise UnsupportedError(
                "rx.experimental.LocalUpdates in a group whose strategy has fault_tolerance: a worker that enters in the "
                "middle does not know where its group is. Leave out fault_tolerance: the other groups go on when this one "
                "restarts."
            )

    def agreed(self, decide: Callable[[], Any]) -> Any:
        """Returns what ``decide`` returns in the leader: a value that JSON can hold.

        Raises:
          RemoteError: It has failed in the leader, and this is another process.
        """
        if self._peers is None:
            return decide()
        decided = error = None
        if self.is_leader:
            try:
                decided = decide()
            except ReplicaxError as raised:
                error = raised
        said = [decided, None if error is None else str(error)]
        decided, why = self._peers.gather(_TOPIC, said, "to exchange with other groups")[0]
        if error is not None:
            raise error
        if why is not None:
            raise RemoteError(
                f"The exchange of {self._peers.names[0]}, which exchanges for this group, failed: {why}"
            )
        return decided

    def of_all(self, value: Any) -> list[Any]:
        """Returns the values that all processes give, which JSON can hold, in their order."""
        return (
            [value]
            if self._peers is None
            else [*self._peers.gather(_TOPIC, value, "to exchange with other groups")]
        )

    @property
    def number(self) -> int:
        """The number of this process in the group."""
        return 0 if self._peers is None else self._peers.number

    def shared(self, values: jax.Array) -> jax.Array:
        """Returns the leader's values, of the same shape in all processes, on a device of this process."""
        return values if self._peers is None else on_one_device(self._topology.put_leaders(values))
