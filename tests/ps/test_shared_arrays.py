"""Programs that share parameter servers: one creates the arrays, the others find them. All run in one process."""

import threading

import numpy as np
import pytest

from checks import message
from replicax._ps.client.server_contents import ServerContents
from replicax._ps.client.session import Session
from replicax._ps.client.shared_arrays import SharedArrays
from replicax._ps.client.tasks import Share
from replicax._ps.placement.placement_plan import PlacementNeeds
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.programs.programs import Shard
from replicax._ps.store.store import Store
from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.vocabulary.errors import UnavailableError
from store_connections import server_clients

MEMBERS = ("chief 0", "worker 0")


@pytest.fixture
def stores():
    stores = [Store() for _ in range(2)]
    for store in stores:
        store.hello("shared")
    return stores


@pytest.fixture
def session(stores):
    def make(member, limit_s=0.3):
        servers = server_clients(stores, "shared")
        return Session(servers, shared=SharedArrays(ServerContents(servers), Share(MEMBERS, member), limit_s))

    return make


def new(session, name, value, shards=()):
    value = np.asarray(value, np.float32)
    return session.add(ServerArray(session, name, value.shape, value.dtype, lambda: value, shards))


def value_of(session, array):
    return session.read([array])[0].tolist()


def test_initial_values_are_the_chiefs_in_any_order_of_use(session):
    chief, worker = session("chief 0"), session("worker 0")
    ours = [new(chief, name, [number]) for number, name in enumerate("aba")]
    theirs = [new(worker, name, [10]) for name in "aba"]
    for array in reversed(ours):
        value_of(chief, array)
    assert [value_of(worker, array) for array in theirs] == [[0], [1], [2]]
    assert [array.shards for array in theirs] == [array.shards for array in ours]
    worker.assign(theirs[2], np.asarray([5], np.float32))
    assert value_of(chief, ours[2]) == [5]


def test_others_wait_until_the_chief_has_created_it(session):
    chief, worker = session("chief 0"), session("worker 0", limit_s=60)
    found = []
    theirs = new(worker, "w", [0])
    thread = threading.Thread(target=lambda: found.append(value_of(worker, theirs)))
    thread.start()
    thread.join(0.1)
    assert not found
    value_of(chief, new(chief, "w", [7]))
    thread.join(30)
    assert found == [[7]]


def test_wait_timeout_names_the_chief_and_the_variable(session):
    worker = session("worker 0")
    text = message(
        UnavailableError, lambda: value_of(worker, new(worker, "only here", [0])), "worker 0 waited 0.3 s"
    )
    assert "for chief 0 to create the variable 'only here'" in text


def test_variables_unused_by_others_are_not_waited_for(session):
    chief, worker = session("chief 0"), session("worker 0")
    kept = new(worker, "only here", [0])
    value_of(chief, new(chief, "w", [7]))
    assert value_of(worker, new(worker, "w", [0])) == [7]
    assert not kept.is_made


ROWS = [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("at_chief", "value", "shards", "says"),
    [
        ((), [1, 2, 3], (), "has the shape (3,) and dtype float32 in worker 0, but the shape (2, 2)"),
        ((), [[1, 2], [3, 4]], ROWS, "is sharded in worker 0, but not sharded on the parameter servers"),
        (ROWS, [[1, 2], [3, 4]], (), "is not sharded in worker 0, but sharded on the parameter servers"),
        (ROWS, [[1, 2, 3], [3, 4, 5]], ROWS, "(rows 0 to 1) has the shape (1, 3)"),
    ],
)
def test_programs_that_differ_are_named(session, at_chief, value, shards, says):
    chief, worker = session("chief 0"), session("worker 0")
    value_of(chief, new(chief, "kernel", [[1, 2], [3, 4]], at_chief))
    theirs = new(worker, "kernel", value, shards)
    text = message(ProgramMismatchError, lambda: value_of(worker, theirs), "Variable 'kernel'", says)
    assert "where chief 0 has created it" in text


def test_shards_and_their_slots(session):
    chief, worker = session("chief 0"), session("worker 0")
    tables = []
    for each in (chief, worker):
        table = new(each, "table", [[1.0], [2.0], [3.0]], [(0, 2), (2, 3)])
        slot = new(each, "slot", [[4.0], [5.0], [6.0]])
        slot.colocated_with = table
        assert value_of(each, slot) == [[4.0], [5.0], [6.0]]
        tables.append((table, slot))
    assert tables[0][0].shards == tables[1][0].shards
    assert tables[0][1].shards == tables[1][1].shards
    assert [piece.ps for piece in tables[1][1].shards] == [0, 1]


def test_array_is_moved_once_and_found_there(session):
    chief, worker = session("chief 0"), session("worker 0")
    pairs = [(new(each, "w", [1]), new(each, "slot", [2])) for each in (chief, worker)]
    (ours, slot), (theirs, their_slot) = pairs
    value_of(chief, slot)
    assert slot.shards[0].ps != ours.shards[0].ps
    value_of(worker, their_slot)
    worker.make([theirs])
    beside = PlacementNeeds([theirs, their_slot], colocated=[(their_slot, theirs)])
    message(UnavailableError, lambda: worker.plan(beside), "to create the variable 'slot'")
    chief.plan(PlacementNeeds([ours, slot], colocated=[(slot, ours)]))
    layout = worker.layout
    plan = worker.plan(beside)
    assert worker.layout > layout, "functions that were traced before look at its place again"
    assert worker.carry_out(plan)
    assert plan.places[their_slot].shards == slot.shards
    assert slot.shards == their_slot.shards
    assert value_of(worker, their_slot) == [2]


