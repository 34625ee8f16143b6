"""Jobs whose servers have two copies of each group, without and with snapshots."""

import random
import re

from ps_simulation.asking_servers import CALL_S
from ps_simulation.coordinator import COORDINATOR
from ps_simulation.integer_store import value_in
from ps_simulation.jobs import SLACK_S, Jobs
from ps_simulation.server_task import SILENCE_S, ServerTask, ps
from ps_simulation.snapshot_jobs import INCLUDED, SLOW_S, check_included
from ps_simulation.snapshot_writing import TICK_S
from ps_simulation.worker_task import worker
from replicax._ps.store.group_rules import Partner
from replicax._ps.store.log import Position
from simulation.world import Fault

WAITS = re.compile(r"Lost ps .*, which had the variables of ps (\d+)\. Waiting")
RESUMES = re.compile(
    r"The variables of ps (\d+) resume from the newest snapshot, on ps (\d+).*: about (\d+) acknowledged updates"
)
DETECTION_S = 8.0
"""The loss of a server is noticed, and the other one has its role, within this time."""
PARTNER_S = 55.0
"""A group that has lost both servers resumes with one of them only after a longer time."""
COPIED_S = 8.0
"""A server that is back has a copy of each of its groups again within this time."""


class TwoCopies(Jobs):
    """Each group has a primary and a backup. What was acknowledged is not lost."""

    has_two_copies = True
    settled_s = 20.0
    lastings_s = (*Jobs.lastings_s, 90.0)
    most_kept_of_task = 60  # views, and positions of each copy
    server_faults = ("restart", "restart", "restart", "lose host", "cut", "pause", "part", "part one way")
    kinds_of_faults = ("worker",) * 4 + ("server",) * 12 + ("interrupt",) * 2 + ("close",)
    moments = (
        ("settled", 40), ("job", 1), ("meet_worker", 6), ("sent", 40), ("synced", 6), ("use_primaries", 4),
        ("group is asked", 12), ("group is asked", 12), ("state", 6),
    )  # fmt: skip

    def draw(self):
        self.num_servers = self.random.choice([2, 2, 3])
        self.log_entries = self.random.choice([3, 20, 10**6])

    def __init__(self, seed):
        super().__init__(seed)
        self.memory_losses = []  # when it had its data last, at least and at most, and which server
        self.is_forgotten = not self.has_snapshots and random.Random(f"forgotten {seed}").random() < 0.1
        if self.is_forgotten:  # so that functions run all the time
            self.function_times = (2.0, 4.0)
            self.planned = [self.drawn() for _ in range(28 * self.num_workers)]

    def faults(self):
        if self.is_forgotten:
            return [*self.forgotten(self.random.randrange(self.num_servers))]
        faults = super().faults()
        of_seed = self.random
        if of_seed.random() < 0.4:
            faults += self.isolated(ps(of_seed.randrange(self.num_servers)))
        if of_seed.random() < 0.4:  # servers miss views
            for number in of_seed.sample(range(1, 13), 4):
                for server in range(self.num_servers):
                    at = 0.001 * of_seed.random()
                    faults.append(Fault(at, "cut", (COORDINATOR, ps(server)), on=f"group is asked {number}"))
        return faults

    def forgotten(self, server):
        """Draws faults by which a server ends the session, and workers that cannot reach the other copies ask it."""
        of_seed = self.random
        lasting_s = SILENCE_S + of_seed.uniform(8.0, 12.0)
        kind = of_seed.choice(["part", "part one way"])
        yield Fault(0.1 * of_seed.random(), kind, (COORDINATOR, ps(server)), lasting_s, on="job 1")
        for number in range(self.num_workers):
            for other in {(server - 1) % self.num_servers, (server + 1) % self.num_servers}:
                at = SILENCE_S + of_seed.uniform(3.0, 7.0)
                yield Fault(at, "cut", (worker(number), ps(other)), on="job 1")

    def isolated(self, task):
        """Draws faults by which a server reaches neither the coordinator nor other servers, but perhaps workers."""
        of_seed = self.random
        on, at = f"settled {of_seed.randint(1, 20)}", 0.1 * of_seed.random()
        lasting_s = of_seed.choice([10.0, 10.0, 90.0]) * of_seed.uniform(0.5, 1.0)
        for other in (COORDINATOR, *map(ps, range(self.num_servers))):
            if other != task:
                yield Fault(at, "part", (task, other), lasting_s, on=on)
                yield Fault(at, "cut", (task, other), on=on)

    @property
    def servers_return(self):
        return True

    def kill(self, world, process, kind):
        if isinstance(process, ServerTask):
            self.memory_losses.append((world.now, world.now, process.name))
        super().kill(world, process, kind)

    def note_session_ended(self, process):
        """A server is of no use from the moment at which it falls silent, and drops its data a minute later."""
        super().note_session_ended(process)
        if isinstance(process, ServerTask):
            start, _ = next(reversed(self.disturbances.between(COORDINATOR, process.name)), (0.0, 0.0))
            silent_at = process.world.now - SILENCE_S + SLACK_S
            self.memory_losses.append((min(start, silent_at), silent_at, process.name))

    def note_settled(self, coordinator, action):
        """A function that has finished is on both servers of its groups, if these are in sync."""
        super().note_settled(coordinator, action)
        function = self.functions[action.number]
        if action.error is None and function.ends == "adds":
            for group in function.servers:
                self.check_copies(coordinator.groups.views[group], {action.number})

    def note_log(self, coordinator, text):
        if "No acknowledged update is lost" in text:
            for view in coordinator.groups.views:
                self.check_copies(view, self.due(view.group) - self.lost.get(view.group, set()))

    def check_copies(self, view, functions):
        """The servers of a view that are alive and have taken it have these functions, but for one that joins."""
        primary = self.copy_in(view, view.primary)
        if primary is None or not primary.rules.is_primary:
            return
        copies = [primary]
        if view.backup is not None and primary.rules.described()["backup"] == Partner.IN_SYNC:
            copies.append(self.copy_in(view, view.backup))
        for copy in filter(None, copies):
            missing = functions - set(value_in(copy.store.counters, self.keys[view.group]))
            assert not missing, f"{copy.server.name} lacks {sorted(missing)} of group {view.group}"

    def copy_in(self, view, task):
        """Returns a server's copy of a group; None if it is gone or has not taken the view."""
        process = self.world.processes[ps(task)]
        copy = process.groups.get(view.group)
        return copy if copy is not None and process.is_alive and copy.rules.epoch == view.epoch else None

    def lacks(self, group):
        """Returns the keys of a group that none of its two servers has, in memory or from a snapshot."""
        keys = set(self.keys_of(group))
        for member in self.coordinator.groups.members(group):
            copy = self.world.processes[ps(member)].groups.get(group)
            if copy is not None and keys <= set(copy.store.counters):
                return []
        return sorted(keys)

    def is_excused(self, group):
        """True if a server of a group lost its memory, and the other one had been disturbed or was soon, with no time
        between in which nothing was disturbed and a second copy could be made.
        """
        members = {ps(member) for member in self.coordinator.groups.members(group)}
        periods = [*self.disturbances.periods({COORDINATOR, *members}, COPIED_S)]
        for first, last, name in self.memory_losses:
            if name in members:
                (other,) = members - {name}
                for start, end, disturbed in periods:
                    if other in disturbed and start - DETECTION_S <= last and first <= end + COPIED_S:
                        return True
        return False

    def reasons_of_loss(self):
        groups = self.coordinator.groups
        if groups.lost and all(self.is_excused(group) for group in groups.lost):
            yield f"both servers of {groups.lost} were lost together"
        yield from self.reasons_of_workers()

    def reasons_of_failure(self):
        if any(self.is_excused(group) for group in range(self.num_servers)):
            yield "both servers of a group were lost together"
        yield from self.reasons_of_loss()
        yield from self.reasons_of_silence()

    def check_servers(self, world):
        if self.coordinator.groups.lost or any(map(self.lacks, range(self.num_servers))):
            self.is_lost = True  # after the last function
        for view in self.coordinator.groups.views:
            if self.is_lost:
                self.check_served(view)
                continue
            assert view.backup is not None, f"group {view.group} has one copy"
            assert not view.is_joining or world.processes[ps(view.backup)].groups[view.group].rules.is_backup
            for task in view.members:
                copy = world.processes[ps(task)].groups[view.group]
                assert copy.rules.epoch == view.epoch, f"ps {task} has not {view}"
                self.check_counter(view.group, value_in(copy.store.counters, self.keys[view.group]))

    def kept_on(self, process):
        for group in process.groups.values():
            yield from (group.store.rules, group.store.gradients, group.copy)

    def check_served(self, view):
        """A group that is not lost has all that was acknowledged, whatever became of the others."""
        copy = self.world.processes[ps(view.primary)].groups.get(view.group)
        if view.group not in self.coordinator.groups.lost and copy is not None and copy.rules.is_primary:
            self.check_counter(view.group, value_in(copy.store.counters, self.keys[view.group]))


