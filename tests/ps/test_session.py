"""A session whose calls wait for a server, or fail half-way: what it knows, and what is left on the servers."""

import gc
import threading

import numpy as np
import pytest

from replicax._ps.client import request_rules
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.session import Session
from replicax._ps.placement.placement_plan import PlacementNeeds
from replicax._ps.placement.server_arrays import ServerArray, Shard
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import UnavailableError
from store_connections import StoreConnection, StoreConnector, server_clients


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.renew(),
        lambda session: session.meet_worker("worker 0", {"num_devices": 1, "platform": "cpu"}),
        lambda session: session.names_on(0),
        lambda session: session.restored(0, ()),
    ],
    ids=[
        "another epoch begins",
        "a worker is met",
        "the names on a server are told",
        "a server has come back",
    ],
)
def test_call_does_not_wait_for_the_thread_that_creates_variables(call):
    """That thread may wait for a parameter server, which waits for the coordinator to name a primary."""
    store = Store()
    store.hello("me")
    session = Session(server_clients([store], "me"))
    calling = threading.Thread(target=call, args=(session,), daemon=True)
    with session._lock:
        calling.start()
        calling.join(20.0)
        assert not calling.is_alive()


# --- calls that fail half-way -------------------------------------------------------------------------------------


class Faulty(StoreConnector):
    """Connections on which requests of some operations are executed, or not, and never answered."""

    def __init__(self, store, task):
        super().__init__(store, task)
        self.store, self.task = store, task
        self.lost = self.unanswered = frozenset()
        self.kept = []  # what was lost, which may arrive later

    def open(self):
        return FaultyConnection(self)


class FaultyConnection(StoreConnection):
    def __init__(self, at):
        super().__init__(at.store, at.task)
        self._at = at

    def send(self, message, timeout_s=60.0):
        op = message.header["op"]
        if op in self._at.lost:
            self._at.kept.append(message)
            raise UnavailableError("The request is lost.")
        super().send(message, timeout_s)
        if op in self._at.unanswered:
            self._answers.clear()
            raise UnavailableError("The answer is lost.")


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(request_rules, "_PAUSES_S", (0.0,))
    stores = [Store() for _ in range(2)]
    for store in stores:
        store.hello("me")
    return [Faulty(store, f"ps {index}") for index, store in enumerate(stores)]


@pytest.fixture
def session(servers):
    return Session(ServerClients(servers, "me"))


def new(session, name, value, row_ranges=()):
    value = np.asarray(value, np.float32)
    return session.add(ServerArray(session, name, value.shape, value.dtype, lambda: value, row_ranges))


def carry_out(session, *used, **needs):
    assert session.carry_out(session.plan(PlacementNeeds(used, **needs)))


def value_of(session, array):
    return session.read([array])[0].tolist()


def keys_on(server):
    return {key for key, _, _ in server.store.state().shards}


def assert_servers_have(servers, *arrays):
    """The servers have the shards and copies of these arrays, and nothing else."""
    for ps, server in enumerate(servers):
        assert keys_on(server) == {key for array in arrays for key in array.keys_on(ps)}


HALVES = [(0, 1), (1, 2)]


@pytest.mark.parametrize("how", ["lost", "unanswered"])
def test_creation_that_failed_half_way_leaves_nothing_behind(session, servers, how):
    array = new(session, "w", [[1], [2]], HALVES)
    setattr(servers[1], how, {"create"})
    with pytest.raises(UnavailableError):
        session.make([array])
    assert not array.is_made
    assert keys_on(servers[0])
    servers[1].lost = servers[1].unanswered = frozenset()
    assert value_of(session, array) == [[1], [2]]
    assert_servers_have(servers, array)
    assert session.bytes_on == [4, 4]


def test_shards_of_a_failed_creation_are_dropped_although_nobody_tries_it_again(session, servers):
    array = new(session, "w", [[1], [2]], HALVES)
    servers[1].lost = {"create"}
    with pytest.raises(UnavailableError):
        session.make([array])
    servers[1].lost = frozenset()
    del array
    gc.collect()
    other = new(session, "other", [3])
    session.make([other])
    assert_servers_have(servers, other)


def test_creation_that_arrives_after_its_shards_were_dropped_has_no_effect(session, servers):
    array = new(session, "w", [[1], [2]], HALVES)
    servers[1].lost = {"create"}
    with pytest.raises(UnavailableError):
        session.make([array])
    servers[1].lost = frozenset()
    session.make([array])
    for late in servers[1].kept:
        assert servers[1].store.answer(late).header["duplicate"]
    assert_servers_have(servers, array)


