"""Groups that train alone, and servers of outer parameters. Real are ``MemberRules`` and ``UnmergedProgress``.

Checked are: each row's progress is in the outer parameters once, or is named as lost; a group's own parameters never
have a row twice; a version of one server's store has one value; a round closes once; no boundary waits; all groups
end.
"""

import random
from collections import Counter

from ps_simulation.names import Names
from ps_simulation.round_model import NOT_FINITE, RoundModel, progress_of, replayed, rows_in
from ps_simulation.server_task import ps
from ps_simulation.task_process import TaskProcess, travelled
from replicax._ps.local_updates import exchange_actions as actions
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.member_rules import MemberRules
from replicax._ps.local_updates.round_state import MemberState
from replicax._ps.local_updates.unmerged_progress import UnmergedProgress
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError
from simulation.world import Fault

CALL_S = 2.0


class NoLog:
    """Takes the events of a process, as ``ReplayWriter`` does, and forgets them."""

    def _forget(self, *_, **__):
        pass

    taken = landed = claimed = history = adopted = _forget


NO_LOG = NoLog()


def group(number):
    return f"group {number}"


def pushes_of(model):
    """Returns the pushes that a fragment has, as (owner, number)."""
    return {(owner, number) for pushes in model.rounds for _, owner, number, _ in pushes}


class FragmentServer(TaskProcess):
    """A parameter server with fragments, which writes snapshots."""

    def __init__(self, scenario, world, index):
        super().__init__(world, ps(index))
        self.scenario, self.index = scenario, index
        self.instance = scenario.names.next(f"{self.name} store")
        snapshot = scenario.disks[index]
        self.rounds = {fragment: each.copied() for fragment, each in snapshot.items()}
        for each in self.rounds.values():
            each.is_stopping = 0  # a stop is for one instance
        self.num_changes = 0

    def start(self):
        self.scenario.note_started(self)
        self.run(self._write())

    def _write(self):
        written = 0
        while not self.scenario.is_over(self.world):
            yield self.scenario.snapshot_s
            if written != self.num_changes:
                written = self.num_changes
                snapshot = {fragment: each.copied() for fragment, each in self.rounds.items()}
                yield self.scenario.write_s
                self.scenario.disks[self.index] = snapshot

    def receive(self, connection, message):
        """Answers at once, without a routine."""
        _, request = message
        answer = error = None
        try:
            answer = self.answer(request, connection)
        except ReplicaxError as failure:
            error = travelled(failure, self.name)
        connection.send(("answer", answer, error))

    def answer(self, request, connection):
        kind, fragment, *fields = request
        if kind == "claim" and fragment not in self.rounds:
            birth = self.scenario.note_created(fragment)
            self.rounds[fragment] = RoundModel.new(fields[3], self.scenario.num_groups, birth)
        if fragment not in self.rounds:
            raise InvalidArgumentError(f'There is no shard "{fragment}" on this parameter server.')
        model = self.rounds[fragment]
        self.num_changes += kind in ("claim", "push", "close")
        match kind:
            case "claim":
                model.claim(*fields[:3])
            case "push":
                model.push(*fields)
            case "close":
                version = model.version
                if model.close(*fields):
                    self.scenario.note_closed(self, fragment, version, model)
        outer = (model.theta, model.history[:]) if kind == "fetch" else None
        return self.instance, model.state, outer


