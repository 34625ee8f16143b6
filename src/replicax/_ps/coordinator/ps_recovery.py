"""``Recovery``: resumes with a parameter server that restarts from a snapshot, or takes all servers back to one
epoch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.ps_watch import PsWatch
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import InvalidArgumentError, RemoteError, UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")

OnPsRestart = Literal["continue", "rewind"]
_STATUS_S = 10.0
_FILES_S = 600.0
_TICK_S = 0.5


@final
class Recovery:
    """Resumes with parameter servers that have restarted.

    A server that has a snapshot of this coordinator's session gets its programs again, and workers read all values
    again.
    With "continue" it is as old as its snapshot, and the others are unchanged. With "rewind" all go back to the last
    epoch.

    Raises:
      InvalidArgumentError: ``how`` is "rewind", and a parameter server takes no snapshots.
    """

    def __init__(self, session: Session, pool: WorkerPool, how: OnPsRestart):
        if how not in ("continue", "rewind"):
            raise InvalidArgumentError(f"on_ps_restart must be 'continue' or 'rewind', got {how!r}.")
        without = [n for n, interval in enumerate(session.snapshot_intervals_s) if interval is None]
        if how == "rewind" and session.groups is not None:
            raise InvalidArgumentError(
                "on_ps_restart='rewind' takes all parameter servers back to snapshots that they took "
                "together, but with replication=2 each group has snapshots of its own. Use "
                "on_ps_restart='continue', or remove replication=2."
            )
        if how == "rewind" and without:
            raise InvalidArgumentError(
                f"on_ps_restart='rewind' needs snapshots of all parameter servers, and "
                f"{', '.join(f'ps {n}' for n in without)} "
                "takes none. Start it with snapshot_dir in its rx.ServerOptions, or with --snapshot-dir."
            )
        self._session, self._pool = session, pool
        self._lock = threading.Lock()
        self._watches: Sequence[PsWatch] = ()
        self._epochs = Epochs(session, pool, self._lock, self._knows) if how == "rewind" else None

    def start(self, watches: Sequence[PsWatch]) -> None:
        self._watches = watches
        if self._epochs is not None:
            self._epochs.start()

    def close(self) -> None:
        if self._epochs is not None:
            self._epochs.close()

    def join(self, timeout_s: float) -> None:
        if self._epochs is not None:
            self._epochs.join(timeout_s)

    def _knows(self, index: int, instance: Any) -> bool:
        return self._watches[index].knows(instance)

    def restarted(self, watch: PsWatch, client: TaskClient) -> UnavailableError | None:
        """Resumes with a server if it is another process than before. Returns an error if that is impossible.

        Raises:
          Exception: It is lost again, or another server is; the caller tries again.
        """
        if not watch.comes_back_s:
            return _gone(watch, f"its variables are lost.{watch.hint}")
        with self._lock:
            told = client.ask("status", {}, _STATUS_S)
            if watch.knows(told["instance"]):
                return None
            restored = told["restored"]
            if restored is None or restored["incarnation"] != self._session.incarnation:
                return _gone(
                    watch, "it has no snapshot of this coordinator's session, so its variables are lost."
                )
            self._pool.pause(watch.name)
            if self._epochs is None:
                return self._go_on(watch, told["instance"], restored)
            return self._rewind(watch, self._epochs)

    def _go_on(self, watch: PsWatch, instance: str, restored: Mapping[str, Any]) -> UnavailableError | None:
        missing = self._session.restored(watch.index, restored["keys"])
        if missing:
            return _incomplete(watch, missing)
        log.warning(
            "%s restarted from its last snapshot%s: about %d updates that it had acknowledged are lost. "
            "%sThe other parameter servers are unchanged.",
            watch.name,
            age_of(restored),
            max(watch.num_updates - restored["updates"], 0),
            state_of(self._session.names_on(watch.index), restored, self._pool.next_number),
        )
        watch.accept(instance)
        return None

    def _rewind(self, watch: PsWatch, epochs: Epochs) -> UnavailableError | None:
        if not epochs.last:
            return _gone(watch, "the parameter servers have no common snapshot to go back to.")
        with self._pool.drained() as is_so:
            if not is_so:
                return None
            instances = []
            for each in self._watches:
                restored = self._restore(each, epochs.last)
                if isinstance(restored, UnavailableError):
                    return restored
                instances.append(restored)
            # All or none: a server that was accepted before another one failed would run beside others that did not
            # go back.
            for each, instance in zip(self._watches, instances, strict=True):
                each.accept(instance)
            num_undone = epochs.rewound()
        log.warning(
            "%s restarted, so all parameter servers went back to the snapshots of epoch %d, which they took "
            "together: the work of %d scheduled functions that ended since is undone.",
            watch.name,
            epochs.last,
            num_undone,
        )
        return None

    def _restore(self, watch: PsWatch, epoch: int) -> str | UnavailableError:
        """Takes a server back to a snapshot. Returns its new instance, or an error."""
        header = {"incarnation": self._session.incarnation, "epoch": epoch}
        with contextlib.closing(self._session.connect("ps", watch.index)) as client:
            try:
                told = client.ask("restore", header, _FILES_S)
            except RemoteError as error:
                return _gone(watch, f"it cannot go back to the snapshot of epoch {epoch}: {error}")
        if told["restored"]["incarnation"] != self._session.incarnation:
            return _gone(watch, f"its snapshot of epoch {epoch} belongs to another coordinator.")
        missing = self._session.restored(watch.index, told["restored"]["keys"])
        if missing:
            return _incomplete(watch, missing)
        return told["instance"]


@final
class Epochs:
    """Has all parameter servers take snapshots together while no function runs, so that they form a state of the job.

    It does so soon after variables are created, and then at the shortest snapshot interval of the servers.

    Args:
      session: The session with the tasks.
      pool: The pool to pause.
      lock: A lock that is held while it takes them.
      knows: Returns True if a parameter server, by its number, still is that instance. A restarted server is as old
        as
        its last snapshot until all have gone back.

    Attributes:
      last: The last epoch of which all servers have a snapshot; 0 if there is none.
    """

    def __init__(
        self, session: Session, pool: WorkerPool, lock: threading.Lock, knows: Callable[[int, Any], bool]
    ):
        self._session, self._pool, self._lock, self._knows = session, pool, lock, knows
        self._interval_s = min(s for s in session.snapshot_intervals_s if s is not None)
        self.last = 0
        self._asked = (
            0  # the last epoch that was asked for: a server may still write it, so it is not used again
        )
        self._num_finished = 0
        self._num_made = 0
        self._order = list(range(len(session.ps_addresses)))
        self._has_failed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-epochs", daemon=True)
        self.start: Callable[[], None] = self._thread.start

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._is_over.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def rewound(self) -> int:
        """Records that all servers went back to the last epoch. Returns how many functions have ended since that
        epoch.
        """
        finished = self._pool.closure_statistics()["finished"]
        undone, self._num_finished = finished - self._num_finished, finished
        return undone

    def _run(self) -> None:
        due, made = time.monotonic() + self._interval_s, self._session.num_made
        while not self._is_over.wait(_TICK_S):
            before, made = made, self._session.num_made
            if made and (made == before != self._num_made or time.monotonic() >= due):
                due = time.monotonic() + self._interval_s
                with self._lock, self._pool.drained() as is_so:
                    if is_so:
                        self._take()

    def _take(self) -> None:
        made, finished = self._session.num_made, self._pool.closure_statistics()["finished"]
        self._asked += 1
        header = {"incarnation": self._session.incarnation, "epoch": self._asked}
        for index in self._order:
            try:
                with contextlib.closing(self._session.connect("ps", index)) as client:
                    if not self._knows(index, client.ask("status", {}, _STATUS_S)["instance"]):
                        raise UnavailableError(
                            "It has restarted, and is older than the others.", f"ps {index}"
                        )
                    client.ask("snapshot", header, _FILES_S)
            except Exception as error:
                self._fail(index, error)
                return
        self.last, self._num_made, self._num_finished = self._asked, made, finished
        self._has_failed = False

    def _fail(self, index: int, error: Exception) -> None:
        # It is asked first the next time, so that the others keep the snapshots that they share with it.
        self._order.remove(index)
        self._order.insert(0, index)
        if not self._has_failed and not isinstance(error, UnavailableError):
            log.warning(
                "The parameter servers have no common snapshot of epoch %d yet; trying again: %s",
                self._asked,
                error,
            )
        self._has_failed = True


def age_of(restored: Mapping[str, Any]) -> str:
    """Returns the age of a snapshot, for a message."""
    age_s = restored.get("age_s")
    return "" if age_s is None else f", taken {age_s:.0f} s before"


def state_of(names: Sequence[str], restored: Mapping[str, Any], num_scheduled: int) -> str:
    """Says which variables are older now, and how many functions their values include."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    first, stop = restored.get("applied", (0, 0))
    some = f", and some of the next {stop - first}" if stop > first else ""
    seen = f"of {num_scheduled} scheduled functions they include the updates of the first {first}{some}"
    return f"Its variables are as they were then: {shown}; {seen}. " if names else ""


def _gone(watch: PsWatch, why: str) -> UnavailableError:
    return UnavailableError(
        f"{watch.name} is another process than before: {why} Restart the program from a checkpoint.",
        watch.name,
    )


def _incomplete(watch: PsWatch, missing: Sequence[str]) -> UnavailableError:
    return _gone(
        watch,
        f"its snapshot was taken before these variables were created: {', '.join(sorted(missing)[:5])}.",
    )
