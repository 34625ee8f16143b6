"""When a server writes a snapshot, and which requests for one it executes: orders of events, one by one."""

import math
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from asked_store import ME, ask, create
from checks import message
from replicax._ps.store.keeper_rules import KeeperRules, Progress
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.store.snapshots import Snapshot, SnapshotFolder
from replicax._ps.store.store import Store
from replicax._ps.task.service import TaskService
from replicax._ps.task.session_rules import TaskSession
from replicax._ps.task.work import PsHost
from replicax._src.cluster.spec import Task
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.vocabulary.errors import SnapshotError

EMPTY = Progress("i", 0, 0)


def rules_of(interval_s=10.0, restored=None):
    rules = KeeperRules(interval_s)
    rules.start(0.0, EMPTY, restored)
    return rules


def has(changes, created=1, instance="i", position=None):
    return Progress(instance, changes, created, position)


# --- at intervals ---------------------------------------------------------------------------------------------


def test_snapshot_is_due_at_the_interval_and_once_the_last_new_shard_is_made():
    rules = rules_of()
    assert not rules.tick(1.0, EMPTY)
    assert not rules.tick(2.0, has(1, 1))  # more may follow
    assert not rules.tick(3.0, has(2, 2))
    assert rules.tick(4.0, has(2, 2))
    rules.wrote(has(2, 2))
    assert not rules.tick(5.0, has(3, 2))
    assert not rules.tick(13.9, has(4, 2))
    assert rules.tick(14.0, has(4, 2))
    never = rules_of(math.inf)
    assert not any(never.tick(now, has(1)) for now in (1.0, 2.0, 1e9))


def test_only_changes_are_written_and_a_position_only_at_the_end():
    rules = rules_of()
    rules.wrote(has(3, position=1))
    assert not rules.has_changed(has(3, position=1))
    assert rules.has_changed(has(4, position=2))
    assert rules.has_changed(has(3, instance="another", position=1))
    assert not rules.has_changed(has(3, position=2))
    assert rules.has_moved(has(3, position=2))
    assert not rules.has_moved(has(3, position=1))
    rules.begins(rules.requested_snapshot(1))
    assert not rules.has_changed(has(4))
    assert not rules.has_moved(has(4, position=9))
    rules.begin("another")
    assert rules.has_changed(has(4))


def test_request_while_a_snapshot_is_written_is_not_forgotten():
    rules = rules_of()
    assert not rules.takes_ask()
    rules.ask()
    assert rules.is_writing
    assert rules.takes_ask()
    rules.ask()
    rules.done()
    assert rules.is_writing
    assert rules.takes_ask()
    rules.done()
    assert not rules.is_writing
    rules.ask()
    rules.end()
    assert not rules.takes_ask()


def test_failure_is_new_once_until_a_snapshot_is_written():
    rules = rules_of()
    assert rules.failed("no room")
    assert not rules.failed("no room")
    rules.wrote(has(1))
    assert (rules.error, rules.num_written) == ("", 1)
    assert rules.failed("no room")
    rules.wrote(has(2))
    rules.end()
    assert not rules.failed("the server ends")


# --- requests -------------------------------------------------------------------------------------------------


def go_back(rules, epoch, progress):
    request = rules.requested_restore(epoch)
    rules.begins(request)
    rules.restored(request, progress, {"incarnation": "me", "epoch": epoch})


def test_server_that_restarts_and_goes_back_writes_nothing_at_intervals():
    """Two snapshots of its own would replace the file of the last epoch that all servers have."""
    rules = rules_of(restored={"incarnation": "me", "epoch": 5})
    rules.begin("me")
    assert rules.has_changed(has(1))
    go_back(rules, 4, has(2))
    assert rules.tick(10.0, has(3))
    assert not rules.has_changed(has(3))
    assert not rules.has_moved(has(3, position=9))


