"""Training that survives failures: the real machines of both sides of the epochs and of the control channel.

Real are ``Controller`` (with ``EpochAgreement`` and ``SaveRounds``), ``EpochMember``, ``Arrivals``, ``Offers``,
``DatedKeys``, ``SavePoints`` and the check of messages. The rows, the sums and the state are numbers: the state is a
chain of hashes of all replicas' rows, so a wrong or a missing row changes
it for good.
"""

import contextlib
import json
import random

from replicax._src.cluster.control_messages import checked
from replicax._src.cluster.save_points import AtPoint, SavePoints
from replicax._src.control.arrivals import Arrivals
from replicax._src.control.controller import Controller
from replicax._src.control.dated_keys import DatedKeys
from replicax._src.control.dates import first_at
from replicax._src.control.epoch_member import (
    Await,
    Begin,
    Data,
    EpochMember,
    Give,
    Offers,
    Send,
    Stop,
)
from replicax._src.control.epochs import NUM_BLAMED, replicas_of
from replicax._src.control.standing import Moment
from simulation.world import FOREVER_S, Fault, Process

CONTROLLER = "controller"
SILENCE_S = 5.0
EXCHANGE_S = 8.0  # longer, so that the controller notices a silent host first
TICK_S = 1.0
RETRY_S = 0.2
START_S = 30.0


def worker(number):
    return f"worker {number}"


def rows_of(state, replica, sums):
    """What a replica adds to a round of a step, after the sums of the rounds before."""
    return hash((state, replica, *sums))


def updated(state, sums):
    """The state after a step; ``sums`` has one item for each round, with the rows of each replica, in their order."""
    return hash((state, *sums))


class Ended(Exception):
    """The program of a worker ends with this code."""

    def __init__(self, code, why=""):
        super().__init__(code, why)
        self.code, self.why = code, why


class ControllerProcess(Process):
    """Owns the controller: one event at a time, as the server's lock has it."""

    def __init__(self, scenario, world):
        super().__init__(world, CONTROLLER)
        self.scenario = scenario
        names = [worker(number) for number in range(scenario.num_workers)]
        limits = {"stall_s": scenario.timeout_s / 10, "timeout_s": scenario.timeout_s}
        self.controller = Controller(names, silence_s=SILENCE_S, **limits)
        self.members = {}  # number: connection
        self.incarnations = {}  # connection: number, incarnation
        self.offered = {}  # key: the epoch in which each member has offered last
        self.dates = {}  # key: its date
        self.completed = {}  # key: those that completed it

    def start(self):
        self.after(TICK_S, self.tick)

    def tick(self):
        self.send(self.controller.tick(self.world.now))
        self.after(TICK_S, self.tick)
        if self.controller.is_over and not self.members:
            self.end(0)

    def receive(self, connection, message):
        message = self.scenario.read(message)
        if message["kind"] == "hello":
            self.let_in(connection, message)
            return
        number, incarnation = self.incarnations[connection]
        if message["kind"] == "offer":
            self.offered.setdefault(message["key"], {})[number] = message["epoch"]
            assert self.dates.setdefault(message["key"], message["since"]) == message["since"]
        outbox = self.controller.receive(number, message, self.world.now, incarnation)
        if self.members.get(number) is not connection:
            assert not outbox, "a process that was given up is heard"
        elif message["kind"] == "report":
            self.scenario.reported[number] = message["version"]
        self.send(outbox)

    def let_in(self, connection, hello):
        number = hello["member"]
        refusal = self.controller.join(number, self.world.now, hello["min_workers"])
        if refusal is not None:
            assert refusal.is_temporary or not self.controller.epoch, refusal.text
            refused = {"kind": "refused", "text": refusal.text, "is_temporary": refusal.is_temporary}
            connection.send(self.scenario.written(refused))
            return
        self.members[number] = connection
        self.incarnations[connection] = number, self.controller.incarnation(number)
        self.write(number, {"kind": "welcome", "epoch": self.controller.epoch})

    def closed(self, connection):
        if connection in self.incarnations:
            number, incarnation = self.incarnations.pop(connection)
            outbox = self.controller.disconnect(number, self.world.now, incarnation)
            if self.members.get(number) is connection:
                del self.members[number]
            else:
                assert not outbox, "the end of a process that was given up is another's"
            self.send(outbox)

    def send(self, outbox):
        for number, message in outbox:
            if message["kind"] == "form":
                self.scenario.note_form(self.world, message)
            elif message["kind"] == "lost":
                self.scenario.check_lost(self.world, message)
            elif message["kind"] == "gathered":
                epochs = {self.offered[message["key"]][member] for member in message["members"]}
                assert epochs == {self.controller.epoch}, f"{message['key']} mixes the offers of epochs"
                self.check_members(message["key"], message["members"])
            elif message["kind"] == "given_up" and not self.controller.is_silent(number):
                self.scenario.check_given_up(number)
            self.write(number, message)
            if message["kind"] == "given_up":
                self.members.pop(number, None)  # it may wake, and send something, when another has its place

    def check_members(self, key, members):
        """An all-gather completes once, over all members that take part since its date."""
        assert self.completed.setdefault(key, members) == members, f"{key} completes over different members"
        if self.scenario.forms:
            last = self.scenario.forms[max(self.scenario.forms)]
            takers = [n for n in last["members"] if self.scenario.since.get(n, 0) <= self.dates[key]]
            assert members == takers, (
                f"{key} of date {self.dates[key]} completes over {members}, not {takers}"
            )

    def write(self, number, message):
        if message["kind"] not in ("pulse", "reminder"):
            self.world.trace(f"    controller to {number}: {message}")
        if number in self.members:
            self.members[number].send(self.scenario.written(message))


