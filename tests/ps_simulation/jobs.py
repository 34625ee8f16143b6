"""Jobs: a coordinator with the real ``Job``, workers and parameter servers, and callers that schedule functions.

``Jobs`` has what all of these scenarios share: the drawing of functions and faults, and what must hold in every run.
"""

import random
from collections import Counter
from dataclasses import dataclass

from ps_simulation.container_lengths import lengths_of
from ps_simulation.coordinator import COORDINATOR, HELD_UP_S, Coordinator
from ps_simulation.disturbances import Disturbances
from ps_simulation.integer_store import both, value_in
from ps_simulation.names import Names
from ps_simulation.server_task import SILENCE_S, ServerTask, ps
from ps_simulation.snapshot_disk import Disk
from ps_simulation.worker_task import WorkerTask, worker
from replicax._ps.job.closures import MAX_DEATHS_OF_PROVEN
from replicax._ps.job.events_in import Closed, FunctionNeeds
from replicax._ps.job.limits import Limits
from replicax._src.vocabulary.errors import (
    CancelledError,
    InvalidArgumentError,
    ReplicaxError,
    StaleCoordinatorError,
    UnavailableError,
    WaitTimeoutError,
)
from simulation.world import Fault

FUNCTION_S = 0.3  # a function may take so much longer than it computes
SLACK_S = 5.0  # heartbeats are noticed to be missing, and answered again, this much sooner or later
NO_ANSWER_S = 8.0
"""A function may fail after so much time in which its worker, or the coordinator, could not reach a server."""
PATIENCE_S = 110.0
"""A job that still raises so long after the last fault is lost."""
NOT_THERE = UnavailableError, StaleCoordinatorError
SETTLED_S = 80.0
"""A server is used again within this time: a request to a host that is lost may take a minute."""
MOST_PROCESSES = 80
"""The most processes that servers are in a run; a server that goes back becomes another one."""
MOST_LENGTHS = 1500
"""The most items in all containers of a job that has ended, with any number of functions; 200 events take part of it."""


@dataclass(eq=False)
class Function:
    """A scheduled function.

    Attributes:
      ends: "adds" to the counters of ``servers``, or "reads", "raises", "kills" its worker, "cannot travel" at first, or
        is "refused" when it is scheduled.
      signature: The signature of elements that it meets first, for which it must be traced; empty if it has none.
    """

    ends: str = "adds"
    servers: tuple = ()
    programs: tuple = ()
    resources: tuple = ()
    round_key: object = None
    signature: str = ""
    num_bytes: int = 8
    number: int = -1
    is_sent: bool = False

    @property
    def name(self):
        return f"{self.ends} {self.number}"

    @property
    def kind(self):
        return self.programs[0]

    @property
    def error(self):
        return InvalidArgumentError("It cannot run.") if self.ends == "refused" else None


