"""Snapshots of copies of a group: their positions, and the restart of a server."""

import contextlib
import json
import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from checks import message
from exported import update_program
from group_network import GROUP, ME, ONE, Network, Open, Way
from replicax._ps.store import snapshot_keeper
from replicax._ps.store.ack_patience import ACK_S, LONGEST_WRITE_S
from replicax._ps.store.log import Position
from replicax._ps.store.snapshots import SnapshotFolder
from replicax._ps.store.store import Store
from replicax._ps.task.work import PsHost
from replicax._ps.transport.messages import Message
from replicax._src.cluster.credentials import Credentials
from replicax._src.vocabulary.errors import InvalidArgumentError


class Servers(Network):
    """Two servers that write snapshots, and can be restarted."""

    def __init__(self, folder, interval_s=math.inf):
        self.folder, self.interval_s = folder, interval_s
        self.hosts = {}
        super().__init__()

    def server(self, task):
        host = PsHost(self.folder / f"ps-{task}", self.interval_s, task, Credentials())
        host._connect = lambda to, address: Way(self, to)
        self.hosts[task] = host
        host.begin(ME, ())
        return host._copies

    def end(self, task):
        """As after SIGTERM."""
        self.hosts[task].close()
        self.servers[task].close()

    def restart(self, task):
        """As after SIGKILL, without an orderly end."""
        self.servers[task].close()
        self.servers[task] = self.server(task)

    def keeper(self, task):
        return self.servers[task]._copies[GROUP]._keeper

    def order_snapshot(self, number=1):
        """Both have one more update."""
        self.servers[0]._copies[GROUP].order_snapshot()
        for task in range(2):
            until(lambda task=task: self.keeper(task).statistics()["num_snapshots"] == number)

    def position(self, task):
        return Position(*self.part(task)["position"])

    def parts_from(self, monkeypatch):
        """The parts of state that are sent from now on."""
        parts, send = [], Open.send

        def noted(link, message, *timeout_s):
            if message.header.get("op") == "copy":
                parts.append(message.header["part"])
            send(link, message, *timeout_s)

        monkeypatch.setattr(Open, "send", noted)
        return parts


