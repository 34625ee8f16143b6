"""``TwoCopies``: with ``replication=2``, each group of shards has a primary that is alive, and a backup that copies it.

``Groups`` has the rules: events of servers in, views out. Each view is told to its members, the backup first, then the
session and the workers learn of new primaries. A server that missed a view gets it after its next heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from replicax._ps.client.groups import Groups
from replicax._ps.job.groups_without_server import GroupsWithoutServer, names_of_servers
from replicax._ps.job.procedures import Operation, Pause, Procedure, Request
from replicax._ps.job.server_recovery import STATUS_S
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.server_watch import ServerWatch
from replicax._ps.store.group_rules import Partner, View
from replicax._src.program_kit.errors import InvalidArgumentError, ReplicaxError, UnavailableError

_TELL_S: Final = 3.0
_HELLO_S: Final = 10.0
_JOIN_EVERY_S: Final = 1.0
_AGAIN_S: Final = 1.0
_GROUPS: Final = ("ps", "groups")


@final
class TwoCopies:
    """The rules of restarts with two copies.

    If both servers of a group are lost and they write snapshots, no function is sent to workers until they restart.

    Args:
      job: The job.
      groups: The views; nobody else changes them.
      comes_back_s: The longest wait for a group that has lost both servers; 0 if they have no snapshots.
    """

    def __init__(self, job: JobHooks, groups: Groups, comes_back_s: float = 0.0):
        self._job, self._groups = job, groups
        self._lost = GroupsWithoutServer(job, groups, comes_back_s)
        self._primaries = groups.primaries
        self._unprotected: list[int] = []
        self._last_join: dict[int, float] = {}
        self._moved: set[int] = set()  # servers that restarted before they counted as lost
        self._watches: dict[int, ServerWatch] = {}  # of servers that have missed heartbeats
        self._to_tell: dict[int, dict[tuple[int, View], None]] = {}  # in their order, by group
        self._told_now: dict[int, View] = {}

    def start(self) -> None:
        """Does nothing: the servers have their first views."""

    def lost(self, watch: ServerWatch, error: UnavailableError) -> UnavailableError | None:
        """Handles the loss of a server. Returns an error for the job if some variables are on no server now."""
        if self._is_undecided(watch):
            return error
        views = self._groups.server_lost(watch.index)
        left = self._without(watch, error)
        if left is None and not self._has_lost_group:
            self._moved.discard(watch.index)
            self._say_moved(watch, "is lost")
        self._tell_members(views)
        return left

    def silent(self, watch: ServerWatch) -> None:
        """Ends the job if the server may have a group that was waited for long enough."""
        self._watches[watch.index] = watch
        if over := self._lost.waited_too_long(watch.index):
            watch.breaks(self._nowhere(watch, over))

    def given_up(self, watch: ServerWatch) -> None:
        """Reclaims a server that has ended this coordinator's session after a long silence, and has dropped its data.

        Its next heartbeat shows another instance, as if it had restarted. A server of another coordinator is left
        alone.
        """
        key = "ps", "recovery", watch.index
        if key not in self._job.procedures:
            self._job.procedures.start(key, self._reclaim(watch), self._job.now)

    def restarted(self, watch: ServerWatch) -> None:
        """Uses a server that has restarted, and has nothing, or the contents of its snapshots."""
        self._move_from(watch)
        if self._breaks(watch):
            return
        key = "ps", "recovery", watch.index
        if key not in self._job.procedures:
            self._job.procedures.start(key, self._return(watch), self._job.now)

    def here(self, watch: ServerWatch, statistics: Mapping[str, Any] | None) -> None:
        """Sends the server the views that it missed, and has it copy groups that it lacks."""
        index = watch.index
        parts: Mapping[str, Any] = {} if statistics is None else statistics.get("groups", {})
        given_up: Sequence[View] = ()
        self._groups.back(index)
        if statistics is not None:
            self._lost.heard(index, parts)
            given_up = self._groups.status_received(index, parts)
            for view in given_up:
                self._say_given_up(view, parts[str(view.group)])
        if self._lost.failed is None and (hopeless := self._lost.are_known(self._groups.hopeless)):
            self._lost.fail(self._nowhere(watch, hopeless))
        self._tell_members([*self._lost.restart(), *given_up, *self._joined(watch)])
        self._tell([(index, view) for view in self._groups.views_to_send(index, parts)])
        self._lost.resume_ready()
        self._lost.end_waiting()
        self._say_protected()

    def statistics(self) -> dict[str, Any]:
        """Returns the ``primaries`` by parameter server, and ``unprotected``: servers whose variables have one copy."""
        groups = self._groups
        return {"primaries": groups.primaries, "unprotected": groups.unprotected, "lost": groups.lost}

    def described_views(self) -> list[dict[str, Any]]:
        """Returns all views as JSON."""
        return [view.described() for view in self._groups.views]

    def _is_undecided(self, watch: ServerWatch) -> bool:
        """True if a server is silent together with the other server of a group, and either may be back first.

        Then the group stays with both: it would be lost if it were left to the server that is silent for longer. The
        wait ends before a silent server ends the session.
        """
        limits = self._job.setup.limits
        ends_s = (1 + limits.ps_missed_heartbeats) * (limits.heartbeat_s + limits.heartbeat_timeout_s)
        if not watch.is_silent or watch.silent_s > limits.ps_silence_s - ends_s:
            return False
        others = [
            task
            for view in self._groups.views
            if watch.index in view.members
            for task in view.members
            if task != watch.index
        ]
        return any(task in self._watches and self._watches[task].is_silent for task in others)

    # --- a server returns ----------------------------------------------------------------------------------

    def _return(self, watch: ServerWatch) -> Procedure[None]:
        state = watch.state
        try:
            status = yield Request(watch.name, "status", {}, STATUS_S)
            watch.answered(status["instance"])
            if state.knows(status["instance"]):
                return
            hello = yield Request(watch.name, "hello", self._hello, _HELLO_S)
        except Exception as error:
            watch.not_resumed(error)
            return
        watch.answered(hello["instance"])
        # It restarted, or dropped what the status says that it has; perhaps a heartbeat has shown that before.
        if not hello["instance"] == status["instance"] == state.last_instance:
            watch.probe()
            return
        self._move_from(watch)
        self._lost.returned(watch.index, status)
        if self._breaks(watch):
            return
        watch.accept(hello["instance"])
        if watch.index in self._moved and not self._has_lost_group:
            self._moved.discard(watch.index)
            self._say_moved(watch, "restarted")

    @property
    def _has_lost_group(self) -> bool:
        """True if updates of a group may be lost, and the log does not say yet which."""
        return bool(self._groups.lost) or self._lost.is_waiting

    def _move_from(self, watch: ServerWatch) -> None:
        if views := self._groups.server_lost(watch.index):
            self._moved.add(watch.index)
            self._tell_members(views)

    def _breaks(self, watch: ServerWatch) -> bool:
        """Has the job wait for groups that are lost now. Returns True if the job is broken, because that is useless."""
        error = UnavailableError(f"{watch.name} is another process than before.", watch.name)
        left = self._without(watch, error)
        if left is not None:
            watch.breaks(left)
        return left is not None

    def _reclaim(self, watch: ServerWatch) -> Procedure[None]:
        try:
            yield Request(watch.name, "hello", {**self._hello, "again": True}, _HELLO_S)
        except ReplicaxError as error:
            self._job.log(logging.DEBUG, "%s", error)

    @property
    def _hello(self) -> dict[str, Any]:
        return {"ps": list(self._job.setup.ps_addresses)}

    def _without(self, watch: ServerWatch, error: UnavailableError) -> UnavailableError | None:
        """Has the job wait for groups that are lost now. Returns an error if waiting is useless."""
        gone = [group for group in self._groups.lost if watch.index == self._groups.views[group].primary]
        if not self._lost.comes_back_s:
            return self._nowhere(watch, gone, error) if gone else None
        self._lost.wait_for(gone)
        return self._lost.failed

    def _nowhere(
        self, watch: ServerWatch, gone: Sequence[int], error: UnavailableError | None = None
    ) -> UnavailableError:
        others = sorted(
            {f"ps {task}" for group in gone for task in self._groups.members(group)} - {watch.name}
        )
        left = UnavailableError(
            f"{watch.name} is lost, and {', '.join(others)}, which should have the other copy of its variables, is not "
            "reachable or did not have all of them yet. Restart them and the program, from a checkpoint.",
            watch.name,
        )
        left.__cause__ = error
        return left

    def _joined(self, watch: ServerWatch) -> Sequence[View]:
        """Returns views in which a parameter server joins groups that it may hold and lacks; at most once a second."""
        now = self._job.now
        if now < self._last_join.get(watch.index, now - _JOIN_EVERY_S) + _JOIN_EVERY_S:
            return ()
        self._last_join[watch.index] = now
        return self._groups.join(watch.index)

    # --- views are told ------------------------------------------------------------------------------------

    def _tell_members(self, views: Iterable[View]) -> None:
        self._tell([(task, view) for view in views for task in view.members])

    def _tell(self, views: Sequence[tuple[int, View]]) -> None:
        """Sends views to parameter servers, by number: those of a group one after another."""
        for task, view in views:
            self._to_tell.setdefault(view.group, {})[task, view] = None
        for group in dict.fromkeys(view.group for _, view in views):
            key, told_now = ("ps", "views", group), self._told_now.get(group)
            if key not in self._job.procedures or (told_now is not None and not self._is_current(told_now)):
                self._job.procedures.start(key, self._tell_group(group), self._job.now)

    def _tell_group(self, group: int) -> Procedure[None]:
        job, waiting = self._job, self._to_tell[group]
        while waiting:
            task, view = item = next(iter(waiting))
            if self._is_current(view):
                self._told_now[group] = view
                header = {"view": view.described(), **self._hello}
                try:
                    yield Request(f"ps {task}", "group", header, _TELL_S)
                except InvalidArgumentError:
                    self._groups.refused(view)
                except Exception as error:  # its next heartbeat tries again
                    job.log(logging.DEBUG, "ps %d does not take the view %s: %s", task, view, error)
            waiting.pop(item, None)
        self._use_primaries()

    def _is_current(self, view: View) -> bool:
        latest = self._groups.views[view.group]
        return latest.epoch == view.epoch and view.group not in self._groups.lost

    def _use_primaries(self) -> None:
        """Connects the session and the workers to the primaries, if others serve now."""
        before, self._primaries = self._primaries, self._groups.primaries
        if before != self._primaries:
            self._job.procedures.start(_GROUPS, self._connect(), self._job.now)
            self._job.tell_workers_primaries()

    def _connect(self) -> Procedure[None]:
        while True:
            try:
                yield Operation("use_primaries", (self._groups.views,))
                return
            except Exception as error:
                self._job.log(logging.DEBUG, "The program does not use the new primaries yet: %s", error)
            yield Pause(_AGAIN_S)

    # --- the log -------------------------------------------------------------------------------------------

    def _say_moved(self, watch: ServerWatch, what: str) -> None:
        unprotected = self._groups.unprotected
        self._job.log(
            logging.WARNING,
            "%s %s. No acknowledged update is lost: the other copy of its variables is used, on %s. The "
            "variables of %s are on one parameter server until it is back and has copied them.",
            watch.name,
            what,
            names_of_servers(self._groups.views[group].primary for group in unprotected),
            names_of_servers(unprotected),
        )
        self._unprotected = unprotected

    def _say_given_up(self, view: View, part: Mapping[str, Any]) -> None:
        other = next(task for task in self._groups.members(view.group) if task != view.primary)
        self._job.log(
            logging.INFO if part["backup"] == Partner.FAILED else logging.WARNING,
            "The variables of ps %d are on ps %d alone for now. The copy on ps %d is dropped and will be made "
            "again: %s",
            view.group,
            view.primary,
            other,
            part["error"],
        )
        self._unprotected = self._groups.unprotected

    def _say_protected(self) -> None:
        unprotected = self._groups.unprotected
        if self._unprotected and not unprotected:
            self._job.log(logging.WARNING, "All variables are on two parameter servers again.")
        self._unprotected = unprotected
