"""``SnapshotKeeper``: writes snapshots of a store at intervals, and restores the last one at the start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, final

from replicax._ps.store.keeper_rules import KeeperRules, Progress
from replicax._src.program_kit.errors import SnapshotError

_log = logging.getLogger("replicax")
_TICK_S = 1.0
_JOIN_S = 1.0


class Kept(Protocol):
    """A source of snapshots: a ``Store``, or a ``GroupCopy``, which has one."""

    @property
    def progress(self) -> Progress: ...
    @property
    def session(self) -> int: ...

    def statistics(self) -> dict[str, Any]: ...
    def snapshot(self, directory: Path, epoch: int = 0, kept_epoch: int = 0) -> dict[str, Any]: ...
    def restore(
        self, directory: Path, epoch: int | None = None, session: int | None = None
    ) -> dict[str, Any] | None: ...


@final
class SnapshotKeeper:
    """Writes the changes every ``interval_s`` on a thread, and at the end. Restores a snapshot when it is
    constructed. ``KeeperRules`` decides.

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
        self._rules_lock = threading.Lock()
        self._rules = KeeperRules(interval_s)
        restored = store.restore(directory) if restores else None
        self._rules.start(time.monotonic(), store.progress, restored)
        self._thread = threading.Thread(target=self._run, name="replicax-snapshots", daemon=True)
        self._thread.start()

    @property
    def restored(self) -> Mapping[str, Any] | None:
        """The description of the snapshot that the store was restored from; None if it has none of its values."""
        instance = self._store.progress.instance
        with self._rules_lock:
            return self._rules.restored_in(instance)

    def begin(self, incarnation: str) -> None:
        """Takes snapshots at intervals again, because a coordinator has come. Earlier requests are late now."""
        with self._rules_lock:
            self._rules.begin(incarnation)

    @property
    def is_writing(self) -> bool:
        """True from ``ask`` until the snapshot is written."""
        with self._rules_lock:
            return self._rules.is_writing

    def ask(self) -> None:
        """Has the thread write a snapshot if something has changed. Does not wait for it."""
        with self._rules_lock:
            self._rules.ask()
        self._wake.set()

    def take(self, epoch: int = 0, kept_epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot now. Returns the result of the store's ``snapshot``.

        Args:
          epoch: The epoch, if a coordinator asks for it; else 0.
          kept_epoch: The last epoch of which all servers have a snapshot; 0 if there is none.

        Raises:
          SnapshotError: The snapshot could not be written, or the coordinator's request is late.
        """
        request = None
        if epoch:
            with self._rules_lock:
                request = self._rules.requested_snapshot(epoch)
        with self._lock:
            before = self._store.progress
            if request is not None:
                with self._rules_lock:
                    self._rules.begins(request)
            told = self._store.snapshot(self._directory, epoch, kept_epoch)
            with self._rules_lock:
                self._rules.wrote(before)
        return told

    def restore(self, epoch: int) -> dict[str, Any] | None:
        """Restores the snapshot of an epoch. Returns the result of the store's ``restore``.

        Raises:
          SnapshotError: There is no snapshot of that epoch, or the coordinator's request is late: another one has
            come, perhaps while the snapshot was read.
        """
        session = self._store.session  # before the request counts: who comes later makes it late
        with self._rules_lock:
            request = self._rules.requested_restore(epoch)
        with self._lock:
            with self._rules_lock:
                self._rules.begins(request)
            restored = self._store.restore(self._directory, epoch, session)
            progress = self._store.progress
            with self._rules_lock:
                self._rules.restored(request, progress, restored)
        return restored

    def close(self) -> None:
        """Ends the thread, and writes a last snapshot if anything has changed."""
        self.end()
        self._thread.join(_JOIN_S)  # it may wait for the other server; if it is writing, ``take`` waits
        if self._is_to_write(self._rules.has_moved):
            self._take()

    def end(self) -> None:
        """Stops without a last snapshot, because the store's contents are useless now. Does not wait for the thread."""
        with self._rules_lock:
            self._rules.end()
        self._wake.set()

    def statistics(self) -> dict[str, Any]:
        """Returns the number of snapshots that were written, and the error of the last one."""
        with self._rules_lock:
            return {"num_snapshots": self._rules.num_written, "snapshot_error": self._rules.error}

    def _is_to_write(self, rule: Callable[[Progress], bool]) -> bool:
        progress = self._store.progress
        with self._rules_lock:
            is_so = rule(progress)
        return is_so and bool(self._store.statistics()["shards"])

    def _run(self) -> None:
        while not self._rules.is_over:
            if not self._wake.wait(min(self._interval_s, _TICK_S)):
                progress = self._store.progress
                with self._rules_lock:
                    is_due = self._rules.tick(time.monotonic(), progress)
                if is_due and self._is_to_write(self._rules.has_changed):
                    self._when_due()
            self._wake.clear()
            with self._rules_lock:
                is_asked = self._rules.takes_ask()
            if is_asked:
                if self._is_to_write(self._rules.has_changed):
                    self._take()
                with self._rules_lock:
                    self._rules.done()

    def _take(self) -> None:
        try:
            self.take()
        except SnapshotError as error:
            with self._rules_lock:
                is_new = self._rules.failed(str(error))
            if is_new:
                _log.warning("%s", error)
