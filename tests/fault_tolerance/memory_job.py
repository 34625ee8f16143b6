"""A job whose processes are threads: real sums on loopback, the real controller, and channels in memory."""

import concurrent.futures
import contextlib
import json
import queue
import threading
import time

from number_steps import Training
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.control.controller import Controller
from replicax._src.control.epoch_member import Offers
from replicax._src.fault_tolerance.survivors import Survivors
from replicax._src.wire.security import Security

LIMIT_S = 60.0
EVER = 2**62
_STATUS = {"position": -1, "program": None, "doing": "starting"}
_KINDS = ("form", "end", "waits", "over", "lost", "given_up")


class Killed(BaseException):
    """The thread is a process that is dead."""


class MemoryChannel:
    """The control channel of one process. Messages are texts on the way, as on connections."""

    def __init__(self, job, number, incarnation=0):
        self.job, self.number, self.incarnation = job, number, incarnation
        self.is_newcomer, self.standing = incarnation > 0, None
        self.rendezvous = Rendezvous("127.0.0.1", Security(b"secret"), shares_memory=job.shares)
        self.errors = []
        self.epoch_messages = queue.SimpleQueue()
        self.on_end = lambda epoch: None
        self.serve = None
        self.is_dead = False
        self.changed = threading.Condition()
        self.offers, self.gathered = Offers(), {}
        self.missing_reports = "the other tasks"

    def check(self):
        if self.is_dead:
            raise Killed

    def tell(self, message):
        self.check()
        text = json.dumps(message)
        with self.job.lock:
            controller = self.job.controller
            outbox = controller.receive(self.number, json.loads(text), time.monotonic(), self.incarnation)
            self.job.send(outbox)

    def report_error(self, text):
        self.errors.append(text)
        self.tell({"kind": "raised", "text": text, "status": _STATUS})

    def deliver(self, message):
        """Takes a message, as the channel's thread does."""
        match message and message["kind"]:
            case "gathered":
                self.gathered[message["key"]] = message
                self.offers.gathered(message["key"])
            case "reminder":
                self.missing_reports = " and ".join(f"worker {number}" for number, _ in message["missing"])
            case kind if kind is None or kind in _KINDS:
                if kind == "form":
                    again = self.offers.form(message["epoch"])
                    if again:
                        threading.Thread(target=self.offer_again, args=(again,), daemon=True).start()
                if kind == "end":
                    self.on_end(message["epoch"])
                self.epoch_messages.put(message)
        with self.changed:
            self.changed.notify_all()

    def offer_again(self, offers):
        for offer in offers:
            try:
                self.tell(offer)
            except Killed:
                return

    def wait_for_message(self, timeout_s):
        until = time.monotonic() + timeout_s
        with self.changed:
            while self.epoch_messages.empty():
                self.check()
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(min(left_s, 0.2))
        return True

    def gather(self, key, value):
        if self.standing.is_solo:
            self.check()
            return [value]
        until, since = time.monotonic() + LIMIT_S, self.standing.version
        self.tell(self.offers.offer({"kind": "offer", "key": key, "value": value, "since": since}))
        while key not in self.gathered:
            self.check()
            assert time.monotonic() < until
            if not self.epoch_messages.empty():
                self.serve()
                continue
            with self.changed:
                if key not in self.gathered and self.epoch_messages.empty():
                    self.changed.wait(0.2)
        return self.gathered[key]["values"]


class Peers:
    def __init__(self, names, number, channel):
        self.names, self.number, self.channel = names, number, channel
        self.taken = None

    def state_for_newcomers(self):
        return {"giver": self.number}

    def take_state(self, state):
        self.taken = state


