"""The return of a parameter server that has been replaced by another, without processes."""

import math
import threading
import time
from types import SimpleNamespace

import pytest

from checks import message
from replicax._ps.client.groups import Groups
from replicax._ps.coordinator import lost_groups
from replicax._ps.coordinator.closures import ClosureQueue
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.pool import WorkerPool
from replicax._ps.coordinator.ps_replication import Replication
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._ps.coordinator.scheduled_work import Work
from replicax._ps.task.service import TaskService
from replicax._ps.task.session_rules import TaskSession
from replicax._ps.task.work import PsHost
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.spec import Task
from replicax._src.vocabulary.errors import InvalidArgumentError, UnavailableError

ME = "me"


class Ps:
    """A parameter server, and the connection to it."""

    def __init__(self, index):
        task, host = Task("ps", index), PsHost(None, math.inf, index, Credentials())
        self.service = TaskService(task, host, {}, TaskSession(str(task), 60.0, time.monotonic()))
        self.is_cut = False

    def ask(self, what, header, timeout_s):
        if self.is_cut:
            raise UnavailableError("It is cut off.")
        return self.service.ask(what, header)

    def close(self):
        pass


class Session:
    incarnation, ps_addresses, num_workers = ME, ("127.0.0.1:1", "127.0.0.1:2"), 0
    snapshot_intervals_s = (None, None)

    def __init__(self):
        self.groups, self.ps = Groups(2), [Ps(0), Ps(1)]
        for ps in self.ps:
            ps.ask("hello", {"incarnation": ME, "ps": list(self.ps_addresses)}, 1.0)
        for view in self.groups.views:
            for task in view.members:
                self.send_view(task, view, 1.0)

    def connect(self, job, index):
        return self.ps[index]

    def send_view(self, task, view, timeout_s):
        header = {"incarnation": ME, "view": view.described(), "ps": list(self.ps_addresses)}
        self.ps[task].ask("group", header, timeout_s)

    def use_primaries(self):
        pass


def pool_of(session):
    return WorkerPool(ClosureQueue(), session, Limits())


class Events:
    """As ``ServerMonitor`` reports."""

    def __init__(self, session):
        self.replication = Replication(session, pool_of(session), lambda: None)
        self.is_lost, self.errors = threading.Event(), []

    def on_ps_silent(self, watch):
        pass

    def on_ps_lost(self, watch, error, *, may_come_back):
        assert not may_come_back
        self.errors.append(self.replication.lost(watch, error))
        self.is_lost.set()
        return True

    def on_ps_given_up(self, watch, client):
        self.replication.given_up(client)

    def on_ps_restarted(self, watch, client):
        return self.replication.restarted(watch, client)

    def on_ps_back(self, watch):
        self.replication.back(watch)


@pytest.fixture
def session():
    session = Session()
    yield session
    for ps in session.ps:
        ps.service.close()


def test_server_cut_off_for_long_becomes_a_backup_again(session):
    events = Events(session)
    watch = PsWatch(1, session, Limits(heartbeat_s=0.02), events)
    watch.start()
    try:
        until(lambda: watch.statistics()["statistics"])
        one = session.ps[1]
        one.is_cut = True
        assert events.is_lost.wait(20.0)
        assert session.groups.primaries == [0, 0]
        one.service.watch(time.monotonic() + 61.0)
        assert one.service.incarnation is None
        one.is_cut = False
        until(lambda: all(view.backup == 1 and view.is_joining for view in session.groups.views))
        until(lambda: one.service.statistics().get("groups", {}).keys() == {"0", "1"})
        assert events.errors == [None]
    finally:
        watch.close()
        watch.join(20.0)


def test_nothing_waits_while_servers_are_told(session, monkeypatch):
    replication, goes_on = Events(session).replication, threading.Event()
    monkeypatch.setattr(session, "send_view", lambda task, view, timeout_s: goes_on.wait(60.0))
    watch = PsWatch(1, session, Limits(), None)
    losing = threading.Thread(target=lambda: replication.lost(watch, UnavailableError("It is gone.")))
    losing.start()
    until(lambda: replication.statistics()["unprotected"] == [0, 1])
    assert replication.statistics()["primaries"] == [0, 0]
    assert replication.silent(PsWatch(0, session, Limits(), None)) is None
    assert losing.is_alive()
    goes_on.set()
    losing.join()