class WorkerProcess(Process):
    """One worker. ``receive`` and ``closed`` are the threads that read; ``program`` is the training thread, which owns
    the member's machine and takes what the readers queued wherever it waits.
    """

    def __init__(self, scenario, world, number):
        super().__init__(world, worker(number))
        self.scenario, self.number = scenario, number
        self.member = EpochMember(number)
        self.offers = Offers()
        self.points = SavePoints()
        self.is_watching = False
        self.keys = DatedKeys(is_dated=True)
        self.topic = None  # of the pass over the data
        self.save = None  # the key and the value of the save that is under way
        self.is_at_boundary = False
        self.position, self.program_name, self.is_in_program = -1, None, False
        self.reads, self.reading = 0, None
        self.control = None
        self.welcome = None
        self.heard_at = 0.0
        self.why = ""  # it ended
        self.known_at = None  # the version, and the number of faults, when the chief heard that it waits
        # The training thread's.
        self.state = None
        self.last_sums = ()
        self.gathered = {}
        self.completed = set()  # all-gathers; the reader's
        self.reported = set()
        # The world of its epoch.
        self.arrivals = Arrivals()
        self.peers = {}
        self.unread = {}  # the messages of connections that have arrived, and that nobody has taken
        self.sent = []
        self.received = {}
        # The program, and what the readers queued for it.
        self.queue = []
        self.is_busy = False
        self.program_ = self.program()

    def __str__(self):
        return f"{self.name} at version {self.member.version} in epoch {self.member.epoch}"

    # --- the threads that read ----------------------------------------------------------------------

    def start(self):
        self.join()
        self.resume(None)
        self.after(START_S, self.post, "start", self.scenario.has_begun)

    def join(self):
        self.control = self.connect(CONTROLLER, "control")
        hello = {"kind": "hello", "member": self.number, "min_workers": self.scenario.min_workers}
        self.control.send(self.scenario.written(hello))

    def accept(self, connection):
        for each in self.arrivals.arrive(*connection.label, connection):
            each.close()
        self.post("peer")

    def receive(self, connection, message):
        if connection is not self.control:
            self.post("data", connection, message)
            return
        message = self.scenario.read(message)
        self.heard_at = self.world.now
        match message["kind"]:
            case "welcome":
                self.welcome = message
                self.post("welcome")
                self.heartbeat()
            case "refused":
                self.control.close()
                if message["is_temporary"]:
                    self.after(RETRY_S, self.join)
                else:
                    self.post("cut off")
            case "pause" | "stop" | "resume":
                date = self.moment.date
                answer = (
                    self.points.receive(message, date) if self.is_watching else None
                )  # nobody listens before
                if answer is not None:
                    self.tell(answer)
                self.post("save")
            case "preempted" | "pulse" | "reminder" | "stalled":
                pass
            case "mismatch" | "timeout":
                raise AssertionError(f"{self} is told of a {message}")
            case kind:
                if kind == "end":
                    for each in self.arrivals.end(message["epoch"]):
                        each.close()
                    self.cancel(message["epoch"])
                elif kind == "form":
                    for offer in self.offers.form(message["epoch"]):
                        assert offer["key"] not in self.completed, f"{offer['key']} is offered again"
                        self.tell(offer)
                elif kind == "gathered":
                    self.offers.gathered(message["key"])
                    self.completed.add(message["key"])
                self.post("control", message)

    def closed(self, connection):
        if connection is not self.control:
            self.post("ended", connection)
        elif self.welcome is None and self.scenario.may_join(self.world):
            self.after(RETRY_S, self.join)
        else:
            self.post("cut off")

    def heartbeat(self):
        if self.world.now - self.heard_at > SILENCE_S:
            self.control.close()
            self.post("cut off")
            return
        self.heartbeat_now()
        self.after(TICK_S, self.heartbeat)

    @property
    def moment(self):
        is_newcomer = self.welcome is not None and self.welcome["epoch"] > 0
        return Moment(self.member.version or 0, is_newcomer and self.member.is_solo)

    @property
    def next_position(self):
        return max(self.position + 1, first_at(self.moment.date))

    @property
    def num_reads(self):
        return max(self.reads, first_at(self.moment.date))

    @property
    def status(self):
        doing = "in" if self.is_in_program else "between"
        status = {"position": self.position, "program": self.program_name, "doing": doing}
        is_solo = {"is_solo": True} if self.moment.is_solo else {}
        return {**status, **is_solo, "reading": self.reading, "reads": self.num_reads}

    def tell(self, message):
        if message["kind"] != "heartbeat":
            self.world.trace(f"    {self.number} to controller: {message}")
        self.control.send(self.scenario.written(message))

    def signal(self, is_final):
        self.tell({"kind": "signal", "is_final": is_final, "text": "SIGTERM"})

    def cancel(self, epoch):
        for connection in self.connections:
            if connection is not self.control and connection.label[0] == epoch:
                connection.close()

    # --- between the threads ------------------------------------------------------------------------

    def post(self, *event):
        self.queue.append(event)
        self.resume_if_idle()

    def resume_if_idle(self):
        while self.queue and not self.is_busy and self.is_alive:
            self.resume(self.queue.pop(0))

    def resume(self, event):
        try:
            busy_s = self.program_.send(event)
        except Ended as ended:
            self.why = ended.why
            self.end(ended.code)
            return
        if busy_s is not None:
            self.is_busy = True
            self.after(busy_s, self.done)

    def done(self):
        self.is_busy = False
        self.resume(None)
        self.resume_if_idle()

    # --- the training thread: yields seconds to compute, or None to wait for an event -----------------

    def program(self):
        scenario = self.scenario
        yield from self.until(lambda: self.welcome is not None)
        is_newcomer = self.welcome["epoch"] > 0
        if is_newcomer:
            yield from self.prologue()
        else:
            self.state = 0
        self.do(self.member.enter(None if is_newcomer else scenario.first_version(self.number)))
        yield from self.until(lambda: self.member.may_step)
        if is_newcomer:
            self.world.moment("prologue")
            yield from self.prologue()
        self.is_watching = True
        self.tell({"kind": "watching"})
        yield from self.between(is_after_boundary=is_newcomer)
        while self.member.version < scenario.num_steps:
            yield from self.step(self.member.version + 1)
            if self.member.version < scenario.num_steps:
                yield from self.between()
        yield from self.saved()
        self.do(self.member.finish())
        yield from self.until(lambda: False)

    def prologue(self):
        """What the program of a newcomer does before and after it enters: exchanges and programs of its own."""
        for _ in range(self.scenario.prologue.choice([0, 1, 2])):
            yield from self.gather("its own")
            with self.running("a program of its own"):
                yield self.scenario.prologue_s()

    @contextlib.contextmanager
    def running(self, name):
        is_new, self.program_name = name != self.program_name, name
        self.position, self.is_in_program = self.next_position, True
        if is_new:
            self.heartbeat_now()
        yield
        self.is_in_program = False

    def until(self, is_true):
        """Waits, and takes what the readers queue."""
        while not is_true():
            self.handle(*(yield None))

    def take_queued(self):
        while self.queue:
            self.handle(*self.queue.pop(0))

    def between(self, *, is_after_boundary=False):
        """What is done between two steps, by all: exchanges, saves. A newcomer begins behind the boundary."""
        self.take_queued()
        version = self.member.version
        if not is_after_boundary:
            if version % self.scenario.gather_every == 0:
                yield from self.gather("checkpoint")
            if version % self.scenario.save_every == 0 and not self.moment.is_solo:
                yield from self.boundary(version)
        if self.topic is None or version % self.scenario.pass_every == 0:
            self.topic = self.keys.new_topic("data", self.moment)
        yield from self.read()
        while (at := self.points.begin(version)) is not AtPoint.RUN:
            self.world.moment("saves")
            if at is AtPoint.WAIT:
                self.handle(*(yield None))
                continue
            is_final = self.points.is_final
            yield from self.gather("preemption")
            self.tell(self.points.save())
            if is_final:
                raise Ended(42)

    def read(self):
        """Takes the next batch. Another thread may agree on it, while this one waits."""
        if not self.scenario.reads_ahead:
            yield from self.gather(self.topic)
            return
        name = "" if self.topic.moment.is_solo else self.topic.name
        self.reading = (self.next_position - 1, self.num_reads, name)
        self.heartbeat_now()
        yield from self.gather(self.topic, is_ordered=False)
        self.reads, self.reading = self.num_reads + 1, None

    def heartbeat_now(self):
        self.tell({"kind": "heartbeat", "status": self.status})

    def boundary(self, version):
        """Begins a save, which is written while the steps go on. Then newcomers may enter."""
        self.world.moment("boundary")
        yield from self.saved()
        key = f"save {version}"
        self.save = key, [version, self.state]
        offer = {"kind": "offer", "key": key, "value": self.save[1], "since": self.moment.date}
        self.tell(self.offers.offer(offer))
        if self.member.waiting and self.member.is_chief:
            yield from self.saved()
            self.world.moment("opens")
            entered = set(self.member.waiting) & set(self.member.members)
            assert not entered or not self.member.may_step, f"opens for {entered}, who have entered"
            self.is_at_boundary = True
            self.do(self.member.open())
            yield from self.until(lambda: self.member.may_step)
            self.is_at_boundary = False

    def saved(self):
        """Waits until the last save is written."""
        if self.save is not None:
            (key, value), self.save = self.save, None
            yield from self.until(lambda: key in self.gathered)
            self.scenario.check_gathered(key, self.gathered.pop(key), value)

    def gather(self, topic, *, is_ordered=True):
        moment = self.moment if isinstance(topic, str) else topic.moment
        if moment.is_solo:
            return
        key = self.keys.next(topic, moment)
        order = {"position": self.next_position, "purpose": {"what": key}, "status": self.status}
        value = [self.member.version, self.state]
        offer = {
            "kind": "offer",
            "key": key,
            "value": value,
            "since": moment.date,
            **(order if is_ordered else {}),
        }
        self.tell(self.offers.offer(offer))
        yield from self.until(lambda: key in self.gathered)
        self.scenario.check_gathered(key, self.gathered.pop(key), value)

    def step(self, target):
        """Runs the rounds of a step until it is committed, by this worker or with the sums of another."""
        with self.running("1 step"):
            yield from self.attempts(target)

    def attempts(self, target):
        while True:
            yield from self.until(lambda: self.member.may_step)
            if self.member.version == target:
                return
            epoch = self.member.epoch
            self.scenario.note_step(self)

            def has_ended(epoch=epoch):
                return self.member.epoch != epoch or not self.member.may_step

            sums = []
            for number in range(self.scenario.num_rounds):
                rows = {}
                for replica in replicas_of(self.scenario.num_workers, self.member.members)[self.number]:
                    yield self.scenario.compute_s(self.number)
                    rows[replica] = rows_of(self.state, replica, sums)
                self.exchange(target, number, rows)
                everyone = self.received.setdefault((target, number), {})
                yield from self.until(lambda: len(everyone) == self.scenario.num_workers or has_ended())  # noqa: B023
                if has_ended():
                    break
                sums.append(tuple(everyone[replica] for replica in range(self.scenario.num_workers)))
            else:
                yield self.scenario.compute_s(self.number)
                self.member.commit()
                self.commit(sums)
                self.scenario.note_standing(self)
                self.received = {key: rows for key, rows in self.received.items() if key[0] > target}
                return

    def commit(self, sums):
        """Notes that the update of a step has run."""
        self.state, self.last_sums = updated(self.state, sums), tuple(sums)
        self.scenario.note_commit(self)

    # --- its world ----------------------------------------------------------------------------------

    def exchange(self, target, number, rows):
        self.received.setdefault((target, number), {}).update(rows)
        self.say(None, ("rows", target, number, rows))
        self.after(self.scenario.exchange_s, self.check_arrived, self.member.epoch, target, number)

    def check_arrived(self, epoch, target, number):
        rows = self.received.get((target, number))
        if rows is not None and self.member.version < target:
            replicas = replicas_of(self.scenario.num_workers, self.member.members)
            late = [n for n, computed in replicas.items() if not rows.keys() >= set(computed)]
            if late:
                self.post("late", epoch, late[0])

    def check_caught_up(self, awaited):
        if self.member.awaited_data is awaited:
            self.post("late", self.member.epoch, awaited.source)

    def say(self, receiver, message):
        self.sent.append((receiver, message))
        for peer, connection in self.peers.items():
            if receiver in (None, peer):
                connection.send(message)

    def begin(self, begin):
        self.scenario.note_begin(self, begin)
        for connection in self.peers.values():
            connection.close()
        self.peers, self.sent, self.received = {}, [], {}
        for connection in self.arrivals.end(begin.epoch - 1):
            connection.close()
        if self.arrivals.has_ended(begin.epoch):
            return  # its end is queued
        for peer in begin.members:
            if peer > self.number:
                self.meet(peer, self.connect(worker(peer), (begin.epoch, self.number)))
        self.meet_arrived()

    def meet_arrived(self):
        """Takes the connections of peers that have arrived for the epoch that this worker is in."""
        for peer, connection in self.arrivals.take(self.member.epoch, self.member.members).items():
            messages = self.unread.pop(connection, [])
            if connection.is_open:
                self.meet(peer, connection)
            for message in messages:
                self.hear(connection, message)

    def meet(self, peer, connection):
        self.peers[peer] = connection
        for receiver, message in self.sent:
            if receiver in (None, peer):
                connection.send(message)

    def hear(self, connection, message):
        """Takes data of a peer."""
        if self.arrivals.has_ended(connection.label[0]):
            return
        if connection not in self.peers.values():
            self.unread.setdefault(connection, []).append(message)
            return
        assert connection.label[0] == self.member.epoch, "data of another epoch"
        kind, version, *rest = message
        if kind == "rows":
            number, rows = rest
            self.received.setdefault((version, number), {}).update(rows)
        elif self.member.awaited_data is not None and version == self.member.awaited_data.version:
            (data,) = rest
            self.catch_up(self.member.awaited_data, data)

    def catch_up(self, awaited, data):
        if awaited.data is Data.STATE:
            self.state, self.last_sums = data
        actions = self.member.catch_up()
        if awaited.data is Data.SUMS:
            self.commit(data)
        else:
            self.scenario.note_commit(self)
        self.scenario.note_standing(self)
        self.do(actions)

    # --- events and actions -------------------------------------------------------------------------

    def handle(self, kind, *event):
        match kind:
            case "control":
                (message,) = event
                if message["kind"] == "gathered":
                    self.gathered[message["key"]] = message
                else:
                    if message["kind"] == "waits":
                        self.world.moment("waits")
                    self.do(self.member.receive(message))
                    if self.member.is_chief:
                        self.scenario.note_waiting(self.world, self.member)
            case "peer":
                self.meet_arrived()
            case "data":
                self.hear(*event)
            case "ended" if event[0] in self.peers.values():
                is_refused = event[0].other is None
                peer = next(n for n, connection in self.peers.items() if connection is event[0])
                self.do(self.member.fail(peer if is_refused else None))
            case "late" if event[0] == self.member.epoch:
                self.do(self.member.fail(event[1]))
            case "start" if self.welcome is None or (self.member.epoch == 0 and not event[0]):
                raise Ended(1, "start")  # the controller does not answer, or another task has not come
            case "cut off":
                self.do(self.member.disconnect())

    def do(self, actions):
        for action in actions:
            self.world.trace(f"  {self.number}: {action}")
            match action:
                case Send(message):
                    if message["kind"] == "report":
                        assert message["epoch"] not in self.reported, "two reports of an epoch"
                        self.reported.add(message["epoch"])
                        message = {**message, "digest": None if self.state is None else str(self.state)}
                        is_newcomer = message["epoch"] == 0 and message["version"] is None
                        if is_newcomer and self.scenario.do_newcomers_claim:
                            message["version"] = 0  # it made a state of its own
                    self.world.moment(message["kind"])
                    self.tell(message)
                case Begin():
                    self.begin(action)
                case Give(receiver, data, version):
                    assert self.scenario.forms[self.member.epoch]["source"] == self.number
                    if data is Data.STATE:
                        self.world.moment("gives")
                        assert self.is_at_boundary, f"{self} gives the state where no newcomer may begin"
                        assert self.member.is_chief, f"{self} gives the state, and is not the chief"
                    given = self.last_sums if data is Data.SUMS else (self.state, self.last_sums)
                    self.say(receiver, ("gift", version, given))
                case Await():
                    self.after(self.scenario.exchange_s, self.check_caught_up, action)
                case Stop(reason, message):
                    code = 0 if reason == "over" else 1
                    raise Ended(code, message.get("reason", reason))


