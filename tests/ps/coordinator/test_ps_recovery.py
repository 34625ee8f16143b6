"""The return of a parameter server: cases that real servers do not show in a test."""

import contextlib
import logging
import threading

import pytest

from checks import message
from replicax._ps.client.groups import Groups
from replicax._ps.coordinator.closures import ClosureQueue
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.pool import WorkerPool
from replicax._ps.coordinator.ps_recovery import Epochs, Recovery
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._src.vocabulary.errors import InvalidArgumentError, RemoteError, UnavailableError


class Ps:
    """The answers of a parameter server. ``fails``: the questions that it does not answer."""

    def __init__(self, index):
        self.index, self.fails = index, set()
        self.instance, self.restored = "first", None
        self.asked = []

    def ask(self, what, header, timeout_s):
        if what != "status":
            self.asked.append((what, header.get("epoch")))
        if what in self.fails:
            raise RemoteError("No room.", "SnapshotError", f"ps {self.index}")
        if what == "restore":
            self.instance = f"{self.instance} again"
        return {"instance": self.instance, "restored": self.restored}

    def close(self):
        pass


class Session:
    incarnation, num_made, num_workers, ps_addresses, groups = "me", 1, 0, ("a", "b"), None

    def __init__(self, snapshot_intervals_s=(60.0, 30.0)):
        self.snapshot_intervals_s = snapshot_intervals_s
        self.ps = [Ps(0), Ps(1)]
        self.was_restored, self.missing = [], []

    def connect(self, job, index):
        return self.ps[index]

    def restored(self, ps, keys):
        self.was_restored.append((ps, keys))
        return self.missing

    def names_on(self, ps):
        return [f"w{n}" for n in range(7)]


@pytest.fixture
def session():
    return Session()


@pytest.fixture
def pool(session):
    return WorkerPool(ClosureQueue(), session, Limits())


def watching(session, recovery, comes_back_s=10.0):
    """The watch of ps 0, which is another process after ``started_again``."""
    watches = [PsWatch(n, session, Limits(), None, comes_back_s) for n in range(2)]
    for watch in watches:
        watch.accept("first")
    recovery._watches = watches
    return watches[0]


def started_again(session):
    session.ps[0].instance = "second"


def kept(**what):
    return {"incarnation": "me", "updates": 3, "keys": ["w"], **what}


def test_modes_of_recovery(session, pool):
    message(InvalidArgumentError, lambda: Recovery(session, pool, "stop"), "'stop'", "'continue' or 'rewind'")
    copied = Session()
    copied.groups = Groups(2)
    message(InvalidArgumentError, lambda: Recovery(copied, pool, "rewind"), "replication=2", "'continue'")
    some = Session((60.0, None))
    Recovery(some, pool, "continue")
    message(InvalidArgumentError, lambda: Recovery(some, pool, "rewind"), "ps 1 takes none", "--snapshot-dir")


def test_server_continues_with_its_snapshot(session, pool, caplog):
    recovery = Recovery(session, pool, "continue")
    watch = watching(session, recovery)
    started_again(session)
    session.ps[0].restored, watch.num_updates = kept(age_s=14.2, applied=[4, 6]), 8
    assert recovery.restarted(watch, session.ps[0]) is None
    assert session.was_restored == [(0, ["w"])]
    assert "14 s before: about 5 updates" in caplog.text
    assert "w0, w1, w2, w3, w4 and 2 more" in caplog.text
    assert "the first 4, and some of the next 2" in caplog.text
    assert watch.knows("second")
    assert recovery.restarted(watch, session.ps[0]) is None  # asked again, by a heartbeat that was late
    assert len(session.was_restored) == 1


@pytest.mark.parametrize(
    ("restored", "missing", "says"),
    [
        (None, [], "no snapshot of this coordinator's session"),
        (kept(incarnation="another"), [], "no snapshot of this coordinator's session"),
        (kept(), ["dense/kernel"], "dense/kernel"),
    ],
)
def test_server_that_returns_without_the_variables_is_lost(session, pool, restored, missing, says):
    recovery = Recovery(session, pool, "continue")
    watch = watching(session, recovery)
    started_again(session)
    session.ps[0].restored, session.missing = restored, missing
    error = recovery.restarted(watch, session.ps[0])
    assert isinstance(error, UnavailableError)
    assert error.task == "ps 0"
    assert says in str(error)
    assert not watch.knows("second")


