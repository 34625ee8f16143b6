"""``GroupTask``: one simulated server's copy of a group, as ``GroupCopy`` and ``BackupSync`` have it, with ``CopyRules``."""

from ps_simulation.routines import Reply
from ps_simulation.snapshot_disk import SnapshotFiles, restored_of
from ps_simulation.snapshot_writing import SnapshotWriting
from ps_simulation.task_process import Link
from ps_simulation.turns import Turns
from replicax._ps.store.copy_rules import CopyPlace, CopyRules, NextStep, is_last_round, rounds
from replicax._ps.store.group_entries import ENTRY_BYTES, Entry, is_change, is_refusal, is_snapshot
from replicax._ps.store.group_rules import Refusal
from replicax._ps.store.keeper_rules import Progress
from replicax._ps.store.log import START, Position
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import (
    MessageError,
    ReplicaxError,
    SnapshotError,
    UnavailableError,
)

WAIT_S = 50.0
ROOM_S = 20.0
COPY_S = 120.0
LEAST_S = 1e-6  # a shorter wait may not move the clock


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

    def __init__(self, server, group, incarnation, *, restores=False):
        self.server, self.group, self.incarnation = server, group, incarnation
        self.copy = CopyRules(group, server.index, server.scenario.log_entries * ENTRY_BYTES)
        self.store = server.new_store(incarnation)
        self.order = Turns()
        self.way = self.joining_way = None
        self._changed = Reply()
        self._new = None  # the store that a primary sends, and its epoch
        self._files = self.writing = None
        if server.disk is not None:
            self._files = SnapshotFiles(server.disk, f"group {group}")
            self.writing = SnapshotWriting(
                server,
                self,
                server.interval_s,
                restores=restores,
                when_due=self.order_snapshot,
                turns=server.turns_of(group),
            )
            self.writing.start()

    @property
    def rules(self):
        """The role of the server."""
        return self.copy.role

    # --- views --------------------------------------------------------------------------------------

    def take(self, view):
        """Applies the coordinator's decision about which servers hold the group."""
        if view.epoch <= self.rules.epoch:
            return
        self._close_ways()
        if not self.copy.take(view):
            return
        if view.since is not None and self.rules.is_primary:
            at = self.rules.position
            assert at == view.since, f"group {self.group} resumes at {at}, and not at {view.since}"
        self._notify()
        if view.backup == self.server.index and view.is_joining:
            self._new = None
        if self.copy.brings:
            self.server.run(self._bring(view))

    def close(self):
        if self.writing is not None:
            self.writing.rules.end()
        self.copy.is_closed = True
        self._close_ways()
        self._notify()
        self.store.leave(None)

    def described(self):
        return {**self.rules.described(), "error": self.copy.error, "updates": self.store.num_updates}

    def _close_ways(self):
        for way in (self.way, self.joining_way):
            if way is not None:
                way.close()
        self.way = self.joining_way = None

    def _use(self, way):
        """Uses a connection for the backup in sync. Returns False if a newer view has arrived."""
        if not self.copy.is_of_now(way.epoch):
            way.close()
            return False
        replaced, self.way, self.joining_way = self.way, way, None
        self._notify()
        if replaced is not None and replaced is not way:
            replaced.close()
        return True

    def _notify(self):
        changed, self._changed = self._changed, Reply()
        changed.settle()

    # --- clients ------------------------------------------------------------------------------------

    def answer(self, request):
        """Executes a client's request. Returns when the loss of one server can no longer lose its effect."""
        world, is_update = self.server.world, is_change(request)
        yield self.order.begin()
        try:
            ordered = self.copy.order(world.now, is_change=is_update, is_snapshot=is_snapshot(request))
            entry = Entry(ordered.position, Message(request) if is_update else None)
            if ordered.is_logged:
                self.copy.log.append(entry.position, entry)
            if ordered.is_sent:
                self._send(ordered.epoch, entry)
            answer, error, outcome = self._applied(request)
            entry.outcome = outcome if is_update else ""
            entry.is_refused = is_update and is_refusal(request, error)
            if is_update and not ordered.is_sent:
                self._own(entry)
        finally:
            self.order.end()
        until = world.now + WAIT_S
        if is_update:
            yield from self._wait_for_room(world.now + ROOM_S)
        if (lag_s := self.server.scenario.sleeping_s(self.server)) > 0.0:
            yield lag_s
        try:
            yield from self._wait(ordered.place, until)
        except ReplicaxError as failure:
            error = failure
        self._own(entry)
        if error is not None:
            raise error
        return answer

    def _own(self, entry):
        """Counts the memory of an entry. If that fills the log, the backup is lost."""
        if self.copy.log.get(entry.position.seq) is not entry:
            return
        entry.own()
        epoch = self.copy.charge(entry.position.seq, entry.num_bytes)
        if epoch is None:
            return
        way = self.joining_way
        self._lose(epoch, UnavailableError("The updates that the backup lacks take more than log_bytes."))
        if way is not None and way.epoch == epoch:
            way.close()

    def _send(self, epoch, entry):
        way = self.way or self._open(epoch)
        if way is not None and way.epoch == epoch:
            patience_s = self.copy.patience.ack_s(self.server.world.now)
            reply = way.link.call(self._forward(epoch, entry), patience_s)
            reply.then(lambda: self._acknowledged(epoch, reply))

    def _open(self, epoch):
        """Opens the connection to a backup that has had everything from the beginning. It tries once per epoch."""
        backup = self.copy.opens(epoch)
        if backup is None:
            return None
        way = Way(self.server, epoch, f"ps {backup}")
        return way if self._use(way) else None

    def _acknowledged(self, epoch, reply):
        if reply.error is not None:
            self._lose(epoch, reply.error)
            return
        said = reply.value
        if "refused" in said:
            self.copy.refused(epoch, Refusal(said["refused"]))
        elif not self.copy.acknowledged(
            epoch, said["applied"], said["outcome"], self.server.world.now, writes=said["writes"]
        ):
            self.server.scenario.differs(self.group, said["applied"])
        self._notify()

    def _wait_for_room(self, until):
        while self.copy.has_much_waiting and self.server.world.now < until:
            yield from self._change(until)

    def _wait(self, place, until):
        while self.copy.next_step(place, until - self.server.world.now, can_read=False) is NextStep.WAIT:
            yield from self._change(until)

    def _change(self, until):
        """Waits until something changes, or for that time."""
        woken = Reply()
        self._changed.then(woken.settle)
        self.server.after(max(until - self.server.world.now, LEAST_S), woken.settle)
        yield woken

    def _lose(self, epoch, error):
        self.copy.lose(epoch, str(error))
        self._notify()

    def _applied(self, request):
        """Returns the answer or the error, and an outcome that must be equal on both servers."""
        if is_snapshot(request):
            if self.writing is not None:
                self.writing.ask()
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
            answer = self.copy.forwarded(epoch, seq)
            if isinstance(answer, Refusal):
                return {"refused": str(answer)}
            outcome = ""
            if answer and request["message"] is not None:
                _, _, outcome = self._applied(request["message"])
            if answer:
                self.copy.applied(Position(request["ordered_in"], seq))
        finally:
            self.order.end()
        writes = self.writing is not None and self.writing.rules.is_writing
        return {"applied": seq, "outcome": outcome, "writes": writes}

    def _take_part(self, request):
        yield self.order.begin()
        try:
            return self._part_taken(request["epoch"], request["part"], request)
        finally:
            self.order.end()

    def _part_taken(self, epoch, part, request):
        if part == "where":
            place = self.copy.says_where(epoch)
            if place is None:
                return brought(False, START)
            return {"applied": 0, "outcome": "", "position": list(place.position), "lacks": place.lacks}
        at = Position(*request["position"])
        if part == "resume":
            return brought(self.copy.resumes(epoch, at), at)
        if part == "state":
            if not self.copy.begins_state(epoch, at):
                return brought(False, at)
            self.store = self.server.new_store(self.incarnation)
            self._new = epoch, self.server.new_store(self.incarnation)
            self.server.world.moment("state")
            self._new[1].take(request["content"], {}, self._new[1].instance)
        store = self._store_for(epoch, at, part)
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
                if not self.copy.has_state(epoch, at):
                    return brought(False, at)
                self.store, self._new = store, None
        return brought(True, at)

    def _store_for(self, epoch, at, part):
        """Returns the store that takes a part; None if it is refused."""
        if self.copy.takes_part(epoch, at):
            return None if self._new is None or self._new[0] != epoch else self._new[1]
        return self.store if part == "program" and self.copy.takes_program(epoch, at) else None

    # --- bringing a joining backup up to date -------------------------------------------------------

    def _forward(self, epoch, entry):
        return {
            **self._fields("forward", epoch, entry.position.seq),
            "ordered_in": entry.position.epoch,
            "message": entry.header,
        }

    def _fields(self, op, epoch, seq):
        return {"op": op, "incarnation": self.incarnation, "group": self.group, "epoch": epoch, "seq": seq}

    def _bring(self, view):
        way = Way(self.server, view.epoch, f"ps {view.backup}")
        try:
            self.copy.check(view.epoch)
            self.joining_way = way
            acked = yield from self._bring_state(view, way)
            yield from self._bring_rest(view, way, acked)
            self.server.world.moment("synced")
        except MessageError as error:
            self.server.scenario.differs(self.group, error)
        except UnavailableError as error:
            self.server.world.trace(f"    {self.server.name} could not copy group {self.group}: {error}")
            self._lose(view.epoch, error)
            way.close()

    def _bring_state(self, view, way):
        fields = self._fields("copy", view.epoch, 0)
        said = yield from self._brought(way, {**fields, "part": "where"})
        place = CopyPlace(Position(*said["position"]), said["lacks"])
        yield self.order.begin()
        try:
            programs = [each for each in place.lacks or () if each in self.store.programs]
            first = self.copy.bring(view.epoch, place, len(programs))
            parts = [{"part": "program", "digest": each} for each in programs] + [{"part": "resume"}]
            if first.is_state:
                parts = state_parts(self.store)
        finally:
            self.order.end()
        for part in parts:
            yield from self._brought(way, {**fields, "position": list(first.at), **part})
        return first.at.seq

    def _bring_rest(self, view, way, acked):
        for left in rounds():
            yield self.order.begin()
            try:
                entries = self.copy.lacking(view.epoch, acked)
                for entry in entries:
                    self._own(entry)
                if is_last_round(left, len(entries)):
                    acked = yield from self._bring_entries(view, way, entries, acked)
                    if not self.copy.synced(view.epoch, acked) or not self._use(way):
                        raise UnavailableError("The backup no longer joins.")
                    return
            finally:
                self.order.end()
            acked = yield from self._bring_entries(view, way, entries, acked)

    def _bring_entries(self, view, way, entries, acked):
        for entry in entries:
            taken = yield from self._brought(way, self._forward(view.epoch, entry))
            acked = entry.position.seq
            self.copy.brought(view.epoch, entry, taken["outcome"])
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
        rules = self.store.rules
        return Progress(rules.instance, rules.num_changes, rules.num_created, self.rules.position)

    @property
    def holds_counters(self):
        return bool(self.store.counters)

    def order_snapshot(self):
        """Orders a snapshot on both servers, at the same place in the order of updates. Only the primary does this."""
        self.server.run(self.answer({"op": "snapshot", "incarnation": self.incarnation}))

    def write(self, epoch, kept_epoch):
        store = self.store
        yield self.order.begin()
        try:
            if self.copy.is_closed or store is not self.store:
                raise SnapshotError("The copy is being replaced.")
            content, counters = store.described(), dict(store.counters)
            position, at = tuple(self.rules.position), self.server.world.now
        finally:
            self.order.end()
        yield self.server.scenario.writing_s()
        self._files.write(content, counters, epoch, position, at, kept_epoch)
        self.server.world.moment("snapshot")
        self.server.world.moment(f"group {self.group} is written by {self.server.name}")

    def restore(self, epoch=None):
        """Starts from the newest snapshot, if it is of this coordinator. Returns its description."""
        snapshot = self._files.restore(epoch)
        if snapshot is None or snapshot.content["incarnation"] != self.incarnation:
            return None
        self.store.take(snapshot.content, snapshot.counters, self.store.instance)
        held = snapshot.content["num_held_gradients"]
        self.copy.restored(Position(*snapshot.position), None if held else list(snapshot.content["programs"]))
        return restored_of(snapshot, self.store, self.server.world.now)


def state_parts(store):
    """Returns everything in a store as parts of a copy."""
    shards = [{"part": "shard", "key": key, "value": value} for key, value in store.counters.items()]
    programs = [{"part": "program", "digest": digest} for digest in sorted(store.programs)]
    gradients = {number: dict(held) for number, held in store.gradients.items()}
    state = {"part": "state", "content": store.described()}
    return [state, *shards, *programs, {"part": "gradients", "held": gradients}, {"part": "end"}]


def brought(is_taken, at):
    return {"applied": at.seq, "outcome": ""} if is_taken else {"refused": str(Refusal.INCOMPLETE)}
