"""``Negotiation``: the first messages between members. They compare what each was told, and who reads whose memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.cluster.control_messages import receive, send
from replicax._src.collectives.host_sums.link import Link
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.reduction import shared_bytes
from replicax._src.collectives.host_sums.shared_memory import make_segment, open_offer
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError
from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.watch import Watch

_HERE: Final[Mapping[str, Form[Any]]] = {
    "kind": lambda it: it.one_of("here"),
    "number": JsonReader.count,
    "replicas": JsonReader.anything,
    "segment": JsonReader.anything,
}
_READS: Final[Mapping[str, Form[Any]]] = {
    "kind": lambda it: it.one_of("reads"),
    "segment": JsonReader.flag,
}


class MemberLost(Exception):
    """A member has died during the rendezvous, or was told other members."""

    def __init__(self, member: Member, error: Exception):
        super().__init__(member, error)
        self.member, self.error = member, error


@final
class Negotiation:
    """The first messages of one process with the other members of an epoch.

    Args:
      links: The links with the others, by number.
      members: All members.
      number: The number of this process.
      deadline: The deadline on the clock of ``time.monotonic``.
    """

    def __init__(self, links: Mapping[int, Link], members: Sequence[Member], number: int, deadline: float):
        self._links, self._number, self._deadline = links, number, deadline
        self._members = {member.number: member for member in members}
        self._watch = Watch([link.connection for link in links.values()])

    def run(self, *, shares_memory: bool) -> np.ndarray | None:
        """Notes in each link whether the two processes read each other's memory.

        Returns:
          The memory of this process that others read; None if none does.

        Raises:
          MemberLost: A member has died, did not answer in time, or was told other members.
        """
        replicas = [[member.number, list(member.replicas)] for member in self._members.values()]
        shares_memory = shares_memory and bool(self._links)
        segment = make_segment(self._bytes_of(self._number)) if shares_memory else None
        offer = None if segment is None else segment.offer
        try:
            here = {"kind": "here", "number": self._number, "replicas": replicas, "segment": offer}
            for number in self._links:
                self._send(number, here)
            for number, message in self._receive_from_all(_HERE).items():
                if message["number"] != number or message["replicas"] != replicas:
                    raise MemberLost(self._members[number], ForeignPeerError("it was told other members"))
                link = self._links[number]
                if shares_memory:
                    link.memory = open_offer(message["segment"], self._bytes_of(number))
                self._send(number, {"kind": "reads", "segment": link.memory is not None})
            for number, message in self._receive_from_all(_READS).items():
                self._links[number].is_read = message["segment"]
        finally:
            if segment is not None:
                segment.close()  # members that read it have opened it
        is_read = any(link.is_read for link in self._links.values())
        return segment.memory if segment is not None and is_read else None

    def _bytes_of(self, number: int) -> int:
        return shared_bytes(len(self._members[number].replicas), len(self._members))

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        try:
            send(self._links[number].connection, message, self._deadline)
        except OSError as error:
            raise MemberLost(self._members[number], error) from error

    def _receive_from_all(self, fields: Mapping[str, Form[Any]]) -> dict[int, dict[str, Any]]:
        """Waits for one message of each other member."""
        messages, numbers = {}, list(self._links)
        for index, number in enumerate(numbers):
            try:
                ended = self._watch.wait(index, self._deadline)
                if ended is not None:
                    error = ConnectionResetError("its connection has ended")
                    raise MemberLost(self._members[numbers[ended]], error)
                message = receive(self._links[number].connection, self._deadline)
                messages[number] = JsonReader(message, "the message").record(fields)
            except (OSError, TextError) as error:
                raise MemberLost(self._members[number], error) from error
        return messages
