"""``Recovery``: resumes when a parameter server comes back with a snapshot, or takes all of them back to one epoch."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.coordinator.prepared import Client, Session
from replicax._src.parameter_servers.coordinator.ps_watch import PsWatch
from replicax._src.parameter_servers.errors import RemoteError, UnavailableError

if TYPE_CHECKING:
    from replicax._src.parameter_servers.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")

OnPsRestart = Literal["continue", "rewind"]
_STATUS_S = 10.0
_FILES_S = 600.0
_TICK_S = 0.5


@final
class Recovery:
    """Goes on with parameter servers that were started again.

    One that has a snapshot of this coordinator's time is given its programs again, and workers read all values again.
    With "continue" it is as old as its snapshot, the others are as they were. With "rewind" all go back to the last
    epoch.

    Raises:
      InvalidArgumentError: "rewind", and some parameter server takes no snapshots.
    """

    def __init__(self, session: Session, pool: WorkerPool, how: OnPsRestart):
        if how not in ("continue", "rewind"):
            raise InvalidArgumentError(f"on_ps_restart={how!r}: it is 'continue' or 'rewind'.")
        without = [n for n, interval in enumerate(session.snapshot_intervals_s) if interval is None]
        if how == "rewind" and session.groups is not None:
            raise InvalidArgumentError(
                "on_ps_restart='rewind' brings all parameter servers back to snapshots that they took together, and with "
                "replication=2 each variable has snapshots of its own. Use on_ps_restart='continue', or leave replication out."
            )
        if how == "rewind" and without:
            raise InvalidArgumentError(
                f"on_ps_restart='rewind' needs snapshots of all parameter servers, and {', '.join(f'ps {n}' for n in without)} "
                "takes none. Start it with snapshot_dir in its rx.ServerOptions, or --snapshot-dir."
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

    def restarted(self, watch: PsWatch, client: Client) -> UnavailableError | None:
        """Goes on with one, if it is another than before. Returns why that cannot be.

        Raises:
          Exception: It is gone again, or another one is: to be tried again.
        """
        if not watch.comes_back_s:
            return _gone(watch, f"the variables that it had are gone.{watch.hint}")
        with self._lock:
            told = client.ask("status", {}, _STATUS_S)
            if watch.knows(told["instance"]):
                return None
            restored = told["restored"]
            if restored is None or restored["incarnation"] != self._session.incarnation:
                return _gone(
                    watch, "it has no snapshot of this coordinator's time, and the variables are gone."
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
            "%s was started again and goes on with its last snapshot%s: %d updates that it had acknowledged are gone, by "
            "its last count. %sThe other parameter servers are as they were.",
            watch.name,
            age_of(restored),
            max(watch.num_updates - restored["updates"], 0),
            state_of(self._session.names_on(watch.index), restored, self._pool.next_number),
        )
        watch.accept(instance)
        return None

    def _rewind(self, watch: PsWatch, epochs: Epochs) -> UnavailableError | None:
        if not epochs.last:
            return _gone(watch, "there is no snapshot of all parameter servers to which they could go back.")
        with self._pool.drained() as is_so:
            if not is_so:
                return None
            instances = []
            for each in self._watches:
                restored = self._restore(each, epochs.last)
                if isinstance(restored, UnavailableError):
                    return restored
                instances.append(restored)
            # All or none: one that was accepted before another failed would go on, beside others that did not go back.
            for each, instance in zip(self._watches, instances, strict=True):
                each.accept(instance)
            num_undone = epochs.rewound()
        log.warning(
            "%s was started again, and all parameter servers went back to the snapshots of epoch %d, which they took "
            "together: %d scheduled functions that had ended since are undone.",
            watch.name,
            epochs.last,
            num_undone,
        )
        return None

    def _restore(self, watch: PsWatch, epoch: int) -> str | UnavailableError:
        """Has a server go back to a snapshot. Returns its new instance, or why it cannot."""
        header = {"incarnation": self._session.incarnation, "epoch": epoch}
        with contextlib.closing(self._session.connect("ps", watch.index)) as client:
            try:
                told = client.ask("restore", header, _FILES_S)
            except RemoteError as error:
                return _gone(watch, f"it cannot go back to the snapshot of epoch {epoch}: {error}")
        if told["restored"]["incarnation"] != self._session.incarnation:
            return _gone(watch, f"its snapshot of epoch {epoch} is another coordinator's.")
        missing = self._session.restored(watch.index, told["restored"]["keys"])
        if missing:
            return _incomplete(watch, missing)
        return told["instance"]


@final
class Epochs:
    """Has all parameter servers take snapshots together, while no function runs: states of the whole job.

    Soon after variables were made, and then as often as the most frequent of the servers would.

    Args:
      lock: Held meanwhile.
      knows: Whether a parameter server, by its number, is that instance. One that was started again is as old as its
        last snapshot until all have gone back.

    Attributes:
      last: The last epoch of which all have a snapshot; 0: none.
    """

    def __init__(
        self, session: Session, pool: WorkerPool, lock: threading.Lock, knows: Callable[[int, Any], bool]
    ):
        self._session, self._pool, self._lock, self._knows = session, pool, lock, knows
        self._interval_s = min(s for s in session.snapshot_intervals_s if s is not None)
        self.last = 0
        self._num_finished = 0
        self._num_made = 0
        self._order = list(range(len(session.ps_addresses)))
        self._has_failed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-epochs", daemon=True)
        self.start: Callable[[], None] = self._thread.start

    def close(self) -> None:
        """Ends the thread; does not wait for it."""
        self._is_over.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def rewound(self) -> int:
        """All have gone back to the last epoch: returns how many functions have ended since."""
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
        header = {"incarnation": self._session.incarnation, "epoch": self.last + 1}
        for index in self._order:
            try:
                with contextlib.closing(self._session.connect("ps", index)) as client:
                    if not self._knows(index, client.ask("status", {}, _STATUS_S)["instance"]):
                        raise UnavailableError(
                            "It was started again, and is older than the others.", f"ps {index}"
                        )
                    client.ask("snapshot", header, _FILES_S)
            except Exception as error:
                self._fail(index, error)
                return
        self.last, self._num_made, self._num_finished = self.last + 1, made, finished
        self._has_failed = False

    def _fail(self, index: int, error: Exception) -> None:
        # It is asked first the next time: the others keep what they have in common with it.
        self._order.remove(index)
        self._order.insert(0, index)
        if not self._has_failed and not isinstance(error, UnavailableError):
            log.warning(
                "There is no snapshot of all parameter servers of epoch %d; it is tried again: %s",
                self.last + 1,
                error,
            )
        self._has_failed = True


def age_of(restored: Mapping[str, Any]) -> str:
    """The age of a snapshot, for a message."""
    age_s = restored.get("age_s")
    return "" if age_s is None else f", taken {age_s:.0f} s before"


def state_of(names: Sequence[str], restored: Mapping[str, Any], num_scheduled: int) -> str:
    """Which variables are older now, and which functions they have seen."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    first, stop = restored.get("applied", (0, 0))
    some = f", and some of the next {stop - first}" if stop > first else ""
    seen = f"of {num_scheduled} scheduled functions they have what the first {first} did{some}"
    return f"Its variables are as they were then: {shown}; {seen}. " if names else ""


def _gone(watch: PsWatch, why: str) -> UnavailableError:
    return UnavailableError(
        f"{watch.name} is another process than before: {why} Start the program again, from a checkpoint.",
        watch.name,
    )


def _incomplete(watch: PsWatch, missing: Sequence[str]) -> UnavailableError:
    return _gone(
        watch,
        f"its snapshot is from before variables were made, and does not have {', '.join(sorted(missing)[:5])}.",
    )