@pytest.mark.parametrize("what", ["drop", "create"])
def test_move_that_fails_keeps_the_value(session, monkeypatch, what):
    chief = session("chief 0")
    table, slot = new(chief, "table", [[0.0], [0.0]], [(0, 1), (1, 2)]), new(chief, "slot", [[1.0], [2.0]])
    value_of(chief, table), value_of(chief, slot)
    chief.assign(slot, np.asarray([[3.0], [4.0]], np.float32))
    needs = PlacementNeeds([table, slot], colocated=[(slot, table)])
    do = getattr(ServerContents, what)

    def half(self, items, *args, **kwargs):
        do(self, items[:1], *args, **kwargs)
        raise UnavailableError("A server is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(ServerContents, what, half)
        with pytest.raises(UnavailableError):
            chief.plan(needs)
    chief.plan(needs)
    assert slot.is_made
    assert value_of(chief, slot) == [[3.0], [4.0]]
    assert chief.bytes_on == [8, 8]


def test_creation_that_fails_is_not_counted(session, monkeypatch):
    chief = session("chief 0")
    array, create = new(chief, "w", [[1.0], [2.0]], [(0, 1), (1, 2)]), ServerContents.create

    def half(self, shards, **kwargs):
        create(self, shards[:1], **kwargs)
        raise UnavailableError("A server is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(ServerContents, "create", half)
        with pytest.raises(UnavailableError):
            chief.make([array])
    assert value_of(chief, array) == [[1.0], [2.0]]
    assert chief.bytes_on == [4, 4]
    assert chief.names_on(1) == ["w"]


def test_copies_are_created_once_and_assigned_by_all(session):
    chief, worker = session("chief 0"), session("worker 0")
    ours, theirs = new(chief, "rate", [1]), new(worker, "rate", [0])
    chief.plan(PlacementNeeds([ours], copied=[(ours, None)]))
    layout = worker.layout
    worker.assign(theirs, np.asarray([3], np.float32))  # the worker has not used the copy
    assert worker.layout > layout, "functions that were traced before look for the copy"
    assert value_of(chief, ours) == [3]
    worker.plan(PlacementNeeds([theirs], copied=[(theirs, None)]))
    assert theirs.copies == ours.copies == {1: "0:rate:@1"}
    assert worker.servers.read([[Shard(1, "0:rate:@1")]])[0].tolist() == [3]


def test_copy_whose_creation_failed_gets_the_value_of_the_second_try(session, monkeypatch):
    """Its functions do not know of the copy in between, and other programs may have found it."""
    chief, worker = session("chief 0"), session("worker 0")
    ours, theirs = new(chief, "rate", [1]), new(worker, "rate", [0])
    chief.make([ours])
    create = ServerContents.create

    def unanswered(self, *args, **kwargs):
        create(self, *args, **kwargs)
        raise UnavailableError("The answer is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(ServerContents, "create", unanswered)
        with pytest.raises(UnavailableError):
            chief.plan(PlacementNeeds([ours], copied=[(ours, None)]))
    worker.plan(PlacementNeeds([theirs], copied=[(theirs, None)]))
    ServerContents(chief.servers).assign([(ours.shards, np.asarray([2], np.float32))])  # as by a function
    chief.plan(PlacementNeeds([ours], copied=[(ours, None)]))
    assert ours.copies == theirs.copies
    assert chief.servers.read([[Shard(1, ours.copies[1])]])[0].tolist() == [2]


def test_restarted_chief_resumes_with_the_existing_variables(session, stores):
    first = session("chief 0")
    array = new(first, "w", [[1.0], [2.0]], [(0, 1), (1, 2)])
    value_of(first, array)
    first.assign(array, np.asarray([[8.0], [9.0]], np.float32))
    again = session("chief 0")
    found, made = new(again, "w", [[1.0], [2.0]], [(0, 1), (1, 2)]), new(again, "new", [3.0])
    assert value_of(again, made) == [3.0]
    assert value_of(again, found) == [[8.0], [9.0]]
    assert again.bytes_on == [8, 4]


def test_half_created_array_is_completed(session, stores):
    """The chief died between two servers."""
    first = session("chief 0")
    array = new(first, "w", [[1.0], [2.0]], [(0, 1), (1, 2)])
    value_of(first, array)
    ServerContents(first.servers).drop(array.shards[:1])
    again = session("chief 0")
    assert value_of(again, new(again, "w", [[5.0], [6.0]], [(0, 1), (1, 2)])) == [[5.0], [2.0]]


def test_variable_deleted_in_one_program_stays_for_the_others(session, stores):
    chief, worker = session("chief 0"), session("worker 0")
    value_of(chief, new(chief, "w", [7]))
    value_of(chief, new(chief, "other", [0]))  # those that are gone are dropped when others are made
    assert value_of(worker, new(worker, "w", [0])) == [7]
