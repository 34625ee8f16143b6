"""``Coordinator``: the owner of a real ``Job`` in the simulation: it carries out the actions, and turns what comes into events."""

from collections import deque

from ps_simulation.asking_servers import AskingServers
from ps_simulation.integer_store import both, by_hand, value_in
from ps_simulation.routines import Reply, Routine
from ps_simulation.server_task import ps
from ps_simulation.task_process import Link, TaskProcess
from ps_simulation.worker_task import FUNCTIONS
from replicax._ps.client.groups import Groups
from replicax._ps.job import actions_out as actions
from replicax._ps.job import events_in as events
from replicax._ps.job.job_servers import JobServers
from replicax._ps.job.machine import Job
from replicax._ps.job.setup import Setup
from replicax._ps.store.group_rules import View
from replicax._src.vocabulary.errors import MessageError, ReplicaxError, WaitTimeoutError

COORDINATOR = "coordinator"
INCARNATION = "session"
MOST_AT_ONCE = 2_000  # events at one moment: more are a job that does not come to rest
HELLO_S = 5.0
LAGS_S = (0.0, 0.0, 0.0003, 0.002)
HELD_UP_S = 0.05  # a thread that reads, or a caller's, may get no processor for so long
MOMENTS = ("status", "hello", "restore", "snapshot", "group")  # requests after which faults may come
MEETING_S = (0.0, 0.002, 0.02)


def _needs_data(server, view):
    """True if a view makes a server a member that has all data of the group already."""
    return view.since is None and not (view.is_joining and view.backup == server)


