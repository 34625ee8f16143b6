"""``TaskProcess``: a process that answers requests, in order on each connection, and sends requests to others."""

import inspect
from collections import deque

from ps_simulation.routines import Reply, Routine
from replicax._ps.errors import error_from_answer
from replicax._src.vocabulary.errors import ReplicaxError, UnavailableError
from simulation.world import Process

MOST_IDLE = 4


class Link:
    """A connection to a task, for requests and their answers in order. It does not reconnect."""

    def __init__(self, owner, peer, label="requests"):
        self.owner, self.peer = owner, peer
        self._awaited = deque()
        self.why_closed = None
        self.on_close = lambda: None
        self._connection = owner.connect(peer, label)
        owner.links[self._connection] = self

    @property
    def is_closed(self):
        return self.why_closed is not None

    def send(self, request):
        """Sends a request. Returns the reply."""
        reply = Reply()
        if self.is_closed:
            reply.settle(error=self.why_closed)
        else:
            self._awaited.append(reply)
            self._connection.send(("request", request))
        return reply

    def call(self, request, timeout_s):
        """Sends a request whose answer must come in time; otherwise the connection is closed."""
        reply = self.send(request)
        self.limit(reply, timeout_s)
        return reply

    def limit(self, reply, timeout_s):
        """Closes the connection unless a reply comes in time."""
        if not reply.is_done:
            self.owner.after(timeout_s, self._late, reply, timeout_s)

    def close(self, error=None):
        """Ends the connection. All replies that have not come are errors."""
        if not self.is_closed:
            self.why_closed = error or UnavailableError(
                f"The connection to {self.peer} was closed.", self.peer
            )
            self._connection.close()
            self.owner.links.pop(self._connection, None)
            self.on_close()
            awaited, self._awaited = self._awaited, deque()
            for reply in awaited:
                reply.settle(error=self.why_closed)

    def answered(self, answer, error):
        """Takes the answer to the oldest request."""
        if self._awaited:
            self._awaited.popleft().settle(answer, error)

    def _late(self, reply, timeout_s):
        if not reply.is_done:
            text = f"{self.peer} did not answer within {timeout_s:g} s."
            self.close(UnavailableError(text, self.peer, is_silent=True))


class TaskProcess(Process):
    """A task or the coordinator.

    Attributes:
      links: Its connections to others.
    """

    def __init__(self, world, name):
        super().__init__(world, name)
        self.links = {}
        self._incoming = {}  # connection: its unanswered requests
        self._idle = {}  # peer: links for ``ask``

    def answer(self, request, connection):
        """Returns the answer to a request, a reply, or a generator that returns it. Raises an error to answer with."""
        raise NotImplementedError

    def run(self, generator):
        """Starts a routine. Returns its result as a reply."""
        return Routine(self, generator).result

    def ask(self, peer, request, timeout_s):
        """Sends a request on a connection that no other request uses. Returns the reply."""
        idle = self._idle.setdefault(peer, [])
        while idle and idle[-1].is_closed:
            idle.pop()
        link = idle.pop() if idle else Link(self, peer)
        reply = link.call(request, timeout_s)
        reply.then(lambda: None if link.is_closed or len(idle) >= MOST_IDLE else idle.append(link))
        return reply

    # --- the world's events -------------------------------------------------------------------------

    def receive(self, connection, message):
        kind, *fields = message
        if kind == "answer":
            if connection in self.links:
                self.links[connection].answered(*fields)
            return
        queue = self._incoming.setdefault(connection, deque())
        queue.append(fields[0])
        if len(queue) == 1:
            self.run(self._serve(connection, queue))

    def closed(self, connection):
        self._incoming.pop(connection, None)
        link = self.links.get(connection)
        if link is not None:
            link.close(UnavailableError(f"{link.peer} has ended the connection.", link.peer))

    def _serve(self, connection, queue):
        while queue and self._incoming.get(connection) is queue:
            answer, error = None, None
            try:
                answer = self.answer(queue[0], connection)
                if isinstance(answer, Reply):
                    answer = yield answer
                elif inspect.isgenerator(answer):
                    answer = yield self.run(answer)
            except ReplicaxError as failure:
                error = failure
            queue.popleft()
            if self.is_alive and connection.is_open:
                connection.send(("answer", answer, None if error is None else travelled(error, self.name)))


def travelled(error, task):
    """Returns an error as the client of a task gets it."""
    details = {name: getattr(error, name) for name in ("digest", "task") if getattr(error, name, "")}
    return error_from_answer(
        {"type": type(error).__name__, "text": str(error) or repr(error), "details": details}, task
    )
