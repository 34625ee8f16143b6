"""Jobs whose servers restart from snapshots: one goes on as old as it is, or all go back together."""

import re

from ps_simulation.jobs import Jobs
from ps_simulation.server_task import ps

RESTARTED = re.compile(r"(ps \d+) restarted from its last snapshot.*: about (\d+) updates")
INCLUDED = re.compile(r"include the updates of the first (\d+)(?:, and some of the next (\d+))?")
UNDONE = re.compile(r"the work of (\d+) scheduled functions that ended since is undone")


class Continued(Jobs):
    """A server that restarts goes on from its snapshot, and the others are unchanged."""

    has_snapshots = True
    server_faults = ("restart",) * 6 + ("lose host", "lose host", "cut", "pause", "part", "part one way")
    server_faults += ("restart without its disk",)
    kinds_of_faults = ("worker",) * 4 + ("server",) * 12 + ("interrupt",) * 2 + ("close",)
    moments = (
        ("settled", 40),
        ("job", 1),
        ("meet_worker", 6),
        ("sent", 40),
        ("snapshot", 8),
        ("restored", 4),
    )

    def __init__(self, seed):
        super().__init__(seed)
        self.lost = {server: set() for server in range(self.num_servers)}
        self.newly_lost = {server: set() for server in range(self.num_servers)}
        self.num_unusable = 0

    def kill(self, world, process, kind):
        had = self.counted_in(process)
        super().kill(world, process, kind)
        index = getattr(process, "index", None)
        if process.name == ps(index):
            self.note_loss(index, had)

    def draw(self):
        self.function_times = self.random.choice(
            [(0.05, 0.2), (0.2, 0.4)]
        )  # so that snapshots come meanwhile

    def inject(self, world, fault):
        self.num_unusable += fault.kind == "restart without its disk"
        super().inject(world, fault)

    def counted_in(self, process):
        """Returns the functions in the counter that a process has."""
        if process.name.startswith("ps") and self.keys[process.index] in process.store.counters:
            return set(process.store.counters[self.keys[process.index]][0])
        return set()

    def note_loss(self, server, had):
        """A process of a server ends that had these functions."""
        snapshot = self.disks[server].newest("")
        if snapshot is None or self.keys[server] not in snapshot.counters:
            self.num_unusable += 1
            return
        lost = had - set(snapshot.counters[self.keys[server]][0])
        self.lost[server] |= lost
        self.newly_lost[server] |= lost

    def note_log(self, coordinator, text):
        found = RESTARTED.search(text)
        if found is not None:
            server, num_lost = int(found[1].removeprefix("ps ")), int(found[2])
            newly, self.newly_lost[server] = self.newly_lost[server], set()
            assert num_lost <= len(newly), f"the log says {num_lost} of {len(newly)}: {text}"
            included = INCLUDED.search(text)
            finished = newly & self.due(server)
            assert not finished or min(finished) >= int(included[1]), f"{sorted(finished)} are lost: {text}"


class Rewinds(Continued):
    """When a server restarts, all go back to snapshots that they took together."""

    on_ps_restart = "rewind"

    def note_log(self, coordinator, text):
        found = UNDONE.search(text)
        if found is None:
            return
        coordinator.world.moment("rewound")
        undone = set()
        for server in range(self.num_servers):
            process = coordinator.world.processes[ps(server)]
            missing = self.due(server) - self.counted_in(process)
            undone |= missing - self.undone
        assert len(undone) <= int(found[1]), f"{sorted(undone)} are undone: {text}"
        self.undone |= undone

    def __init__(self, seed):
        super().__init__(seed)
        self.undone = set()
        self.has_no_way_back = []  # servers that restarted, and lacked the snapshot to which all should go back

    def restart(self, world, process):
        super().restart(world, process)
        if process.name.startswith("ps") and self.coordinator.job is not None:
            epoch = self.coordinator.job_servers.last_epoch
            snapshots = self.disks[process.index].folders.get("", {}).values()
            if epoch not in {each.epoch for each in snapshots if each.epoch}:
                self.has_no_way_back.append(process.name)

    def reasons_of_loss(self):
        yield from super().reasons_of_loss()
        yield from (f"{name} could not go back" for name in self.has_no_way_back)

    def check_counter(self, server, counted):
        self.lost[server] = self.undone
        super().check_counter(server, counted)

    def check_servers(self, world):
        """A function that has finished is on all of its servers, or on none."""
        if self.is_lost:
            return  # some servers have gone back, or none
        super().check_servers(world)
        counted = {server: self.counted(world, server) for server in range(self.num_servers)}
        if any(each is None for each in counted.values()):
            return
        for number, error in self.settled.items():
            servers = self.functions[number].servers
            if error is None and self.functions[number].ends == "adds":
                has = {number in counted[server] for server in servers}
                assert len(has) == 1, f"function {number} is undone on some of the servers"
