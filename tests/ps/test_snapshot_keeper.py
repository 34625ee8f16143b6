"""The times at which snapshots of a store are taken."""

import math
import shutil
import time

import numpy as np
import pytest

from replicax._ps.store import snapshot_keeper
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(snapshot_keeper, "_TICK_S", 0.05)


@pytest.fixture
def store():
    store = Store()
    store.hello("me")
    return store


@pytest.fixture
def keeping(store, tmp_path):
    """Makes the snapshot writer of the store; it is closed afterwards."""
    made = []

    def keep(interval_s):
        made.append(SnapshotKeeper(store, tmp_path / "ps-0", interval_s))
        return made[-1]

    yield keep
    for keeper in made:
        keeper.close()


def create(store, key):
    shard = {"key": key, "shape": [2], "dtype": "float32", "initial": "array"}
    store.answer(Message({"op": "create", "incarnation": "me", "shards": [shard]}, [np.zeros(2, np.float32)]))


def assign(store, key):
    store.answer(Message({"op": "assign", "incarnation": "me", "keys": [key]}, [np.ones(2, np.float32)]))


def count(keeper):
    return keeper.statistics()["num_snapshots"]


def until_count(keeper, number):
    deadline = time.monotonic() + 60.0
    while count(keeper) != number:
        assert time.monotonic() < deadline, f"{keeper.statistics()} snapshots, not {number}"
        time.sleep(0.01)


def test_new_shards_are_saved_soon_and_changes_are_not(store, keeping):
    keeper = keeping(1000.0)
    create(store, "w")
    until_count(keeper, 1)
    assign(store, "w")
    time.sleep(0.3)
    assert count(keeper) == 1
    create(store, "v")
    until_count(keeper, 2)


def test_change_of_the_first_shard_counts(store, keeping):
    keeper = keeping(math.inf)
    create(store, "w")
    for number in range(3):
        create(store, f"frozen{number}")
    keeper.take()
    assign(store, "w")
    keeper.close()
    assert count(keeper) == 2


def test_without_an_interval_one_snapshot_is_taken_at_the_end(store, keeping):
    keeper = keeping(math.inf)
    create(store, "w")
    time.sleep(0.3)
    assert count(keeper) == 0
    keeper.close()
    assert count(keeper) == 1


def test_snapshots_are_only_taken_on_request_after_the_first_epoch(store, keeping):
    keeper = keeping(0.05)
    create(store, "w")
    until_count(keeper, 1)
    assert keeper.take(1)["epoch"] == 1
    assign(store, "w")
    create(store, "v")
    time.sleep(0.3)
    assert count(keeper) == 2
    keeper.begin("another")
    until_count(keeper, 3)


def test_failures_warn_once_until_there_is_room_again(store, keeping, tmp_path, caplog):
    keeper = keeping(0.05)
    for number in range(2):
        (tmp_path / "ps-0").write_text("in its way")
        create(store, f"w{number}")
        deadline = time.monotonic() + 60.0
        while not keeper.statistics()["snapshot_error"]:
            assert time.monotonic() < deadline
        time.sleep(0.3)  # it is tried again
        assert (
            len([r for r in caplog.records if "No snapshot could be written" in r.getMessage()]) == number + 1
        )
        (tmp_path / "ps-0").unlink()
        until_count(keeper, number + 1)
        shutil.rmtree(tmp_path / "ps-0")


def test_request_during_a_snapshot_is_not_forgotten(store, keeping, monkeypatch):
    keeper = keeping(math.inf)
    create(store, "w")
    snapshot = store.snapshot

    def slow(*arguments):
        told = snapshot(*arguments)
        if not count(keeper):
            assign(store, "w")  # the first one does not have this
            keeper.ask()
        return told

    monkeypatch.setattr(store, "snapshot", slow)
    keeper.ask()
    until_count(keeper, 2)
    deadline = time.monotonic() + 60.0
    while keeper.is_writing:
        assert time.monotonic() < deadline
        time.sleep(0.01)