def test_request_is_late_once_another_has_arrived():
    rules = rules_of()
    first, again = rules.requested_snapshot(5), rules.requested_snapshot(5)
    message(SnapshotError, lambda: rules.begins(first), "epoch 5 is late", "higher epoch")
    rules.begins(again)
    waiting = rules.requested_snapshot(6)
    rewind = rules.requested_restore(5)
    message(SnapshotError, lambda: rules.begins(waiting), "epoch 6 is late")
    rules.begins(rewind)
    later = rules.requested_snapshot(7)
    message(SnapshotError, lambda: rules.begins(rewind), "epoch 5 is late")
    rules.begins(later)


def test_epoch_below_an_earlier_one_is_late_whatever_was_restored():
    rules = rules_of()
    rules.begins(rules.requested_snapshot(6))
    message(SnapshotError, lambda: rules.requested_snapshot(5), "epoch 5 is late", "epoch 6 has arrived")
    go_back(rules, 4, has(9))
    message(SnapshotError, lambda: rules.requested_snapshot(5), "is late")
    rules.begins(rules.requested_snapshot(7))


def test_request_of_an_earlier_coordinator_is_late_and_leaves_the_intervals_alone():
    rules = rules_of()
    rules.begin("first")
    waiting, rewind = rules.requested_snapshot(6), rules.requested_restore(5)
    rules.begin("second")
    for request in (waiting, rewind):
        message(SnapshotError, lambda request=request: rules.begins(request), "another coordinator")
    assert rules.has_changed(has(1))
    rules.begins(rules.requested_snapshot(1))  # it has its own numbers


def test_snapshot_that_was_read_while_another_coordinator_came_is_not_described():
    rules = rules_of()
    rules.begin("first")
    rewind = rules.requested_restore(5)
    rules.begins(rewind)
    rules.begin("second")
    told = {"incarnation": "first", "epoch": 5}
    message(SnapshotError, lambda: rules.restored(rewind, has(2), told), "epoch 5 is late")
    assert rules.restored_in("i") is None
    rewind = rules.requested_restore(6)
    rules.begins(rewind)
    rules.requested_restore(6)  # a newer request, which will restore it again
    rules.restored(rewind, has(2), {"incarnation": "second", "epoch": 6})
    assert rules.restored_in("i")["epoch"] == 6


def test_restarted_server_knows_the_epochs_of_its_coordinator():
    rules = rules_of(restored={"incarnation": "me", "epoch": 6})
    rules.begin("me")
    message(SnapshotError, lambda: rules.requested_snapshot(5), "is late")
    rules.begin("another")
    rules.requested_snapshot(1)


def test_description_of_what_was_restored_ends_with_the_values():
    rules = rules_of(restored={"incarnation": "me", "epoch": 6})
    assert rules.restored_in("i") == {"incarnation": "me", "epoch": 6}
    assert rules.restored_in("another") is None
    rules.begin("me")
    assert rules.restored_in("i") is not None
    rules.begin("another")
    assert rules.restored_in("i") is None


# --- the same with files --------------------------------------------------------------------------------------


def new_store(**values):
    store = Store()
    store.hello(ME)
    create(store, **values)
    return store


def test_late_request_writes_nothing_under_a_number_that_was_used_again(tmp_path):
    store = new_store(x=np.float32(0.0))
    turn = threading.Lock()
    keeper = SnapshotKeeper(store, tmp_path, math.inf, turn=turn)
    errors = []

    def late():
        try:
            keeper.take(5)
        except SnapshotError as error:
            errors.append(str(error))

    thread = threading.Thread(target=late)
    with turn:  # another snapshot is being written
        thread.start()
        until = time.monotonic() + 20.0
        while not keeper._rules._num_requests:
            assert time.monotonic() < until
            time.sleep(0.005)
        again = keeper._rules.requested_snapshot(5)  # the coordinator has given up, and asks again
    thread.join(20.0)
    assert not thread.is_alive()
    assert len(errors) == 1
    keeper._rules.begins(again)
    store.snapshot(tmp_path, 5)
    ask(store, "assign", [np.float32(7.0)], keys=["x"])
    with pytest.raises(SnapshotError, match="epoch 4 is late"):
        keeper.take(4)
    keeper.restore(5)
    assert ask(store, "step", pull=[["x", None]], program=None).arrays[0] == 0.0
    keeper.close()