def until(is_so, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def network(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_keeper, "_TICK_S", 0.02)
    network = Servers(tmp_path)
    yield network
    for server in network.servers:
        server.close()


@pytest.fixture
def add(network):
    """The digest of a program that adds to x, which starts at 0."""
    network.create(x=np.zeros(3, np.float32))
    return network.add_program(ADD)


ADD = update_program(lambda x, by: (x + by,), ["x"], [0], np.zeros(3, np.float32), ONE)


def test_both_write_what_the_primary_orders(network, add, tmp_path):
    network.step(0, add, 0, [ONE])
    network.order_snapshot()
    for number in range(1, 5):
        network.step(0, add, number, [ONE])
    assert network.position(0).seq == network.position(1).seq == 8
    for task in range(2):
        network.restart(task)
        assert network.position(task) == Position(1, 4)  # the ordering is the last one that it has
        told = network.hosts[task].restored
        assert told["incarnation"] == ME
        assert told["groups"]["0"]["updates"] == 1


def test_a_snapshot_is_taken_every_interval_by_both(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_keeper, "_TICK_S", 0.02)
    network = Servers(tmp_path, interval_s=0.05)
    with contextlib.ExitStack() as closing:
        for task in range(2):
            closing.callback(lambda task=task: network.servers[task].close())
        network.create(x=np.zeros(3, np.float32))
        add = network.add_program(ADD)
        for number in range(3):
            before = [network.keeper(task).statistics()["num_snapshots"] for task in range(2)]
            network.step(0, add, number, [ONE])
            until(lambda before=before: network.keeper(1).statistics()["num_snapshots"] > before[1])

        def none_is_ordered():
            seq = network.position(0).seq
            until(lambda: not any(network.keeper(task).is_writing for task in range(2)))
            time.sleep(0.2)
            return network.position(0).seq == seq

        until(none_is_ordered)  # where nothing changes; the last one has the last update


def test_server_with_a_snapshot_needs_a_view_that_accepts_it(network, add):
    network.step(0, add, 0, [ONE])
    network.order_snapshot()
    network.step(0, add, 1, [ONE])
    network.restart(1)
    message(InvalidArgumentError, lambda: network.view(2, 1, None, to=[1]), "lacks updates of group 0")
    at = network.position(1)
    network.view(3, 1, None, to=[1], since=at)
    network.add_program(ADD, to=1)
    assert network.read(1) == 1.0
    assert network.step(1, add, 0, [ONE]).header["duplicate"]  # the snapshot has it
    network.step(1, add, 1, [ONE])
    assert network.read(1) == 2.0


@pytest.mark.parametrize("how", ["ended", "killed", "with gradients"])
def test_server_that_returns_with_a_snapshot_gets_the_missing_updates(network, add, monkeypatch, how):
    """Only the updates after its snapshot, if they are in the log, as after SIGTERM. A snapshot contains no waiting
    gradients."""
    parts = network.parts_from(monkeypatch)
    network.step(0, add, 0, [ONE])
    network.order_snapshot()
    network.step(0, add, 1, [ONE])
    mean = type(ADD)(ADD.blob, ADD.state, ADD.written, ("mean",))
    if how == "with gradients":
        digest = network.add_program(mean)
        hold = {"gradients": {"round": 0, "program": digest, "operands": 1}}
        network.step(0, None, 10, [np.float32(2.0)], **hold)
    if how != "killed":
        network.end(1)
    network.view(2, 0, None)
    network.step(0, add, 2, [ONE])
    network.restart(1)
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    assert "".join(parts).startswith("whereprogram" if how == "ended" else "wherestate")
    assert ("resume" in parts) == (how == "ended")
    assert network.ask(0, "checksum").header["is_on_two"]
    network.view(4, 1, None, to=[1])
    assert network.read(1) == 3.0
    network.step(1, add, 3, [ONE])  # it has the program
    if how == "with gradients":
        network.ask(1, "apply", round=[ME, 0], low=0, closures=[10])
        assert network.read(1) == 6.0


def test_returning_server_gets_the_state_if_a_program_is_gone(network, add, monkeypatch):
    parts = network.parts_from(monkeypatch)
    network.step(0, add, 0, [ONE])
    network.end(1)
    network.view(2, 0, None)
    network.step(0, add, 1, [ONE])
    network.ask(0, "drop", keys=[], programs=[add])
    network.restart(1)
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    assert parts[:2] == ["where", "state"]
    assert network.ask(0, "checksum").header["is_on_two"]


def test_backup_may_be_silent_longer_while_writing_a_snapshot(network, add, monkeypatch):
    """An update may wait there until there is room beside the snapshot, and the backup's disk may be the slower one."""
    goes_on, store, waited = threading.Event(), network.servers[1]._copies[GROUP]._state.store, []
    write, receive = store._snapshots.write, Open.receive
    monkeypatch.setattr(store._snapshots, "write", lambda *how: (goes_on.wait(20.0), write(*how))[1])

    def noted(link, timeout_s):
        waited.append(timeout_s)
        return receive(link, timeout_s)

    monkeypatch.setattr(Open, "receive", noted)
    network.step(0, add, 0, [ONE])
    network.servers[0]._copies[GROUP].order_snapshot()
    network.step(0, add, 1, [ONE])
    assert waited[0] == ACK_S
    assert (
        min(waited[1:]) > LONGEST_WRITE_S
    )  # from the ordering on, before it is known whether the backup writes
    goes_on.set()
    until(lambda: not network.keeper(1).is_writing)
    network.step(0, add, 2, [ONE])
    del waited[:]
    network.step(0, add, 3, [ONE])
    assert waited == [ACK_S]


def test_a_copy_that_is_replaced_is_not_written(network, add, tmp_path):
    copy = network.servers[1]._copies[GROUP]
    network.step(0, add, 0, [ONE])
    store, snapshot = copy._state.store, Store.snapshot

    def replaced(*arguments):
        copy._state.store = copy._state.new_store()
        return snapshot(store, *arguments)

    store.snapshot = replaced
    network.servers[0]._copies[GROUP].order_snapshot()
    until(lambda: network.keeper(1).statistics()["snapshot_error"])
    assert SnapshotFolder(tmp_path / "ps-1" / "group-0").latest_owner() is None


def write_own(folder, incarnation):
    """A snapshot of a job without copies."""
    store = Store()
    store.hello(incarnation)
    shard = {"key": "w", "shape": [2], "dtype": "float32", "initial": "array"}
    header = {"op": "create", "incarnation": incarnation, "shards": [shard]}
    store.answer(Message(header, [np.zeros(2, np.float32)]))
    store.snapshot(folder)


def test_only_the_newest_coordinators_snapshots_are_restored(network, add, tmp_path):
    network.step(0, add, 0, [ONE])
    network.order_snapshot()
    assert network.hosts[0].restored is None
    write_own(tmp_path / "ps-0", "another")
    host = PsHost(tmp_path / "ps-0", math.inf, 0, Credentials())
    assert host.restored["incarnation"] == "another"
    assert "groups" not in host.restored
    host.close()
    write_own(tmp_path / "ps-1", "before")
    network.step(0, add, 1, [ONE])
    network.servers[1]._copies[GROUP]._keeper.take()
    host = PsHost(tmp_path / "ps-1", math.inf, 1, Credentials())
    assert host.restored["incarnation"] == ME
    assert not host._store.statistics()["shards"]
    work = host.begin("the next", ())
    assert host.restored is None  # what was restored is gone
    assert work.statistics()["shards"] == 0
    work.close()
    host.close()


MEMORY = """
import json, math, sys, threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from replicax._src.cluster.credentials import Credentials
from replicax._ps.store.group_rules import View
from replicax._ps.transport.messages import Message
from replicax._ps.programs.programs import NamedRows, UpdateProgram
from replicax._ps.task.work import PsHost

role, directory = sys.argv[1], Path(sys.argv[2])


class Way:
    # A server sends updates to a backup that applies them at once.
    def open(self):
        return self

    def send(self, message, timeout_s):
        self.seq = message.header["seq"]

    def receive(self, timeout_s):
        return Message({"applied": self.seq, "outcome": "", "writes": False})

    def close(self):
        pass


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


seq = 0


def ask(op, arrays=(), **header):
    global seq
    seq += 1
    header = {"op": op, "incarnation": "me", **header}
    if role == "backup":
        place = {"group": 0, "epoch": 1, "seq": seq, "ordered_in": 1}
        header = {"op": "forward", "incarnation": "me", **place, "message": header}
    answer = copies.answer(Message({**header, "group": 0}, list(arrays)))
    assert "refused" not in answer.header, answer.header


def send(fn, state, written, *avals):
    blob = bytes(export.export(jax.jit(fn), platforms=["cpu"])(*avals).serialize())
    program = UpdateProgram(blob, state, written, rows=tuple((NamedRows(0),) for _ in written))
    ask("program", [np.frombuffer(blob, np.uint8)], digest=program.digest, described=program.described())
    return program.digest


def work(rows, prefix):
    # A table and a slot; rows are updated, and both are written while other rows are updated.
    keys = (prefix + "t", prefix + "m")
    table, ids, g = (rows, 64), np.arange(4096, dtype=np.int32), np.ones((4096, 64), np.float32)
    like = jax.ShapeDtypeStruct(table, jnp.float32)
    initial = send(lambda: jnp.full(table, 0.5, jnp.float32), (), ())
    ask("create", shards=[{"key": k, "shape": list(table), "dtype": "float32", "initial": initial} for k in keys])

    def adagrad(t, m, ids, g):
        m = m.at[ids].add(g * g, mode="drop")
        return t.at[ids].add(-g / jnp.sqrt(m[ids]), mode="drop"), m

    update = send(adagrad, keys, (0, 1), like, like, jax.ShapeDtypeStruct(ids.shape, jnp.int32), g)
    chance, number = np.random.default_rng(0), 0
    for _ in range(3):
        before = keeper().statistics()["num_snapshots"]
        copies._copies[0].order_snapshot() if role == "primary" else ask("snapshot")
        while keeper().is_writing:
            ask("step", [chance.integers(0, rows, 4096, np.int32), g], program=update)
            number += 1
        assert keeper().statistics() == {"num_snapshots": before + 1, "snapshot_error": ""}
        ask("step", [chance.integers(0, rows, 4096, np.int32), g], program=update)
    assert number > 3
    return 2 * 4 * rows * 64


def keeper():
    return copies._copies[0]._keeper


host = PsHost(directory, math.inf, 0, Credentials(), 16 << 20)
host._connect = lambda index, address: Way()
host.begin("me", ())
copies = host._copies
view = View(0, 1, 0, 1) if role == "primary" else View(0, 1, 1, 0)
copies.take(view, ["a:1", "b:1"])
work(8192, "warm")
ask("drop", keys=["warmt", "warmm"])
empty = status("VmRSS")
held = work(1 << 20, "")
print(json.dumps([held, status("VmHWM") - empty]))
"""


@pytest.mark.timeout(240)
@pytest.mark.rest
@pytest.mark.parametrize("role", ["primary", pytest.param("backup", marks=pytest.mark.long)])
def test_memory_is_that_of_the_values(tmp_path, role):
    """A snapshot while updates continue, of a server that sends them and of one that receives them."""
    command = [sys.executable, "-c", MEMORY, role, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert run.returncode == 0, run.stderr
    held, used = json.loads(run.stdout)
    assert held == 1 << 29
    assert used <= 1.2 * held, f"{used / held:.2f} ×"
