"""Two parameter servers with the same shards, in one process, and the coordinator's decisions about their roles."""

import threading
import time

import numpy as np

from replicax._ps.store.group_copies import GroupCopies
from replicax._ps.store.group_rules import View
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import UnavailableError
from store_connections import StoreConnection, StoreConnector

ME = "me"
ONE = np.float32(1.0)
GROUP = 0


class Way:
    """A connection to a server, while it is open."""

    def __init__(self, network, to):
        self.network, self.inner = network, StoreConnector(network.servers[to], f"ps {to}")

    def open(self):
        self.network.check()
        return Open(self.network, self.inner.open())

    def close(self):
        pass


class Open:
    def __init__(self, network, link: StoreConnection):
        self.network, self.link = network, link
        self.is_closed = threading.Event()

    def send(self, message, timeout_s=60.0):
        self.network.check()
        self.network.num_sent += 1
        self.link.send(message)

    def receive(self, timeout_s):
        self.network.check()
        if self.network.is_silent:
            self.network.is_awaited.set()
            self.is_closed.wait(20.0)
            time.sleep(0.1)  # who closed it has gone on
            raise UnavailableError("The link was closed.")
        return self.link.receive(timeout_s)

    def close(self):
        self.is_closed.set()
        self.link.close()


class Network:
    """Two servers, and the coordinator's decisions about their roles."""

    def __init__(self, **options):
        self.is_cut, self.num_sent = False, 0
        self.is_silent, self.is_awaited = False, threading.Event()
        self.servers = [self.server(n, **options) for n in range(2)]
        self.view(1, 0, 1)

    def server(self, task, **options):
        return GroupCopies(task, ME, lambda to, _: Way(self, to), **options)

    def check(self):
        if self.is_cut:
            raise UnavailableError("The network is cut.")

    def view(self, epoch, primary, backup, is_joining=False, to=(1, 0), since=None):
        view = View(GROUP, epoch, primary, backup, is_joining, since)
        for task in to:
            if task in view.members:
                self.servers[task].take(view, ["a:1", "b:1"])

    def ask(self, to, op, arrays=(), **header):
        header = {"op": op, "incarnation": ME, "group": GROUP, **header}
        return self.servers[to].answer(Message(header, list(arrays)))

    def create(self, to=0, **values):
        shards = [
            {"key": key, "shape": list(value.shape), "dtype": value.dtype.name, "initial": "array"}
            for key, value in values.items()
        ]
        self.ask(to, "create", values.values(), shards=shards, if_absent=True)

    def add_program(self, program, to=0):
        blob = [np.frombuffer(program.blob, np.uint8)]
        self.ask(to, "program", blob, digest=program.digest, described=program.described())
        return program.digest

    def step(self, to, program=None, number=None, operands=(), pull=("x",), **more):
        closure = None if number is None else [ME, number]
        pull = [[key, None] for key in pull]
        return self.ask(to, "step", operands, closure=closure, low=0, program=program, pull=pull, **more)

    def read(self, to):
        return float(self.step(to).arrays[0][0])

    def part(self, task):
        return self.servers[task].described()[str(GROUP)]

    def until_in_sync(self, task=0):
        until = time.monotonic() + 20.0
        while self.part(task)["backup"] != "in sync":
            assert time.monotonic() < until, self.part(task)
            time.sleep(0.005)
