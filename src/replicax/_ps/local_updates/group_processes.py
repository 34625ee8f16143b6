"""``GroupProcesses``: the processes of one group, which adopt the same values in the same step.

Only the first one, the leader, exchanges. It tells the others what it decided, and its values.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, final

import jax

from replicax._ps.local_updates.fragment_values import on_one_device
from replicax._src.program_kit.errors import ContextError, RemoteError, ReplicaxError, UnsupportedError
from replicax._src.program_kit.traced_programs import Topology

_TOPIC: Final = "local updates"
_TICK_S: Final = 0.5  # after which the leader says that it still waits


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

    def agreed(self, decide: Callable[[], Any], call: str = "an agreement") -> Any:
        """Returns what ``decide``, which does not wait, returns in the leader: a value that JSON can hold.

        Args:
          decide: Called in the leader.
          call: What the program calls, and after which step: all processes of the group must call the same.

        Raises:
          ContextError: Another process calls something else.
          RemoteError: It has failed in the leader, and this is another process.
        """
        return self.agreed_with_wish(decide, call, wish=False)[0]

    def agreed_with_wish(self, decide: Callable[[], Any], call: str, *, wish: bool) -> tuple[Any, bool]:
        """Like ``agreed``. Returns also whether some process has a wish."""
        if self._peers is None:
            return decide(), wish
        decided = error = None
        if self.is_leader:
            try:
                decided = decide()
            except ReplicaxError as raised:
                error = raised
        return self._told(call, decided, error, wish)

    def awaited(self, decide: Callable[[], Any], call: str) -> Any:
        """Like ``agreed`` for what may take long: the other processes wait for the leader for as long as it lives."""
        if self._peers is None:
            return decide()
        outcomes: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcomes.put((decide(), None))
            except Exception as raised:
                outcomes.put((None, raised))

        if self.is_leader:
            threading.Thread(target=run, name="replicax local updates wait", daemon=True).start()
        while True:
            outcome = error = None
            if self.is_leader:
                with contextlib.suppress(queue.Empty):
                    value, error = outcomes.get(timeout=_TICK_S)
                    outcome = [value]
            outcome, _ = self._told(call, outcome, error, wish=False)
            if outcome is not None:
                return outcome[0]

    def _told(self, call: str, decided: Any, error: Exception | None, wish: bool) -> tuple[Any, bool]:
        assert self._peers is not None
        said = [call, decided, None if error is None else f"{type(error).__name__}: {error}", wish]
        all_said = self._peers.gather(_TOPIC, said, "to exchange with other groups")
        differing = [name for name, each in all_said.named() if each[0] != all_said[0][0]]
        if differing:
            calls = "; ".join(f"{name}: {each[0]}" for name, each in all_said.named())
            raise ContextError(
                f"The processes of this group call different methods of LocalUpdates: {calls}. Call step, wait and finish in "
                "all processes of a group after the same steps, and not in a branch for some of them."
            )
        if error is not None:
            raise error
        _, decided, why, _ = all_said[0]
        if why is not None:
            raise RemoteError(
                f"The exchange of {self._peers.names[0]}, which exchanges for this group, failed: {why}"
            )
        return decided, any(each[3] for each in all_said)

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
