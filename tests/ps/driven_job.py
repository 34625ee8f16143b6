"""A job whose events a test gives one by one, and whose actions it looks at."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from replicax._ps.job.actions_out import (
    Action,
    Ask,
    EndWait,
    OpenWorker,
    Perform,
    SendToWorker,
    Settle,
)
from replicax._ps.job.closures import Closure, ClosureQueue
from replicax._ps.job.events_in import (
    Answered,
    Event,
    Failed,
    FunctionNeeds,
    Scheduled,
    TimePassed,
    WaitBegan,
    WorkerAnswered,
    WorkerBroke,
)
from replicax._ps.job.limits import Limits
from replicax._ps.job.machine import Job
from replicax._ps.job.setup import Setup
from replicax._src.vocabulary.errors import UnavailableError

Kind = TypeVar("Kind")


class NoServers:
    """The side of a job without parameter servers, for tests of the workers' side."""

    def start(self, now: float) -> None:
        """Starts nothing."""

    def close(self) -> None:
        """Has nothing to close."""

    def note_failure(self, task: str | None, now: float) -> bool:
        return False

    def statistics(self) -> dict[str, Any]:
        return {"ps": {}, "replication": None}

    def primaries_for_workers(self) -> None:
        return None


class Servers(NoServers):
    """Notes the failures of servers that it is told of."""

    def __init__(self, hooks):
        self.hooks, self.failures = hooks, []
        self.may_come_back = False
        self.views = None
        self.is_closed = False

    def note_failure(self, task, now):
        self.failures.append(task)
        return self.may_come_back

    def primaries_for_workers(self):
        return self.views

    def close(self):
        self.is_closed = True


