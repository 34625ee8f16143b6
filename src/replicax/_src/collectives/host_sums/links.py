"""``Links``: the links with all other members of a world. Its errors say which member caused them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, final

from replicax._src.collectives.host_sums.exchange import HEAD_BYTES, Exchange
from replicax._src.collectives.host_sums.link import Link
from replicax._src.wire.errors import ForeignPeerError, PeerEndedError
from replicax._src.wire.frames import Part
from replicax._src.wire.watch import Watch

_LAST_WORDS_S: Final = 0.2
_MOST_DISCARDED: Final = 2**30


class LinkLost(Exception):
    """The connection with the member at ``place`` has ended, or did not bring a frame in time."""

    def __init__(self, place: int, error: OSError):
        super().__init__(place, error)
        self.place, self.error = place, error


class OtherExchange(Exception):
    """The member at ``place`` exchanges something else."""

    def __init__(self, place: int, exchange: Exchange):
        super().__init__(place, exchange)
        self.place, self.exchange = place, exchange


@final
class Links:
    """The links with the other members, by the place of each in the world. One thread uses them.

    Attributes:
      wait_s: The seconds for which this process has waited for others.
      awaited: The place of the member for which it waits; None if for none.
    """

    def __init__(self, links: Mapping[int, Link]):
        self._links, self._items = dict(links), list(links.items())
        self._watch_index = {place: index for index, place in enumerate(links)}
        self._watch = Watch([link.connection for link in links.values()])
        self.wait_s = 0.0
        self.awaited: int | None = None

    def items(self) -> Sequence[tuple[int, Link]]:
        return self._items

    def __getitem__(self, place: int) -> Link:
        return self._links[place]

    def send(self, place: int, head: bytes, body: Sequence[Part], deadline: float) -> None:
        """Sends a frame; see ``Link.send``."""
        try:
            self._links[place].send(head, body, deadline)
        except OSError as error:
            self._raise_lost(place, error, head)

    def receive(self, place: int, head: bytes, memory: memoryview, deadline: float) -> memoryview:
        """Waits for the next frame of a member.

        Args:
          place: The member.
          head: The start of the frame's head.
          memory: Memory for its body.
          deadline: The deadline on the clock of ``time.monotonic``.

        Returns:
          The rest of the head of a frame without a body, valid until the next frame of this member is received.

        Raises:
          OtherExchange: The frame is of another exchange.
          LinkLost: This member, or another one, has ended the connection, or no frame came in time.
        """
        connection = self._links[place].connection

        def room(received: memoryview, num_bytes: int) -> memoryview:
            _compare(place, head, received)
            if num_bytes != len(memory):
                raise ForeignPeerError(f"it sent {num_bytes} bytes, expected {len(memory)}")
            return memory

        try:
            if not connection.has_bytes():
                self._wait(place, head, deadline)
            received = connection.receive(deadline, room)
            if received is None:
                return memory[:0]
            if memory or received[:HEAD_BYTES] != head:
                room(received, 0)
            return received[HEAD_BYTES:]
        except OSError as error:
            self._raise_lost(place, error, head)

    def receive_frame(
        self,
        place: int,
        room: Callable[[memoryview, int], memoryview],
        deadline: float,
    ) -> None:
        """Waits for the next frame of a member.

        Args:
          place: The member.
          room: A function that gets the frame's head and the number of bytes of its body, and returns memory for them.
          deadline: The deadline on the clock of ``time.monotonic``.

        Raises:
          LinkLost: See ``receive``.
        """
        connection = self._links[place].connection
        try:
            if not connection.has_bytes():
                self._wait(place, None, deadline)
            received = connection.receive(deadline, room)
            if received is not None:
                room(received, 0)
        except OSError as error:
            self._raise_lost(place, error, None)

    def _wait(self, place: int, head: bytes | None, deadline: float) -> None:
        self.awaited, start = place, time.perf_counter()
        try:
            ended = self._watch.wait(self._watch_index[place], deadline)
        finally:
            self.wait_s += time.perf_counter() - start
            self.awaited = None
        if ended is not None:
            self._raise_lost(self._items[ended][0], ConnectionResetError("the connection has ended"), head)

    def _raise_lost(self, place: int, error: OSError, head: bytes | None) -> NoReturn:
        """Raises the error of a lost member. What it sent last says more: another exchange, or why it left."""
        connection = self._links[place].connection
        heads: list[bytes] = []

        def discard(received: memoryview, num_bytes: int) -> memoryview:
            heads.append(bytes(received))
            return memoryview(bytearray(min(num_bytes, _MOST_DISCARDED)))

        try:
            deadline = time.monotonic() + _LAST_WORDS_S
            while not isinstance(error, TimeoutError):
                received = connection.receive(deadline, discard)
                if received is not None:
                    heads.append(bytes(received))
                last_head = heads.pop()
                if head is not None:
                    _compare(place, head, last_head, is_late=True)
        except OSError as last:
            error = last if isinstance(last, PeerEndedError) else error
        raise LinkLost(place, error) from error


def _compare(place: int, head: bytes, received: memoryview | bytes, *, is_late: bool = False) -> None:
    """Compares the head of a frame with the expected one; if ``is_late``, only what both say of the same round."""
    if received[:HEAD_BYTES] == head:
        return
    own, other = Exchange.unpacked(head), Exchange.unpacked(bytes(received))
    if own is None or other is None:
        raise ForeignPeerError("it sent something that belongs to no exchange")
    if is_late and (own.step, own.round) != (other.step, other.round):
        return
    if own != other:
        raise OtherExchange(place, other)
    if not is_late:
        raise ForeignPeerError(f"it sent another frame of {own} than expected")
