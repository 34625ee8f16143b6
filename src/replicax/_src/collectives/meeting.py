"""Meeting: runs one thread per replica, one at a time, and lets them exchange values. Knows no arrays.

A replica keeps the turn until it waits at an exchange or ends, so that prints do not mix and a debugger has
the terminal to itself. When all replicas wait at the same exchange, the first one goes on.
"""

from __future__ import annotations

import contextvars
import enum
import threading
from collections.abc import Callable
from typing import Any, final

from replicax._src.errors import StructureError
from replicax._src.user_code import user_line

# Waits wake up this often to see whether they still make sense; a replica may stand in a debugger for hours.
_WAKE_S = 0.5
_END_S = 5.0


class _State(enum.Enum):
    READY = 0
    WAITING = 1
    ENDED = 2


class _Abandoned(BaseException):
    """Another replica has failed. Users' ``except`` must miss it."""


class _Seat:
    """What the meeting knows of one replica."""

    def __init__(self) -> None:
        self.state = _State.READY
        self.num_collectives = 0
        self.place: tuple[str, str] = ("", "")  # what it waits for, and the user's line
        self.given: Any = None
        self.received: list[Any] | None = None


@final
class Meeting:
    """The replicas of one run.

    Args:
      num_replicas: R.
    """

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self._seats = [_Seat() for _ in range(num_replicas)]
        self._changed = threading.Condition()
        self._turn = 0
        self._failure: BaseException | None = None
        self._mismatch: StructureError | None = None

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Calls ``body(replica_id)`` for all replicas and gives what they return; no thread is left behind.

        With one replica the caller's own thread runs it.

        Raises:
          BaseException: What the first replica to fail raised, with its traceback.
        """
        if self.num_replicas == 1:
            return [body(0)]
        results: list[Any] = [None] * self.num_replicas
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._attend, replica_id, body, results),
                name=f"replica {replica_id}",
                daemon=True,
            )
            for replica_id in range(self.num_replicas)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # in short waits, so that Ctrl-C is heard
                    thread.join(_WAKE_S)
        except BaseException as error:
            self._fail(error)
            for thread in threads:
                thread.join(_END_S / self.num_replicas)
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback would refer to itself
        return results

    def _attend(self, replica_id: int, body: Callable[[int], Any], results: list[Any]) -> None:
        try:
            self._wait_for_turn(replica_id)
            results[replica_id] = body(replica_id)
        except _Abandoned:
            return
        except BaseException as error:
            self._fail(error)
        else:
            with self._changed:
                self._seats[replica_id].state = _State.ENDED
                self._pass_on()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def exchange(self, replica_id: int, what: str, value: Any, is_collective: bool = True) -> list[Any]:
        """Waits until all replicas are here, and gives the values of all, in replica order.

        Args:
          what: In words; must be the same on all replicas.
          is_collective: Whether it counts when collectives are counted.

        Raises:
          StructureError: Other replicas wait for something else, or have ended.
        """
        seat = self._seats[replica_id]
        with self._changed:
            if self._failure is not None:
                raise _Abandoned
            seat.num_collectives += is_collective
            seat.state, seat.place, seat.given = _State.WAITING, (what, user_line()), value
            if all(other.state is _State.WAITING for other in self._seats):
                self._complete()
            self._pass_on()
        self._wait_for_turn(replica_id)
        received, seat.received = seat.received, None
        assert received is not None
        return received

    def _complete(self) -> None:
        if len({seat.place[0] for seat in self._seats}) > 1:
            self._mismatch = StructureError(
                f"The replicas meet at different collectives: {self._describe_waiting()}. All replicas must call the "
                f"same collectives, with arrays of the same shapes, in the same order."
            )
            return
        values = [seat.given for seat in self._seats]
        for seat in self._seats:
            seat.state, seat.given, seat.received = _State.READY, None, values

    def _pass_on(self) -> None:
        """Gives the turn to the first replica that can go on."""
        ready = [i for i, seat in enumerate(self._seats) if seat.state is _State.READY]
        waiting = [i for i, seat in enumerate(self._seats) if seat.state is _State.WAITING]
        if not ready and waiting and self._mismatch is None:
            self._mismatch = StructureError(
                f"{self._describe_ended()}, and {self._describe_waiting()}, for ever. All replicas must call the same "
                f"collectives (all_reduce, all_gather, merge_call, optimizer.apply and kin): take them out of the "
                f"`if` that differs between replicas."
            )
        self._turn = ready[0] if ready else waiting[0] if waiting else -1
        self._changed.notify_all()

    def _describe_ended(self) -> str:
        return ", ".join(
            f"replica {i} ended after {seat.num_collectives} collective(s)"
            for i, seat in enumerate(self._seats)
            if seat.state is _State.ENDED
        )

    def _describe_waiting(self) -> str:
        return ", ".join(
            f"replica {i} waits at its collective number {seat.num_collectives}, {seat.place[0]} at {seat.place[1]}"
            for i, seat in enumerate(self._seats)
            if seat.state is _State.WAITING
        )

    def _wait_for_turn(self, replica_id: int) -> None:
        seat = self._seats[replica_id]
        with self._changed:
            while self._failure is None and self._turn != replica_id:
                self._changed.wait(_WAKE_S)
            if self._failure is not None:
                raise _Abandoned
            if self._mismatch is not None and seat.state is _State.WAITING:
                raise self._mismatch
