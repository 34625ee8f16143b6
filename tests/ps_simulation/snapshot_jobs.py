"""Jobs whose servers restart from snapshots: one goes on as old as it is, or all go back together."""

import math
import re

from ps_simulation.asking_servers import CALL_S
from ps_simulation.coordinator import COORDINATOR
from ps_simulation.integer_store import value_in
from ps_simulation.jobs import SETTLED_S, Jobs
from ps_simulation.server_task import ServerTask, ps
from ps_simulation.snapshot_writing import TICK_S
from ps_simulation.worker_task import worker
from simulation.world import Fault

RESTARTED = re.compile(r"(ps \d+) restarted from its last snapshot.*: about (\d+) updates")
INCLUDED = re.compile(
    r"of (\d+) scheduled functions they include the updates of the first (\d+)(?:, and some of the next (\d+))?"
)
UNDONE = re.compile(
    r"went back to the snapshots of epoch (\d+).*the work of (\d+) scheduled functions that ended since is undone"
)
SLOW_S = 3.0  # a message that is slow, and the functions that workers have, may take so long


class Continued(Jobs):
    """A server that restarts goes on from its snapshot, and the others are unchanged."""

    has_snapshots = True
    settled_s = 5.0
    lastings_s = (*Jobs.lastings_s, 90.0)
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
        ("made", 1),
        ("status is asked", 6),
    )

    def __init__(self, seed):
        super().__init__(seed)
        servers = range(self.num_servers)
        self.lost = {server: set() for server in servers}
        self.had = {server: set() for server in servers}  # functions that its processes had when they ended
        self.accepted = {}  # server: the process that the job uses
        self.known = {
            server: set() for server in servers
        }  # what that had at the last heartbeat, as the job knows
        self.last_status = {}  # server: the process and the functions that it had

    def draw(self):
        self.makes_variables = self.random.random() < 0.3
        self.function_times = self.random.choice(
            [(0.05, 0.2), (0.2, 0.4)]
        )  # so that snapshots come meanwhile

    def faults(self):
        faults = super().faults()
        of_seed = self.random
        if self.makes_at is not None and of_seed.random() < 0.7:  # before a snapshot has a new variable
            for number in range(self.num_servers):
                at = of_seed.uniform(0.0, 2.0)
                faults.append(
                    self.drawn_fault(at, "restart", ps(number), [], of_seed.random(), {"on": "made 1"})
                )
        return faults

    def is_settled(self):
        processes = [self.world.processes[ps(number)] for number in range(self.num_servers)]
        is_lost = list(self.reasons_of_loss())  # after the last function
        return is_lost or self.coordinator.job_servers.instances == [
            each.store.instance for each in processes
        ]

    @property
    def join_s(self):
        """A request to a host that is lost takes a minute: one of the job, then one of each worker, one after another."""
        return 15.0 + CALL_S * (1 + self.num_workers)

    # --- what servers have, and what the job knows of it --------------------------------------------

    def check_servers(self, world):
        for number, instance in enumerate(self.coordinator.job_servers.instances):
            if world.processes[ps(number)].store.instance == instance:
                assert not self.lacks(number), f"the job uses ps {number} without {self.lacks(number)}"
        super().check_servers(world)

    def counted(self, world, server):
        """Returns None too for a process that the job does not use: what it lacks is not in the log yet."""
        instance = world.processes[ps(server)].store.instance
        is_used = self.coordinator.job_servers.instances[server] == instance
        return super().counted(world, server) if is_used else None

    def functions_in(self, server, counters):
        """Returns the functions in the counter of a server, of those counters that a process of it has."""
        return set(value_in(counters, self.keys[server])) if self.keys[server] in counters else set()

    def kill(self, world, process, kind):
        if isinstance(process, ServerTask):
            had = self.functions_in(process.index, process.store.counters)
            self.had[process.index] |= had
            self.check_fresh(process, had)
        super().kill(world, process, kind)

    def check_fresh(self, process, had):
        """A server that ends had written a snapshot not long ago, if nothing disturbed it."""
        longest_s = self.write_s + max(self.interval_s + TICK_S, self.write_s) + 0.5
        now = process.world.now
        if self.disturbances.is_calm([process.name], now - longest_s, now - 1e-6):
            snapshot = self.disks[process.index].newest("")
            kept = set() if snapshot is None else self.functions_in(process.index, snapshot.counters)
            old = [each for each in had - kept if self.settled_at.get(each, now) < now - longest_s]
            assert not old, f"{process.name} has no snapshot of {sorted(old)}"

    def note_answer(self, coordinator, task, op, answer, truth):
        if task.startswith("ps") and op in ("heartbeat", "status"):
            server, instance = int(task.removeprefix("ps ")), answer["instance"]
            has = self.functions_in(server, truth)
            if op == "status":
                self.last_status[server] = instance, has
            elif self.accepted.setdefault(server, coordinator.instances[server]) == instance:
                self.known[server] = has

    # --- what the log says --------------------------------------------------------------------------

    def note_log(self, coordinator, text):
        found = RESTARTED.search(text)
        if found is not None:
            server, num_lost = int(found[1].removeprefix("ps ")), int(found[2])
            instance, has = self.last_status[server]
            lost = self.known[server] - has
            assert num_lost == len(lost), f"the log says {num_lost}, and {sorted(lost)} are lost: {text}"
            process = coordinator.world.processes[ps(server)]
            is_same = process.store.instance == instance
            began_with = self.functions_in(server, process.restored_truth) if is_same else has
            check_included(self, server, began_with, has, text)
            self.lost[server] |= self.had[server] - has
            self.accepted[server], self.known[server] = instance, has