class Jobs:
    """A job that schedules functions and joins, whatever fails.

    Attributes:
      has_snapshots, has_two_copies, on_ps_restart, num_averaged, max_staleness: See ``Setup``. Subclasses set them.
    """

    limit_s = 600.0
    join_s = 15.0  # `join` takes at most so much longer than the functions, after the last fault
    settled_s = 1.0  # after the last fault, and after all functions have ended
    has_snapshots = has_two_copies = False
    on_ps_restart = "continue"
    num_averaged = max_staleness = None
    most_kept, most_kept_of_task = 80, 15  # items in the containers of a job in which nothing is left to do
    most_on_server = 40  # items in its windows and logs
    mild = ("adds",) * 8 + ("reads",)
    wild = ("adds",) * 20 + ("reads", "raises", "cannot travel", "refused")
    program = "add"
    makes_variables = False
    network = {"backoff": 1.0}  # noqa: RUF012 - options of the world, which nobody changes
    server_faults = ("cut", "cut", "pause", "part", "part one way")
    log_entries = 10**6
    lastings_s = (0.005, 0.1, 1.5, 4.0, 12.0, 40.0)
    pauses_s = (0.5, 0.5, 0.5, 0.5, 8.0)

    def __init__(self, seed):
        of_seed = self.random = random.Random(f"{type(self).__name__} {seed}")
        self.num_workers = of_seed.choice([1, 2, 2, 3])
        self.num_servers = of_seed.choice([1, 2, 2, 3])
        self.num_functions = of_seed.choice([3, 10, 25, 60])
        self.function_times = of_seed.choice([(0.0005,), (0.01, 0.03), (0.2, 0.4)])
        self.write_s = of_seed.choice([0.01, 0.3, 2.0])
        self.read_s = of_seed.choice([0.0, 0.3])  # the time to restore a snapshot
        self.interval_s = of_seed.choice([1.0, 3.0, 10.0])
        self.capacity = of_seed.choice([2, 10, 1000])
        self.limits = Limits(reconnect_s=200.0, ps_silence_s=60.0)
        self.names = Names()
        self.making_s = of_seed.choice([0.05, 1.0])  # the time to make a dataset
        self.is_held_up = of_seed.choice(
            [0.0, 0.03, 0.3]
        )  # the share of events for which a thread is held up
        self.draw()
        self.misses_heartbeats = (
            "server" in self.kinds_of_faults
            and not (self.has_snapshots or self.has_two_copies)
            and of_seed.random() < 0.15
        )
        if self.misses_heartbeats:  # so that functions run all the time
            self.function_times, self.num_functions = (2.0, 4.0), 60
        self.kinds = of_seed.choice([self.mild, self.mild, self.mild, self.wild])
        self.computing = random.Random(f"computing {seed}")
        self.functions = []
        self.settled, self.settled_at = {}, {}
        self.has_ended = False
        self.failures = []  # that callers have got
        self.kept = None  # the number of a function whose failure no caller has got yet
        self.gone = []  # tasks that never come back
        self.lost = {}  # server: functions that a process of it had, and the one that took its place has not
        self.num_worker_faults = 0
        self.disturbances = Disturbances()
        self.ended_sessions = []  # tasks that have dropped their data because the coordinator was silent
        self.is_lost = self.is_closed_early = False
        self.keys = [f"counter {number}" for number in range(self.num_servers)]
        self.made_later = [
            [] for _ in self.keys
        ]  # for each server, the keys of variables that were made later
        self.makes_at = of_seed.randrange(self.num_functions) if self.makes_variables else None
        self.disks = [Disk() if self.has_snapshots else None for _ in range(self.num_servers)]
        self.planned = [self.drawn() for _ in range(self.num_functions)]
        self.pause_s = of_seed.choice(
            self.pauses_s
        )  # the longest time between two functions, in which nothing is done
        self.is_read = of_seed.random() < 0.3
        self.adds_by_hand = not self.has_snapshots and of_seed.random() < 0.3

    def draw(self):
        """Draws what a kind of job needs beside."""

    @property
    def servers_return(self):
        return self.has_snapshots

    def drawn(self):
        """Draws a function."""
        of_seed = self.random
        ends = of_seed.choice(self.kinds)
        servers = tuple(range(self.num_servers))
        if of_seed.random() < 0.3:
            servers = (of_seed.choice(servers),)
        programs = (of_seed.choice(["program a", "program b"]),)
        round_key = None
        if self.num_averaged is not None and ends == "adds":
            round_key, servers = "round", tuple(range(self.num_servers))
        num_bytes = of_seed.choice([8, 8, 8, 8, 5000])
        return Function(ends, servers, programs, (), round_key, num_bytes=num_bytes)

    # --- faults -------------------------------------------------------------------------------------

    kinds_of_faults = ("worker",) * 10 + ("server",) * 6 + ("interrupt",) * 3 + ("close",)
    moments = (("settled", 40), ("job", 1), ("meet_worker", 6), ("sent", 40))

    def faults(self):
        of_seed, faults = self.random, []
        if self.misses_heartbeats:
            return [*self.missed_heartbeats(ps(of_seed.randrange(self.num_servers)))]
        horizon = 1.0 + self.num_functions * self.function_times[-1]
        for _ in range(of_seed.choice([0, 1, 2, 3, 5, 8])):
            if of_seed.random() < 0.6:
                name, most = of_seed.choice(self.moments)
                when = {"on": f"{name} {of_seed.randint(1, most)}"}
                at = of_seed.choice([0.0, 0.002, 0.02, 1.0]) * of_seed.random()
            else:
                when, at = {"on": "job 1"}, of_seed.uniform(0.0, 1.5 * horizon)
            faults.append(self.fault(at, when))
        if self.is_read:
            for number in range(1, 9):
                at = of_seed.choice([0.002, 0.005]) * of_seed.random()
                faults.append(Fault(at, "interrupt", (COORDINATOR,), on=f"read {number}"))
        if self.adds_by_hand:
            for number in range(1, 4):
                way = (COORDINATOR, ps(of_seed.randrange(self.num_servers)))
                faults.append(Fault(0.003 * of_seed.random(), "cut", way, on=f"added by hand {number}"))
        return faults

    def missed_heartbeats(self, task):
        """Draws short faults of a task, each of which may cost a heartbeat."""
        of_seed, at = self.random, 0.0
        for _ in range(10):  # for longer than the job would wait for a silent task
            at += of_seed.uniform(8.0, 11.0)
            yield Fault(at, "pause", (task,), of_seed.uniform(2.0, 2.9), on="job 1")

    def fault(self, at, when):
        """Draws one fault."""
        of_seed = self.random
        workers = [worker(number) for number in range(self.num_workers)]
        servers = [ps(number) for number in range(self.num_servers)]
        lasting = of_seed.choice(self.lastings_s) * of_seed.random()
        kind = of_seed.choice(self.kinds_of_faults)
        if kind in ("interrupt", "close"):
            return Fault(at, kind, (COORDINATOR,), **when)
        if kind == "worker":
            kind = of_seed.choice(["restart", "restart", "lose host", "pause", "cut", "part", "part one way"])
            return self.drawn_fault(at, kind, of_seed.choice(workers), [COORDINATOR, *servers], lasting, when)
        kind = of_seed.choice(self.server_faults)
        others = [COORDINATOR, *workers, *servers]
        return self.drawn_fault(at, kind, of_seed.choice(servers), others, lasting, when)

    def drawn_fault(self, at, kind, target, others, lasting, when):
        if kind in (
            "restart",
            "restart without its disk",
            "lose host",
            "pause",
            "end for ever",
            "lose for ever",
        ):
            return Fault(at, kind, (target,), lasting, **when)
        way = [target, self.random.choice([each for each in others if each != target])]
        self.random.shuffle(way)
        return Fault(at, kind, tuple(way), lasting, **when)

    def inject(self, world, fault):
        """Lets a fault happen."""
        process = world.processes.get(fault.targets[0])
        self.num_worker_faults += any(name.startswith("worker") for name in fault.targets)
        is_part = fault.kind.startswith("part")  # it meets the next process too, if this one is gone
        if fault.kind not in ("interrupt", "close") and (process.is_alive or is_part):
            lasting_s = fault.for_s * (1.0 + self.network["backoff"] * is_part)
            self.disturbances.note(world.now, lasting_s, fault.targets)
        match fault.kind:
            case "interrupt":
                world.trace(f"FAULT {fault}")
                world.deliver(process, process.interrupt)
            case "close":
                world.trace(f"FAULT {fault}")
                self.is_closed_early = True
                world.deliver(process, self.close, process)
            case "restart" | "restart without its disk" | "lose host":
                if process.is_alive:
                    kind = "lose host" if fault.kind == "lose host" else "kill"
                    world.trace(f"FAULT {fault}")
                    self.kill(world, process, kind)
                    if fault.kind == "restart without its disk":
                        self.disks[process.index] = Disk()
                    world.last_fault = max(world.last_fault, world.now + fault.for_s)
                    world.at(world.now + max(fault.for_s, 0.001), self.restart, world, process)
            case "end for ever" | "lose for ever":
                if process.is_alive:
                    world.trace(f"FAULT {fault}")
                    self.gone.append(process.name)
                    self.kill(world, process, "kill" if fault.kind == "end for ever" else "lose host")
                    world.last_fault = max(world.last_fault, world.now)
            case _:
                world.inject(fault)

    def kill(self, world, process, kind):
        world.inject(Fault(world.now, kind, (process.name,)))

    def restart(self, world, process):
        """Starts a process in the place of one that has ended."""
        if world.processes[process.name] is process:
            if isinstance(process, WorkerTask):
                world.start(WorkerTask(self, world, process.index))
            else:
                self.start_server(world, process.index)

    # --- the run ------------------------------------------------------------------------------------

    def build(self, world):
        self.world = world
        for number in range(self.num_servers):
            self.start_server(world, number)
        for number in range(self.num_workers):
            world.start(WorkerTask(self, world, number))
        self.coordinator = Coordinator(self, world)
        world.start(self.coordinator)

    def start_server(self, world, number):
        world.start(ServerTask(self, world, number, self.disks[number], self.interval_s))

    def begin_callers(self, coordinator):
        coordinator.run_through(self.caller(coordinator))

    def caller(self, coordinator):
        """The program: it schedules, joins now and then, and closes the coordinator at the end."""
        of_seed = random.Random(f"caller {self.world.seed}")
        for function in self.planned:
            if not (yield from self.tried(coordinator.wait("room"))):
                if self.has_ended:
                    break
                yield 0.05
                continue  # an earlier failure
            if coordinator.num_scheduled == self.makes_at:
                self.makes_at = None
                yield from self.asked(coordinator.make_variable(of_seed.randrange(self.num_servers)))
            coordinator.schedule(function)
            if of_seed.random() < 0.3:
                yield of_seed.choice([0.0, 0.001, 0.05, self.pause_s]) * of_seed.random()
            if self.adds_by_hand and of_seed.random() < 0.2:
                yield from self.asked(coordinator.add_by_hand())
            if self.is_read and of_seed.random() < 0.2:
                for _ in range(3):
                    if (yield from self.asked(coordinator.read())):
                        break
            if of_seed.random() < 0.08:
                limit_s = of_seed.choice([None, 0.01, 1.0])
                yield from self.tried(coordinator.wait("idle", limit_s=limit_s))
        yield from self.joined(coordinator)
        yield from self.ended(coordinator)

    def joined(self, coordinator):
        """Waits until all functions have ended, through all failures. Notes if the job is lost for good."""
        while not self.has_ended:
            began, num_left = self.world.now, coordinator.num_scheduled - len(self.settled)
            left = [each for each in self.functions if each.number not in self.settled]
            num_runs = num_left + (MAX_DEATHS_OF_PROVEN - 1) * sum(each.ends == "kills" for each in left)
            is_done = yield from self.tried(coordinator.wait("idle"))
            self.check_join(began, num_runs)
            if is_done:
                missing = set(range(coordinator.num_scheduled)) - set(self.settled)
                assert not missing, f"join returns, and {sorted(missing)} have not ended"
                assert self.kept is None, f"join returns, and nobody got the failure of function {self.kept}"
                return
            # A function that a worker could not run for minutes may raise an error of its own at last.
            is_unavailable = any(isinstance(each, NOT_THERE) for each in self.failures[-1:])
            if is_unavailable and self.world.now > self.world.last_fault + PATIENCE_S:
                self.is_lost = True
                return
            yield 1.0

    def check_join(self, began, num_runs):
        """`join` has ended. It takes not much longer than so many runs of functions, after the last fault."""
        took_s = self.world.now - max(began, self.world.last_fault)
        most_s = self.join_s + num_runs * self.longest_function_s + self.given_up_s
        assert took_s < most_s, f"join takes {took_s} s after the last fault, for {num_runs} runs"

    @property
    def given_up_s(self):
        """The time after which tasks are given up that never come back."""
        workers = {worker(number) for number in range(self.num_workers)}
        of_workers_s = self.limits.reconnect_s if workers <= set(self.gone) else 0.0
        return of_workers_s + (self.limits.ps_silence_s if set(self.gone) - workers else 0.0)

    @property
    def longest_function_s(self):
        """The longest time that a function may take, with all that goes on beside."""
        return self.function_times[-1] + FUNCTION_S

    def tried(self, waiting):
        """Waits. Returns True if that raised nothing."""
        try:
            yield from waiting
        except WaitTimeoutError:
            return False
        except ReplicaxError as error:
            self.failures.append(error)
            self.kept = None
            self.world.trace(f"  a caller gets {type(error).__name__}: {error}")
            return False
        return True

    def asked(self, asking):
        """Asks the servers. Returns True if that raised nothing: they may be away for a minute, without a failure."""
        try:
            yield from asking
        except ReplicaxError as error:
            self.world.trace(f"  a caller gets no answer: {error}")
            return False
        return True

    def ended(self, coordinator):
        """Ends the run: what is in the counters is read, and the job is closed."""
        yield 1.0
        while (left_s := self.world.last_fault + self.settled_s - self.world.now) > 0.0:
            yield left_s + 0.001
        while not (self.has_ended or self.is_lost or self.is_settled()):
            assert self.world.now < self.world.last_fault + SETTLED_S, "a server that is back is not used"
            yield 1.0
        if not self.has_ended:
            self.check_servers(self.world)
            self.check_kept()
            self.close(coordinator)
        coordinator.end(0)

    def check_kept(self):
        """After all functions the job and the servers keep nothing of them, but for the job's last events."""
        if self.is_lost:
            return
        kept = lengths_of(self.coordinator.job)
        num_seen = kept.pop("ServerState._seen", 0) + kept.pop("ServerState._accepted", 0)
        assert num_seen <= MOST_PROCESSES, f"servers go back again and again: {num_seen} processes"
        num_kept = sum(number for where, number in kept.items() if not where.startswith("EventRecord"))
        most = self.most_kept + self.most_kept_of_task * (self.num_workers + self.num_servers)
        assert num_kept <= most, f"the job keeps {num_kept} items, not {most}: {kept.most_common(12)}"
        for server in range(self.num_servers):
            for each in self.kept_on(self.world.processes[ps(server)]):
                lengths = lengths_of(each)
                assert sum(lengths.values()) <= self.most_on_server, (
                    f"ps {server} keeps {lengths.most_common(8)}"
                )

    def kept_on(self, process):
        """Returns the objects of a server that know of functions."""
        return process.store.rules, process.store.gradients

    def is_settled(self):
        """True if the job uses the processes of the servers that are there, so that nothing more is to come."""
        return True

    def close(self, coordinator):
        if coordinator.job is not None and not self.has_ended:
            self.has_ended = True
            coordinator.give(Closed())

    def is_over(self, world):
        return not self.coordinator.is_alive

    # --- how long things take -----------------------------------------------------------------------

    def function_s(self, function):
        return self.computing.choice(self.function_times)

    def resource_s(self, name):
        return self.making_s

    def resource_fails(self, name, index):
        return False

    def resource_kills(self, name):
        return False

    def writing_s(self):
        """Returns how long a server writes a snapshot."""
        return self.write_s * self.computing.uniform(0.4, 1.0)

    def sleeping_s(self, process):
        """Returns how long a thread of a server gets no processor, which has ordered a message."""
        return 0.0

    def traced(self, number, signature):
        yield 0.05
        function = self.functions[number]
        function.programs = (*function.programs, f"program of {signature}")
        return FunctionNeeds(function.programs, (), function.resources, function.num_bytes)

    # --- what must hold at all times ----------------------------------------------------------------

    def note_request(self, coordinator, ask):
        """The job asks a task."""

    def note_answer(self, coordinator, task, op, answer, truth):
        """The job learns what a task has answered, and the task had these counters then."""

    def note_opened(self, name):
        """The job opens a connection to a worker."""

    def note_scheduled(self, coordinator, function):
        assert len(self.functions) == function.number
        self.functions.append(function)
        coordinator.world.moment("scheduled")

    def note_sent(self, coordinator, name, request):
        coordinator.world.trace(f"  function {request.what} is sent to {name}")
        coordinator.world.moment("sent")
        assert request.what not in self.settled, f"function {request.what} has ended, and is sent to {name}"

    def note_run(self, process, request):
        """A worker begins a function."""

    def note_values(self, process, request, values):
        """A worker has read the counters."""

    def note_killed(self, process):
        """A function kills its worker, which is started again."""
        self.disturbances.note(process.world.now, 0.3, [process.name])
        process.world.at(process.world.now + 0.3, self.restart, process.world, process)

    def note_ran(self, process, request):
        """A worker has run a function."""

    def note_round(self, coordinator, number, closures):
        """A round is being applied."""

    def note_settled(self, coordinator, action):
        assert action.number not in self.settled, f"function {action.number} ends twice"
        assert action.number < coordinator.num_scheduled
        self.settled[action.number] = action.error
        self.settled_at[action.number] = self.world.now
        coordinator.world.trace(f"  function {action.number} ends on {action.worker or 'none'}")
        if action.error is None:
            assert action.answer["number"] == action.number, (
                f"function {action.number} gets the answer of {action.answer['number']}"
            )
        elif not isinstance(action.error, CancelledError) and self.kept is None:
            self.kept = action.number
        coordinator.world.moment("settled")

    def note_log(self, coordinator, text):
        """The job has written a line."""

    def differs(self, group, seq):
        raise AssertionError(f"message {seq} of group {group} has two outcomes")

    # --- at the end ---------------------------------------------------------------------------------

    def check(self, world):
        number = self.coordinator.num_scheduled
        assert set(self.settled) == set(range(number)), (
            f"{set(range(number)) - set(self.settled)} have not ended"
        )
        self.check_errors()
        self.check_failures()
        if self.is_lost:
            self.check_lost()
        if self.coordinator.job is not None:
            lengths = lengths_of(self.coordinator.job)
            assert sum(lengths.values()) < MOST_LENGTHS, f"the job keeps {lengths.most_common(8)}"

    # --- what may be lost ---------------------------------------------------------------------------

    def note_session_ended(self, process):
        """A task has ended the coordinator's session, and has dropped its data: it has heard nothing for too long."""
        if self.has_ended or self.coordinator.has_given_up(process.name):
            return
        start, end = next(reversed(self.disturbances.between(COORDINATOR, process.name)), (0.0, 0.0))
        now = process.world.now
        is_silent = start <= now - SILENCE_S + SLACK_S and end >= now - SLACK_S
        assert is_silent, f"nobody speaks to {process.name}"
        self.ended_sessions.append(process.name)

    def keys_of(self, server):
        """Returns the keys of the variables of a server that have been made."""
        return [*both(self.keys[server]), *self.made_later[server]]

    def reasons_of_loss(self):
        """Yields the reasons that are true at the end, for which functions can never run again."""
        for server in range(self.num_servers):
            if lacks := self.lacks(server):
                yield f"nobody has {lacks}"
        yield from (f"{name} never comes back" for name in self.gone if name.startswith("ps"))
        yield from self.reasons_of_workers()

    def reasons_of_workers(self):
        yield from (f"{name} has ended the session" for name in self.ended_sessions if "worker" in name)
        given_up = [self.coordinator.has_given_up(worker(number)) for number in range(self.num_workers)]
        if all(given_up):
            yield "all workers are given up"

    def lacks(self, server):
        """Returns the keys of the variables of a server that it has lost."""
        counters = self.world.processes[ps(server)].store.counters
        return [key for key in self.keys_of(server) if key not in counters]

    def reasons_of_failure(self):
        """Yields the reasons that were true at some time, for which functions may have failed."""
        yield from self.reasons_of_loss()
        yield from (f"{name} has ended the session" for name in self.ended_sessions)
        yield from self.reasons_of_silence()

    def reasons_of_silence(self):
        servers = [ps(number) for number in range(self.num_servers)]
        limit_s = self.limits.reconnect_s if self.servers_return else NO_ANSWER_S
        for other in (COORDINATOR, *(worker(number) for number in range(self.num_workers))):
            for server in servers:
                if (silent_s := self.disturbances.longest(other, server)) > limit_s - SLACK_S:
                    yield f"{other} could not reach {server} for {silent_s} s"

    def check_lost(self):
        """The job may be lost only for a reason that is true."""
        assert list(self.reasons_of_loss()), f"lost: {self.failures[-1:]}"

    def check_errors(self):
        """Functions fail only for reasons that are true."""
        for number, error in self.settled.items():
            function, text = self.functions[number], str(error)
            if error is None:
                assert function.ends not in ("raises", "refused", "kills"), f"{function.name} finishes"
            elif isinstance(error, CancelledError):
                assert self.failures or self.has_ended
            elif "probably kills workers" in text:
                assert self.num_worker_faults >= 3 or function.ends == "kills", text
            elif isinstance(error, NOT_THERE):
                assert list(self.reasons_of_failure()), text
            else:
                assert function.ends in ("raises", "refused", "cannot travel"), f"{function.name}: {error!r}"

    def check_failures(self):
        """Callers get errors only for reasons that are true."""
        for error in self.failures:
            if isinstance(error, NOT_THERE):
                assert list(self.reasons_of_failure()), f"a caller gets {error!r}"

    # --- what the servers have ----------------------------------------------------------------------

    def check_servers(self, world):
        """Checks the counters once all is done."""
        for server in range(self.num_servers):
            counted = self.counted(world, server)
            if counted is not None:
                self.check_counter(server, counted)

    def counted(self, world, server):
        """Returns the functions in the counter of a server; None if nobody has it now."""
        process = world.processes[ps(server)]
        if not process.is_alive or self.keys[server] not in process.store.counters:
            return None
        return value_in(process.store.counters, self.keys[server])

    def check_counter(self, server, counted):
        twice = [number for number, times in Counter(counted).items() if times > 1]
        assert not twice, f"ps {server} has {twice} more than once"
        lost = self.lost.get(server, set())
        missing = self.due(server) - set(counted) - lost
        assert not missing, f"ps {server} lacks functions {sorted(missing)}"
        strangers = [number for number in counted if self.functions[number].ends in ("reads", "refused")]
        assert not strangers, f"ps {server} has {strangers}"

    def due(self, server):
        """Returns the functions that have finished and add to the counter of a server."""
        finished = (self.functions[number] for number, error in self.settled.items() if error is None)
        return {each.number for each in finished if each.ends == "adds" and server in each.servers}

    def outcome(self, world):
        if self.is_lost or self.is_closed_early:
            return "lost" if self.is_lost else "closed"
        failed = [error for error in self.settled.values() if error is not None]
        return "finished" if not failed else "some failed"