class DrivenJob:
    """A job, its time, and what it has sent.

    Attributes:
      actions: The actions of the last event.
      pending: The requests and operations that are not answered, by number.
      outbox: By worker, the requests on its connection that are not answered.
      settled: The ``Settle`` of each function, by number.
      ended: The ``EndWait`` of each wait, by number.
    """

    def __init__(self, num_workers: int = 1, **setup: Any):
        self.now = 0.0
        setup.setdefault("limits", Limits(reconnect_s=10.0))
        self.servers: Servers = None
        self.job = Job(Setup(num_workers, **setup), self._make_servers)
        self.actions: list[Action] = []
        self.all_actions: list[Action] = []
        self.pending: dict[int, Ask | Perform] = {}
        self.outbox: dict[str, list[Any]] = {}
        self.connections: dict[str, int] = {}
        self.settled: dict[int, Settle] = {}
        self.ended: dict[int, EndWait] = {}
        self._numbers, self._waits = count(setup.get("first_number", 0)), count(1)
        self._take(self.job.start(0.0))

    def _make_servers(self, hooks: Any) -> Servers:
        self.servers = Servers(hooks)
        return self.servers

    # --- events ------------------------------------------------------------------------------------------

    def do(self, event: Event) -> list[Action]:
        """Gives the job an event, and returns its actions."""
        self._take(self.job.receive(event, self.now))
        assert self.job.bug is None, self.job.bug
        return self.actions

    def _take(self, actions: list[Action]) -> None:
        self.actions = actions
        self.all_actions += actions
        for action in actions:
            match action:
                case Ask() | Perform():
                    self.pending[action.request] = action
                case OpenWorker(worker, connection):
                    self.outbox[worker], self.connections[worker] = [], connection
                case SendToWorker(worker, connection, requests):
                    assert connection == self.connections[worker]
                    self.outbox[worker] += requests
                case Settle(number):
                    assert number not in self.settled
                    self.settled[number] = action
                case EndWait(wait):
                    assert wait not in self.ended
                    self.ended[wait] = action
                case _:
                    pass

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Returns the actions of a kind among those of the last event."""
        return [action for action in self.actions if isinstance(action, kind)]

    def schedule(self, name: str = "f", needs: FunctionNeeds | None = None, **fields: Any) -> int:
        """Schedules a function, and returns its number."""
        number = next(self._numbers)
        self.do(Scheduled(number, name, fields.pop("kind", name), needs or FunctionNeeds(), **fields))
        return number

    def wait(self, kind: str, resource: str = "") -> int:
        """Begins a wait, and returns its number."""
        number = next(self._waits)
        self.do(WaitBegan(number, kind, resource))
        return number

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, with an event whenever the job wants one."""
        until = self.now + seconds
        actions: list[Action] = []
        while (wake_at := self.job.wake_at) is not None and wake_at <= until:
            self.now = max(self.now, wake_at)
            actions += self.do(TimePassed())
        self.now = until
        self.actions = actions

    # --- tasks -------------------------------------------------------------------------------------------

    def asked(self, task: str, op: str) -> Ask:
        """Returns the oldest unanswered request of that kind."""
        return next(
            each
            for each in self.pending.values()
            if isinstance(each, Ask) and (each.task, each.op) == (task, op)
        )

    def performed(self, operation: str) -> Perform:
        return next(
            each
            for each in self.pending.values()
            if isinstance(each, Perform) and each.operation == operation
        )

    def has_asked(self, task: str, op: str) -> bool:
        return any(
            isinstance(each, Ask) and (each.task, each.op) == (task, op) for each in self.pending.values()
        )

    def answer(self, asked: Ask | Perform, answer: Any = None) -> list[Action]:
        del self.pending[asked.request]
        return self.do(Answered(asked.request, answer))

    def fail(self, asked: Ask | Perform, error: Exception | None = None) -> list[Action]:
        del self.pending[asked.request]
        task = asked.task if isinstance(asked, Ask) else ""
        return self.do(Failed(asked.request, error or UnavailableError("silent", task)))

    def connect(self, worker: str = "worker 0", instance: str = "a") -> int:
        """Connects a worker that the job tries to reach. Returns the number of the connection."""
        if self.has_asked(worker, "heartbeat"):  # of an older connection
            del self.pending[self.asked(worker, "heartbeat").request]
        self.answer(self.asked(worker, "hello"), {"instance": instance, "num_devices": 1})
        self.answer(self.performed("meet_worker"))
        if self.has_asked(worker, "primaries"):
            self.answer(self.asked(worker, "primaries"), {})
        self.beat(worker, instance)
        return self.connections[worker]

    def beat(self, worker: str = "worker 0", instance: str = "a") -> None:
        """Answers a heartbeat."""
        self.answer(self.asked(worker, "heartbeat"), {"instance": instance, "statistics": {"n": 1}})

    def works(
        self, *answers: Mapping[str, Any] | Exception, worker: str = "worker 0", connection: int | None = None
    ) -> list[Action]:
        """Has a worker answer its oldest requests."""
        del self.outbox[worker][: len(answers)]
        number = self.connections[worker] if connection is None else connection
        return self.do(WorkerAnswered(worker, number, answers))

    def breaks(self, worker: str = "worker 0", connection: int | None = None) -> list[Action]:
        number = self.connections[worker] if connection is None else connection
        return self.do(WorkerBroke(worker, number, UnavailableError("connection reset", worker)))

    def sent(self, worker: str = "worker 0") -> list[tuple[str, Any]]:
        """Returns the requests that a worker has not answered."""
        return [(each.kind, each.what) for each in self.outbox[worker]]

    def groups(self) -> list[list[Any]]:
        """Returns the functions of each write of the last event."""
        return [
            [request.what for request in action.requests if request.kind == "closure"]
            for action in self.of(SendToWorker)
        ]


def connected(num_workers: int = 1, **setup: Any) -> DrivenJob:
    """Returns a job whose workers are connected."""
    driven = DrivenJob(num_workers, **setup)
    for number in range(num_workers):
        driven.connect(f"worker {number}", f"instance of worker {number}")
    return driven


def numbers_of(requests: Sequence[tuple[str, Any]]) -> list[Any]:
    return [what for kind, what in requests if kind == "closure"]


def queued(
    queue: ClosureQueue, name: str, work: Any = None, kind: Any = None, round_key: Any = None
) -> Closure:
    """Adds the next closure to a queue, and returns it."""
    closure = Closure(queue.next_number, name, name if kind is None else kind, work, round_key=round_key)
    queue.add(closure)
    return closure