class Job:
    """Some processes, by number.

    Args:
      kills: For each victim, the name of the point at which it dies, or the number of its point; see ``point``. It dies
        soon after the point "NAME+", or after the point with the negative number: at the third next one at the latest. A
        victim is the number of a process, or a pair: the number, and the number of processes that were this task before.
      replacements: The tasks of which a new process starts when one dies, in this order; see ``run``.
      pause_s: The pause of a victim before it dies, in which the others go on as far as they can.
      awaited: A process and the name of its point. A victim waits for it before it dies.
    """

    def __init__(
        self,
        num_workers,
        kills=(),
        replacements=(),
        *,
        min_workers=1,
        length=1000,
        shares=True,
        pause_s=0.0,
        awaited=None,
    ):
        self.names = [f"worker {number}" for number in range(num_workers)]
        self.controller = Controller(self.names)
        self.lock = threading.RLock()
        self.kills = dict(kills)
        self.replacements = list(replacements)
        self.length = length
        self.shares, self.min_workers = shares, min_workers
        self.channels = [MemoryChannel(self, number) for number in range(num_workers)]
        self.all_channels = list(self.channels)
        self.survivors = [None] * num_workers
        self.futures, self.results, self.program = {}, {}, None
        self.points, self.pause_s, self.awaited = [], pause_s, awaited
        self.dies_at_last = {}  # for each victim that dies soon, the number of the point that it does not survive
        self.pool = concurrent.futures.ThreadPoolExecutor(num_workers + len(self.replacements))
        with self.lock:
            for number in range(num_workers):
                assert self.controller.join(number, time.monotonic(), min_workers) is None

    def send(self, outbox):
        for number, message in outbox:
            if not self.channels[number].is_dead:
                self.channels[number].deliver(json.loads(json.dumps(message)))

    def tick(self):
        with self.lock:
            self.send(self.controller.tick(time.monotonic()))

    def point(self, number, name, incarnation=0):
        """Notes that a process is somewhere. It dies there if its turn has come."""
        who = (number, incarnation) if incarnation else number
        self.channel_of(number, incarnation).check()
        self.points.append((who, name))
        wish = self.kills.get(who)
        count = sum(each == who for each, _ in self.points)
        if wish in (name, count):
            time.sleep(self.pause_s)
            self.wait_for_awaited()
            self.kill(number, incarnation)
            raise Killed
        if wish in (f"{name}+", -count):
            threading.Timer(0.002, self.kill, [number, incarnation]).start()
            self.dies_at_last[who] = count + 3
        if count == self.dies_at_last.get(who):  # however late the thread of the timer has its turn
            self.kill(number, incarnation)
            raise Killed

    def wait_for_awaited(self):
        until = time.monotonic() + LIMIT_S
        while self.awaited is not None and self.awaited not in self.points:
            assert time.monotonic() < until, f"nobody comes to {self.awaited}"
            time.sleep(0.001)

    def channel_of(self, number, incarnation):
        return next(
            each for each in self.all_channels if (each.number, each.incarnation) == (number, incarnation)
        )

    def kill(self, number, incarnation=0):
        """What the others notice of a ``kill -9``: the ends of all its connections."""
        channel = self.channel_of(number, incarnation)
        with self.lock:
            if channel.is_dead:
                return
            channel.is_dead = True
        channel.rendezvous.end(EVER, "killed")
        channel.rendezvous._listener.close()
        with self.lock:
            self.send(self.controller.disconnect(number, time.monotonic(), incarnation))
            if number in self.replacements and self.program is not None:
                self.replacements.remove(number)
                self.start_again(number)
        with channel.changed:
            channel.changed.notify_all()

    def start_again(self, number):
        """Starts a process in the place of a dead one, as the launcher does."""
        if self.controller.join(number, time.monotonic(), self.min_workers) is None:
            self.channels[number] = MemoryChannel(self, number, self.controller.incarnation(number))
            self.all_channels.append(self.channels[number])
            self.start(number)

    def is_awaited(self):
        """True while a replacement is there that has not entered."""
        with self.lock:
            newcomers = [each for each in self.all_channels if each.is_newcomer and not each.is_dead]
        return any(each.standing is None or each.standing.version is None for each in newcomers)

    def start(self, number):
        channel = self.channels[number]
        future = self.pool.submit(self.process, number, self.program, channel)
        self.futures[number, channel.incarnation] = future

    def run(self, program):
        """Runs ``program(number, survivors, training)`` in all, and in replacements of dead ones; gives the results of
        those that did not die, by number.
        """
        with self.lock:
            self.program = program
            for number in range(len(self.names)):
                self.start(number)
        results = {}
        while self.futures:
            with self.lock:
                (number, _), future = self.futures.popitem()
            with contextlib.suppress(Killed):
                results[number] = future.result(2 * LIMIT_S)
        self.close()
        return results

    def process(self, number, program, channel=None):
        channel = channel or self.channels[number]
        peers = Peers(self.names, number, channel)
        rendezvous = PointedRendezvous(self, channel)
        survivors = Survivors(peers, rendezvous, len(self.names), LIMIT_S)
        training = Training(self.length, lambda name: self.point(number, name, channel.incarnation))
        self.survivors[number] = survivors
        try:
            survivors.start()
            return program(number, survivors, training)
        except Killed:
            raise
        except BaseException:
            self.kill(number, channel.incarnation)  # the process ends
            raise

    def close(self):
        for channel in self.all_channels:
            channel.rendezvous.close()
        self.pool.shutdown(wait=False)


class PointedRendezvous:
    """A ``Rendezvous`` with points at which its process may die."""

    def __init__(self, job, channel):
        self.job, self.inner = job, channel.rendezvous
        self.who = channel.number, channel.incarnation
        self.address = self.inner.address

    def point(self, name):
        number, incarnation = self.who
        self.job.point(number, name, incarnation)

    def meet(self, epoch, *arguments):
        self.point(f"meet {epoch}")
        world = self.inner.meet(epoch, *arguments)
        self.point(f"met {epoch}")
        for owner, name in ((world._links, "send"), (world, "give"), (world, "take")):
            setattr(owner, name, self.pointed(name, getattr(owner, name)))
        return world

    def pointed(self, name, act):
        def pointed(place, *arguments):
            self.point(f"{name} {place}")
            return act(place, *arguments)

        return pointed

    def end(self, epoch, reason):
        self.inner.end(epoch, reason)

    def close(self):
        self.inner.close()