class PlainWorkers(Jobs):
    """Servers that do not die, and workers that do."""

    def draw(self):
        # By worker: the functions that have ended there, at least and at most, and that run there.
        self.clocks, self.most, self.in_flight = {}, {}, Counter()
        self.is_cut_often = self.random.random() < 0.4
        if self.is_cut_often:
            self.is_held_up = 0.3
        if self.random.random() < 0.3:
            self.max_staleness = self.random.choice([0, 1, 5])
        if self.random.random() < 0.2:
            self.wild = (*self.wild, "kills")
        if self.random.random() < 0.3:
            self.limits = Limits(reconnect_s=15.0, ps_silence_s=60.0)

    def note_sent(self, coordinator, name, request):
        """With ``max_staleness`` no worker is further ahead of the others, as long as all run without a fault."""
        super().note_sent(coordinator, name, request)
        self.most.setdefault(name, min(self.most.values(), default=0))
        ahead = self.clocks[name] + self.in_flight[name] - min(self.most.values())
        if self.max_staleness is not None and self.kinds is self.mild and not self.disturbances.has_any:
            assert ahead <= self.max_staleness, f"{name} is {ahead} functions ahead, of {self.clocks}"
        self.in_flight[name] += 1

    def note_opened(self, name):
        self.clocks.setdefault(name, min(self.clocks.values(), default=0))

    def note_settled(self, coordinator, action):
        super().note_settled(coordinator, action)
        if action.worker in self.clocks:
            self.clocks[action.worker] += 1
            self.most[action.worker] += 1
            self.in_flight[action.worker] -= 1

    def faults(self):
        faults = super().faults()
        of_seed = self.random
        if self.is_cut_often and not self.misses_heartbeats:
            for _ in range(6):
                at, on = 0.003 * of_seed.random(), f"answers come {of_seed.randint(1, self.num_functions)}"
                way = (COORDINATOR, worker(of_seed.randrange(self.num_workers)))
                faults.append(Fault(at, "cut", way, on=on))
        if of_seed.random() < 0.3 and not self.misses_heartbeats:
            for number in range(self.num_workers):
                if of_seed.random() < 0.7:
                    kind, at = of_seed.choice(["end for ever", "lose for ever"]), of_seed.uniform(0.0, 5.0)
                    faults.append(Fault(at, kind, (worker(number),), on="job 1"))
        if of_seed.random() < 0.5:  # before a caller's thread, which is held up, hears of a failure
            for number in range(1, 5):
                at = 0.3 * HELD_UP_S * of_seed.random()
                faults.append(Fault(at, "interrupt", (COORDINATOR,), on=f"failure waits {number}"))
        return faults


class LostServers(Jobs):
    """Servers without snapshots and copies, some of which end, or are silent for too long. The job is lost then."""

    kinds_of_faults = ("server",) * 3 + ("worker",)
    server_faults = ("restart", "end for ever", "lose for ever", "part", "pause", "cut")
    moments = (("settled", 20), ("sent", 20))

    def draw(self):
        self.function_times = (0.2, 3.0)
        self.num_functions = self.random.choice([10, 25])

    def drawn_fault(self, at, kind, target, others, lasting, when):
        if kind in ("part", "pause") and target.startswith("ps"):
            lasting = self.random.choice([1.0, 30.0, 100.0]) * self.random.random()
        return super().drawn_fault(at, kind, target, others, lasting, when)