# --- both servers of a group are gone, and write snapshots --------------------------------------------------


class Told:
    """The reports of a parameter server. ``positions``: the position of its data, by group."""

    def __init__(self, instance, *positions, is_ours=True):
        self.instance, self.views, self.refuses = instance, [], False
        parts = {
            str(group): {"epoch": 0, "position": position, "backup": "none", "updates": position[1]}
            for group, position in enumerate(positions)
        }
        self.statistics = {"groups": parts} if parts else {}
        groups = {
            name: {"position": list(part["position"]), "keys": ["w"], "age_s": 3.0, "applied": [4, 4]}
            for name, part in parts.items()
        }
        self.restored = {"incarnation": ME if is_ours else "another", "groups": groups} if groups else None

    def ask(self, what, header, timeout_s):
        told = {"instance": self.instance, "restored": self.restored, "statistics": self.statistics}
        return {"status": told, "hello": told}[what]


class SessionWithSnapshots:
    incarnation, ps_addresses, num_workers = ME, ("a:1", "b:1"), 0
    snapshot_intervals_s = (60.0, 60.0)

    def __init__(self):
        self.groups, self.ps = Groups(2), [Told("first"), Told("first")]
        self.missing, self.went_on = [], []

    def send_view(self, task, view, timeout_s):
        if self.ps[task].refuses:
            raise InvalidArgumentError("It does not have all.")
        self.ps[task].views.append(view)

    def use_primaries(self):
        pass

    def restored(self, group, keys):
        self.went_on.append((group, keys))
        return self.missing

    def names_on(self, group):
        return [f"w{group}"]


class Both:
    """Two watched servers, and the events of their watches."""

    def __init__(self, comes_back_s=60.0):
        self.session = SessionWithSnapshots()
        self.pool = pool_of(self.session)
        self.queue = self.pool.queue
        self.queue.back("worker 0")
        self.replication = Replication(self.session, self.pool, lambda: None, comes_back_s)
        self.watches = [PsWatch(n, self.session, Limits(), None) for n in range(2)]
        for watch in self.watches:
            watch.accept("first")

    def heartbeat(self, task):
        """It reports the views that it has taken."""
        ps = self.session.ps[task]
        for view in ps.views:
            ps.statistics["groups"][str(view.group)]["epoch"] = view.epoch
        self.watches[task]._note(ps.statistics)
        self.replication.back(self.watches[task])

    def lost(self, task):
        return self.replication.lost(self.watches[task], UnavailableError("It is gone."))

    def both_lost(self):
        assert self.lost(0) is None
        assert not self.is_paused
        assert self.lost(1) is None
        assert self.is_paused

    def restarted(self, task, *positions, **how):
        self.session.ps[task] = Told("second", *positions, **how)
        left = self.replication.restarted(self.watches[task], self.session.ps[task])
        if left is None:
            self.replication.back(self.watches[task])
        return left

    @property
    def is_paused(self):
        self.queue.schedule("step", SimpleNamespace(value=SimpleNamespace(settle=lambda *_: None)))
        closure = self.queue.take("worker 0")
        if closure is not None:
            self.queue.finished("worker 0", closure)
        return closure is None


@pytest.fixture
def both():
    return Both()


def test_both_servers_restart_from_the_newer_state(both, caplog):
    for task in range(2):
        part = {"epoch": 1, "position": (1, 9), "backup": "in sync", "updates": 9}
        both.session.ps[task].statistics = {"groups": {"0": dict(part), "1": dict(part)}}
        both.heartbeat(task)
    both.both_lost()
    assert both.restarted(1, (1, 5), (1, 7)) is None
    assert both.is_paused
    assert both.restarted(0, (1, 6), (1, 6)) is None
    views = both.session.groups.views
    assert [(view.primary, view.since) for view in views] == [(0, (1, 6)), (1, (1, 7))]
    assert both.is_paused  # until both have said that they lead
    both.heartbeat(0)
    both.heartbeat(1)
    assert not both.is_paused
    assert both.session.went_on == [(0, ["w"]), (1, ["w"])]
    assert "on ps 0, taken 3 s before: about 3 acknowledged updates" in caplog.text
    assert "on ps 1, taken 3 s before: about 2 acknowledged updates" in caplog.text