class Group(TaskProcess):
    """One process that trains, with the exchange beside it."""

    def __init__(self, scenario, world, number, num_steps):
        super().__init__(world, group(number))
        self.scenario, self.number, self.num_steps = scenario, number, num_steps
        self.owner = scenario.next_owner(self)
        self.rules = MemberRules(
            number, scenario.num_groups, scenario.num_fragments, self.owner, scenario.options, world.now
        )
        self.w = [0] * scenario.num_fragments
        self.progress = [UnmergedProgress(0) for _ in self.w]
        self.new_rows = [[] for _ in self.w]
        self.tokens = [0] * len(self.w)
        self.outer = {}
        self.sent = set()
        self.claimed = {}  # fragment: the instance of which the log is
        self.step = 0
        self.is_broken = [False] * len(self.w)
        self.has_ended_training = False
        self.next_step_at = None
        self.log = scenario.log_of(self)

    def start(self):
        self._do(self.rules.tick(self.world.now))
        if self.rules.has_begun and self.next_step_at is None:
            self.next_step_at = self.world.now + self.scenario.step_s[self.number]
            self.after(self.scenario.step_s[self.number], self._train)
        self.after(self.scenario.tick_s, self.start)

    # --- training -----------------------------------------------------------------------------------

    def _train(self):
        """One step. What the exchange does meanwhile, or does not, changes nothing of its time."""
        scenario = self.scenario
        is_late = self.world.now > self.next_step_at
        assert not is_late or scenario.was_paused(self.number), f"{self.name} has waited"
        self.step += 1
        for fragment in range(len(self.w)):
            row = scenario.next_row(self, fragment)
            if not self.is_broken[fragment]:
                self.w[fragment] += progress_of(row)
            self.new_rows[fragment].append(row)
            self.tokens[fragment] += scenario.tokens[self.number]
            if (self.step - scenario.offset_of(fragment)) % scenario.every == 0:
                self._boundary(fragment)
        if scenario.adopts_at_once:
            for fragment in self.rules.fetched:
                self._do(self.rules.adopt(fragment))
        if scenario.stops_at == (self.number, self.step):
            self.rules.stop()
        if self.step >= self.num_steps or (self.rules.stops and self.step % scenario.every == 0):
            self.has_ended_training = True
            for fragment in range(len(self.w)):
                self._boundary(fragment)
            self._do(self.rules.finish(self.world.now))
            return
        self.next_step_at = self.world.now + scenario.step_s[self.number]
        self.after(scenario.step_s[self.number], self._train)

    def _boundary(self, fragment):
        tokens, self.tokens[fragment] = self.tokens[fragment], 0
        adopts = self.scenario.adopts_at_boundary(self, fragment)
        self._do(self.rules.boundary(fragment, tokens, self.world.now, adopts=adopts))

    # --- the exchange -------------------------------------------------------------------------------

    def _do(self, some):
        for action in some:
            if self.world.log is not None:
                self.world.trace(f"    {self.name}: {action}")
            match action:
                case actions.TakeProgress(fragment, number):
                    self._take(fragment, number)
                    self.log.taken(fragment, number, self.rules.tokens_of(fragment, number))
                case actions.AdoptOuter():
                    self._adopt(action)
                case actions.LostPushes(fragment, first, last, is_refused):
                    for number in range(first, last + 1):
                        self.scenario.note_lost(self, fragment, number, is_refused)
                case actions.ClaimSlot(fragment, expected):
                    progress = self.progress[fragment]
                    outer = progress.base + sum(progress.pushes.values())
                    self._send(fragment, "claim", self.number, expected, self.owner, outer)
                case actions.SendPush(fragment, number, after, tokens, is_last, stops):
                    value = self.progress[fragment].pushes[number]
                    value = NOT_FINITE if (self.owner, fragment, number) in self.scenario.broken else value
                    push = self.number, self.owner, number, after, tokens, is_last, stops, value
                    self._send(fragment, "push", *push)
                    self.world.moment("push")
                case actions.NoteLanding(fragment, number, version):
                    self.scenario.note_landing(self, fragment, number, version)
                    self.log.landed(fragment, number, version, 0)
                case actions.SendClose(fragment, version, quorum, is_flush):
                    self._send(fragment, "close", version, quorum, is_flush)
                    self.world.moment("close")
                case actions.ReadRound(fragment):
                    self._send(fragment, "read")
                case actions.FetchOuter(fragment):
                    self._send(fragment, "fetch")
                case actions.SlotReplaced():
                    raise AssertionError("nobody else has this group's slot")
                case actions.ExchangeDone():
                    self.scenario.note_done(self)
                    self.end(0)

    def _send(self, fragment, kind, *fields):
        assert fragment not in self.sent, "two requests of one fragment are in flight"
        self.sent.add(fragment)
        before = fields[1] if kind == "claim" else MemberState()
        reply = self.ask(ps(self.scenario.server_of(fragment)), (kind, fragment, *fields), CALL_S)
        reply.then(lambda: self._answered(fragment, before, reply))

    def _answered(self, fragment, before, reply):
        if not self.is_alive:
            return
        self.sent.discard(fragment)
        if reply.error is not None:
            assert isinstance(reply.error, ReplicaxError)
            is_absent = isinstance(reply.error, InvalidArgumentError)
            self._do(self.rules.failed(fragment, is_absent=is_absent))
            return
        instance, state, fetched = reply.value
        me = state.members[self.number]
        if me.owner == self.owner and self.claimed.get(fragment) != instance:
            self.claimed[fragment] = instance
            self.log.claimed(fragment, instance, me.pushed, state.birth, before)
        if fetched is not None:
            outer, history = fetched
            self.outer[fragment] = instance, state.version, outer
            if self.claimed.get(fragment) == instance:
                self.log.history(fragment, history)
        self._do(self.rules.answered(fragment, instance, state, self.world.now))

    def _take(self, fragment, number):
        self.scenario.note_taken(self, fragment, number, self.new_rows[fragment])
        self.new_rows[fragment] = []
        if self.is_broken[fragment]:
            self.scenario.broken.add((self.owner, fragment, number))
        self.progress[fragment].take(number, self.w[fragment])

    def _adopt(self, action):
        fragment = action.fragment
        instance, version, outer = self.outer[fragment]
        assert (instance, version) == (action.instance, action.version), "another version was fetched"
        how = {"keeps": action.keeps, "returns": action.returns, "drops": action.drops}
        self.log.adopted(fragment, version, 0, **how)
        self.scenario.note_adopted(self, fragment, instance, version, outer)
        if action.drops:
            self.scenario.note_dropped(self, fragment, self.new_rows[fragment])
            self.new_rows[fragment], self.is_broken[fragment] = [], False
        for number in action.returns:
            self.new_rows[fragment] = [
                *self.scenario.rows_of.pop((self.owner, fragment, number)), *self.new_rows[fragment],
            ]  # fmt: skip
        self.w[fragment] = self.progress[fragment].adopt(
            self.w[fragment], outer, keeps=action.keeps, returns=action.returns, drops=action.drops
        )
        if not self.is_broken[fragment]:
            self.scenario.check_own_rows(self, fragment)


