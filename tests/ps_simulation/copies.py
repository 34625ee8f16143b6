"""Two copies of each group of counters, clients that count, and a coordinator that only watches the servers.

Real are ``GroupRules``, ``UpdateLog``, ``Window``, ``Lease`` and ``Groups``. There is no job here: each client has numbers of
its own. So a fault of the servers' rules shows without the rules of the coordinator.
"""

import random

from ps_simulation.asking_servers import AskingServers
from ps_simulation.integer_store import both, value_in
from ps_simulation.names import Names
from ps_simulation.server_task import ServerTask, ps
from ps_simulation.task_process import TaskProcess
from replicax._ps.client.groups import Groups
from replicax._ps.store.group_rules import View
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError, StaleCoordinatorError
from simulation.world import Fault

INCARNATION = "session"
PROGRAM = "add one"
WATCHER = "coordinator"
SETTLED_S = 15.0
HEARTBEAT_S = 1.0
CUT_OFF_S, SLEEP_S = 12.0, 30.0
MISSED = 3


def client(number):
    return f"client {number}"


def key_of(number):
    """Returns the key of the counter of a server."""
    return f"n{number}"


class Watcher(TaskProcess):
    """Sends heartbeats to the servers, and decides with ``Groups`` which of them serve."""

    def __init__(self, scenario, world):
        super().__init__(world, WATCHER)
        self.scenario = scenario
        self.groups = Groups(scenario.num_servers)
        self.instances = {}
        self.is_lost = set()

    def start(self):
        self.run(self._begin())

    def answer(self, request, connection):
        return {"views": [view.described() for view in self.groups.views]}

    def _begin(self):
        # No server may serve without its first view, so a real coordinator fails if one is not told, and begins again.
        while not (yield from self._has_told_all()):
            yield 0.5
        for number in range(self.scenario.num_servers):
            self.run(self._watch(number))
        servers = AskingServers(self, self.scenario.num_servers, INCARNATION, returns=True)
        servers.use_primaries(self.groups.views)
        for number in range(self.scenario.num_servers):
            request = {"op": "create", "keys": both(key_of(number)), "number": ("watcher", number), "low": 0}
            while True:
                try:
                    servers.use_primaries(self.groups.views)
                    yield from servers.ask({number: request})
                    break
                except ReplicaxError:
                    yield 0.5
        self.scenario.has_begun = True

    def _has_told_all(self):
        for number in range(self.scenario.num_servers):
            yield from self._hello(number)
        for view in self.groups.views:
            for task in view.members:
                if not (yield from self._send(task, view)):
                    return False
        return True

    def _hello(self, number, *, is_accepted=True):
        while True:
            try:
                told = yield self.ask(ps(number), self._said("hello", again=True), 5.0)
                if is_accepted:
                    self.instances[number] = told["instance"]
                return
            except ReplicaxError:
                yield 0.5

    def _said(self, what, **fields):
        return {"ask": what, "incarnation": INCARNATION, "ps": [], **fields}

    def _watch(self, number):
        missed = 0
        while True:
            views = []
            try:
                told = yield self.ask(ps(number), self._said("heartbeat"), 2.0)
                missed = 0
                if told["instance"] != self.instances[number]:
                    views += self.groups.server_lost(number)
                    yield from self._hello(number)
                    self.groups.returned(number, {})
                    if any(self.groups.views[group].primary == number for group in self.groups.lost):
                        self.end(1)  # nobody has its counters
                        return
                else:
                    parts = told["statistics"].get("groups", {})
                    self.groups.back(number)
                    views += self.groups.status_received(number, parts)
                    views += self.groups.join(number)
                    yield from self._tell(views)
                    for view in self.groups.views_to_send(number, parts):
                        yield from self._send(number, view)
                    views = []
            except StaleCoordinatorError:
                views = self.groups.server_lost(number)
                yield from self._hello(number, is_accepted=False)  # its next heartbeat shows another instance
            except ReplicaxError:
                missed += 1
                if missed == MISSED:
                    views = self.groups.server_lost(number)
            yield from self._tell(views)
            yield HEARTBEAT_S if not missed else HEARTBEAT_S / 4

    def _tell(self, views):
        for view in views:
            self.world.moment("view")
            for task in view.members:
                yield from self._send(task, view)

    def _send(self, task, view):
        """Returns True if the server has answered."""
        try:
            yield self.ask(ps(task), self._said("group", view=view.described()), 3.0)
            return True
        except InvalidArgumentError:
            self.groups.refused(view)
            return True
        except ReplicaxError as error:
            self.world.trace(f"    {ps(task)} is not told: {error}")
            return False