def test_server_lost_while_its_group_resumes_is_waited_for_again(both, monkeypatch):
    """Sending its programs may take long."""
    begun, goes_on = threading.Event(), threading.Event()

    def restored(group, keys):
        begun.set()
        assert goes_on.wait(20.0)
        return []

    both.both_lost()
    for task in range(2):
        both.restarted(task, (1, 5), (1, 5))
    monkeypatch.setattr(both.session, "restored", restored)
    resuming = threading.Thread(target=both.heartbeat, args=(1,))
    resuming.start()
    assert begun.wait(20.0)
    assert both.lost(1) is None
    assert both.replication.statistics()["lost"] == [0, 1]
    goes_on.set()
    resuming.join(20.0)
    assert both.is_paused
    both.restarted(1, (1, 5), (1, 5))
    both.heartbeat(1)
    assert not both.is_paused


def test_single_server_resumes_after_the_wait(both, monkeypatch):
    both.both_lost()
    both.restarted(1, (1, 5), (1, 7))
    assert both.session.groups.lost == [0, 1]
    monkeypatch.setattr(lost_groups, "_PARTNER_S", 0.0)
    both.heartbeat(1)
    assert both.session.groups.primaries == [1, 1]
    both.heartbeat(1)
    assert not both.is_paused


@pytest.mark.parametrize("is_ours", [True, False])
def test_job_ends_without_a_snapshot_of_this_coordinator(both, is_ours):
    both.both_lost()
    positions = [] if is_ours else [(1, 5), (1, 7)]
    assert both.restarted(1, *positions, is_ours=is_ours) is None
    left = both.restarted(0, *positions, is_ours=is_ours)
    assert left is both.lost(0)  # so its watch says it again
    assert "ps 1" in str(left)


def test_without_snapshots_a_lost_group_ends_the_job():
    """Even if the other server has a copy that was not in sync: updates would be lost silently."""
    both = Both(comes_back_s=0.0)
    both.session.groups.status_received(0, {"0": {"epoch": 1, "position": (1, 9), "backup": "lost"}})
    both.session.ps[1] = Told("first", (1, 8), (1, 8))
    assert isinstance(both.restarted(0), UnavailableError)
    both.heartbeat(1)
    assert both.session.groups.lost == [0]


def test_wait_for_servers_is_bounded():
    both = Both()
    both.both_lost()
    assert both.replication.silent(both.watches[1]) is None
    both.restarted(1, (1, 5), (1, 7))
    both.replication._lost.comes_back_s = 0.01
    time.sleep(0.02)
    assert both.replication.silent(both.watches[0]).task == "ps 0"


def test_a_snapshot_that_lacks_variables_ends_the_job(both):
    both.session.missing = ["dense/kernel"]
    both.both_lost()
    both.restarted(0, (1, 5), (1, 7))
    both.restarted(1, (1, 5), (1, 7))
    both.heartbeat(1)
    message(UnavailableError, lambda: both.pool.schedule("step", Work(None, None)), "dense/kernel")


def test_server_with_another_position_than_reported_is_not_the_primary(both):
    both.both_lost()
    both.restarted(0, (1, 6), (1, 6))
    both.session.ps[0].refuses = True  # it has dropped what it had since
    both.restarted(1, (1, 5), (1, 5))
    assert both.session.groups.lost == [0, 1]
    both.session.ps[0].refuses = False
    for part in both.session.ps[0].statistics["groups"].values():
        part["position"] = (0, 0)
    both.heartbeat(0)
    assert both.session.groups.primaries == [1, 1]


def until(is_so):
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