class Coordinator(TaskProcess):
    """The process of a coordinator, with its callers' threads as routines.

    Args:
      scenario: What the run is like; see ``Jobs``.

    Attributes:
      job, job_servers: The job, and its side of the servers; None before all servers have answered.
      servers: The session's clients of the servers.
      epoch: The session's epoch: workers read variables again when it changes.
    """

    def __init__(self, scenario, world):
        super().__init__(world, COORDINATOR)
        self.scenario = scenario
        self.job = self.job_servers = self.groups = None
        self.servers = AskingServers(self, scenario.num_servers, INCARNATION, returns=scenario.servers_return)
        self.epoch = 0
        self._events = deque()
        self._posted = deque()
        self._is_handling = False
        self._at_once, self._last_moment = 0, -1.0
        self._wake_at = None
        self._connections = {}  # worker: number, link
        self._replies = {}  # worker: those that the job has not got, in the order of the requests
        self._waits, self._num_waits = {}, 0
        self._is_waited_for = set()  # waits that the job has not ended
        self._read_by = {}  # worker: until when the thread that reads its connection is held up
        self._reading = None  # what a caller reads from the servers, and its reply
        self._newest = {}  # task: its newest process that has answered, as the job knows
        self._asked = {}  # request: the task, and what it was asked
        self.num_scheduled = 0
        self._num_made = scenario.num_servers
        self._num_marks = 0
        self.instances = []  # the servers' processes that answered the first hello

    # --- the start ----------------------------------------------------------------------------------

    def start(self):
        self.run_through(self._begin())

    def run_through(self, routine):
        """Starts a routine that must not raise."""
        result = self.run(routine)

        def check():
            if result.error is not None:
                raise AssertionError(f"{routine.__qualname__} raises {result.error!r}") from result.error

        result.then(check)

    def _begin(self):
        scenario, instances, intervals = self.scenario, self.instances, []
        for number in range(scenario.num_servers):
            told = yield from self._greeted(number)
            instances.append(told["instance"])
            intervals.append(told["snapshots"] and told["snapshots"]["interval_s"])
        if scenario.has_two_copies:
            self.groups = Groups(scenario.num_servers)
            for view in self.groups.views:
                for task in view.members:
                    yield self.ask(ps(task), self._said("group", view=view.described()), HELLO_S)
            self.servers.use_primaries(self.groups.views)
        for number, key in enumerate(scenario.keys):
            self.servers.servers[number].programs[scenario.program] = True
            yield from self.servers.ask({number: {"op": "program", "digest": scenario.program}})
            keys = [*both(key), by_hand(number)] if scenario.adds_by_hand else both(key)
            request = {"op": "create", "keys": keys, "number": ("creator", number), "low": 0}
            yield from self.servers.ask({number: request})
        setup = Setup(
            scenario.num_workers,
            scenario.num_servers,
            limits=scenario.limits,
            incarnation=INCARNATION,
            ps_addresses=tuple(map(ps, range(scenario.num_servers))),
            snapshot_intervals_s=tuple(intervals),
            groups=self.groups,
            max_staleness=scenario.max_staleness,
            replicas_to_aggregate=scenario.num_averaged,
            on_ps_restart=scenario.on_ps_restart,
            capacity=scenario.capacity,
        )
        self.job = Job(setup, lambda hooks: self._make_servers(hooks, instances))
        self._carry_out(self.job.start(self.world.now))
        self.give(events.VariablesMade(scenario.num_servers))
        scenario.begin_callers(self)
        self.world.moment("job")

    def _make_servers(self, hooks, instances):
        self.job_servers = JobServers(hooks, instances)
        return self.job_servers

    def _greeted(self, number):
        while True:
            try:
                return (yield self.ask(ps(number), self._said("hello"), HELLO_S))
            except ReplicaxError:
                yield 0.2

    def _said(self, what, **fields):
        addresses = [ps(number) for number in range(self.scenario.num_servers)]
        return {"ask": what, "incarnation": INCARNATION, "ps": addresses, **fields}

    # --- events -------------------------------------------------------------------------------------

    def post(self, event):
        """Has the thread that owns the job take an event soon, after those that were posted before.

        It may be of a connection that the job has closed meanwhile.
        """
        self._posted.append(event)
        self.after(self.scenario.computing.choice(LAGS_S), self._take_posted)

    def _take_posted(self):
        if self._posted:
            self.give(self._posted.popleft())

    def give(self, event):
        """Has the thread that owns the job take an event."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._is_handling = False
        self._set_timer()

    def _handle(self, event):
        now = self.world.now
        self._at_once = self._at_once + 1 if now == self._last_moment else 0
        self._last_moment = now
        assert self._at_once < MOST_AT_ONCE, f"the job does not come to rest: {event}"
        if isinstance(event, events.Answered | events.Failed) and event.request in self._asked:
            task, op = self._asked.pop(event.request)
            if isinstance(event, events.Answered):
                if op != "restore":  # the job may have given it up; a server that goes back says so again
                    self._note_process(task, event.answer)
                truth = event.answer.pop("truth", {})  # for checks; the job must not keep it
                self.scenario.note_answer(self, task, op, event.answer, truth)
        last_epoch = self.job_servers.last_epoch
        done = self.job.receive(event, now)
        if self.job_servers.last_epoch > last_epoch:
            self.world.moment("epoch")
        if self.job.bug is not None:
            raise self.job.bug
        self._carry_out(done)

    def _set_timer(self):
        wake_at = self.job.wake_at
        if wake_at is not None and wake_at != self._wake_at:
            self._wake_at = wake_at
            self.world.at(max(wake_at, self.world.now), self.world.deliver, self, self._wake, wake_at)

    def _wake(self, wake_at):
        if wake_at == self._wake_at:
            self._wake_at = None
            self.give(events.TimePassed())

    # --- actions ------------------------------------------------------------------------------------

    def _carry_out(self, done):
        for action in done:
            self.carry_out(action)

    def carry_out(self, action):
        """Does what the job has decided. What comes of it are events."""
        match action:
            case actions.Ask(request, task, op, header, timeout_s):
                if op == "snapshot" or (
                    op == "group" and _needs_data(int(task.split()[1]), View.of(header["view"]))
                ):
                    accepted = self.job_servers.instances[int(task.split()[1])]
                    self._check_newest(task, accepted, op)
                self.scenario.note_request(self, action)
                if op in MOMENTS and task.startswith("ps"):
                    self.world.moment(f"{op} is asked")
                self._asked[request] = task, op
                reply = self.ask(task, {"ask": op, "incarnation": INCARNATION, **header}, timeout_s)
                self._when_done(request, reply)
            case actions.Perform(request, operation, arguments):
                self.world.moment(operation)
                self._when_done(request, self.run(getattr(self, f"_perform_{operation}")(*arguments)))
            case actions.OpenWorker(name, number, instance):
                assert name not in self._connections, f"{name} has a connection"
                self._check_newest(name, instance, "a connection")
                link = Link(self, name, (FUNCTIONS, instance))
                link.instance = instance
                self._connections[name] = number, link
                self._replies[name] = deque()
                self.scenario.note_opened(name)
                link.on_close = lambda: self._broke(name, number, link)
            case actions.CloseWorker(name, number):
                opened, link = self._connections.pop(name)
                assert opened == number, f"{name} has connection {opened}, not {number}"
                link.on_close = lambda: None
                link.close()
            case actions.SendToWorker(name, number, requests):
                opened, link = self._connections[name]
                assert opened == number, f"{name} has connection {opened}, not {number}"
                self._check_newest(name, link.instance, "functions")
                for request in requests:
                    self._send(name, number, link, request)
            case actions.MakeProgram(request, function, signature):
                self._when_done(request, self.run(self.scenario.traced(function, signature)))
            case actions.Settle():
                self.scenario.note_settled(self, action)
            case actions.EndWait(wait, error, value):
                assert wait in self._is_waited_for, f"wait {wait} ends, which nobody began, or twice"
                self._is_waited_for.remove(wait)
                held_up_s = self._held_up_s()
                if error is not None and held_up_s:
                    self.world.moment("failure waits")
                self.after(held_up_s, self._end_wait, wait, error, value)
            case actions.Log(level, text):
                self.world.trace(f"  LOG {level} {text}")
                self.scenario.note_log(self, text)

    def _when_done(self, request, reply):
        def done():
            if reply.error is None:
                self.post(events.Answered(request, reply.value))
            else:
                self.post(events.Failed(request, reply.error))

        reply.then(done)

    def _note_process(self, task, answer):
        """The job learns which process of a task has answered."""
        instance = answer.get("instance")
        if instance is not None:
            known = self._newest.get(task, instance)
            self._newest[task] = max(known, instance, key=lambda name: int(name.split()[-1]))

    def _check_newest(self, task, instance, what):
        """Nothing is sent to a process after the job has heard of the next one."""
        newest = self._newest.get(task, instance)
        assert newest == instance, f"{what} goes to {instance}, and {newest} has answered"

    # --- connections to workers ---------------------------------------------------------------------

    def _send(self, name, number, link, request):
        message = {"op": request.kind, "incarnation": INCARNATION}
        match request.kind:
            case "closure":
                function = self.scenario.functions[request.what]
                if function.ends == "cannot travel" and not function.is_sent:
                    function.is_sent = True
                    refused = Reply()
                    refused.settle(error=MessageError("It cannot travel."))
                    self._await(name, number, link, refused)
                    return
                message |= {
                    "closure": (INCARNATION, request.what),
                    "low": request.header["low"],
                    "round": request.header.get("round"),
                    "epoch": self.epoch,
                    "function": function,
                }
                self.scenario.note_sent(self, name, request)
            case "release":
                message["names"] = request.what
            case _:
                message["name"] = request.what
        self._await(name, number, link, link.send(message))

    def _await(self, name, number, link, reply):
        self._replies[name].append(reply)
        reply.then(lambda: self._answered(name, number, link))

    def _answered(self, name, number, link):
        """Hands the answers that have come over together, in the order of the requests."""
        if not link.is_closed and self._is_open(name, link):
            self.after(0.0, self._hand_over, name, number, link)

    def _hand_over(self, name, number, link):
        if not self._is_open(name, link):
            return
        answers, replies = [], self._replies[name]
        while replies and replies[0].is_done:
            reply = replies.popleft()
            answers.append(reply.value if reply.error is None else reply.error)
        if answers:
            self.world.moment("answers come")
            self._post_read(name, events.WorkerAnswered(name, number, answers))

    def _is_open(self, name, link):
        return self._connections.get(name, (None, None))[1] is link

    def _broke(self, name, number, link):
        self._hand_over(name, number, link)  # what came before
        broke = events.WorkerBroke(name, number, link.why_closed)
        if self.scenario.computing.random() < 0.5:
            self.post(broke)  # the thread that sends notices it first
        else:
            self._post_read(name, broke)

    def _post_read(self, name, event):
        """Has the thread that reads a connection post an event, perhaps after the connection was given up."""
        at = max(self.world.now + self._held_up_s(), self._read_by.get((name, event.connection), 0.0))
        self._read_by = {key: until for key, until in self._read_by.items() if until > self.world.now}
        self._read_by[name, event.connection] = at
        if at > self.world.now:
            self.world.at(at, self.world.deliver, self, self.post, event)  # exactly then: the order must stay
        else:
            self.post(event)

    def _held_up_s(self):
        computing = self.scenario.computing
        return HELD_UP_S * computing.random() if computing.random() < self.scenario.is_held_up else 0.0

    # --- operations of the session ------------------------------------------------------------------

    def _perform_meet_worker(self, name, description):
        yield self.scenario.computing.choice(MEETING_S)
        assert description["instance"]

    def _perform_restored(self, index, keys):
        server = self.servers.servers[index]
        yield server.turns.begin()
        server.disconnect()
        server.turns.end()
        for digest in list(server.programs):
            yield from self.servers.ask({index: {"op": "program", "digest": digest}})
        self.epoch += 1
        old = [key for key in self.scenario.keys_of(index) if keys is not None and key not in keys]
        if not old:
            return []
        answers = yield from self.servers.ask({index: {"op": "find", "keys": old}})
        return [key for key in old if key not in answers[index]["found"]]

    def _perform_names_on(self, index):
        yield 0.0
        return self.scenario.keys_of(index)

    def _perform_use_primaries(self, views):
        yield 0.0
        self.servers.use_primaries(views)
        self.epoch += 1

    def _perform_apply_round(self, number, low, closures):
        self.scenario.note_round(self, number, closures)
        yield from self.servers.ask_all(
            {"op": "apply", "round": (INCARNATION, number), "low": low, "closures": list(closures)}
        )

    def _perform_renew(self):
        yield 0.0
        self.epoch += 1

    # --- callers' threads ---------------------------------------------------------------------------

    def wait(self, kind, resource="", limit_s=None):
        """Waits, as a caller's thread does. Returns the value, or raises the error."""
        self._num_waits += 1
        number, ended = self._num_waits, Reply()
        self._waits[number] = ended
        self._is_waited_for.add(number)
        self.give(events.WaitBegan(number, kind, resource))
        if limit_s is not None and not ended.is_done:
            self.after(limit_s, self._give_up, number)
        error, value = yield ended
        if error is not None:
            raise error
        return value

    def interrupt(self):
        """A caller that waits gets Ctrl-C."""
        if self._reading is not None:
            (routine, ended), self._reading = self._reading, None
            routine.stop()
            ended.settle(error=WaitTimeoutError("Ctrl-C."))
        elif self._waits:
            self._give_up(min(self._waits))

    def _end_wait(self, number, error, value):
        if number in self._waits:
            self._waits.pop(number).settle((error, value))

    def _give_up(self, number):
        ended = self._waits.pop(number, None)
        if ended is not None:
            self._is_waited_for.discard(number)
            self.give(events.WaitGivenUp(number))
            ended.settle((WaitTimeoutError("The wait is over."), None))

    def read(self):
        """Reads all counters, as a caller's thread does, until Ctrl-C."""
        steps = {
            number: {"op": "step", "closure": None, "pull": both(key)}
            for number, key in enumerate(self.scenario.keys)
        }
        ended = Reply()
        self._reading = routine, ended = Routine(self, self.servers.ask(steps)), ended
        routine.result.then(lambda: ended.settle(routine.result.value, routine.result.error))
        self.world.moment("read")
        try:
            answers = yield ended
        finally:
            self._reading = None
        for number, answer in answers.items():
            value_in(answer["values"], self.scenario.keys[number])

    def schedule(self, function):
        """Schedules a function. Returns its number."""
        function.number = self.num_scheduled
        self.num_scheduled += 1
        self.scenario.note_scheduled(self, function)
        needs = events.FunctionNeeds(function.programs, (), function.resources, function.num_bytes)
        self.give(
            events.Scheduled(
                function.number, function.name, function.kind, needs, function.round_key, function.error
            )
        )
        return function.number

    def make_variable(self, server):
        """Makes one more variable, as a caller's thread does. It is not there if this raises."""
        number = self._num_made
        self._num_made += 1
        key = f"variable {number}"
        request = {"op": "create", "keys": [key], "number": ("creator", number), "low": 0}
        yield from self.servers.ask({server: request})
        self.scenario.made_later[server].append(key)
        self.world.moment("made")
        self.give(events.VariablesMade(number + 1))

    def instance_of(self, name):
        """Returns the process of a worker that has the open connection; None if there is none."""
        return self._connections[name][1].instance if name in self._connections else None

    def add_by_hand(self):
        """Adds to a counter of each server, as a caller's thread does. If the answer is lost, nobody knows if it came."""
        self._num_marks += 1
        step = {"op": "step", "closure": None, "mark": self._num_marks, "pull": []}
        steps = {
            number: {**step, "program": self.scenario.program, "keys": [by_hand(number)]}
            for number in range(self.scenario.num_servers)
        }
        self.world.moment("added by hand")
        yield from self.servers.ask(steps, may_repeat=False)

    def has_given_up(self, name):
        """True if the job tries to reach a worker no longer."""
        return (
            name.startswith("worker")
            and self.job is not None
            and self.job.statistics()["workers"][name]["given_up"]
        )
