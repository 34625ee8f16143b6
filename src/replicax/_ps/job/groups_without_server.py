"""``GroupsWithoutServer``: when both servers of a group are lost, the job waits, and resumes from their snapshots."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from replicax._ps.client.groups import Groups
from replicax._ps.job.procedures import Operation, Procedure
from replicax._ps.job.server_recovery import snapshot_age, snapshot_contents
from replicax._ps.job.server_side import JobHooks
from replicax._ps.store.group_rules import View
from replicax._src.program_kit.errors import ReplicaxError, UnavailableError

_PARTNER_S: Final = 60.0
"""The longest wait for the other server, once the last primary of a group is back with a snapshot."""


@final
class GroupsWithoutServer:
    """Pauses the job while a group is lost, and reports which updates are lost. ``Groups`` has the rules.

    Args:
      job: The job to pause.
      groups: The views.
      comes_back_s: The longest wait for a lost group; 0 if its servers have no snapshots.

    Attributes:
      failed: The error that makes waiting useless, with which the job has ended; None if waiting may help.
    """

    def __init__(self, job: JobHooks, groups: Groups, comes_back_s: float):
        self._job, self._groups = job, groups
        self.comes_back_s = comes_back_s
        self.failed: UnavailableError | None = None
        self._since: dict[int, float] = {}
        self._num_updates: dict[int, int] = {}
        self._going_on: dict[int, tuple[View, int]] = {}
        # Keys are numbers of parameter servers.
        self._returned_at: dict[int, float] = {}
        self._restored: dict[int, Mapping[str, Any]] = {}
        self._parts: dict[int, Mapping[str, Any]] = {}

    @property
    def is_waiting(self) -> bool:
        """True if a group was lost and the job has not resumed with it yet."""
        return bool(self._since)

    def wait_for(self, groups: Sequence[int]) -> None:
        """Starts to wait for groups that are lost now."""
        for group in groups:
            if group not in self._since:
                self._since[group] = self._job.now
                self._job.pause(("group", group))
                self._job.log(
                    logging.WARNING,
                    "Lost %s, which had the variables of ps %d. Waiting up to %g s for them: once they "
                    "restart, training resumes from the newer of their snapshots.",
                    names_of_servers(self._groups.members(group)),
                    group,
                    self.comes_back_s,
                )

    def fail(self, error: UnavailableError) -> None:
        """Ends the job, for ever: its variables are gone."""
        self.failed = error
        self._job.broke(error, ("ps", "groups"))

    def waited_too_long(self, task: int) -> list[int]:
        """Returns the lost groups that a parameter server may have and whose wait is over."""
        until = self._job.now - self.comes_back_s
        return [g for g, since in self._since.items() if since < until and task in self._groups.members(g)]

    def are_known(self, groups: Sequence[int]) -> list[int]:
        """Returns those of lost groups of which both servers have said what they have since the primary is back.

        An answer that was on its way then may say less than the server has now. Within this time the server has
        answered a later heartbeat, or is lost.
        """
        limits, primaries = self._job.setup.limits, self._groups.primaries
        longest_s = limits.heartbeat_s + limits.heartbeat_timeout_s
        until = self._job.now - (1 + limits.ps_missed_heartbeats) * longest_s
        return [group for group in groups if self._returned_at.get(primaries[group], 0.0) < until]

    def returned(self, task: int, status: Mapping[str, Any]) -> None:
        """Records the state of a restarted parameter server, from its answer to ``status``."""
        restored = status["restored"] or {}
        is_ours = restored.get("incarnation") == self._job.setup.incarnation
        parts = status["statistics"].get("groups", {}) if is_ours else {}
        self._restored[task] = restored.get("groups", {}) if is_ours else {}
        self._returned_at[task] = self._job.now
        self._parts[task] = parts
        self._groups.returned(task, parts)

    def heard(self, task: int, parts: Mapping[str, Any]) -> None:
        """Records the groups in a heartbeat of the accepted process of a parameter server."""
        self._parts[task] = parts
        for view in self._groups.views:
            part = parts.get(str(view.group), {})
            is_primary = view.primary == task and part.get("epoch") == view.epoch
            if is_primary and view.group not in self._since:
                self._num_updates[view.group] = part["updates"]

    def restart(self) -> Sequence[View]:
        """Returns new views of groups for which the newer snapshot is known, or whose wait is over."""
        if not self.comes_back_s or self.failed is not None:
            return []
        now = self._job.now
        primaries = self._groups.primaries
        waiting = [g for g in self._since if now - self._returned_at.get(primaries[g], now) < _PARTNER_S]
        views = self._groups.restart(waiting)
        for view in views:
            updates = self._parts[view.primary][str(view.group)]["updates"]
            self._going_on[view.group] = view, updates
        return views

    def resume_ready(self) -> None:
        """Resumes with the groups whose new primary has accepted its view."""
        for group, (view, _) in list(self._going_on.items()):
            key = "ps", "resume", group
            is_served = group not in self._groups.lost and self._groups.views[group].since is None
            if is_served and key not in self._job.procedures:
                self._job.procedures.start(key, self._resume(view), self._job.now)

    def end_waiting(self) -> None:
        """Resumes the job for the groups that are served again."""
        for group in [group for group in self._since if group not in self._groups.lost]:
            if group not in self._going_on:
                del self._since[group]
                self._job.resume(("group", group))

    def _resume(self, view: View) -> Procedure[None]:
        """Reads a group's values from its new primary, and ends the wait for it."""
        group, snapshot = view.group, self._snapshot_of(view)
        try:
            missing = yield Operation("restored", (group, snapshot.get("keys")))
            names = yield Operation("names_on", (group,))
        except ReplicaxError as error:  # the next heartbeat tries again
            self._job.log(logging.DEBUG, "ps %d does not resume group %d: %s", view.primary, group, error)
            return
        except Exception as error:  # the next heartbeat tries again; other groups resume meanwhile
            self._job.log(
                logging.WARNING, "ps %d could not resume group %d.", view.primary, group, error=error
            )
            return
        resumes, num_updates = self._going_on.get(group, (None, 0))
        # It is lost again. If its server was only silent, that may have the same data, and the log must say what is lost.
        if resumes is not view or group in self._groups.lost:
            return
        del self._going_on[group]
        members = names_of_servers(self._groups.members(group))
        if missing:
            shown = ", ".join(sorted(missing)[:5])
            error = UnavailableError(
                f"{members} restarted, but the newest snapshot of the variables of ps {group}, on ps "
                f"{view.primary}, was taken before these variables were created: {shown}. Restart the program from a "
                "checkpoint.",
                f"ps {view.primary}",
            )
            self.fail(error)
            return
        self._job.log(
            logging.WARNING,
            "%s restarted. The variables of ps %d resume from the newest snapshot, on ps %d%s: about %d "
            "acknowledged updates are lost. %sThe other variables are unchanged.",
            members,
            group,
            view.primary,
            snapshot_age(snapshot),
            max(self._num_updates.get(group, 0) - num_updates, 0),
            snapshot_contents(names, snapshot, self._job.next_number) if snapshot else "",
        )
        self._num_updates[group] = num_updates  # it may be lost again before a heartbeat counts them
        self.end_waiting()

    def _snapshot_of(self, view: View) -> Mapping[str, Any]:
        """Returns the description of the snapshot that a group resumes from; empty if the server had more in memory."""
        snapshot = self._restored.get(view.primary, {}).get(str(view.group), {})
        assert view.since is not None
        return snapshot if snapshot.get("position") == list(view.since) else {}


def names_of_servers(tasks: Iterable[int]) -> str:
    """Returns the names of parameter servers, for a message."""
    return ", ".join(f"ps {task}" for task in sorted(set(tasks)))