def test_all_go_back_to_the_last_epoch_that_all_have(session, pool, caplog):
    recovery = Recovery(session, pool, "rewind")
    watch = watching(session, recovery)
    for ps in session.ps:
        ps.restored = kept()
    recovery._epochs._take()
    recovery._epochs._take()
    session.ps[1].fails.add("snapshot")
    recovery._epochs._take()
    session.ps[1].fails.clear()
    started_again(session)
    recovery._epochs._take()  # sooner than the heartbeat that finds it: what is older than the others is no epoch with them
    assert recovery._epochs.last == 2
    assert recovery.restarted(watch, session.ps[0]) is None
    assert [ps.asked[-1] for ps in session.ps] == [("restore", 2), ("restore", 2)]
    assert session.was_restored == [(0, ["w"]), (1, ["w"])]
    assert all(each.knows(ps.instance) for each, ps in zip(recovery._watches, session.ps))
    assert "went back to the snapshots of epoch 2" in caplog.text
    recovery._epochs._take()
    assert recovery._epochs.last == 5


def test_rewind_needs_a_common_epoch(session, pool):
    recovery = Recovery(session, pool, "rewind")
    watch = watching(session, recovery)
    started_again(session)
    session.ps[0].restored = kept()
    assert "no common snapshot" in str(recovery.restarted(watch, session.ps[0]))


def test_server_that_cannot_rewind_is_lost(session, pool):
    recovery = Recovery(session, pool, "rewind")
    watch = watching(session, recovery)
    for ps in session.ps:
        ps.restored = kept()
    recovery._epochs._take()
    started_again(session)
    session.ps[1].fails.add("restore")
    error = recovery.restarted(watch, session.ps[0])
    assert error.task == "ps 1"
    assert "epoch 1: No room." in str(error)


def test_epoch_that_one_server_cannot_write_is_not_repeated_by_others(session, pool, caplog):
    epochs = Epochs(session, pool, threading.Lock(), lambda index, instance: True)
    first, second = session.ps
    second.fails.add("snapshot")
    for _ in range(3):
        epochs._take()
    assert epochs.last == 0
    assert len(first.asked) == 1
    assert len(second.asked) == 3
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    second.fails.clear()
    epochs._take()
    assert (
        epochs.last == 4
    )  # the earlier numbers are not used again: a server may still write these snapshots
    assert [first.asked[-1], second.asked[-1]] == [("snapshot", 4), ("snapshot", 4)]


def test_queue_is_empty_when_all_write(session, pool):
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(pool.drained())
        pool.queue.back("a")
        pool.queue.schedule("step", None)
        assert pool.queue.take("a") is None
    assert pool.queue.finished("a", pool.queue.take("a"))
    pool.broke(RuntimeError("all is lost"))
    with pool.drained() as is_so:
        assert not is_so


def test_no_server_resumes_if_another_is_unreachable_in_a_rewind(session, pool, monkeypatch):
    recovery = Recovery(session, pool, "rewind")
    watch = watching(session, recovery)
    for ps in session.ps:
        ps.restored = kept()
    recovery._epochs._take()
    started_again(session)
    ask = session.ps[1].ask

    def out_of_reach(what, header, timeout_s):
        if what == "restore":
            raise UnavailableError("It is cut off.", "ps 1")
        return ask(what, header, timeout_s)

    monkeypatch.setattr(session.ps[1], "ask", out_of_reach)
    with pytest.raises(UnavailableError):
        recovery.restarted(watch, session.ps[0])
    assert not watch.knows(session.ps[0].instance)  # so that it is tried again with the next heartbeat
    monkeypatch.undo()
    assert recovery.restarted(watch, session.ps[0]) is None
    assert all(each.knows(ps.instance) for each, ps in zip(recovery._watches, session.ps))


def test_unrelated_failure_stays(pool):
    pool.broke(UnavailableError("All workers are given up."))
    pool.broke(UnavailableError("ps 0 is lost."), "ps 0")
    pool.mended("ps 0")
    assert pool.queue.is_broken
    pool.mended("ps 1")
    assert pool.queue.is_broken