class Client(TaskProcess):
    """Adds its numbers to the counter of each server, one after the other, each until it is acknowledged."""

    def __init__(self, scenario, world, number):
        super().__init__(world, client(number))
        self.scenario, self.number = scenario, number
        self.servers = AskingServers(self, scenario.num_servers, INCARNATION, returns=True)

    def start(self):
        self.run(self._count())
        self.run(self._learn())

    def _learn(self):
        """Learns of the primaries now and then, as a worker does."""
        while True:
            yield 0.5
            if self.number in self.scenario.done:
                return
            try:
                told = yield self.ask(WATCHER, {}, 1.0)
            except ReplicaxError:
                continue
            self.servers.use_primaries(map(View.of, told["views"]))

    def _count(self):
        scenario = self.scenario
        while not scenario.has_begun:
            yield 0.05
        self.servers.use_primaries(scenario.first_views)
        for server in self.servers.servers:
            server.programs[PROGRAM] = True
        while (at := scenario.next_of[self.number]) < scenario.num_each:
            number = at * scenario.num_clients + self.number
            closure = (f"{INCARNATION} {self.number}", number)
            requests = {
                each: {
                    "op": "step", "closure": closure, "low": number, "program": PROGRAM,
                    "keys": both(key_of(each)), "pull": both(key_of(each)),
                }
                for each in range(scenario.num_servers)
            }  # fmt: skip
            try:
                answers = yield from self.servers.ask(requests)
            except ReplicaxError as error:
                self.world.trace(f"    {self.name} tries {at} again: {error}")
                yield 0.2
                continue
            scenario.note_acknowledged(self.number, number, answers)
            yield scenario.step_s
        self.servers.close()
        scenario.note_done(self.world, self.number)


