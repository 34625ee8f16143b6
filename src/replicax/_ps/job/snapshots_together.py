"""``SnapshotsTogether``: epochs of snapshots of all parameter servers, to which all go back when one restarts.

- The servers take snapshots together while no function runs and no round waits, so that they form a state of the job.
  A function that a lost worker had ends on another one before: else a server might have its updates in the snapshot,
  and another one not. They do so soon after variables are created, and then at the shortest snapshot interval of the
  servers.
- The number of an epoch is used once. A request that was given up may still be carried out, at another moment.
- A server keeps the file of the last epoch that counts until a later one counts: each request names it.
- An epoch counts only if each server is the accepted process before its snapshot, and still after all snapshots.
- When a server restarts, all go back to the last epoch, or no function runs. The servers learn which functions have
  ended, and apply no late update of these. A server that was asked to go back counts as replaced from then on, and all
  are accepted in one moment.
- One procedure does both, so that no epoch is taken while servers go back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from replicax._ps.job.long_requests import ask_unless_gone
from replicax._ps.job.procedures import Operation, Pause, Procedure, Request, Until
from replicax._ps.job.server_recovery import STATUS_S, incomplete, not_the_same, restored_state
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.server_watch import ServerWatch
from replicax._src.program_kit.errors import RemoteError, UnavailableError

_FILES_S: Final = 600.0
_TICK_S: Final = 0.5
_NEXT_TRY_S: Final = 1.0
_BROKEN_TRY_S: Final = 10.0
_KEY: Final = ("ps", "together")
_FILES: Final = ("ps", "files")


@final
class SnapshotsTogether:
    """The rules of ``on_ps_restart="rewind"``.

    Args:
      job: The job.
      first_epoch: A number above those of all epochs that were taken in this session.

    Attributes:
      last: The last epoch of which all servers have a snapshot, perhaps of an earlier job; 0 if there is none.
      next_epoch: The number of the next epoch.
    """

    def __init__(self, job: JobHooks, first_epoch: int = 1):
        self._job, self.next_epoch = job, first_epoch
        self._interval_s = min(s for s in job.setup.snapshot_intervals_s if s is not None)
        self.last = job.setup.last_epoch
        self._watches: Sequence[ServerWatch] = ()
        self._num_finished = self._num_made = 0
        self._order = list(range(job.setup.num_servers))
        self._has_failed = False
        self._ready: dict[int, str] = {}  # the replaced servers that have a snapshot of this session
        self._restarted: dict[int, None] = {}  # those whose restart was the reason to go back
        self._asked_back: set[int] = set()

    def watch(self, watches: Sequence[ServerWatch]) -> None:
        """Sets the servers, before the start."""
        self._watches = watches

    def start(self) -> None:
        """Starts to take epochs."""
        self._job.procedures.start(_KEY, self._run(), self._job.now)

    def silent(self, watch: ServerWatch) -> None:
        """Does nothing: the job is paused until the server answers."""

    def lost(self, watch: ServerWatch, error: UnavailableError) -> UnavailableError | None:
        """Returns the error, because no other server has the variables."""
        return error

    def given_up(self, watch: ServerWatch) -> None:
        """Does nothing: the variables are dropped."""

    def here(self, watch: ServerWatch, statistics: Mapping[str, Any] | None) -> None:
        """Does nothing."""

    def restarted(self, watch: ServerWatch) -> None:
        """Checks that the server can go back, unless that process was checked. Then all go back together."""
        if self._ready.get(watch.index) == watch.state.last_instance:
            return
        key = "ps", "recovery", watch.index
        if key not in self._job.procedures:
            self._job.procedures.start(key, self._check(watch), self._job.now)

    def _check(self, watch: ServerWatch) -> Procedure[None]:
        try:
            status = yield from restored_state(self._job, watch)
        except Exception as error:
            watch.not_resumed(error)
            return
        if status is None:
            return
        if not self.last:
            why = "the parameter servers have no common snapshot to go back to."
            watch.breaks(not_the_same(watch.state, why))
            return
        self._ready[watch.index] = status["instance"]
        if watch.index not in self._asked_back:
            self._restarted[watch.index] = None
        self._job.procedures.hurry(_KEY, self._job.now)

    # --- one thing after another -------------------------------------------------------------------------

    def _run(self) -> Procedure[None]:
        job = self._job
        due, made = job.now + self._interval_s, job.num_made
        while True:
            yield Pause(_TICK_S)
            if self._restarted:
                yield from self._go_back()
                due = job.now + self._interval_s
            before, made = made, job.num_made
            is_due = made == before != self._num_made or job.now >= due
            if made and is_due and not job.has_half_done:
                due = job.now + self._interval_s
                job.pause(_KEY)
                yield from self._take()
                job.resume(_KEY)
                if job.has_half_done:
                    due = job.now

    # --- an epoch ----------------------------------------------------------------------------------------

    @property
    def _has_away(self) -> bool:
        """True if a server is silent, lost or replaced."""
        return any(watch.state.is_replaced or watch.is_unreachable for watch in self._watches)

    def _take(self) -> Procedure[None]:
        job = self._job
        is_useless = lambda: job.is_over or self._has_away or job.has_half_done  # noqa: E731
        yield Until(lambda: job.is_quiet or is_useless())
        if not job.is_quiet or is_useless():
            return
        made, finished = job.num_made, job.num_finished
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        for check in (self._check_same, self._write, self._check_same):
            for index in list(self._order):
                watch = self._watches[index]
                try:
                    yield from check(watch, epoch)
                except Exception as error:
                    self._not_taken(watch, epoch, error)
                    return
                if job.is_over or self._has_away:  # functions that failed may still change variables
                    return
        self.last, self._num_made, self._num_finished = epoch, made, finished
        self._has_failed = False

    def _check_same(self, watch: ServerWatch, epoch: int) -> Procedure[None]:
        status = yield from self._status(watch)
        if status["instance"] != watch.state.instance:
            watch.probe()
            raise UnavailableError("It has restarted, and is older than the others.", watch.name)

    def _write(self, watch: ServerWatch, epoch: int) -> Procedure[None]:
        request = Request(watch.name, "snapshot", {"epoch": epoch, "kept_epoch": self.last}, _FILES_S)
        is_gone = lambda: watch.is_unreachable or watch.state.is_replaced  # noqa: E731
        yield from ask_unless_gone(self._job, _FILES, request, is_gone)

    def _status(self, watch: ServerWatch) -> Procedure[Mapping[str, Any]]:
        """Asks again once, because an answer may get lost."""
        request = Request(watch.name, "status", {}, STATUS_S)
        try:
            status = yield request
        except UnavailableError:
            status = yield request
        watch.answered(status["instance"])
        return status

    def _not_taken(self, watch: ServerWatch, epoch: int, error: Exception) -> None:
        # It is asked first the next time, so that the others keep the snapshots that they share with it.
        self._order.remove(watch.index)
        self._order.insert(0, watch.index)
        if not self._has_failed and not isinstance(error, UnavailableError):
            self._job.log(
                logging.WARNING,
                "The parameter servers have no common snapshot of epoch %d yet; trying again: %s",
                epoch,
                error,
            )
        self._has_failed = True

    # --- back to an epoch ----------------------------------------------------------------------------------

    def _go_back(self) -> Procedure[None]:
        job = self._job
        job.pause(_KEY)
        while True:
            # Not until rounds are applied: a server may be away, and what a round changes is undone.
            yield Until(lambda: not job.num_in_flight and self._may_go_back)
            instances = yield from self._restore_all()
            if instances is not None:
                break
            is_broken = any(watch.state.is_broken for watch in self._watches)
            yield Pause(_BROKEN_TRY_S if is_broken else _NEXT_TRY_S)
        undone, self._num_finished = job.num_finished - self._num_finished, job.num_finished
        names = ", ".join(f"ps {index}" for index in sorted(self._restarted))
        self._ready, self._restarted, self._asked_back = {}, {}, set()
        job.log(
            logging.WARNING,
            "%s restarted, so all parameter servers went back to the snapshots of epoch %d, which they took "
            "together: the work of %d scheduled functions that ended since is undone.",
            names,
            self.last,
            undone,
        )
        for watch, instance in zip(self._watches, instances, strict=True):
            watch.state.accept(instance)
        for watch, instance in zip(self._watches, instances, strict=True):
            watch.accept(instance)
        job.resume(_KEY)

    @property
    def _may_go_back(self) -> bool:
        """True if all servers answer, and those that are other processes have a snapshot of this session."""
        states = [watch.state for watch in self._watches]
        are_ready = all(
            state.knows(state.last_instance) or self._ready.get(state.index) == state.last_instance
            for state in states
        )
        return are_ready and not any(state.num_silent for state in states)

    def _restore_all(self) -> Procedure[list[str] | None]:
        """Takes all servers back to the last epoch. Returns their instances; None if one of them failed."""
        seen = [watch.state.seen for watch in self._watches]
        instances: list[str] = []
        for watch in self._watches:
            instance = yield from self._restore(watch)
            if instance is None:
                return None
            instances.append(instance)
        for watch in self._watches:
            try:
                yield from self._status(watch)
            except Exception as error:
                watch.not_resumed(error)
                return None
        for watch, instance, before in zip(self._watches, instances, seen, strict=True):
            if watch.state.seen - before - {instance}:  # it has restarted again, before or after it went back
                return None
        return None if self._job.num_in_flight else instances

    def _restore(self, watch: ServerWatch) -> Procedure[str | None]:
        """Takes a server back to the last epoch. Returns its instance; None if that failed."""
        job, state, epoch = self._job, watch.state, self.last
        self._asked_back.add(watch.index)
        state.is_replaced = True  # even if the answer is lost
        job.pause(watch.name)
        began = job.now
        # A lost worker may still push for a function that has ended, and whose work is undone now.
        ended = {"stop": job.next_number, "unfinished": list(job.unfinished)}
        request = Request(watch.name, "restore", {"epoch": epoch, **ended}, _FILES_S)
        is_gone = lambda: watch.is_unreachable or _is_another(watch, began, job.now)  # noqa: E731
        try:
            answer = yield from ask_unless_gone(job, _FILES, request, is_gone)
            instance, restored = answer["instance"], answer["restored"]
            missing = yield Operation("restored", (watch.index, tuple(restored["keys"])))
        except RemoteError as error:
            why = f"it cannot go back to the snapshot of epoch {epoch}: {error}"
            watch.breaks(not_the_same(state, why))
            return None
        except Exception as error:
            watch.not_resumed(error)
            return None
        if restored["incarnation"] != job.setup.incarnation:
            why = f"its snapshot of epoch {epoch} belongs to another coordinator."
            watch.breaks(not_the_same(state, why))
            return None
        watch.answered(instance)
        self._ready[watch.index] = instance  # it did not restart by itself: nobody hurries to go back again
        if missing:
            watch.breaks(incomplete(state, missing))
            return None
        return instance


def _is_another(watch: ServerWatch, began: float, now: float) -> bool:
    """True if the server became another process after the request began, and has not answered the request since.

    A server that goes back becomes another process too. Its answer comes within ``STATUS_S``.
    """
    return watch.state.changed_at > began and now - watch.state.changed_at > STATUS_S
