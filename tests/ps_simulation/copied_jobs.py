"""Jobs whose servers have two copies of each group, without and with snapshots."""

from collections import Counter

from ps_simulation.jobs import Jobs
from ps_simulation.server_task import ServerTask, ps


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

    @property
    def servers_return(self):
        return True

    def check_servers(self, world):
        self.is_lost = self.is_lost or bool(self.coordinator.groups.lost)  # after the last function
        if self.is_lost:
            return
        for view in self.coordinator.groups.views:
            assert view.backup is not None, f"group {view.group} has one copy"
            assert not view.is_joining or world.processes[ps(view.backup)].groups[view.group].rules.is_backup
            for task in view.members:
                copy = world.processes[ps(task)].groups[view.group]
                assert copy.rules.epoch == view.epoch, f"ps {task} has not {view}"
                one, other = copy.store.counters[self.keys[view.group]]
                assert one == other
                self.check_counter(view.group, one)

    def check_lost(self):
        assert self.num_server_faults > 1, f"lost: {self.failures[-1:]}"


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

    def check_lost(self):
        assert self.num_server_faults > 1, f"lost: {self.failures[-1:]}"
