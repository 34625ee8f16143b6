"""``AskingServers``: the clients of all simulated parameter servers that a worker or the coordinator has.

Real are the rules, ``RequestRules``. A thread of each client reads what comes, and hands it over a little later. So an
answer may come after its request was given up, by Ctrl-C for example.
"""

import random

from ps_simulation.routines import Reply
from ps_simulation.task_process import Link
from ps_simulation.turns import Turns
from replicax._ps.client.request_rules import (
    EndRequest,
    OpenConnection,
    PauseUntil,
    RequestRules,
    SendRequest,
)
from replicax._src.vocabulary.errors import ReplicaxError

CALL_S = 60.0
LATE_S = 10.0
IS_SLOW = 0.1  # the share of answers that are handed over later
HAND_OVER_S = 0.002


class AskingServer:
    """The client of one server, or of the two that hold a group: ``ServerClient`` with replies in place of threads.

    Args:
      process: The process that asks.
      number: The number of the server, or of the group.
      incarnation: The session id of the coordinator.
      num_servers: The number of servers.
      returns: True if the server keeps its data when it restarts.
    """

    def __init__(self, process, number, incarnation, num_servers, *, returns=False):
        name = f"ps {number}"
        self.programs = {}  # an ordered set
        self.turns = Turns()
        self._process, self._number, self._incarnation = process, number, incarnation
        self._rules = RequestRules(name, self.programs)
        self._rules.returns = returns
        self._random = random.Random(f"{process.world.seed} {process.name} asks {name}")
        self._peers, self._other = [name], f"ps {(number + 1) % num_servers}"
        self._link = None
        self._request = self._ended = None
        self._deadline = 0.0

    def use_primary(self, primary, epoch):
        """Sets the primary of the group: its first server (0) or its second (1). Ignores an epoch that is over."""
        if len(self._peers) == 1:
            self._peers.append(self._other)
            self._rules.replicated()
        if self._rules.primary_named(primary, epoch) and self._link is not None:
            self._link.close()

    def begin(self, request, deadline, may_repeat=True):
        """Sends a request. Returns the reply."""
        self._request, self._ended, self._deadline = self._addressed(request), Reply(), deadline
        ended = self._ended
        self._carry_out(self._rules.asked(deadline, may_repeat))
        return ended

    def disconnect(self):
        """Ends the connection, and gives up the request that waits on it."""
        self._rules.disconnected()
        self._drop()

    def close(self):
        self._rules.closed()
        if self._link is not None:
            self._link.close()

    def _addressed(self, request):
        group = {"group": self._number} if len(self._peers) == 2 else {}
        return {**request, "incarnation": self._incarnation, **group}

    def _carry_out(self, action):
        process = self._process
        match action:
            case OpenConnection(number, server):
                self._drop()
                self._link = Link(process, self._peers[server], "servers")
                self._carry_out(self._rules.connected(number))
            case SendRequest(number, program):
                request = self._request
                if program is not None:
                    request = self._addressed({"op": "program", "digest": program})
                reply = self._link.call(request, max(self._deadline - process.world.now, 0.0))
                reply.then(lambda: self._came(number, request, reply))
            case PauseUntil(number, until):
                self._drop()
                process.after(max(until - process.world.now, 0.0), self._time_passed, number)
            case EndRequest(error, disconnects):
                latest = max(self._deadline, process.paused_until) + LATE_S
                assert process.world.now < latest, (
                    f"a request ends {process.world.now - self._deadline} s too late"
                )
                if disconnects:
                    self._drop()
                if error is not None:
                    self._ended.settle(error=error)

    def _time_passed(self, number):
        self._carry_out(self._rules.time_passed(number, self._process.world.now))

    def _came(self, number, request, reply):
        if self._random.random() < IS_SLOW:
            self._process.after(HAND_OVER_S * self._random.random(), self._take, number, request, reply)
        else:
            self._take(number, request, reply)

    def _take(self, number, request, reply):
        if reply.error is not None:
            self._carry_out(self._rules.broke(number, reply.error, self._process.world.now))
            return
        action = self._rules.answered(number)
        if isinstance(action, EndRequest):
            assert request is self._request, f"{self._request} gets the answer to {request}"
            self._ended.settle(reply.value)
        self._carry_out(action)

    def _drop(self):
        link, self._link = self._link, None
        if link is not None:
            link.close()


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
        taken = {}
        try:
            for number in sorted(requests):
                taken[number] = self.servers[number].turns.begin()
                yield taken[number]
            sent = {
                number: self.servers[number].begin(request, deadline, may_repeat)
                for number, request in requests.items()
            }
            answers, errors = {}, []
            for number, reply in sent.items():
                try:
                    answers[number] = yield reply
                except ReplicaxError as error:
                    errors.append(error)
        except GeneratorExit:  # the caller has gone, and the next requests must not get the answers to these
            for number, turn in taken.items():
                if turn.is_done:
                    self.servers[number].disconnect()
            raise
        finally:
            for number, turn in taken.items():
                self.servers[number].turns.give_up(turn)
        if errors:
            raise errors[0]
        return answers

    def ask_all(self, request):
        """Sends the same request to all servers."""
        return self.ask(dict.fromkeys(range(len(self.servers)), request))

    def close(self):
        for server in self.servers:
            server.close()
