"""``GroupTask``: one simulated server's copy of a group, as ``GroupCopy`` has it: real rules and a real log."""

from ps_simulation.routines import Reply
from ps_simulation.snapshot_disk import Snapshot, restored_of
from ps_simulation.snapshot_times import SnapshotTimes
from ps_simulation.task_process import Link
from ps_simulation.turns import Turns
from replicax._ps.store.group_rules import GroupRules, Partner, Refusal
from replicax._ps.store.log import Position, UpdateLog
from replicax._src.vocabulary.errors import ReplicaxError, UnavailableError

WAIT_S = 50.0
ACK_S = 5.0
COPY_S = 120.0
FEW = 4
ROUNDS = 4


class Entry:
    """A message in the order of a group. ``request`` is None if it changes nothing."""

    def __init__(self, position, request):
        self.position, self.outcome = position, None
        self.request = request
        if request is not None and request["op"] == "step":
            self.request = {**request, "only_apply": True}

    def agrees(self, outcome):
        return self.outcome in (None, outcome)


class Way:
    """The primary's connection to the backup of an epoch."""

    def __init__(self, server, epoch, peer):
        self.epoch, self.link = epoch, Link(server, peer, "backup")

    def close(self):
        self.link.close()


class GroupTask:
    """A copy of a group.

    Args:
      server: The server that holds it.
      group: The number of the group.
      incarnation: The session id of the coordinator.
    """

    def __init__(self, server, group, incarnation):
        self.server, self.group, self.incarnation = server, group, incarnation
        self.rules = GroupRules(server.index)
        self.log = UpdateLog(server.scenario.log_entries)  # an entry counts for one byte
        self.store = server.new_store(incarnation)
        self.order = Turns()
        self.way = self.joining_way = None
        self.error = ""
        self.lacks = ()
        self.is_closed = False
        self._changed = Reply()
        self._opened_epoch = 0
        self._new = None  # the store that a primary sends
        self.times = None
        if server.disk is not None:
            self.times = SnapshotTimes(server, self, server.interval_s, self.order_snapshot)

    # --- views --------------------------------------------------------------------------------------

    def take(self, view):
        """Applies the coordinator's decision about which servers hold the group."""
        if view.epoch <= self.rules.epoch:
            return
        self._close_ways()
        was_primary = self.rules.is_primary
        if not self.rules.take(view):
            return
        if not self.rules.is_primary:
            self.log.end()
        elif not was_primary:
            self.log.begin(self.rules.position)
            self.lacks = ()
        self._notify()
        if view.backup == self.server.index and view.is_joining:
            self._new = None
        if self.rules.partner is Partner.JOINING:
            self.server.run(self._bring(view))

    def close(self):
        self.is_closed = True
        if self.times is not None:
            self.times.end()
        self._close_ways()
        self._notify()
        self.store.leave(None)

    def described(self):
        return {**self.rules.described(), "error": self.error, "updates": self.store.num_updates}

    def _close_ways(self):
        for way in (self.way, self.joining_way):
            if way is not None:
                way.close()
        self.way = self.joining_way = None

    def _notify(self):
        changed, self._changed = self._changed, Reply()
        changed.settle()

    # --- clients ------------------------------------------------------------------------------------

    def answer(self, request):
        """Executes a client's request. Returns when the loss of one server can no longer lose its effect."""
        is_update = is_change(request)
        yield self.order.begin()
        try:
            place = self.rules.order(is_change=is_update)
            epoch, partner = self.rules.epoch, self.rules.partner
            entry = Entry(self.rules.position, request if is_update else None)
            if is_update or partner is Partner.IN_SYNC:
                self._append(entry)
            if partner is Partner.IN_SYNC:
                self._send(epoch, entry)
            answer, error, outcome = self._applied(request)
            entry.outcome = outcome if is_update else ""
        finally:
            self.order.end()
        yield from self._wait(place, self.server.world.now + WAIT_S)
        if error is not None:
            raise error
        return answer

    def _append(self, entry):
        was_on = self.log.is_on
        self.log.append(entry.position, entry, 1)
        if was_on and not self.log.is_on and self.rules.has_partner:
            self._lose(self.rules.epoch, UnavailableError("The updates that the backup lacks are too many."))
            if self.joining_way is not None:
                self.joining_way.close()

    def _send(self, epoch, entry):
        way = self.way or self._open(epoch)
        if way is not None and way.epoch == epoch:
            reply = way.link.call(self._forward(epoch, entry), ACK_S)
            reply.then(lambda: self._acknowledged(epoch, reply))

    def _open(self, epoch):
        """Opens the connection to a backup that has had everything from the beginning. It tries once per epoch."""
        view = self.rules.view
        if view.epoch != epoch or view.backup is None or self._opened_epoch == epoch:
            return None
        self._opened_epoch = epoch
        self.way = Way(self.server, epoch, f"ps {view.backup}")
        return self.way

    def _acknowledged(self, epoch, reply):
        if reply.error is not None:
            self._lose(epoch, reply.error)
            return
        said = reply.value
        if "refused" in said:
            self.error = f"The backup refuses what it is sent: {said['refused']}."
            self.rules.refused(epoch, Refusal(said["refused"]))
        else:
            entry = self.log.get(said["applied"])
            if entry is not None and not entry.agrees(said["outcome"]):
                self.server.scenario.differs(self.group, said["applied"])
                self.log.end()
                self.rules.lose(epoch)
            else:
                if epoch == self.rules.epoch:
                    self.log.acknowledge(said["applied"])
                self.rules.acknowledge(epoch, said["applied"])
        self._notify()

    def _wait(self, place, until):
        while True:
            if self.is_closed:
                raise UnavailableError("The coordinator's session on this parameter server has ended.")
            if self.rules.may_answer(place):
                return
            left_s = until - self.server.world.now
            if left_s <= 0:
                raise UnavailableError(f"The update was not acknowledged within {WAIT_S:g} s. {self.error}")
            changed = self._changed
            self.server.after(left_s, changed.settle)
            yield changed

    def _lose(self, epoch, error):
        if epoch == self.rules.epoch and not self.is_closed and self.rules.has_partner:
            self.error = str(error)
            self.rules.lose(epoch)
        self._notify()

    def _applied(self, request):
        """Returns the answer or the error, and an outcome that must be equal on both servers."""
        if request["op"] == "snapshot":
            if self.times is not None:
                self.times.ask()
            return {}, None, ""
        try:
            answer = self.store.answer(request)
        except ReplicaxError as error:
            return None, error, type(error).__name__
        return answer, None, "duplicate" if answer.get("duplicate") else ""

    # --- the backup ---------------------------------------------------------------------------------

    def forwarded(self, request):
        """Applies a message that the primary has forwarded, or a part of the state that it sends."""
        if request["op"] == "copy":
            return (yield from self._take_part(request))
        epoch, seq = request["epoch"], request["seq"]
        yield self.order.begin()
        try:
            answer = self.rules.forwarded(epoch, seq)
            if isinstance(answer, Refusal):
                return {"refused": str(answer)}
            outcome = ""
            if answer and request["message"] is not None:
                _, _, outcome = self._applied(request["message"])
            if answer:
                self.rules.applied(Position(request["ordered_in"], seq))
                if self.rules.is_primary:  # it became the primary while it applied this
                    self.log.begin(self.rules.position)
        finally:
            self.order.end()
        return {"applied": seq, "outcome": outcome}

    def _take_part(self, request):
        epoch, part = request["epoch"], request["part"]
        if not self.rules.takes_copy(epoch):
            return {"refused": str(Refusal.INCOMPLETE)}
        yield self.order.begin()
        try:
            return self._part_taken(epoch, part, request)
        finally:
            self.order.end()

    def _part_taken(self, epoch, part, request):
        if part == "where":
            return {"applied": 0, "outcome": "", "position": list(self.rules.position), "lacks": self.lacks}
        at = Position(*request["position"])
        if part == "resume":
            is_one = self.rules.position == at and self.rules.has_copy(epoch, at)
            self.lacks = ()
            return brought(is_one, at)
        if part == "state":
            if not self.rules.takes_copy(epoch):
                return brought(False, at)
            self.rules.dropped()
            self.store = self.server.new_store(self.incarnation)
            self.lacks = ()
            self._new = self.server.new_store(self.incarnation)
            self._new.take(request["content"], {}, self._new.instance)
        store = self._new
        if store is None and part == "program":
            store = self.store
        if store is None:
            return brought(False, at)
        match part:
            case "shard":
                store.counters[request["key"]] = request["value"]
            case "program":
                store.programs.add(request["digest"])
            case "gradients":
                store.gradients = {number: dict(held) for number, held in request["held"].items()}
            case "end":
                if not self.rules.has_copy(epoch, at):
                    return brought(False, at)
                self.store, self._new = store, None
        return brought(True, at)

    # --- bringing a joining backup up to date -------------------------------------------------------

    def _forward(self, epoch, entry):
        return {
            **self._fields("forward", epoch, entry.position.seq),
            "ordered_in": entry.position.epoch,
            "message": entry.request,
        }

    def _fields(self, op, epoch, seq):
        return {"op": op, "incarnation": self.incarnation, "group": self.group, "epoch": epoch, "seq": seq}

    def _bring(self, view):
        way = Way(self.server, view.epoch, f"ps {view.backup}")
        try:
            self._check(view)
            self.joining_way = way
            acked = yield from self._bring_state(view, way)
            yield from self._bring_rest(view, way, acked)
            self.server.world.moment("synced")
        except UnavailableError as error:
            self.server.world.trace(f"    {self.server.name} could not copy group {self.group}: {error}")
            self._lose(view.epoch, error)
            way.close()

    def _check(self, view):
        if self.rules.epoch != view.epoch or self.is_closed:
            raise UnavailableError("A newer view of this group has arrived. Send the request again.")

    def _bring_state(self, view, way):
        fields = self._fields("copy", view.epoch, 0)
        said = yield from self._brought(way, {**fields, "part": "where"})
        at = Position(*said["position"])
        yield self.order.begin()
        try:
            self._check(view)
            lacks = said["lacks"]
            programs = [each for each in lacks or () if each in self.store.programs]
            is_resumed = lacks is not None and len(programs) == len(lacks) and self.log.reaches(at)
            if is_resumed:
                parts = [{"part": "program", "digest": each} for each in programs] + [{"part": "resume"}]
            else:
                at = self.rules.position
                self.log.begin(at)
                parts = state_parts(self.store)
        finally:
            self.order.end()
        for part in parts:
            yield from self._brought(way, {**fields, "position": list(at), **part})
        return at.seq

    def _bring_rest(self, view, way, acked):
        for left in reversed(range(ROUNDS)):
            yield self.order.begin()
            is_last = False
            try:
                entries = self._lacking(view, acked)
                is_last = not left or len(entries) <= FEW
                if is_last:
                    acked = yield from self._bring_entries(view, way, entries, acked)
                    if not self.rules.synced(view.epoch, acked):
                        raise UnavailableError("A newer view of this group has arrived.")
                    self.error = ""
                    self.way, self.joining_way = way, None
                    self._notify()
                    return
            finally:
                self.order.end()
            acked = yield from self._bring_entries(view, way, entries, acked)

    def _lacking(self, view, acked):
        self._check(view)
        if not self.log.is_on:
            raise UnavailableError("The log is not on.")
        return [entry for _, entry in self.log.after(acked)]

    def _bring_entries(self, view, way, entries, acked):
        for entry in entries:
            taken = yield from self._brought(way, self._forward(view.epoch, entry))
            acked = entry.position.seq
            self._check(view)
            if not entry.agrees(taken["outcome"]):
                self.server.scenario.differs(self.group, acked)
                self.log.end()
                raise UnavailableError("The copies differ.")
            self.log.acknowledge(acked)
            self._notify()
        return acked

    def _brought(self, way, request):
        said = yield way.link.call(request, COPY_S)
        if "refused" in said:
            raise UnavailableError(f"The backup refuses what it is sent: {said['refused']}.")
        return said

    # --- snapshots ----------------------------------------------------------------------------------

    @property
    def progress(self):
        return self.store.instance, self.store.num_changes

    @property
    def num_created(self):
        return self.store.num_created

    @property
    def holds_counters(self):
        return bool(self.store.counters)

    def order_snapshot(self):
        """Orders a snapshot on both servers, at the same place in the order of updates. Only the primary does this."""
        self.server.run(self.answer({"op": "snapshot", "incarnation": self.incarnation}))

    def write(self, epoch):
        yield self.order.begin()
        try:
            content, counters = self.store.described(), dict(self.store.counters)
            position, at = tuple(self.rules.position), self.server.world.now
        finally:
            self.order.end()
        yield self.server.scenario.write_s
        if not self.is_closed:
            self.server.disk.write(f"group {self.group}", Snapshot(content, counters, epoch, position, at))
            self.server.world.moment("snapshot")

    def restore(self, snapshot):
        """Starts from a snapshot. Returns its description."""
        self.store.take(snapshot.content, snapshot.counters, self.store.instance)
        self.rules.restored(Position(*snapshot.position))
        held = snapshot.content["num_held_gradients"]
        self.lacks = None if held else list(snapshot.content["programs"])
        return restored_of(snapshot, self.store, self.server.world.now)


def is_change(request):
    """True if a message can change the store."""
    if request["op"] == "step":
        return request.get("program") is not None or request.get("gradients") is not None
    return request["op"] != "find"


def state_parts(store):
    """Returns everything in a store as parts of a copy."""
    first = [{"part": "state", "content": store.described()}]
    shards = [{"part": "shard", "key": key, "value": value} for key, value in store.counters.items()]
    programs = [{"part": "program", "digest": digest} for digest in sorted(store.programs)]
    gradients = {number: dict(held) for number, held in store.gradients.items()}
    return [*first, *shards, *programs, {"part": "gradients", "held": gradients}, {"part": "end"}]


def brought(is_taken, at):
    return {"applied": at.seq, "outcome": ""} if is_taken else {"refused": str(Refusal.INCOMPLETE)}