def test_drop_that_failed_is_tried_again(session, servers):
    array, kept = new(session, "w", [[1], [2]], HALVES), new(session, "kept", [5])
    session.make([array, kept])
    servers[1].lost = {"drop"}
    del array
    gc.collect()
    other = new(session, "other", [3])
    for _ in range(2):
        with pytest.raises(UnavailableError):
            session.make([other])
    servers[1].lost = frozenset()
    session.make([other])
    assert_servers_have(servers, kept, other)


@pytest.mark.parametrize("op", ["create", "drop"])
def test_move_that_failed_half_way_leaves_each_value_at_one_place(session, servers, op):
    table, slot = new(session, "table", [[1], [2]], HALVES), new(session, "slot", [[3], [4]])
    session.make([table, slot])
    session.assign(slot, np.asarray([[5], [6]], np.float32))
    servers[0].lost = {op}
    with pytest.raises(UnavailableError):
        carry_out(session, table, slot, colocated=[(slot, table)])
    assert value_of(session, slot) == [[5], [6]]
    servers[0].lost = frozenset()
    carry_out(session, table, slot, colocated=[(slot, table)])
    other = new(session, "other", [0])
    session.make([other])
    assert [shard.ps for shard in slot.shards] == [0, 1]
    assert_servers_have(servers, table, slot, other)
    assert value_of(session, slot) == [[5], [6]]
    assert session.bytes_on == [12, 8]


@pytest.mark.parametrize("how", ["lost", "unanswered"])
def test_copy_that_failed_is_made_again_with_the_value_of_then(session, servers, how):
    rate = new(session, "rate", [1])
    session.make([rate])
    setattr(servers[1], how, {"create"})
    with pytest.raises(UnavailableError):
        carry_out(session, rate, copied=[(rate, None)])
    assert not rate.copies
    servers[1].lost = servers[1].unanswered = frozenset()
    session.assign(rate, np.asarray([2], np.float32))
    carry_out(session, rate, copied=[(rate, None)])
    late = [connector.store.answer(message) for connector in servers for message in connector.kept]
    assert all(answer.header["duplicate"] for answer in late)
    assert copy_on(session, rate, 1) == [2]
    assert_servers_have(servers, rate)
    assert session.bytes_on == [4, 4]


def test_drop_that_arrives_after_its_shard_was_made_again_has_no_effect(session, servers):
    rate = new(session, "rate", [1])
    session.make([rate])
    servers[1].lost = {"create", "drop"}
    for _ in range(2):
        with pytest.raises(UnavailableError):
            carry_out(session, rate, copied=[(rate, None)])
    servers[1].lost = frozenset()
    carry_out(session, rate, copied=[(rate, None)])
    for late in servers[1].kept:
        assert servers[1].store.answer(late).header["duplicate"]
    assert copy_on(session, rate, 1) == [1]


@pytest.mark.parametrize("what", ["copied", "colocated"])
def test_assignment_is_not_lost_if_another_thread_moves_or_copies_the_array(session, monkeypatch, what):
    other, rate = new(session, "other", [0]), new(session, "rate", [1])
    session.make([other, rate])
    placing = threading.Thread(
        target=carry_out,
        args=(session, rate),
        kwargs={what: [(rate, None if what == "copied" else other)]},
        daemon=True,
    )
    assign = session._contents.assign

    def assign_late(values):
        placing.start()
        placing.join(0.3)
        assign(values)

    monkeypatch.setattr(session._contents, "assign", assign_late)
    session.assign(rate, np.asarray([2], np.float32))
    placing.join(20.0)
    assert len(rate.copies) == (what == "copied")
    assert value_of(session, rate) == [2]
    assert all(copy_on(session, rate, ps) == [2] for ps in rate.copies)


def copy_on(session, array, ps):
    return session.servers.read([[Shard(ps, array.copies[ps])]])[0].tolist()


def test_array_made_after_a_server_restarted_is_not_missing():
    store = Store()
    store.hello("me")
    session = Session(server_clients([store], "me"))
    old, new = (
        session.add(ServerArray(session, name, (2,), np.float32, lambda: np.zeros(2, np.float32)))
        for name in ("old", "new")
    )
    session.make([old, new])
    (kept,) = old.keys_on(0)
    assert session.restored(0, [kept]) == []
    store.answer(Message({"op": "drop", "keys": sorted(new.keys_on(0)), "programs": [], "incarnation": "me"}))
    assert session.restored(0, [kept]) == ["new"]
