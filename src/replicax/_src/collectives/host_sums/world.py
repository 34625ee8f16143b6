"""``World``: the members of one epoch add arrays that lie on their hosts, in the order of the replicas' numbers.

Each member owns one part of the arrays. All hand it their replicas' slices of that part, it adds them in that order,
and all take the sum from it: two hops, and the bytes of a ring, which would add each part in another order. Small
arrays take one hop: each member sends its own to all, and adds all itself.

Members that share a host write their slices and sums into memory that the others read, and send heads of frames only.
So all members wait in one way, and notice a death at once, in shared memory too.

One member can also give arrays to another one, over their connection: the sums of a step, or a state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.exchange import Exchange
from replicax._src.collectives.host_sums.gifts import Gift, await_gifts, end_gifts, receive_gift, send_gift
from replicax._src.collectives.host_sums.link import Link
from replicax._src.collectives.host_sums.links import LinkLost, Links, OtherExchange
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.ordered_addition import HostOp, check_dtype
from replicax._src.collectives.host_sums.reduction import Reduction
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.wire.errors import PeerEndedError

_LAST_FRAMES_S: Final = 2.0


@final
class World:
    """The members of one epoch, connected with each other. ``Rendezvous.meet`` makes it.

    One thread exchanges and closes it. Any thread may cancel it.

    Args:
      epoch: The number of the epoch.
      members: All members, checked, in the order of their numbers, the same on all.
      number: The number of this process.
      links: The links with the other members, by number.
      memory: This process's memory that others of its host read; None if none does.
      timeout_s: The longest time that one exchange may take. Deaths are noticed at once, whatever it is.

    Attributes:
      giver: The number of another member that gives data to some. The first exchange waits until it has given all.
    """

    def __init__(
        self,
        epoch: int,
        members: Sequence[Member],
        number: int,
        links: Mapping[int, Link],
        memory: np.ndarray | None,
        timeout_s: float,
    ):
        self.epoch, self.members = epoch, tuple(members)
        self._timeout_s = timeout_s
        numbers = [member.number for member in members]
        self._place = numbers.index(number)
        self._links = Links(
            {place: links[number] for place, number in enumerate(numbers) if place != self._place}
        )
        self._reduction = Reduction(
            self._links,
            self._place,
            [member.replicas for member in members],
            memory,
        )
        self._lock = threading.Lock()
        self._ended: EpochEnded | None = None
        self._is_closed = False
        self._num_exchanges = 0
        self.giver: int | None = None

    # --- for the thread that exchanges --------------------------------------------------------------

    def all_reduce(
        self, op: HostOp | str, buffers: Sequence[Any], *, step: int, round: int = 0, rows: int = 0
    ) -> np.ndarray:
        """Combines one array of each replica: ``((r0 + r1) + r2) + ...`` for each element, on all members alike.

        All members call it in the same order, with the same arguments besides the arrays. It blocks.

        Args:
          op: ``sum``, ``max`` or ``min``.
          buffers: Arrays [...], one for each replica of this member, in the order of the replicas' numbers; all
            replicas have the same shape and dtype. They must not change before the call returns.
          step: The number of the step.
          round: The number of the exchange in the step.
          rows: The number of rows of all replicas that the step uses.

        Returns:
          [...], read-only, at a multiple of 64 bytes. JAX can adopt it without a copy: the memory is this process's
          own, no other process reads or writes it, and it is used again only after the array, all views of it and all
          arrays of JAX on it are deleted. No program may take it as a donated argument.

        Raises:
          EpochEnded: The world has ended; the exchange has no result here.
          ProgramMismatchError: Two members exchange different things. The error names both.
          InvalidArgumentError: The arrays cannot be combined, or do not fit this member's replicas.
        """
        arrays = self._checked(buffers)
        op, first = HostOp(op), arrays[0]
        check_dtype(op, first.dtype)
        exchange = Exchange(self.epoch, step, round, rows, op, first.dtype, first.size)
        self._raise_if_ended()
        try:
            self._await_gifts()
            result = self._reduction.all_reduce(exchange, arrays, time.monotonic() + self._timeout_s)
        except LinkLost as lost:
            raise self._lost(lost, exchange) from lost.error
        except OtherExchange as other:
            raise self._mismatch(other, exchange) from None
        self._raise_if_ended()
        self._num_exchanges += 1
        return result.reshape(np.shape(buffers[0]))

    def give(self, number: int, content: Mapping[str, Any], arrays: Sequence[Any]) -> None:
        """Sends arrays to a member, which takes them. No exchange is under way. It blocks.

        ``timeout_s`` bounds each chunk, so a member that makes progress has as much time as it needs.

        Args:
          number: The number of the member.
          content: A description of the arrays, which JSON can hold.
          arrays: Arrays of any shapes and dtypes. They must not change before the call returns.

        Raises:
          EpochEnded: The world has ended; the member may not have got all.
        """
        self._raise_if_ended()
        try:
            send_gift(self._links, self._place_of(number), self.epoch, content, arrays, self._timeout_s)
        except LinkLost as lost:
            raise self._lost(lost, "the transfer of its data") from lost.error

    def end_gifts(self) -> None:
        """Lets the others exchange, which know this process as ``giver``. Call it when all is given.

        Raises:
          EpochEnded: The world has ended.
        """
        self._raise_if_ended()
        try:
            end_gifts(self._links, self.epoch, self._timeout_s)
        except LinkLost as lost:
            raise self._lost(lost, "the end of the transfers") from lost.error

    def take(self, number: int) -> Gift:
        """Waits for the arrays that a member gives to this one; see ``give``.

        Raises:
          EpochEnded: The world has ended, or the member has sent something else.
        """
        self._raise_if_ended()
        try:
            gift = receive_gift(self._links, self._place_of(number), self.epoch, self._timeout_s)
        except LinkLost as lost:
            raise self._lost(lost, "the transfer of data to this process") from lost.error
        self._raise_if_ended()
        return gift

    def close(self) -> None:
        """Ends the world after all frames are sent. The others may be in no exchange: it ends for them, too."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._ended is None:
                self._ended = EpochEnded(self.epoch, "this process has left it")
        until = time.monotonic() + _LAST_FRAMES_S
        links = [link for _, link in self._links.items()]
        for link in links:
            link.release()
        for link in links:
            link.join(until)
            link.memory = None
        self._reduction.memory = None

    # --- for any thread -----------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        """Ends the world at once. An exchange that is under way raises ``EpochEnded`` within milliseconds."""
        self._end(reason)

    @property
    def awaited(self) -> str | None:
        """The name of the member for which the exchanging thread waits; None if it waits for none."""
        place = self._links.awaited
        return None if place is None else self.members[place].name

    def statistics(self) -> dict[str, Any]:
        """Returns figures: exchanges, bytes of connections, seconds of waiting for other members."""
        connections = [link.connection for _, link in self._links.items()]
        return {
            "num_exchanges": self._num_exchanges,
            "bytes_in": sum(connection.bytes_in for connection in connections),
            "bytes_out": sum(connection.bytes_out for connection in connections),
            "wait_s": self._links.wait_s,
            "shares_memory_with": [
                self.members[place].name for place, link in self._links.items() if link.memory is not None
            ],
        }

    # --- parts --------------------------------------------------------------------------------------

    def _checked(self, buffers: Sequence[Any]) -> list[np.ndarray]:
        own = self.members[self._place]
        if len(buffers) == len(own.replicas) == 1:
            return [np.ascontiguousarray(buffers[0]).reshape(-1)]
        arrays = [np.ascontiguousarray(buffer) for buffer in buffers]
        if len(arrays) != len(own.replicas):
            raise InvalidArgumentError(
                f"{own.name} gave {len(arrays)} arrays for its {len(own.replicas)} replicas {own.replicas}; give "
                "one for each."
            )
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) > 1:
            described = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in sorted(kinds, key=str))
            raise InvalidArgumentError(
                f"The replicas of {own.name} gave arrays of several kinds: {described}. All replicas give the same "
                "shape and dtype."
            )
        return [array.reshape(-1) for array in arrays]

    def _await_gifts(self) -> None:
        if self.giver is not None:
            await_gifts(self._links, self._place_of(self.giver), self.epoch, self._timeout_s)
            self.giver = None

    def _place_of(self, number: int) -> int:
        return next(place for place, member in enumerate(self.members) if member.number == number)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._again(self._ended)

    def _again(self, ended: EpochEnded) -> EpochEnded:
        return EpochEnded(self.epoch, ended.reason, ended.lost, ended.blamed)

    def _end(
        self, reason: str, lost: int | None = None, blamed: int | None = None, *, refusal: str = ""
    ) -> None:
        with self._lock:
            is_first = self._ended is None
            if is_first:
                self._ended = EpochEnded(self.epoch, reason, lost, blamed)
        for _, link in self._links.items():
            if is_first and refusal:
                link.refuse(refusal)
            else:
                link.cancel()

    def _lost(self, lost: LinkLost, exchange: Exchange | str) -> Exception:
        """Ends the world because of one link. Returns the error to raise."""
        member, error = self.members[lost.place], lost.error
        if isinstance(error, PeerEndedError) and error.is_refusal and self._ended is None:
            self._end(f"{member.name} refuses the exchange", refusal=error.reason)
            return ProgramMismatchError(error.reason)
        is_late = isinstance(error, TimeoutError)
        if is_late:
            reason = f"{member.name} did not take part in {exchange} within {self._timeout_s:g} s"
        else:
            reason = f"the connection with {member.name} ended ({error.strerror or error})"
        self._end(reason, member.number, member.number if is_late else None)
        assert self._ended is not None
        return self._again(self._ended)

    def _mismatch(self, other: OtherExchange, exchange: Exchange) -> ProgramMismatchError:
        """Ends the world because two members differ, tells the others so, and returns the error to raise."""
        own, peer = self.members[self._place].name, self.members[other.place].name
        text = (
            f"{own} and {peer} do not exchange the same values:\n  {own}: {exchange}\n  {peer}: {other.exchange}\n"
            "All workers must run the same program, with the same batches in the same order. Look for an `if` on "
            "the worker, and for data that differ between workers."
        )
        self._end(f"{own} and {peer} do not exchange the same values", refusal=text)
        return ProgramMismatchError(text)
