"""``ServerTask``: a simulated parameter server. Its store is ``IntegerStore``; its session, groups and log are the real ones."""

import math

from ps_simulation.group_task import GroupTask
from ps_simulation.integer_store import IntegerStore
from ps_simulation.snapshot_disk import SnapshotFiles, restored_of
from ps_simulation.snapshot_writing import SnapshotWriting
from ps_simulation.task_process import TaskProcess
from ps_simulation.turns import Turns
from replicax._ps.store.group_rules import View
from replicax._ps.store.keeper_rules import Progress
from replicax._ps.task.session_rules import TaskSession
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
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

    Attributes:
      began_at: The time at which it began.
      restored_truth: The counters with which it began; see ``truth``.
    """

    def __init__(self, scenario, world, index, disk=None, interval_s=math.inf):
        super().__init__(world, ps(index))
        self.scenario, self.index, self.disk, self.interval_s = scenario, index, disk, interval_s
        self.session = TaskSession(self.name, SILENCE_S, world.now)
        self.store = self.new_store()
        self.groups = {}
        self.owner = None  # whose groups these are
        self.writing = None
        self._files = None if disk is None else SnapshotFiles(disk, "")
        self._turns = {}
        self._restored_groups = {}
        self.began_at, self.restored_truth = world.now, {}

    def new_store(self, incarnation=None):
        return IntegerStore(self.scenario.names.next(f"{self.name} store"), incarnation)

    def start(self):
        if self.disk is not None:
            self._restore_newest()
            self.writing.start()
        self.restored_truth = self.truth()
        if self.all_restored is not None:
            self._begin(self.all_restored["incarnation"])
        self.after(TICK_S, self._watch)

    def turns_of(self, group):
        """Returns the turns of all that write snapshots of a group."""
        return self._turns.setdefault(group, Turns())

    def _watch(self):
        incarnation = self.session.incarnation
        if self.session.time_passed(self.world.now):
            self.world.trace(f"    {self.name} ends the session of {incarnation}, which is silent")
            self.scenario.note_session_ended(self)
            self._drop()
        self.after(TICK_S, self._watch)

    # --- requests -----------------------------------------------------------------------------------

    def answer(self, request, connection):
        asked = request.get("ask")
        if asked is not None:
            return getattr(self, f"_ask_{asked}")(request)
        self.session.check(request["incarnation"])
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
        self.session.heartbeat(request["incarnation"], self.world.now)
        return {"instance": self.store.instance, "statistics": self.statistics(), "truth": self.truth()}

    def _ask_status(self, request):
        told = {"incarnation": self.session.incarnation, "statistics": self.statistics()}
        return {**self._described(), **told, "truth": self.truth()}

    def truth(self):
        """Returns the counters that it has now, for checks: with groups a dict for each group."""
        if self.groups:
            return {number: dict(each.store.counters) for number, each in self.groups.items()}
        return dict(self.store.counters)

    def _ask_leave(self, request):
        if self.session.leave(request["incarnation"], self.world.now):
            self._drop()
        return {}

    def _ask_group(self, request):
        self.session.check(request["incarnation"])
        if request["incarnation"] != self.owner:
            raise StaleCoordinatorError(f"The session of coordinator {request['incarnation']} has ended.")
        view = View.of(request["view"])
        if view.group not in self.groups:
            self.groups[view.group] = GroupTask(self, view.group, self.owner)
        self.world.trace(f"    {self.name} is told of {view}")
        self.groups[view.group].take(view)
        return {"groups": self._groups_described()}

    def _ask_snapshot(self, request):
        self.session.check(request["incarnation"])
        if self.writing is None:
            raise InvalidArgumentError(f"{self.name} was asked 'snapshot', but it writes none.")
        return self._take_snapshot(request["epoch"], request.get("kept_epoch", 0))

    def _take_snapshot(self, epoch, kept_epoch):
        yield from self.writing.take(epoch, kept_epoch)
        return {"epoch": epoch}

    def _ask_restore(self, request):
        self.session.check(request["incarnation"])
        self.store.rules.end(request["incarnation"], request["stop"], request["unfinished"])
        return self._go_back(request["epoch"])

    def _go_back(self, epoch):
        restored = yield from self.writing.go_back(epoch)
        return {"instance": self.store.instance, "restored": restored}

    # --- sessions -----------------------------------------------------------------------------------

    def _begin(self, incarnation, *, again=False):
        if not self.session.hello(incarnation, self.world.now, again=again):
            return
        self._drop(keeps=incarnation)
        if self.writing is not None:
            self.writing.rules.begin(incarnation)
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
        """Restores the snapshots of the coordinator that took the newest one."""
        newest = {name: self.disk.newest(name) for name in self.disk.folders}
        owners = {name: each.content["incarnation"] for name, each in newest.items() if each is not None}
        last = max(owners, key=lambda name: newest[name].at, default=None)
        incarnation = owners.get(last)
        self.writing = SnapshotWriting(
            self, self, self.interval_s, restores=owners.get("", incarnation) == incarnation
        )
        for name in sorted(owners):
            if name and owners[name] == incarnation:
                self.owner, number = incarnation, int(name.removeprefix("group "))
                group = self.groups[number] = GroupTask(self, number, incarnation, restores=True)
                self._restored_groups[str(number)] = group.writing.restored

    def restore(self, epoch=None):
        """Replaces the store by a snapshot. Returns its description; None if there is none."""
        snapshot = self._files.restore(epoch)
        if snapshot is None:
            return None
        self.store.take(snapshot.content, snapshot.counters, self.scenario.names.next(f"{self.name} store"))
        return restored_of(snapshot, self.store, self.world.now)

    @property
    def all_restored(self):
        if self.writing is None:
            return None
        if self._restored_groups and self.owner is not None:
            return {"incarnation": self.owner, "groups": self._restored_groups}
        return self.writing.restored

    @property
    def progress(self):
        return Progress(self.store.instance, self.store.rules.num_changes, self.store.rules.num_created)

    @property
    def holds_counters(self):
        return bool(self.store.counters)

    def write(self, epoch, kept_epoch):
        """Writes a snapshot of the store as it is now. It is there when it is complete."""
        content, counters = self.store.described(), dict(self.store.counters)
        at = self.world.now
        yield self.scenario.writing_s()
        self._files.write(content, counters, epoch, None, at, kept_epoch)
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
