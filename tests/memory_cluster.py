"""A cluster in memory for the coordinator: tasks that can be killed, stopped and restarted, without processes or
sockets.

A scheduled function runs on a worker as plain Python: it gets the ``Call``, then its arguments, with an element for
each iterator. The messages are JSON and arrays, as with real tasks.
"""

import contextlib
import itertools
import json
import pickle
import queue
import threading
import time
from dataclasses import dataclass

import jax
import numpy as np

from replicax._ps.coordinator.readable import Bell
from replicax._ps.errors import described, error_from_answer
from replicax._ps.programs.iterator_inputs import PerWorkerInput
from replicax._ps.programs.programs import WorkerProgram, signature_of
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax._ps.transport import structures
from replicax._ps.transport.messages import Message
from replicax._src.input.dataset import OutOfRangeError
from replicax._src.input.elements import END
from replicax._src.vocabulary.errors import (
    ClosureAbortedError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)

BROKEN = object()


class Task:
    """A process of the cluster.

    Attributes:
      running: Cleared while it is stopped, as by SIGSTOP.
      asked: Its requests, with the incarnation that sent each.
      message_groups: The numbers of closures that came in one group.
    """

    numbers = itertools.count()

    def __init__(self, name):
        self.name = name
        self.running = threading.Event()
        self.running.set()
        self.links = []
        self.message_groups = []
        self.asked = []
        self.incarnation = None
        self.is_up = False
        self.start()

    def start(self):
        self.instance = f"instance {next(self.numbers)}"
        self.is_up = True
        self.begin()

    def begin(self):
        """A new process has nothing."""

    def kill(self):
        self.is_up = False
        for link in list(self.links):
            link.cut()

    def restart(self):
        self.kill()
        self.start()

    def gone(self, why="died"):
        return UnavailableError(f"{self.name} {why}.", self.name)

    def ask(self, what, header, timeout_s):
        if not self.is_up:
            raise self.gone()
        if not self.running.wait(timeout_s):
            raise self.gone(f"did not answer {what!r} within {timeout_s:g} s")
        self.asked.append((what, header.get("incarnation")))
        if what == "hello":
            self.incarnation = header["incarnation"]
        elif header["incarnation"] != self.incarnation:
            raise StaleCoordinatorError(f"{self.name} has another coordinator.")
        return {"instance": self.instance, "statistics": {"asked": len(self.asked)}}


class Client:
    def __init__(self, task):
        self.task = task
        self.links = []

    def ask(self, what, header, timeout_s):
        return self.task.ask(what, json.loads(json.dumps(header)), timeout_s)

    def open(self, timeout_s=10.0):
        if not self.task.is_up:
            raise self.task.gone()
        self.links.append(Link(self.task))
        return self.links[-1]

    def close(self):
        for link in self.links:
            link.close()


class Link:
    """Both ends of a connection, and the thread of the answering task."""

    def __init__(self, task):
        self.task = task
        self.sent, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
        self.bell = Bell()
        self.why = None
        task.links.append(self)
        self.thread = threading.Thread(target=self.serve, args=(task.instance,), daemon=True)
        self.thread.start()

    def send_all(self, messages, timeout_s):
        if self.why is not None:
            raise self.task.gone(self.why)
        closures = [each.header["closure"][1] for each in messages if each.header["op"] == "closure"]
        if len(closures) > 1:
            self.task.message_groups.append(closures)
        for message in messages:
            header = json.dumps(message.header)
            self.sent.put((header, [np.array(a) for a in message.arrays]))

    def fileno(self):
        return self.bell.fileno()

    def has_bytes(self):
        return False

    def receive_arrived(self):
        self.bell.silence()
        answers = []
        with contextlib.suppress(queue.Empty):
            while not answers or answers[-1] is not BROKEN:
                answers.append(self.answers.get_nowait())
        if answers and answers[-1] is BROKEN:
            self.put(BROKEN)
            answers.pop()
            if not answers:
                raise self.task.gone(self.why)
        headers = [(json.loads(header), arrays) for header, arrays in answers]
        return [
            error_from_answer(header["error"], self.task.name)
            if "error" in header
            else Message(header, arrays)
            for header, arrays in headers
        ]

    def serve(self, instance):
        while (message := self.sent.get()) is not BROKEN:
            try:
                answer = self.task.answer(Message(json.loads(message[0]), message[1]))
            except Exception as error:
                answer = Message({"error": described(error)})
            self.task.running.wait()
            if self.why is None and self.task.instance == instance:
                self.put((json.dumps(answer.header), answer.arrays))

    def put(self, answer):
        self.answers.put(answer)
        self.bell.ring()

    def cut(self, why="died"):
        if self.why is None:
            self.why = why
            self.task.links.remove(self)
            self.sent.put(BROKEN)
            self.put(BROKEN)

    def close(self):
        self.cut("was closed")


