"""``Rendezvous``: connects a process with the other members of each epoch to a ``World``."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from replicax._src.cluster.control_messages import connect, receive, send
from replicax._src.cluster.failures import ClusterStartError
from replicax._src.cluster.spec import join_address
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.link import Link
from replicax._src.collectives.host_sums.members import Member, check_members
from replicax._src.collectives.host_sums.negotiation import MemberLost, Negotiation
from replicax._src.collectives.host_sums.world import World
from replicax._src.control.arrivals import Arrivals
from replicax._src.control.epochs import ALL_EPOCHS
from replicax._src.packaging.extras import missing_extra
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, PeerEndedError, TokenError
from replicax._src.wire.listener import Listener
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import listen

_Key = tuple[int, int]
"""The number of an epoch, and the number of another member."""
_HELLO_S: Final = 5.0
_HELLO: Final[Mapping[str, Form[Any]]] = {
    "kind": lambda it: it.one_of("sums"),
    "epoch": JsonReader.count,
    "member": JsonReader.count,
}


@final
class Rendezvous:
    """Listens for the other members of this process's epochs, from now until ``close``.

    Args:
      host: The name or address by which the others reach this host.
      security: The token and TLS settings, the same on all members.
      port: The port; 0 for a free one.
      shares_memory: False to use connections between processes of one host, too.

    Attributes:
      address: ``host:port``, for the others.

    Raises:
      OSError: It cannot listen there.
    """

    def __init__(self, host: str, security: Security, *, port: int = 0, shares_memory: bool = True):
        self._security, self._shares_memory = security, shares_memory
        self._changed = threading.Condition()
        self._arrivals: Arrivals[Link] = Arrivals()
        self._failures: dict[_Key, OSError] = {}
        self._negotiating: dict[int, Sequence[Link]] = {}
        self._worlds: dict[int, World] = {}
        self._reason = ""  # why the last epoch ended
        self._listener = Listener(listen(host, port), security, self._serve)
        self.address = join_address(host, self._listener.port)

    def meet(
        self,
        epoch: int,
        members: Sequence[Member],
        number: int,
        timeout_s: float,
        *,
        exchange_s: float | None = None,
    ) -> World:
        """Waits until all members of an epoch are connected with each other. One thread meets and exchanges.

        Worlds of earlier epochs are ended and closed.

        Args:
          epoch: The number of the epoch, at least 0.
          members: All members, this process among them.
          number: The number of this process.
          timeout_s: The longest time for the rendezvous.
          exchange_s: The longest time for each exchange of the world; None for the same.

        Raises:
          EpochEnded: The epoch has ended, or a member is lost or did not come in time.
          ClusterStartError: A member has another token.
          InvalidArgumentError: A replica or a number occurs twice.
          MissingExtraError: The connections need checksums, and xxhash is not installed.
        """
        check_members(members)
        deadline = time.monotonic() + timeout_s
        self._close_worlds(epoch - 1, f"epoch {epoch} begins")
        members = sorted(members, key=lambda member: member.number)
        others = [member for member in members if member.number != number]
        for member in others:
            if member.number < number:
                arguments = epoch, number, member, deadline
                threading.Thread(target=self._call, args=arguments, name="replicax sums", daemon=True).start()
        links = self._taken(epoch, others, deadline)
        world = None
        try:
            _check_checksums(links.values())
            negotiation = Negotiation(links, members, number, deadline)
            memory = negotiation.run(shares_memory=self._shares_memory)
            limit_s = timeout_s if exchange_s is None else exchange_s
            world = World(epoch, members, number, links, memory, limit_s)
            self._register(world)
            return world
        except MemberLost as lost:
            self._raise_if_ended(epoch)
            is_late = isinstance(lost.error, TimeoutError)
            raise _ended(epoch, lost.member, lost.error, is_blamed=is_late) from lost.error
        finally:
            if world is None:
                for link in links.values():
                    link.cancel()
                    link.release()
            with self._changed:
                self._negotiating.pop(epoch, None)

    def end(self, epoch: int, reason: str) -> None:
        """Ends an epoch and all earlier ones, from any thread, also before this process meets its members.

        A rendezvous or an exchange that is under way raises ``EpochEnded`` within milliseconds.
        """
        with self._changed:
            if self._arrivals.has_ended(epoch):
                return
            stale, self._reason = self._arrivals.end(epoch), reason
            self._failures = {key: error for key, error in self._failures.items() if key[0] > epoch}
            negotiating = [
                link for each, links in self._negotiating.items() if each <= epoch for link in links
            ]
            worlds = [world for each, world in self._worlds.items() if each <= epoch]
            self._changed.notify_all()
        for link in stale:
            link.cancel()
            link.release()
        for link in negotiating:
            link.cancel()
        for world in worlds:
            world.cancel(reason)

    def close(self) -> None:
        """Stops listening, and closes the world. The thread that exchanges calls it."""
        self._listener.close()
        with self._changed:
            worlds = [self._worlds.pop(epoch) for epoch in list(self._worlds)]
        for world in worlds:  # the last frames are sent before the end
            world.close()
        self._close_worlds(ALL_EPOCHS, "this process has left")

    def _close_worlds(self, epoch: int, reason: str) -> None:
        self.end(epoch, reason)
        with self._changed:
            ended = [self._worlds.pop(each) for each in list(self._worlds) if each <= epoch]
        for world in ended:
            world.close()

    def _register(self, world: World) -> None:
        with self._changed:
            self._worlds[world.epoch] = world
            has_ended, reason = self._arrivals.has_ended(world.epoch), self._reason
        if has_ended:
            world.cancel(reason)
            self._raise_if_ended(world.epoch)

    def _raise_if_ended(self, epoch: int) -> None:
        if self._arrivals.has_ended(epoch):
            raise EpochEnded(epoch, self._reason)

    # --- connections --------------------------------------------------------------------------------

    def _call(self, epoch: int, number: int, member: Member, deadline: float) -> None:
        """Connects to a member with a lower number. It then sends this process's large frames."""
        try:
            connection = connect(member.address, self._security, deadline)
        except OSError as error:
            self._fail(epoch, member, error)
            return
        try:
            send(connection, {"kind": "sums", "epoch": epoch, "member": number}, deadline)
            self._run(epoch, member.number, connection)
        except OSError as error:
            self._fail(epoch, member, error)
        finally:
            connection.close()

    def _fail(self, epoch: int, member: Member, error: OSError) -> None:
        with self._changed:
            if not self._arrivals.has_ended(epoch):
                self._failures[epoch, member.number] = error
            self._changed.notify_all()

    def _serve(self, connection: Connection) -> None:
        try:
            hello = JsonReader(receive(connection, time.monotonic() + _HELLO_S), "the first message").record(
                _HELLO
            )
        except TextError as error:
            raise ForeignPeerError(str(error)) from error
        self._run(hello["epoch"], hello["member"], connection)

    def _run(self, epoch: int, number: int, connection: Connection) -> None:
        link = Link(connection)
        with self._changed:
            stale = self._arrivals.arrive(epoch, number, link)
            self._changed.notify_all()
        for each in stale:
            each.cancel()
            each.release()
        link.run()

    def _taken(self, epoch: int, others: Sequence[Member], deadline: float) -> dict[int, Link]:
        """Waits for the links with all others, and takes them."""
        with self._changed:
            while True:
                self._raise_if_ended(epoch)
                for member in others:
                    error = self._failures.pop((epoch, member.number), None)
                    if isinstance(error, TokenError):
                        raise ClusterStartError(
                            f"The token of this process does not match that of {member.name} at {member.address}: "
                            f"{error}. Give all tasks of the cluster the same token (REPLICAX_TOKEN)."
                        ) from error
                    if error is not None:
                        has_ended = isinstance(error, PeerEndedError | ConnectionResetError | BrokenPipeError)
                        raise _ended(epoch, member, error, is_blamed=not has_ended) from error
                numbers = [member.number for member in others]
                missing = self._arrivals.missing(epoch, numbers)
                if not missing:
                    links = self._arrivals.take(epoch, numbers)
                    self._negotiating[epoch] = list(links.values())
                    return links
                if not self._changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                    late = others[numbers.index(missing[0])]
                    reason = f"{late.name} did not come to the rendezvous in time"
                    raise EpochEnded(epoch, reason, late.number, blamed=late.number)


def _ended(epoch: int, member: Member, error: Exception, *, is_blamed: bool) -> EpochEnded:
    text = getattr(error, "strerror", None) or str(error)
    reason = f"{member.name} at {member.address} is not reached ({text})"
    return EpochEnded(epoch, reason, member.number, member.number if is_blamed else None)


def _check_checksums(links: Iterable[Link]) -> None:
    is_checked = any(link.connection.is_checked for link in links)
    if is_checked and importlib.util.find_spec("xxhash") is None:
        raise missing_extra(
            "A sum between hosts without TLS",
            "ps",
            "xxhash",
            advice="With TLS (REPLICAX_TLS_CERTIFICATE) it is not needed.",
        )