class BothLost(TwoCopies):
    """Two copies, and snapshots for the case that both servers of a group are lost."""

    has_snapshots = True
    server_faults = (*TwoCopies.server_faults, "restart without its disk")

    def __init__(self, seed):
        super().__init__(seed)
        self.lost = {server: set() for server in range(self.num_servers)}
        self.had = {group: set() for group in range(self.num_servers)}  # functions in copies that are gone
        # What the primary had when the job heard of it last: at least, and at most.
        self.known = {group: (set(), set()) for group in range(self.num_servers)}
        self.were_lost = set()  # groups of which both servers were lost once
        self.lacked = set()  # groups that no server had at some time while both of its servers answered
        self.lost_at = {}  # group: when both of its servers were lost
        self.lost_in = {}  # group: the epoch in which both of its servers were lost
        self.resuming = (
            set()
        )  # groups that have a new primary, and of which the log does not say yet what is lost
        drawn = random.Random(f"both lost {seed}").random()
        self.dies_writing, self.dies_chosen = drawn < 0.15, drawn > 0.9
        if self.dies_writing or self.dies_chosen:  # so that snapshots come meanwhile, or none
            self.interval_s = 1.0 if self.dies_writing else 30.0
            self.planned = [self.drawn() for _ in range(40)]

    def draw(self):
        super().draw()
        self.dies_sending = self.random.random() < 0.3
        if self.dies_sending:
            self.log_entries, self.interval_s = 3, 10.0
        self.makes_variables = self.random.random() < 0.3
        self.function_times = self.random.choice(
            [(0.05, 0.2), (0.2, 0.4)]
        )  # so that snapshots come meanwhile

    def faults(self):
        if self.dies_writing:
            return [*self.half_written()]
        if self.dies_chosen:
            return [*self.chosen()]
        faults = super().faults()
        of_seed = self.random
        if of_seed.random() < 0.7:  # both servers of a group, one after the other
            first = of_seed.randrange(self.num_servers)
            when = {"on": f"snapshot {of_seed.randint(2 * self.num_servers, 4 * self.num_servers)}"}
            at = 0.0
            for number in (first, (first + 1) % self.num_servers):
                at += of_seed.choice([0.0, 0.0, 0.01, 0.5, 3.0]) * of_seed.random()
                faults.append(self.drawn_fault(at, "restart", ps(number), [], 8.0 * of_seed.random(), when))
        if self.dies_sending:  # a server dies while it sends its state to the other one
            one, other = of_seed.sample(range(self.num_servers), 2)
            faults.append(Fault(0.0, "cut", (ps(one), ps(other)), on=f"settled {of_seed.randint(5, 15)}"))
            for server in (one, other)[: of_seed.randint(1, 2)]:
                at = 0.004 * of_seed.random()
                faults.append(Fault(at, "restart", (ps(server),), of_seed.random(), on="state 1"))
        return faults

    def half_written(self):
        """Draws faults by which both servers of a group end when one has written a snapshot, and perhaps the other one
        has not. That one comes back first.
        """
        of_seed, group = self.random, self.random.randrange(self.num_servers)
        servers = [ps(group), ps((group + 1) % self.num_servers)]
        of_seed.shuffle(servers)
        on = f"group {group} is written by {servers[0]} {of_seed.randint(2, 4)}"
        for server, least_s in zip(servers, (6.0, 2.0), strict=True):
            yield Fault(0.0, "restart", (server,), least_s * of_seed.uniform(1.0, 1.5), on=on)
        if of_seed.random() < 0.5:  # again, before a heartbeat
            for server in servers:
                yield Fault(0.1, "restart", (server,), of_seed.uniform(1.0, 3.0), on="resumed 1")

    def chosen(self):
        """Draws faults by which an old copy in memory is the newest of a group, and its server restarts just then."""
        of_seed, primary = self.random, self.random.randrange(self.num_servers)
        servers = (ps(primary), ps((primary + 1) % self.num_servers))
        on = f"settled {of_seed.randint(5, 10)}"
        yield Fault(0.0, "part", servers, 20.0, on=on)
        yield Fault(0.0, "cut", servers, on=on)
        at = of_seed.uniform(3.0, 5.0)
        yield Fault(at, "restart", servers[:1], of_seed.uniform(2.0, 3.0), on=on)
        yield Fault(0.0, "restart", servers[1:], on="status is asked 1")

    def reasons_of_loss(self):
        for group in range(self.num_servers):
            if self.lacks(group) or group in self.lacked:
                yield f"no server has group {group}, in memory or from a snapshot"
        yield from self.reasons_of_workers()

    def note_request(self, coordinator, ask):
        for group in self.lost_in.keys() - set(coordinator.groups.lost):
            if coordinator.groups.views[group].since is not None:
                self.resuming.add(group)
            elif group not in self.resuming:
                del self.lost_in[group]  # its primary was silent, and is back with all that it had

    def note_sent(self, coordinator, name, request):
        super().note_sent(coordinator, name, request)
        lost = coordinator.groups.lost
        assert not lost, f"function {request.what} is sent to {name}, and the groups {lost} have no server"

    def reasons_of_failure(self):
        yield from self.reasons_of_loss()
        yield from Jobs.reasons_of_failure(self)

    @property
    def join_s(self):
        """A primary that comes back is reached on new connections, once the requests to its lost host have ended."""
        return super().join_s + CALL_S * (1 + self.num_workers)

    # --- what servers have, and what the job knows of it --------------------------------------------

    def functions_in(self, group, counters):
        """Returns the functions in the counter of a group, of those counters that a copy has."""
        return set(value_in(counters, self.keys[group])) if self.keys[group] in counters else set()

    def note_session_ended(self, process):
        """A server that drops its data has lost it, as if it had been killed."""
        super().note_session_ended(process)
        if isinstance(process, ServerTask):
            for number, group in process.groups.items():
                self.had[number] |= self.functions_in(number, group.store.counters)

    def kill(self, world, process, kind):
        if isinstance(process, ServerTask):
            for number, group in process.groups.items():
                had = self.functions_in(number, group.store.counters)
                self.had[number] |= had
                self.check_fresh(process, number, group, had)
        super().kill(world, process, kind)

    def check_fresh(self, process, number, group, had):
        """The servers had written a snapshot of each group not long before one ends, if nothing disturbed them."""
        longest_s = 2 * self.write_s + max(self.interval_s + TICK_S, 2 * self.write_s) + SLOW_S
        now = process.world.now
        near = [COORDINATOR, *(ps(member) for member in range(self.num_servers))]
        if number in self.lost_in:
            return  # it has no primary, which would order snapshots
        if now > longest_s and self.disturbances.is_calm(near, now - longest_s, now - 1e-6):
            kept = set()  # on one of the disks: a backup that has joined writes none before the next change
            for member in self.coordinator.groups.members(number):
                snapshot = self.disks[member].newest(f"group {number}")
                kept |= set() if snapshot is None else self.functions_in(number, snapshot.counters)
            old = [each for each in had - kept if self.settled_at.get(each, now) < now - longest_s]
            assert not old, f"there is no snapshot of {sorted(old)} in group {number}"

    def note_answer(self, coordinator, task, op, answer, truth):
        if op != "heartbeat" or not task.startswith("ps"):
            return
        self.lacked |= {group for group in coordinator.groups.lost if self.lacks(group)}
        for group, counters in truth.items():
            view = coordinator.groups.views[group]
            part = answer["statistics"].get("groups", {}).get(str(group), {})
            is_primary = ps(view.primary) == task and part.get("epoch") == view.epoch
            is_waited_for = (
                group in coordinator.groups.lost or self.lost_in.get(group, view.epoch) != view.epoch
            )
            if is_primary and not is_waited_for:
                self.known[group] = (self.functions_in(group, counters),) * 2

    def check_served(self, view):
        if view.group not in self.lost_in:  # otherwise the log does not say yet what is lost
            super().check_served(view)

    def check_copies(self, view, functions):
        if view.group in self.were_lost:  # an answer may come after the server that gave it is gone
            functions = functions - self.had[view.group]
        super().check_copies(view, functions)

    def check_newest(self, group, task, has, at):
        """A group resumes from the newer of its snapshots, if both servers came back soon."""
        (other,) = {*self.coordinator.groups.members(group)} - {task}
        process, snapshot = self.world.processes[ps(other)], self.disks[other].newest(f"group {group}")
        if process.is_alive and process.began_at < self.lost_at[group]:
            return  # it may have dropped its data, and restores a snapshot only when it restarts
        if snapshot is not None and self.world.now - self.lost_at[group] < PARTNER_S:
            more = self.functions_in(group, snapshot.counters) - has - self.lost[group]
            if (
                Position(*snapshot.position) < at
            ):  # of a primary that was replaced: what it did at last is not kept
                more = {each for each in more if self.settled_at.get(each, self.world.now) < snapshot.at}
            assert not more, f"group {group} resumes without {sorted(more)}, which ps {other} has"

    # --- what the log says --------------------------------------------------------------------------

    def note_log(self, coordinator, text):
        super().note_log(coordinator, text)
        if (found := WAITS.search(text)) is not None:
            self.were_lost.add(int(found[1]))
            self.lost_at[int(found[1])] = self.world.now
            self.lost_in[int(found[1])] = coordinator.groups.views[int(found[1])].epoch
        if (found := RESUMES.search(text)) is None:
            return
        coordinator.world.moment("resumed")
        group, task, num_lost = int(found[1]), int(found[2]), int(found[3])
        process = coordinator.world.processes[ps(task)]
        copy = process.groups.get(group)
        if copy is None or not copy.rules.epoch:  # the process that resumed is gone again
            self.known[group] = set(), self.had[group]
        else:
            has = self.functions_in(group, copy.store.counters)
            began_with = self.functions_in(group, process.restored_truth.get(group, {}))
            least, most = self.known[group]
            # The log compares counts: what a replaced primary has done in vain hides as many of those that are lost.
            least, most = max(len(least) - len(has), 0), len(most - began_with)
            assert least <= num_lost <= most, f"the log says {num_lost}, not {least} to {most}: {text}"
            if INCLUDED.search(text):
                check_included(self, group, began_with, has, text)
            self.check_newest(group, task, has, copy.rules.position)
            self.lost[group] |= self.had[group] - has
            self.known[group] = began_with, has
        self.lost_in.pop(group, None)
        self.resuming.discard(group)