class Copies:
    """Servers with two copies, and clients that count."""

    limit_s = 400.0
    write_s = 0.5

    def __init__(self, seed):
        of_seed = self.random = random.Random(f"copies {seed}")
        self.num_servers = of_seed.choice([2, 2, 3])
        self.num_clients = of_seed.choice([1, 2, 3])
        self.num_each = of_seed.choice([4, 12, 30])
        self.step_s = of_seed.choice([0.01, 0.1, 0.5])
        self.log_entries = of_seed.choice([3, 20, 10**6])
        self.asleep = None  # the server whose threads sleep for a while
        self.cut_off_at = 0.0
        if random.Random(f"asleep {seed}").random() < 0.1:
            self.asleep = ps(of_seed.randrange(self.num_servers))
            self.num_clients = max(self.num_clients, 2)
            self.num_each, self.step_s, self.cut_off_at = 12, 0.2, of_seed.uniform(1.1, 1.5)
        self.network = {}
        self.names = Names()
        self.has_begun = False
        self.first_views = Groups(self.num_servers).views
        self.next_of = [0] * self.num_clients
        self.acknowledged = set()
        self.num_server_faults = 0
        self.done = set()

    def writing_s(self):
        return self.write_s

    def sleeping_s(self, process):
        """Returns how long a thread of a server gets no processor, which has ordered a message."""
        is_cut_off = 0.0 < process.world.now - self.cut_off_at < CUT_OFF_S
        return SLEEP_S if is_cut_off and process.name == self.asleep else 0.0

    def deposed_and_back(self):
        """Draws faults by which a server is the primary, then the backup, and then the primary again.

        One client hears of neither.
        """
        primary = int(self.asleep.split()[1])
        backup = ps((primary + 1) % self.num_servers)
        at = self.cut_off_at
        yield Fault(at, "part", (client(0), WATCHER), SLEEP_S)
        for other in (WATCHER, *map(ps, range(self.num_servers))):
            if other != self.asleep:
                yield Fault(at, "part", (self.asleep, other), CUT_OFF_S)
                yield Fault(at, "cut", (self.asleep, other))
        yield Fault(at + CUT_OFF_S + 5.0, "restart", (backup,), 1.0)

    def faults(self):
        if self.asleep is not None:
            return [*self.deposed_and_back()]
        of_seed, faults = self.random, []
        horizon = 2.0 + self.num_each * self.step_s
        for _ in range(of_seed.choice([0, 1, 2, 3, 5, 8])):
            at = of_seed.uniform(0.0, horizon * 2)
            server, other = of_seed.sample([ps(number) for number in range(self.num_servers)], 2)
            asker = of_seed.choice([WATCHER, *(client(n) for n in range(self.num_clients))])
            kind = of_seed.choice(
                ["restart", "restart", "lose host", "pause", "cut", "cut", "part", "part one way"]
            )
            lasting = of_seed.choice([0.01, 1.0, 4.0, 12.0, 70.0]) * of_seed.random()
            on = {}
            if of_seed.random() < 0.4:
                on = {"on": f"{of_seed.choice(['view', 'synced'])} {of_seed.randint(1, 5)}"}
                at = of_seed.choice([0.0, 0.002, 0.5]) * of_seed.random()
            if kind in ("restart", "lose host", "pause"):
                faults.append(Fault(at, kind, (server,), lasting, **on))
            else:
                way = of_seed.choice([(server, other), (asker, server), (server, asker)])
                faults.append(Fault(at, kind, way, lasting, **on))
            if of_seed.random() < 0.2:
                faults.append(Fault(at, "restart", (client(of_seed.randrange(self.num_clients)),), 0.1, **on))
        return faults

    def build(self, world):
        for number in range(self.num_servers):
            world.start(ServerTask(self, world, number))
        world.start(Watcher(self, world))
        for number in range(self.num_clients):
            self._start_client(world, number)

    def _start_client(self, world, number):
        world.start(Client(self, world, number))

    def inject(self, world, fault):
        process = world.processes.get(fault.targets[0])
        self.num_server_faults += any(name.startswith("ps") for name in fault.targets)
        if fault.kind not in ("restart", "lose host"):
            world.inject(fault)
            return
        if not process.is_alive or process.exit_code == 0:
            return
        world.inject(Fault(fault.at, "kill" if fault.kind == "restart" else fault.kind, fault.targets))
        world.last_fault = max(world.last_fault, world.now + fault.for_s)
        world.at(world.now + max(fault.for_s, 0.01), self._restart, world, process)

    def _restart(self, world, process):
        if isinstance(process, ServerTask):
            world.start(ServerTask(self, world, process.index))
        else:
            self._start_client(world, process.number)

    # --- what must hold -----------------------------------------------------------------------------

    def note_done(self, world, number):
        self.done.add(number)
        if len(self.done) == self.num_clients:
            self.settle(world)

    def note_acknowledged(self, number, function, answers):
        self.next_of[number] += 1
        self.acknowledged.add(function)
        for each, answer in answers.items():
            value = value_in(answer["values"], key_of(each))
            assert function in value, f"function {function} is acknowledged, and its answer is without it"

    def note_session_ended(self, process):
        """A server has dropped its data, because the coordinator was silent."""

    def differs(self, group, seq):
        raise AssertionError(f"message {seq} of group {group} has two outcomes")

    def settle(self, world):
        """Ends the run when all is counted, and the copies had time to become equal after the last fault."""
        until = world.last_fault + SETTLED_S
        if world.now < until:
            world.at(until, self.settle, world)
        elif world.processes[WATCHER].is_alive:
            world.processes[WATCHER].end(0)

    def is_over(self, world):
        return not world.processes[WATCHER].is_alive

    def check(self, world):
        watcher = world.processes[WATCHER]
        if watcher.exit_code:
            assert self.num_server_faults > 1, "one fault of a server loses a group"
            return
        numbers = set(range(self.num_each * self.num_clients))
        for view in watcher.groups.views:
            assert view.backup is not None, f"group {view.group} has one copy"
            for task in view.members:
                copy = world.processes[ps(task)].groups[view.group]
                assert copy.rules.epoch == view.epoch, f"ps {task} has not view {view}"
                one = value_in(copy.store.counters, key_of(view.group))
                assert len(one) == len(set(one)), f"group {view.group} has a function twice: {one}"
                assert set(one) == numbers, f"group {view.group} on ps {task} lacks {numbers - set(one)}"

    def outcome(self, world):
        return "lost" if world.processes[WATCHER].exit_code else "counted"
