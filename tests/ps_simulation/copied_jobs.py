"""Jobs whose servers have two copies of each group, without and with snapshots."""

from collections import Counter

from ps_simulation.coordinator import COORDINATOR
from ps_simulation.jobs import Jobs
from ps_simulation.server_task import ServerTask, ps

DETECTION_S = 8.0
"""The loss of a server is noticed, and the other one has its role, within this time."""
COPIED_S = 8.0
"""A server that is back has a copy of each of its groups again within this time."""


class TwoCopies(Jobs):
    """Each group has a primary and a backup. What was acknowledged is not lost."""

    has_two_copies = True
    settled_s = 20.0
    server_faults = ("restart", "restart", "restart", "lose host", "cut", "pause", "part", "part one way")
    kinds_of_faults = ("worker",) * 4 + ("server",) * 12 + ("interrupt",) * 2 + ("close",)
    moments = (
        ("settled", 40), ("job", 1), ("meet_worker", 6), ("sent", 40), ("synced", 6), ("use_primaries", 4),
    )  # fmt: skip

    def draw(self):
        self.num_servers = self.random.choice([2, 2, 3])
        self.log_entries = self.random.choice([3, 20, 10**6])

    def __init__(self, seed):
        super().__init__(seed)
        self.memory_losses = []  # when, which server

    @property
    def servers_return(self):
        return True

    def kill(self, world, process, kind):
        if isinstance(process, ServerTask):
            self.memory_losses.append((world.now, process.name))
        super().kill(world, process, kind)

    def note_session_ended(self, process):
        super().note_session_ended(process)
        if isinstance(process, ServerTask):
            self.memory_losses.append((process.world.now, process.name))

    def is_excused(self, group):
        """True if both servers of a group were disturbed in so short a time that no second copy could be made between,
        and one of them lost its memory.
        """
        members = {ps(member) for member in self.coordinator.groups.members(group)}
        for at, name in self.memory_losses:
            if name in members:
                (other,) = members - {name}
                near = {COORDINATOR, *members}
                for start, end, targets in self.disturbances.of(other):
                    if targets <= near and start - DETECTION_S <= at <= end + COPIED_S:
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
        yield from super().reasons_of_failure()

    def check_servers(self, world):
        self.is_lost = self.is_lost or bool(self.coordinator.groups.lost)  # after the last function
        for view in self.coordinator.groups.views:
            if self.is_lost:
                self.check_served(view)
                continue
            assert view.backup is not None, f"group {view.group} has one copy"
            assert not view.is_joining or world.processes[ps(view.backup)].groups[view.group].rules.is_backup
            for task in view.members:
                copy = world.processes[ps(task)].groups[view.group]
                assert copy.rules.epoch == view.epoch, f"ps {task} has not {view}"
                one, other = copy.store.counters[self.keys[view.group]]
                assert one == other
                self.check_counter(view.group, one)

    def check_served(self, view):
        """A group that is not lost has all that was acknowledged, whatever became of the others."""
        copy = self.world.processes[ps(view.primary)].groups.get(view.group)
        if view.group not in self.coordinator.groups.lost and copy is not None and copy.rules.is_primary:
            self.check_counter(view.group, copy.store.counters[self.keys[view.group]][0])


class BothLost(TwoCopies):
    """Two copies, and snapshots for the case that both servers of a group are lost."""

    has_snapshots = True
    server_faults = (*TwoCopies.server_faults, "restart without its disk")

    def __init__(self, seed):
        super().__init__(seed)
        self.lost = {server: set() for server in range(self.num_servers)}
        self.had = {server: Counter() for server in range(self.num_servers)}

    def draw(self):
        super().draw()
        self.function_times = self.random.choice(
            [(0.05, 0.2), (0.2, 0.4)]
        )  # so that snapshots come meanwhile

    def faults(self):
        faults = super().faults()
        of_seed = self.random
        if of_seed.random() < 0.7:  # both servers of a group, one after the other
            first = of_seed.randrange(self.num_servers)
            when = {"on": f"snapshot {of_seed.randint(2 * self.num_servers, 4 * self.num_servers)}"}
            for number in (first, (first + 1) % self.num_servers):
                at = of_seed.choice([0.0, 0.01, 0.5, 3.0]) * of_seed.random()
                faults.append(self.drawn_fault(at, "restart", ps(number), [], 8.0 * of_seed.random(), when))
        return faults

    def lacks(self, server):
        """Returns the keys of a group that none of its two servers has, in memory or from a snapshot."""
        keys = set(self.keys_of(server))
        for member in self.coordinator.groups.members(server):
            copy = self.world.processes[ps(member)].groups.get(server)
            if copy is not None and keys <= set(copy.store.counters):
                return []
        return sorted(keys)

    def reasons_of_loss(self):
        for group in range(self.num_servers):
            if self.lacks(group):
                yield f"no server has group {group}, in memory or from a snapshot"
        yield from self.reasons_of_workers()

    def reasons_of_failure(self):
        yield from self.reasons_of_loss()
        yield from Jobs.reasons_of_failure(self)

    def kill(self, world, process, kind):
        if isinstance(process, ServerTask):
            for number, group in process.groups.items():
                if self.keys[number] in group.store.counters:
                    self.had[number].update(group.store.counters[self.keys[number]][0])
        super().kill(world, process, kind)

    def note_log(self, coordinator, text):
        if "resume from the newest snapshot" in text:
            coordinator.world.moment("resumed")
            group = int(text.split("The variables of ps ")[1].split()[0])
            view = coordinator.groups.views[group]
            copy = coordinator.world.processes[ps(view.primary)].groups.get(group)
            if copy is not None and self.keys[group] in copy.store.counters:
                has = set(copy.store.counters[self.keys[group]][0])
                self.lost[group] |= set(self.had[group]) - has
