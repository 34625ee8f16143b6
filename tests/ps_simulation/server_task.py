"""``ServerTask``: a simulated parameter server. Its store is ``IntegerStore``; its lease, groups and log are the real ones."""

import math

from ps_simulation.group_task import GroupTask
from ps_simulation.integer_store import IntegerStore
from ps_simulation.snapshot_disk import Snapshot, restored_of
from ps_simulation.snapshot_times import SnapshotTimes
from ps_simulation.task_process import TaskProcess
from replicax._ps.store.group_rules import View
from replicax._ps.task.lease import Lease
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
    SnapshotError,
    StaleCoordinatorError,
    UnavailableError,
)

SILENCE_S = 60.0
TICK_S = 1.0


def ps(index):
    return f"ps {index}"


class ServerTask(TaskProcess):
    """One process of a parameter server, as ``TaskService`` and ``PsHost`` have it.

    Args:
      scenario: Has ``names``, which never repeat, and ``write_s``.
      index: The number of the server.
      disk: Its snapshots; None if it writes none.
      interval_s: The time between two snapshots.
    """

    def __init__(self, scenario, world, index, disk=None, interval_s=math.inf):
        super().__init__(world, ps(index))
        self.scenario, self.index, self.disk, self.interval_s = scenario, index, disk, interval_s
        self.lease = Lease(self.name, SILENCE_S, world.now)
        self.store = self.new_store()
        self.groups = {}
        self.owner = None  # whose groups these are
        self.restored = self.times = None
        self._restored_groups = {}

    def new_store(self, incarnation=None):
        return IntegerStore(self.scenario.names.next(f"{self.name} store"), incarnation)

    def start(self):
        if self.disk is not None:
            self._restore_newest()
            self.times = SnapshotTimes(self, self, self.interval_s)
        if self.all_restored is not None:
            self._begin(self.all_restored["incarnation"])
        self.after(TICK_S, self._watch)

    def _watch(self):
        if self.lease.is_silent(self.world.now):
            self.world.trace(f"    {self.name} ends the session of {self.lease.incarnation}, which is silent")
            self.lease.give_up(self.world.now)
            self._drop()
        self.after(TICK_S, self._watch)

    # --- requests -----------------------------------------------------------------------------------

    def answer(self, request, connection):
        asked = request.get("ask")
        if asked is not None:
            return getattr(self, f"_ask_{asked}")(request)
        self.lease.check(request["incarnation"])
        if "group" not in request:
            return self.store.answer(request)
        group = self.groups.get(request["group"])
        if group is None:
            raise UnavailableError(f"{self.name} does not hold group {request['group']} in its newest view.")
        if request["op"] in ("forward", "copy"):
            return group.forwarded(request)
        return group.answer(request)

    def _ask_hello(self, request):
        self._begin(request["incarnation"], again=bool(request.get("again")))
        return self._described()

    def _ask_heartbeat(self, request):
        self.lease.heartbeat(request["incarnation"], self.world.now)
        return {"instance": self.store.instance, "statistics": self.statistics()}

    def _ask_status(self, request):
        told = {"incarnation": self.lease.incarnation, "statistics": self.statistics()}
        return {**self._described(), **told}

    def _ask_leave(self, request):
        if self.lease.leave(request["incarnation"], self.world.now):
            self._drop()
        return {}

    def _ask_group(self, request):
        self.lease.check(request["incarnation"])
        if request["incarnation"] != self.owner:
            raise StaleCoordinatorError(f"The session of coordinator {request['incarnation']} has ended.")
        view = View.of(request["view"])
        if view.group not in self.groups:
            self.groups[view.group] = GroupTask(self, view.group, self.owner)
        self.world.trace(f"    {self.name} is told of {view}")
        self.groups[view.group].take(view)
        return {"groups": self._groups_described()}

    def _ask_snapshot(self, request):
        self.lease.check(request["incarnation"])
        if self.times is None:
            raise InvalidArgumentError(f"{self.name} was asked 'snapshot', but it writes none.")
        return self._take_snapshot(request["epoch"])

    def _take_snapshot(self, epoch):
        yield from self.times.take(epoch)
        return {"epoch": epoch}

    def _ask_restore(self, request):
        self.lease.check(request["incarnation"])
        snapshot = self.disk.newest("", request["epoch"])
        if snapshot is None:
            raise SnapshotError(f"None of the snapshots is of epoch {request['epoch']}.")
        self._restore(snapshot)
        return {"instance": self.store.instance, "restored": self.restored}

    # --- sessions -----------------------------------------------------------------------------------

    def _begin(self, incarnation, *, again=False):
        if not self.lease.hello(incarnation, self.world.now, again=again):
            return
        self._drop(keeps=incarnation)
        if self.times is not None:
            self.times.begin()
        if self.owner != incarnation:
            self._close_groups()
            self._restored_groups = {}
        self.owner = incarnation
        self.store.hello(incarnation)

    def _drop(self, keeps=None):
        """Drops the data of the session, but not what was restored of the session that begins."""
        if self.owner not in (None, keeps):
            self._close_groups()
            self.store.leave(self.scenario.names.next(f"{self.name} store"))
            self.owner = None

    def _close_groups(self):
        for group in self.groups.values():
            group.close()
        self.groups = {}

    # --- snapshots ----------------------------------------------------------------------------------

    def _restore_newest(self):
        newest = {name: self.disk.newest(name) for name in self.disk.folders}
        newest = {name: snapshot for name, snapshot in newest.items() if snapshot is not None}
        if not newest:
            return
        incarnation = max(newest.values(), key=lambda each: each.at).content["incarnation"]
        for name, snapshot in newest.items():
            if snapshot.content["incarnation"] != incarnation:
                continue
            if not name:
                self._restore(snapshot)
                continue
            self.owner = incarnation
            number = int(name.removeprefix("group "))
            group = self.groups[number] = GroupTask(self, number, incarnation)
            self._restored_groups[str(number)] = group.restore(snapshot)

    def _restore(self, snapshot):
        self.store.take(snapshot.content, snapshot.counters, self.scenario.names.next(f"{self.name} store"))
        self.restored = restored_of(snapshot, self.store, self.world.now)

    @property
    def all_restored(self):
        if self._restored_groups:
            return {"incarnation": self.owner, "groups": self._restored_groups}
        return self.restored

    @property
    def progress(self):
        return self.store.instance, self.store.num_changes

    @property
    def num_created(self):
        return self.store.num_created

    @property
    def holds_counters(self):
        return bool(self.store.counters)

    def write(self, epoch):
        """Writes a snapshot of the store as it is now. It is there when it is complete."""
        snapshot = Snapshot(self.store.described(), dict(self.store.counters), epoch, None, self.world.now)
        yield self.scenario.write_s
        self.disk.write("", snapshot)
        self.world.moment("snapshot")

    # --- what it tells ------------------------------------------------------------------------------

    def statistics(self):
        if self.groups:
            served = [each for each in self.groups.values() if each.rules.is_primary]
            updates = sum(each.store.num_updates for each in served)
            return {"updates": updates, "groups": self._groups_described()}
        return {"updates": self.store.num_updates, "shards": len(self.store.counters)}

    def _groups_described(self):
        return {str(number): each.described() for number, each in sorted(self.groups.items())}

    def _described(self):
        return {
            "instance": self.store.instance,
            "task": self.name,
            "restored": self.all_restored,
            "snapshots": None if self.disk is None else {"interval_s": self.interval_s},
        }
