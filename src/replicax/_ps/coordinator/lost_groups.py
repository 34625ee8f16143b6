"""``LostGroups``: when both servers of a group are lost, the job waits, and resumes from their snapshots."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.ps_recovery import age_of, state_of
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._ps.store.group_rules import View
from replicax._src.program_kit.errors import ReplicaxError, UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")

_PARTNER_S: Final = 60.0
"""The longest wait for the other server, once the last primary of a group is back with a snapshot."""


class Restored(NamedTuple):
    """The variables of a restored group.

    Attributes:
      missing: The names of the variables that the snapshot lacks.
      names: The names of all variables.
    """

    missing: Sequence[str]
    names: Sequence[str]


@final
class LostGroups:
    """Pauses the job while a group is lost, and reports which updates are lost.

    ``Groups`` has the rules. The caller holds its own lock for all methods but ``restored``.

    Args:
      session: A session with groups.
      pool: The pool to pause.
      comes_back_s: The longest wait for a lost group; 0 if its servers have no snapshots.

    Attributes:
      failed: The error that makes waiting useless; None if waiting may help.
    """

    def __init__(self, session: Session, pool: WorkerPool, comes_back_s: float):
        assert session.groups is not None
        self._session, self._groups, self._pool = session, session.groups, pool
        self.comes_back_s = comes_back_s
        self.failed: UnavailableError | None = None
        self._since: dict[int, float] = {}
        self._num_updates: dict[int, int] = {}
        self._going_on: dict[int, tuple[View, int]] = {}
        self._resuming: set[int] = set()  # the groups among them that some thread is reading
        # Keys are numbers of parameter servers.
        self._returned_at: dict[int, float] = {}
        self._restored: dict[int, Mapping[str, Any]] = {}
        self._told_before: dict[int, Mapping[str, Any]] = {}
        self._parts: dict[int, Mapping[str, Any]] = {}

    def wait_for(self, groups: Sequence[int]) -> None:
        """Starts to wait for groups that are lost now."""
        for group in groups:
            self._going_on.pop(group, None)
            if group not in self._since:
                self._since[group] = time.monotonic()
                self._pool.pause(("group", group))
                log.warning(
                    "Lost %s, which had the variables of ps %d. Waiting up to %g s for them: once they "
                    "restart, training resumes from the newer of their snapshots.",
                    listed(self._groups.members(group)),
                    group,
                    self.comes_back_s,
                )

    def waited_too_long(self, task: int) -> list[int]:
        """Returns the lost groups that a parameter server may have and whose wait is over."""
        until = time.monotonic() - self.comes_back_s
        return [g for g, since in self._since.items() if since < until and task in self._groups.members(g)]

    def returned(self, watch: PsWatch, told: Mapping[str, Any]) -> None:
        """Records the state of a restarted parameter server, from its answer to ``status``."""
        restored = told["restored"] or {}
        is_ours = restored.get("incarnation") == self._session.incarnation
        parts = told["statistics"].get("groups", {}) if is_ours else {}
        self._restored[watch.index] = restored.get("groups", {}) if is_ours else {}
        self._returned_at[watch.index] = time.monotonic()
        self._told_before[watch.index] = watch.statistics()["statistics"]
        self._parts[watch.index] = parts
        self._groups.returned(watch.index, parts)

    def parts_of(self, watch: PsWatch) -> Mapping[str, Any] | None:
        """Returns the groups in a parameter server's last heartbeat; None if that came from the previous process."""
        told = watch.statistics()["statistics"]
        if told == self._told_before.get(watch.index):
            return None
        self._parts[watch.index] = parts = told.get("groups", {})
        for view in self._groups.views:
            part = parts.get(str(view.group), {})
            is_primary = view.primary == watch.index and part.get("epoch") == view.epoch
            if is_primary and view.group not in self._since:
                self._num_updates[view.group] = part["updates"]
        return parts

    def restart(self) -> Sequence[View]:
        """Returns new views of groups for which the newer snapshot is known, or whose wait is over."""
        if not self.comes_back_s or self.failed is not None:
            return []
        now = time.monotonic()
        primaries = self._groups.primaries
        waiting = [g for g in self._since if now - self._returned_at.get(primaries[g], now) < _PARTNER_S]
        views = self._groups.restart(waiting)
        for view in views:
            updates = self._parts[view.primary][str(view.group)]["updates"]
            self._going_on[view.group] = view, updates
        return views

    def ready(self) -> list[View]:
        """Returns the views of groups whose new primary has accepted its view.

        The caller calls ``restored`` for each, and passes the result to ``resumed``.
        """
        views = [
            view
            for group, (view, _) in self._going_on.items()
            if group not in self._groups.lost and self._groups.views[group].since is None
        ]
        views = [view for view in views if view.group not in self._resuming]
        self._resuming.update(view.group for view in views)
        return views

    def restored(self, view: View) -> Restored | None:
        """Reads a group's values from its new primary. Call it without the lock. None means that the primary is lost
        again.
        """
        try:
            missing = self._session.restored(view.group, self._snapshot_of(view).get("keys"))
            return Restored(missing, self._session.names_on(view.group))
        except ReplicaxError as error:  # the next heartbeat tries again
            log.debug("ps %d does not resume group %d: %s", view.primary, view.group, error)
        except Exception as error:  # the next heartbeat tries again; other groups resume meanwhile
            log.warning("ps %d could not resume group %d.", view.primary, view.group, exc_info=error)
        return None

    def end_waiting(self) -> None:
        """Resumes the job for the groups that are served again."""
        for group in [group for group in self._since if group not in self._groups.lost]:
            if group not in self._going_on:
                del self._since[group]
                self._pool.resume(("group", group))

    def resumed(self, view: View, found: Restored | None) -> None:
        """Ends the wait for a group with the result of ``restored``, and reports which of its updates are lost."""
        group, snapshot = view.group, self._snapshot_of(view)
        self._resuming.discard(group)
        resumes, num_updates = self._going_on.get(group, (None, 0))
        if found is None or resumes is not view:  # it is lost again
            return
        del self._going_on[group]
        members = listed(self._groups.members(group))
        if found.missing:
            self.failed = UnavailableError(
                f"{members} restarted, but the newest snapshot of the variables of ps {group}, on ps "
                f"{view.primary}, was taken before these variables were created: "
                f"{', '.join(sorted(found.missing)[:5])}. Restart the program from a checkpoint.",
                f"ps {view.primary}",
            )
            self._pool.broke(self.failed)
            return
        log.warning(
            "%s restarted. The variables of ps %d resume from the newest snapshot, on ps %d%s: about %d "
            "acknowledged updates are lost. %sThe other variables are unchanged.",
            members,
            group,
            view.primary,
            age_of(snapshot),
            max(self._num_updates.get(group, 0) - num_updates, 0),
            state_of(found.names, snapshot, self._pool.next_number) if snapshot else "",
        )

    def _snapshot_of(self, view: View) -> Mapping[str, Any]:
        """Returns the description of the snapshot that a group resumes from; empty if the server had more in memory."""
        snapshot = self._restored.get(view.primary, {}).get(str(view.group), {})
        assert view.since is not None
        return snapshot if snapshot.get("position") == list(view.since) else {}


def listed(tasks: Iterable[int]) -> str:
    """Returns the names of parameter servers, for a message."""
    return ", ".join(f"ps {task}" for task in sorted(set(tasks)))
