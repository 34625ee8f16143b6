"""``SnapshotKeeper``: takes snapshots of a store from time to time, and begins with the last one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, final

from replicax._src.parameter_servers.errors import SnapshotError
from replicax._src.parameter_servers.store.store_contents import Progress

_log = logging.getLogger("replicax")
_TICK_S = 1.0
_JOIN_S = 1.0


class Kept(Protocol):
    """A source of snapshots: a ``Store``, or a ``GroupCopy``, which has one."""

    @property
    def progress(self) -> Progress: ...

    def statistics(self) -> dict[str, Any]: ...
    def snapshot(self, directory: Path, epoch: int = 0) -> dict[str, Any]: ...
    def restore(self, directory: Path, epoch: int | None = None) -> dict[str, Any] | None: ...


@final
class SnapshotKeeper:
    """Writes what has changed every ``interval_s``, on a thread, and at the end. Restores when it is made.

    Pieces that were made are in a snapshot soon, 1 s after the last of them: who comes back without them is of no use.
    Once the coordinator has asked for a snapshot of an epoch it is the one who asks: others would be in the way of
    those. A snapshot that cannot be written is a warning, one until one can be again, and ``statistics`` says so: the
    training goes on, and the snapshots before are there.

    Args:
      store: The store of a task that does not listen yet.
      directory: A folder of this store alone.
      interval_s: ``math.inf``: only when ``take`` is called, and at the end.
      restores: False: what is in the folder is of no use.
      when_due: Called when a snapshot is due, in place of ``ask``.
      turn: The lock of all keepers that have had this folder: one writes at a time.

    Attributes:
      restored: What ``restore`` of the store told; None if there was no snapshot.

    Raises:
      SnapshotError: There are snapshots, and none can be read.
    """

    def __init__(
        self,
        store: Kept,
        directory: Path,
        interval_s: float,
        *,
        restores: bool = True,
        when_due: Callable[[], None] | None = None,
        turn: threading.Lock | None = None,
    ):
        self._store, self._directory, self._interval_s = store, directory, interval_s
        self._when_due = self.ask if when_due is None else when_due
        self._lock = threading.Lock() if turn is None else turn
        self._wake = threading.Event()
        self._is_over = self._is_asked = self._is_taking = self._is_driven = False
        self._num_taken = 0
        self._error = ""
        self.restored = store.restore(directory) if restores else None
        self._last = store.progress  # of what is in the newest snapshot
        self._thread = threading.Thread(target=self._run, name="replicax-snapshots", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Another coordinator has come: it may leave it to the keeper when there is a snapshot."""
        self._is_driven = False

    @property
    def is_writing(self) -> bool:
        """True from ``ask`` until the snapshot is written."""
        return self._is_asked or self._is_taking

    def ask(self) -> None:
        """Has the thread write a snapshot, if something has changed. Does not wait for it."""
        self._is_asked = True
        self._wake.set()

    def take(self, epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot now; returns what ``snapshot`` of the store tells.

        Raises:
          SnapshotError: It could not be written.
        """
        with self._lock:
            before = self._store.progress
            self._is_driven = self._is_driven or epoch > 0
            told = self._store.snapshot(self._directory, epoch)
            self._last = before
            self._error = ""
            self._num_taken += 1  # last: who waits for it may look at the error
        return told

    def restore(self, epoch: int) -> dict[str, Any] | None:
        """Goes back to a snapshot; returns what ``restore`` of the store tells.

        Raises:
          SnapshotError: There is none of that epoch.
        """
        with self._lock:
            self.restored = self._store.restore(self._directory, epoch)
            self._last = self._store.progress
        return self.restored

    def close(self) -> None:
        """Takes the last one, if there is something to lose, and ends.

        The position is something, too: who comes back lacks only the updates after it.
        """
        self.end()
        self._thread.join(_JOIN_S)  # it may wait for the other server; while it writes, ``take`` waits
        if self._has_changed or (self._holds_pieces and self._store.progress.position != self._last.position):
            self._take()

    def end(self) -> None:
        """Ends, because what is in the store is of no use any more. Does not wait for the thread."""
        self._is_over = True
        self._wake.set()

    def statistics(self) -> dict[str, Any]:
        """Tells how many snapshots were taken, and why the last one failed."""
        return {"num_snapshots": self._num_taken, "snapshot_error": self._error}

    @property
    def _holds_pieces(self) -> bool:
        return not self._is_driven and bool(self._store.statistics()["pieces"])

    @property
    def _has_changed(self) -> bool:
        return self._store.progress[:2] != self._last[:2] and self._holds_pieces

    def _run(self) -> None:
        due, created = time.monotonic() + self._interval_s, self._store.progress.num_created
        while not self._is_over:
            if not self._wake.wait(min(self._interval_s, _TICK_S)):
                before, created = created, self._store.progress.num_created
                has_new = created == before != self._last.num_created and self._interval_s < math.inf
                if has_new or time.monotonic() >= due:
                    if self._has_changed:
                        self._when_due()
                    due = time.monotonic() + self._interval_s
            self._wake.clear()
            if self._is_asked and not self._is_over:
                self._is_taking, self._is_asked = True, False  # it may be asked again while it writes
                if self._has_changed:
                    self._take()
                self._is_taking = False

    def _take(self) -> None:
        try:
            self.take()
        except SnapshotError as error:
            if not self._error and not self._is_over:
                _log.warning("%s", error)
            self._error = str(error)
