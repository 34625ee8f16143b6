"""``Groups``: the coordinator's rules for which server serves each group of shards. Pure: events in, views out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, final

from replicax._ps.store.group_rules import FIRST_EPOCH, Partner, View
from replicax._ps.store.log import START, Position


@final
class Groups:
    """The views of all groups. Not thread-safe.

    Group g is on parameter server g and on the next one; after the last comes the first. A group is *lost* when the
    only server that has all of it is lost. It resumes from a snapshot, or from a copy that was out of sync. The newer
    one is used, once the last primary is known to be another process: until then that may still answer clients. A copy
    that differed from the primary is not used before it is in sync again.

    Args:
      num_ps: The number of parameter servers, at least 2.
    """

    def __init__(self, num_ps: int):
        self._views = [View(group, FIRST_EPOCH, group, (group + 1) % num_ps) for group in range(num_ps)]
        self._lost: set[int] = set()
        self._may_lead = [True] * num_ps
        self._ended: set[int] = set()
        self._differing: dict[int, int] = {}  # the server whose copy differs, by group
        self._has: list[dict[int, Position]] = [{} for _ in range(num_ps)]

    @property
    def views(self) -> tuple[View, ...]:
        """The latest view of each group."""
        return tuple(self._views)

    @property
    def primaries(self) -> list[int]:
        """The parameter server that clients ask, for each group."""
        return [view.primary for view in self._views]

    @property
    def unprotected(self) -> list[int]:
        """The groups that have one copy."""
        return [view.group for view in self._views if not self._may_lead[view.group]]

    @property
    def lost(self) -> list[int]:
        """The groups that have no copy."""
        return sorted(self._lost)

    def members(self, group: int) -> tuple[int, int]:
        """Returns the two parameter servers that may hold a group."""
        return group, (group + 1) % len(self._views)

    def server_lost(self, task: int) -> list[View]:
        """Records that a parameter server died or is silent. Returns the new views; ``lost`` may grow."""
        changed = []
        for view in self._views:
            self._has[view.group].pop(task, None)
            if view.group in self._lost:
                continue
            if task == view.backup:
                changed.append(self._alone(view, view.primary))
            elif task == view.primary and view.backup is not None and self._may_lead[view.group]:
                changed.append(self._alone(view, view.backup))
            elif task == view.primary:
                self._lost.add(view.group)
                self._has[view.group].clear()  # the other server may have got more since it said what it has
        return changed

    def back(self, task: int) -> None:
        """Records that a parameter server answers again, as the same process, with its data."""
        self._lost -= {view.group for view in self._views if view.primary == task} - self._ended

    def returned(self, task: int, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Records that another process has replaced a lost one, with its roles in the groups."""
        self._ended |= {group for group in self._lost if self._views[group].primary == task}
        self._note(task, parts)

    def restart(self, waiting: Collection[int] = ()) -> list[View]:
        """Makes lost groups resume with the data that their servers have. Returns the new views.

        Args:
          waiting: The groups that wait for both servers, because the other one may have more.
        """
        changed = []
        for group in sorted(self._lost & self._ended):
            view, has = self._views[group], self._has[group]
            best = max(has, key=lambda task: (has[task], task == view.primary), default=None)
            if best is not None and has[best] > START and not (group in waiting and len(has) < 2):
                self._lost.discard(group)
                changed.append(self._change(View(group, view.epoch + 1, best, None, since=has[best])))
        return changed

    def refused(self, view: View) -> None:
        """Records that the primary of a view has lost the shards for which it was chosen."""
        if view.since is not None and view.epoch == self._views[view.group].epoch:
            self._lost.add(view.group)
            self._ended.add(view.group)
            self._has[view.group].pop(view.primary, None)  # until it says again what it has

    @property
    def hopeless(self) -> list[int]:
        """The lost groups that have no data left: both servers are back, and have nothing."""
        return [
            group
            for group in sorted(self._lost & self._ended)
            if len(self._has[group]) == 2 and max(self._has[group].values()) == START
        ]

    def status_received(self, task: int, parts: Mapping[str, Mapping[str, Any]]) -> list[View]:
        """Applies a parameter server's description of its roles, as in ``GroupRules.described``. Returns the new
        views.
        """
        self._note(task, parts)
        changed = []
        for view in self._views:
            part = parts.get(str(view.group))
            if part is None or task != view.primary or part["epoch"] != view.epoch:
                continue
            if view.group in self._lost:  # another process has replaced the primary that said so
                continue
            self._views[view.group] = dataclasses.replace(view, since=None)  # it has accepted that position
            if part.get("differs"):
                self._set_differing(view.group, next(t for t in self.members(view.group) if t != task))
            if view.backup is None:
                continue
            if part["backup"] in (Partner.LOST, Partner.FAILED):
                changed.append(self._alone(view, view.primary))
            elif part["backup"] == Partner.IN_SYNC:
                self._may_lead[view.group] = True
                self._differing.pop(view.group, None)
        return changed

    def join(self, task: int) -> list[View]:
        """Makes a parameter server the backup of its groups that have none. Returns the new views."""
        joined = []
        for view in self._views:
            is_member = task in self.members(view.group) and task != view.primary
            is_settled = view.group not in self._lost and view.since is None
            if is_member and view.backup is None and is_settled:
                is_differing = self._differing.get(view.group) == task
                joins = View(
                    view.group,
                    view.epoch + 1,
                    view.primary,
                    task,
                    is_joining=True,
                    is_differing=is_differing,
                )
                joined.append(self._change(joins))
        return joined

    def views_to_send(self, task: int, parts: Mapping[str, Mapping[str, Any]]) -> list[View]:
        """Returns the views that a parameter server must learn, given its description of its roles."""
        return [
            view
            for view in self._views
            if task in view.members
            and view.group not in self._lost
            and parts.get(str(view.group), {"epoch": 0})["epoch"] < view.epoch
        ]

    def _note(self, task: int, parts: Mapping[str, Mapping[str, Any]]) -> None:
        for group, has in enumerate(self._has):
            if task in self.members(group):
                part = None if self._differing.get(group) == task else parts.get(str(group))
                has[task] = START if part is None else Position(*part["position"])

    def _set_differing(self, group: int, task: int) -> None:
        self._differing[group] = task
        if task in self._has[group]:
            self._has[group][task] = START

    def _alone(self, view: View, primary: int) -> View:
        return self._change(View(view.group, view.epoch + 1, primary, None))

    def _change(self, view: View) -> View:
        self._views[view.group] = view
        self._ended.discard(view.group)
        self._may_lead[view.group] = False
        return view