def served(host):
    """Returns the service of a parameter server that begins at 0.0."""
    return TaskService(Task("ps", 0), host, {}, TaskSession("ps 0", 60.0, 0.0), clock=lambda: 0.0)


def test_server_describes_no_snapshot_whose_values_it_has_dropped(tmp_path):
    store = new_store(x=np.float32(1.0))
    store.snapshot(tmp_path)
    service = served(PsHost(tmp_path, math.inf, 0, Credentials()))
    assert service.ask("status", {})["restored"]["incarnation"] == ME
    service.watch(100.0)  # its coordinator is silent
    status = service.ask("status", {})
    assert (status["incarnation"], status["restored"]) == (None, None)
    service.ask("hello", {"incarnation": ME, "ps": [], "again": True})
    assert service.ask("status", {})["restored"] is None
    service.close()


def test_server_that_goes_back_is_told_which_closures_have_ended_and_which_epoch_it_keeps(tmp_path):
    host = PsHost(tmp_path, math.inf, 0, Credentials())
    service = served(host)
    service.ask("hello", {"incarnation": ME, "ps": []})
    create(host._store, x=np.float32(1.0))
    for epoch in range(1, 5):
        ask(host._store, "assign", [np.float32(epoch)], keys=["x"])
        service.ask("snapshot", {"incarnation": ME, "epoch": epoch, "kept_epoch": 1})
    told = service.ask("restore", {"incarnation": ME, "epoch": 1, "stop": 5, "unfinished": [3]})
    assert told["restored"]["epoch"] == 1
    assert ask(host._store, "step", pull=[["x", None]], program=None).arrays[0] == 1.0
    window = host._store._contents.rules.windows.window_of(ME)
    assert [number for number in range(7) if number not in window] == [3, 5, 6]
    service.close()


@pytest.mark.parametrize(("reader", "method"), [(SnapshotFolder, "latest_complete"), (Snapshot, "value")])
def test_coordinator_that_comes_while_a_snapshot_is_read_keeps_what_it_makes(
    tmp_path, monkeypatch, reader, method
):
    host = PsHost(tmp_path, math.inf, 0, Credentials())
    service = served(host)
    service.ask("hello", {"incarnation": ME, "ps": []})
    create(host._store, x=np.float32(1.0))
    service.ask("snapshot", {"incarnation": ME, "epoch": 1})
    read = getattr(reader, method)

    def slowly(self, *arguments):
        result = read(self, *arguments)
        host.begin("another", [])
        shard = {"key": "y", "shape": [], "dtype": "float32", "initial": "array"}
        ask(host._store, "create", [np.float32(2.0)], incarnation="another", shards=[shard])
        return result

    monkeypatch.setattr(reader, method, slowly)
    with pytest.raises(SnapshotError, match="belongs to coordinator another now"):
        host.asks["restore"]({"incarnation": ME, "epoch": 1})
    assert host._store.statistics()["shards"] == 1
    pulled = ask(host._store, "step", incarnation="another", pull=[["y", None]], program=None)
    assert pulled.arrays[0] == 2.0
    assert host.restored is None
    monkeypatch.undo()
    assert host.asks["snapshot"]({"incarnation": "another", "epoch": 1})["is_base"]
    service.close()


def test_server_describes_no_group_that_it_has_dropped(tmp_path):
    store = new_store(x=np.float32(1.0))
    folder = tmp_path / "group-0"
    store._snapshots.write(folder, 0, lambda: nullcontext({"position": [1, 9]}))
    service = served(PsHost(tmp_path, math.inf, 0, Credentials()))
    assert service.ask("status", {})["restored"]["groups"]["0"]["position"] == [1, 9]
    service.watch(100.0)
    assert service.ask("status", {})["restored"] is None
    service.close()