class Survivors:
    """2 to 5 workers that train a few steps, with deaths, cuts, partitions, pauses, replacements and a preemption."""

    limit_s = 240.0
    exchange_s = EXCHANGE_S
    timeout_s = 600.0

    def __init__(self, seed):
        self.random = of_seed = random.Random(f"survivors {seed}")
        self.num_workers = of_seed.choice([2, 2, 3, 3, 4, 5])
        self.num_steps = of_seed.choice([1, 2, 4, 12, 24])
        self.num_rounds = of_seed.choice([1, 1, 2, 3])
        self.min_workers = of_seed.choice([1, 1, 1, 2])
        self.gather_every = of_seed.choice([1, 2, 3])
        self.step_s = of_seed.choice([0.0005, 0.003, 0.02])
        self.network = {"slow": of_seed.choice([0.0, 0.02, 0.02, 0.2])}
        self.do_newcomers_claim = of_seed.random() < 0.5
        self.is_checked = (
            seed % 10 == 0
        )  # messages as bytes, as they are sent: it costs as much as all the rest
        self.has_lost_messages = False
        self.num_faults = 0
        self.reported = {}  # the version that each task has reported last
        self.computing = random.Random(f"computing {seed}")
        self.forms = {}
        self.since = {}  # the date since which each member takes part that was a newcomer
        self.standings = {}  # epoch, version: the participants
        self.references = {}  # epoch, version: what a member knows of the first step of a newcomer
        self.save_every = of_seed.choice([1, 1, 2, 3])
        self.pass_every = of_seed.choice([2, 3, 5])
        self.reads_ahead = of_seed.random() < 0.5
        self.prologue = random.Random(f"prologue {seed}")
        self.states = {0: 0}
        self.exchanges = {}
        self.workers = []

    # --- the run ------------------------------------------------------------------------------------

    def faults(self):
        """Draws the faults. Most of them come right after another one or a moment of the protocol, to hit a recovery."""
        of_seed = self.random
        horizon = self.num_steps * self.num_rounds * (2 * self.step_s + 0.004)
        faults = []
        for _ in range(of_seed.choice([0, 1, 2, 4, 6, 8, 12, 16])):
            one, other = of_seed.sample(range(self.num_workers), 2)
            pair = (worker(one), worker(other) if of_seed.random() < 0.8 else CONTROLLER)
            pair = pair if of_seed.random() < 0.5 else pair[::-1]
            lasting = of_seed.choice([0.01, 0.1, 1.0, 10.0, 40.0]) * of_seed.random()
            kind = of_seed.choices(
                [
                    "kill",
                    "cut",
                    "pause",
                    "part",
                    "part one way",
                    "lose host",
                    "join",
                    "signal",
                    "kill controller",
                ],
                [8, 5, 2, 2, 2, 1, 2, 3, 0.1],
            )[0]
            when = self.when(faults, horizon)
            match kind:
                case "cut":
                    faults.append(Fault(kind=kind, targets=pair, **when))
                case "part" | "part one way":
                    lasting = FOREVER_S if of_seed.random() < 0.25 else lasting
                    faults.append(Fault(kind=kind, targets=pair, for_s=lasting, **when))
                case "pause":
                    lasting = SILENCE_S + 2.0 * of_seed.random() if of_seed.random() < 0.5 else lasting
                    faults.append(Fault(kind=kind, targets=(worker(one),), for_s=lasting, **when))
                case "signal":
                    kind = "signal" if of_seed.random() < 0.3 else "signal, and continue"
                    if of_seed.random() < 0.4:
                        when["on"] = f"opens {of_seed.randint(1, 3)}"
                    faults.append(Fault(kind=kind, targets=(worker(one),), **when))
                case "kill controller":
                    faults.append(Fault(kind="kill", targets=(CONTROLLER,), **when))
                case _:
                    faults.append(Fault(kind=kind, targets=(worker(one),), **when))
            if kind in ("kill", "lose host", "pause") and of_seed.random() < 0.85:
                when["at"] += of_seed.choice([0.001, 0.01, 0.1, 6.0]) * of_seed.random()
                faults.append(Fault(kind="join", targets=(worker(one),), **when))
        return faults

    def when(self, faults, horizon):
        """Draws the time of a fault."""
        of_seed = self.random
        delay = of_seed.choice([0.0005, 0.002, 0.01, 0.05]) * of_seed.random() * 2
        draw = of_seed.random()
        if faults and draw < 0.3:
            last = faults[-1]
            return {"at": last.at + delay, "on": last.on}
        if draw < 0.7:
            kind, most = of_seed.choice(
                [
                    ("form", 12),
                    ("report", 20),
                    ("enters", 5),
                    ("opens", 5),
                    ("waits", 5),
                    ("gives", 4),
                    ("prologue", 4),
                    ("first step", 4),
                    ("boundary", 20),
                    ("finished", 4),
                    ("finished", 2),
                    ("saves", 6),
                    ("commit", 60),
                ]
            )
            return {"at": delay, "on": f"{kind} {of_seed.randint(1, most)}"}
        return {"at": of_seed.uniform(0, 1.2 * horizon)}

    def build(self, world):
        world.start(ControllerProcess(self, world))
        for number in range(self.num_workers):
            self.start(world, number)

    def first_version(self, number):
        """The version with which a task begins."""
        return 0

    def start(self, world, number):
        process = WorkerProcess(self, world, number)
        self.workers.append(process)
        world.start(process)

    def inject(self, world, fault):
        self.num_faults += 1
        process = world.processes[fault.targets[0]]
        match fault.kind:
            case "join":
                is_asleep = process.paused_until > world.now
                if (is_asleep or not process.is_alive) and self.may_join(world):
                    self.start(world, process.number)
            case "signal" | "signal, and continue":
                if process.is_alive and process.welcome is not None:
                    world.deliver(process, process.signal, fault.kind == "signal")
            case kind:
                if kind == "kill" and process.is_alive and not isinstance(process, ControllerProcess):
                    world.at(world.now + 0.05, self.launcher_reports, world, process)
                self.has_lost_messages |= kind not in ("kill", "cut") or CONTROLLER in fault.targets
                world.inject(fault)

    def launcher_reports(self, world, process):
        """The launcher tells the controller that a process has ended, which may not have joined."""
        owner = world.processes[CONTROLLER]
        if owner.is_alive:
            owner.send(owner.controller.fail(process.number, "signal 9"))

    @property
    def has_begun(self):
        return bool(self.forms)

    def may_join(self, world):
        return world.processes[CONTROLLER].is_alive and not self.has_ended(world)

    def has_ended(self, world):
        return world.processes[CONTROLLER].controller.is_broken

    def is_over(self, world):
        return not any(process.is_alive for process in self.workers)

    def prologue_s(self):
        return self.prologue.choice([0.0, 0.002, 0.02, 0.5, 3.0])

    def compute_s(self, number):
        return self.step_s * self.computing.choice([0.5, 1.0, 1.0, 1.0, 3.0])

    # --- messages -----------------------------------------------------------------------------------

    def written(self, message):
        return json.dumps(message).encode() if self.is_checked else message

    def read(self, message):
        return checked(message) if self.is_checked else message

    # --- what must hold at all times ----------------------------------------------------------------

    def note_form(self, world, form):
        if self.forms.get(form["epoch"]) is form:
            return
        assert form["epoch"] == len(self.forms) + 1
        self.forms[form["epoch"]] = form
        world.moment("form")
        if form["entering"]:
            world.moment("enters")
        for number in form["entering"]:
            self.since[number] = form["version"] + 1
        solo = [number for number in form["members"] if self.since.get(number, 0) > form["version"]]
        assert form["solo"] == solo
        assert form["members"] == sorted(set(form["members"]))
        assert len(form["members"]) >= self.min_workers
        versions = {
            number: self.reported[number] for number in form["members"] if number not in form["entering"]
        }
        newest = max(versions.values())
        assert form["version"] == newest
        holders = [number for number, version in versions.items() if version == newest]
        assert form["source"] == min(holders, key=lambda number: (number in solo, number))
        assert form["behind"] == [number for number, version in versions.items() if version < newest]

    def note_begin(self, process, begin):
        form = self.forms[begin.epoch]
        assert list(begin.members) == form["members"]
        participants = [number for number in form["members"] if number not in form["solo"]]
        assert process.member.is_chief == (process.number == min(participants, default=None))
        assert list(begin.entering) == form["entering"]
        if process.member.version == form["version"]:
            self.note_standing(process)
        replicas = replicas_of(self.num_workers, begin.members)
        assert sorted(replica for each in replicas.values() for replica in each) == list(
            range(self.num_workers)
        )
        loads = [len(each) for each in replicas.values()]
        assert max(loads) - min(loads) <= 1, (
            f"a member computes {max(loads)} replicas, and another {min(loads)}"
        )

    def note_commit(self, process):
        """A worker has a new version."""
        member = process.member
        version = member.version
        process.world.trace(f"  {process.number} has version {version}")
        process.world.moment("commit")
        assert self.states.setdefault(version, process.state) == process.state, (
            f"two states of version {version}"
        )
        assert member.epoch not in process.reported, "a commit after the report"
        newest = self.forms[max(self.forms)]["members"]
        versions = {
            n: each.member.version
            for n in newest
            for each in [process.world.processes[worker(n)]]
            if each.is_alive and each.member.version is not None
        }
        if versions and member.epoch == max(
            self.forms
        ):  # otherwise it was given up, and does not know it yet
            assert max(versions.values()) - min(versions.values()) <= 1, f"versions {versions}"

    def note_standing(self, process):
        """The participants, and so the chief, are the same in all members of an epoch at one version."""
        member = process.member
        known = self.standings.setdefault((member.epoch, member.version), member.participants)
        assert known == member.participants, (
            f"the participants are {known} and {member.participants} in {process}"
        )
        assert not (member.is_chief and member.is_solo), f"{process} is chief, and solo"

    def note_step(self, process):
        """All begin a step with or without a comparison, and with the same reference."""
        member = process.member
        knows = member.must_compare and member.reference
        known = self.references.setdefault((member.epoch, member.version), knows)
        assert (known is False) == (knows is False), f"some compare their steps, and some do not: {process}"
        assert known == knows, f"{known} and {knows} are the references, in {process}"
        assert not knows or knows in (member.participants or member.members)
        assert member.must_compare or not member.is_solo
        if member.is_solo:
            process.world.moment("first step")

    def note_waiting(self, world, chief):
        for number in chief.waiting if chief.version is not None else ():
            process = world.processes[worker(number)]
            if process.reported:  # otherwise its predecessor had asked, and is gone
                process.known_at = process.known_at or (chief.version, self.num_faults)

    def check_gathered(self, key, message, value):
        known = self.exchanges.setdefault(key, message)
        assert known == message, f"two results of {key}"
        assert all(list(each) == list(value) for each in message["values"]), f"{key}: {message['values']}"

    def check_lost(self, world, message):
        """The run may be lost only for a reason that is true."""
        reason = message["reason"]
        assert reason != "differs", message
        if self.has_lost_messages:
            return  # a process that lives may count as gone
        assert reason != "unreachable", message
        holders = [each for each in self.workers if each.is_alive and each.member.version is not None]
        if reason == "few":
            assert len(holders) < self.min_workers, f"{len(holders)} are alive"
        elif reason == "state":
            assert not holders, f"{holders[0]} is alive, and has the state"

    def check_given_up(self, number):
        """A member that is heard may be given up only after epochs in a row, or entries, without progress."""
        last = [self.forms[epoch] for epoch in sorted(self.forms)[-NUM_BLAMED:]]
        is_in_vain = len({(form["version"], *form["members"]) for form in last}) == 1
        entries = sum(number in form["entering"] for form in self.forms.values())
        is_stateless = self.reported[number] is None and entries >= NUM_BLAMED
        assert is_in_vain or is_stateless, f"{number} is given up in epoch {max(self.forms)} without a reason"

    # --- at the end ---------------------------------------------------------------------------------

    def check(self, world):
        if not self.num_faults:
            assert len(self.forms) == 1, "an epoch ended without a reason"
        for process in self.workers:
            if self.has_lost_messages or process.exit_code != 0 or process.state is not None:
                continue
            if process.known_at is not None:
                version, num_faults = process.known_at
                num_steps = self.num_steps - version
                most = self.save_every * (3 + 2 * (self.num_faults - num_faults))
                assert num_steps <= most, f"{process} waited in vain for {num_steps} steps"
        state = 0
        for version in range(1, max(self.states) + 1):
            sums = []
            for _ in range(self.num_rounds):
                sums.append(tuple(rows_of(state, replica, sums) for replica in range(self.num_workers)))
            state = updated(state, sums)
            assert self.states.get(version, state) == state, (
                f"version {version} is not that of a run without faults"
            )
        finished = [
            process for process in self.workers if process.exit_code == 0 and process.state is not None
        ]
        saved = [process for process in self.workers if process.exit_code == 42]
        assert all(process.member.version == self.num_steps for process in finished)
        assert len({process.member.version for process in saved}) <= 1, "saved at different steps"
        assert not (finished and saved), "some finished, and some were saved before"
        if not self.has_lost_messages and (finished or saved):
            left = [
                process
                for process in self.workers
                if process.exit_code == 1 and process.member.version is not None
            ]
            assert not left, f"{left[0]} ended with an error ({left[0].why}), and others did not"

    def outcome(self, world):
        codes = {process.exit_code for process in self.workers}
        if 0 in codes or 42 in codes:
            return "finished" if 0 in codes else "saved"
        whys = sorted({process.why for process in self.workers if process.why})
        return f"lost: {' '.join(whys)}" if whys else "all killed"


