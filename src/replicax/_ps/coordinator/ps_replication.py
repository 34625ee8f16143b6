"""``Replication``: assigns each group of shards to a primary that is alive, and a backup that copies it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.lost_groups import LostGroups, listed
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._ps.store.group_rules import Partner, View
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import InvalidArgumentError, ReplicaxError, UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")
_TELL_S: Final = 3.0
_HELLO_S: Final = 10.0
_JOIN_EVERY_S: Final = 1.0


@final
class Replication:
    """Passes the events of the parameter servers to ``Groups``, and its decisions to the servers and the workers.

    A server that missed a decision gets it again after its next heartbeat. If both servers of a group are lost and
    they
    write snapshots, no closure is sent to workers until they restart.

    Args:
      session: A session with groups.
      pool: The pool to pause.
      tell_workers: A function that tells the workers about new primaries.
      comes_back_s: The longest wait for a group that has lost both servers; 0 if they have no snapshots.
    """

    def __init__(
        self,
        session: Session,
        pool: WorkerPool,
        tell_workers: Callable[[], None],
        comes_back_s: float = 0.0,
    ):
        assert session.groups is not None
        self._lost = LostGroups(session, pool, comes_back_s)
        self._session, self._groups, self._tell_workers = session, session.groups, tell_workers
        self._lock = threading.Lock()  # not held during requests to tasks
        self._primaries = session.groups.primaries
        self._unprotected: list[int] = []
        self._last_join: dict[int, float] = {}

    def lost(self, watch: PsWatch, error: UnavailableError) -> UnavailableError | None:
        """Handles the loss of a server. Returns an error for the job if some variables are on no server now."""
        with self._lock:
            views = self._groups.server_lost(watch.index)
            left = self._without(watch, error)
            if left is None and not self._groups.lost:
                self._say_moved(watch, "is lost")
        self._tell(_to_members(views))
        return left

    def silent(self, watch: PsWatch) -> UnavailableError | None:
        """Handles a server that does not answer. Returns an error for the job if it has waited long enough."""
        with self._lock:
            over = self._lost.waited_too_long(watch.index)
            return self._nowhere(watch, over) if over else None

    def restarted(self, watch: PsWatch, client: TaskClient) -> UnavailableError | None:
        """Handles a server that has restarted, and has nothing, or the contents of its snapshots.

        Returns an error for the job if no other server has its variables.

        Raises:
          Exception: It is lost again; the caller tries again.
        """
        told = client.ask("status", {}, _HELLO_S)
        if watch.knows(told["instance"]):
            return None
        with self._lock:
            views = self._groups.server_lost(watch.index)
            self._lost.returned(watch, told)
            error = UnavailableError(f"{watch.name} is another process than before.", watch.name)
            left = self._without(watch, error)
        self._tell(_to_members(views))
        if left is not None:
            return left
        watch.accept(client.ask("hello", self._hello, _HELLO_S)["instance"])
        with self._lock:
            if views and not self._groups.lost:  # its restart was the first sign of trouble
                self._say_moved(watch, "restarted")
        return None

    def given_up(self, client: TaskClient) -> None:
        """Reclaims a server that has ended this coordinator's session after a long silence, and has dropped its data.

        Its next heartbeat shows another instance, as if it had restarted. A server of another coordinator is left
        alone.
        """
        try:
            client.ask("hello", {**self._hello, "again": True}, _HELLO_S)
        except ReplicaxError as error:
            log.debug("%s", error)

    def back(self, watch: PsWatch) -> None:
        """Handles an answer of a server: sends it the views that it missed, and has it copy groups that it lacks."""
        with self._lock:
            parts = self._lost.parts_of(watch)
            self._groups.back(watch.index)
            given_up = [] if parts is None else self._groups.status_received(watch.index, parts)
            parts = parts or {}
            for view in given_up:
                self._say_given_up(view, parts[str(view.group)])
            views = [*self._lost.restart(), *given_up, *self._joined(watch)]
            unknown = [(watch.index, view) for view in self._groups.views_to_send(watch.index, parts)]
        self._tell([*_to_members(views), *unknown])
        with self._lock:
            ready = self._lost.ready()
        for view in ready:
            found = None
            try:
                found = self._lost.restored(view)
            finally:
                with self._lock:
                    self._lost.resumed(view, found)
        with self._lock:
            self._lost.end_waiting()
            self._say_protected()

    def statistics(self) -> dict[str, Any]:
        """Returns the ``primaries`` by parameter server, and ``unprotected``: servers whose variables have one copy."""
        with self._lock:
            groups = self._groups
            return {"primaries": groups.primaries, "unprotected": groups.unprotected, "lost": groups.lost}

    def _tell(self, told: Iterable[tuple[int, View]]) -> None:
        """Sends views to parameter servers, by number, then connects the session and the workers to the new
        primaries.

        Call it without the lock: a server may not answer. Servers ignore a view that is older than theirs, so threads
        need
        not take turns.
        """
        for task, view in dict.fromkeys(told):
            try:
                self._session.send_view(task, view, _TELL_S)
            except InvalidArgumentError:
                with self._lock:
                    self._groups.refused(view)
            except ReplicaxError as error:  # its next heartbeat tries again
                log.debug("ps %d does not take the view %s: %s", task, view, error)
        with self._lock:
            before, self._primaries = self._primaries, self._groups.primaries
            has_changed = before != self._primaries
        if has_changed:
            self._session.use_primaries()
            self._tell_workers()

    @property
    def _hello(self) -> dict[str, Any]:
        return {"incarnation": self._session.incarnation, "ps": list(self._session.ps_addresses)}

    # --- the caller holds the lock ---------------------------------------------------------------------

    def _joined(self, watch: PsWatch) -> Sequence[View]:
        """Returns views in which a parameter server joins groups that it may hold and lacks; at most once a second."""
        now = time.monotonic()
        if now < self._last_join.get(watch.index, 0.0) + _JOIN_EVERY_S:
            return ()
        self._last_join[watch.index] = now
        return self._groups.join(watch.index)

    def _without(self, watch: PsWatch, error: UnavailableError) -> UnavailableError | None:
        """Has the job wait for groups that are lost now. Returns an error if waiting is useless."""
        gone = [group for group in self._groups.lost if watch.index == self._groups.views[group].primary]
        if not self._lost.comes_back_s:
            return self._nowhere(watch, gone, error) if gone else None
        self._lost.wait_for(gone)
        if self._lost.failed is None and (hopeless := self._groups.hopeless):
            self._lost.failed = self._nowhere(watch, hopeless, error)
        return self._lost.failed

    def _nowhere(
        self, watch: PsWatch, gone: Sequence[int], error: UnavailableError | None = None
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

    def _say_moved(self, watch: PsWatch, what: str) -> None:
        unprotected = self._groups.unprotected
        log.warning(
            "%s %s. No acknowledged update is lost: the other copy of its variables is used, on %s. The "
            "variables of %s are on one parameter server until it is back and has copied them.",
            watch.name,
            what,
            listed(self._groups.views[group].primary for group in unprotected),
            listed(unprotected),
        )
        self._unprotected = unprotected

    def _say_given_up(self, view: View, part: Mapping[str, Any]) -> None:
        other = next(task for task in self._groups.members(view.group) if task != view.primary)
        say = log.info if part["backup"] == Partner.FAILED else log.warning
        say(
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
            log.warning("All variables are on two parameter servers again.")
        self._unprotected = unprotected


def _to_members(views: Sequence[View]) -> list[tuple[int, View]]:
    """Returns the members of each view, with the view."""
    return [(task, view) for view in views for task in view.members]
