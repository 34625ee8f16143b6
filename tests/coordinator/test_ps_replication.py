"""What is done when a parameter server that others stand in for answers again; without processes."""

import math
import threading
import time

import pytest

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.spec import Task
from replicax._src.coordinator.closures import ClosureQueue
from replicax._src.coordinator.dispatch import Dispatch
from replicax._src.coordinator.ps_replication import Replication
from replicax._src.coordinator.ps_watch import PsWatch
from replicax._src.coordinator.workers import Limits
from replicax._src.ps.errors import UnavailableError
from replicax._src.ps.groups import Groups
from replicax._src.ps.service import TaskService
from replicax._src.ps.lease import Lease
from replicax._src.ps.work import PsHost

ME = "me"


class Ps:
    """A parameter server, and the way to it."""

    def __init__(self, index):
        task, host = Task("ps", index), PsHost(None, math.inf, index, Credentials())
        self.service = TaskService(task, host, {}, Lease(str(task), 60.0, time.monotonic()))
        self.is_cut = False

    def ask(self, what, header, timeout_s):
        if self.is_cut:
            raise UnavailableError("It is cut off.")
        return self.service.ask(what, header)

    def close(self):
        pass


class Session:
    incarnation, ps_addresses = ME, ("127.0.0.1:1", "127.0.0.1:2")

    def __init__(self):
        self.groups, self.ps = Groups(2), [Ps(0), Ps(1)]
        for ps in self.ps:
            ps.ask("hello", {"incarnation": ME, "ps": list(self.ps_addresses)}, 1.0)
        for view in self.groups.views:
            for task in view.members:
                self.tell_view(task, view, 1.0)

    def connect(self, job, index):
        return self.ps[index]

    def tell_view(self, task, view, timeout_s):
        header = {"incarnation": ME, "view": view.described(), "ps": list(self.ps_addresses)}
        self.ps[task].ask("group", header, timeout_s)

    def use_primaries(self):
        pass


class Events:
    """As ``Crew`` tells."""

    def __init__(self, session):
        self.replication = Replication(session, Dispatch(ClosureQueue()), lambda: None)
        self.is_lost, self.errors = threading.Event(), []

    def on_ps_silent(self, watch):
        pass

    def on_ps_lost(self, watch, error):
        self.errors.append(self.replication.lost(watch, error))
        self.is_lost.set()

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


def test_one_that_was_cut_off_until_it_gave_the_coordinator_up_is_a_backup_again(session):
    events = Events(session)
    watch = PsWatch(1, session, Limits(beat_s=0.02), events)
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


def test_who_asks_how_it_is_does_not_wait_for_servers_that_are_told(session, monkeypatch):
    replication, goes_on = Events(session).replication, threading.Event()
    monkeypatch.setattr(session, "tell_view", lambda task, view, timeout_s: goes_on.wait(60.0))
    watch = PsWatch(1, session, Limits(), None)
    losing = threading.Thread(target=lambda: replication.lost(watch, UnavailableError("It is gone.")))
    losing.start()
    until(lambda: replication.statistics()["unprotected"] == [0, 1])
    assert replication.statistics()["primaries"] == [0, 0]
    assert losing.is_alive()
    goes_on.set()
    losing.join()


def until(is_so):
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