class LocalGroups:
    """Groups that train alone and exchange through servers, which write snapshots."""

    limit_s = 300.0

    def __init__(self, seed):
        self.seed = seed
        of_seed = self.random = random.Random(f"local groups {seed}")
        self.num_groups = of_seed.choice([1, 2, 3, 3, 4])
        self.num_servers = of_seed.choice([1, 1, 2])
        self.num_fragments = of_seed.choice([1, 2, 3])
        self.every = of_seed.choice([1, 3, 5])
        self.num_steps = self.every * of_seed.choice([1, 3, 6])
        step_s = of_seed.choice([0.02, 0.2])
        speeds = of_seed.choice([[1.0], [1.0], [1.0, 1.2], [1.0, 2.5]])
        self.step_s = [step_s * of_seed.choice(speeds) for _ in range(self.num_groups)]
        self.tokens = [of_seed.choice([1, 7, 14]) for _ in range(self.num_groups)]
        self.period_s = self.every * step_s
        self.tick_s = max(0.05, self.period_s / 2)
        quorum = of_seed.randint(1, self.num_groups)
        grace_s = of_seed.choice([None, None, 0.0, self.period_s])
        self.patience_s = of_seed.choice([3.0, 5.0]) + 4 * self.period_s
        self.options = ExchangeOptions(quorum, grace_s, self.patience_s)
        self.adopts_at_once = random.Random(f"adoptions {seed}").random() < 0.5  # and not at boundaries alone
        self.snapshot_s = self.period_s * of_seed.choice([0.7, 2.0])
        self.write_s = self.snapshot_s * 0.2
        self.stops_at = of_seed.choice([None, None, (0, self.every)])
        self.network = {"slow": of_seed.choice([0.02, 0.2])}
        self.names = Names()
        self.disks = [{} for _ in range(self.num_servers)]
        self.processes = {}  # owner: the process
        self.num_rows = Counter()
        self.own_rows = {}  # (owner, fragment): the rows that it has computed
        self.rows_of = {}  # (owner, fragment, number): the rows of a push
        self.rows_by = {}  # (fragment, row): the owner
        self.landed = {}  # (owner, fragment, number): the version that has it, as the group was told
        self.rolled_back = {}  # (owner, fragment, number): the last time at which a server came back without it
        self.named = {}  # (owner, fragment, number): True if it was refused
        self.dropped = set()  # (fragment, row)
        self.broken = set()
        self.values = {}  # (fragment, instance, version): the outer parameters
        self.servers = {}
        self.instances = {}  # of servers: their order
        self.merged = {}  # (owner, fragment): the rows that were in outer parameters that it adopted
        self.merged_before = {}  # those of servers before the last one
        self.adopted = {}  # (owner, fragment): the instance whose outer parameters it adopted last
        self.num_created = Counter()  # of fragments
        self.was_disturbed = False
        self.num_restarting = 0  # processes that were killed, and start again
        self.pauses = []
        self.done = {}

    def server_of(self, fragment):
        return fragment % self.num_servers

    def offset_of(self, fragment):
        return fragment * self.every // self.num_fragments

    def was_paused(self, number):
        return number in self.pauses

    # --- faults -------------------------------------------------------------------------------------

    def faults(self):
        of_seed, again, faults = self.random, random.Random(f"restarts {self.seed}"), []
        horizon = 0.5 + self.num_steps * max(self.step_s)
        for _ in range(of_seed.choice([0, 1, 2, 4, 8])):
            at, on = of_seed.uniform(0.0, horizon), {}
            one, server = group(of_seed.randrange(self.num_groups)), ps(of_seed.randrange(self.num_servers))
            kind = of_seed.choice(
                [
                    "restart",
                    "restart",
                    "restart",
                    "lose",
                    "pause",
                    "cut",
                    "cut",
                    "part",
                    "part one way",
                    "not finite",
                ]
            )
            lasting = of_seed.choice([0.01, 1.0, 5.0]) * self.period_s * of_seed.random()
            if of_seed.random() < 0.5:
                on = {"on": f"{of_seed.choice(['push', 'close'])} {of_seed.randint(1, 12)}"}
                at = of_seed.choice([0.0, 0.001, 0.003]) * of_seed.random()
            if kind == "not finite":
                faults.append(Fault(at, kind, (one,), **on))
            elif kind == "lose":
                if of_seed.random() < 0.5:
                    faults.append(Fault(at, kind, (one,), **on))
            elif kind in ("restart", "pause"):
                target = of_seed.choice([one, server, server, server])
                faults.append(Fault(at, kind, (target,), lasting, **on))
                if (kind, target) == ("restart", server) and again.random() < 0.4:  # from the same snapshot
                    later = at + lasting + again.choice([0.1, 0.5]) * self.snapshot_s
                    faults.append(Fault(later, kind, (target,), 0.0, **on))
            else:
                faults.append(Fault(at, kind, of_seed.choice([(one, server), (server, one)]), lasting, **on))
        return faults

    def build(self, world):
        for number in range(self.num_servers):
            world.start(FragmentServer(self, world, number))
        for number in range(self.num_groups):
            world.start(Group(self, world, number, self.num_steps))

    def inject(self, world, fault):
        self.was_disturbed = True
        process = world.processes[fault.targets[0]]
        match fault.kind:
            case "not finite" if process.is_alive and not process.has_ended_training:
                process.is_broken = [True] * self.num_fragments
            case "lose":
                world.inject(Fault(fault.at, "kill", fault.targets))
            case "restart" if process.is_alive:
                world.inject(Fault(fault.at, "kill", fault.targets))
                world.last_fault = max(world.last_fault, world.now + fault.for_s)
                self.num_restarting += 1
                world.at(world.now + fault.for_s + 0.001, self._restart, world, process)
            case "pause":
                if isinstance(process, Group):
                    self.pauses.append(process.number)
                world.inject(fault)
            case "restart" | "not finite":
                pass
            case "cut" | "part" | "part one way":
                world.inject(fault)

    def _restart(self, world, process):
        self.num_restarting -= 1
        if isinstance(process, FragmentServer):
            world.start(FragmentServer(self, world, process.index))
        else:
            left = max(1, self.num_steps - process.step)
            world.start(Group(self, world, process.number, left))

    # --- what happens -------------------------------------------------------------------------------

    def log_of(self, process):
        """Returns what notes the events of a process for a replay: here nothing does."""
        return NO_LOG

    def adopts_at_boundary(self, process, fragment):
        """False if outer parameters came while the group handed over its values: often if it adopts at once."""
        return not self.adopts_at_once or (process.step + fragment) % 3 != 0

    def next_owner(self, process):
        owner = len(self.processes) + 1
        self.processes[owner] = process
        return owner

    def next_row(self, process, fragment):
        row = self.num_rows[fragment]
        self.num_rows[fragment] += 1
        self.rows_by[fragment, row] = process.owner
        self.own_rows.setdefault((process.owner, fragment), set()).add(row)
        return row

    def note_taken(self, process, fragment, number, rows):
        key = process.owner, fragment, number
        assert key not in self.rows_of, "a number has two pushes"
        self.rows_of[key] = list(rows)

    def note_lost(self, process, fragment, number, is_refused):
        key = process.owner, fragment, number
        if key not in self.rows_of:
            return  # it was returned before
        assert key not in self.named, "a push is lost twice"
        self.named[key] = is_refused
        self.own_rows[process.owner, fragment] -= set(self.rows_of[key])

    def note_dropped(self, process, fragment, rows):
        self.dropped |= {(fragment, row) for row in rows}
        self.own_rows.get((process.owner, fragment), set()).difference_update(rows)

    def check_own_rows(self, process, fragment):
        """A group never loses work of its own that it has not named, unless a server went back that will merge it again."""
        has = rows_in(process.w[fragment]) | self.merged_before.get((process.owner, fragment), set())
        lacking = self.own_rows.get((process.owner, fragment), set()) - has
        assert not lacking, f"{process.name} has lost its own rows {lacking}"

    def note_adopted(self, process, fragment, instance, version, outer):
        rows_in(outer)
        key, ordinal = (process.owner, fragment), self.instances[instance]
        if self.adopted.get(key, ordinal) != ordinal:
            self.merged_before[key] = set(self.merged[key])
        self.adopted[key] = ordinal
        self.merged.setdefault(key, set()).update(rows_in(outer))
        before = self.values.setdefault((fragment, instance, version), outer)
        assert before == outer, f"version {version} has two values"

    def note_created(self, fragment):
        self.num_created[fragment] += 1
        return self.num_created[fragment]

    def note_landing(self, process, fragment, number, version):
        self.landed[process.owner, fragment, number] = version

    def note_started(self, server):
        """A server serves. It may lack pushes that the one before it had."""
        self.instances[server.instance] = len(self.instances)
        before, self.servers[server.index] = self.servers.get(server.index), server
        for fragment, model in ({} if before is None else before.rounds).items():
            has = pushes_of(server.rounds[fragment]) if fragment in server.rounds else set()
            for owner, number in pushes_of(model) - has:
                self.rolled_back[owner, fragment, number] = len(self.instances)
        for fragment, model in server.rounds.items():
            self.values[fragment, server.instance, model.version] = model.theta

    def note_closed(self, server, fragment, version, model):
        rows_in(model.theta)
        key = fragment, server.instance, version + 1
        assert key not in self.values, "a round closes twice"
        self.values[key] = model.theta

    def note_done(self, process):
        assert not any(process.is_broken), f"{process.name} ends with parameters that are not finite"
        self.done[process.number] = process

    # --- what must hold -----------------------------------------------------------------------------

    def is_over(self, world):
        names = map(group, range(self.num_groups))
        return not self.num_restarting and not any(world.processes[name].is_alive for name in names)

    def check(self, world):
        outer = {
            fragment: world.processes[ps(self.server_of(fragment))].rounds.get(fragment)
            for fragment in range(self.num_fragments)
        }
        for fragment, model in outer.items():
            if model is not None and self.done:
                self._check_rows(fragment, model)
        if not self.was_disturbed:
            for process in self.done.values():
                assert process.step >= self.num_steps or self.stops_at is not None
                for fragment, model in outer.items():
                    assert process.w[fragment] == model.theta, f"{process.name} has other parameters"
                    flushes = [is_flush for is_flush, _ in model.history]
                    assert not any(flushes[:-1]), "a flush comes before the last round"
                    is_quick = self.stops_at is None and self.period_s > 0.5 > self.network["slow"] * 5
                    assert not is_quick or len(model.history) >= self.num_steps // self.every // 3, (
                        "few rounds"
                    )

    def _check_rows(self, fragment, model):
        assert replayed(model) == model.theta_float, "the order of arrival has changed a bit"
        landed = {
            (owner, number): version
            for version, pushes in enumerate(model.rounds, 1)
            for _, owner, number, _ in pushes
        }
        rows = rows_in(model.theta) | set().union(*(rows_in(-slot) for slot in model.slots))
        push_of = {row: key for key, some in self.rows_of.items() if key[1] == fragment for row in some}
        for row in range(self.num_rows[fragment]):
            self._check_row(fragment, row, push_of.get(row), row in rows)
        for (owner, each, number), version in self.landed.items():
            if each == fragment and (owner, number) in landed:
                assert landed[owner, number] == version, "a group has logged another version"

    def _check_row(self, fragment, row, key, is_there):
        process = self.processes[self.rows_by[fragment, row]]
        is_named = key in self.named or (fragment, row) in self.dropped
        if is_there:
            assert not is_named or self.num_created[fragment] > 1, f"row {row} is named as lost, and there"
        elif is_named:
            is_lost = key not in self.named or self.named[key] or key in self.rolled_back
            assert is_lost or self.num_created[fragment] > 1, (
                f"row {row} is named as lost, and no server has lost it"
            )
        elif process.exit_code == 0:
            is_later = self.rolled_back.get(key, 0) > self.adopted[process.owner, fragment]
            assert is_later, f"row {row} of {process.name} is missing, and not named"
        else:
            assert key not in self.landed or key in self.rolled_back, (
                f"row {row} of {process.name} is missing, and the server had it"
            )

    def outcome(self, world):
        return "merged" if self.done else "nobody left"
