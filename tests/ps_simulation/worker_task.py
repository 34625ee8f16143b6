"""``WorkerTask``: a simulated worker. It runs functions in the order of their arrival, and pushes to the servers."""

from ps_simulation.asking_servers import AskingServers
from ps_simulation.integer_store import both, value_in
from ps_simulation.task_process import TaskProcess
from ps_simulation.turns import Turns
from replicax._ps.store.group_rules import View
from replicax._ps.task.session_rules import TaskSession
from replicax._src.vocabulary.errors import (
    ClosureAbortedError,
    NotFiniteError,
    UnavailableError,
    UnknownProgramError,
)

SILENCE_S = 60.0
TICK_S = 1.0
FUNCTIONS = "functions"


def worker(index):
    return f"worker {index}"


class WorkerTask(TaskProcess):
    """One process of a worker, as ``TaskService``, ``WorkerHost``, ``Worker`` and ``Runner`` have it.

    Args:
      scenario: Says how long functions take and what they do; see ``Jobs``.
      index: The number of the worker.
    """

    def __init__(self, scenario, world, index):
        super().__init__(world, worker(index))
        self.scenario, self.index = scenario, index
        self.instance = scenario.names.next(f"{self.name} process")
        self.session = TaskSession(self.name, SILENCE_S, world.now)
        self.turns = Turns()
        self._forget()

    def _forget(self):
        self.servers = None
        self.programs, self.resources = set(), {}
        self.epoch, self.values, self.versions = None, {}, {}

    def start(self):
        self.after(TICK_S, self._watch)

    def _watch(self):
        if self.session.time_passed(self.world.now):
            self._drop()
            self.scenario.note_session_ended(self)
        self.after(TICK_S, self._watch)

    def _drop(self):
        if self.servers is not None:
            self.servers.close()
        self._forget()

    # --- requests -----------------------------------------------------------------------------------

    def answer(self, request, connection):
        asked = request.get("ask")
        if asked is not None:
            return getattr(self, f"_ask_{asked}")(request)
        kind, instance = connection.label
        assert (kind, instance) == (FUNCTIONS, self.instance), (
            f"{self.name} is {self.instance}, and is sent {request['op']} for {instance}"
        )
        self.session.check(request["incarnation"])
        return self._in_turn(request)

    def _ask_hello(self, request):
        incarnation = request["incarnation"]
        if self.session.hello(incarnation, self.world.now, again=bool(request.get("again"))):
            self._drop()
            self.servers = AskingServers(
                self, len(request["ps"]), incarnation, returns=self.scenario.servers_return
            )
        return {"instance": self.instance, "num_devices": 1, "platform": "cpu"}

    def _ask_heartbeat(self, request):
        self.session.heartbeat(request["incarnation"], self.world.now)
        return {"instance": self.instance, "statistics": {}}

    def _ask_primaries(self, request):
        self.session.check(request["incarnation"])
        if self.servers is not None:
            self.servers.use_primaries(map(View.of, request["views"]))
        return {}

    def _ask_leave(self, request):
        if self.session.leave(request["incarnation"], self.world.now):
            self._drop()
        return {}

    # --- what it is sent ----------------------------------------------------------------------------

    def _in_turn(self, request):
        yield self.turns.begin()
        try:
            self.session.check(request["incarnation"])  # the session may have ended meanwhile
            answer = getattr(self, f"_{request['op']}")(request)
            return (yield from answer)
        finally:
            self.turns.end()

    def _program(self, request):
        yield 0.0
        self.programs.add(request["name"])
        return {}

    def _constant(self, request):
        return (yield from self._program(request))

    def _resource(self, request):
        yield self.scenario.resource_s(request["name"])
        if self.scenario.resource_kills(request["name"]):
            self.scenario.note_killed(self)
            self.end(-11)
            yield 1.0  # nothing follows
        if self.scenario.resource_fails(request["name"], self.index):
            raise NotFiniteError(f"{request['name']} cannot be made on {self.instance}.")
        self.resources[request["name"]] = 0
        return {"spec": f"spec of {request['name']}"}

    def _release(self, request):
        yield 0.0
        for name in request["names"]:
            self.resources.pop(name, None)
        return {}

    def _closure(self, request):
        function = request["function"]
        for name in function.programs:
            if name not in self.programs:
                raise UnknownProgramError(f"This task does not have the program {name}: send it.", name)
        for name in function.resources:
            if name not in self.resources:
                raise ClosureAbortedError(f"This worker does not have the resource {name}.")
        if function.signature and f"program of {function.signature}" not in function.programs:
            return {"need": function.signature, "end": None}
        self.scenario.note_run(self, request)
        servers = self.servers
        try:
            yield from self._pull(request, servers)
            yield self.scenario.function_s(function)
            if function.ends == "kills":
                self.scenario.note_killed(self)
                self.end(-11)
                yield 1.0  # nothing follows
            if function.ends == "raises":
                raise NotFiniteError(f"function {function.number} raises")
            if function.ends != "reads":
                yield from self._push(request, servers)
        except UnavailableError:
            self.epoch = None
            raise
        self.scenario.note_ran(self, request)
        return {"number": function.number}

    def _pull(self, request, servers):
        if self.epoch != request["epoch"] or request["round"] is not None:
            steps = {
                number: {"op": "step", "closure": None, "pull": both(key), "known": self.versions}
                for number, key in enumerate(self.scenario.keys)
            }
            self._take((yield from self._asked(servers, steps)))
            self.epoch = request["epoch"]
        self.scenario.note_values(self, request, self.values)

    def _push(self, request, servers):
        function, number = request["function"], request["round"]
        steps = {}
        for server in function.servers:
            key = self.scenario.keys[server]
            steps[server] = {
                "op": "step",
                "closure": request["closure"],
                "low": request["low"],
                "pull": [] if number is not None else both(key),
                "known": self.versions,
            }
            if number is None:
                steps[server] |= {"program": self.scenario.program, "keys": both(key)}
            else:
                gradients = {"round": number, "program": self.scenario.program, "keys": both(key)}
                steps[server] |= {"gradients": gradients}
        self._take((yield from self._asked(servers, steps)))

    def _asked(self, servers, steps):
        """Asks the servers as long as the session lasts. A function of a session that has ended gets no answer."""
        answers = (yield from servers.ask(steps)) if self.servers is servers else None
        if self.servers is not servers:
            raise UnavailableError(f"The session on {self.name} has ended.", self.name)
        return answers

    def _take(self, answers):
        for number, answer in answers.items():
            if answer["truth"]:
                value_in(answer["truth"], self.scenario.keys[number])
            self.values |= answer["values"]
            self.versions |= answer["versions"]
            for key, value in answer["truth"].items():
                assert self.values[key] == value, f"{self.name} uses {self.values[key]} for {value} of {key}"
