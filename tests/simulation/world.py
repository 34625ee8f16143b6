"""A simulated world: processes on virtual time, and a network between them that delays, reorders, cuts and parts.

A scenario (``runs.py``) gives the *real* machines owners: subclasses of ``Process``, which turn the world's events into
events of a machine, and the machine's actions into messages. All that happens follows from one seed.
"""

import functools
import heapq
import random
from collections import deque
from dataclasses import dataclass

FOREVER_S = 1e6
CONNECT_S = 3.0  # an attempt to connect ends after this time without an answer


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, at a time. A run is repeated from its seed and its faults.

    Attributes:
      at: The virtual time, or the delay after the moment ``on``.
      kind: One of ``World.inject``, or of the scenario.
      targets: The names of processes. Connections are cut and networks parted between two; one way means from the
        first to the second.
      for_s: How long it lasts: pauses and partitions.
      on: A moment of the run that the scenario notes, and which of them: ``"form 3"`` is the third. Random times seldom
        hit what takes a millisecond. Empty: ``at`` is a time.
    """

    at: float
    kind: str
    targets: tuple[str, ...]
    for_s: float = 0.0
    on: str = ""

    def __str__(self):
        lasting = (
            "" if not self.for_s else ", for ever" if self.for_s >= FOREVER_S else f", for {self.for_s:.3f} s"
        )
        since = f" after {self.on}" if self.on else ""
        return f"{self.at:.4f} s{since}: {self.kind} {', '.join(self.targets)}{lasting}"


class Connection:
    """One end of a connection between two processes. Messages arrive in order, and not at all after a cut."""

    def __init__(self, world, owner, peer, label, number=None):
        self.world, self.owner, self.peer, self.label = world, owner, peer, label
        self._number = label if number is None else number
        self.other = None
        self.is_open = True
        self.last_arrival = 0.0

    @functools.cached_property
    def random(self):
        """Random numbers of its own. They are made when they are needed: many connections need none."""
        return random.Random(f"{self.world.seed} {self.owner.name} {self.peer} {self._number}")

    def send(self, message):
        """Sends a message. Does nothing once the connection has ended here."""
        if self.is_open:
            self.world.transmit(self, self.other.owner.receive, self.other, message)

    def close(self):
        """Ends the connection. The other end gets what is on its way, then ``closed``."""
        if self.is_open:
            self.is_open = False
            self.world.transmit(self, self.world.end_of, self.other)

    def __str__(self):
        return f"{self.owner.name} to {self.peer} ({self.label})"


class Process:
    """One process: the owner of machines. Subclasses have the methods ``start``, ``accept``, ``receive``, ``closed``.

    Attributes:
      exit_code: None while it runs; -9 if it was killed.
    """

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.exit_code = None
        self.is_reachable = True  # False: its host is lost, and nobody hears of its end
        self.connections = []
        self.paused_until = 0.0
        self._held = deque()

    def start(self):
        """Begins to run."""

    def accept(self, connection):
        """Another process has connected; ``connection.label`` is what it is for."""

    def receive(self, connection, message):
        """A message has arrived."""

    def closed(self, connection):
        """A connection has ended, or could not be made."""

    def connect(self, name, label):
        """Returns a connection to another process. Messages may be sent at once."""
        return self.world.connect(self, name, label)

    def after(self, delay_s, function, *arguments):
        """Calls a function later, if the process lives then."""
        self.world.at(self.world.now + delay_s, self.world.deliver, self, function, *arguments)

    def end(self, code):
        """Ends the process."""
        if self.exit_code is None:
            self.exit_code = code
            self.world.num_ended += 1
            self.world.trace(f"{self.name} ends with {code}")
            for connection in self.connections:
                connection.close()

    @property
    def is_alive(self):
        return self.exit_code is None


class World:
    """Virtual time, the processes, and the network.

    Args:
      seed: A number; all randomness comes from it.
      delay_s: The median delay of a message.
      slow: The share of messages that take up to a hundred times as long.
      is_even: True if each message takes exactly ``delay_s``.
      backoff: After a partition a connection that was in use is used again at most so much later, as a share of the
        partition's time, because its messages are sent again with longer and longer pauses.
      is_traced: True to keep what happens in ``log``.
    """

    def __init__(self, seed, *, delay_s=0.001, slow=0.02, is_even=False, backoff=0.0, is_traced=False):
        self.seed, self.now = seed, 0.0
        self.delay_s, self.slow, self.is_even, self.backoff = delay_s, slow, is_even, backoff
        self.processes = {}
        self.log = [] if is_traced else None
        self.num_events = self.num_messages = self.num_ended = 0
        self._events = []
        self._num_scheduled = 0
        self._blocked = {}  # (from, to): the number of partitions
        self._held = {}  # (from, to): what was sent meanwhile
        self._labels = {}
        self.last_fault = 0.0  # the time at which the last fault has ended
        self._waiting = {}  # moment: faults
        self._moments = {}  # name: number

    # --- time ---------------------------------------------------------------------------------------

    def at(self, time, function, *arguments):
        """Calls a function at a time."""
        self._num_scheduled += 1
        heapq.heappush(self._events, (time, self._num_scheduled, function, arguments))

    def run(self, limit_s, is_over):
        """Runs until ``is_over()``, asked when a process has ended, or for a time after the last fault. Returns True if
        it was over.
        """
        num_ended = 0
        while self._events and self._events[0][0] <= self.last_fault + limit_s:
            self.now, _, function, arguments = heapq.heappop(self._events)
            self.num_events += 1
            function(*arguments)
            if self.num_ended != num_ended:
                num_ended = self.num_ended
                if is_over():
                    return True
        return is_over()

    def trace(self, text):
        """Notes what happens, for people."""
        if self.log is not None:
            self.log.append(f"{self.now:10.4f} {text}")

    def deliver(self, process, function, *arguments):
        """Calls a function of a process, unless it has ended; later if it is paused."""
        if process.exit_code is not None:
            return
        if process.paused_until > self.now:
            process._held.append((function, arguments))
            return
        function(*arguments)

    # --- processes ----------------------------------------------------------------------------------

    def start(self, process):
        """Starts a process, which may take the place of one that has ended."""
        self.processes[process.name] = process
        self.trace(f"{process.name} starts")
        self.at(self.now, self.deliver, process, process.start)

    def _resume(self, process):
        while process._held and process.is_alive and process.paused_until <= self.now:
            function, arguments = process._held.popleft()
            function(*arguments)

    # --- network ------------------------------------------------------------------------------------

    def connect(self, owner, name, label):
        self._labels[owner.name, name] = number = self._labels.get((owner.name, name), 0) + 1
        here = Connection(self, owner, name, label, number)
        peer = self.processes.get(name)
        owner.connections = [each for each in owner.connections if each.is_open]
        if peer is None or not peer.is_reachable or self._is_blocked(owner.name, name):
            here.is_open = False
            self.at(self.now + CONNECT_S, self.deliver, owner, owner.closed, here)
        elif not peer.is_alive:
            here.is_open = False
            self.at(self.now + self._delay(here), self.deliver, owner, owner.closed, here)
        else:
            there = Connection(self, peer, owner.name, label)
            here.other, there.other = there, here
            owner.connections.append(here)
            peer.connections.append(there)
            self.transmit(here, peer.accept, there)
        return here

    def transmit(self, connection, function, *arguments):
        """Sends something from this end to the other."""
        self.num_messages += 1
        way = (connection.owner.name, connection.peer)
        if self._is_blocked(*way):
            self._held.setdefault(way, []).append((connection, function, arguments))
            return
        arrival = max(self.now + self._delay(connection), connection.last_arrival)
        connection.last_arrival = arrival
        self.at(arrival, self._arrive, connection.other, function, arguments)

    def _arrive(self, end, function, arguments):
        if end.is_open:
            self.deliver(end.owner, self._hand_over, end, function, arguments)

    def _hand_over(self, end, function, arguments):
        if end.is_open:  # it may have been closed while its process was paused
            function(*arguments)

    def end_of(self, end):
        """Ends a connection at one end, because the other end has ended it."""
        if end.is_open:
            end.is_open = False
            end.owner.closed(end)

    def _delay(self, connection):
        if self.is_even:
            return self.delay_s
        of_link = connection.random
        delay = self.delay_s * (0.5 + of_link.expovariate(2.0))
        return delay * 100 * of_link.random() if of_link.random() < self.slow else delay

    def _is_blocked(self, sender, receiver):
        return bool(self._blocked) and self._blocked.get((sender, receiver), 0) > 0

    # --- faults -------------------------------------------------------------------------------------

    def plan(self, fault, inject):
        """Calls ``inject(self, fault)`` at the fault's time."""
        if fault.on:
            self._waiting.setdefault(fault.on, []).append((fault, inject))
        else:
            self.at(fault.at, inject, self, fault)

    def moment(self, name):
        """Notes a moment of the run: ``form``. Faults may follow it."""
        number = self._moments[name] = self._moments.get(name, 0) + 1
        for fault, inject in self._waiting.pop(f"{name} {number}", ()):
            self.at(self.now + fault.at, inject, self, fault)

    def inject(self, fault):
        """Lets a fault happen: ``kill``, ``lose host``, ``pause``, ``cut``, ``part``, ``part one way``."""
        self.trace(f"FAULT {fault}")
        self.last_fault = max(self.last_fault, self.now + (fault.for_s if fault.for_s < FOREVER_S else 0.0))
        targets = [self.processes.get(name) for name in fault.targets]
        match fault.kind:
            case "kill" | "lose host" if targets[0] is not None and targets[0].is_alive:
                self._kill(targets[0], is_heard=fault.kind == "kill")
            case "pause" if targets[0] is not None:
                targets[0].paused_until = max(targets[0].paused_until, self.now + fault.for_s)
                self.at(targets[0].paused_until, self._resume, targets[0])
            case "cut" if None not in targets:
                for connection in list(targets[0].connections):
                    if connection.is_open and connection.peer == fault.targets[1]:
                        self.cut(connection)
            case "part":
                self._part(fault.targets, fault.for_s)
                self._part(fault.targets[::-1], fault.for_s)
            case "part one way":
                self._part(fault.targets, fault.for_s)

    def cut(self, connection):
        """Breaks a connection. What is on its way is lost, and the ends hear of it one after the other."""
        for end in (connection, connection.other):
            if end.is_open:
                end.is_open = False
                self.at(self.now + self._delay(end), self.deliver, end.owner, end.owner.closed, end)

    def _kill(self, process, *, is_heard):
        process.exit_code = -9
        self.num_ended += 1
        process.is_reachable = is_heard
        if is_heard:
            for connection in process.connections:
                if connection.random.random() < 0.5:
                    connection.close()  # the system sends what is in its buffers
                else:
                    self.cut(connection)
        else:
            for connection in process.connections:
                connection.is_open = False

    def _part(self, way, for_s):
        way = tuple(way)
        self._blocked[way] = self._blocked.get(way, 0) + 1
        self.at(self.now + for_s, self._join, way, for_s)

    def _join(self, way, for_s):
        self._blocked[way] -= 1
        if not self._blocked[way]:
            for connection, function, arguments in self._held.pop(way, []):
                if self.backoff and connection.last_arrival < self.now:
                    connection.last_arrival = self.now + self.backoff * for_s * connection.random.random()
                    self.last_fault = max(self.last_fault, connection.last_arrival)
                self.transmit(connection, function, *arguments)