class Rewinds(Continued):
    """When a server restarts, all go back to snapshots that they took together."""

    on_ps_restart = "rewind"
    most_kept_of_task = 25  # requests that were given up
    most_on_server = 100  # with functions that had not ended on the way back, until a later one has
    settled_s = 20.0  # all go back after the last fault

    def __init__(self, seed):
        super().__init__(seed)
        self.undone = set()
        self.last_way_back_at = 0.0
        self.last_death_at = self.last_lost_host_at = -math.inf  # of any process
        self.has_no_way_back = []  # servers that restarted, and lacked the snapshot to which all should go back

    def draw(self):
        super().draw()
        self.num_functions = self.random.choice([10, 25, 60])

    def faults(self):
        """Draws faults while an epoch is taken, soon after it counts, and on the way back to it."""
        of_seed = self.random
        faults = super().faults() if of_seed.random() < 0.3 else []
        for _ in range(of_seed.choice([1, 2, 3, 4])):
            name, most = of_seed.choice(self.moments_of_epochs)
            on = f"{name} {of_seed.randint(self.num_servers if most > 8 else 1, most)}"
            at = of_seed.choice([0.0, 0.002, 0.3, 2.0]) * of_seed.random()
            kind = of_seed.choice(["restart"] * 5 + ["lose host", "pause", "cut", "part", "part one way"])
            lasting = of_seed.choice([0.005, 0.1, 1.5, 12.0]) * of_seed.random()
            target = ps(of_seed.randrange(self.num_servers))
            others = [COORDINATOR, COORDINATOR, worker(of_seed.randrange(self.num_workers))]
            faults.append(self.drawn_fault(at, kind, target, others, lasting, {"on": on}))
        if of_seed.random() < 0.4:
            faults += self.late_request()
        if of_seed.random() < 0.4:  # while another server writes
            for number in of_seed.sample(range(1, 6), 2):
                on = f"snapshot is asked {1 + number * self.num_servers}"
                at = self.write_s * of_seed.uniform(0.1, 0.8)
                faults.append(Fault(at, "restart", (ps(self.num_servers - 1),), 0.01, on=on))
        return faults

    def late_request(self):
        """Draws faults by which a request for a snapshot is given up, and comes late; then servers restart."""
        of_seed = self.random
        on = f"status is asked {of_seed.randint(1, 6 * self.num_servers)}"
        way = (COORDINATOR, ps(of_seed.randrange(self.num_servers)))
        yield Fault(0.0, "part one way", way, of_seed.uniform(5.0, 9.0), on=on)
        for _ in range(2):
            at, target = of_seed.uniform(8.0, 25.0), ps(of_seed.randrange(self.num_servers))
            yield Fault(at, "restart", (target,), of_seed.random(), on=on)

    moments_of_epochs = (
        ("epoch", 5), ("epoch", 5), ("snapshot", 12), ("snapshot is asked", 12), ("restore is asked", 6), ("rewound", 2),
    )  # fmt: skip

    def kill(self, world, process, kind):
        super().kill(world, process, kind)
        self.last_death_at = world.now
        if kind == "lose host":
            self.last_lost_host_at = world.now

    @property
    def longest_function_s(self):
        """If snapshots are due as soon as the last ones are written, functions run for half a second in between."""
        together_s = self.num_servers * (self.write_s + 0.2)
        return super().longest_function_s * (1.0 + together_s / 0.5)

    def restart(self, world, process):
        super().restart(world, process)
        if process.name.startswith("ps") and self.coordinator.job is not None:
            epoch = self.coordinator.job_servers.last_epoch
            if not epoch or self.taken_at(process.index, epoch) is None:
                self.has_no_way_back.append(process.name)

    def taken_at(self, server, epoch):
        """Returns when a server took its snapshot of an epoch; None if it has none."""
        snapshots = self.disks[server].folders.get("", {}).values()
        return max((each.at for each in snapshots if each.epoch == epoch), default=None)

    def reasons_of_loss(self):
        yield from super().reasons_of_loss()
        yield from (f"{name} could not go back" for name in self.has_no_way_back)

    def check_fresh(self, process, had):
        """All servers had taken snapshots together not long ago, if nothing disturbed them."""
        if self.coordinator.job is None or self.has_ended or self.has_no_way_back or self.ended_sessions:
            return  # no snapshots yet, or none any more
        together_s = self.num_servers * (self.write_s + 0.2) + SLOW_S
        longest_s = self.interval_s + 2 * together_s
        now, epoch = process.world.now, self.coordinator.job_servers.last_epoch
        names = [COORDINATOR]
        names += [ps(number) for number in range(self.num_servers)]
        names += [worker(number) for number in range(self.num_workers)]
        if now - self.last_death_at < longest_s + SETTLED_S:
            return  # they may still go back
        if now - self.last_lost_host_at < longest_s + CALL_S * (1 + self.num_workers):
            return  # a worker may wait for the lost host, and no snapshots are taken while a function runs
        if now > longest_s and self.disturbances.is_calm(names, now - longest_s, now - 1e-6):
            at = self.taken_at(process.index, epoch)
            assert at is not None, f"there are no snapshots together at {now}"
            assert at > now - longest_s, f"the last snapshots together are of {at}"

    def note_log(self, coordinator, text):
        found = UNDONE.search(text)
        if found is None:
            return
        coordinator.world.moment("rewound")
        epoch, num_undone = int(found[1]), int(found[2])
        times = [self.taken_at(server, epoch) for server in range(self.num_servers)]
        assert None not in times, f"the snapshots of epoch {epoch} are of {times}"
        since = max(*times, self.last_way_back_at, 0.0)
        ended = [each for each, at in self.settled_at.items() if at > since and self.settled[each] is None]
        assert num_undone == len(ended), f"the log says {num_undone}, and {ended} have ended: {text}"
        undone = set()
        for server in range(self.num_servers):
            undone |= self.due(server) - self.last_status[server][1]
        new = undone - self.undone
        assert new <= set(ended), f"{sorted(new)} are undone, and {ended} have ended since: {text}"
        self.undone |= undone
        self.last_way_back_at = coordinator.world.now

    def check_counter(self, server, counted):
        self.lost[server] = self.undone
        super().check_counter(server, counted)

    def check_servers(self, world):
        """A function that has finished is on all of its servers, or on none."""
        # After the last function nobody may notice: some servers have gone back, or there is no common snapshot yet.
        if self.is_lost or self.coordinator.job._state.is_over:
            return
        super().check_servers(world)
        counted = {server: self.counted(world, server) for server in range(self.num_servers)}
        if any(each is None for each in counted.values()):
            return
        for number, error in self.settled.items():
            servers = self.functions[number].servers
            if error is None and self.functions[number].ends == "adds":
                has = {number in counted[server] for server in servers}
                assert len(has) == 1, f"function {number} is undone on some of the servers"


def check_included(jobs, server, has, may_have, text):
    """Checks what a line says of the functions that the variables of a server include.

    Args:
      jobs: The scenario.
      server: The number of the server, or of the group.
      has: The functions that the snapshot has.
      may_have: Those and the ones that came since.
      text: The line.
    """
    included = INCLUDED.search(text)
    num_scheduled, first = int(included[1]), int(included[2])
    stop = first + int(included[3] or 0)
    assert jobs.coordinator.num_scheduled - 1 <= num_scheduled <= jobs.coordinator.num_scheduled, text
    missing = {each for each in jobs.due(server) - may_have - jobs.lost[server] if each < first}
    assert not missing, f"ps {server} lacks {sorted(missing)}: {text}"
    late = {each for each in has if each >= stop}
    assert not late, f"ps {server} has {sorted(late)}: {text}"