@dataclass
class Call:
    """The view of a scheduled function on its worker."""

    cluster: "MemoryCluster"
    worker: "Worker"
    id: tuple
    low: int
    epoch: int

    def push(self, amount=1):
        """Adds to the counter on the parameter server, once for each closure."""
        self.cluster.ps[0].push(self.id, self.low, amount)


class Worker(Task):
    """A worker.

    Attributes:
      knows: Digests of programs and names of constants, in the order in which they came.
    """

    def __init__(self, cluster, index):
        self.cluster, self.index = cluster, index
        super().__init__(f"worker {index}")

    def begin(self):
        self.knows, self.names, self.resources, self.held, self.ran = [], {}, {}, {}, []

    def answer(self, message):
        return getattr(self, "on_" + message.header["op"])(message.header, message.arrays)

    def on_program(self, header, arrays):
        program = WorkerProgram.of(header["described"], [a.tobytes() for a in arrays])
        if program.name in self.cluster.refused:
            raise ValueError(f"cannot load {program.name}")
        assert program.digest == header["digest"]
        self.knows.append(program.digest)
        self.names[program.digest] = program.name
        return Message({})

    def on_constant(self, header, arrays):
        self.knows.append(header["name"])
        return Message({})

    def on_resource(self, header, arrays):
        made = pickle.loads(arrays[0].tobytes())
        elements = made(self) if header["kind"] == "dataset" else itertools.repeat(made(self))
        elements = iter(elements)
        first = next(elements)
        leaves = jax.tree.leaves(first)
        self.resources[header["name"]] = itertools.chain([first], elements)
        described_leaves = [[list(np.shape(x)), str(np.asarray(x).dtype)] for x in leaves]
        return Message({"spec": {"tree": structures.described(first), "leaves": described_leaves}})

    def on_release(self, header, arrays):
        for name in header["names"]:
            self.resources.pop(name, None)
        return Message({})

    def on_closure(self, header, arrays):
        closure = tuple(header["closure"])
        iterators = header.get("iterators", ())
        if missing := [name for name in iterators if name not in self.resources]:
            raise ClosureAbortedError(f"{missing} are gone")
        elements = self.held.pop(closure, None)
        if elements is None:
            elements = [next(self.resources[name], END) for name in iterators]
        signature = signature_of(
            [
                None
                if x is END
                else [(np.shape(leaf), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(x)]
                for x in elements
            ]
        )
        end = "no more elements" if "null" in signature else None
        digest = header["program"].get(signature)
        if digest is None:
            self.held[closure] = elements
            return Message({"need": signature, "end": end})
        if digest not in self.knows:
            self.held[closure] = elements
            raise UnknownProgramError(f"no program {digest}", digest)
        call = Call(self.cluster, self, closure, header["low"], header["epoch"])
        self.ran.append(closure[1])
        result = self.cluster.functions[self.names[digest]](call, *arrays, *elements)
        return Message({}, [np.asarray(leaf) for leaf in jax.tree.leaves(result)])


class Ps(Task):
    """A parameter server with a counter."""

    def begin(self):
        self.counter, self.applied, self.duplicates = 0, set(), 0
        self.lock = threading.Lock()

    def push(self, closure, low, amount):
        if not self.is_up:
            raise self.gone()
        with self.lock:
            if closure in self.applied or closure[1] < low:
                self.duplicates += 1
                return
            self.applied.add(closure)
            self.counter += amount


class Prepared:
    def __init__(self, strategy, fn, args):
        self.strategy, self.name = strategy, getattr(fn, "__name__", "fn")
        self.arguments = [np.asarray(a) for a in args if not isinstance(a, PerWorkerInput)]
        handles = [a for a in args if isinstance(a, PerWorkerInput)]
        self.iterators = [handle.resource for handle in handles]
        self.constants, self.named = strategy.constants, {}
        self.kinds = strategy.kinds.setdefault(fn, {})
        self.fn = fn
        self.round_key = None
        self.made = []
        self.make(
            signature_of([[(leaf.shape, leaf.dtype) for leaf in handle.spec.leaves] for handle in handles])
        )

    @property
    def programs(self):
        return {signature: program.digest for signature, program in self.kinds.items()}

    def program(self, digest):
        return next(program for program in self.kinds.values() if program.digest == digest)

    def is_valid(self):
        return True

    def make(self, signature):
        self.made.append(signature)
        if signature in self.strategy.unmakable:
            raise ValueError(f"cannot trace for {signature}")
        if None in json.loads(signature):
            raise OutOfRangeError("nothing is left")
        if signature not in self.kinds:
            name = f"{self.name} {id(self.fn)}"
            self.strategy.functions[name] = self.fn
            self.kinds[signature] = WorkerProgram(name, signature.encode(), (), (), 1)
        return self.kinds[signature].digest

    def assemble(self, arrays, signature=None):
        return arrays[0] if len(arrays) == 1 else list(arrays)


class MemoryCluster:
    """A strategy, its session, and its tasks, all in one."""

    def __init__(self, num_workers=2, num_ps=1):
        self.workers = [Worker(self, n) for n in range(num_workers)]
        self.ps = [Ps(f"ps {n}") for n in range(num_ps)]
        self.incarnation, self.epochs = "first", [0]
        self.functions, self.kinds, self.constants = {}, {}, {}
        self.refused, self.unmakable = set(), set()
        for ps in self.ps:
            ps.incarnation = self.incarnation

    @property
    def session(self):
        return Session(self)

    @property
    def form(self):
        return CoordinatorForm(self.session)

    @property
    def closures(self):
        return self

    def prepare(self, fn, args, kwargs, *, num_averaged):
        assert not kwargs
        return Prepared(self, fn, args)

    def end(self):
        for task in (*self.workers, *self.ps):
            task.running.set()
            task.kill()


class Session:
    """It does not hold the strategy, which must be collected when nobody uses it."""

    def __init__(self, cluster):
        self.tasks = {"worker": cluster.workers, "ps": cluster.ps}
        self.incarnation, self.epochs = cluster.incarnation, cluster.epochs
        self.num_workers, self.ps_addresses = len(cluster.workers), [ps.name for ps in cluster.ps]
        self.num_ps, self.instances = len(cluster.ps), [ps.instance for ps in cluster.ps]
        self.devices_per_worker, self.worker_platforms = 1, ("cpu",)
        self.snapshot_intervals_s, self.num_made = [None] * len(cluster.ps), 0
        self.groups = None

    @property
    def epoch(self):
        return self.epochs[-1]

    def meet_worker(self, name, told):
        """They are all alike."""

    def renew(self):
        self.epochs.append(self.epoch + 1)

    def connect(self, job, index):
        return Client(self.tasks[job][index])

    def not_here(self, *arguments):
        """These tasks have no snapshots and no copies."""
        raise NotImplementedError

    restored = use_primaries = apply_round = names_on = not_here


def eventually(is_so, timeout_s=60.0):
    """Waits until a condition is true, which other threads change."""
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it did not become so"
        time.sleep(0.002)
