"""``AskingServers``: the client of all simulated parameter servers that workers and the coordinator have.

It does what ``ServerClients`` and ``ServerClient`` do: it asks all servers at once, sends again after a break, and asks the
other server of a group.
"""

import itertools

from ps_simulation.task_process import Link
from ps_simulation.turns import Turns
from replicax._src.vocabulary.errors import (
    MessageError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)

PAUSES_S = (0.0, 0.2, 1.0)
TURN_S = 0.1
CALL_S = 60.0


class AskingServer:
    """The client of one server, or of the two that hold a group.

    Args:
      process: The process that asks.
      number: The number of the server, or of the group.
      incarnation: The session id of the coordinator.
      num_servers: The number of servers.
      returns: True if the server keeps its data when it restarts.
    """

    def __init__(self, process, number, incarnation, num_servers, *, returns=False):
        self.name = f"ps {number}"
        self.programs = {}  # an ordered set
        self.returns = returns
        self.turns = Turns()
        self.is_closed = False
        self._process, self._number, self._incarnation = process, number, incarnation
        self._peers = [self.name]
        self._other = f"ps {(number + 1) % num_servers}"
        self._primary = self._connected_to = self._epoch = 0
        self._link = None
        self._pending = None

    @property
    def is_of_group(self):
        return len(self._peers) == 2

    def use_primary(self, primary, epoch):
        """Sets the primary of the group: its first server (0) or its second (1). Ignores an epoch that is over."""
        if not self.is_of_group:
            self._peers.append(self._other)
            self.returns = True
        if epoch < self._epoch:
            return
        self._primary, self._epoch = primary, epoch
        if self._link is not None and self._connected_to != primary:
            self._link.close()

    def begin(self, request):
        """Sends a request, for ``end``."""
        request = {**request, "incarnation": self._incarnation}
        if self.is_of_group:
            request["group"] = self._number
        self._send(request)
        return request

    def end(self, request, deadline, may_repeat=True):
        """Waits for the answer. Raises its error."""
        pauses = self._pauses() if may_repeat else iter(())
        stale_at, resent = set(), set()
        while True:
            reply = self._pending
            if self._link is not None:
                self._link.limit(reply, max(deadline - self._process.world.now, 0.0))
            try:
                return (yield reply)
            except UnknownProgramError as error:
                if error.digest in resent or error.digest not in self.programs:
                    raise
                resent.add(error.digest)
                yield from self.end(self.begin({"op": "program", "digest": error.digest}), deadline)
                self._send(request)
            except (UnavailableError, StaleCoordinatorError) as error:
                if isinstance(error, StaleCoordinatorError):
                    stale_at.add(self._connected_to)
                    if len(stale_at) == len(self._peers):
                        raise
                if self._primary == self._connected_to:
                    self._primary = (self._primary + 1) % len(self._peers)
                self.disconnect()
                pause = next(pauses, None)
                if pause is None or self._process.world.now + pause >= deadline or self.is_closed:
                    raise self._named(error) from None
                yield pause
                self._send(request)
            except MessageError:
                self.disconnect()
                raise

    def disconnect(self):
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self):
        self.is_closed = True
        if self._link is not None:
            self._link.close()

    def _send(self, request):
        if self._link is None or self._connected_to != self._primary or self._link.is_closed:
            self.disconnect()
            self._connected_to = self._primary
            self._link = Link(self._process, self._peers[self._connected_to], "servers")
        if self.is_closed:
            self._link.close()
        self._pending = self._link.send(request)

    def _pauses(self):
        if not self.returns:
            return iter(PAUSES_S)
        if self.is_of_group:
            return itertools.chain(PAUSES_S[:1], itertools.repeat(TURN_S))
        return itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))

    def _named(self, error):
        if isinstance(error, UnavailableError) and not error.task:
            return UnavailableError(f"{self.name}: {error}", self.name)
        return error


class AskingServers:
    """The clients of all servers, asked at once.

    Args:
      process: The process that asks.
      num_servers: The number of servers.
      incarnation: The session id of the coordinator.
      returns: True if servers keep their data when they restart.
    """

    def __init__(self, process, num_servers, incarnation, *, returns=False):
        self._process, self.incarnation = process, incarnation
        self.servers = [
            AskingServer(process, number, incarnation, num_servers, returns=returns)
            for number in range(num_servers)
        ]

    def use_primaries(self, views):
        """Sets the primaries of the groups."""
        for view in views:
            self.servers[view.group].use_primary(int(view.primary != view.group), view.epoch)

    def ask(self, requests, may_repeat=True):
        """Sends all requests, by server, then receives all answers. Raises the first error."""
        deadline = self._process.world.now + CALL_S
        taken = []
        try:
            for number in sorted(requests):
                yield self.servers[number].turns.begin()
                taken.append(number)
            sent = {number: self.servers[number].begin(request) for number, request in requests.items()}
            answers, errors = {}, []
            for number, request in sent.items():
                try:
                    answers[number] = yield from self.servers[number].end(request, deadline, may_repeat)
                except Exception as error:
                    errors.append(error)
        finally:
            for number in taken:
                self.servers[number].turns.end()
        if errors:
            raise errors[0]
        return answers

    def ask_all(self, request):
        """Sends the same request to all servers."""
        return self.ask(dict.fromkeys(range(len(self.servers)), request))

    def close(self):
        for server in self.servers:
            server.close()
