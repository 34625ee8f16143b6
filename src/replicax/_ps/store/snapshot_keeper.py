"""``SnapshotKeeper``: writes snapshots of a store at intervals, and restores the last one at the start."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, final

from replicax._ps.store.store_contents import Progress
from replicax._src.program_kit.errors import SnapshotError

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
    """Writes the changes every ``interval_s`` on a thread, and at the end. Restores a snapshot when it is
    constructed.

    New shards are in a snapshot 1 s after the last of them is created, because a server that restarts without them is
    useless. Once the coordinator asks for snapshots of epochs, the keeper takes no others, which would delay those. A
    snapshot that fails logs one warning until one succeeds, and ``statistics`` has the error. Training continues, and
    the
    earlier snapshots stay.

    Args:
      store: The store of a task that does not listen yet.
      directory: A folder for this store alone.
      interval_s: The seconds between two snapshots. ``math.inf``: only calls of ``take`` and the end write one.
      restores: False to ignore the snapshots in the folder.
      when_due: Called when a snapshot is due, in place of ``ask``.
      turn: A lock that all keepers of this folder share, so that one writes at a time.

    Attributes:
      restored: The result of the store's ``restore``; None if there was no snapshot.

    Raises:
      SnapshotError: There are snapshots, but none can be read.
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
        self._last = store.progress  # the progress at the newest snapshot
        self._thread = threading.Thread(target=self._run, name="replicax-snapshots", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Takes snapshots at intervals again, because another coordinator has come."""
        self._is_driven = False

    @property
    def is_writing(self) -> bool:
        """True from ``ask`` until the snapshot is written."""
        return self._is_asked or self._is_taking

    def ask(self) -> None:
        """Has the thread write a snapshot if something has changed. Does not wait for it."""
        self._is_asked = True
        self._wake.set()

    def take(self, epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot now. Returns the result of the store's ``snapshot``.

        Raises:
          SnapshotError: The snapshot could not be written.
        """
        with self._lock:
            before = self._store.progress
            self._is_driven = self._is_driven or epoch > 0
            told = self._store.snapshot(self._directory, epoch)
            self._last = before
            self._error = ""
            self._num_taken += 1  # last: a thread that waits for it may read the error
        return told

    def restore(self, epoch: int) -> dict[str, Any] | None:
        """Restores the snapshot of an epoch. Returns the result of the store's ``restore``.

        Raises:
          SnapshotError: There is no snapshot of that epoch.
        """
        with self._lock:
            self.restored = self._store.restore(self._directory, epoch)
            self._last = self._store.progress
        return self.restored

    def close(self) -> None:
        """Ends the thread, and writes a last snapshot if anything has changed.

        A new position counts as a change: with it, a server that restarts lacks only the later updates.
        """
        self.end()
        self._thread.join(_JOIN_S)  # it may wait for the other server; if it is writing, ``take`` waits
        if self._has_changed or (self._holds_shards and self._store.progress.position != self._last.position):
            self._take()

    def end(self) -> None:
        """Stops without a last snapshot, because the store's contents are useless now. Does not wait for the thread."""
        self._is_over = True
        self._wake.set()

    def statistics(self) -> dict[str, Any]:
        """Returns the number of snapshots that were written, and the error of the last one."""
        return {"num_snapshots": self._num_taken, "snapshot_error": self._error}

    @property
    def _holds_shards(self) -> bool:
        return not self._is_driven and bool(self._store.statistics()["shards"])

    @property
    def _has_changed(self) -> bool:
        return self._store.progress[:2] != self._last[:2] and self._holds_shards

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
                self._is_taking, self._is_asked = True, False  # another request may come while it writes
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