class Replacements(Survivors):
    """Workers are replaced from early on, and the next faults hit the recovery: a newcomer in each part of its way, and
    those that it depends on."""

    def __init__(self, seed):
        super().__init__(seed)
        of_seed = self.of_replacements = random.Random(f"replacements {seed}")
        self.num_steps = of_seed.choice([4, 12, 24])
        self.min_workers = 1

    def faults(self):
        of_seed = self.of_replacements
        faults = []
        for turn in range(of_seed.choice([1, 2, 3, 4])):
            first = of_seed.sample(range(self.num_workers), of_seed.choice([1, 1, 2]))[: self.num_workers - 1]
            on = f"form {of_seed.randint(1, 3)}" if turn else f"commit {of_seed.randint(1, 8)}"
            for number in first:
                at = of_seed.choice([0.0, 0.001, 0.02]) * of_seed.random()
                faults.append(Fault(at, "kill", (worker(number),), on=on))
                faults.append(Fault(at + 0.06 * of_seed.random() + 0.001, "join", (worker(number),), on=on))
            moment, most = of_seed.choice(
                [("waits", 2), ("opens", 2), ("enters", 2), ("gives", 2), ("prologue", 3), ("first step", 3)]
            )
            for _ in range(of_seed.choice([0, 1, 1, 2])):
                on, target = f"{moment} {of_seed.randint(1, most)}", of_seed.randrange(self.num_workers)
                delay = of_seed.choice([0.0, 0.0005, 0.002, 0.01]) * of_seed.random()
                kind = of_seed.choice(["kill", "kill", "kill", "cut", "signal, and continue"])
                if kind == "cut":
                    other = (target + 1) % self.num_workers
                    faults.append(Fault(delay, kind, (worker(target), worker(other)), on=on))
                    continue
                faults.append(Fault(delay, kind, (worker(target),), on=on))
                if kind == "kill" and of_seed.random() < 0.7:
                    later = delay + 0.002 + of_seed.choice([0.0, 0.02, 0.2]) * of_seed.random()
                    faults.append(Fault(later, "join", (worker(target),), on=on))
        return faults


class LateReplacement(Survivors):
    """A replacement enters, and does not come to its first step."""

    exchange_s = 200.0
    timeout_s = 20.0

    def __init__(self, seed):
        super().__init__(seed)
        self.num_workers, self.num_steps, self.min_workers = 3, 24, 1

    def faults(self):
        kill = Fault(0.001, "kill", (worker(self.random.randrange(3)),), on="commit 4")
        return [kill, Fault(0.1, "join", kill.targets, on="commit 4")]

    def prologue_s(self):
        return 0.001 if self.since == {} else 100.0

    def check_given_up(self, number):
        assert self.since[number] > self.forms[max(self.forms)]["version"], "it is no newcomer"
        self.has_lost_messages = True  # it lives, and ends with an error

    def check(self, world):
        super().check(world)
        codes = [process.exit_code for process in self.workers]
        assert codes.count(0) >= 2, codes
